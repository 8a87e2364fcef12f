"""A problem whose configurations take a known time, for tests of the search; as a program, a worker on a shared study.

python tests/tune_toy.py JOURNAL TRIALS HOLD, which says "held" when it builds its HOLD-th contender (the first is the
default) and goes on with the next line it reads.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import optuna
import torch

from kvstrata.jit import tuned
from kvstrata.tools.tune import search, storage
from kvstrata.tools.tune.compiler import Compiler
from kvstrata.tools.tune.problems import Problem, Ready
from kvstrata.tools.tune.space import Space

optuna.logging.set_verbosity(optuna.logging.WARNING)
VALUES = tuple(range(1, 25))


@dataclass
class Speed:
    """A contender: what a sample takes, in microseconds."""

    us: float
    wrong: bool = False
    lucky: tuple[float, float] = (0.0, 1.0)  # a share of samples takes this much of the time
    early: float = 1.0  # of the time, during its first 40 samples
    taken: int = 0

    def __call__(self, i: int) -> str:
        return "wrong" if self.wrong else "right"


@dataclass
class Drawn:
    """Samples as a timer gives them, drawn from what contenders say of themselves."""

    noise: float = 0.01
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    clock: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(warm_seconds=0.0))
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))

    def sample(self, calls, rounds, sets=1, seed=0, warmup=2, seconds=20.0, before=None):
        taken = {}
        for name, call in calls.items():
            x = call.us * self.rng.lognormal(0, self.noise, rounds)
            share, factor = call.lucky
            x = np.where(self.rng.random(rounds) < share, factor * x, x)
            taken[name] = x * (call.early if call.taken < 40 else 1.0)
            call.taken += rounds
        return taken


def problem(speeds, values=VALUES, default=None, seconds=0.0, **options):
    """`speeds(value)` is the contender of a value."""

    def call(choice):
        time.sleep(seconds)
        return speeds(choice["x"])

    def check(i, out):
        assert out == "right", "the output is wrong"

    return Problem(
        op="toy",
        case="toy",
        shape={"tokens": 1},
        space=Space({"x": tuple(values)}),
        default={"x": values[0] if default is None else default},
        build=lambda device: Ready(call, lambda i: None, check),
        **options,
    )


def held_at(number):
    """Speeds of contenders; the one of that number waits for a line."""
    built = itertools.count(1)

    def speed(value):
        if next(built) == number:
            print("held", flush=True)
            sys.stdin.readline()
        return Speed(100)

    return speed


def never_done(source, entry, arch):
    """A compilation that takes an hour."""
    time.sleep(3600)


def run(problem, study, trials=None, timer=None, **settings):
    wanted = search.Settings(trials=trials, **settings)
    with Compiler("sm_90", jobs=0) as compiler:
        return search.Search(problem, study, timer or Drawn(), compiler, wanted).run()


def study_of(journal, resume=True):
    return storage.open_study(storage.open_storage(journal), "toy", resume, seed=0)


def entry(case: str, choice: dict | None, **shape: int | str) -> dict:
    return {"case": case, "shape": shape, "choice": choice, "top": [choice or {}]}


def put(folder: Path, gpu: str, **ops: list[dict]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{gpu}.json").write_text(json.dumps({"schema": tuned.SCHEMA, "gpu": gpu, "arch": "sm_90", "ops": ops}))
    tuned.forget()


if __name__ == "__main__":
    journal, trials, hold = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    run(problem(held_at(hold)), study_of(journal), trials)
