"""The regression gate of bench: compares a result with an earlier one, from a file or a git revision.

A case got slower when the 95 % intervals of its medians do not overlap, the medians differ by more than 2 % and a rank
test of the raw samples gives p < 0.05; faster likewise. Everything else is noise.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvstrata.tools.render import Grid
from kvstrata.tools.results import revision_of

from .results import Report
from .stats import Summary, rank_test


@dataclass(frozen=True)
class Outcome:
    """Times of one of our rows in both results; ``verdict`` is slower, faster or same."""

    case: str
    name: str
    before: Summary
    after: Summary
    verdict: str


def outcomes(old: Report, new: Report) -> list[Outcome]:
    """All rows of ours that both have, in the order of the new result; ValueError if they cannot be compared."""
    if (old.op, old.machine["slug"]) != (new.op, new.machine["slug"]):
        raise ValueError(
            f"cannot compare {old.op} on {old.machine['slug']} with {new.op} on {new.machine['slug']}: "
            "expected the same op and machine"
        )
    before, after = _own_rows(old), _own_rows(new)
    if not before.keys() & after.keys():
        raise ValueError("the two results have no case and contender in common")
    compared = []
    for key, row in after.items():
        if key in before:
            (a, x), (b, y) = before[key], row
            differ = (b.lo > a.hi or a.lo > b.hi) and rank_test(x, y) < 0.05
            slower, faster = differ and b.median > 1.02 * a.median, differ and a.median > 1.02 * b.median
            compared.append(Outcome(*key, a, b, "slower" if slower else "faster" if faster else "same"))
    return compared


def _own_rows(report: Report) -> dict[tuple[str, str], tuple[Summary, list[float]]]:
    return {
        (case.name, row.name): (row.us, row.samples)
        for case in report.cases
        for row in case.rows
        if row.kind in ("ours", "variant") and row.us
    }


def table(compared: list[Outcome], old: Report, new: Report) -> Grid:
    rows = [
        [
            o.case,
            o.name,
            _us(o.before),
            _us(o.after),
            f"{100 * (o.after.median / o.before.median - 1):+.1f} %",
            o.verdict,
        ]
        for o in compared
    ]
    counts = {verdict: sum(o.verdict == verdict for o in compared) for verdict in ("slower", "faster", "same")}
    title = f"{new.op} on {new.machine['name']}: {revision_of(old.machine)} before, {revision_of(new.machine)} after"
    header = ["case", "contender", "before, us", "after, us", "time", "verdict"]
    note = ", ".join(f"{n} {verdict}" for verdict, n in counts.items())
    return Grid(title, header, rows, [f"{note}; slower: intervals apart, more than 2 %, rank test p < 0.05"], labels=2)


def _us(us: Summary) -> str:
    return f"{us.median:.2f} [{us.lo:.2f}, {us.hi:.2f}]"
