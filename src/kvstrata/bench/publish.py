"""Documents from results: tables between markers and figures, so that no figure in the docs is typed in by hand."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from kvstrata.bench.plot import groups, plot
from kvstrata.bench.render import inject, markdown
from kvstrata.bench.results import Report, load


def load_all(root: Path) -> list[Report]:
    """Every result under `<root>/<machine>/`, GPUs before CPUs."""
    reports = [load(path) for path in sorted(root.glob("*/*.json"))]
    return sorted(reports, key=lambda report: report.machine["slug"].startswith("cpu"))


def pick(reports: Iterable[Report], op: str, machine: str | None = None) -> Report:
    """The result of an op, on the machine named or on the first that has one."""
    for report in reports:
        if report.op == op and machine in (None, report.machine["slug"]):
            return report
    raise LookupError(f"no result of {op!r}{f' on {machine}' if machine else ''}: run kvstrata bench {op} --save")


def render_document(text: str, reports: list[Report]) -> str:
    """The document with every `kvstrata:<op>` block made anew."""
    for op in dict.fromkeys(re.findall(r"<!--\s*kvstrata:([\w-]+)(?=\s)", text)):
        text = inject(text, f"kvstrata:{op}", lambda o, op=op: markdown(pick(reports, op, o.get("on")), o))  # type: ignore[misc]
    return text


def figures(reports: Iterable[Report], folder: Path, suffix: str = ".svg") -> list[Path]:
    """One figure per op, machine and group of cases that differ in T alone."""
    return [
        plot(report, cases, folder / f"{report.op}-{report.machine['slug']}-{name}{suffix}")
        for report in reports
        for name, cases in groups(report).items()
    ]
