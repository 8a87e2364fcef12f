"""Tables from a report: in the terminal, and as Markdown between markers in a document.

A document requests a table between two markers, and `kvstrata report` fills it in:

    <!-- kvstrata:store rows=8x128-fp16-* pivot=us -->
    <!-- /kvstrata:store -->

`rows` and `contenders` are comma-separated globs, `columns` names of COLUMNS, and so is `pivot`: then a row is a case
and each contender has a column or, with `by`, each value of that parameter of the cases. `targets` are parsed by
targets.py. `on` names the machine if there are results of several.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fnmatch import fnmatch
from typing import Any

from kvstrata.tools.render import Grid
from kvstrata.tools.results import provenance

from . import targets
from .results import Against, CaseResult, Report, Row, load

__all__ = ["COLUMNS", "COMMANDS", "OPTIONS", "caption", "grid", "load", "notes", "table", "verdict"]

Cell = Callable[[CaseResult, Row], str]
Cells = tuple[list[str], list[list[str]]]  # header and lines


def _number(value: float | None, digits: int = 2) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f} %"


def _against(a: Against | None, named: bool = False) -> str:
    if a is None:
        return ""
    return f"{a.ratio:.2f}x [{a.lo:.2f}, {a.hi:.2f}]" + (f" {a.name}" if named else "")


def _us(case: CaseResult, row: Row) -> str:
    if row.us is None:
        return f"WRONG: {row.error}"
    return f"{row.us.median:.2f}" + (" (host-bound)" if row.host_bound else "")


def _significance(case: CaseResult, row: Row) -> str:
    a = row.vs_baseline
    return "" if a is None else f"{'' if a.g is None else f'{a.g:.1f}'} / {a.p:.1g}"


def _rate(case: CaseResult, row: Row, each: int = 1) -> str:
    return f"{1e6 * each / row.us.median:,.0f}" if row.us else ""


def _share(case: CaseResult, row: Row) -> str:
    """Time beyond the baseline in percent of the row's time, with its interval."""
    a = row.vs_baseline
    return "" if a is None else f"{100 * (1 - a.ratio):.2f} % [{100 * (1 - a.hi):.2f}, {100 * (1 - a.lo):.2f}]"


def _of_engine(case: CaseResult, row: Row, name: str) -> Any:
    """Value of a parameter that differs between engines, 0 if a row has none."""
    by_row = case.params.get(name)
    return by_row.get(row.name, 0) if isinstance(by_row, dict) else 0


def _batch_time(case: CaseResult, row: Row) -> str:
    """Milliseconds per step, from the time per token."""
    batch = _of_engine(case, row, "batch") if case.params.get("what") == "steps" else 0
    return f"{row.us.median * batch / 1000:.2f}" if row.us and batch else ""


