"""Pass rates of the gate: for candidates as fast as the incumbent (A/A), and for faster ones (A/B).

On a device both contenders are the same configuration, built twice; for A/B the incumbent is followed by a real delay.
Simulated samples have log-normal noise, and a few outliers that take 1.5 times as long.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import numpy as np
import torch

from kvstrata.tools.bench.clock import Call
from kvstrata.tools.bench.stats import Array
from kvstrata.tools.bench.timer import Timer

from . import decide
from .problems import Problem
from .results import Rate

FACTORS = (1.0, 1.05, 1.1)
OUTLIERS, OUTLIER = 0.02, 1.5  # share of outliers, and their factor
CALIBRATION = 60  # samples
CYCLES = (1_000, 40_000)  # two delays that are tried, to interpolate the wanted one

Step = Callable[[], object]
Draw = Callable[[int], tuple[Array, Array]]  # samples of (incumbent, candidate)


def rate(name: str, factor: float, draw: Draw, n: int, step: Step = lambda: None, end: float = math.inf) -> Rate:
    """Let `n` candidates pass through both stages, or as many as time allows, at least one."""
    quick = confirm = promoted = 0
    ratios: list[float] = []
    while len(ratios) < n and (not ratios or time.monotonic() < end):
        passed = decide.passes_quick(*draw(decide.QUICK))
        incumbent, candidate = draw(decide.CONFIRM)
        confirmed = decide.confirm(incumbent, candidate).faster
        ratios.append(float(np.median(incumbent) / np.median(candidate)))
        quick, confirm, promoted = quick + passed, confirm + confirmed, promoted + (passed and confirmed)
        step()
    return Rate(name, factor, float(np.median(ratios)), len(ratios), quick, confirm, promoted)


def simulated(noise: float, factor: float, n: int, seed: int = 0) -> Rate:
    """Pass rates on simulated samples with log-normal noise (0.02: 2 %) and outliers."""
    rng = np.random.default_rng(seed)

    def samples(count: int, scale: float) -> Array:
        x: Array = scale * rng.lognormal(0.0, noise, count)
        return np.where(rng.random(count) < OUTLIERS, OUTLIER * x, x)

    return rate(f"simulated, {noise:.0%} noise", factor, lambda count: (samples(count, factor), samples(count, 1.0)), n)


def on_device(
    problem: Problem, timer: Timer, factor: float, n: int, step: Step = lambda: None, end: float = math.inf
) -> Rate:
    """Pass rates of the default configuration against itself, or against itself with a delay."""
    ready = problem.build(timer.device)

    def contender() -> Call:
        call = ready.call(problem.default)
        return timer.capture(call, problem.sets) if problem.graph and timer.device.type == "cuda" else call

    def sample(calls: dict[str, Call], count: int, seed: int = 0) -> dict[str, Array]:
        return timer.sample(calls, count, problem.sets, seed=seed, before=ready.before)

    calls = {"incumbent": contender(), "candidate": contender()}
    if factor > 1:
        calls["incumbent"] = _slowed(calls["incumbent"], factor, timer, lambda delayed: sample(delayed, CALIBRATION))
    sample(calls, 2)
    usual, drawn = timer.clock.warm_seconds, 0

    def draw(count: int) -> tuple[Array, Array]:
        nonlocal drawn
        drawn += 1
        taken = sample(calls, count, drawn)
        return taken["incumbent"], taken["candidate"]

    timer.clock.warm_seconds = 0.0  # the device stays busy from here on
    try:
        return rate(f"{problem.op} {problem.case}", factor, draw, n, step, end)
    finally:
        timer.clock.warm_seconds = usual


def _slowed(call: Call, factor: float, timer: Timer, sample: Callable[[dict[str, Call]], dict[str, Array]]) -> Call:
    """The call followed by a delay, so that both together take `factor` times as long."""
    if timer.device.type != "cuda":
        wait = (factor - 1) * 1e-6 * float(np.median(sample({"call": call})["call"]))
        return lambda i: _spin(call, i, wait)

    def delayed(cycles: int) -> Call:
        return lambda i: (call(i), torch.cuda._sleep(cycles))

    taken = sample({"call": call, "short": delayed(CYCLES[0]), "long": delayed(CYCLES[1])})
    base, short, long = (float(np.median(taken[name])) for name in ("call", "short", "long"))
    per_cycle = (long - short) / (CYCLES[1] - CYCLES[0])
    cycles = CYCLES[0] + (factor * base - short) / per_cycle
    if cycles < 0:
        raise ValueError(f"case: expected one that takes longer, got {base:.1f} us: a launch alone is over {factor:g}")
    return delayed(round(cycles))


def _spin(call: Call, i: int, seconds: float) -> None:
    call(i)
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass
