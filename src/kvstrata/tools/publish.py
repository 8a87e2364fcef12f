"""Documents from results: tables between markers, and figures, so that no number in the docs is typed by hand."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Protocol

from kvstrata.tools.bench import plot_engines
from kvstrata.tools.bench import render as bench
from kvstrata.tools.bench.plot import MEMORY, View, groups, plot
from kvstrata.tools.bench.results import Report
from kvstrata.tools.check import results as check
from kvstrata.tools.check.results import Checks
from kvstrata.tools.eval import drift
from kvstrata.tools.eval import plot as quality_plot
from kvstrata.tools.eval import render as quality
from kvstrata.tools.eval.drift import Drift
from kvstrata.tools.eval.results import Quality
from kvstrata.tools.render import Grid, inject
from kvstrata.tools.tune import render as tune
from kvstrata.tools.tune.results import PREFIX, Gate, Tuning

Result = Report | Quality | Drift | Tuning | Gate | Checks


class Kind(Protocol):
    """Results of one command: a module that recognises its files, reads them and renders tables."""

    OPTIONS: set[str]  # options of a marker
    COMMANDS: dict[str, str]  # by glob of a result's name: the command that writes it, with the op at {}

    def load(self, path: Path) -> Any: ...
    def caption(self, result: Any) -> str: ...
    def table(self, result: Any, options: dict[str, str]) -> Grid: ...


KINDS: tuple[Kind, ...] = (tune, check, drift, quality, bench)  # the first that recognises a name is used


NOT_DRAWN = ("pre-sliced", "adaptor", "bare launch", "copy")  # on the GPU as fast as another line, or a probe
ENGINES = "vllm"  # its contenders are engines, with their own batch sizes
VIEWS = {
    "decode": [
        View(y="vs_peer", rows="mixed0.[2345]-B32-*[0-9],K8V8-B32-*", by="kind"),
        View(MEMORY, "us", "mixed0.[23457]*-B32-*[0-9],16bit-B32-*", by="T", about=", B {B}"),
    ],
    "prefill": [View(y="tflop_s", leave_out=("copy", "empty"), about=": {kind}, D {D}")],
    "replay": [View("bs", "us,host", "*x4096", NOT_DRAWN), View("columns", "us,host", "fa-64x*[0-9]", NOT_DRAWN)],
}


def kind_of(name: str) -> Kind:
    """Kind of the results of this name."""
    return next(kind for kind in KINDS if any(fnmatch(name, glob) for glob in kind.COMMANDS))


def load_all(root: Path) -> list[Result]:
    """Every result under ``<root>/<machine>/`` except profiles, GPUs before CPUs."""
    paths = sorted(path for path in root.glob("*/*.json") if not path.stem.startswith("profile_"))
    reports: list[Result] = [kind_of(path.stem).load(path) for path in paths]
    return sorted(reports, key=lambda report: report.machine["slug"].startswith("cpu"))


def find_result(reports: Iterable[Result], op: str, machine: str | None = None) -> Result:
    """The result of an op on the named machine, or on the first that has one."""
    for report in reports:
        if report.op == op and machine in (None, report.machine["slug"]):
            return report
    where = f" on {machine}" if machine else ""
    command = next(command for glob, command in kind_of(op).COMMANDS.items() if fnmatch(op, glob))
    raise LookupError(f"no result of {op!r}{where}: run kvstrata {command.format(op.removeprefix(PREFIX))}")


def render_document(text: str, reports: Sequence[Result]) -> str:
    """Document with every ``kvstrata:<op>`` block rendered again."""
    for op in dict.fromkeys(re.findall(r"<!--\s*kvstrata:([\w-]+)(?=\s)", text)):
        kind = kind_of(op)

        def fill(options: dict[str, str], kind: Kind = kind, op: str = op) -> str:
            return kind.table(find_result(reports, op, options.get("on")), options).document()

        text = inject(text, f"kvstrata:{op}", fill, kind.OPTIONS)
    return text


def figures(reports: Iterable[Result], folder: Path) -> list[Path]:
    """One figure per op, machine and set of cases that differ in one size; one of quality against bytes."""
    paths = []
    for report in reports:
        stem = f"{report.op}-{report.machine['slug']}"
        if isinstance(report, (Tuning, Gate, Checks, Drift)):
            continue
        if isinstance(report, Quality):
            paths.append(quality_plot.plot(report, folder / f"{stem}.svg"))
            continue
        if report.op == ENGINES:
            paths.append(plot_engines.plot(report, folder / f"{stem}.svg"))
            continue
        for view in VIEWS.get(report.op, [View()]):
            for name, cases in groups(report, view).items():
                paths.append(plot(report, cases, folder / f"{stem}-{name}.svg", view))
    return paths
