"""The search: spaces, gates, decisions, studies that are killed and shared, tables that `auto` reads, the commands."""

from __future__ import annotations

import functools
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

optuna = pytest.importorskip("optuna")

from optuna.trial import TrialState  # noqa: E402

import tune_toy  # noqa: E402
from kvstrata import jit  # noqa: E402
from kvstrata.attention import decode_cuda, stages  # noqa: E402
from kvstrata.bench import publish  # noqa: E402
from kvstrata.cli import app  # noqa: E402
from kvstrata.jit import tuned  # noqa: E402
from kvstrata.layout import Format  # noqa: E402
from kvstrata.store import store_cuda  # noqa: E402
from kvstrata.tune import gates, problems, render, results, search, storage, tables, warmup  # noqa: E402
from kvstrata.tune.gates import Limits, Needs, Rejected  # noqa: E402
from kvstrata.tune.space import Space, show  # noqa: E402
from tune_toy import Drawn, Speed  # noqa: E402

CPU = torch.device("cpu")
needs_nvrtc = pytest.mark.skipif(jit.missing() is not None, reason=str(jit.missing()))


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("KVSTRATA_CACHE", str(tmp_path / "cache"))
    tuned.forget()
    yield tmp_path / "cache"
    tuned.forget()


def study(tmp_path: Path, name: str = "x") -> optuna.Study:
    return tune_toy.study_of(tmp_path / f"{name}.journal")


# Spaces


def test_parameters_matter_beside_others_only() -> None:
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
        (({"a": ()},), "a: expected different values"),
        (({"a": (1, 1)},), "a: expected different values"),
        (({"a": (1,), "b": (1,)}, {"a": ("b", (1,))}), "expected 'b' to stand before 'a'"),
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
    from kvstrata.bench.cases.store import KINDS, Inputs
    from kvstrata.store.rows import check
    from kvstrata.tune.problems.store import task_of

    for kind in KINDS:
        assert check(*Inputs(kind, 16, CPU, 0).tensors, kind.layout) == task_of(kind, 16)


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
    from kvstrata.tune.compiler import Compiler

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
        assert ahead.ahead([kernel]) == []
        assert ahead._pool is None, "nothing is left for other processes"
        assert ahead.usage(kernel) == used


@needs_nvrtc
def test_nobody_waits_for_a_compilation_when_the_time_is_up() -> None:
    from concurrent.futures import TimeoutError as NotDone

    from kvstrata.tune.compiler import Compiler

    kernels = decode_needs()[:1]
    with Compiler("sm_90", jobs=1) as compiler:
        assert len(compiler.ahead([*kernels, *kernels])) == 1
        with pytest.raises(NotDone):
            compiler.usage(kernels[0], 0.01)
        (worker,) = compiler._pool._processes.values()
    worker.join(20)
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


def test_threads_come_in_warps_and_broken_code_is_said(tmp_path: Path) -> None:
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
def test_occupancy(registers: int, shared: int, threads: int, arch: str, expected: float) -> None:
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
def test_luck_is_not_speed(lucky: Speed, why: str, tmp_path: Path) -> None:
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


def test_time_ends_a_search(tmp_path: Path) -> None:
    row = tune_toy.run(tune_toy.problem(lambda x: Speed(100), seconds=0.05), study(tmp_path), seconds=0.3)
    assert 1 <= row.trials["complete"] < 24


def test_without_time_the_default_is_measured_all_the_same(tmp_path: Path) -> None:
    row = tune_toy.run(tune_toy.problem(lambda x: Speed(100)), study(tmp_path), seconds=0.0)
    assert row.trials == {"complete": 0, "pruned": 0, "put back": 0}
    assert row.default.n == search.FINAL


def test_time_is_kept_for_the_last_measurement(tmp_path: Path) -> None:
    """A sample takes 1 ms here, so 200 of them 0.2 s: trials end before that."""
    timer = Drawn()
    draw = timer.sample

    def sample(calls, rounds, *rest, **options):
        time.sleep(1e-3 * rounds)
        return draw(calls, rounds, *rest, **options)

    timer.sample = sample
    began = time.monotonic()
    tune_toy.run(tune_toy.problem(lambda x: Speed(100)), study(tmp_path), timer=timer, seconds=0.7)
    assert time.monotonic() - began < 0.95


