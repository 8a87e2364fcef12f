"""Appends prompts layer by layer: what the first layer prepared is reused for the others.

As long as arguments match and the layer is also empty, only pages, one upload and the launches remain
(policy/prompt_cuda.py); with mass also a wait for the plan (policy/prompt_mass_cuda.py). Any other append takes the
normal path.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvstrata.cache.policy.balance import divided
from kvstrata.cache.policy.mass import add_mass, new_importance
from kvstrata.cache.policy.prompt_cuda import PreparedPrompt
from kvstrata.cache.policy.prompt_mass_cuda import PreparedPlan
from kvstrata.cache.storage.page import NewRows
from kvstrata.call_cache import guard_of

from .arguments import check_mass

if TYPE_CHECKING:
    from kvstrata.cache.state import CacheState

Arguments = tuple[torch.Tensor, torch.Tensor, Sequence[int] | None, Sequence[int] | None]  # k, v, requests, seq_lens


def stored_rows(
    cache: CacheState, layer: int, k: torch.Tensor, v: torch.Tensor, requests: Sequence[int], lengths: Sequence[int]
) -> NewRows:
    """New rows ``[tokens, kv_heads, head_dim]`` as they are stored, ``[tokens * kv_heads, head_dim]``."""
    stored = divided(cache, layer, k, requests, lengths)
    return NewRows(stored.detach().reshape(-1, cache.head_dim), v.detach().reshape(-1, cache.head_dim))


def _listed(given: Sequence[int] | None) -> list[int] | None:
    """The list as given, or None; an empty list for anything that is not a plain sequence."""
    return None if given is None else list(given) if type(given) in (list, tuple, range) else []


@dataclass(frozen=True)
class LastPrompt:
    """Arguments of an append, and what it prepared."""

    requests: list[int] | None  # as given
    seq_lens: list[int] | None
    guard: Callable[..., bool]  # True for k and v of the same type, shape and strides
    request_list: list[int]
    lengths: list[int]
    ends: np.ndarray
    prepared: PreparedPrompt | PreparedPlan

    @classmethod
    def of(
        cls, arguments: Arguments, request_list: list[int], lengths: list[int], prepared: PreparedPrompt | PreparedPlan
    ) -> LastPrompt | None:
        """Remember these arguments; None if that is not worthwhile."""
        k, v, requests, seq_lens = arguments
        lists = _listed(requests), _listed(seq_lens)
        if [] in lists or k.stride(-1) != 1 or v.stride(-1) != 1:
            return None
        return cls(*lists, guard_of((k, v)), request_list, lengths, np.array(lengths), prepared)


def append_prompt(
    cache: CacheState,
    layer: int,
    k: torch.Tensor,
    v: torch.Tensor,
    requests: Sequence[int] | None,
    seq_lens: Sequence[int] | None,
    mass: torch.Tensor | None,
    queries: int | None,
) -> bool:
    """Append if the arguments match those of the last prompts and the layer is also empty; otherwise return False."""
    last = cache._last_prompt
    if last is None or not last.guard(k, v) or not last.prepared.fits(cache, layer):
        return False
    if _listed(requests) != last.requests or _listed(seq_lens) != last.seq_lens:
        return False
    if mass is None:
        if queries is not None or not isinstance(last.prepared, PreparedPrompt):
            return False
    elif type(queries) is not int or queries < 1 or not isinstance(last.prepared, PreparedPlan):
        return False
    if k.dim() == 4:
        k, v = k.flatten(0, 1), v.flatten(0, 1)
    rows = stored_rows(cache, layer, k, v, last.request_list, last.lengths)
    if not last.prepared.accepts(rows):
        return False
    if mass is not None:
        mass = check_mass(cache, mass, len(last.request_list), max(last.lengths))
    cache.pool.note_stream()
    cache._forget(last.request_list)
    with cache._operation() as change:
        if isinstance(last.prepared, PreparedPrompt):
            last.prepared.prepare(cache, change, layer, rows)
        elif mass is not None and queries is not None:
            importance = new_importance(cache, layer, last.request_list, last.lengths, mass, queries)
            add_mass(cache, change, layer, last.request_list, mass, queries, last.lengths)
            last.prepared.prepare(cache, change, layer, rows, importance, last.lengths)
        cache._activate(change, last.request_list)
        cache._set_lengths(change, last.request_list, layer, last.ends)
    return True
