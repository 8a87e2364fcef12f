"""A later prompt on a GPU: attention over packed earlier tokens and the new rows, and its attention mass.

    new rows ──prefill_attention──▶ out, lse ─┬▶ out, lse ──▶ mass of sampled queries: new rows, then
    pages    ──unpack a chunk─────────────────┘               K of the pages, a chunk at a time

At most one chunk of earlier tokens is unpacked at a time (`prefill_attention_cached`), and rows may have any length and
any padding. Mass uses the log-sum-exp of that attention, so K is unpacked a second time, but read only once.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from kvstrata.attention.cache_warmup import trial_run, uses_mass
from kvstrata.attention.decode.op import source_of
from kvstrata.attention.output import AttentionOutput
from kvstrata.attention.prefill_cached.job import CachedJob
from kvstrata.attention.prefill_cached.op import prefill_attention_cached
from kvstrata.cache import TieredCache

from . import prefill
from .logits import Logits
from .mass import samples_of, weights_of


class Rows(NamedTuple):
    """Queries ``[rows, heads, n, D]``, K and V ``[rows, kv_heads, n, D]`` of the new columns."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor


class Columns(NamedTuple):
    """New columns of a prompt, on the host."""

    tokens: np.ndarray  # bool [rows, n], False for padding
    position: np.ndarray  # [rows, n]; padding has the position of the token before it


def supports(query: torch.Tensor, cache: TieredCache) -> bool:
    """True if `attend` supports ``query [rows, heads, n, D]`` over this cache."""
    return prefill.supports(query) and query.dtype == cache.dtype


def attend(
    rows: Rows, logits: Logits, cache: TieredCache, layer: int, columns: Columns, limit: int | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention output ``[rows, n, heads, D]``, and mass ``[rows, kv_heads, the longest row after it]``.

    The cache holds the tokens before the new columns, and is not changed. Mass is that of up to ``limit`` sampled
    queries, as in `prompt_mass`; None without a limit.
    """
    batch, heads, new, dim = rows.query.shape
    q, k, v = (x.transpose(1, 2) for x in rows)
    lengths = index = None
    if not columns.tokens.all():
        lengths, index = columns.tokens.sum(1).tolist(), cache.pool.to_device(np.flatnonzero(columns.tokens))
        q, k, v = (x.flatten(0, 1)[index] for x in (q, k, v))
    scale, softcap, sinks = logits
    result = prefill_attention_cached(
        q, cache, layer, lengths=lengths, requests=range(batch), k_new=k, v_new=v, scale=scale, softcap=softcap,
        sinks=sinks, return_lse=True,
    )  # fmt: skip
    assert isinstance(result, AttentionOutput)
    out, lse, _ = result
    assert lse is not None
    if index is not None:
        out = out.new_zeros(batch * new, heads, dim).index_copy_(0, index, out).view(batch, new, heads, dim)
        lse = lse.new_zeros(batch * new, heads).index_copy_(0, index, lse).view(batch, new, heads)
    return out, None if limit is None else _mass(rows, logits, cache, layer, columns, lse, limit)


def load_kernels(cache: TieredCache, heads: int) -> None:
    """Compile and load the kernels that `attend` with ``heads`` query heads needs over a cache, without padding."""
    query = torch.zeros(1, 64, heads, cache.head_dim, dtype=cache.dtype, device=cache.device).transpose(1, 2)
    if supports(query, cache):
        trial, key = trial_run(cache), query[:, : cache.kv_heads]
        columns = Columns(np.ones((1, 64), bool), trial.length(0) + np.arange(64)[None])
        attend(Rows(query, key, key), Logits(1.0), trial, 0, columns, 64 if uses_mass(cache) else None)


def _mass(
    rows: Rows, logits: Logits, cache: TieredCache, layer: int, columns: Columns, lse: torch.Tensor, limit: int
) -> torch.Tensor:
    """Mass of sampled queries, whose log-sum-exp is known."""
    from kvstrata.attention.prefill_cached.staging_triton import key_chunks
    from kvstrata.attention.prefill_cached.triton import STAGED

    from .mass_triton import put_mass

    (batch, heads, new, _), kv_heads = rows.query.shape, cache.kv_heads
    group, samples, upload = heads // kv_heads, samples_of(new, limit), cache.pool.to_device
    new_position = upload(np.where(columns.tokens, columns.position, -1).astype(np.int32)).unsqueeze(1)
    longest = int(columns.position.max()) + 1
    mass = torch.zeros(len(samples), batch, longest, kv_heads, dtype=torch.float32, device=lse.device)
    position, parts = torch.from_numpy(columns.position.astype(np.int32)), []
    weights_by_sample = weights_of(torch.from_numpy(columns.tokens), samples, group)
    for out, sample, weight in zip(mass, samples, weights_by_sample, strict=True):
        seen = slice(0, sample.end)  # new columns that its queries see
        tops = sample.of_query(lse.transpose(1, 2).unsqueeze(3), group)[..., 0]  # [batch, heads, sampled]
        tops = tops.unflatten(1, (kv_heads, group)).transpose(2, 3).contiguous()
        own, weights = (upload(x.numpy()) for x in (sample.of(position, group), weight))
        query = sample.of_query(rows.query.detach(), group)
        key = rows.key.detach()[:, :, seen]
        put_mass(out, query, tops, key, sample.stride, weights, logits, own, new_position[..., seen])
        parts.append((out, query, tops, weights, own))
    requests = list(range(batch))
    buckets, _, past = source_of(cache, layer, requests)
    sizes = (kv_heads, past, logits.scale, None, None, None, False)
    job = CachedJob(parts[0][1][0].transpose(0, 1), [], buckets, None, requests, *sizes)
    for key, position in key_chunks(job, STAGED):
        for out, query, tops, weights, own in parts:
            put_mass(out, query, tops, key, None, weights, logits, own, position)
    return mass.sum(0).transpose(1, 2) if len(samples) > 1 else mass[0].transpose(1, 2)