def test_what_is_not_compiled_in_time_is_put_back(tmp_path: Path) -> None:
    from concurrent.futures import TimeoutError as NotDone

    class Slow:
        arch = "sm_90"

        def usage(self, kernel: Needs, seconds: float | None = None) -> jit.Usage:
            if kernel.entry == "1":
                return jit.Usage(32, 0, 0, 0)
            assert seconds is not None
            time.sleep(seconds)
            raise NotDone

    one = study(tmp_path)
    needs = dict(kernels=lambda choice: [Needs(tmp_path, str(choice["x"]), 32)])
    problem = tune_toy.problem(lambda x: Speed(100), values=(1, 2), **needs)
    row = search.Search(problem, one, Drawn(), Slow(), search.Settings(seconds=0.5)).run()
    assert row.trials["put back"] == 1
    assert "fails" not in row.rejected
    (waiting,) = one.get_trials(states=(TrialState.WAITING,))
    assert waiting.system_attrs["fixed_params"] == {"x": 2}


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


# Studies


def worker(journal: Path, trials: int, seconds: float) -> subprocess.Popen:
    command = [sys.executable, tune_toy.__file__, str(journal), str(trials), str(seconds)]
    return subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL)


def wait_for(condition, seconds: float = 60.0) -> None:
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, "it did not happen"
        time.sleep(0.02)


def trials_in(journal: Path, *states: TrialState) -> list:
    return tune_toy.study_of(journal).get_trials(deepcopy=False, states=states or None) if journal.exists() else []


def test_a_killed_study_resumes(tmp_path: Path) -> None:
    journal = tmp_path / "x.journal"
    killed = worker(journal, 20, 0.1)
    try:
        wait_for(lambda: len(trials_in(journal, TrialState.COMPLETE)) >= 3)
        wait_for(lambda: any("x" in t.params for t in trials_in(journal, TrialState.RUNNING)))
    finally:
        killed.send_signal(signal.SIGKILL)
        killed.wait()
    (left,) = trials_in(journal, TrialState.RUNNING)
    before = {t.number: t.value for t in trials_in(journal, TrialState.COMPLETE)}
    with journal.open("ab") as file:
        file.write(b'{"op_code": 4, "wor')  # what a host that went down may leave
    row = tune_toy.run(tune_toy.problem(lambda x: Speed(100 + x)), tune_toy.study_of(journal), trials=20)
    after = {t.number: t for t in trials_in(journal)}
    assert {number: after[number].value for number in before} == before
    assert after[left.number].state is TrialState.FAIL
    again = [t for t in after.values() if t.params == left.params and t.state is not TrialState.FAIL]
    assert again, "the trial that was killed ran again"
    assert row.trials["complete"] + row.trials["pruned"] == 20
    assert row.trials["put back"] == 1


def test_two_processes_share_a_study(tmp_path: Path) -> None:
    journal = tmp_path / "x.journal"
    both = [worker(journal, 22, 0.05) for _ in range(2)]
    assert [one.wait(timeout=90) for one in both] == [0, 0]
    every = [t for t in trials_in(journal) if t.user_attrs.get(search.REJECTED) != search.SEEN]
    assert all(t.state in search.DONE for t in every)
    assert 22 <= len(every) <= 23  # both may begin the last one
    assert len({t.params["x"] for t in every}) == len(every), "nothing was done twice"
    assert len({t.user_attrs[storage.OWNER] for t in every}) == 2, "both took part"


def test_studies_in_a_database_and_numbers_of_studies(tmp_path: Path) -> None:
    pytest.importorskip("sqlalchemy")
    url = f"sqlite:///{tmp_path / 'tune.db'}"
    row = tune_toy.run(tune_toy.problem(lambda x: Speed(100 - x), values=(1, 9)), tune_toy.study_of(url))
    assert row.choice == {"x": 9}
    assert [tune_toy.study_of(url, resume).study_name for resume in (True, False, True)] == ["toy#1", "toy#2", "toy#2"]
    assert len(storage.open_study(storage.open_storage(url), "other", True).trials) == 0


