"""``prefill_attention_cached``: a chunk of new tokens of each request over all tokens of its cache.

Like `decode_attention`, for hundreds of queries at once: K and V of the new tokens are in the cache, in any tier, or
passed as rows. Pages of all tiers are unpacked to rows a chunk of tokens at a time, never the whole cache.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvstrata.attention.arguments import check_positive, check_sinks, check_sliding_window, kernel_sinks
from kvstrata.attention.decode import op
from kvstrata.attention.output import AttentionOutput
from kvstrata.attention.prefill.job import Result
from kvstrata.attention.prefill.op import HEAD_DIMS
from kvstrata.backends import missing
from kvstrata.cache.tiered_cache import TieredCache
from kvstrata.checks import whole_numbers
from kvstrata.store.paged_cache import PagedCache

from . import reference
from .job import CachedJob

BACKENDS = ("auto", "reference", "triton")


def _new_tokens(q: torch.Tensor, lengths: Sequence[int] | None, rows: int, heads: int, dim: int) -> list[int]:
    """Number of new tokens of each request, from the shape of q or as given."""
    if not isinstance(q, torch.Tensor):
        raise TypeError(f"q: expected a tensor, got {type(q).__name__}")
    if q.dim() not in (3, 4) or q.shape[-1] != dim or q.shape[-2] == 0 or q.shape[-2] % heads:
        raise ValueError(
            f"q: expected [requests, new tokens, a multiple of {heads}, {dim}], or [tokens, ..] with lengths, "
            f"got shape {tuple(q.shape)}"
        )
    if q.dim() == 4:
        if lengths is not None:
            raise ValueError("lengths: expected None with q [requests, new tokens, heads, head_dim], got a list")
        if q.shape[0] != rows:
            raise ValueError(f"q: expected {rows} rows, one per request, got {q.shape[0]}")
        return [q.shape[1]] * rows
    if lengths is None:
        raise ValueError("lengths: expected the new tokens of each request, with q [tokens, heads, head_dim], got None")
    new = whole_numbers("lengths", lengths)
    if len(new) != rows or any(n < 0 for n in new) or sum(new) != q.shape[0]:
        raise ValueError(f"lengths: expected {rows} that sum to {q.shape[0]}, the tokens of q, got {new}")
    return new


def _check_new_rows(q: torch.Tensor, k_new: torch.Tensor | None, v_new: torch.Tensor | None, kv_heads: int) -> None:
    """Check rows of new tokens, which are given both or not at all; q is already checked."""
    if (k_new is None) != (v_new is None):
        raise ValueError("v_new: expected to be given exactly when k_new is")
    shape = (*q.shape[:-2], kv_heads, q.shape[-1])
    for name, x in (("k_new", k_new), ("v_new", v_new)):
        if x is None:
            continue
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name}: expected a tensor, got {type(x).__name__}")
        if x.shape != shape:
            raise ValueError(f"{name}: expected shape {shape}, with the tokens of q, got {tuple(x.shape)}")
        if x.dtype != q.dtype:
            raise TypeError(f"{name}: expected {q.dtype} as q, got {x.dtype}")
        if x.device != q.device:
            raise ValueError(f"{name}: expected a tensor on {q.device}, where q is, got {x.device}")
        if x.stride(-1) != 1:
            raise ValueError(f"{name}: expected an inner stride of 1, got {x.stride(-1)}")


def prefill_attention_cached(
    q: torch.Tensor,
    cache: TieredCache | PagedCache,
    layer: int = 0,
    *,
    lengths: Sequence[int] | None = None,
    requests: Sequence[int] | None = None,
    k_new: torch.Tensor | None = None,
    v_new: torch.Tensor | None = None,
    scale: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    return_lse: bool = False,
    backend: str = "auto",
) -> torch.Tensor | AttentionOutput:
    """Causal attention of the newest tokens of each request, many or few, over all tokens its cache holds.

    Args:
        q: ``[B, new, Hq, D]``, or ``[T, Hq, D]`` with ``lengths`` if requests have different numbers of new tokens; the
            cache's dtype (any of float32, float16, bfloat16 over fp8 pages); any strides, the last one 1.
        cache: a `TieredCache` or a `PagedCache`, which already holds K and V of the new tokens unless k_new and v_new
            are given.
        layer: layer of the cache; 0 for a PagedCache.
        lengths: number of new tokens of each request, zeros allowed; they are concatenated in q.
        requests: request of each row of q (or of each length); None is all in use, ascending.
        k_new, v_new: ``[B, new, Hkv, D]``, or ``[T, Hkv, D]`` with ``lengths``: rows of the new tokens, which the cache
            does not hold; q's dtype, any strides, the last one 1. They are read as they are, not quantised.
        scale, sliding_window, softcap, sinks: as in `decode_attention`.
        return_lse: also return the natural log-sum-exp of the scores, including sinks.
        backend: ``auto``, ``reference`` or ``triton``.

    Query i of n new ones is at position ``length - n + i`` (with k_new and v_new at ``length + i``) and sees no later
    token. Besides the result, scratch memory for a chunk of unpacked tokens is allocated, never for the whole cache.

    Returns:
        out in q's shape and dtype. With ``return_lse`` an `AttentionOutput` with a float32 lse ``[B, new, Hq]`` (with
        ``lengths``: ``[T, Hq]``) and no mass.

    Raises:
        ValueError, TypeError: an argument has a wrong shape, stride, value, device or dtype; the error names it.
        RuntimeError: the backend is not available; with k_new ``triton`` needs a head_dim of `prefill_attention`.

    No argument is mutated. Safe under CUDA-graph capture over a PagedCache on the ``triton`` backend, once
    the same call has run outside it; a replay reads the lengths and blocks at that time. Do not capture it over a
    TieredCache: a captured call is sized for a full cache and may need kernels that no earlier call has compiled.

    Example:
        >>> cache = kvstrata.TieredCache(1, 2, 64, budget=0.25, recent_tokens=64, page_tokens=16, dtype=torch.float32)
        >>> cache.append(0, *torch.randn(2, 1000, 2, 64))  # the last 40 of them are the new chunk
        >>> kvstrata.prefill_attention_cached(torch.randn(1, 40, 8, 64), cache).shape
        torch.Size([1, 40, 8, 64])
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend: expected one of {BACKENDS}, got {backend!r}")
    rows = op.requests_of(cache, requests)
    new = _new_tokens(q, lengths, len(rows), cache.kv_heads, cache.head_dim)
    op.check_query(q, cache)
    _check_new_rows(q, k_new, v_new, cache.kv_heads)
    check_positive("scale", scale)
    check_positive("softcap", softcap)
    check_sliding_window(sliding_window)
    check_sinks(sinks, q.shape[-2], q.device)
    buckets, paged, max_length = op.source_of(cache, layer, rows)
    job = CachedJob(
        q.detach().flatten(0, 1) if q.dim() == 4 else q.detach(),
        new,
        buckets,
        paged,
        rows,
        cache.kv_heads,
        max_length,
        cache.head_dim**-0.5 if scale is None else float(scale),
        sliding_window,
        None if softcap is None else float(softcap),
        None if sinks is None else kernel_sinks(sinks),
        return_lse,
        *(None if x is None else x.detach().flatten(0, -3) for x in (k_new, v_new)),
    )
    out, lse = run(job, _choose(backend, job))
    out = out.view(q.shape)
    return out if lse is None else AttentionOutput(out, lse.view(q.shape[:-1]))


def _choose(backend: str, job: CachedJob) -> str:
    if backend == "auto":
        return "triton" if job.q.device.type == "cuda" and _missing("triton", job) is None else "reference"
    if reason := _missing(backend, job):
        raise RuntimeError(f"backend: {reason}")
    return backend


def _missing(backend: str, job: CachedJob) -> str | None:
    """Reason why ``backend`` cannot run this job, or None."""
    dim = job.q.shape[2]
    if backend == "triton" and job.k_new is not None and dim not in HEAD_DIMS:
        return f"triton supports new rows outside a cache with a head_dim of {HEAD_DIMS}, got {dim}"
    return missing(backend, job.q.device)


def run(job: CachedJob, backend: str) -> Result:
    """Run a checked job on an available backend."""
    if backend == "reference":
        return reference.run(job)
    from . import triton as cached_triton

    return cached_triton.run(job)
