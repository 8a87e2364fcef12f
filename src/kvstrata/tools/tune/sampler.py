"""Optuna's sampler held to a list: it proposes values one by one, and the trial gets the nearest choice of the list.

A space is a product, and few of its choices may make sense (one in five of prefill's). Proposals that do not
would use up trials without measuring anything.
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


class Listed(optuna.samplers.BaseSampler):
    """Asks `inner` for a proposal and `pick` for the choice that the trial gets; `pick` gives None if none is left."""

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
            if self.space.matters(name, proposal):
                proposal[name] = self.inner.sample_independent(study, trial, name, distribution)
        return self.pick(proposal) or {}

    def sample_independent(
        self, study: optuna.Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        return self.inner.sample_independent(study, trial, param_name, param_distribution)

    def reseed_rng(self) -> None:
        self.inner.reseed_rng()


def nearest(choices: Sequence[Choice], proposal: Choice, rng: random.Random) -> Choice:
    """The choice that shares most values with the proposal; one of them at random if there are several."""
    shared = [sum(proposal.get(name) == value for name, value in choice.items()) for choice in choices]
    most = max(shared)
    return rng.choice([choice for choice, count in zip(choices, shared, strict=True) if count == most])
