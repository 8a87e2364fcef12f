"""The search of one case: ask, gate, check, measure, decide, tell; until the trials, the time or the space are used up.

A trial's value is its median over the default's, both from the same rounds. What else is known of it stands in the
study too, so the incumbent and the reasons of rejections are the same for every process that works on it.
"""

from __future__ import annotations

import math
import random
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import TimeoutError as NotDone
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import optuna
import torch
from optuna.trial import FrozenTrial, TrialState

from kvstrata.bench.clock import Call
from kvstrata.bench.stats import Array, ratio, summary
from kvstrata.bench.timer import Timer
from kvstrata.jit.tuned import Choice
from kvstrata.tune import decide, gates
from kvstrata.tune.compiler import Compiler
from kvstrata.tune.gates import Limits, Profile, Rejected
from kvstrata.tune.problems import Problem
from kvstrata.tune.results import Row
from kvstrata.tune.space import key
from kvstrata.tune.storage import OWNER, owner, put_back

STEP = 10  # samples between two looks of the pruner
FINAL = 200  # samples of the winner against the default, none of which chose it
TOP = 5
IDLE = 0.5  # seconds after which a device is given time to raise its clocks again
CLAIMED, REJECTED, PROFILE, PROMOTED = "claimed", "rejected", "profile", "promoted"
SEEN = "seen before"  # why a trial was rejected that does not count
DONE = (TrialState.COMPLETE, TrialState.PRUNED)


@dataclass(frozen=True)
class Settings:
    """When to stop (trials of the study in all, seconds of this process), what to let through, how many samples."""

    trials: int | None = None
    seconds: float | None = None
    limits: Limits = field(default_factory=Limits)
    quick: int = decide.QUICK
    confirm: int = decide.CONFIRM
    final: int = FINAL


@dataclass(frozen=True)
class State:
    """What a watcher sees after each trial."""

    finished: int
    best: float
    last: str


