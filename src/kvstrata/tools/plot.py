"""Figures for documents: one style for all, and the same bytes for the same data. Needs matplotlib."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def panels(
    target: Path | io.StringIO, count: int, width: float, height: float = 4.2, style: Mapping[str, Any] = {}
) -> Iterator[tuple[Any, list[Any]]]:
    """Figure with ``count`` panels side by side, saved on exit to a file (its suffix is the format) or as SVG text.

    ``style``: matplotlib rc settings.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    kind = target.suffix[1:] if isinstance(target, Path) else "svg"
    with plt.rc_context({"svg.hashsalt": "kvstrata"} | dict(style)):
        figure, axes = plt.subplots(1, count, figsize=(width * count, height), layout="constrained", squeeze=False)
        yield figure, list(axes[0])
        if isinstance(target, Path):
            target.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(target, format=kind, metadata={"Date": None} if kind == "svg" else None, dpi=150)
        plt.close(figure)
