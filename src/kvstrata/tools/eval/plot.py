"""Figure of quality over bytes: one line per kind of cache, one panel per length. Needs matplotlib."""

from __future__ import annotations

import io
from collections import defaultdict
from pathlib import Path
from typing import TypeVar

from kvstrata.tools.plot import panels

from .results import Quality, Row

FAMILIES = {"ours": "kvstrata", "baseline": "KIVI-style"}


def family(row: Row) -> str:
    """Line of the figure that a row belongs to: variants by name, peers by backend, single formats together."""
    if row.name.startswith("simulated "):
        return f"simulated, {row.options['scales']} scales" if "scales" in row.options else "simulated rounding"
    if row.kind == "peer":
        return " ".join(row.name.split()[:2])
    if row.name.startswith("uniform "):
        return "one format for all"
    return FAMILIES.get(row.kind, row.name)


Target = TypeVar("Target", Path, io.StringIO)


def plot(quality: Quality, path: Target) -> Target:
    """Draw loss of perplexity over bytes relative to 16 bit, to a file (its suffix is the format) or as SVG text."""
    sizes = sorted({(row.tokens, row.prompt, row.stretches, row.length) for row in quality.rows})
    ours_first = sorted(
        {family(row) for row in quality.rows if row.kind != "exact"}, key=lambda name: (name != "kvstrata", name)
    )
    colours = {name: f"C{i}" for i, name in enumerate(ours_first)}  # same colours in every panel
    with panels(path, len(sizes), 5.5) as (_, all_axes):
        for axes, (*_, length) in zip(all_axes, sizes, strict=True):
            lines: dict[str, list[tuple[float, float, float, float]]] = defaultdict(list)
            for row in quality.rows:
                if row.length == length and row.kind != "exact":
                    loss, low, high = (100 * x for x in row.loss(quality.exact(row)))
                    lines[family(row)].append((row.fraction, loss, low, high))
            for name in sorted(lines, key=ours_first.index):
                x, middle, lower, upper = zip(*sorted(lines[name]), strict=True)
                linewidth, zorder = (2, 3) if name == "kvstrata" else (1, 2)
                axes.plot(x, middle, "o-", label=name, color=colours[name], linewidth=linewidth, zorder=zorder)
                axes.fill_between(x, lower, upper, color=colours[name], alpha=0.15, linewidth=0)
            axes.set_yscale("symlog", linthresh=1)
            axes.set(
                xlabel="bytes of 16 bit, everything counted", ylabel="perplexity lost, %", title=f"{length} tokens"
            )
            axes.grid(alpha=0.3)
            if axes.get_legend_handles_labels()[0]:  # empty if only 16 bit was measured
                axes.legend(fontsize=8, loc="best")
    return path
