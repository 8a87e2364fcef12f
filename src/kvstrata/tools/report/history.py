"""Our times by revision: the versions of a results file in git, and the current one."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from kvstrata.tools import git
from kvstrata.tools.bench.results import Report, load, loads


@dataclass(frozen=True)
class Point:
    """One version of a result: the measured revision, and our median time in each case."""

    revision: str
    date: str
    us: dict[str, float]
    speedup: float | None  # over the baseline, geometric mean of all cases


def points(path: Path) -> list[Point]:
    """Versions of a result, oldest first, without those that cannot be read; one point outside a git checkout."""
    reports: list[Report] = []
    for version in git.versions(path):
        try:
            reports.append(loads(version.text, path.name))
        except ValueError:
            continue
    present = load(path)
    if not reports or _key(reports[-1]) != _key(present):
        reports.append(present)
    return [_point(report) for report in reports]


def _key(report: Report) -> tuple[object, ...]:
    return report.machine.get("revision"), report.machine["date"]


def _point(report: Report) -> Point:
    ours = {case.name: row for case in report.cases if (row := case.row("ours"))}
    ratios = [row.vs_baseline.ratio for row in ours.values() if row.vs_baseline]
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else None
    revision = (report.machine.get("revision") or "unknown")[:7] + ("+" if report.machine.get("dirty") else "")
    us = {name: row.us.median for name, row in ours.items() if row.us}
    return Point(revision, report.machine["date"][:10], us, mean)
