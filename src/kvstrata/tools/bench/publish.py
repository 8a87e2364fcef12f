"""Documents from results: tables between markers and figures, so that no figure in the docs is typed in by hand."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from kvstrata.tools.check import results as checks
from kvstrata.tools.check.results import Checks
from kvstrata.tools.eval import drift
from kvstrata.tools.eval import plot as quality_plot
from kvstrata.tools.eval import render as quality_render
from kvstrata.tools.eval import results as quality
from kvstrata.tools.eval.drift import Drift
from kvstrata.tools.eval.results import Quality
from kvstrata.tools.tune import render as tune_render
from kvstrata.tools.tune import results as tune
from kvstrata.tools.tune.results import Gate, Tuning

from .plot import MEMORY, groups, plot
from .render import OPTIONS, inject, markdown
from .results import Report, load

Result = Report | Quality | Drift | Tuning | Gate | Checks


class View(NamedTuple):
    """What figures of an op show: `y` over `x`, as in plot.py, for each group of the cases `rows`; lines are contenders
    or, with `by`, values of a parameter. `about`: parameters that all cases of a figure share, for its title."""

    x: str = "T"
    y: str = "tb_s"
    rows: str = "*"
    leave_out: tuple[str, ...] = ()
    by: str | None = None
    about: str = ""


SAME = ("pre-sliced", "adaptor", "bare launch", "copy")  # on the GPU as fast as another line of the figure, or no way
VIEWS = {
    "decode": [
        View(y="vs_peer", rows="mixed0.[2345]-B32-*[0-9],K8V8-B32-*", by="kind"),
        View(MEMORY, "us", "mixed0.[23457]*-B32-*[0-9],16bit-B32-*", by="T", about=", B {B}"),
    ],
    "prefill": [View(y="tflop_s", leave_out=("copy", "empty"), about=": {kind}, D {D}")],
    "replay": [View("bs", "us,host", "*x4096", SAME), View("columns", "us,host", "fa-64x*[0-9]", SAME)],
}


def load_all(root: Path) -> list[Result]:
    """Every result under `<root>/<machine>/`, GPUs before CPUs; profiles have a reader of their own."""
    paths = sorted(path for path in root.glob("*/*.json") if not path.stem.startswith("profile_"))
    reports = [_load(path) for path in paths]
    return sorted(reports, key=lambda report: report.machine["slug"].startswith("cpu"))


def _load(path: Path) -> Result:
    if tune.is_ours(path):
        return tune.load(path)
    if checks.is_ours(path):
        return checks.load(path)
    if drift.is_ours(path):
        return drift.load(path)
    return quality.load(path) if quality.is_ours(path) else load(path)


def pick(reports: Iterable[Result], op: str, machine: str | None = None) -> Result:
    """The result of an op, on the machine named or on the first that has one."""
    for report in reports:
        if report.op == op and machine in (None, report.machine["slug"]):
            return report
    command = f"tune {op.removeprefix(tune.PREFIX)}" if op.startswith(tune.PREFIX) else f"bench {op}"
    command = "check OP" if op == checks.OP else command
    command = op if op == drift.OP else command
    raise LookupError(f"no result of {op!r}{f' on {machine}' if machine else ''}: run kvstrata {command} --save")


def _table(report: Result, options: dict[str, str]) -> str:
    if isinstance(report, (Tuning, Gate)):
        return tune_render.markdown(report, options)
    if isinstance(report, Checks):
        return checks.markdown(report)
    if isinstance(report, Drift):
        return drift.markdown(report)
    return quality_render.markdown(report, options) if isinstance(report, Quality) else markdown(report, options)


def render_document(text: str, reports: Sequence[Result]) -> str:
    """The document with every `kvstrata:<op>` block made anew."""
    for op in dict.fromkeys(re.findall(r"<!--\s*kvstrata:([\w-]+)(?=\s)", text)):
        ours = tune_render.OPTIONS if tune.is_ours(Path(op)) else OPTIONS
        ours = checks.OPTIONS if checks.is_ours(Path(op)) else ours
        known = quality_render.OPTIONS if quality.is_ours(Path(op)) else ours
        known = drift.OPTIONS if op == drift.OP else known
        text = inject(text, f"kvstrata:{op}", lambda o, op=op: _table(pick(reports, op, o.get("on")), o), known)  # type: ignore[misc]
    return text


def figures(reports: Iterable[Result], folder: Path, suffix: str = ".svg") -> list[Path]:
    """One figure per op, machine and group of cases that differ in one size alone; one of quality against bytes."""
    made = []
    for report in reports:
        stem = f"{report.op}-{report.machine['slug']}"
        if isinstance(report, (Tuning, Gate, Checks, Drift)):
            continue
        if isinstance(report, Quality):
            made.append(quality_plot.plot(report, folder / f"{stem}{suffix}"))
            continue
        for x, y, rows, leave_out, by, about in VIEWS.get(report.op, [View()]):
            for name, cases in groups(report, x, rows, by).items():
                path = folder / f"{stem}-{name}{suffix}"
                made.append(plot(report, cases, path, x, y, leave_out, by, about.format(**cases[0].params)))
    return made
