"""Runs cases: build, check every contender on every input set, time them interleaved, check again, compare.

A contender whose output is wrong, before or after the timing, gets a row without a speed. A failed kernel is only
reported when the host waits for the device, so each case and each check ends with a wait: the error belongs to that
case.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatch
from typing import Any, TypeVar

import torch

from .case import Bench, Case
from .clock import Call
from .machine import describe, release
from .probes import copy_bandwidth, copy_call, empty_call, floor
from .results import Against, CaseResult, Report, Row
from .stats import hedges_g, rank_test, ratio, summary
from .timer import Timer

ROUNDS = {"cuda": (200, 40), "cpu": (30, 7)}  # full, quick
PROBES = ("copy", "empty")
T = TypeVar("T")


def run(
    cases: Iterable[Case],
    device: torch.device | str,
    quick: bool = False,
    only: str = "*",
    *,
    timer: Timer | None = None,
    revision: str | None = None,
    after_case: Callable[[Report], object] = lambda report: None,
    seconds: float = math.inf,
) -> Report:
    """Measure the cases whose name matches `only`; `after_case` receives the report as it grows.

    No case begins after `seconds`, or after one that broke the device: those left out have an error that says so.
    """
    end = time.monotonic() + seconds
    chosen = select(cases, only)
    timer = timer or Timer(device)
    rounds = ROUNDS[timer.device.type][quick]
    method = {"rounds": rounds, "quick": quick, "flush_bytes": timer.flush_bytes, "only": only}
    report = new_report(chosen[0].op, timer, method, revision)
    broken = ""  # the case after which the device only returns its error
    for case in _progress(chosen):
        result = CaseResult(case.name, case.params, case.bytes, case.flops, case.sets, case.graph)
        if broken:
            result.error = f"left out: the device failed in {broken}"
        elif time.monotonic() > end:
            result.error = f"left out: the {seconds:g} s of this run were over"
        else:
            result = measure(case, timer, rounds, report.peak["tb_s"])
            broken = case.name if _device_failed(timer) else ""
        report.cases.append(result)
        after_case(report)
        if not broken:
            release(timer.device)
    return report


def new_report(op: str, timer: Timer, method: dict[str, Any], revision: str | None) -> Report:
    """A report without cases: machine, method, copy bandwidth and launch floor."""
    peak, floor_us = copy_bandwidth(timer), floor(timer)
    release(timer.device)
    return Report(op, describe(timer.device, revision), method, peak, floor_us)  # clocks of a busy device


def select(cases: Iterable[T], only: str, name: str = "name") -> list[T]:
    """Cases whose attribute ``name`` matches a glob; ValueError lists the names if none does."""
    cases = list(cases)
    names = [getattr(case, name) for case in cases]
    chosen = [case for case, own in zip(cases, names, strict=True) if fnmatch(own, only)]
    if not chosen:
        raise ValueError(f"no case matches {only!r}; there are: {', '.join(names) or 'none'}")
    return chosen


def measure(case: Case, timer: Timer, rounds: int, peak: float) -> CaseResult:
    """Measure one case; an error that is not a contender's own goes to `error`, and the run continues."""
    result = CaseResult(case.name, case.params, case.bytes, case.flops, case.sets, case.graph)
    begin = time.monotonic()
    try:
        _measure(case, timer, rounds, peak, result)
        timer.clock.synchronize()
    except Exception as error:
        result.error, result.rows = _message(error), []
    result.seconds = time.monotonic() - begin
    return result


def _measure(case: Case, timer: Timer, rounds: int, peak: float, result: CaseResult) -> None:
    bench = case.build(timer.device)
    if case.wall:
        timer = timer.by_wall()
    if clash := set(PROBES) & bench.contenders.keys():
        raise ValueError(f"{', '.join(clash)}: these names are reserved for probes")
    if missing := {bench.ours, bench.baseline, *bench.variants} - bench.contenders.keys():
        raise ValueError(f"not among the contenders: {', '.join(sorted(missing))}")
    result.absent = bench.absent
    calls = dict(bench.contenders)
    errors: dict[str, str] = {}
    if case.graph and timer.device.type == "cuda":
        calls, errors = _captured(calls, timer, case.sets)
    errors |= _verify(timer, bench, calls, case.sets)
    timed = {name: call for name, call in calls.items() if name not in errors}
    timed["copy"] = copy_call(case.bytes, case.sets, timer.device)
    timed["empty"] = empty_call(timer.device)[0]
    samples = timer.sample(timed, case.rounds or rounds, case.sets, seconds=case.seconds, before=bench.before)
    correct = {name: call for name, call in calls.items() if name not in errors}
    errors |= _verify(timer, bench, correct, case.sets)
    for name in [*bench.contenders, *PROBES]:
        row = Row(name, _kind(name, bench), name not in errors, errors.get(name), name in timer.host_bound)
        if row.correct:
            row.us, row.samples = summary(samples[name]), samples[name].tolist()
        result.rows.append(row)
    _rate(result, case, peak)
    if timer.device.type == "cuda":  # on a CPU the time itself is host time
        right = {name: call for name, call in bench.host.items() if name not in errors}
        before = bench.before if bench.burst == 1 else None
        taken = timer.host(right, case.sets, bench.bursts, bench.burst, before, case.seconds)
        result.host = {name: summary(us) for name, us in taken.items()}


