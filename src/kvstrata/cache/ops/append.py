"""Append: new tokens to the plain bucket while the budget has room, else to the tiers that a plan finds for them.

    room in pages that are there ──▶ plain rows (move/append.py), nothing else
    room in the budget           ──▶ pages taken, plain rows
    room in all layers at once   ──▶ settle_ahead (scopes.py), plain rows
    none                         ──▶ old and new tokens of the scope planned together, one move

The first is the way of nearly every decoded token, layer by layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvstrata.cache.move import apply
from kvstrata.cache.move.append_job import Job
from kvstrata.cache.policy import prompt_mass_cuda, settle_cuda
from kvstrata.cache.policy.importance import initial, initial_of
from kvstrata.cache.policy.mass import add_mass, new_importance
from kvstrata.cache.policy.prompt_cuda import PreparedPrompt
from kvstrata.cache.policy.prompt_mass_cuda import PreparedPlan
from kvstrata.cache.policy.room import fits_each, fits_plain
from kvstrata.cache.policy.scopes import Place, check_plans, move_tokens, pairs, plan_scopes, scopes_of, settle_ahead
from kvstrata.cache.storage.tokens import NEW, Fresh, Tokens
from kvstrata.checks import check_int

from .append_one import append_one, remember
from .append_prompt import LastPrompt, append_prompt, stored_rows
from .arguments import check_mass, ragged

if TYPE_CHECKING:
    from kvstrata.cache.state import CacheState
    from kvstrata.cache.storage.transaction import Transaction


def append_tokens(
    cache: CacheState,
    layer: int,
    k: torch.Tensor,
    v: torch.Tensor,
    requests: Sequence[int] | None,
    lengths: Sequence[int] | None,
    mass: torch.Tensor | None,
    queries: int | None,
) -> None:
    """`TieredCache.append`."""
    if type(layer) is not int or not 0 <= layer < cache.layers:
        cache._check_layer(layer)
    if mass is None and queries is None and append_one(cache, layer, k, v, requests, lengths):
        return
    arguments = (k, v, requests, lengths)
    if append_prompt(cache, layer, *arguments, mass, queries):
        return
    k, v, requests, lengths = ragged(cache, layer, k, v, requests, lengths)
    asked, lengths = list(requests), list(lengths)
    if mass is None and queries is not None:
        raise ValueError(f"queries: expected None without mass, got {queries!r}")
    if not sum(lengths):
        cache._use(asked)
        return
    cache.pool.note_stream()
    cache._forget(cache.requests if cache.budget.shared else asked)
    if mass is not None or not append_plain(cache, None, layer, k, v, asked, lengths):
        with cache._operation() as change:
            prepared = _append(cache, change, layer, k, v, asked, lengths, mass, queries)
        if prepared is not None:
            cache._last_prompt = LastPrompt.of(arguments, asked, lengths, prepared)
    if mass is None and min(lengths) == max(lengths) == 1:
        remember(cache, *arguments, asked)


def _append(
    cache: CacheState,
    change: Transaction,
    layer: int,
    k: torch.Tensor,
    v: torch.Tensor,
    asked: list[int],
    lengths: list[int],
    mass: torch.Tensor | None,
    queries: int | None,
) -> PreparedPrompt | PreparedPlan | None:
    """Rows that need pages, or come with mass; returns what other layers of a prompt may use again."""
    fits = fits_plain(cache, layer, asked, lengths)
    if mass is None and (fits or settle_ahead(cache, change, layer, asked, lengths)):
        append_plain(cache, change, layer, k, v, asked, lengths)
        return None
    importance = None
    if mass is not None:
        if queries is None and len(set(lengths)) > 1:
            raise ValueError(f"queries: expected how many are in mass, got None with lengths {lengths}")
        queries = check_int("queries", lengths[0] if queries is None else queries, 1)
        ends = [int(cache._lengths[r, layer]) + n for r, n in zip(asked, lengths, strict=True)]
        mass = check_mass(cache, mass, len(asked), max(ends))
        if cache.policy.name == "importance":
            importance = new_importance(cache, layer, asked, lengths, mass, queries)
            growing = [i for i, n in enumerate(lengths) if n]  # without new tokens there are no queries
            given = mass if len(growing) == len(asked) else mass[growing]
            add_mass(cache, change, layer, [asked[i] for i in growing], given, queries, [ends[i] for i in growing])
    if fits:
        append_plain(cache, change, layer, k, v, asked, lengths, importance)
        return None
    return _append_settling(cache, change, layer, k, v, asked, lengths, importance)


def append_plain(
    cache: CacheState,
    change: Transaction | None,
    layer: int,
    k: torch.Tensor,
    v: torch.Tensor,
    requests: list[int],
    lengths: list[int],
    importance: torch.Tensor | None = None,
) -> bool:
    """New rows to the plain buckets; without a transaction only if they fit pages that are there, else False.

    Such an append takes no page, so it needs no look at the budget, which never shrinks as tokens come.
    """
    buckets, ids, counts = cache.buckets, np.array(requests), np.array(lengths)
    before = buckets.room(layer, ids, counts) if change is None else buckets.make_room(change, layer, ids, counts)
    if before is None:
        return False
    starts = cache._lengths[ids, layer].astype(np.int64)
    ends = starts + counts
    first = initial_of(cache.policy.mode, ends)
    job = Job(
        buckets, layer, ids, counts, starts, before, k, v, first, importance, cache._device_lengths, cache.balance
    )
    apply.append(job, change)
    if change is None:
        cache._lengths[ids, layer] = ends
        cache._use(requests)
    else:
        change.set(cache._lengths, (ids, layer), ends)
        cache._activate(change, requests)
    return True


def _append_settling(
    cache: CacheState,
    change: Transaction,
    layer: int,
    k: torch.Tensor,
    v: torch.Tensor,
    asked: list[int],
    lengths: list[int],
    importance: torch.Tensor | None,
) -> PreparedPrompt | PreparedPlan | None:
    """Plan new tokens together with those that are there; requests that need not settle take them as plain rows.

    ``importance [rows, kv_heads]``: of the new tokens, None for that of tokens nobody has seen. Returns what other
    layers may use again if these are prompts.
    """
    plain = [] if cache.budget.shared else np.flatnonzero(fits_each(cache, layer, asked, lengths)).tolist()
    settling = [i for i in range(len(asked)) if i not in plain]
    places = [(layer, scope) for scope in scopes_of(cache, [asked[i] for i in settling])]
    coming = {asked[i]: lengths[i] for i in settling}
    ends = [[int(cache._lengths[r, layer]) + coming.get(r, 0) for r in scope] for _, scope in places]
    rows = stored_rows(cache, layer, k, v, asked, lengths)
    prepared: PreparedPrompt | PreparedPlan | None = None
    if settle_cuda.supports(cache):
        fresh = _fresh(cache, layer, places, asked, lengths, coming, importance)
        planned = settle_cuda.plan(cache, places, ends, fresh, rows)
        check_plans(cache, places, ends, planned.needed)
        cache._activate(change, asked)
        centred, empty = cache._centred[asked, layer], not cache._lengths[asked, layer].any()
        centres, moved = settle_cuda.move(cache, change, planned, rows)
        if empty and moved is not None and not plain and min(lengths) > cache.policy.settle_every:
            k_read, v_read = moved.counted.rows
            if k_read is rows.k and v_read is rows.v:
                given = cache, layer, np.array(asked), rows, centres
                if settle_cuda.is_prompt(cache, planned):
                    prepared = PreparedPrompt(*given, moved, centred)
                elif prompt_mass_cuda.supports(cache, planned):
                    prepared = PreparedPlan(*given, planned, centred)
    else:
        tokens = _with_new(cache, layer, places, asked, lengths, settling, importance)
        target = plan_scopes(cache, places, tokens, ends)
        cache._activate(change, asked)
        move_tokens(cache, change, places, tokens, target, rows)
    settled = [asked[i] for i in settling]
    after = cache._lengths[settled, layer] + np.array([lengths[i] for i in settling])
    cache._set_lengths(change, settled, layer, after)
    for i in plain:
        part = slice(sum(lengths[:i]), sum(lengths[: i + 1]))
        first = None if importance is None else importance[part]
        append_plain(cache, change, layer, k[part], v[part], [asked[i]], [lengths[i]], first)
    return prepared


def _fresh(
    cache: CacheState,
    layer: int,
    places: Sequence[Place],
    asked: list[int],
    lengths: list[int],
    coming: dict[int, int],
    importance: torch.Tensor | None,
) -> Fresh:
    """New tokens of places as kernels read them."""
    first_row = dict(zip(asked, np.cumsum([0, *lengths]).tolist(), strict=False))
    requests = pairs(places)[1]
    counts, first = (np.array([x.get(r, 0) for r in requests], np.int64) for x in (coming, first_row))
    positions = cache._lengths[requests, layer].astype(np.int64)
    unseen = initial_of(cache.policy.mode, positions + counts)
    return Fresh(counts, first, positions, unseen, importance)


def _with_new(
    cache: CacheState,
    layer: int,
    places: Sequence[Place],
    asked: list[int],
    lengths: list[int],
    settling: list[int],
    importance: torch.Tensor | None,
) -> Tokens:
    """Tokens of places, the new ones of settling requests among them."""
    new = _new_tokens(cache, asked, layer, lengths)
    if importance is not None:
        new = replace(new, importance=importance.flatten())
    index_of = {request: i for i, request in enumerate(pairs(places)[1])}
    index = np.full(len(asked), -1)
    index[settling] = [index_of[asked[i]] for i in settling]
    coming = new.renumbered(cache.pool.to_device(index), cache.kv_heads)
    if len(settling) < len(asked):
        settles = np.repeat(index >= 0, np.array(lengths) * cache.kv_heads)
        coming = coming[cache.pool.to_device(np.flatnonzero(settles))]
    return Tokens.cat([cache.buckets.snapshots(*pairs(places)), coming])


def _new_tokens(cache: CacheState, requests: Sequence[int], layer: int, lengths: Sequence[int]) -> Tokens:
    """Tokens to be appended, row by row, head by head."""
    rows, count = sum(lengths), torch.tensor(list(lengths), device="cpu")
    index = torch.repeat_interleave(torch.arange(len(lengths), device="cpu"), count)
    starts = torch.tensor([int(cache._lengths[r, layer]) for r in requests], device="cpu")
    first = count.cumsum(0) - count
    position = (torch.arange(rows, device="cpu") - first[index] + starts[index]).to(cache.device)
    ends = (starts + count)[index].to(cache.device)
    index = index.to(cache.device)
    heads = torch.arange(cache.kv_heads, device=cache.device)
    each = torch.ones_like(heads)
    return Tokens(
        (index.unsqueeze(1) * cache.kv_heads + heads).flatten(),
        torch.full((rows * cache.kv_heads,), NEW, device=cache.device),
        torch.arange(rows * cache.kv_heads, device=cache.device),
        torch.outer(position, each).flatten(),
        initial(cache.policy.mode, torch.outer(ends, each).flatten()),
    )