COLUMNS: dict[str, tuple[str, Cell]] = {
    "case": ("case", lambda case, row: case.name),
    "contender": ("contender", lambda case, row: row.name),
    "us": ("us", _us),
    "ms": ("ms", lambda case, row: _number(row.us.median / 1000) if row.us else _us(case, row)),
    "interval": ("95 %", lambda case, row: f"{row.us.lo:.2f}-{row.us.hi:.2f}" if row.us else ""),
    "mean": ("mean", lambda case, row: _number(sum(row.samples) / len(row.samples)) if row.us else ""),
    "slowest": ("slowest", lambda case, row: _number(max(row.samples)) if row.us else ""),
    "mean_ms": ("mean", lambda case, row: _number(sum(row.samples) / len(row.samples) / 1000) if row.us else ""),
    "slowest_ms": ("slowest", lambda case, row: _number(max(row.samples) / 1000) if row.us else ""),
    "p95": ("p95", lambda case, row: _number(row.us.p95) if row.us else ""),
    "tb_s": ("TB/s", lambda case, row: "" if row.tb_s is None else f"{row.tb_s:.3g}"),
    "tflop_s": ("TFLOP/s", lambda case, row: _number(row.tflop_s, 1)),
    "of_peak": ("of copy peak", lambda case, row: _percent(row.of_peak)),
    "less_floor": ("less floor", lambda case, row: _percent(row.less_floor)),
    "of_copy": ("of same-size copy", lambda case, row: _percent(row.vs_copy.ratio if row.vs_copy else None)),
    "over_floor": ("x floor", lambda case, row: _number(row.over_floor)),
    "speedup": ("vs baseline", lambda case, row: _against(row.vs_baseline)),
    "vs_peer": ("vs best peer", lambda case, row: _against(row.vs_peer, named=True)),
    "share": ("beyond baseline", _share),
    "rate": ("a second", _rate),
    "tokens_s": ("tokens/s", lambda case, row: _rate(case, row, case.params["B"]) if "B" in case.params else ""),
    "batch": ("requests", lambda case, row: str(_of_engine(case, row, "batch") or "")),
    "step": ("step ms", _batch_time),
    "tokens": ("tokens/s", _rate),
    "capacity": (
        "tokens in the cache",
        lambda case, row: f"{count:,}" if (count := _of_engine(case, row, "cache_tokens")) else "",
    ),
    "first": ("first token s", lambda case, row: _number(_of_engine(case, row, "first_s") or None)),
    "cache": ("cache GB", lambda case, row: _number(_of_engine(case, row, "cache_bytes") / 1e9 or None)),
    "peak": ("peak GB", lambda case, row: _number(_of_engine(case, row, "peak_bytes") / 1e9 or None)),
    "significance": ("g / p", _significance),
    "host": ("host us", lambda case, row: _number(case.host[row.name].median) if row.name in case.host else ""),
}
DEFAULT = "case,contender,us,interval,tb_s,of_peak,less_floor,of_copy,over_floor,speedup,vs_peer,host"
COMMANDS = {"*": "bench {} --save"}  # anything that no other command claims is a benchmark
OPTIONS = {"rows", "contenders", "columns", "pivot", "by", "targets", "on"}


def table(report: Report, options: dict[str, str]) -> Grid:
    """Table chosen by the options of a marker: cases and contenders, a pivot, or targets."""
    if "targets" in options:
        header, lines = targets.grid(report, options["targets"])
    else:
        columns = options.get("columns", DEFAULT).split(",")
        always = len(columns) if "columns" in options else 2
        pivoted = "pivot" in options
        header, lines = _pivot(report, options) if pivoted else grid(_pairs(report, options), columns, always)
    labels = 1 if "pivot" in options else min(2, len(header))
    selected = options.keys() & {"pivot", "columns", "targets"}
    return Grid(caption(report), header, lines, [] if selected else notes(report), labels)


def caption(report: Report) -> str:
    """Caption of a table: machine, revision, date and method of the measurement."""
    machine, v = report.machine, report.machine["versions"]
    taken = sorted({row.us.n for case in report.cases for row in case.rows if row.us}) or [0]
    samples = f"{taken[0]} to {taken[-1]}" if len(taken) > 1 else str(taken[0])
    measured = dict.fromkeys(case.measured or provenance(machine) for case in report.cases) or [provenance(machine)]
    return (
        f"{report.op} on {machine['name']}, torch {v['torch']}, {'; '.join(measured)}: "
        f"median of {samples} {report.method.get('how', 'cold interleaved samples')}"
        f"{' (quick)' if report.method['quick'] else ''}, "
        f"copy peak {report.peak['tb_s']:.3g} TB/s, floor {report.floor['us']:.2f} us"
    )


