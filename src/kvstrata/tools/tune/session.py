"""A search of all cases of an op: compiles kernels ahead, searches case by case, then profiles the best results."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import optuna
import torch

from kvstrata.jit.tuned import Choice, nearest
from kvstrata.tools.bench.machine import release
from kvstrata.tools.bench.timer import Timer
from kvstrata.tools.profile import ncu, profile
from kvstrata.tools.profile.ncu import NcuError

from . import decide, profiles
from .compiler import Compiler
from .gates import HARDWARE
from .problems import Problem
from .results import PREFIX, Row, Tuning
from .search import Search, Settings, State
from .space import key
from .storage import open_storage, open_study

if TYPE_CHECKING:
    from rich.progress import Progress

NEAR_MISSES = 2  # trials of a case as fast as the winner that are profiled with it
MAX_PROFILED = 12  # maximum number of profiled cases, those with a winner first
MIN_SECONDS = 5.0  # minimum seconds left to search cases again
SEARCH_SHARE = 0.75  # share of the time, if profiles are taken after it


@dataclass(frozen=True)
class Session:
    """A tuning session: problems, machine and settings; ``profile``: use Nsight Compute."""

    op: str
    problems: list[Problem]
    device: torch.device
    arch: str
    backend: str
    gates: str
    settings: Settings
    machine: dict[str, Any]
    storage: str | Path
    flush_bytes: int | None = None
    resume: bool = False
    seed: int | None = None
    profile: bool = False

    @property
    def kind(self) -> str:
        return self.op if self.gates == HARDWARE else f"{self.op}_{self.gates}"

    def run(self, started: float, progress: Progress, keep: Callable[[Tuning], object]) -> Tuning:
        """Search all cases, each with its share of the time since `begun`; `keep` gets the result after each."""
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        settings = replace(self.settings, measured_profiles=self.profile)
        tuning = Tuning(PREFIX + self.kind, self.machine, self._method())
        timer = Timer(self.device, self.flush_bytes)
        end = math.inf if settings.seconds is None else started + settings.seconds
        search_end = started + SEARCH_SHARE * (end - started) if self.profile else end
        storage = open_storage(self.storage)
        near_misses: dict[str, list[Choice]] = {}
        studies: dict[str, optuna.Study] = {}
        with Compiler(self.arch) as compiler:
            goals = [min(settings.trials or size, size) for size in self._compile(compiler)]
            compiling = progress.add_task("compiling", total=compiler.progress[1], best="")
            tasks = [
                progress.add_task(p.case, total=goal, best="") for p, goal in zip(self.problems, goals, strict=True)
            ]
            unfinished, measured = list(range(len(self.problems))), -1
            while unfinished:
                for turn, number in enumerate(unfinished):
                    problem = self.problems[number]

                    def watch(state: State, task: Any = tasks[number]) -> None:
                        best = f"best {state.best:.2f}x  last: {state.last}"
                        progress.update(task, completed=state.finished, best=best)
                        progress.update(compiling, completed=compiler.progress[0])

                    times = _share(settings, search_end - time.monotonic(), len(unfinished) - turn)
                    if problem.case not in studies:
                        studies[problem.case] = self._study(storage, problem)
                    search = Search(problem, studies[problem.case], timer, compiler, times, watch)
                    row = search.run()
                    if number < len(tuning.rows):
                        row.seconds = round(row.seconds + tuning.rows[number].seconds, 1)
                        tuning.rows[number] = row
                    else:
                        tuning.rows.append(row)
                    near_misses[problem.case] = search.near_misses(NEAR_MISSES)
                    keep(tuning)
                    del search
                    release(self.device)
                # Search again with kernels that were not compiled yet when their case was searched.
                earlier, measured = measured, sum(row.measured or 0 for row in tuning.rows)
                if search_end - time.monotonic() < MIN_SECONDS or measured == earlier:
                    break
                unfinished = [i for i, goal in enumerate(goals) if _untried(tuning.rows[i], goal)]
            if self.profile:
                progress.add_task("Nsight Compute", total=None, best="")
                left = end - time.monotonic()
                self._profiles(tuning, near_misses, min(left, profile.SECONDS), timer, compiler, studies)
        return tuning

    def _method(self) -> dict[str, Any]:
        settings = self.settings
        method = {"backend": self.backend, "quick": settings.quick, "confirm": settings.confirm}
        method |= {"final": settings.final, "limits": asdict(settings.limits), "trials": settings.trials}
        return {**method, "seconds": settings.seconds, "gates": self.gates}

    def _compile(self, compiler: Compiler) -> list[int]:
        """Start compiling all kernels; returns the number of valid choices of each case."""
        compiler.start(kernel for problem in self.problems for kernel in problem.kernels(problem.default))
        sizes = []
        for problem in self.problems:
            valid = [choice for choice in problem.space if not problem.invalid(choice)]
            random.Random(0).shuffle(valid)  # so that the first compiled ones are spread over the space
            compiler.start(kernel for choice in valid for kernel in problem.kernels(choice))
            sizes.append(len(valid))
        return sizes

    def _study(self, storage: optuna.storages.BaseStorage, problem: Problem) -> optuna.Study:
        """Study of a case; a new one starts with the top choices of the nearest entry of the tuned table."""
        name = f"{self.kind}/{problem.case}/{self.backend}/{self.machine['slug']}"
        study = open_study(storage, name, self.resume, self.seed)
        known = nearest(self.op, self.machine["slug"], problem.shape)
        for choice in known["top"] if known and not study.get_trials(deepcopy=False) else []:
            if problem.space.has(choice) and not problem.invalid(choice):
                study.enqueue_trial(choice)
        return study

    def _profiles(
        self,
        tuning: Tuning,
        near_misses: dict[str, list[Choice]],
        seconds: float,
        timer: Timer,
        compiler: Compiler,
        studies: dict[str, optuna.Study],
    ) -> None:
        """Profile winners, defaults and near misses; a near miss with better metrics gets a second stage."""
        own = {row.case: [row.default_choice, *([row.choice] if row.choice else [])] for row in tuning.rows}
        unique = {case: {key(choice): choice for choice in [*own[case], *near_misses[case]]} for case in own}
        wanted = [(case, list(choices.values())) for case, choices in unique.items()]
        won = {row.case for row in tuning.rows if row.choice is not None}
        wanted = [(case, choices) for case, choices in wanted if len(choices) > 1]
        wanted = sorted(wanted, key=lambda each: each[0] not in won)[:MAX_PROFILED]
        if not wanted:
            return
        try:
            measured = profiles.take(self.op, wanted, seconds)
        except NcuError as error:
            tuning.method["profile"] = f"none: {error}"
            return
        tuning.method["profile"] = profile.version(ncu.find())
        known = {problem.case: problem for problem in self.problems}
        for number, row in enumerate(tuning.rows):
            if (row.case, key(row.default_choice)) not in measured:
                continue
            rival = measured[row.case, key(row.choice or row.default_choice)]
            better = [c for c in near_misses[row.case] if decide.better_metrics(measured[row.case, key(c)], rival)]
            if better:
                settings = replace(self.settings, measured_profiles=True)
                search = Search(known[row.case], studies[row.case], timer, compiler, settings)
                earlier, row = row.seconds, search.reconsider(better)
                row.seconds = round(row.seconds + earlier, 1)
                tuning.rows[number] = row
                del search
                release(self.device)
            row.metrics["default"] = measured[row.case, key(row.default_choice)]
            if row.choice is not None:
                row.metrics["tuned"] = measured[row.case, key(row.choice)]
            profiled = f"{len(near_misses[row.case])} no slower were profiled, {len(better)} with better metrics"
            row.note = "; ".join(part for part in (row.note, profiled) if part)


def _share(settings: Settings, left: float, cases: int) -> Settings:
    """An equal share of the time left; half of the other cases' share may be spent waiting for the compiler."""
    if math.isinf(left):
        return replace(settings, seconds=None)
    left = max(left, 0.0)
    return replace(settings, seconds=left / cases, patience=left / 2 * (cases - 1) / cases)


def _untried(row: Row, goal: int) -> bool:
    """True if fewer than ``goal`` configurations were measured and more are within the limits."""
    return (row.measured or 0) < min(goal, row.valid or 0)
