"""Figures for documents: one look for all, and the same bytes for the same data. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def panels(path: Path, count: int, width: float) -> Iterator[tuple[Any, list[Any]]]:
    """A figure with ``count`` panels side by side, saved to ``path`` at the end; the suffix is the format."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    with plt.rc_context({"svg.hashsalt": "kvstrata"}):
        figure, axes = plt.subplots(1, count, figsize=(width * count, 4.2), layout="constrained", squeeze=False)
        yield figure, list(axes[0])
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None, dpi=150)
        plt.close(figure)
