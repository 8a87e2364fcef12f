"""Centre of K: one vector per request, layer and KV head, subtracted before K is quantised.

It is computed from the first tokens present when the first of them is quantised, and must not change while tokens that
were quantised with it are alive. It should be near the mean of all future tokens. Without RoPE that is the mean of the
present tokens. With RoPE the mean moves, because the common part of all tokens is rotated by their positions. So rows
are rotated back to position 0 and averaged, and the centre is the mean of the result rotated to all positions up to the
horizon. For a pair of channels that rotates fast it is near 0, however few tokens there are.

It need not be known how RoPE pairs channels, (i, i + n) or (2i, 2i + 1): with the right pairing, rows rotated back have
the longest means (over all heads of a layer, which has one RoPE), if they have a common part. A wrong pairing mixes
channels of different size, so a known one is better. If no pairing gives longer means than the plain ones, as in a
layer without RoPE, the plain means are used. The origin of positions does not matter.

Values that are not finite, or too large for fp16, are ignored, and so are rows whose largest magnitude is more than
`FAR` times the median of those of their head's rows: one broken token would shift all others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache, partial
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvstrata.cache.storage.page import NewRows
from kvstrata.cache.storage.tokens import NEW, Tokens
from kvstrata.quant import reference as quant
from kvstrata.quant.calibration import factors
from kvstrata.quant.rope import mean_rotation, pair_channels

if TYPE_CHECKING:
    from kvstrata.cache.state import CacheState
    from kvstrata.cache.storage.transaction import Transaction

CENTRE_TOKENS = 1024  # the more, the better: docs/decisions.md
HORIZON = 2048  # minimum number of positions to average over, up to max_tokens
FAR = 32.0  # a row's largest magnitude relative to the median of its head's rows; above it, the row takes no part
STRIDE = 32  # sequential additions per partial sum
TABLE = 1 << 24  # maximum number of values per batch of requests


def fix_centres(
    cache: CacheState,
    change: Transaction,
    layers: Sequence[int],
    requests: Sequence[int],
    tokens: Tokens,
    target: torch.Tensor,
    fresh: NewRows | None,
) -> torch.Tensor:
    """Centres of stored K of requests, each in its layer, float32 ``[pairs * kv_heads, D]``.

    Stored rows are divided by the balance, and so are these; ``cache.centre`` is in the space of the model's K. Centres
    of requests whose first tokens are about to be quantised are computed, and stored when the transaction completes.
    """
    places = cache.pool.to_device(np.array(requests, np.int64) * cache.layers + np.array(layers, np.int64))
    stored = cache.centre.flatten(0, 1)
    centres = stored[places]
    missing = ~cache._centred[requests, layers]
    if missing.any():
        without, chosen, chosen_target = np.flatnonzero(missing), tokens, target
        if len(without) < len(requests):
            index = np.full(len(requests), -1)
            index[without] = np.arange(len(without))
            chosen = tokens.renumbered(cache.pool.to_device(index), cache.kv_heads)
            belongs = (chosen.head_cache >= 0).nonzero().flatten()
            chosen, chosen_target = chosen[belongs], target[belongs]
        of_layers, those = np.array(layers)[without], np.array(requests)[without]
        for begun, centre in _computed(cache, of_layers, those, chosen, chosen_target, fresh):
            begun_index = cache.pool.to_device(without[begun])
            centres[begun_index] = centre
            change.set(cache._centred, (those[begun], of_layers[begun]), True)
            change.launch(partial(stored.__setitem__, places[begun_index], centre))
    return _stored(cache, centres, places)


def _stored(cache: CacheState, centres: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Convert centres ``[places, kv_heads, D]`` of the model's K to those of stored K, ``[places * kv_heads, D]``."""
    if cache.balance is not None:
        centres = centres * factors(-cache.balance.flatten(0, 1)[places])
    return centres.flatten(0, 1)


