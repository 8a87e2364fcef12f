"""Tables of quality results, for the terminal and for documents.

    <!-- kvstrata:quality table=budgets tokens=4096 -->
    <!-- /kvstrata:quality -->

`table` is `budgets` (every contender at one length, by bytes), `needles`, `pairs` (tiers against one format of the same
width: the difference of `what`, which is `kl` or `nll`, times 1,000) or `packed` (that difference for packed bytes
against simulated rounding); `tokens`, `prompt`, `stretches`, `names` (globs) and `kinds` select rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fnmatch import fnmatch

from kvstrata.tools.render import Grid
from kvstrata.tools.results import provenance

from .results import OP, Needle, Quality, Row, load

__all__ = ["COMMANDS", "OPTIONS", "budgets", "caption", "load", "needles", "table"]

COMMANDS = dict.fromkeys((OP, f"{OP}_*"), "eval --save")
WHAT = {"kl": "KL", "nll": "nll"}
OPTIONS = {"table", "tokens", "names", "kinds", "on", "prompt", "stretches", "what"}


def _select(quality: Quality, options: dict[str, str]) -> list[Row]:
    names, kinds = options.get("names", "*").split(","), options.get("kinds", "").split(",")
    rows = [
        row
        for row in quality.rows
        if any(fnmatch(row.name, name) for name in names)
        and (kinds == [""] or row.kind in kinds)
        and ("tokens" not in options or row.tokens in map(int, options["tokens"].split(",")))
        and ("prompt" not in options or row.prompt == int(options["prompt"]))
        and ("stretches" not in options or row.stretches == int(options["stretches"]))
    ]
    return sorted(rows, key=lambda row: (row.tokens, row.prompt, row.stretches, row.kind != "exact", -row.fraction))


def budgets(quality: Quality, options: dict[str, str]) -> tuple[list[str], list[list[str]]]:
    """One line per row, most bytes first."""
    texts = quality.texts
    header = ["tokens", "cache", "budget", "of 16 bit", *texts, "loss, 95 %", "KL x 1000", "top-1"]
    lines = []
    for row in _select(quality, options):
        loss, low, high = row.loss(quality.exact(row))
        exact = row.kind == "exact"
        lines.append(
            [
                row.length,
                row.name,
                "" if row.budget is None else f"{row.budget:g}",
                f"{row.fraction:.3f}",
                *(f"{row.perplexity(i):.2f}" for i in range(len(texts))),
                "" if exact else f"{100 * loss:+.2f} % [{100 * low:+.2f}, {100 * high:+.2f}]",
                "" if exact else f"{1000 * row.mean_kl:.1f}",
                "" if exact else f"{100 * row.agreement:.1f} %",
            ]
        )
    return header, lines


def needles(quality: Quality, options: dict[str, str]) -> tuple[list[str], list[list[str]]]:
    """One line per contender and length, one column per depth: needles found, mean log-probability of the answer."""
    depths = sorted({n.depth for n in quality.needles})
    header = ["tokens", "cache", "budget", *(f"depth {d:g}" for d in depths)]
    keys = dict.fromkeys((n.tokens, n.name, n.budget) for n in quality.needles)
    lines = []
    for tokens, name, budget in sorted(keys, key=lambda key: (key[0], key[1] != "16 bit", -(key[2] or 0), key[1])):
        by_depth = {n.depth: n for n in quality.needles if (n.tokens, n.name, n.budget) == (tokens, name, budget)}
        cells = [f"{n.found}/{n.asked} ({n.logprob:.1f})" if (n := by_depth.get(d)) else "" for d in depths]
        lines.append([f"{tokens}", name, "" if budget is None else f"{budget:g}", *cells])
    return header, lines


def pairs(quality: Quality, options: dict[str, str]) -> tuple[list[str], list[list[str]]]:
    """Tiers against single formats of the same width: paired differences of KL or log-likelihood."""

    def is_pair(ours: Row, other: Row) -> bool:
        return (ours.kind, other.kind) == ("ours", "variant") and _width(ours) == _width(other)

    return _differences(quality, options, is_pair)


def packed(quality: Quality, options: dict[str, str]) -> tuple[list[str], list[list[str]]]:
    """Packed bytes against simulated rounding of the same format: paired differences."""

    def is_pair(ours: Row, other: Row) -> bool:
        return ours.name.startswith("uniform ") and other.name == ours.name.replace("uniform", "simulated")

    return _differences(quality, options, is_pair)


def _width(row: Row) -> str:
    return row.name.rpartition(", ")[2]


def _differences(
    quality: Quality, options: dict[str, str], is_pair: Callable[[Row, Row], bool]
) -> tuple[list[str], list[list[str]]]:
    what = options.get("what", "kl")
    if what not in WHAT:
        raise ValueError(f"what {what!r}: expected one of {', '.join(WHAT)}")
    rows = [row for row in _select(quality, options) if row.name.endswith("bits")]
    header = ["cache", "against", *(f"{WHAT[what]}, {text}" for text in [*quality.texts, "all"])]
    lines = []
    for ours in rows:
        for other in rows:
            if ours.setting != other.setting or not is_pair(ours, other):
                continue
            differences = [ours.difference(other, what, text) for text in [*range(len(quality.texts)), None]]
            cells = [f"{1000 * m:+.1f} [{1000 * low:+.1f}, {1000 * high:+.1f}]" for m, low, high in differences]
            lines.append([ours.name, other.name.rpartition(", ")[0], *cells])
    return header, lines


TABLES = {"budgets": budgets, "needles": needles, "pairs": pairs, "packed": packed}


def caption(quality: Quality, shown: Sequence[Row | Needle] = ()) -> str:
    """Caption of a table: model, machine, revisions and dates of the ``shown`` rows, peers that could not run."""
    machine = quality.machine
    measured = [row.measured or provenance(machine) for row in shown] or [provenance(machine)]
    dates = {one.rpartition(", ")[2] for one in measured}
    revisions = list(dict.fromkeys(one.rpartition(", ")[0].removeprefix("revision ") for one in measured))
    what = "revision" if len(revisions) == 1 else "revisions"
    when = " to ".join(sorted({min(dates), max(dates)}))
    away = "".join(f"; {name} absent: {why}" for name, why in quality.absent.items())
    return f"quality of {quality.model} on {machine['name']}, {what} {', '.join(revisions)}, {when}{away}"


def table(quality: Quality, options: dict[str, str]) -> Grid:
    """Table chosen by the options of a marker; the default ``table`` is ``budgets``."""
    if unknown := set(options) - OPTIONS:
        raise ValueError(f"option {min(unknown)!r}: expected one of {', '.join(sorted(OPTIONS))}")
    chosen = options.get("table", "budgets")
    if chosen not in TABLES:
        raise ValueError(f"table {chosen!r}: expected one of {', '.join(TABLES)}")
    shown = quality.needles if chosen == "needles" else _select(quality, options)
    return Grid(caption(quality, shown), *TABLES[chosen](quality, options), labels=2)
