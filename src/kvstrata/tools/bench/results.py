"""Results of a bench run: rows with summaries and raw samples, as readable JSON under results/<machine>/<op>.json.

Raw samples are kept (to 0.01 us) so that a later revision can be compared statistically, not only by two medians.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from kvstrata.tools import results

from .stats import Summary


@dataclass(frozen=True)
class Against:
    """Comparison with another row: ``ratio`` > 1 means this row is faster; ``g`` is None without variance."""

    name: str
    ratio: float
    lo: float
    hi: float
    g: float | None
    p: float


@dataclass
class Row:
    """One contender in one case; a contender that is not correct has no times. `kind` is ours, variant, baseline,
    peer or probe; shares are relative to the large copy, `less_floor` after subtracting the empty kernel's time."""

    name: str
    kind: str
    correct: bool = True
    error: str | None = None
    host_bound: bool = False
    us: Summary | None = None
    tb_s: float | None = None
    tflop_s: float | None = None
    of_peak: float | None = None
    less_floor: float | None = None
    over_floor: float | None = None
    vs_copy: Against | None = None
    vs_baseline: Against | None = None
    vs_peer: Against | None = None
    samples: list[float] = field(default_factory=list)


@dataclass
class CaseResult:
    name: str
    params: dict[str, Any]
    bytes: int
    flops: int
    sets: int
    graph: bool
    error: str | None = None  # the case could not be built or timed at all
    absent: dict[str, str] = field(default_factory=dict)
    host: dict[str, Summary] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    seconds: float = 0.0  # duration of the case, including inputs and checks
    measured: str = ""  # revision and date, if they differ from the report's

    def row(self, kind: str) -> Row | None:
        """First correct row of that kind, or None."""
        return next((row for row in self.rows if row.kind == kind and row.us), None)


@dataclass
class Report:
    op: str
    machine: dict[str, Any]
    method: dict[str, Any]
    peak: dict[str, Any]
    floor: dict[str, Any]
    cases: list[CaseResult] = field(default_factory=list)

    @property
    def failures(self) -> list[str]:
        """Errors of cases and of our contenders; empty if all are correct."""
        errors = [f"{case.name}: {case.error}" for case in self.cases if case.error]
        for case in self.cases:
            errors += [
                f"{case.name}: {row.name}: {row.error}"
                for row in case.rows
                if row.kind in ("ours", "variant") and not row.correct
            ]
        return errors


def dumps(report: Report) -> str:
    """Report as JSON, with one line per list of numbers."""
    text = json.dumps(results.trim({"schema": results.SCHEMA, **asdict(report)}), indent=1, allow_nan=False)
    return re.sub(r"\[\n\s*([-+.\deE,\s]+?)\n\s*\]", lambda m: "[" + " ".join(m.group(1).split()) + "]", text) + "\n"


def save(report: Report, root: Path | str) -> Path:
    """Write ``<root>/<machine>/<op>.json``."""
    return results.write(Path(root) / report.machine["slug"] / f"{report.op}.json", dumps(report))


def merge(before: Report, after: Report) -> Report:
    """``before`` with its cases replaced by those of ``after``, and new ones; each has its own revision and date.

    Raises ValueError if ops, machines, methods or versions differ.
    """
    for what in ("op", "machine", "method"):
        a, b = (_setting(getattr(report, what)) for report in (before, after))
        if a != b:
            raise ValueError(f"--only: expected the {what} of the saved result, {a}, to replace cases of it, got {b}")
    new = {case.name: replace(case, measured=results.provenance(after.machine)) for case in after.cases}
    cases = {case.name: case for case in before.cases} | new
    return replace(before, cases=list(cases.values()))


def _setting(value: Any) -> Any:
    """The part that must be equal: name and versions of a machine, all of a method except the selection of cases."""
    if not isinstance(value, dict):
        return value
    if "slug" in value:
        versions = {name: version for name, version in value["versions"].items() if name not in ("kvstrata", "vllm")}
        return {"name": value["name"], **versions}
    return {name: each for name, each in value.items() if name != "only"}


def load(path: Path | str) -> Report:
    """Read a file that `save` wrote; ValueError for anything else."""
    return loads(Path(path).read_text(encoding="utf-8"), str(path))


def loads(text: str, name: str) -> Report:
    """Read the text of a file; ValueError, which names it ``name``, if it is not a result of bench."""
    return results.loads(Report, text, name, "a kvstrata result")
