"""The regression gate of bench: a result against an earlier one, from a file or from a git revision.

A case got slower when the 95 % intervals of its medians do not overlap, the medians differ by more than 2 % and a rank
test of the raw samples gives p < 0.05; faster likewise. Everything else is noise. The rule itself is
`bench.results.compare`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvstrata.tools import git
from kvstrata.tools.render import Grid

from .results import Report, Row, compare, load, loads


@dataclass(frozen=True)
class Outcome:
    """One of our rows in both results; `verdict` is slower, faster or same."""

    case: str
    name: str
    before: Row
    after: Row
    verdict: str


def earlier(reference: str, here: Path) -> Report:
    """The result in a file of that name, or `here` as it was at that revision; LookupError, ValueError or OSError."""
    if Path(reference).is_file():
        return load(reference)
    if Path(reference).suffix == ".json":
        raise FileNotFoundError(f"--against: no file {reference}")
    return loads(git.at(here, reference), f"{here.name} at {reference}")


def outcomes(old: Report, new: Report) -> list[Outcome]:
    """All rows of ours that both have, in the order of the new result; ValueError where they cannot be compared."""
    slower = {(r.case, r.name) for r in compare(old, new)}
    faster = {(r.case, r.name) for r in compare(new, old)}
    before = {(case.name, row.name): row for case in old.cases for row in case.rows if _ours(row)}
    compared = []
    for case in new.cases:
        for row in case.rows:
            key = (case.name, row.name)
            if _ours(row) and key in before:
                verdict = "slower" if key in slower else "faster" if key in faster else "same"
                compared.append(Outcome(*key, before[key], row, verdict))
    return compared


def table(compared: list[Outcome], old: Report, new: Report) -> Grid:
    rows = [
        [o.case, o.name, _us(o.before), _us(o.after), _ratio(o.before, o.after), o.verdict]
        for o in compared
    ]  # fmt: skip
    counts = {verdict: sum(o.verdict == verdict for o in compared) for verdict in ("slower", "faster", "same")}
    title = f"{new.op} on {new.machine['name']}: {_when(old)} before, {_when(new)} after"
    header = ["case", "contender", "before, us", "after, us", "time", "verdict"]
    note = ", ".join(f"{n} {verdict}" for verdict, n in counts.items())
    return Grid(title, header, rows, [f"{note}; slower: intervals apart, more than 2 %, rank test p < 0.05"], names=2)


def _ours(row: Row) -> bool:
    return row.kind in ("ours", "variant") and row.us is not None


def _us(row: Row) -> str:
    assert row.us is not None
    return f"{row.us.median:.2f} [{row.us.lo:.2f}, {row.us.hi:.2f}]"


def _ratio(before: Row, after: Row) -> str:
    assert before.us is not None
    assert after.us is not None
    return f"{100 * (after.us.median / before.us.median - 1):+.1f} %"


def _when(report: Report) -> str:
    machine = report.machine
    return (machine.get("revision") or "unknown")[:10] + ("+changes" if machine.get("dirty") else "")