def _computed(
    cache: CacheState,
    layers: np.ndarray,
    requests: np.ndarray,
    tokens: Tokens,
    target: torch.Tensor,
    fresh: NewRows | None,
) -> Iterator[tuple[list[int], torch.Tensor]]:
    """Indices of places whose first tokens are about to be quantised, and their centres ``[n, kv_heads, D]``.

    A place is a request in one of its layers, ``layers`` and ``requests`` ``[places]``.
    """
    plain, heads = tokens.tier <= 0, cache.kv_heads
    place = tokens.head_cache // heads
    begins = torch.zeros(len(requests), dtype=torch.int32, device=cache.device)
    begins.index_add_(0, place, (plain & (target > 0)).int())
    begun = [i for i, n in enumerate(begins.tolist()) if n]
    first = plain & (tokens.position < CENTRE_TOKENS)
    last = torch.zeros(len(requests), dtype=torch.int64, device=cache.device)
    last = last.scatter_reduce(0, place.long(), tokens.position.long(), "amax")
    balance = None
    if cache.balance is not None:
        balance = factors(cache.balance[cache.pool.to_device(requests), cache.pool.to_device(layers)]).flatten(0, 1)
    each = max(TABLE // (heads * CENTRE_TOKENS * cache.head_dim), 1)
    for batch in (begun[i : i + each] for i in range(0, len(begun), each)):
        row = torch.full((len(requests),), -1, device=cache.device)
        row[batch] = torch.arange(len(batch), device=cache.device)
        row = row[place]
        index = (first & (row >= 0)).nonzero().flatten()
        chosen = tokens[index]
        k = _first_rows(cache, layers, requests, chosen, fresh)
        if balance is not None:
            k *= balance[chosen.head_cache]
        slots = (row[index] * heads + chosen.head_cache % heads, chosen.position)
        positions = horizon(last[batch] + 1, cache.max_tokens)
        yield batch, _of_rows(k, slots, (len(batch), heads), (cache.rope, cache.interleaved), positions)


def _of_rows(
    k: torch.Tensor,
    slots: tuple[torch.Tensor, torch.Tensor],
    shape: tuple[int, int],
    by_rope: tuple[Sequence[float], bool | None],
    positions: torch.Tensor,
) -> torch.Tensor:
    """`centre_of` the rows ``k [n, D]``; ``slots``: head cache and position of each, ``shape``: requests and heads."""
    rope, interleaved = by_rope
    if rope and (loops := _numba(k.device.type)) is not None:
        by = rope_tables(tuple(rope), CENTRE_TOKENS, k.device)
        means = loops.means(k, slots, shape[0] * shape[1], CENTRE_TOKENS, STRIDE, by, FAR)
        plain, *both = (x.unflatten(0, shape) for x in means)
        turned = both if interleaved is None else both[2:] if interleaved else both[:2]
        return _ahead([plain, *turned], rope, positions, interleaved)
    table, takes_part = _table(k, slots, shape[0] * shape[1])
    return centre_of(table.unflatten(0, shape), takes_part.unflatten(0, shape), rope, positions, interleaved)


@lru_cache(maxsize=8)
def _numba(device: str) -> ModuleType | None:
    if device != "cpu" or find_spec("numba") is None:
        return None
    from . import centre_numba

    return centre_numba


def _first_rows(
    cache: CacheState, layers: np.ndarray, requests: np.ndarray, tokens: Tokens, fresh: NewRows | None
) -> torch.Tensor:
    """K of plain tokens of places, including new ones: float32 ``[n, D]``."""
    new = (tokens.tier == NEW).nonzero().flatten()
    if len(new) == len(tokens) and fresh is not None:
        return fresh.k.index_select(0, tokens.slot).float()
    k = torch.zeros(len(tokens), cache.head_dim, dtype=torch.float32, device=cache.device)
    if len(new):
        assert fresh is not None
        k[new] = fresh.k[tokens.slot[new]].float()
    if len(new) < len(tokens):
        stored = (tokens.tier != NEW).nonzero().flatten()
        k[stored] = cache.buckets.read(layers, requests.tolist(), tokens[stored], 0).k.float()
    return k


def _table(
    k: torch.Tensor, slots: tuple[torch.Tensor, torch.Tensor], head_caches: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Table float32 ``[head_caches, CENTRE_TOKENS, D]`` of the rows ``k [n, D]``, and a mask of its finite values.

    Values that are not finite are 0. The mask is ``[..., D]``, or ``[..., 1]`` on a CPU if every value is finite.
    """
    finite = k.abs() <= quant.LARGEST
    table = torch.zeros(head_caches, CENTRE_TOKENS, k.shape[1], dtype=torch.float32, device=k.device)
    if k.device.type == "cpu" and bool(finite.all()):
        finite = finite[:, :1]
    else:
        k = torch.where(finite, k, 0.0)
    takes_part = torch.zeros(head_caches, CENTRE_TOKENS, finite.shape[1], dtype=torch.bool, device=k.device)
    table[slots], takes_part[slots] = k, finite
    return table, takes_part


def horizon(tokens: torch.Tensor, most: int) -> torch.Tensor:
    """Number of positions to average over: twice the tokens so far, since the final length is unknown."""
    return (2 * tokens).clamp(min=HORIZON).clamp(max=most)


def centre_of(
    table: torch.Tensor,
    takes_part: torch.Tensor,
    rope: Sequence[float],
    positions: torch.Tensor,
    interleaved: bool | None = None,
) -> torch.Tensor:
    """Centres of the heads of requests: float32 ``[requests, heads, D]``.

    Args:
        table: float32 ``[requests, heads, positions, D]``, zero where ``takes_part`` is False.
        takes_part: bool, same shape, or with one value for all of D: which values exist.
        rope: radians per position of channel pairs; empty if K is not rotated.
        positions: number of positions to average over, per request ``[requests]``.
        interleaved: True if RoPE pairs channels (2i, 2i + 1), False for (i, i + n), None if that is unknown.
    """
    table, takes_part = _without_far_rows(table, takes_part)
    if not rope:
        return _means([table], [takes_part])[0]
    n = len(rope)
    cos, sin = rope_tables(tuple(rope), table.shape[2], table.device)
    tables, parts = [table], [takes_part]
    for one, two in _pairs(n, interleaved):
        x, y, both = table[..., one], table[..., two], takes_part
        if takes_part.shape[-1] > 1:
            both = takes_part[..., one] & takes_part[..., two]
            x, y = torch.where(both, x, 0.0), torch.where(both, y, 0.0)
        tables += [x * cos + y * sin, y * cos - x * sin]
        parts += [both, both]
    return _ahead(_means(tables, parts), rope, positions, interleaved)


def _without_far_rows(table: torch.Tensor, takes_part: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``table`` and ``takes_part`` of `centre_of` without rows whose magnitude is far above that of the others.

    Maximum and (lower) median are exact in any order of the values, so all backends leave out the same rows.
    """
    largest, present = table.abs().amax(-1), takes_part.any(-1)
    ordered = torch.where(present, largest, torch.inf).sort(-1).values
    if table.device.type == "cpu" and not bool((largest > FAR * ordered[..., :1]).any()):
        return table, takes_part
    middle = (present.sum(-1, keepdim=True) - 1).clamp(min=0) // 2
    median = ordered.gather(-1, middle)
    far = (present & (largest > FAR * median) & (median > 0)).unsqueeze(-1)
    return table.masked_fill(far, 0.0), takes_part & ~far


def _pairs(n: int, interleaved: bool | None) -> tuple[tuple[slice, slice], ...]:
    """First and second channels of ``n`` pairs, for each way in which RoPE may pair them."""
    return tuple(pair_channels(n, interleaved=x) for x in ((False, True) if interleaved is None else (interleaved,)))


def _ahead(
    means: list[torch.Tensor], rope: Sequence[float], positions: torch.Tensor, interleaved: bool | None
) -> torch.Tensor:
    """Centres from the means of the rows as they are, then rotated back: ``x`` and ``y`` for each of `_pairs`."""
    plain, *turned = means
    ahead_cos, ahead_sin = (x.unsqueeze(1) for x in mean_rotation(_angles(tuple(rope), plain.device), positions))
    centre, longest = plain, _length(plain)
    for (one, two), x, y in zip(_pairs(len(rope), interleaved), turned[::2], turned[1::2], strict=True):
        mean, ahead = plain.clone(), plain.clone()
        mean[..., one], mean[..., two] = x, y
        ahead[..., one], ahead[..., two] = x * ahead_cos - y * ahead_sin, y * ahead_cos + x * ahead_sin
        length = _length(mean)
        centre = torch.where((length > longest).view(-1, 1, 1), ahead, centre)
        longest = torch.maximum(length, longest)
    return centre


@lru_cache(maxsize=8)
def rope_tables(rope: tuple[float, ...], positions: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Cos and sin of each pair's angle at each position: float32 ``[positions, pairs]``."""
    turn = torch.arange(positions, dtype=torch.float64, device=device).unsqueeze(1) * _angles(rope, device)
    return turn.cos().float(), turn.sin().float()


@lru_cache(maxsize=8)
def _angles(rope: tuple[float, ...], device: torch.device) -> torch.Tensor:
    """Radians per position, float64 ``[pairs]``; cached on the device, since an upload waits for it."""
    with torch.inference_mode(False):
        return torch.tensor(rope, dtype=torch.float64).to(device)


def _length(mean: torch.Tensor) -> torch.Tensor:
    """Sum of squares of ``[requests, heads, D]`` per request; head by head, for the same reason as in `_sum`."""
    total = torch.zeros_like(mean[:, 0, 0])
    for head in mean.square().sum(-1).unbind(1):
        total = total + head
    return total


def _means(tables: list[torch.Tensor], parts: list[torch.Tensor]) -> list[torch.Tensor]:
    """Means over positions, the second to last dimension, of the values in each table that take part; others are 0.

    All are summed together. Their counts are float32 sums too, which are exact and added in the same order.
    """
    flags = {id(part): part for part in parts}
    columns = [*tables, *(part.float() for part in flags.values())]
    sums = _sum(torch.cat(columns, -1)).split([x.shape[-1] for x in columns], -1)
    counts = dict(zip(flags, sums[len(tables) :], strict=True))
    return [total / counts[id(part)].clamp(min=1) for total, part in zip(sums, parts, strict=False)]


def _sum(table: torch.Tensor) -> torch.Tensor:
    """Sum over positions, one by one: a torch sum could change its order with the number of head caches."""
    if table.shape[-2] % STRIDE:
        table = torch.nn.functional.pad(table, (0, 0, 0, -table.shape[-2] % STRIDE))
    sums = table.unflatten(-2, (-1, STRIDE))
    for _ in range(2):
        total = torch.zeros_like(sums.select(-2, 0))
        for row in sums.unbind(-2):
            total += row
        sums = total
    return sums
