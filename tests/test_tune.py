"""The search: spaces, gates before a launch, decisions."""

from __future__ import annotations

import functools
import signal
import time
from pathlib import Path

import pytest
import torch

optuna = pytest.importorskip("optuna")

from optuna.trial import TrialState  # noqa: E402

import tune_toy  # noqa: E402
from conftest import Watch  # noqa: E402
from kvstrata import jit  # noqa: E402
from kvstrata.tools.tune import gates, problems, results, search, tables  # noqa: E402
from kvstrata.tools.tune.gates import Limits, Needs, Rejected  # noqa: E402
from kvstrata.tools.tune.space import Space  # noqa: E402
from tune_toy import Drawn, Speed  # noqa: E402

CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("own_cache")
needs_nvrtc = pytest.mark.skipif(jit.missing() is not None, reason=str(jit.missing()))


def study(tmp_path: Path, name: str = "x") -> optuna.Study:
    return tune_toy.study_of(tmp_path / f"{name}.journal")


# Spaces


def test_conditional_parameters() -> None:
    space = Space({"kernel": ("a", "b"), "rows": (1, 2, 3), "per": (1, 2)}, {"rows": ("kernel", ("b",))})
    found = list(space)
    assert len(found) == len(space) == 2 + 6
    assert all(("rows" in choice) == (choice["kernel"] == "b") for choice in found)
    assert space.has({"kernel": "a", "per": 2})
    assert not space.has({"kernel": "a", "rows": 1, "per": 2})
    asked = [space.suggest(optuna.create_study().ask()) for _ in range(20)]
    assert all(space.has(choice) for choice in asked)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (({"a": ()},), "a: expected distinct values"),
        (({"a": (1, 1)},), "a: expected distinct values"),
        (({"a": (1,), "b": (1,)}, {"a": ("b", (1,))}), "expected 'b' before 'a'"),
        (({"a": (1,)}, {"c": ("a", (1,))}), "expected names of parameters, got 'c'"),
    ],
)
def test_bad_spaces_are_named(arguments: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Space(*arguments)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_declared_spaces_hold_what_the_ops_choose(arch: str) -> None:
    for op in problems.names():
        for problem in problems.find(op, arch, CPU, "cuda"):
            assert problem.invalid(problem.default) is None
            valid = [choice for choice in problem.space if problem.invalid(choice) is None]
            assert len(valid) > 10
            for choice in (valid[0], valid[-1]):
                assert all(kernel.source.exists() for kernel in problem.kernels(choice))
    if arch == "sm_80":
        store = problems.find("store", arch, CPU, "cuda")[0]
        assert "sm_90" in store.invalid({"kernel": "bulk", "rows": 2})


def test_meta_tensors_give_the_task_of_the_benchmark() -> None:
    from kvstrata.store.job import check
    from kvstrata.tools.bench.cases.store import KINDS, Inputs
    from kvstrata.tools.tune.problems.store import task_of

    for kind in KINDS:
        assert check(Inputs(kind, 16, CPU, 0).tensors, kind.layout) == task_of(kind, 16)


# Gates


def decode_needs(**choice: int) -> list[Needs]:
    problem = next(p for p in problems.find("decode", "sm_90", CPU, "cuda") if p.case == "mixed-B32-1024")
    cut = {"warps": 4, "resident": 12, "width": 1, "waves": 1, "combine": 4, **choice}
    return problem.kernels(cut)


@functools.cache
def usage(kernel: Needs) -> jit.Usage:
    return jit.usage(kernel.source, kernel.entry, arch="sm_90")


@needs_nvrtc
def test_usage_is_kept_beside_the_cubin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvstrata.jit import compiler
    from kvstrata.tools.tune.compiler import Compiler

    problem = problems.find("store", "sm_90", CPU, "cuda")[0]
    (kernel,) = problem.kernels(problem.default)
    asked = (kernel.source, kernel.entry)
    assert jit.known_usage(*asked, arch="sm_90") is None
    used = jit.usage(*asked, arch="sm_90")
    assert used.registers > 8
    monkeypatch.setattr(compiler, "_run_nvrtc", lambda *arguments: pytest.fail("compiled again"))
    assert jit.known_usage(*asked, arch="sm_90") == jit.usage(*asked, arch="sm_90") == used
    assert jit.compile(*asked, arch="sm_90").code
    with Compiler("sm_90") as ahead:
        assert ahead.start([kernel]) == []
        assert ahead._pool is None, "nothing is left for other processes"
        assert ahead.usage(kernel) == used


@needs_nvrtc
def test_compilations_are_not_awaited_after_the_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    from concurrent.futures import TimeoutError as NotDone

    from kvstrata.tools.tune import compiler as ahead
    from kvstrata.tools.tune.compiler import Compiler

    monkeypatch.setattr(ahead, "build", tune_toy.never_done)
    kernels = decode_needs()[:1]
    with Compiler("sm_90", jobs=1) as compiler:
        assert len(compiler.start([*kernels, *kernels])) == 1
        with pytest.raises(NotDone):
            compiler.usage(kernels[0], 0.01)
        (worker,) = compiler._pool._processes.values()
    while worker.exitcode is None:  # join may lose to the pool's own thread
        time.sleep(0.01)
    assert worker.exitcode == -signal.SIGTERM


def rejected(kernels: list[Needs], limits: Limits = Limits(), usage=usage) -> Rejected:  # noqa: B008
    with pytest.raises(Rejected) as error:
        gates.check(kernels, usage, "sm_90", limits)
    return error.value


@needs_nvrtc
def test_a_spilling_kernel_is_rejected() -> None:
    """The decode kernel bound to the registers of 16 resident warps."""
    error = rejected(decode_needs(resident=16)[:1])
    assert error.kind == "spills"
    assert "bytes spilled" in str(error)


@needs_nvrtc
def test_a_good_kernel_passes_and_48_kb_stop_it() -> None:
    kernels = decode_needs()[:1]
    profile = gates.check(kernels, usage, "sm_90", Limits())
    assert profile.spills == 0
    assert profile.shared > 48 * 1024
    assert profile.occupancy == 12 / 64
    assert rejected(kernels, Limits(shared=48 * 1024)).kind == "shared memory"
    assert rejected(kernels, Limits(registers=64)).kind == "registers"
    assert rejected(kernels, Limits(occupancy=0.5)).kind == "occupancy"
    smaller = decode_needs(warps=2)[:1]
    assert gates.check(smaller, usage, "sm_90", Limits(shared=48 * 1024)).shared <= 48 * 1024


@needs_nvrtc
def test_static_shared_memory_is_judged_too() -> None:
    problem = problems.find("store", "sm_90", CPU, "cuda")[0]
    small, large = ({"kernel": "staged", "threads": 256, "per": n} for n in (1, 8))
    assert gates.check(problem.kernels(small), usage, "sm_90", Limits()).shared == 2 * 2 * 256 * 16
    assert rejected(problem.kernels(small), Limits(shared=8192)).kind == "shared memory"
    assert rejected(problem.kernels(large)).kind == "shared memory"


def test_partial_warps_and_compile_errors_are_rejected(tmp_path: Path) -> None:
    def broken(kernel: Needs) -> jit.Usage:
        raise jit.CompileError("x.cu: cannot compile f for sm_90\nerror: expected a declaration")

    def never(kernel: Needs) -> jit.Usage:
        raise AssertionError("compiled")

    for threads in (16, 48, 2048):
        assert rejected([Needs(tmp_path, "f", threads)], usage=never).kind == "divisibility"
    assert rejected([Needs(tmp_path, "f", 64, dynamic=300 << 10)], usage=never).kind == "shared memory"
    error = rejected([Needs(tmp_path, "f", 64)], usage=broken)
    assert (error.kind, str(error)) == ("does not compile", "error: expected a declaration")


@pytest.mark.parametrize(
    ("registers", "shared", "threads", "arch", "expected"),
    [
        (128, 0, 128, "sm_90", 16 / 64),  # 65,536 / 128 registers are 16 warps
        (129, 0, 32, "sm_90", 15 / 64),  # registers come in groups of 8 a thread
        (32, 0, 32, "sm_90", 32 / 64),  # 32 blocks of a warp
        (32, 100 << 10, 128, "sm_90", 8 / 64),  # two blocks by shared memory
        (32, 0, 1024, "sm_89", 32 / 48),
        (255, 0, 1024, "sm_90", 0),
        (16, 0, 64, "sm_77", 32 / 48),  # not known: what all have
    ],
)
def test_occupancy_is_limited_by_registers_shared_memory_and_blocks(
    registers: int, shared: int, threads: int, arch: str, expected: float
) -> None:
    assert gates.occupancy(registers, shared, threads, arch) == pytest.approx(expected)


# The search


def test_the_fastest_wins_and_is_measured_again(tmp_path: Path) -> None:
    row = tune_toy.run(tune_toy.problem(lambda x: Speed(100 - x)), study(tmp_path))
    assert row.choice == {"x": 24} or row.ratio > 1.15  # 24 or one that is within the noise of it
    assert row.lo > 1.05
    assert row.tuned.hi < row.default.lo
    assert row.trials["complete"] + row.trials["pruned"] == row.space == 24
    assert row.top[0] == row.choice
    assert len(row.top) == 5
    assert sum(row.rejected.values()) < 24, "somebody was promoted"


def test_a_faster_but_wrong_kernel_is_rejected(tmp_path: Path) -> None:
    one = study(tmp_path)
    row = tune_toy.run(tune_toy.problem(lambda x: Speed(100 / x, wrong=x > 1), values=range(1, 6)), one)
    assert row.choice is None
    assert row.tuned is None
    assert row.rejected["wrong"] == 4
    assert all("x" in t.params and t.state is not TrialState.COMPLETE for t in one.trials if t.params["x"] > 1)


def test_a_wrong_default_ends_the_search(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="toy: the default configuration is wrong: the output is wrong"):
        tune_toy.run(tune_toy.problem(lambda x: Speed(100, wrong=x == 1)), study(tmp_path))


@pytest.mark.parametrize(
    ("lucky", "why"),
    [
        (Speed(100, lucky=(0.1, 0.01)), "not 5% faster"),  # some samples that are far too good
        (Speed(100, early=0.5), "not confirmed"),  # 40 of them in a row
    ],
    ids=["outliers", "streak"],
)
def test_a_lucky_trial_is_not_confirmed(lucky: Speed, why: str, tmp_path: Path) -> None:
    row = tune_toy.run(tune_toy.problem(lambda x: lucky if x == 2 else Speed(100), values=(1, 2)), study(tmp_path))
    assert row.choice is None
    assert row.rejected[why] >= 1


def test_a_winner_that_does_not_hold_stays_out_of_the_table(tmp_path: Path) -> None:
    class Fading(Speed):
        def __call__(self, i: int) -> str:
            return "right"

    fading = Fading(100)
    timer = Drawn()
    draw = timer.sample

    def sample(calls, rounds, *rest, **options):
        fading.us = 100 if rounds == search.FINAL else 80
        return draw(calls, rounds, *rest, **options)

    timer.sample = sample
    problem = tune_toy.problem(lambda x: fading if x == 2 else Speed(100), values=(1, 2))
    row = tune_toy.run(problem, study(tmp_path), timer=timer)
    assert row.choice is None
    assert row.note.startswith("the winner did not hold")
    assert tables.entries(results.Tuning("tune_toy", {}, {}, [row]))[0]["choice"] is None


def test_gates_come_before_the_launch(tmp_path: Path) -> None:
    def call(x: int) -> Speed:
        assert x == 1, "launched"
        return Speed(100)

    options = dict(invalid=lambda choice: "odd" if choice["x"] == 3 else None)
    options["kernels"] = lambda choice: [] if choice["x"] == 1 else [Needs(tmp_path, "f", 33)]
    row = tune_toy.run(tune_toy.problem(call, values=(1, 2, 3), **options), study(tmp_path))
    assert row.rejected["divisibility"] == 2


def test_a_better_profile_needs_no_five_percent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def needs(choice: dict) -> list[Needs]:
        return [Needs(tmp_path, "f", 32 * choice["x"])]

    def check(kernels, usage, arch, limits):
        return gates.Profile(32, 0, 0, kernels[0].threads / 1024)

    speed = {1: 100.0, 8: 98.0}
    plain = tune_toy.problem(lambda x: Speed(speed[x]), values=(1, 8))
    assert tune_toy.run(plain, study(tmp_path, "plain")).choice is None
    monkeypatch.setattr(gates, "check", check)
    better = tune_toy.problem(lambda x: Speed(speed[x]), values=(1, 8), kernels=needs)
    assert tune_toy.run(better, study(tmp_path, "better")).choice == {"x": 8}


def test_slow_trials_are_pruned_early(tmp_path: Path) -> None:
    one = study(tmp_path)
    tune_toy.run(tune_toy.problem(lambda x: Speed(100 if x < 18 else 400)), one, trials=24)
    pruned = [t for t in one.trials if t.user_attrs.get(search.REJECTED) == "pruned"]
    assert pruned
    assert all(t.last_step < 40 for t in pruned)
    late = [t for t in one.trials if t.number > 12 and t.params["x"] >= 18 and t.state in search.DONE]
    assert all(t.state is TrialState.PRUNED for t in late)


@pytest.fixture(autouse=True)
def search_watch(watch: Watch) -> None:
    """Searches see a clock that runs only while something sleeps."""
    watch.drive(search, tune_toy)


def test_time_ends_a_search(tmp_path: Path, watch: Watch) -> None:
    row = tune_toy.run(tune_toy.problem(lambda x: Speed(100), seconds=0.05), study(tmp_path), seconds=0.3)
    assert row.trials["complete"] == 5, "the default took as long as one"
    assert watch.now == pytest.approx(0.3)


def test_without_time_the_default_is_still_measured(tmp_path: Path) -> None:
    row = tune_toy.run(tune_toy.problem(lambda x: Speed(100)), study(tmp_path), seconds=0.0)
    assert row.trials == {"complete": 0, "pruned": 0, "put back": 0}
    assert row.default.n == search.FINAL


def test_time_is_reserved_for_the_final_measurement(tmp_path: Path, watch: Watch) -> None:
    """A sample takes 1 ms here, so 200 of them 0.2 s: trials end before that."""
    timer = Drawn()
    draw = timer.sample

    def sample(calls, rounds, *rest, **options):
        watch.sleep(1e-3 * rounds)
        return draw(calls, rounds, *rest, **options)

    timer.sample = sample
    tune_toy.run(tune_toy.problem(lambda x: Speed(100)), study(tmp_path), timer=timer, seconds=0.7)
    assert 0.5 < watch.now < 0.75  # the trial it ends with was begun in time


class Slow:
    """A compiler that has one kernel and needs `seconds` for the next."""

    arch = "sm_90"

    def __init__(self, watch: Watch, seconds: float) -> None:
        self.watch, self.seconds = watch, seconds

    def is_ready(self, kernel: Needs) -> bool:
        return kernel.entry == "1" or self.watch.now >= self.seconds

    def wait_for_any(self, seconds: float) -> bool:
        self.watch.sleep(seconds)
        return True

    def usage(self, kernel: Needs, seconds: float | None = None) -> jit.Usage:
        assert self.is_ready(kernel)
        return jit.Usage(32, 0, 0, 0)


@pytest.mark.parametrize(
    ("patience", "measured", "ended"),
    [(0.0, 1, 0.5), (1.0, 1, 1.5), (2.5, 2, 2.0)],
    ids=["none", "too little", "enough"],
)
def test_a_kernel_is_waited_for_with_patience(
    patience: float, measured: int, ended: float, tmp_path: Path, watch: Watch
) -> None:
    one = study(tmp_path)
    needs = dict(kernels=lambda choice: [Needs(tmp_path, str(choice["x"]), 32)])
    problem = tune_toy.problem(lambda x: Speed(100), values=(1, 2), **needs)
    settings = search.Settings(seconds=0.5, patience=patience)
    row = search.Search(problem, one, Drawn(), Slow(watch, 2.0), settings).run()
    assert (row.measured, row.valid) == (measured, 2)
    assert watch.now == pytest.approx(ended)
    assert "fails" not in row.rejected


def test_clocks_are_raised_once_not_for_every_trial(tmp_path: Path) -> None:
    timer, warmed = Drawn(), []
    timer.clock.warm_seconds = 0.1
    draw = timer.sample

    def sample(*arguments, **options):
        warmed.append(timer.clock.warm_seconds)
        return draw(*arguments, **options)

    timer.sample = sample
    tune_toy.run(tune_toy.problem(lambda x: Speed(100), values=(1, 2, 3)), study(tmp_path), timer=timer)
    assert warmed[0] == timer.clock.warm_seconds == 0.1
    assert warmed.count(0.1) <= 2, "again only after the device was idle"
    assert len(warmed) >= 10
