"""``prefill_attention_cached`` in torch: decode's reference over blocks of queries, merged with new rows."""

from __future__ import annotations

import torch

from kvstrata.attention.decode import reference as decode
from kvstrata.attention.decode.job import Job
from kvstrata.attention.prefill import reference as prefill
from kvstrata.attention.prefill.job import PrefillJob, Result

from .job import CachedJob

QUERIES = 128  # per call of decode's reference


def run(job: CachedJob) -> Result:
    """Run a checked job, request by request."""
    out = torch.empty(job.q.shape, dtype=job.q.dtype, device=job.q.device)
    lse = torch.empty(job.q.shape[:2], dtype=torch.float32, device=job.q.device)
    source = job.paged.seq_lens if job.buckets is None else job.buckets.seq_lens  # type: ignore[union-attr]
    lengths = source.cpu()[job.requests].tolist()
    outside, first = job.k_new is not None, 0
    with torch.no_grad():
        for request, length, new in zip(job.requests, lengths, job.new, strict=True):
            rows = slice(first, first + new)
            _over_cache(job, request, length if outside else length - new, rows, out, lse)
            if outside and new:
                parts = (out[rows].float(), lse[rows]), _among_new(job, rows)
                merged, lse[rows] = _merge(parts)
                out[rows] = merged.to(out.dtype)
            first += new
    return out, lse if job.return_lse else None


def _over_cache(job: CachedJob, request: int, before: int, rows: slice, out: torch.Tensor, lse: torch.Tensor) -> None:
    """Attention of a request's queries, the first at position ``before``, each block as if the request ended with it.

    If there are new rows outside the cache, sinks are left to `_among_new`.
    """
    sinks = job.sinks if job.k_new is None else None
    for begin in range(rows.start, rows.stop, QUERIES):
        part = slice(begin, min(begin + QUERIES, rows.stop))
        options = (job.scale, job.sliding_window, job.softcap, sinks, True, False)
        block = Job(job.q[part].unsqueeze(0), job.buckets, job.paged, [request], job.kv_heads, job.max_length, *options)
        part_out, part_lse, _ = decode.decode_at(block, [before + part.stop - rows.start])
        assert part_lse is not None
        out[part], lse[part] = part_out[0], part_lse[0]


def _among_new(job: CachedJob, rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of a request's new tokens to each other, and its lse; float32."""
    assert job.k_new is not None
    assert job.v_new is not None
    q, k, v = (x[rows].float().unsqueeze(0) for x in (job.q, job.k_new, job.v_new))
    new = rows.stop - rows.start
    options = (True, job.scale, job.sliding_window, job.softcap, job.sinks, True)
    out, lse = prefill.run(PrefillJob(q, k, v, None, None, new, new, *options))
    assert lse is not None
    return out[0], lse[0]


def _merge(parts: tuple[tuple[torch.Tensor, torch.Tensor], ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Output ``[n, H, D]`` and lse ``[n, H]`` over the keys of all parts."""
    tops = torch.stack([lse for _, lse in parts])
    lse = tops.logsumexp(0)
    weights = (tops - lse.masked_fill(lse == -torch.inf, 0.0)).exp().unsqueeze(-1)
    return (weights * torch.stack([out for out, _ in parts])).sum(0), lse
