"""Figures as SVG inside the page: they use the page's colours, light or dark, and its font.

They are narrow, so that their text stays readable on a phone.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from typing import Any

from kvstrata.tools.bench.results import Report
from kvstrata.tools.plot import panels

from .history import Point

WIDTH = 4.7  # inches
COLOURS = ("#e4572e", "#3b8ea5", "#c79a00", "#8f6bb3", "#4a9e5c", "#d1678f", "#7f8c8d", "#a5673f")
MOST_LINES = 6
STYLE = {"svg.fonttype": "none", "font.size": 8.5, "legend.fontsize": 7.5, "axes.spines.top": False,
         "axes.spines.right": False}  # fmt: skip


def draw(key: str, height: float, paint: Callable[[Any, Any], None]) -> str:
    """SVG of what `paint(figure, axes)` draws; `key` keeps its ids distinct from those of other figures."""
    file = io.StringIO()
    with panels(file, 1, WIDTH, height, STYLE | {"svg.hashsalt": key}) as (figure, (axes,)):
        paint(figure, axes)
    return inline(file.getvalue(), key)


def inline(svg: str, key: str) -> str:
    """Turn an SVG of matplotlib into an element of a page: no prologue, unique ids, the page's colours."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>|<style[^>]*>.*?</style>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\b(id|xlink:href|href)="(#?)([^"]+)"', rf'\1="\2{key}-\3"', svg)
    svg = re.sub(r"url\(#([^)]+)\)", rf"url(#{key}-\1)", svg)
    svg = re.sub(
        r'(<svg[^>]*?) width="[^"]*"', r"\1", re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1), count=1
    )
    for colour, variable in (("#ffffff", "var(--card)"), ("#000000", "currentColor"), ("#b0b0b0", "var(--line)")):
        svg = svg.replace(colour, variable)
    return svg.replace("<svg", '<svg role="img"', 1)


def roofline(report: Report, key: str) -> str | None:
    """Bandwidth of every contender against the bytes of the case, bounded by that of a copy."""
    rows = [(case, row) for case in report.cases for row in case.rows if row.us and row.tb_s and row.kind != "probe"]
    names = list(dict.fromkeys(row.name for _, row in rows if row.kind != "variant"))
    peak, floor = report.peak["tb_s"], report.floor["us"]
    if not rows:
        return None

    def paint(figure: Any, axes: Any) -> None:
        sizes = [case.bytes for case, _ in rows]
        span = [min(sizes) * (max(sizes) / min(sizes)) ** (i / 60) for i in range(61)]
        axes.plot(span, [peak] * len(span), color="0.5", linewidth=1, label=f"copy, {peak:.3g} TB/s")
        limit = [1e-6 * n / (floor + 1e-6 * n / peak) for n in span]
        axes.plot(span, limit, "--", color="0.5", linewidth=1, label="copy and an empty kernel")
        for i, name in enumerate(names):
            points = [(case.bytes, row.tb_s) for case, row in rows if row.name == name]
            ours = any(row.kind == "ours" for _, row in rows if row.name == name)
            size, marker = (26, "o") if ours else (16, "sv^Dd<>"[i % 7])
            x, y = zip(*points, strict=True)
            axes.scatter(x, y, s=size, marker=marker, color=COLOURS[i % len(COLOURS)], label=name, zorder=3 + ours)
        axes.set(xscale="log", yscale="log", xlabel="bytes read and written", ylabel="TB/s")
        axes.grid(alpha=0.4)
        figure.legend(loc="outside lower center", ncols=3, frameon=False)

    return draw(key, 3.6, paint)


def speedups(report: Report, key: str) -> str | None:
    """Our speed-up over the baseline and over the best peer, with 95 % intervals; None without rows."""
    cases = [(case, row) for case in report.cases if (row := case.row("ours")) and (row.vs_baseline or row.vs_peer)]
    if not cases:
        return None

    def paint(figure: Any, axes: Any) -> None:
        for place, (_, row) in enumerate(cases):
            for offset, against, colour in ((-0.2, row.vs_baseline, COLOURS[1]), (0.2, row.vs_peer, COLOURS[0])):
                if against is None:
                    continue
                whisker = [[max(against.ratio - against.lo, 0)], [max(against.hi - against.ratio, 0)]]
                axes.barh(place + offset, against.ratio - 1, 0.36, left=1, color=colour)
                axes.errorbar(against.ratio, place + offset, xerr=whisker, color="black", linewidth=0.8, capsize=1.5)
        axes.axvline(1, color="black", linewidth=0.8)
        axes.set_yticks(range(len(cases)), [case.name for case, _ in cases])
        axes.set_ylim(len(cases) - 0.4, -0.6)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:g}")
        axes.set_xlabel("times as fast; to the left of 1: slower")
        axes.grid(axis="x", alpha=0.4)
        bars = [axes.barh([0], [0], left=1, color=colour) for colour in (COLOURS[1], COLOURS[0])]
        figure.legend(
            bars, ["than the baseline", "than the best peer"], loc="outside lower center", ncols=2, frameon=False
        )

    return draw(key, 1.0 + 0.27 * len(cases), paint)


def history(points: Sequence[Point], key: str) -> str | None:
    """Speed of our slowest cases relative to the oldest revision kept; None for fewer than two revisions."""
    if len(points) < 2:
        return None
    first: dict[str, float] = {}
    for point in points:
        for name, us in point.us.items():
            first.setdefault(name, us)
    slowest = sorted(points[-1].us, key=lambda name: -points[-1].us[name])
    chosen = [name for name in slowest if sum(name in point.us for point in points) > 1][:MOST_LINES]

    def paint(figure: Any, axes: Any) -> None:
        for i, name in enumerate(chosen):
            line = [(index, first[name] / point.us[name]) for index, point in enumerate(points) if name in point.us]
            x, y = zip(*line, strict=True)
            axes.plot(x, y, "o-", markersize=3, color=COLOURS[i % len(COLOURS)], label=name)
        axes.axhline(1, color="black", linewidth=0.8)
        axes.set_xticks(range(len(points)), [point.revision for point in points], rotation=45 if len(points) > 5 else 0)
        low, high = axes.get_ylim()
        axes.set_ylim(min(low, 0.95), max(high, 1.05))  # so that noise looks small
        axes.set_ylabel("speed against the oldest")
        axes.grid(alpha=0.4)
        figure.legend(loc="outside lower center", ncols=2, frameon=False)

    return draw(key, 3.0, paint) if chosen else None
