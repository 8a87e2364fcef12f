"""Saved checks: results/<machine>/check.json, one entry per op, with the revision that was checked.

    <!-- kvstrata:check -->
    <!-- /kvstrata:check -->

`on` names the machine. Checking an op again replaces its earlier entry; entries of other ops stay.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from kvstrata.tools import results
from kvstrata.tools.render import Grid

OP = "check"
OPTIONS = {"on"}
COMMANDS = {OP: "check OP --save"}
SANITIZER = "compute-sanitizer, "  # prefix of a step's name, before that of the tool
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")


@dataclass(frozen=True)
class Step:
    """One part of a check. `errors` is empty if it passed; `skipped` is the reason if it was not done."""

    name: str
    done: int = 0
    seconds: float = 0.0
    errors: list[str] = field(default_factory=list)
    skipped: str | None = None

    @property
    def verdict(self) -> str:
        return "FAILED" if self.errors else "skipped" if self.skipped else "passed"


@dataclass(frozen=True)
class Checked:
    """One run of `kvstrata check`; ``machine`` includes the revision and the date."""

    op: str
    machine: dict[str, Any]
    quick: bool
    seed: int
    tools: list[str]
    steps: list[Step]

    @property
    def passed(self) -> bool:
        return not any(step.errors for step in self.steps)


@dataclass(frozen=True)
class Checks:
    """The last check of each op on one machine."""

    rows: list[Checked]
    op: str = OP

    @property
    def machine(self) -> dict[str, Any]:
        return self.rows[0].machine


def save(checked: Checked, root: Path) -> Path:
    """Add a check to the file of its machine; ValueError if that is not such a file."""
    path = root / checked.machine["slug"] / f"{OP}.json"
    kept = [row for row in load(path).rows if row.op != checked.op] if path.exists() else []
    rows = sorted([*kept, checked], key=lambda row: row.op)
    return results.write(path, results.dumps({"op": OP, "rows": [asdict(row) for row in rows]}))


def load(path: Path) -> Checks:
    """Read a file that ``save`` wrote; ValueError for anything else."""
    return results.load(Checks, path, "a result of kvstrata check", op=OP)


def table(checks: Checks, options: dict[str, str] | None = None) -> Grid:
    """One row per op: number of bench cases, of trials in the sweeps and under each tool, and the outcome."""
    header = ["op", "revision", "date", "bench cases", "sweeps", *TOOLS, "outcome"]
    lines = []
    for row in checks.rows:
        steps = {step.name: step for step in row.steps}
        sweeps = [step for name, step in steps.items() if name.startswith("sweep")]
        revision = results.revision_of(row.machine)
        tools = [_cell([steps[SANITIZER + tool]] if SANITIZER + tool in steps else []) for tool in TOOLS]
        cases = _cell([steps["bench cases"]] if "bench cases" in steps else [])
        outcome = "passed" if row.passed else "FAILED"
        lines.append([row.op, revision, row.machine["date"][:10], cases, _cell(sweeps), *tools, outcome])
    return Grid(caption(checks), header, lines, notes(checks, skipped=options is None), labels=3)


def _cell(steps: list[Step]) -> str:
    """Number of checks, or FAILED, or ``skipped`` if none ran."""
    if any(step.errors for step in steps):
        return "FAILED"
    if not steps or all(step.skipped for step in steps):
        return "skipped" if steps else ""
    return str(sum(step.done for step in steps))


def caption(checks: Checks) -> str:
    machine = checks.machine
    return f"checks on {machine['name']}, torch {machine['versions']['torch']}: cases and trials, none of them wrong"


def notes(checks: Checks, skipped: bool = True) -> list[str]:
    """Errors and, with ``skipped``, the reasons why steps were skipped."""
    every = [(row, step) for row in checks.rows for step in row.steps]
    failed = [f"{row.op}, {step.name}: {error}" for row, step in every for error in step.errors]
    return failed + [
        f"{row.op}, {step.name} skipped: {step.skipped}" for row, step in every if skipped and step.skipped
    ]
