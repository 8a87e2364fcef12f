"""Optuna's sampler restricted to a list: it proposes values one by one, and the trial gets the nearest listed choice.

A space is a product, and only few of its choices may be valid (one in five of prefill's). Invalid proposals would use
up trials without measuring anything.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.trial import FrozenTrial

from kvstrata.jit.tuned import Choice

from .space import Space


class NearestSampler(optuna.samplers.BaseSampler):
    """Gets a proposal from `inner` and the choice of the trial from `pick`, which returns None if none is left."""

    def __init__(
        self, inner: optuna.samplers.BaseSampler, space: Space, pick: Callable[[Choice], Choice | None]
    ) -> None:
        self.inner, self.space, self.pick = inner, space, pick

    def infer_relative_search_space(self, study: optuna.Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        return {name: CategoricalDistribution(values) for name, values in self.space.choices.items()}

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        proposal: Choice = {}
        for name, distribution in search_space.items():
            if self.space.applies(name, proposal):
                proposal[name] = self.inner.sample_independent(study, trial, name, distribution)
        return self.pick(proposal) or {}

    def sample_independent(
        self, study: optuna.Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        return self.inner.sample_independent(study, trial, param_name, param_distribution)

    def reseed_rng(self) -> None:
        self.inner.reseed_rng()


def nearest(choices: Sequence[Choice], proposal: Choice, rng: random.Random) -> Choice:
    """Choice that shares most values with the proposal; ties are broken at random."""
    shared = [sum(proposal.get(name) == value for name, value in choice.items()) for choice in choices]
    most = max(shared)
    return rng.choice([choice for choice, count in zip(choices, shared, strict=True) if count == most])