class Search:
    """Works on a study of one problem on one device."""

    def __init__(
        self,
        problem: Problem,
        study: optuna.Study,
        timer: Timer,
        compiler: Compiler,
        settings: Settings,
        watch: Callable[[State], None] = lambda state: None,
    ) -> None:
        self.problem, self.study, self.timer, self.compiler = problem, study, timer, compiler
        self.settings, self.watch = settings, watch
        self.started = time.monotonic()
        self.ready = problem.build(timer.device)
        self._calls: dict[str, Call] = {}  # of the incumbents
        self._busy = -math.inf  # when the device was last seen at work
        self._round = 0.0  # seconds that a round of samples took
        self._random = random.Random(len(study.get_trials(deepcopy=False)))

    def run(self) -> Row:
        """Search, then measure the winner against the default."""
        try:
            self._profile(None)  # compiled by the others, if they are at it
            self._default = self._prepared(self.problem.default)
        except Rejected as error:
            raise RuntimeError(f"{self.problem.case}: the default configuration is {error.kind}: {error}") from error
        while not self._over():
            put_back(self.study)
            self._next()
        return self._finish()

    def _trials(self, *states: TrialState) -> list[FrozenTrial]:
        """Of the study, all processes together, without repetitions."""
        found = self.study.get_trials(deepcopy=False, states=states)
        return [t for t in found if t.user_attrs.get(REJECTED) != SEEN]

    def _over(self) -> bool:
        limit, left = self.settings, self._left()
        if left is not None and left <= limit.final * self._round:  # which the last measurement will take
            return True
        taken = [t for t in self._trials(*DONE, TrialState.RUNNING) if OWNER in t.user_attrs]
        if limit.trials is not None and len(taken) >= limit.trials:
            return True
        return not self._unseen()

    def _left(self) -> float | None:
        """Seconds."""
        seconds = self.settings.seconds
        return None if seconds is None else max(self.started + seconds - time.monotonic(), 0.0)

    def _unseen(self) -> list[Choice]:
        seen = {key(t.params) for t in self._trials(*DONE, TrialState.RUNNING)}
        return [choice for choice in self.problem.space if key(choice) not in seen]

    def _next(self) -> None:
        trial = self.study.ask()
        trial.set_user_attr(OWNER, owner())
        choice = self.problem.space.suggest(trial)
        trial.set_user_attr(CLAIMED, True)
        if self._taken(trial.number, choice):
            self._tell(trial, None, SEEN)
            if unseen := self._unseen():
                self.study.enqueue_trial(self._random.choice(unseen))
            return
        value, rejected, broken = None, None, None
        try:
            value, rejected = self._judge(trial, choice)
        except Rejected as error:
            rejected = error.kind
            trial.set_user_attr("reason", " ".join(str(error).split())[:300])
        except optuna.TrialPruned:
            rejected = "pruned"
        except NotDone:  # the time was up before it was compiled: for whoever resumes
            self.study.tell(trial, state=TrialState.FAIL)
            self.study.enqueue_trial(choice)
            return
        except Exception as error:  # of a launch: a kernel may have left the device unusable
            rejected, broken = "fails", error
        self._tell(trial, value, rejected)
        if broken is not None:
            self._alive(broken)
        done = self._trials(*DONE)
        best = self._incumbent()
        self.watch(State(len(done), 1.0 if best is None else 1 / best.value, rejected or PROMOTED))  # type: ignore[operator]

    def _taken(self, number: int, choice: Choice) -> bool:
        """Whether another trial has this choice. Whoever comes with it late sees an earlier number or an earlier claim,
        so no choice is tried twice, whatever the timing."""
        others = [t for t in self._trials(*DONE, TrialState.RUNNING) if key(t.params) == key(choice)]
        return any(t.number < number or (t.number > number and CLAIMED in t.user_attrs) for t in others)

    def _tell(self, trial: optuna.Trial, value: float | None, rejected: str | None) -> None:
        if rejected:
            trial.set_user_attr(REJECTED, rejected)
        try:
            self.study.tell(trial, value, state=TrialState.PRUNED if value is None else TrialState.COMPLETE)
        except (ValueError, RuntimeError) as error:
            if "finished" not in str(error) and "Cannot tell" not in str(error):
                raise  # else: this process was taken for dead and another did the work

    def _alive(self, error: Exception) -> None:
        """Raise if the device no longer works after an error."""
        if self.timer.device.type != "cuda":
            return
        try:
            torch.cuda.synchronize(self.timer.device)
        except RuntimeError:
            raise RuntimeError(f"a trial broke the device ({error}); it is noted, --resume goes on after it") from error

    def _prepared(self, choice: Choice) -> Call:
        """A contender that was launched on every input set and gave what the benchmark's check wants."""
        if (name := key(choice)) in self._calls:
            return self._calls[name]
        call = self.ready.call(choice)
        if self.problem.graph and self.timer.device.type == "cuda":
            call = self.timer.capture(call, self.problem.sets)
        self._verify(call)
        return call

    def _verify(self, call: Call) -> None:
        for i in range(self.problem.sets):
            self.ready.poison(i)
            out = call(i)
            try:
                self.ready.check(i, out)
            except AssertionError as error:
                raise Rejected("wrong", str(error)) from error

    def _incumbent(self) -> FrozenTrial | None:
        promoted = [t for t in self._trials(TrialState.COMPLETE) if t.user_attrs.get(PROMOTED)]
        return min(promoted, key=_value, default=None)

    def _judge(self, trial: optuna.Trial, choice: Choice) -> tuple[float, str | None]:
        """(value, why it was not promoted)."""
        problem, limit = self.problem, self.settings
        if reason := problem.invalid(choice):
            raise Rejected("divisibility", reason)
        compiler = self.compiler
        left = self._left()
        profile = gates.check(problem.kernels(choice), lambda k: compiler.usage(k, left), compiler.arch, limit.limits)
        trial.set_user_attr(PROFILE, asdict(profile))
        calls = {"default": self._default, "candidate": self._prepared(choice)}
        incumbent, holder = self._incumbent(), "default"
        if incumbent is not None:
            calls["incumbent"] = self._calls[key(incumbent.params)] = self._prepared(incumbent.params)
            holder = "incumbent"
        taken = self._quick(trial, calls)
        better = decide.better_profile(profile, self._profile(incumbent))
        if not decide.passes_quick(taken[holder], taken["candidate"], better):
            return _relative(taken), f"not {decide.FASTER - 1:.0%} faster"
        taken = self._sample(calls, limit.confirm)
        self._verify(calls["candidate"])
        verdict = decide.confirm(taken[holder], taken["candidate"])
        if not verdict.faster:
            trial.set_user_attr("reason", verdict.failed)
            return _relative(taken), "not confirmed"
        trial.set_user_attr(PROMOTED, True)
        return _relative(taken), None

    def _profile(self, incumbent: FrozenTrial | None) -> Profile:
        if incumbent is not None:
            return Profile(**incumbent.user_attrs[PROFILE])
        compiler, anything = self.compiler, Limits(occupancy=0, spills=1 << 30)
        return gates.check(self.problem.kernels(self.problem.default), compiler.usage, compiler.arch, anything)

    def _quick(self, trial: optuna.Trial, calls: dict[str, Call]) -> dict[str, Array]:
        parts: list[dict[str, Array]] = []
        for first in range(0, self.settings.quick, STEP):
            parts.append(self._sample(calls, min(STEP, self.settings.quick - first), seed=first))
            taken = {name: np.concatenate([part[name] for part in parts]) for name in calls}
            trial.report(_relative(taken), taken["candidate"].size)
            if trial.should_prune() and first + STEP < self.settings.quick:
                raise optuna.TrialPruned
        return taken

    def _sample(self, calls: dict[str, Call], rounds: int, seed: int = 0) -> dict[str, Array]:
        clock, start = self.timer.clock, time.monotonic()
        usual = clock.warm_seconds
        clock.warm_seconds = usual if start - self._busy > IDLE else 0.0
        try:
            return self.timer.sample(calls, rounds, self.problem.sets, seed=seed, before=self.ready.before)
        finally:
            self._busy = time.monotonic()
            self._round = (self._busy - start - clock.warm_seconds) / rounds
            clock.warm_seconds = usual

    def _finish(self) -> Row:
        best = self._incumbent()
        choice: Choice | None = None if best is None else dict(best.params)
        calls = {"default": self._default}
        if choice is not None:
            calls["candidate"] = self._prepared(choice)
        taken = self._sample(calls, self.settings.final)
        verdict = decide.confirm(taken["default"], taken.get("candidate", taken["default"]))
        note = "" if choice is not None else "nothing faster was found"
        if choice is not None and not verdict.faster:
            note, choice = f"the winner did not hold: {verdict.failed}", None
        speed = ratio(taken["default"], taken["candidate"]) if choice is not None else None
        return Row(
            case=self.problem.case,
            shape=self.problem.shape,
            default_choice=self.problem.default,
            choice=choice,
            default=summary(taken["default"]),
            tuned=summary(taken["candidate"]) if choice is not None else None,
            ratio=speed.value if speed else 1.0,
            lo=speed.lo if speed else 1.0,
            hi=speed.hi if speed else 1.0,
            g=verdict.g if choice is not None and math.isfinite(verdict.g) else None,
            p=verdict.p if choice is not None else 1.0,
            note=note,
            space=len(self.problem.space),
            trials=self._counts(),
            rejected=dict(
                Counter(str(t.user_attrs[REJECTED]) for t in self._trials(*DONE) if REJECTED in t.user_attrs)
            ),
            top=self._top(choice),
            seconds=round(time.monotonic() - self.started, 1),
        )

    def _counts(self) -> dict[str, int]:
        counts: dict[str, Any] = {state.name.lower(): len(self._trials(state)) for state in DONE}
        return {**counts, "put back": len(self._trials(TrialState.FAIL))}

    def _top(self, winner: Choice | None) -> list[Choice]:
        """The winner, then what was fastest in its trial."""
        ranked = [dict(t.params) for t in sorted(self._trials(TrialState.COMPLETE), key=_value)]
        first = winner or self.problem.default
        return [first, *(choice for choice in ranked if choice != first)][:TOP]


def _value(trial: FrozenTrial) -> float:
    return math.inf if trial.value is None else trial.value


def _relative(taken: dict[str, Array]) -> float:
    return float(np.median(taken["candidate"]) / np.median(taken["default"]))