def test_what_another_host_left_is_taken_after_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = study(tmp_path)
    trial = one.ask()
    trial.set_user_attr(storage.OWNER, "elsewhere:1")
    trial.suggest_categorical("x", tune_toy.VALUES)
    assert storage.put_back(one) == 0
    monkeypatch.setattr(storage, "STALE", storage.STALE * 0)
    assert storage.put_back(one) == 1
    assert one.ask().suggest_categorical("x", tune_toy.VALUES) == trial.params["x"]


# Tables


def entry(case: str, choice: dict | None, **shape: int | str) -> dict:
    return {"case": case, "shape": shape, "choice": choice, "top": [choice or {}]}


def put(folder: Path, gpu: str, **ops: list[dict]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{gpu}.json").write_text(json.dumps({"schema": 1, "gpu": gpu, "arch": "sm_90", "ops": ops}))
    tuned.forget()


def test_nearest_shape(own_cache: Path) -> None:
    few, many = entry("few", {"a": 1}, tokens=16, unit="x"), entry("many", None, tokens=4096, unit="x")
    put(own_cache / "tables", "nvidia-test", op=[few, many, entry("other", {"a": 3}, tokens=20, unit="y")])

    def found(tokens: int, unit: str = "x", gpu: str = "NVIDIA Test") -> dict | None:
        return tuned.lookup("op", gpu, {"tokens": tokens, "unit": unit})

    assert found(16) == found(20) == found(60) == {"a": 1}
    assert found(20, "y") == {"a": 3}
    assert tuned.nearest("op", "nvidia-test", {"tokens": 3000, "unit": "x"})["case"] == "many"
    assert found(3000) is None, "there the default was best"
    assert found(65) is None, "further than a factor of four from 16"
    assert found(16, "z") is None
    assert found(16, gpu="NVIDIA Other") is None
    assert tuned.lookup("another", "NVIDIA Test", {"tokens": 16, "unit": "x"}) is None
    assert tuned.distance({"a": 8, "b": 3}, {"a": 2, "b": 6}) == 3
    assert tuned.distance({"a": 8}, {"b": 8}) == float("inf")


def test_ones_own_table_comes_first_and_reading_costs_nothing(
    own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuned, "SHIPPED", tmp_path / "shipped")
    shape = {"tokens": 16}
    put(tmp_path / "shipped", "g", store=[entry("a", {"x": 1}, **shape)], decode=[entry("a", {"x": 2}, **shape)])
    assert tuned.lookup("store", "G", shape) == {"x": 1}
    put(own_cache / "tables", "g", store=[entry("a", {"x": 5}, **shape)])
    assert tuned.lookup("store", "G", shape) == {"x": 5}
    assert tuned.lookup("decode", "G", shape) == {"x": 2}
    monkeypatch.setattr(tuned, "read", lambda path: pytest.fail("read again"))
    assert tuned.lookup("store", "G", shape) == {"x": 5}
    tuned.table.cache_clear()
    assert tuned.lookup("store", "G", shape) == {"x": 5}


@pytest.mark.parametrize("text", ["", "[]", '{"schema": 9}', '{"schema": 1, "ops": {"store": [{"case": "a"}]}}'])
def test_a_damaged_table_is_left_out(own_cache: Path, text: str) -> None:
    put(own_cache / "tables", "g")
    (own_cache / "tables" / "g.json").write_text(text)
    with pytest.warns(UserWarning, match=r"g\.json: not a tuned table"):
        assert tuned.lookup("store", "G", {"tokens": 1}) is None


def test_winners_become_a_table(own_cache: Path) -> None:
    def tuning(case: str, choice: dict | None) -> results.Tuning:
        row = SimpleNamespace(case=case, shape={"tokens": 8}, choice=choice, top=[{"x": 1}])
        return SimpleNamespace(machine={"slug": "nvidia-test", "name": "NVIDIA Test"}, rows=[row])

    folder = own_cache / "tables"
    tables.save("store", tuning("b", {"x": 1}), "sm_90", folder)
    tables.save("decode", tuning("c", None), "sm_90", folder)
    path = tables.save("store", tuning("a", {"x": 2}), "sm_90", folder)
    tables.save("store", tuning("b", {"x": 3}), "sm_90", folder)
    there = tuned.read(path)
    assert [(e["case"], e["choice"]) for e in there["store"]] == [("a", {"x": 2}), ("b", {"x": 3})]
    assert there["decode"][0]["choice"] is None
    assert tuned.lookup("store", "NVIDIA Test", {"tokens": 8}) == {"x": 2}
    assert tables.arch_of(path) == "sm_90"


def test_shipped_tables_can_be_read_and_run() -> None:
    for path in tuned.SHIPPED.glob("*.json"):
        for op, entries in tuned.read(path).items():
            known = {p.case: p for p in problems.find(op, tables.arch_of(path), CPU, "cuda")}
            for found in entries:
                problem = known[found["case"]]
                assert found["shape"] == problem.shape
                assert 1 <= len(found["top"]) <= search.TOP
                assert all(problem.invalid(choice) is None for choice in found["top"])


class Launched(SimpleNamespace):
    """What a plan would have launched."""

    def __init__(self, kernel: object, grid: object, block: int, params: bytes, **options: object) -> None:
        super().__init__(entry=kernel, grid=grid, block=block)

    def __call__(self, stream: int) -> None:
        pass


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU named NVIDIA Test that compiles and launches nothing."""
    fake = SimpleNamespace(
        arch_of=lambda device: "sm_90", load=lambda source, entry, arch: entry, Launch=Launched,
        bind_context=lambda device: None,
    )  # fmt: skip
    properties = SimpleNamespace(
        name="NVIDIA Test", multi_processor_count=4, shared_memory_per_multiprocessor=228 << 10
    )
    for module in (store_cuda, decode_cuda):
        monkeypatch.setattr(module, "jit", fake)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA Test")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)


@pytest.mark.usefixtures("pretend")
def test_auto_of_store_reads_the_table(own_cache: Path) -> None:
    from kvstrata.bench.cases.store import KINDS
    from kvstrata.tune.problems.store import task_of

    task, slots = task_of(KINDS[0], 256), torch.zeros(256, dtype=torch.int32)

    def entry_for(backend: str, bits: int = 0) -> str:
        return store_cuda.plan(task, slots, bits, backend, False).entry

    default = entry_for("cuda")
    shape = store_cuda.features(store_cuda.shape_of(task, 0))
    put(own_cache / "tables", "nvidia-test", store=[entry("a", {"kernel": "staged", "threads": 64, "per": 2}, **shape)])
    assert entry_for("cuda") == default.replace("store_direct", "store_staged").replace("512, 1>", "64, 2>")
    assert entry_for("cuda_direct") == default, "a named kernel is that kernel"
    assert entry_for("cuda", bits=2) != entry_for("cuda")
    assert "store_direct" in entry_for("cuda", bits=2), "units of two bytes are another shape"
    put(own_cache / "tables", "nvidia-test", store=[entry("a", {"kernel": "bulk", "rows": 4}, **shape)])
    assert entry_for("cuda").startswith("store_bulk<1, 2048, 2048, 1, int, 4>")
    put(own_cache / "tables", "nvidia-test", store=[entry("a", {"kernel": "bulk", "rows": 32}, **shape)])
    assert entry_for("cuda") == default, "64 KB do not fit: a table is no way around the checks"


@pytest.mark.usefixtures("pretend")
def test_auto_of_decode_reads_the_table(own_cache: Path) -> None:
    formats = tuple(Format.parse(name, 128, 64) for name in ("K16V16", "K4V4"))
    source = SimpleNamespace(
        table=torch.zeros(2, 4, 2, 16, dtype=torch.int32), counts=torch.zeros(2, 4, 2, dtype=torch.int32),
        formats=formats, rows=(0, 0, 0, 0), page_tokens=64, slabs=None, units=1,
    )  # fmt: skip

    def plan(**options: int) -> decode_cuda.Plan:
        return decode_cuda.Plan(source, (0, 1), 4, 16, 1, **options)

    assert plan().cut == stages.cut_of(formats, 4, "sm_90")
    choice = {"warps": 2, "resident": 8, "width": 1, "waves": 3, "combine": 8}
    shape = decode_cuda.features(formats, False, 8, 1024, 4)
    put(own_cache / "tables", "nvidia-test", decode=[entry("a", choice, **shape)])
    tuned_plan = plan()
    assert tuned_plan.cut == stages.Cut(**choice)
    assert (tuned_plan.warps, tuned_plan.grid, tuned_plan.chunks) == (2, 16, 96)
    assert plan(fixed_split=64).cut == stages.cut_of(formats, 4, "sm_90"), "the same in every batch"
    put(own_cache / "tables", "nvidia-test", decode=[entry("a", {**choice, "warps": 64}, **shape)])
    assert plan().cut == stages.cut_of(formats, 4, "sm_90"), "no multiprocessor has that much shared memory"


def test_auto_of_prefill_reads_the_table(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvstrata.attention import prefill_configs as configs
    from kvstrata.attention.prefill import PrefillJob
    from kvstrata.attention.prefill_cuda import Tile

    monkeypatch.setattr(configs, "_name_of", lambda device: "NVIDIA Test")
    monkeypatch.setattr(configs, "processors_of", lambda device: (132, True))

    def job(length: int, dim: int = 64, causal: bool = True) -> PrefillJob:
        q = torch.empty(4, 16, length, dim, dtype=torch.float16, device="meta")
        return PrefillJob(q, q, q, None, None, length, length, causal, 0.1, None, None, None, False)

    def table(**choice: object) -> None:
        put(own_cache / "tables", "nvidia-test", prefill=[entry("a", choice, **configs.features(64, 512, True, 256))])

    untuned = configs.config_of(job(512), 132, True)
    assert not configs.cuda_first(job(512))
    assert configs.tuned_tile(job(512)) is None
    table(kernel="gluon", block_m=128, block_n=64, stages=3, registers=0, pingpong=1)
    assert configs.config_of(job(512), 132, True) == configs.Config(128, 64, 4, 3, specialize=True, pingpong=True)
    assert configs.config_of(job(600), 132, True).specialize, "near enough"
    assert configs.config_of(job(512, causal=False), 132, True) == configs.nearest(64, 512, False, False)
    assert configs.config_of(job(512, dim=128), 132, True) == configs.nearest(128, 512, True, False)
    assert configs.config_of(job(16384), 132, True) == configs.nearest(64, 16384, True, False), "too far"
    table(kernel="triton", block_m=128, block_n=64, stages=2, order=2, registers=0)
    assert configs.config_of(job(512), 132, True) == configs.Config(128, 64, 8, 2, order=2)
    table(kernel="cuda", block_m=64, block_n=64, stages=2, groups=2, resident=2)
    assert configs.cuda_first(job(512))
    assert configs.tuned_tile(job(512)) == Tile(64, 64, 64, 8, 2, 2, 2)
    table(kernel="gluon", block_m=128, block_n=128, stages=40, registers=0, pingpong=1)
    assert configs.config_of(job(512), 132, True) == untuned, "more shared memory than there is"


def test_choices_of_prefill_are_its_configurations() -> None:
    from kvstrata.attention import prefill_space
    from kvstrata.attention.prefill_configs import TABLE, of_choice
    from kvstrata.attention.prefill_cuda import FEW, PORTABLE

    found = [(key[0], config) for key, config in TABLE.items() if config is not None]
    found += [(dim, tile) for tiles in (PORTABLE, FEW) for dim, tile in tiles.items() if dim in (64, 128)]
    for dim, config in found:
        choice = prefill_space.choice_of(config)
        assert of_choice(choice, dim) == config
        assert prefill_space.invalid(choice, dim) is None
    for problem in problems.find("prefill", "sm_90", CPU, "cuda"):
        assert problem.space.has(problem.default)


AHEAD = """
import sys
from kvstrata import jit
from kvstrata.tune.compiler import build
for line in sys.stdin:
    try:
        print(build(SOURCE, line, "sm_90"))
    except jit.CompileError as error:
        print("not", " ".join(str(error).split()))
"""


def test_kernels_of_triton_are_compiled_ahead() -> None:
    """By their own launch, without a GPU: registers and shared memory of either kernel, and what is wrong with one."""
    from kvstrata.attention.prefill_space import SOURCE

    problem = next(p for p in problems.find("prefill", "sm_90", CPU, "cuda") if p.case == "causal-B4-H16-S512-D64")
    sizes = dict(block_m=64, block_n=64, stages=2, registers=168)
    choices = [{"kernel": "triton", **sizes, "order": 0}, {"kernel": "gluon", **sizes, "pingpong": 0}]
    entries = [kernel.entry for choice in choices for kernel in problem.kernels(choice)]
    entries.append(entries[0].replace("[64, 64, 4, 2", "[48, 64, 4, 2"))
    assert entries[2] != entries[0]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = AHEAD.replace("SOURCE", repr(str(SOURCE)))
    done = subprocess.run(
        [sys.executable, "-c", script], input="\n".join(entries), capture_output=True, text=True, env=environment,
        check=True,
    )  # fmt: skip
    triton, gluon, wrong = done.stdout.splitlines()
    for line in (triton, gluon):
        used = {name: int(n) for name, n in re.findall(r"(\w+)=(\d+)", line)}
        assert 40 <= used["registers"] <= 168
        assert used["spill_bytes"] == 0
        assert used["shared_bytes"] >= 2 * 64 * 64 * (1 + 2 * 2)  # queries, two stages of keys and values
    assert wrong.startswith("not ")
    assert "CompilationError" in wrong


# Commands


def invoke(*arguments: object) -> object:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@needs_nvrtc
def test_warmup_without_a_gpu(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = problems.find("store", "sm_90", CPU, "cuda")[0]
    monkeypatch.setattr(problems, "find", lambda *arguments: [one])
    monkeypatch.setattr(tuned, "SHIPPED", own_cache / "shipped")
    top = [{"kernel": "direct", "threads": threads, "per": 4} for threads in (64, 128)]
    put(own_cache / "tables", "nvidia-test", store=[{**entry(one.case, top[0], **one.shape), "top": top}])
    assert warmup.tables_for("sm_90", None) == ["nvidia-test"]
    assert warmup.tables_for("sm_80", None) == []
    done = invoke("warmup", "store", "--arch", "sm_90", "--jobs", 0, "--json")
    assert done.exit_code == 0, done.output
    said = json.loads(done.stdout)
    assert (said["kernels"], said["failed"], said["tables"]) == (3, {}, ["nvidia-test"])
    from kvstrata.jit import compiler

    monkeypatch.setattr(compiler, "_run_nvrtc", lambda *arguments, **options: pytest.fail("compiled again"))
    for choice in [*top, one.default]:
        for kernel in one.kernels(choice):
            assert jit.compile(kernel.source, kernel.entry, arch="sm_90").code


def test_warmup_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for arguments, message in (
        ((), "kvstrata warmup --arch sm_90"),
        (("nope", "--arch", "sm_90"), "nothing to compile for 'nope'; there are: decode, prefill, store"),
        (("--arch", "90"), "--arch: expected a name such as sm_90, got '90'"),
    ):
        done = invoke("warmup", *arguments)
        assert done.exit_code == 2
        assert message in done.stderr


def test_tune_on_a_cpu(own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    toy = ("tune", "store", "--backend", "reference", "--device", "cpu")
    done = invoke(*toy, "--trials", 2, "--save", "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["rows"][0]["trials"] == {"complete": 2, "pruned": 0, "put back": 0}
    assert "rejected" in done.stderr, "which of the four choices the two trials had is chance"
    (path,) = Path("results").glob("cpu-*/tune_store.json")
    saved = results.load(path)
    assert results.dumps(saved) == path.read_text() == done.stdout
    assert not (own_cache / "tables").exists(), "the reference is not what auto chooses from"
    done = invoke(*toy, "--trials", 4, "--resume")
    assert "4 of 4" in done.stdout
    (found,) = publish.load_all(Path("results"))
    text = "<!-- kvstrata:tune_store table=configurations -->\n<!-- /kvstrata:tune_store -->\n"
    assert "| 8x128-fp16-512-reference | chunk=64 |" in publish.render_document(text, [found])
    with pytest.raises(LookupError, match="run kvstrata tune decode --save"):
        publish.render_document(text.replace("store", "decode"), [found])


def test_experiments_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("kvstrata.tune.cli.SIMULATED", 5)
    done = invoke("tune", "store", "--backend", "reference", "--device", "cpu", "--aa", 1, "--save")
    assert done.exit_code == 0, done.output
    (path,) = Path("results").glob("cpu-*/gate.json")
    gate = results.load(path)
    assert [row.factor for row in gate.rows] == [1.0, 1.05, 1.1] * 3
    assert gate.rows[2].measured > 1.03, "the delay is real"
    assert "| simulated, 5% noise | the same |" in render.markdown(gate, {})
    assert "gate on" in render.markdown(gate, {})


def test_experiments_end_with_the_time() -> None:
    from kvstrata.tune import experiment

    def draw(count: int) -> tuple:
        time.sleep(0.02)
        return (100 + torch.rand(count).numpy(),) * 2

    found = experiment.rate("x", 1.0, draw, 1000, end=time.monotonic() + 0.3)
    assert 1 <= found.n < 100
    assert experiment.rate("x", 1.0, draw, 2, end=0.0).n == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nope", "--backend", "reference"), "nothing to tune in 'nope'; there are: decode, prefill, store"),
        (("nope",), "nothing to tune in 'nope'; there are: decode, prefill, store"),
        (("store", "--only", "zzz", "--backend", "reference"), "no case matches 'zzz'"),
        (("store", "--only", "8*", "--save", "--backend", "reference"), "--save with --only"),
        (("store", "--backend", "triton"), "--backend: expected cuda or reference, got 'triton'"),
        (("store", "--device", "cuda"), "--device cuda: torch sees no CUDA device"),
        (("store", "--device", "cpu"), "--backend reference --device cpu tunes a toy"),
    ],
)
def test_bad_requests_are_said_in_one_line(
    arguments: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    done = invoke("tune", *arguments)
    assert done.exit_code == 2
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_without_optuna_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    there = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "optuna" else there(name))
    done = invoke("tune", "store")
    assert done.exit_code == 2
    assert "pip install 'kvstrata[tune]'" in done.stderr


@pytest.mark.parametrize("command", ["tune", "warmup"])
def test_help_teaches(command: str) -> None:
    assert f"Example: kvstrata {command}" in invoke(command, "--help").stdout


def test_nothing_heavy_is_imported_early() -> None:
    code = "import sys, kvstrata.cli; print([m for m in ('optuna', 'scipy', 'rich.progress') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_choices_are_shown_to_people() -> None:
    assert show({"kernel": "bulk", "rows": 2}) == "kernel=bulk rows=2"
    assert show(None) == "default"


# On a GPU


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("op", "case"), [("store", "8x128-fp16-256"), ("decode", "mixed-B32-1024"), ("prefill", "causal-B8-H16-S128-D64")]
)
def test_a_short_search_on_the_gpu(op: str, case: str, own_cache: Path, tmp_path: Path) -> None:
    done = invoke("tune", op, "--only", case, "--trials", 3, "--tables", tmp_path / "tables", "--json")
    assert done.exit_code == 0, done.output
    (row,) = json.loads(done.stdout)["rows"]
    assert "wrong" not in row["rejected"]
    assert "fails" not in row["rejected"]
    (path,) = (tmp_path / "tables").glob("*.json")
    assert tuned.read(path)[op][0]["case"] == case
