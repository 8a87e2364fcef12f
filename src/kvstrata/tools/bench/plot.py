"""Figures from a report: contenders against a size, as bandwidth with the copy as the roofline, or as microseconds of
device and host; or times against the memory of a KV cache. Needs matplotlib."""

from __future__ import annotations

import math
from collections import defaultdict
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

from kvstrata.tools.plot import panels

from .results import CaseResult, Report, Row
from .stats import Summary

PROBES = ("copy", "empty")
MEMORY = "memory"  # as x: bytes of a case as a share of those of its K and V at 16 bit, instead of a parameter
CACHE = ("B", "T", "kv_heads", "head_dim")  # parameters that determine these bytes
LABELS = {
    "tb_s": "TB/s",
    "tflop_s": "TFLOP/s",
    "us": "device us",
    "host": "host us",
    "vs_peer": "times as fast as the fastest peer",
}


class View(NamedTuple):
    """Figures of an op: ``y`` (names of LABELS, comma-separated, one panel each) over the parameter ``x``.

    There is one figure for each group of the cases ``rows``, with 95 % intervals. Lines are the contenders except
    ``leave_out`` or, with ``by``, ours for each value of that parameter. ``about`` formats the end of the title.
    """

    x: str = "T"
    y: str = "tb_s"
    rows: str = "*"
    leave_out: tuple[str, ...] = ()
    by: str | None = None
    about: str = ""


def groups(report: Report, view: View) -> dict[str, list[CaseResult]]:
    """Cases that differ only in `x` (and in `by`), at least two each, by the values of their other parameters."""
    x, _, rows, _, by, _ = view
    by_group: dict[str, list[CaseResult]] = defaultdict(list)
    needed, free = (set(CACHE), {"kind", by}) if x == MEMORY else ({x}, {x, by})
    for case in report.cases:
        if needed <= case.params.keys() and case.rows and any(fnmatch(case.name, glob) for glob in rows.split(",")):
            others = [str(v) for k, v in case.params.items() if k not in free]
            by_group["-".join([MEMORY, *others] if x == MEMORY else others) or "all"].append(case)
    return {name: sorted(g, key=lambda case: _x_value(case, x)) for name, g in by_group.items() if len(g) > 1}


def _x_value(case: CaseResult, x: str) -> float:
    if x != MEMORY:
        return case.params[x]
    return case.bytes / (4 * math.prod(case.params[name] for name in CACHE))


def plot(report: Report, cases: list[CaseResult], path: Path, view: View) -> Path:
    """Draw one group of cases; the suffix of ``path`` is the format."""
    ys, by = view.y.split(","), view.by
    lines: dict[str, list[tuple[CaseResult, Row]]] = defaultdict(list)
    for case in cases:
        for row in case.rows:
            if row.name not in view.leave_out and (by is None or row.kind == "ours"):
                lines[row.name if by is None else _label(by, case.params[by])].append((case, row))
    title = f"{report.op} on {report.machine['name']}{view.about.format(**cases[0].params)}"
    with panels(path, len(ys), 7 if len(ys) == 1 else 5) as (figure, every):
        for axes, one in zip(every, ys, strict=True):
            _panel(report, lines, axes, view.x, one)
        if len(ys) == 1:
            every[0].set(title=title)
            if every[0].get_legend_handles_labels()[0]:  # none if no case ran
                every[0].legend(fontsize=8, loc="best")  # explicit, else slow machines get a warning
        else:
            figure.suptitle(title)
            figure.legend(*every[0].get_legend_handles_labels(), fontsize=8, loc="outside right center")
    return path


def _label(name: str, value: object) -> str:
    return value if isinstance(value, str) else f"{name} {value}"


def _panel(report: Report, lines: dict[str, list[tuple[CaseResult, Row]]], axes: Any, x: str, y: str) -> None:
    for name, pairs in lines.items():
        points = [(_x_value(case, x), *_value(case, row, y)) for case, row in pairs if _has_value(case, row, y)]
        if not points:
            if name not in PROBES:
                axes.plot([], [])  # keeps the colours of the neighbouring panel
            continue
        xs, middle, low, high = zip(*points, strict=True)
        dash, colour = "--" if name in PROBES else "o-", "0.5" if name == "copy" else None
        (line,) = axes.plot(xs, middle, dash, color=colour, label=name)
        axes.fill_between(xs, low, high, color=line.get_color(), alpha=0.2, linewidth=0)
        if x == MEMORY:
            others = [row.us.median for row in pairs[-1][0].rows if row.kind in ("peer", "baseline") and row.us]
            axes.plot([1.0] * len(others[:1]), [min(others)] if others else [], "x", color=line.get_color())
    if y == "tb_s":
        peak = report.peak["tb_s"]
        axes.axhline(peak, color="0.2", linewidth=1, label=f"copy peak {peak:.3g} TB/s")
    sizes = sorted({_x_value(case, x) for pairs in lines.values() for case, _ in pairs})
    if x == MEMORY:
        axes.set_yscale("log", base=2)
        axes.yaxis.set_major_formatter("{x:g}")
        axes.set(xlabel="bytes of K and V as a share of 16 bit; x: the fastest peer, at 16 bit", ylabel=LABELS[y])
        axes.grid(alpha=0.3)
        return
    axes.set_xscale("log", base=2)
    if y == "vs_peer":
        axes.axhline(1.0, color="0.2", linewidth=1, label="the fastest peer")
        axes.set_ylim(bottom=0)
        axes.set_xticks(sizes, labels=map(str, sizes))
    else:
        axes.set_yscale("log")
        if y == "tflop_s" or len(axes.figure.axes) > 1:
            _plain_ticks(axes, sizes)
    axes.set(xlabel=x, ylabel=LABELS[y])
    axes.grid(alpha=0.3)


def _plain_ticks(axes: Any, sizes: list[float]) -> None:
    """Show sizes as they are, values as 1, 2, 5, 10, ...: powers are hard to read if a panel spans one or two."""
    from matplotlib import ticker

    axes.set_xticks(sizes, labels=map(str, sizes), fontsize=8)
    axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}"))
    axes.minorticks_off()


def _has_value(case: CaseResult, row: Row, y: str) -> bool:
    if y == "host":
        return row.name in case.host
    return row.us is not None and (y == "us" or getattr(row, y) is not None)


def _value(case: CaseResult, row: Row, y: str) -> tuple[float, float, float]:
    """Median and interval of the plotted quantity."""
    if y == "vs_peer":
        assert row.vs_peer is not None
        return row.vs_peer.ratio, row.vs_peer.lo, row.vs_peer.hi
    us = case.host[row.name] if y == "host" else row.us
    assert isinstance(us, Summary)
    if y in ("us", "host"):
        return us.median, us.lo, us.hi
    work = 1e-6 * (case.bytes if y == "tb_s" else case.flops)
    return work / us.median, work / us.hi, work / us.lo
