"""Append: new tokens go to the plain bucket while the budget has room, otherwise to the tiers that a plan assigns.

    room in existing pages       ──▶ plain rows (move/append.py), nothing else
    room in the budget           ──▶ allocate pages, plain rows
    room in all layers at once   ──▶ settle_ahead (scopes.py), plain rows
    none                         ──▶ old and new tokens of the scope planned together, one move

Nearly every decoded token takes the first path, layer by layer.
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
    request_list, lengths = list(requests), list(lengths)
    if mass is None and queries is not None:
        raise ValueError(f"queries: expected None without mass, got {queries!r}")
    if not sum(lengths):
        cache._use(request_list)
        return
    cache.pool.note_stream()
    cache._forget(cache.requests if cache.budget.shared else request_list)
    if mass is not None or not append_plain(cache, None, layer, k, v, request_list, lengths):
        with cache._operation() as change:
            prepared = _append(cache, change, layer, k, v, request_list, lengths, mass, queries)
        if prepared is not None:
            cache._last_prompt = LastPrompt.of(arguments, request_list, lengths, prepared)
    if mass is None and min(lengths) == max(lengths) == 1:
        remember(cache, *arguments, request_list)


def _append(
    cache: CacheState,
    change: Transaction,
    layer: int,
    k: torch.Tensor,
    v: torch.Tensor,
    request_list: list[int],
    lengths: list[int],
    mass: torch.Tensor | None,
    queries: int | None,
) -> PreparedPrompt | PreparedPlan | None:
    """Append rows that need pages or come with mass; returns what other layers of a prompt can reuse."""
    fits = fits_plain(cache, layer, request_list, lengths)
    if mass is None and (fits or settle_ahead(cache, change, layer, request_list, lengths)):
        append_plain(cache, change, layer, k, v, request_list, lengths)
        return None
    importance = None
    if mass is not None:
        if queries is None and len(set(lengths)) > 1:
            raise ValueError(f"queries: expected the number of queries in mass, got None with lengths {lengths}")
        queries = check_int("queries", lengths[0] if queries is None else queries, 1)
        ends = [int(cache._lengths[r, layer]) + n for r, n in zip(request_list, lengths, strict=True)]
        mass = check_mass(cache, mass, len(request_list), max(ends))
        if cache.policy.name == "importance":
            importance = new_importance(cache, layer, request_list, lengths, mass, queries)
            growing = [i for i, n in enumerate(lengths) if n]  # without new tokens there are no queries
            growing_requests, growing_ends = ([x[i] for i in growing] for x in (request_list, ends))
            growing_mass = mass if len(growing) == len(mass) else mass[growing]
            add_mass(cache, change, layer, growing_requests, growing_mass, queries, growing_ends)
    if fits:
        append_plain(cache, change, layer, k, v, request_list, lengths, importance)
        return None
    return _append_settling(cache, change, layer, k, v, request_list, lengths, importance)


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
    """Append new rows to the plain buckets; without a transaction only if they fit existing pages, else returns False.

    Such an append allocates no page, so the budget need not be checked: it never shrinks as tokens are added.
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
    request_list: list[int],
    lengths: list[int],
    importance: torch.Tensor | None,
) -> PreparedPrompt | PreparedPlan | None:
    """Plan new tokens together with existing ones; requests that need not settle take them as plain rows.

    ``importance [rows, kv_heads]`` of the new tokens; None is that of tokens that no query has seen. Returns what
    other layers can reuse if these are prompts.
    """
    plain = [] if cache.budget.shared else np.flatnonzero(fits_each(cache, layer, request_list, lengths)).tolist()
    settling = [i for i in range(len(request_list)) if i not in plain]
    places = [(layer, scope) for scope in scopes_of(cache, [request_list[i] for i in settling])]
    coming = {request_list[i]: lengths[i] for i in settling}
    ends = [[int(cache._lengths[r, layer]) + coming.get(r, 0) for r in scope] for _, scope in places]
    rows = stored_rows(cache, layer, k, v, request_list, lengths)
    prepared: PreparedPrompt | PreparedPlan | None = None
    if settle_cuda.supports(cache):
        fresh = _fresh(cache, layer, places, request_list, lengths, coming, importance)
        planned = settle_cuda.plan(cache, places, ends, fresh, rows)
        check_plans(cache, places, ends, planned.needed)
        cache._activate(change, request_list)
        centred, empty = cache._centred[request_list, layer], not cache._lengths[request_list, layer].any()
        centres, moved = settle_cuda.move(cache, change, planned, rows)
        if empty and moved is not None and not plain and min(lengths) > cache.policy.settle_every:
            k_read, v_read = moved.counted.rows
            if k_read is rows.k and v_read is rows.v:
                given = cache, layer, np.array(request_list), rows, centres
                if settle_cuda.is_prompt(cache, planned):
                    prepared = PreparedPrompt(*given, moved, centred)
                elif prompt_mass_cuda.supports(cache, planned):
                    prepared = PreparedPlan(*given, planned, centred)
    else:
        tokens = _with_new(cache, layer, places, request_list, lengths, settling, importance)
        target = plan_scopes(cache, places, tokens, ends)
        cache._activate(change, request_list)
        move_tokens(cache, change, places, tokens, target, rows)
    settled = [request_list[i] for i in settling]
    after = cache._lengths[settled, layer] + np.array([lengths[i] for i in settling])
    cache._set_lengths(change, settled, layer, after)
    for i in plain:
        part = slice(sum(lengths[:i]), sum(lengths[: i + 1]))
        first = None if importance is None else importance[part]
        append_plain(cache, change, layer, k[part], v[part], [request_list[i]], [lengths[i]], first)
    return prepared


def _fresh(
    cache: CacheState,
    layer: int,
    places: Sequence[Place],
    request_list: list[int],
    lengths: list[int],
    coming: dict[int, int],
    importance: torch.Tensor | None,
) -> Fresh:
    """New tokens of places, in the form that kernels read."""
    first_row = dict(zip(request_list, np.cumsum([0, *lengths]).tolist(), strict=False))
    requests = pairs(places)[1]
    counts, first = (np.array([x.get(r, 0) for r in requests], np.int64) for x in (coming, first_row))
    positions = cache._lengths[requests, layer].astype(np.int64)
    unseen = initial_of(cache.policy.mode, positions + counts)
    return Fresh(counts, first, positions, unseen, importance)


def _with_new(
    cache: CacheState,
    layer: int,
    places: Sequence[Place],
    request_list: list[int],
    lengths: list[int],
    settling: list[int],
    importance: torch.Tensor | None,
) -> Tokens:
    """Tokens of places, including the new ones of requests that settle."""
    new = _new_tokens(cache, request_list, layer, lengths)
    if importance is not None:
        new = replace(new, importance=importance.flatten())
    index_of = {request: i for i, request in enumerate(pairs(places)[1])}
    index = np.full(len(request_list), -1)
    index[settling] = [index_of[request_list[i]] for i in settling]
    coming = new.renumbered(cache.pool.to_device(index), cache.kv_heads)
    if len(settling) < len(request_list):
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
