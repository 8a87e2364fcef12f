"""Trials of a search: valid, different, within the limits; and searches whose default is not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

optuna = pytest.importorskip("optuna")

import tune_toy  # noqa: E402
from kvstrata import jit  # noqa: E402
from kvstrata.tools.tune import decide, gates, problems, render, results, search  # noqa: E402
from kvstrata.tools.tune.candidates import Candidates  # noqa: E402
from kvstrata.tools.tune.compiler import Compiler  # noqa: E402
from kvstrata.tools.tune.gates import PRESETS, Limits, Needs  # noqa: E402
from kvstrata.tools.tune.problems import Problem, Ready  # noqa: E402
from kvstrata.tools.tune.space import Space, key  # noqa: E402
from tune_toy import Drawn, Speed  # noqa: E402

CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("own_cache")


class Compiled(Compiler):
    """A kernel's name says what it takes: registers, bytes of shared memory."""

    def usage(self, kernel: Needs, seconds: float | None = None) -> jit.Usage:
        registers, shared = map(int, kernel.entry.split(","))
        return jit.Usage(registers, 0, 0, shared)


def sparse(default: dict | None = None) -> Problem:
    """480 choices, of which 48 make sense and 36 are within the limits of the hardware."""
    space = Space(
        {"kernel": ("a", "b"), "m": (1, 2, 3, 4), "n": (1, 2, 3, 4, 5), "stages": tuple(range(1, 13))},
        {"stages": ("kernel", ("a", "b"))},
    )

    def invalid(choice: dict) -> str | None:
        sums = choice["m"] + choice["n"] + choice["stages"]
        return None if sums % 10 == (0 if choice["kernel"] == "a" else 5) else "the sum is odd"

    def kernels(choice: dict) -> list[Needs]:
        shared = 300 << 10 if choice["m"] == 4 else 64 << 10 if choice["m"] == 3 else 16 << 10
        return [Needs(Path(__file__), f"{40 * choice['m']},{shared}", 128)]

    def call(choice: dict) -> Speed:
        assert invalid(choice) is None
        return Speed(100 - 4 * choice["m"] + choice["n"])

    first = next(choice for choice in space if invalid(choice) is None)
    return Problem(
        op="toy", case="sparse", shape={"tokens": 1}, space=space, default=default or first, invalid=invalid,
        build=lambda device: Ready(call, lambda i: None, lambda i, out: None), kernels=kernels,
    )  # fmt: skip


def search_of(problem: Problem, tmp_path: Path, **settings) -> tuple[search.Search, search.Row]:
    study = tune_toy.study_of(tmp_path / "x.journal")
    with Compiled("sm_90", jobs=0) as compiler:
        one = search.Search(problem, study, Drawn(), compiler, search.Settings(**settings))
        return one, one.run()


def test_all_trials_are_valid_different_and_measured(tmp_path: Path) -> None:
    problem = sparse()
    one, row = search_of(problem, tmp_path, trials=30)
    tried = [t for t in one.study.trials if t.user_attrs.get(search.REJECTED) != search.DUPLICATE]
    assert len(tried) == row.measured == 30, "every trial was timed"
    assert len({key(t.params) for t in tried}) == 30
    assert all(problem.space.has(t.params) and problem.invalid(t.params) is None for t in tried)
    assert all(t.params["m"] < 4 for t in tried), "300 KB of shared memory"
    assert row.choice is not None
    assert row.choice["m"] == 3
    assert row.values["m"]["3"] < row.values["m"]["2"] < row.values["m"]["1"]


def test_a_space_that_is_used_up_says_what_became_of_every_choice(tmp_path: Path) -> None:
    problem = sparse()
    _, row = search_of(problem, tmp_path)
    valid = [choice for choice in problem.space if problem.invalid(choice) is None]
    assert row.measured == row.valid == sum(choice["m"] < 4 for choice in valid)
    assert row.rejected["divisibility"] == row.space - len(valid)
    assert row.rejected["shared memory"] == sum(choice["m"] == 4 for choice in valid)
    promoted = row.space - sum(row.rejected.values())
    assert 1 <= promoted < row.measured


def test_a_default_outside_the_limits_is_measured_beside_the_best_inside(tmp_path: Path) -> None:
    default = next(c for c in sparse().space if sparse().invalid(c) is None and c["m"] == 3)
    _, row = search_of(sparse(default), tmp_path, limits=PRESETS["portable"])
    assert row.outside == "65536 bytes of shared memory, the cap is 49152"
    assert row.choice is not None
    assert row.choice["m"] == 2, "the fastest within 48 KB and 96 registers"
    assert row.hi < 1, "slower than the default, and said so"
    assert row.measured == row.valid
    assert row.rejected["shared memory"] > 0


def test_limits_that_nothing_meets_leave_nothing_to_measure(tmp_path: Path) -> None:
    _, row = search_of(sparse(), tmp_path, limits=Limits(registers=32))
    assert (row.choice, row.measured, row.valid) == (None, 0, 0)
    assert row.note == "no configuration is within the limits"
    assert row.outside == "40 registers, 32 are allowed"
    assert row.default.n == search.FINAL


