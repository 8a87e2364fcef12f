"""``prefill_attention_cached``: a chunk of new tokens of each request over everything its cache holds.

Like `decode_attention`, for hundreds of queries at once: K and V of the new tokens are in the cache, in any tier. Pages
of all tiers are unpacked to rows a chunk of tokens at a time, never the cache as a whole.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvstrata.attention.arguments import check_positive, check_sinks, check_sliding_window, kernel_sinks
from kvstrata.attention.decode import op, reference
from kvstrata.attention.decode.job import Job
from kvstrata.attention.output import AttentionOutput
from kvstrata.attention.prefill.job import Result
from kvstrata.backends import missing
from kvstrata.cache.tiered_cache import TieredCache
from kvstrata.checks import whole_numbers
from kvstrata.store.paged_cache import PagedCache

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
            raise ValueError("lengths: expected None with q [requests, new tokens, heads, head_dim], got some")
        if q.shape[0] != rows:
            raise ValueError(f"q: expected {rows} rows, one per request, got {q.shape[0]}")
        return [q.shape[1]] * rows
    if lengths is None:
        raise ValueError("lengths: expected the new tokens of each request, with q [tokens, heads, head_dim], got None")
    new = whole_numbers("lengths", lengths)
    if len(new) != rows or any(n < 0 for n in new) or sum(new) != q.shape[0]:
        raise ValueError(f"lengths: expected {rows} that sum to {q.shape[0]}, the tokens of q, got {new}")
    return new


def prefill_attention_cached(
    q: torch.Tensor,
    cache: TieredCache | PagedCache,
    layer: int = 0,
    *,
    lengths: Sequence[int] | None = None,
    requests: Sequence[int] | None = None,
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
        cache: a `TieredCache` or a `PagedCache`, which already holds K and V of the new tokens.
        layer: layer of the cache; 0 for a PagedCache.
        lengths: number of new tokens of each request, zeros allowed; they are concatenated in q.
        requests: request of each row of q (or of each length); None is all in use, ascending.
        scale, sliding_window, softcap, sinks: as in `decode_attention`.
        return_lse: also return the natural log-sum-exp of the scores, sinks included.
        backend: ``auto``, ``reference`` or ``triton``.

    Query i of n new ones is at position ``length - n + i`` and sees no later token. Besides the result, scratch for a
    chunk of unpacked tokens is allocated, never for the cache as a whole.

    Returns:
        out in q's shape and dtype. With ``return_lse`` an `AttentionOutput` with a float32 lse ``[B, new, Hq]`` (with
        ``lengths``: ``[T, Hq]``) and no mass.

    Raises:
        ValueError, TypeError: an argument has a wrong shape, stride, value, device or dtype; the error names it.
        RuntimeError: the backend is not available.

    Neither q nor the cache is mutated. Safe under CUDA-graph capture over a PagedCache on the ``triton`` backend, once
    the same call has run outside it; a replay reads the lengths and blocks of that time. Do not capture it over a
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
    )
    out, lse = run(job, _choose(backend, job))
    out = out.view(q.shape)
    return out if lse is None else AttentionOutput(out, lse.view(q.shape[:-1]))


def _choose(backend: str, job: CachedJob) -> str:
    if backend == "auto":
        return "triton" if job.q.device.type == "cuda" and missing("triton", job.q.device) is None else "reference"
    if reason := missing(backend, job.q.device):
        raise RuntimeError(f"backend: {reason}")
    return backend


def run(job: CachedJob, backend: str) -> Result:
    """Run a checked job on an available backend."""
    if backend == "reference":
        return _reference(job)
    from . import triton as cached_triton

    return cached_triton.run(job)


QUERIES = 128  # per call of decode's reference


def _reference(job: CachedJob) -> Result:
    """Decode's reference over blocks of queries, each as if the request ended with the block."""
    out = torch.empty(job.q.shape, dtype=job.q.dtype, device=job.q.device)
    lse = torch.empty(job.q.shape[:2], dtype=torch.float32, device=job.q.device) if job.return_lse else None
    source = job.paged.seq_lens if job.buckets is None else job.buckets.seq_lens  # type: ignore[union-attr]
    lengths = source.cpu()[job.requests].tolist()
    first = 0
    with torch.no_grad():
        for request, length, new in zip(job.requests, lengths, job.new, strict=True):
            for begin in range(0, new, QUERIES):
                end = min(begin + QUERIES, new)
                part = slice(first + begin, first + end)
                options = (job.scale, job.sliding_window, job.softcap, job.sinks, job.return_lse, False)
                block = Job(
                    job.q[part].unsqueeze(0), job.buckets, job.paged, [request], job.kv_heads, job.max_length, *options
                )
                block_out, block_lse, _ = reference.decode_at(block, [length - new + end])
                out[part] = block_out[0]
                if lse is not None and block_lse is not None:
                    lse[part] = block_lse[0]
            first += new
    return out, lse