def _captured(calls: dict[str, Call], timer: Timer, sets: int) -> tuple[dict[str, Call], dict[str, str]]:
    captured, errors = {}, {}
    for name, call in calls.items():
        try:
            captured[name] = timer.capture(call, sets)
        except Exception as error:
            errors[name] = f"cannot be captured: {_message(error)}"
    return captured, errors


def verify(bench: Bench, calls: dict[str, Call], sets: int, wait: Callable[[], None] = lambda: None) -> dict[str, str]:
    """Poison, run and check every contender on every input set; returns the messages of those that fail.

    `wait` is called after each contender and raises the errors of its kernels.
    """
    errors = {}
    for name, call in calls.items():
        try:
            for i in range(sets):
                bench.poison(name, i)
                bench.check(name, i, call(i))
            wait()
        except Exception as error:
            errors[name] = _message(error)
    return errors


def _verify(timer: Timer, bench: Bench, calls: dict[str, Call], sets: int) -> dict[str, str]:
    """`verify`; raises RuntimeError, naming the contender, if one of them broke the device."""
    errors = verify(bench, calls, sets, timer.clock.synchronize)
    if errors and _device_failed(timer):
        name, message = next(iter(errors.items()))
        raise RuntimeError(f"{name}: {message}")
    return errors


def _rate(result: CaseResult, case: Case, peak: float) -> None:
    """Fill in bandwidth and comparisons of the rows that have times."""
    compare(result)
    timed = {row.name: row for row in result.rows if row.us}
    floor_us = _median(timed["empty"])
    for row in timed.values():
        t = _median(row)
        row.over_floor = t / floor_us
        if row.name == "empty":
            continue
        row.tb_s = 1e-6 * case.bytes / t
        row.of_peak = row.tb_s / peak
        row.less_floor = row.of_peak * t / (t - floor_us) if t > 2 * floor_us else None
        if row.kind == "probe":
            continue
        row.tflop_s = 1e-6 * case.flops / t if case.flops else None
        row.vs_copy = against(timed["copy"], row)


def compare(result: CaseResult) -> None:
    """Compare rows that have times with the baseline, and ours with the fastest peer."""
    baseline, timed = result.row("baseline"), [row for row in result.rows if row.us and row.kind != "probe"]
    fastest = min((row for row in timed if row.kind == "peer"), key=_median, default=None)
    for row in timed:
        row.vs_baseline = against(baseline, row) if baseline and baseline is not row else None
        row.vs_peer = against(fastest, row) if fastest and row.kind in ("ours", "variant") else None


def against(other: Row, row: Row) -> Against:
    a, b = other.samples, row.samples
    r, g = ratio(a, b), hedges_g(a, b)
    return Against(other.name, r.value, r.lo, r.hi, g if math.isfinite(g) else None, rank_test(a, b))


def _kind(name: str, bench: Bench) -> str:
    if name in PROBES:
        return "probe"
    if name == bench.ours:
        return "ours"
    if name == bench.baseline:
        return "baseline"
    return "variant" if name in bench.variants else "peer"


def _median(row: Row) -> float:
    assert row.us is not None
    return row.us.median


def _message(error: Exception) -> str:
    text = " ".join(str(error).split())[:300]
    return text if isinstance(error, AssertionError) and text else f"{type(error).__name__}: {text}"


def _progress(cases: Sequence[Case]) -> Iterable[Case]:
    from rich.console import Console
    from rich.progress import track

    console = Console(stderr=True)
    return track(cases, f"bench {cases[0].op}", console=console, transient=True, disable=not sys.stderr.isatty())


def _device_failed(timer: Timer) -> bool:
    """True if a kernel failed in a way that makes the device unusable for this process."""
    try:
        timer.clock.synchronize()
    except RuntimeError:
        return True
    return False
