"""Attention mass that the queries of a prompt give to its tokens: the initial importance in the cache.

A decode step gets mass from `decode_attention`. Prompts attend with the model's own function, which returns no
probabilities, so up to `limit` queries of each head are recomputed here: the newest, since only they see the newest
tokens, and evenly spaced ones of those before. Mass is summed over the query heads of a KV head, so these take other
queries each. With three heads, every sixth of the queries before the newest:

    head 0    . . . . . x . . . . . x . . . . . x x x x x
    head 1    . . . x . . . . . x . . . . . x . . x x x x
    head 2    . x . . . . . x . . . . . x . . . . x x x x
"""

from __future__ import annotations

from functools import lru_cache
from importlib.util import find_spec
from types import ModuleType
from typing import NamedTuple

import torch

from kvstrata.cache import TieredCache

from .logits import Logits
from .mask import visible

CHUNK = 16  # queries at a time; their scores determine the memory needed
NEWEST = 64  # queries at the end of a prompt that are all sampled, but at most half of the limit


class Sample(NamedTuple):
    """Queries ``begin`` to ``end`` of a prompt, represented by every ``stride``-th of each query head.

    Head 0 of a group takes the last one, and so on back; the others are staggered by a fraction of the stride.
    """

    begin: int
    end: int
    stride: int

    @property
    def size(self) -> int:
        return (self.end - self.begin) // self.stride

    def chosen(self, group: int) -> list[slice]:
        """The sampled queries of each head of a group, oldest first."""
        ends = (self.end - head * self.stride // group for head in range(group))
        return [slice(end - 1 - (self.size - 1) * self.stride, end, self.stride) for end in ends]

    def of(self, x: torch.Tensor, group: int) -> torch.Tensor:
        """Values ``[rows, sampled, group]`` of the sampled queries, from ``x [rows, queries]``."""
        return torch.stack([x[:, chosen] for chosen in self.chosen(group)], 2)

    def of_query(self, query: torch.Tensor, group: int) -> torch.Tensor:
        """``[rows, heads, sampled, D]`` from ``[rows, heads, queries, D]``, a view if all heads take the same."""
        first, *others = self.chosen(group)
        if all(chosen == first for chosen in others):
            return query[:, :, first]
        by_head = query.unflatten(1, (-1, group)).unbind(2)
        parts = [of[:, :, chosen] for of, chosen in zip(by_head, (first, *others), strict=True)]
        return torch.stack(parts, 2).flatten(1, 2)


def samples_of(queries: int, limit: int) -> tuple[Sample, ...]:
    """Samples of at most ``limit`` queries of a prompt per head: the newest, and evenly spaced ones of those before."""
    newest = min(NEWEST, limit // 2)
    if queries <= limit or not newest:
        return (Sample(0, queries, -(-queries // limit)),)
    edge = queries - newest
    return (Sample(edge, queries, 1), Sample(0, edge, -(-edge // (limit - newest))))


def weights_of(is_token: torch.Tensor, samples: tuple[Sample, ...], group: int) -> list[torch.Tensor]:
    """Number of queries that each sampled one represents, float32 ``[rows, sampled, group]`` of each sample.

    ``is_token``: bool ``[rows, queries]``, False for padding, which has no weight. A head's weights of a sample sum to
    its tokens, or to 0 if it has sampled only padding.
    """
    weights = []
    for sample in samples:
        flag = sample.of(is_token, group).float()
        tokens = is_token[:, sample.begin : sample.end].sum(1).view(-1, 1, 1)
        weights.append(flag * (tokens / flag.sum(1, keepdim=True).clamp(min=1)))
    return weights


class _Prompt(NamedTuple):
    """Arguments of `prompt_mass`, and the sampled queries, the last one first."""

    query: torch.Tensor
    key: torch.Tensor
    query_position: torch.Tensor
    column_position: torch.Tensor
    sampled: torch.Tensor  # int64 [sampled, group], their indices
    weight: torch.Tensor  # float32 [rows, sampled, group], number of queries that each represents
    no_padding: bool  # True if padding is ruled out


def prompt_mass(
    query: torch.Tensor,
    key: torch.Tensor,
    query_position: torch.Tensor,
    column_position: torch.Tensor,
    is_token: torch.Tensor,
    logits: Logits,
    limit: int,
    in_order: bool | None = None,
) -> torch.Tensor:
    """Mass of every column of ``key``, summed over queries and the query heads of a KV head.

    Args:
        query: ``[rows, heads, queries, D]``.
        key: ``[rows, kv_heads, columns, D]``; the last columns are those of the queries.
        query_position: ``[rows, queries]``; a query sees the positions up to its own.
        column_position: ``[rows, kv_heads or 1, columns]``, -1 for a column without a token.
        is_token: bool ``[rows, queries]``, False for padding.
        logits: how scores become logits.
        limit: maximum number of sampled queries of a head.
        in_order: True if column i is the token at position i in all rows, False if not; None finds out, if that needs
            no synchronisation with a GPU.

    Returns float32 ``[rows, kv_heads, columns]`` whose sum over a KV head is about (number of query tokens) * (its
    heads).
    """
    queries = query.shape[2]
    if _by_triton(query):
        positions = None if in_order else (query_position, column_position, is_token)
        sampled = sampled_queries(query, key.shape[1], limit)
        return triton_mass(sampled, queries, key, logits, limit, positions)
    samples, group = samples_of(queries, limit), query.shape[1] // key.shape[1]
    number = torch.arange(queries, device=query.device)[None]
    sampled = torch.cat([x.of(number, group)[0].flip(0) for x in samples])
    weight = torch.cat([x.flip(1) for x in weights_of(is_token, samples, group)], 1)
    # Without padding, only columns of the chunk's own queries can be hidden.
    on_cpu = query.device.type == "cpu"
    no_padding = in_order or (on_cpu and bool(is_token.all()) and bool((column_position >= 0).all()))
    prompt = _Prompt(query, key, query_position, column_position, sampled, weight, no_padding)
    if on_cpu and (loops := _numba()) is not None:
        return _compiled_mass(loops, prompt, logits)
    return _torch_mass(prompt, logits)


def _by_triton(query: torch.Tensor) -> bool:
    return query.device.type == "cuda"


def sampled_queries(query: torch.Tensor, kv_heads: int, limit: int) -> torch.Tensor:
    """Copy of the sampled queries of ``[rows, heads, queries, D]``, sample by sample."""
    group = query.shape[1] // kv_heads
    return torch.cat([x.of_query(query, group) for x in samples_of(query.shape[2], limit)], 2)


def triton_mass(
    sampled: torch.Tensor,
    queries: int,
    key: torch.Tensor,
    logits: Logits,
    limit: int,
    positions: tuple[torch.Tensor, ...] | None = None,
) -> torch.Tensor:
    """`prompt_mass` from the `sampled_queries` of a prompt with ``queries`` queries; does not synchronise.

    ``positions``: of queries, of columns, and ``is_token``; None if column i is the token at position i in all rows.
    """
    from .mass_triton import sampled_mass

    samples, group = samples_of(queries, limit), sampled.shape[1] // key.shape[1]
    key, total = key.detach(), None
    weights = None if positions is None else weights_of(positions[2], samples, group)
    for i, (sample, q) in enumerate(zip(samples, sampled.detach().split([x.size for x in samples], 2), strict=True)):
        columns = key.shape[2] - queries + sample.end  # that its queries see
        seen = key[:, :, :columns]
        if positions is None or weights is None:
            weight = (sample.end - sample.begin) / sample.size
            mass = sampled_mass(q, seen, sample.stride, weight, logits)
        else:
            query_position, column_position, _ = positions
            own = sample.of(query_position, group), column_position[..., :columns]
            places = (x.to(torch.int32).contiguous() for x in own)
            mass = sampled_mass(q, seen, sample.stride, weights[i], logits, *places)
        if total is None:
            total = mass
        else:
            total[..., :columns].add_(mass)
    assert total is not None
    return total


def load_kernels(heads: int, kv_heads: int, dim: int, dtype: torch.dtype, device: torch.device) -> None:
    """Compile and load the kernels that `triton_mass` of prompts without padding needs on a CUDA device."""
    q = torch.zeros(1, 64, heads, dim, dtype=dtype, device=device).transpose(1, 2)
    if _by_triton(q):
        triton_mass(q, 64, q[:, :kv_heads], Logits(1.0), 64)


@lru_cache(maxsize=1)
def _numba() -> ModuleType | None:
    if find_spec("numba") is None:
        return None
    from . import mass_numba

    return mass_numba


def _compiled_mass(loops: ModuleType, prompt: _Prompt, logits: Logits) -> torch.Tensor:
    """`prompt_mass` of the sampled queries, one row and KV head at a time."""
    query, key, query_position, column_position, sampled, weight, no_padding = prompt
    (rows, kv_heads, columns), queries = key.shape[:3], query.shape[2]
    mass = torch.zeros(rows, kv_heads, columns, dtype=torch.float32, device=query.device)
    by_head = query.detach().unflatten(1, (kv_heads, -1))
    keys, own = key.detach(), (columns - queries + sampled).flatten()
    positions = column_position[..., :0] if no_padding else column_position
    positions, heads = positions.expand(-1, kv_heads, -1), torch.arange(sampled.shape[1], device=query.device)
    for row in range(rows):
        places, weights = query_position[row, sampled].flatten(), weight[row].flatten()
        for head in range(kv_heads):
            its = logits
            if logits.sinks is not None:
                its = logits._replace(sinks=logits.sinks.view(kv_heads, -1)[head])
            loops.add_mass(
                by_head[row, head, heads, sampled].flatten(0, 1), keys[row, head], own, places,
                positions[row, head].contiguous(), weights, its, mass[row, head],
            )  # fmt: skip
    return mass


def _torch_mass(prompt: _Prompt, logits: Logits) -> torch.Tensor:
    """`prompt_mass` of the sampled queries, all rows and heads together."""
    query, key, query_position, column_position, sampled, weight, no_padding = prompt
    rows, kv_heads, columns = key.shape[:3]
    group = sampled.shape[1]
    mass = torch.zeros(rows * kv_heads, 1, columns, dtype=torch.float32, device=query.device)
    keys = key.float().flatten(0, 1).transpose(1, 2)
    by_head, heads = query.unflatten(1, (kv_heads, group)), torch.arange(group, device=query.device)
    for first in range(0, len(sampled), CHUNK):
        queries = sampled[first : first + CHUNK]
        own = columns - query.shape[2] + queries  # the column of each query, which sees no later one
        end = int(own[0, 0]) + 1
        q = by_head[:, :, heads, queries].float().mul_(logits.scale)
        scores = torch.bmm(q.view(rows * kv_heads, -1, q.shape[-1]), keys[..., :end])
        if logits.softcap is not None:
            scores = scores.div_(logits.softcap).tanh_().mul_(logits.softcap)
        begin = int(own[-1, -1]) if no_padding else 0
        hidden = ~visible(query_position[:, queries].flatten(1), column_position[..., begin:end])
        scores.view(rows, kv_heads, -1, end)[..., begin:].masked_fill_(hidden, -torch.inf)
        if logits.sinks is not None:
            sink = logits.sinks.float().view(1, kv_heads, 1, group).expand(rows, -1, len(queries), -1)
            scores = torch.cat([scores, sink.reshape(len(scores), -1, 1)], -1)
        seen = scores.softmax(-1)[..., :end]
        if not no_padding:
            seen.nan_to_num_(0.0)  # padding rows see nothing
        stands_for = weight[:, None, first : first + CHUNK].expand(-1, kv_heads, -1, -1).reshape(len(scores), 1, -1)
        mass[..., :end] += torch.bmm(stands_for, seen)
    return mass.view(rows, kv_heads, columns)


class MassLedger:
    """Mass of decode steps, passed to the cache every `STEPS` steps, since it is not read before the next settling."""

    STEPS = 16

    def __init__(self, cache: TieredCache, layer: int) -> None:
        self.cache, self.layer = cache, layer
        self.mass: torch.Tensor | None = None
        self.queries = 0

    def add(self, mass: torch.Tensor, queries: int) -> None:
        """Add ``mass [requests, kv_heads, positions]`` of a decode step of all requests, which may only have grown."""
        if self.mass is None:
            self.mass = mass
        else:
            mass[..., : self.mass.shape[2]] += self.mass
            self.mass = mass
        self.queries += queries
        if self.queries >= self.STEPS:
            self.flush()

    def flush(self) -> None:
        """Add the collected mass to the importance of the cache."""
        if self.mass is not None:
            self.cache.update_importance(self.layer, self.mass, queries=self.queries)
        self.mass, self.queries = None, 0