def test_a_trial_is_given_up_when_all_samples_are_slower(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    base, slow = 100 * rng.lognormal(0, 0.01, 10), 120 * rng.lognormal(0, 0.01, 10)
    assert decide.hopeless(base, slow)
    assert not decide.hopeless(base, slow[:9]), "too few to say"
    assert not decide.hopeless(base, np.append(slow, 99.0))
    rate = np.mean([decide.hopeless(*100 * rng.lognormal(0, 0.02, (2, 10))) for _ in range(4000)])
    assert rate < 0.01, "of equals hardly one"
    study = tune_toy.study_of(tmp_path / "x.journal")
    tune_toy.run(tune_toy.problem(lambda x: Speed(100 if x == 1 else 200), values=(1, 2, 3)), study)
    given_up = [t for t in study.trials if t.params["x"] > 1]
    assert [t.last_step for t in given_up] == [10, 10]


@pytest.mark.parametrize("op", ["prefill", "decode", "store"])
def test_hundred_trials_have_enough_valid_choices(op: str) -> None:
    """Valid configurations of the note's shape and of a case of each other op, before compilation."""
    named = {"prefill": "full-B2-H8-S512-D64", "decode": "mixed-B32-16384", "store": "8x128-fp16-8192"}[op]
    problem = next(p for p in problems.find(op, "sm_90", CPU, "cuda") if p.case == named)
    valid = [choice for choice in problem.space if problem.invalid(choice) is None]
    assert len(valid) >= 110
    assert len({tuple(problem.kernels(choice)) for choice in valid}) == len(valid) or op == "decode"


@pytest.mark.parametrize(("vector", "op", "vectors"), [(16, "Copy<16>", 128), (8, "Copy<8>", 256), (4, "Copy<4>", 512)])
def test_vectors_of_the_store_may_be_narrower(vector: int, op: str, vectors: int) -> None:
    problem = next(p for p in problems.find("store", "sm_90", CPU, "cuda") if p.case == "8x128-fp16-256")
    choice = {"kernel": "direct", "threads": 128, "per": 1, "vector": vector}
    assert problem.invalid(choice) is None
    (kernel,) = problem.kernels(choice)
    assert kernel.entry.startswith(f"store_direct<{op}, 1, {vectors}, {vectors}, ")
    assert problem.default["vector"] == 16
    assert "at most, got 32" in problem.invalid({**choice, "vector": 32})


def test_limits_values_and_metrics_are_rendered(tmp_path: Path) -> None:
    default = next(c for c in sparse().space if sparse().invalid(c) is None and c["m"] == 3)
    _, row = search_of(sparse(default), tmp_path, limits=PRESETS["portable"])
    row.metrics = {"default": {"us": 3.0, "l2_hit": 40.0}, "tuned": {"us": 2.0, "l2_hit": 51.5}}
    machine = {"name": "x", "slug": "x", "versions": {"torch": "2"}, "date": "2026-01-01T00:00Z"}
    tuning = results.Tuning("tune_toy_portable", machine, {"backend": "cuda", "final": 200, "gates": "portable"}, [row])
    again = results.load(results.save(tuning, tmp_path))
    assert results.dumps(again) == results.dumps(tuning)
    text = render.table(again, {"table": "limits"}).document()
    assert "| 65536 bytes of shared memory, the cap is 49152 | kernel=" in text
    assert "limits portable" in text
    values = render.table(again, {"table": "values", "of": "m"}).document()
    assert f"| sparse | m | 2: {row.values['m']['2']:.2f}, 1: {row.values['m']['1']:.2f} |" in values
    assert "stages" not in values
    assert "| 2.00 | 51.5 |" in render.table(again, {"table": "metrics"}).document()
    assert f"| {row.measured} of {row.valid} |" in render.table(again, {}).document()


@pytest.mark.skipif(jit.missing() is not None, reason=str(jit.missing()))
def test_what_is_portable_on_hopper() -> None:
    """docs/tune.md: store and prefill.cu at D 64 are within the limits, decode is not."""
    cases = {
        ("store", "8x128-fp16-256"): ("", ""),
        ("prefill", "causal-B8-H16-S128-D64"): ("", "31% of the warps are resident, at least 50%"),
        ("decode", "K2V2-B32-16384"): ("67584 bytes of shared memory, the cap is 49152",) * 2,
    }
    for (op, case), outside in cases.items():
        problem = next(p for p in problems.find(op, "sm_90", CPU, "cuda") if p.case == case)
        with Compiler("sm_90", jobs=0) as compiler:
            for preset, reason in zip(("portable", "portable-50"), outside, strict=True):
                candidates = Candidates(problem, compiler, PRESETS[preset])
                try:
                    candidates.profile(problem.default)
                    found = ""
                except gates.Rejected as error:
                    found = str(error)
                assert found == reason