def notes(report: Report) -> list[str]:
    """Notes below a table: an unusual floor, absent peers and why, other host times, cases that did not run."""
    usual = report.machine["slug"].startswith("cpu") or report.floor["kernel"] == "empty.cu"
    absent = {f"{name} absent: {why}": None for case in report.cases for name, why in case.absent.items()}
    floor = [] if usual else [f"floor of {report.floor['kernel']}"]
    host = [
        f"host cost in {case.name}: " + ", ".join(f"{name} {us.median:.2f} us" for name, us in case.host.items())
        for case in report.cases
        if case.host
    ]
    later: dict[str, list[str]] = {}
    for case in report.cases:
        if case.measured:
            later.setdefault(case.measured, []).append(case.name)
    again = [f"{', '.join(names)}: {measured}" for measured, names in later.items()]
    return [
        *floor,
        *again,
        *absent,
        *host,
        *(f"{case.name} did not run: {case.error}" for case in report.cases if case.error),
    ]


def verdict(report: Report) -> str:
    """The four lines below a table: correctness, then baseline against ours on the case that moves the most bytes."""
    if report.failures:
        return "\n".join(["Correctness: FAILED", *report.failures])
    passed = "Correctness: PASSED"
    pairs = [(case, case.row("ours"), case.row("baseline")) for case in report.cases]
    full = [(case, ours, base) for case, ours, base in pairs if ours and base and ours.vs_baseline]
    if not full:
        return f"{passed}\nBaseline performance: none, no baseline was correct"
    case, ours, base = max(full, key=lambda pair: pair[0].bytes)
    return "\n".join(
        [
            passed,
            f"Baseline performance: {_us(case, base)} us ({base.name}, {case.name})",
            f"Optimized performance: {_us(case, ours)} us ({ours.name}, {case.name})",
            f"Speedup: {_against(ours.vs_baseline).replace('x', ' x', 1)}",
        ]
    )


def _pairs(report: Report, options: dict[str, str]) -> list[tuple[CaseResult, Row]]:
    def wanted(name: str, option: str) -> bool:
        return any(fnmatch(name, glob) for glob in options.get(option, "*").split(","))

    cases = [case for case in report.cases if wanted(case.name, "rows")]
    return [(case, row) for case in cases for row in case.rows if wanted(row.name, "contenders")]


def grid(pairs: Sequence[tuple[CaseResult, Row]], names: Sequence[str], always: int) -> Cells:
    """Header and lines, one line per contender, without empty columns after the first ``always``."""
    columns = _columns(names)
    lines = [[cell(case, row) for _, cell in columns] for case, row in pairs]
    keep = [i for i in range(len(columns)) if i < always or any(line[i] for line in lines)]
    return [columns[i][0] for i in keep], [[line[i] for i in keep] for line in lines]


def _pivot(report: Report, options: dict[str, str]) -> Cells:
    """Header and lines, one line per case and one column per contender or, with ``by``, per value of that parameter."""
    columns, by = _columns(options["pivot"].split(",")), options.get("by")
    lines: dict[str, dict[str, str]] = {}
    title = "case"
    for case, row in _pairs(report, options):
        line, column = case.name, row.name
        if by:
            if by not in case.params:
                raise ValueError(f"by {by!r}: {case.name} has {', '.join(case.params) or 'no parameters'}")
            others = {key: str(value) for key, value in case.params.items() if key != by}
            title, line, column = " ".join(others), " ".join(others.values()), f"{by} {case.params[by]}"
        cells = lines.setdefault(line, {})
        if column in cells:
            raise ValueError(f"by {by!r}: {case.name}, {row.name} shares its cell; select with rows and contenders")
        cells[column] = ", ".join(filter(None, (cell(case, row) for _, cell in columns)))
    names = list(dict.fromkeys(name for cells in lines.values() for name in cells))
    if by:
        names = [f"{by} {value}" for value in sorted({c.params[by] for c, _ in _pairs(report, options)})]
    head = f"{title} ({', '.join(name for name, _ in columns)})"
    return [head, *names], [[line, *(cells.get(n, "") for n in names)] for line, cells in lines.items()]


def _columns(names: Sequence[str]) -> list[tuple[str, Cell]]:
    if unknown := [name for name in names if name not in COLUMNS]:
        raise ValueError(f"column {unknown[0]!r}: expected one of {', '.join(COLUMNS)}")
    return [COLUMNS[name] for name in names]
