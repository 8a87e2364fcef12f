"""Targets, and whether a report meets them: a table from lines such as

    fa-64x4096: host kvstrata / host bare launch <= 1.3

A line has the case, two times as a ratio, and the upper or lower bound of the ratio. A time is a contender's median
(`host` or `gpu`), `mean` or `slowest`; or `bytes`, the bytes of the case at the copy peak; or a number, as in `60 us`.
`+` adds them. Lines are separated by semicolons.
"""

from __future__ import annotations

import re

from .results import CaseResult, Report

LINE = re.compile(r"(\S+):\s+(.+?)\s+/\s+(.+?)\s+(<=|>=)\s+([\d.]+)")
Range = tuple[float, float, float]  # median and the ends of its 95 % interval, in us


def grid(report: Report, text: str) -> tuple[list[str], list[list[str]]]:
    """Header and lines; the range of a ratio covers the ends of both intervals, so it is wider than 95 %."""
    lines = []
    for line in filter(None, (line.strip() for line in text.split(";"))):
        if not (match := LINE.fullmatch(" ".join(line.split()))):
            raise ValueError(f"target {line!r}: expected 'case: time / time <= number' or '>='")
        name, over, under, sign, aim = match.groups()
        case = next((case for case in report.cases if case.name == name), None)
        if case is None:
            raise ValueError(f"target {line!r}: no case {name!r}")
        a, b = _time(report, case, over), _time(report, case, under)
        ratio = a[0] / b[0]
        met = ratio <= float(aim) if sign == "<=" else ratio >= float(aim)
        reached = [f"{ratio:.2f}", f"{a[1] / b[2]:.2f}-{a[2] / b[1]:.2f}"]
        shown = " / ".join(f"({text})" if "+" in text else text for text in (over, under))
        lines.append([shown, name, f"{a[0]:.2f} / {b[0]:.2f}", f"{sign} {aim}", *reached,
                      "met" if met else "missed"])  # fmt: skip
    return ["ratio", "case", "us", "aim", "reached", "range", ""], lines


def _time(report: Report, case: CaseResult, text: str) -> Range:
    parts = [_part(report, case, part.strip()) for part in text.split("+")]
    return sum(p[0] for p in parts), sum(p[1] for p in parts), sum(p[2] for p in parts)


def _part(report: Report, case: CaseResult, text: str) -> Range:
    if text == "bytes":
        return 3 * (1e-6 * case.bytes / report.peak["tb_s"],)
    where, _, name = text.partition(" ")
    if name == "us":
        return 3 * (float(where),)
    if where in ("mean", "slowest"):
        samples = next((row.samples for row in case.rows if row.name == name and row.us), None)
        if samples is None:
            raise ValueError(f"time {text!r}: {case.name} has no such row")
        return 3 * (sum(samples) / len(samples) if where == "mean" else max(samples),)
    times = {"host": case.host, "gpu": {row.name: row.us for row in case.rows if row.us}}
    if where not in times:
        raise ValueError(f"time {text!r}: expected host, gpu, mean or slowest and a contender, bytes or us")
    us = times[where].get(name)
    if us is None:
        raise ValueError(f"time {text!r}: {case.name} has {', '.join(times[where]) or 'none'}")
    return us.median, us.lo, us.hi
