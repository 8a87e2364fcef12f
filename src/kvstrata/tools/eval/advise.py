"""The fewest bytes that preserve a model's predictions: sensitivity first, then a search over budgets.

Sensitivity determines whether K or V needs the wider codes, which selects the tiers: the budget's defaults if it is K,
for which they are chosen, otherwise a separate list. Then the smallest budget whose KL against 16 bit stays below the
bound is found by bisection; each step decodes the user's text through the cache. A budget that holds only for longer
texts is not kept. The result is a JSON object of
`StrataCache` arguments, which `StrataCache.from_file` reads.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from . import contenders
from .measure import decode
from .sensitivity import Sensitivity
from .sizes import sizes_of

# How much more an error in K costs than one in V; None: tiers follow the budget.
TIERS: dict[str, tuple[str, ...] | None] = {
    "K over V": None,
    "balanced": ("K8V8", "K4V4", "K4V3", "K3V3", "K3V2", "K2V2"),
    "V over K": ("K8V8", "K4V8", "K4V4", "K3V4", "K3V3", "K2V3", "K2V2"),
}


@dataclass(frozen=True)
class Step:
    budget: float
    kl: float
    fraction: float  # bytes at the end, as a fraction of 16 bit
    fits: bool
    holds_from: int = 0  # tokens from which on the budget holds, if the text has fewer


@dataclass(frozen=True)
class Advice:
    """``arguments`` is None if no budget stays within the bound."""

    family: str
    arguments: dict[str, Any] | None
    steps: list[Step]


def family(sensitivity: Sensitivity) -> str:
    """Key of `TIERS` for a model."""
    return "K over V" if sensitivity.ratio > 1.5 else "V over K" if sensitivity.ratio < 0.67 else "balanced"


def advise(
    model: Any,
    ids: torch.Tensor,
    sensitivity: Sensitivity,
    bound: float,
    *,
    prompt: int,
    chunk: int,
    steps: int = 5,
    low: float = 0.15,
    high: float = 0.6,
    tick: Callable[[Step], None] = lambda step: None,
    **options: Any,
) -> Advice:
    """Search between ``low`` and ``high``; ``bound`` is the mean KL in nats, ``options`` are those of a `StrataCache`,
    as plain data."""
    if not bound > 0:
        raise ValueError(f"bound: expected a positive KL in nats, got {bound!r}")
    rows, tokens = ids.shape
    name, sizes = family(sensitivity), sizes_of(model)
    _, exact = decode(
        model, ids, contenders.exact().make(model.config, rows, tokens), prompt=prompt, chunk=chunk, keep=True
    )
    steps_taken: list[Step] = []

    def arguments_at(budget: float) -> dict[str, Any]:
        pages = {key: value for key, value in options.items() if key != "calibration"}  # only for StrataCache
        return {"tiers": list(TIERS[name] or contenders.tiers_at(budget, sizes, tokens, **pages)), **options}

    def measure(budget: float) -> Step:
        contender = contenders.strata(budget, **arguments_at(budget))
        try:
            cache = contender.make(model.config, rows, tokens)
            scores, _ = decode(model, ids, cache, prompt=prompt, chunk=chunk, exact=exact)
        except (RuntimeError, ValueError) as error:
            # Below the lowest tier nothing fits; any other error is a real one.
            if "budget" not in str(error):
                raise
            return Step(budget, float("inf"), budget, False)
        kl = sum(map(sum, scores.kl)) / (rows * sum(scores.count))
        holds_from = _holds_from(cache, budget)
        fits = kl <= bound and not holds_from
        return Step(budget, kl, contender.size(cache) / sizes.full_bytes(rows, tokens), fits, holds_from)

    def record(budget: float) -> Step:
        step = measure(budget)
        steps_taken.append(step)
        tick(step)
        return step

    best = record(high)
    if best.fits:
        under = low
        for _ in range(steps):
            middle = round((under + best.budget) / 2, 3)
            if not under < middle < best.budget:
                break
            step = record(middle)
            if step.fits:
                best = step
            else:
                under = middle
    arguments = {"budget": best.budget, **arguments_at(best.budget)} if best.fits else None
    return Advice(name, arguments, steps_taken)


def _holds_from(cache: Any, budget: float) -> int:
    """Tokens from which on the budget holds, if the cache has fewer and takes more, so that its KL says nothing of the
    budget; else 0."""
    if not cache.memory().tokens:  # windows only
        return 0
    tiered = cache.tiered
    short = tiered.length(0) < tiered.budget.floor_tokens and tiered.memory().fraction > budget
    return tiered.budget.floor_tokens if short else 0


def write(advice: Advice, path: Path) -> None:
    """Write the arguments as `StrataCache.from_file` reads them."""
    if advice.arguments is None:
        raise ValueError("advice: expected one that keeps the bound, got none")
    path.write_text(json.dumps(advice.arguments, indent=1) + "\n", encoding="utf-8")
