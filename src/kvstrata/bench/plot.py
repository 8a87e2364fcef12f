"""Figures from a report: each contender against a size, with the copy as the roofline. Needs matplotlib."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from kvstrata.bench.results import CaseResult, Report, Row


def groups(report: Report, x: str = "T") -> dict[str, list[CaseResult]]:
    """Cases that differ in parameter `x` alone, at least two each, by the values of their other parameters."""
    found: dict[str, list[CaseResult]] = defaultdict(list)
    for case in report.cases:
        if x in case.params and case.rows:
            found["-".join(str(v) for k, v in case.params.items() if k != x) or "all"].append(case)
    return {name: sorted(g, key=lambda case: case.params[x]) for name, g in found.items() if len(g) > 1}


def plot(report: Report, cases: list[CaseResult], path: Path, x: str = "T", y: str = "tb_s") -> Path:
    """Draw `y` (tb_s, tflop_s, us) of every contender over `x` with 95 % intervals; `path` ends with the format."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    plt.rcParams["svg.hashsalt"] = "kvstrata"  # the same report gives the same file
    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    for name in dict.fromkeys(row.name for case in cases for row in case.rows):
        points = [(c.params[x], *_value(c, r, y)) for c in cases for r in c.rows if r.name == name and _drawn(r, y)]
        if not points:
            continue
        xs, middle, low, high = zip(*points, strict=True)
        probe = name in ("copy", "empty")
        (line,) = axes.plot(xs, middle, "--" if probe else "o-", color="0.5" if name == "copy" else None, label=name)
        axes.fill_between(xs, low, high, color=line.get_color(), alpha=0.2, linewidth=0)
    if y == "tb_s":
        peak = report.peak["tb_s"]
        axes.axhline(peak, color="0.2", linewidth=1, label=f"copy peak {peak:.3g} TB/s")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    label = {"tb_s": "TB/s", "tflop_s": "TFLOP/s", "us": "us"}[y]
    axes.set(xlabel=x, ylabel=label, title=f"{report.op} on {report.machine['name']}")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None, dpi=150)
    plt.close(figure)
    return path


def _drawn(row: Row, y: str) -> bool:
    return row.us is not None and (y == "us" or getattr(row, y) is not None)


def _value(case: CaseResult, row: Row, y: str) -> tuple[float, float, float]:
    """Middle and interval of the plotted quantity."""
    assert row.us is not None
    us = row.us
    if y == "us":
        return us.median, us.lo, us.hi
    work = 1e-6 * (case.bytes if y == "tb_s" else case.flops)
    return work / us.median, work / us.hi, work / us.lo
