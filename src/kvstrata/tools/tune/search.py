"""The search of one case: ask, check, measure, decide, tell; until the trials, the time or the space are used up.

Only choices that are valid, compiled and within the limits become trials (`candidates.py`). A trial's value is its
median relative to the default's, both from the same rounds. Everything else about it is stored in the study too, so the
incumbent is the same for every process that works on it.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterable
from concurrent.futures import TimeoutError as NotDone
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import optuna
import torch
from optuna.trial import FrozenTrial, TrialState

from kvstrata.jit.tuned import Choice
from kvstrata.tools.bench.clock import Call
from kvstrata.tools.bench.stats import Array, ratio, summary
from kvstrata.tools.bench.timer import Timer

from . import decide, gates
from .candidates import STATIC, Candidates
from .compiler import Compiler
from .gates import Limits, Profile, Rejected
from .problems import Problem
from .results import Row
from .sampler import NearestSampler, nearest
from .space import key
from .storage import OWNER, owner, requeue_abandoned

STEP = 10  # samples between two checks of the pruner
FINAL = 200  # fresh samples of the winner against the default
TOP = 5
IDLE_SECONDS = 0.5  # seconds of idling after which a device gets time to raise its clocks again
CLAIMED, REJECTED, PROFILE, PROMOTED = "claimed", "rejected", "profile", "promoted"
DUPLICATE = "seen before"  # reason for rejecting a trial that does not count
DONE = (TrialState.COMPLETE, TrialState.PRUNED)
UNLIMITED = Limits(occupancy=0, spills=1 << 30)
POLL = 0.5  # seconds between two reports while waiting for the compiler


@dataclass(frozen=True)
class Settings:
    """Stop conditions (trials of the study, seconds of this process), limits and sample counts of a search.

    `patience`: seconds beyond `seconds` that may be spent waiting for the compiler. `measured_profiles`: Nsight Compute
    compares profiles afterwards, so occupancy computed from registers is not used.
    """

    trials: int | None = None
    seconds: float | None = None
    patience: float = 0.0
    measured_profiles: bool = False
    limits: Limits = field(default_factory=Limits)
    quick: int = decide.QUICK
    confirm: int = decide.CONFIRM
    final: int = FINAL


@dataclass(frozen=True)
class State:
    """Progress of a search, reported after each trial."""

    finished: int
    best: float
    last: str


class Search:
    """Runs trials of one problem's study on one device."""

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
        self.candidates = Candidates(problem, compiler, settings.limits)
        self.ready = problem.build(timer.device)
        self._calls: dict[str, Call] = {}  # calls of the incumbents
        self._last_busy = -math.inf  # when the device was last busy
        self._round_seconds = 0.0  # seconds per round of samples
        self._waited = 0.0  # seconds spent waiting for the compiler
        self._random = random.Random(len(study.get_trials(deepcopy=False)))
        if not isinstance(study.sampler, NearestSampler):
            study.sampler = NearestSampler(study.sampler, problem.space, self._pick)
        study.sampler.pick = self._pick

    def run(self) -> Row:
        """Search, then measure the winner against the default."""
        self._prepare_default()
        while not self._is_over():
            requeue_abandoned(self.study)
            self._next()
        return self._finish()

    def reconsider(self, choices: Iterable[Choice]) -> Row:
        """Run the second stage for measured choices that were not 5 % faster, then measure the winner."""
        self._prepare_default()
        for choice in choices:
            (trial,) = (t for t in self._trials(TrialState.COMPLETE) if key(t.params) == key(choice))
            calls, rival = self._contenders(choice)
            if self._confirm(calls, rival or "default").faster:  # add a trial: a finished one cannot be changed
                attributes = {**trial.user_attrs, PROMOTED: True}
                attributes.pop(REJECTED, None)
                self.study.add_trial(
                    optuna.trial.create_trial(
                        params=trial.params,
                        distributions=trial.distributions,
                        value=self._last_ratio,
                        user_attrs=attributes,
                    )
                )
        return self._finish()

    def near_misses(self, most: int) -> list[Choice]:
        """Completed trials that were no slower than the incumbent, but not 5 % faster: the fastest first."""
        best = self._incumbent()
        bound = 1.0 if best is None else _value(best)
        trials = [t for t in self._trials(TrialState.COMPLETE) if not t.user_attrs.get(PROMOTED) and _value(t) <= bound]
        trials = [t for t in trials if key(t.params) != key(self.problem.default)]
        return [dict(t.params) for t in sorted(trials, key=_value)][:most]

    def _prepare_default(self) -> None:
        """Prepare the default. `_outside` is the reason why the limits do not allow it, or empty."""
        self._outside = ""
        try:
            self._static = gates.check(
                self.candidates.kernels(self.problem.default), self.compiler.usage, self.compiler.arch, UNLIMITED
            )
            self._default = self._build_call(self.problem.default)
        except Rejected as error:
            raise RuntimeError(f"{self.problem.case}: the default configuration is {error.kind}: {error}") from error
        if self.settings.limits != Limits():  # the default may always use what the hardware allows
            try:
                self.candidates.profile(self.problem.default)
            except Rejected as error:
                self._outside = str(error)

    def _trials(self, *states: TrialState) -> list[FrozenTrial]:
        """Trials of the study in these states, from all processes, without duplicates."""
        trials = self.study.get_trials(deepcopy=False, states=states)
        return [t for t in trials if t.user_attrs.get(REJECTED) != DUPLICATE]

    def _is_over(self) -> bool:
        limit, left = self.settings, self._seconds_left()
        if left is not None and left <= limit.final * self._round_seconds:  # time needed for the final measurement
            return True
        taken = [t for t in self._trials(*DONE, TrialState.RUNNING) if OWNER in t.user_attrs]
        taken = [t for t in taken if t.user_attrs.get(REJECTED) not in STATIC]
        if limit.trials is not None and len(taken) >= limit.trials:
            return True
        return not self._has_queued() and not self._wait_for_candidate()

    def _seconds_left(self) -> float | None:
        """Seconds left, or None without a limit."""
        if self.settings.seconds is None:
            return None
        allowed = self.settings.seconds + min(self._waited, self.settings.patience)
        return max(self.started + allowed - time.monotonic(), 0.0)

    def _has_queued(self) -> bool:
        return bool(self.study.get_trials(deepcopy=False, states=(TrialState.WAITING,)))

    def _untried(self) -> list[Choice]:
        return self.candidates.untried({key(t.params) for t in self._trials(*DONE, TrialState.RUNNING)})

    def _wait_for_candidate(self) -> bool:
        """Wait until a choice can be measured; False if none is left or the time is up."""
        while unseen := self._untried():
            compiled = [choice for choice in unseen if self.candidates.compiled(choice)]
            if any(self.candidates.passes(choice) for choice in compiled):
                return True
            if len(compiled) == len(unseen):
                continue  # all were just rejected
            start, left = time.monotonic(), self._seconds_left()
            if left is not None:
                left += max(self.settings.patience - self._waited, 0.0)
                if left <= 0.0:
                    return False
            self.compiler.wait_for_any(POLL if left is None else min(left, POLL))
            self._waited += time.monotonic() - start
            self._report("waiting for the compiler")
        return False

    def _pick(self, proposal: Choice) -> Choice | None:
        """Choice nearest to a proposal among those that can be measured now; None if there is none."""
        ready = [choice for choice in self._untried() if self.candidates.compiled(choice)]
        while ready:
            choice = nearest(ready, proposal, self._random)
            if self.candidates.passes(choice):
                return choice
            ready.remove(choice)
        return None

    def _next(self) -> None:
        trial = self.study.ask()
        trial.set_user_attr(OWNER, owner())
        choice = self.problem.space.suggest(trial)
        trial.set_user_attr(CLAIMED, True)
        if self._is_duplicate(trial.number, choice):
            self._tell(trial, None, DUPLICATE)
            return
        value, rejected, failure = None, None, None
        try:
            value, rejected = self._measure(trial, choice)
        except Rejected as error:
            rejected = error.kind
            trial.set_user_attr("reason", " ".join(str(error).split())[:300])
        except optuna.TrialPruned:
            rejected = "pruned"
        except NotDone:  # not compiled in time: left to a resumed run
            self.study.tell(trial, state=TrialState.FAIL)
            self.study.enqueue_trial(choice)
            return
        except Exception as error:  # a failed launch may have left the device unusable
            rejected, failure = "fails", error
        self._tell(trial, value, rejected)
        if failure is not None:
            self._check_device(failure)
        self._report(rejected or PROMOTED)

    def _report(self, last: str) -> None:
        best = self._incumbent()
        self.watch(State(len(self._measured()), 1.0 if best is None else 1 / _value(best), last))

    def _measured(self) -> list[FrozenTrial]:
        return [t for t in self._trials(*DONE) if t.intermediate_values]

    def _is_duplicate(self, number: int, choice: Choice) -> bool:
        """True if another trial has this choice.

        The later of two concurrent trials sees an earlier number or an earlier claim, so no choice is tried twice.
        """
        others = [t for t in self._trials(*DONE, TrialState.RUNNING) if key(t.params) == key(choice)]
        return any(t.number < number or (t.number > number and CLAIMED in t.user_attrs) for t in others)

    def _tell(self, trial: optuna.Trial, value: float | None, rejected: str | None) -> None:
        if rejected:
            trial.set_user_attr(REJECTED, rejected)
        try:
            self.study.tell(trial, value, state=TrialState.PRUNED if value is None else TrialState.COMPLETE)
        except (ValueError, RuntimeError) as error:
            if "finished" not in str(error) and "Cannot tell" not in str(error):
                raise  # otherwise this process was considered dead and another one did the work

    def _check_device(self, error: Exception) -> None:
        """Raise RuntimeError if the device no longer works after an error."""
        if self.timer.device.type != "cuda":
            return
        try:
            torch.cuda.synchronize(self.timer.device)
        except RuntimeError:
            raise RuntimeError(f"a trial broke the device ({error}); it is recorded, and --resume skips it") from error

    def _build_call(self, choice: Choice) -> Call:
        """A contender that was launched on every input set and passed the benchmark's check."""
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

    def _measure(self, trial: optuna.Trial, choice: Choice) -> tuple[float, str | None]:
        """Relative time of a choice, and the reason why it was not promoted, or None."""
        profile = self.candidates.profile(choice, self._seconds_left())
        trial.set_user_attr(PROFILE, asdict(profile))
        calls, rival = self._contenders(choice)
        taken = self._quick_samples(trial, calls, rival)
        if rival is not None:
            incumbent = self._incumbent()
            held = self._static if incumbent is None else Profile(**incumbent.user_attrs[PROFILE])
            better = not self.settings.measured_profiles and decide.better_profile(profile, held)
            if not decide.passes_quick(taken[rival], taken["candidate"], better):
                return _relative(taken), f"not {decide.FASTER - 1:.0%} faster"
        verdict = self._confirm(calls, rival or "default")
        if rival is not None and not verdict.faster:
            trial.set_user_attr("reason", verdict.failed)
            return self._last_ratio, "not confirmed"
        trial.set_user_attr(PROMOTED, True)
        return self._last_ratio, None

    def _contenders(self, choice: Choice) -> tuple[dict[str, Call], str | None]:
        """Contenders to sample with the choice, and the one it must beat; None if the limits allow none yet."""
        calls = {"default": self._default, "candidate": self._build_call(choice)}
        if (incumbent := self._incumbent()) is None:
            return calls, None if self._outside else "default"
        calls["incumbent"] = self._calls[key(incumbent.params)] = self._build_call(incumbent.params)
        return calls, "incumbent"

    def _confirm(self, calls: dict[str, Call], rival: str) -> decide.Verdict:
        """The second stage, on fresh samples; the output is checked again."""
        taken = self._sample(calls, self.settings.confirm)
        self._verify(calls["candidate"])
        self._last_ratio = _relative(taken)
        return decide.confirm(taken[rival], taken["candidate"])

    def _quick_samples(self, trial: optuna.Trial, calls: dict[str, Call], rival: str | None) -> dict[str, Array]:
        parts: list[dict[str, Array]] = []
        for first in range(0, self.settings.quick, STEP):
            parts.append(self._sample(calls, min(STEP, self.settings.quick - first), seed=first))
            taken = {name: np.concatenate([part[name] for part in parts]) for name in calls}
            trial.report(_relative(taken), taken["candidate"].size)
            hopeless = rival is not None and decide.hopeless(taken[rival], taken["candidate"])
            if first + STEP < self.settings.quick and (hopeless or trial.should_prune()):
                raise optuna.TrialPruned
        return taken

    def _sample(self, calls: dict[str, Call], rounds: int, seed: int = 0) -> dict[str, Array]:
        clock, start = self.timer.clock, time.monotonic()
        usual = clock.warm_seconds
        clock.warm_seconds = usual if start - self._last_busy > IDLE_SECONDS else 0.0
        try:
            return self.timer.sample(calls, rounds, self.problem.sets, seed=seed, before=self.ready.before)
        finally:
            self._last_busy = time.monotonic()
            self._round_seconds = (self._last_busy - start - clock.warm_seconds) / rounds
            clock.warm_seconds = usual

    def _finish(self) -> Row:
        best = self._incumbent()
        choice: Choice | None = None if best is None else dict(best.params)
        calls = {"default": self._default}
        if choice is not None:
            calls["candidate"] = self._build_call(choice)
        taken = self._sample(calls, self.settings.final)
        verdict = decide.confirm(taken["default"], taken.get("candidate", taken["default"]))
        note = "" if choice is not None else "nothing faster was found"
        if choice is None and self._outside:
            note = "no configuration is within the limits"
        elif choice is not None and not verdict.faster and not self._outside:
            note, choice = f"the winner did not hold: {verdict.failed}", None
        speed = ratio(taken["default"], taken["candidate"]) if choice is not None else None
        measured, rejected = self._measured(), self.candidates.counts()
        rejected.update(
            str(t.user_attrs[REJECTED])
            for t in self._trials(*DONE)
            if t.user_attrs.get(REJECTED, STATIC[0]) not in STATIC
        )
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
            space=self.candidates.size,
            trials=self._counts(),
            rejected={kind: count for kind, count in rejected.items() if count},
            top=self._top(choice),
            seconds=round(time.monotonic() - self.started, 1),
            valid=len(self.candidates),
            measured=len(measured),
            outside=self._outside,
            values=_fastest(measured),
        )

    def _counts(self) -> dict[str, int]:
        counts: dict[str, Any] = {state.name.lower(): len(self._trials(state)) for state in DONE}
        return {**counts, "put back": len(self._trials(TrialState.FAIL))}

    def _top(self, winner: Choice | None) -> list[Choice]:
        """The winner, then the fastest others by their trials."""
        ranked = [dict(t.params) for t in sorted(self._measured(), key=_time)]
        first = winner or self.problem.default
        return [first, *(choice for choice in ranked if choice != first)][:TOP]


def _value(trial: FrozenTrial) -> float:
    return math.inf if trial.value is None else trial.value


def _time(trial: FrozenTrial) -> float:
    """Time of a trial relative to the default; for an abandoned trial, up to that point."""
    return trial.intermediate_values[max(trial.intermediate_values)] if trial.value is None else trial.value


def _fastest(trials: list[FrozenTrial]) -> dict[str, dict[str, float]]:
    """Time of the fastest trial of each value of each parameter, relative to the default's."""
    by_parameter: dict[str, dict[str, float]] = {}
    for trial in trials:
        for name, chosen in trial.params.items():
            times = by_parameter.setdefault(name, {})
            times[str(chosen)] = min(times.get(str(chosen), math.inf), _time(trial))
    return by_parameter


def _relative(taken: dict[str, Array]) -> float:
    return float(np.median(taken["candidate"]) / np.median(taken["default"]))
