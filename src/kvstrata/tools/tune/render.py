"""Tables of tuning results and of the gate experiment, for the terminal and for documents.

    <!-- kvstrata:tune_store -->
    <!-- /kvstrata:tune_store -->

`table` is `speed` (winners against defaults), `configurations`, `rejected`, `limits` (defaults outside the limits of a
search and the fastest configuration inside), `values` (the fastest trial of each value of a parameter) or `metrics`
(from Nsight Compute); for a gate, `rates`. `on` names the machine; `of` names the parameters of `values`,
comma-separated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvstrata.tools.profile.ncu import QUANTITIES
from kvstrata.tools.render import Grid
from kvstrata.tools.results import provenance

from . import decide
from .gates import HARDWARE
from .results import GATE, PREFIX, Gate, Rate, Tuning, load
from .space import show

__all__ = ["COMMANDS", "OPTIONS", "caption", "load", "notes", "table"]

OPTIONS = {"table", "on", "of"}
COMMANDS = {GATE: "tune store --aa 200 --save", f"{PREFIX}*": "tune {} --save"}
Cells = tuple[list[str], list[list[str]]]  # header and rows


def _speed(tuning: Tuning) -> Cells:
    counted = "trials" if any(row.measured is None for row in tuning.rows) else "measured"
    header = ["case", "default us", "95 %", "tuned us", "95 %", "speed-up", counted]
    lines = []
    for row in tuning.rows:
        finished = row.trials["complete"] + row.trials["pruned"] if row.measured is None else row.measured
        tuned = ["default stays", "", ""]
        if row.tuned is not None:
            speed = f"{row.ratio:.2f}x [{row.lo:.2f}, {row.hi:.2f}]"
            tuned = [f"{row.tuned.median:.2f}", f"{row.tuned.lo:.2f}-{row.tuned.hi:.2f}", speed]
        default = [f"{row.default.median:.2f}", f"{row.default.lo:.2f}-{row.default.hi:.2f}"]
        lines.append([row.case, *default, *tuned, f"{finished} of {row.space if row.valid is None else row.valid}"])
    return header, lines


def _configurations(tuning: Tuning) -> Cells:
    lines = [[row.case, show(row.default_choice), show(row.choice)] for row in tuning.rows]
    return ["case", "default", "tuned"], lines


def _rejected(tuning: Tuning) -> Cells:
    kinds = sorted({kind for row in tuning.rows for kind in row.rejected})
    lines = [[row.case, *(str(row.rejected.get(kind, "")) for kind in kinds)] for row in tuning.rows]
    return ["case", *kinds], lines


def _limits(tuning: Tuning) -> Cells:
    header = ["case", "default", "outside the limits by", "fastest inside", "default over it"]
    lines = []
    for row in tuning.rows:
        inside = show(row.choice) if row.choice is not None else "none" if row.outside else "default"
        speed = "" if row.choice is None else f"{row.ratio:.2f}x [{row.lo:.2f}, {row.hi:.2f}]"
        lines.append([row.case, show(row.default_choice), row.outside, inside, speed])
    return header, lines


def _values(tuning: Tuning, names: Sequence[str] = ()) -> Cells:
    """Times relative to the default's; a value that no trial had is left out."""
    header, lines = ["case", "parameter", "fastest trial with each value, over the default"], []
    for row in tuning.rows:
        for name, times in row.values.items():
            if (not names or name in names) and len(times) > 1:
                ranked = sorted(times.items(), key=lambda item: item[1])
                lines.append([row.case, name, ", ".join(f"{value}: {time:.2f}" for value, time in ranked)])
    return header, lines


def _metrics(tuning: Tuning) -> Cells:
    keys = [name for name in QUANTITIES if any(name in m for row in tuning.rows for m in row.metrics.values())]
    header = ["case", "configuration", *(f"{QUANTITIES[k].title} {QUANTITIES[k].unit}".strip() for k in keys)]
    lines = []
    for row in tuning.rows:
        for name, choice in (("default", row.default_choice), ("tuned", row.choice)):
            if name in row.metrics:
                values = row.metrics[name]
                cells = [f"{values[k]:.{QUANTITIES[k].digits}f}" if k in values else "" for k in keys]
                lines.append([row.case, show(choice), *cells])
    return header, lines


def _rates(gate: Gate) -> Cells:
    def share(row: Rate, count: int) -> str:
        from scipy.stats import binomtest

        interval = binomtest(count, row.n).proportion_ci()
        return f"{100 * count / row.n:.1f} % [{100 * interval.low:.1f}, {100 * interval.high:.1f}]"

    header = ["samples", "candidate is", "measured", "experiments", "past the quick gate", "confirmed", "both"]
    lines = []
    for row in gate.rows:
        faster = "the same" if row.factor == 1 else f"{row.factor:g}x as fast"
        measured = "" if row.measured is None else f"{row.measured:.3f}x"
        shares = [share(row, count) for count in (row.quick, row.confirm, row.promoted)]
        lines.append([row.samples, faster, measured, str(row.n), *shares])
    return header, lines


TABLES: dict[str, Callable[[Tuning], Cells]] = {
    "speed": _speed,
    "configurations": _configurations,
    "rejected": _rejected,
    "limits": _limits,
    "values": _values,
    "metrics": _metrics,
}
LABELS = {"configurations": 3, "limits": 4, "values": 3, "metrics": 2}  # number of leading columns that are not figures


def table(result: Tuning | Gate, options: dict[str, str]) -> Grid:
    """A table by the options of a marker: ``table`` (by default rates or speed) and ``of``."""
    title, chosen = caption(result), options.get("table", "rates" if isinstance(result, Gate) else "speed")
    if isinstance(result, Gate):
        if chosen != "rates":
            raise ValueError(f"table {chosen!r}: expected rates")
        return Grid(title, *_rates(result), labels=2)
    if chosen not in TABLES:
        raise ValueError(f"table {chosen!r}: expected one of {', '.join(TABLES)}")
    if chosen == "values":
        cells = _values(result, [name for name in options.get("of", "").split(",") if name])
    else:
        cells = TABLES[chosen](result)
    return Grid(title, *cells, labels=LABELS.get(chosen, 1))


def caption(result: Tuning | Gate) -> str:
    machine, v = result.machine, result.machine["versions"]
    where = f"{result.op} on {machine['name']}, torch {v['torch']}, {provenance(machine)}"
    if isinstance(result, Gate):
        return f"{where}: {decide.QUICK} samples, then {decide.CONFIRM}; rates with their exact 95 % intervals"
    backend, seconds = result.method["backend"], sum(row.seconds for row in result.rows)
    limits = f", limits {gates}" if (gates := result.method.get("gates", HARDWARE)) != HARDWARE else ""
    effort = f"medians of {result.method['final']} fresh samples, {seconds:.0f} s of search"
    return f"{where}, backend {backend}{limits}: {effort}"


def notes(result: Tuning | Gate) -> list[str]:
    return [f"{row.case}: {row.note}" for row in result.rows if row.note] if isinstance(result, Tuning) else []
