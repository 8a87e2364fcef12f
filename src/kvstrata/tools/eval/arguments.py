"""Arguments that the commands share, checked before any work: the model, a calibration, lengths and budgets."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvstrata.cache import TieredCache
from kvstrata.cache.policy.budget import check_budget
from kvstrata.quant.calibration import Calibration
from kvstrata.tools import terminal as ui

from . import model as models

if TYPE_CHECKING:
    import torch
    from rich.console import Console


def check_cache(budgets: list[float], policies: list[str], tiers: list[list[str]]) -> None:
    """Check arguments before a model is loaded; ValueError names one that no cache would accept."""
    for budget in budgets:
        check_budget(budget, None)
    for policy in policies:
        TieredCache(1, 1, 64, budget=None, policy=policy)
    for names in tiers:
        TieredCache(1, 1, 64, budget=None, tiers=names)


def load_calibration(path: Path | None) -> tuple[Calibration | None, str]:
    """Calibration of a file, and the digest of its bytes; errors name --calibration."""
    if path is None:
        return None, ""
    try:
        return Calibration.load(path), hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    except (OSError, ValueError) as error:
        raise ValueError(f"--calibration: {ui.text_of(error).removeprefix('path: ')}") from error


def lengths_of(net: Any, lengths: list[int], given: bool, console: Console) -> list[int]:
    """Lengths that the model's context allows: ValueError if one was asked for that is longer, else a note."""
    room = models.context_of(net)
    if room is None or max(lengths) <= room:
        return lengths
    if given:
        raise ValueError(f"--tokens: expected at most {room}, the context of this model, got {max(lengths)}")
    short = [n for n in lengths if n <= room] or [room]
    console.print(f"Texts of {' and '.join(map(str, short))} tokens: this model's context is {room}.")
    return short


def budgets_of(
    net: Any, budgets: list[float], tiers: list[list[str]], pages: dict[str, Any], given: bool, console: Console
) -> list[float]:
    """Budgets in which the narrowest tier fits: ValueError if one was asked for in which it does not, else a note."""
    possible = []
    choices: list[list[str] | None] = [*tiers] or [None]
    for budget in budgets:
        try:
            for entry in choices:
                models.first_token(net, budget=budget, tiers=entry, **pages)
            possible.append(budget)
        except ValueError as error:
            if given:
                raise ValueError(f"--budget {budget:g}: {error}") from error
            console.print(f"Without a budget of {budget:g}: {error}", markup=False)
    return possible


def load_model(
    model: str | None,
    torch_device: torch.device,
    dtype: torch.dtype | None,
    console: Console,
    calibration: Calibration | None = None,
) -> tuple[Any, Any]:
    """Model and tokenizer, checked to run over a `StrataCache`, with the calibration if there is one."""
    console.print(f"Loading {model or 'SmolLM2-135M'} ..")
    net, tokenizer = models.load(model, torch_device, dtype)
    models.check_compressible(net)
    if calibration is not None:
        models.first_token(net, calibration)
    if hint := ui.numba_hint(torch_device):
        console.print(hint, markup=False, soft_wrap=True)
    return net, tokenizer
