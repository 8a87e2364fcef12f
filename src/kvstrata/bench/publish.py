"""Documents from results: tables between markers and figures, so that no figure in the docs is typed in by hand."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from kvstrata.bench.plot import groups, plot
from kvstrata.bench.render import OPTIONS, inject, markdown
from kvstrata.bench.results import Report, load
from kvstrata.eval import plot as quality_plot
from kvstrata.eval import render as quality_render
from kvstrata.eval import results as quality
from kvstrata.eval.results import Quality


def load_all(root: Path) -> list[Report | Quality]:
    """Every result under `<root>/<machine>/`, GPUs before CPUs."""
    paths = sorted(root.glob("*/*.json"))
    reports = [quality.load(path) if path.stem == quality.OP else load(path) for path in paths]
    return sorted(reports, key=lambda report: report.machine["slug"].startswith("cpu"))


def pick(reports: Iterable[Report | Quality], op: str, machine: str | None = None) -> Report | Quality:
    """The result of an op, on the machine named or on the first that has one."""
    for report in reports:
        if report.op == op and machine in (None, report.machine["slug"]):
            return report
    raise LookupError(f"no result of {op!r}{f' on {machine}' if machine else ''}: run kvstrata bench {op} --save")


def _table(report: Report | Quality, options: dict[str, str]) -> str:
    return quality_render.markdown(report, options) if isinstance(report, Quality) else markdown(report, options)


def render_document(text: str, reports: Sequence[Report | Quality]) -> str:
    """The document with every `kvstrata:<op>` block made anew."""
    for op in dict.fromkeys(re.findall(r"<!--\s*kvstrata:([\w-]+)(?=\s)", text)):
        known = quality_render.OPTIONS if op == quality.OP else OPTIONS
        text = inject(text, f"kvstrata:{op}", lambda o, op=op: _table(pick(reports, op, o.get("on")), o), known)  # type: ignore[misc]
    return text


def figures(reports: Iterable[Report | Quality], folder: Path, suffix: str = ".svg") -> list[Path]:
    """One figure per op, machine and group of cases that differ in T alone; one of quality against bytes."""
    made = []
    for report in reports:
        stem = f"{report.op}-{report.machine['slug']}"
        if isinstance(report, Quality):
            made.append(quality_plot.plot(report, folder / f"{stem}{suffix}"))
        else:
            made += [plot(report, cases, folder / f"{stem}-{name}{suffix}") for name, cases in groups(report).items()]
    return made
