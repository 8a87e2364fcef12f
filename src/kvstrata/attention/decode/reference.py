"""``decode_attention`` in torch: float32 on the packed bytes. It is the CPU path and the reference for the kernels.

Each tier is a part with scores; one softmax runs over all parts, and each part multiplies its weights with its values.
There is no loop over heads or pages. Requests of very different lengths run one by one, so that padding never costs
more than the tokens.
"""

from __future__ import annotations

import torch

from kvstrata.quant.calibration import factors

from .job import Job, Result
from .parts import Coded, Plain, paged_parts, tier_parts


def decode(job: Job) -> Result:
    """Compute out, lse or None, and mass or None."""
    with torch.no_grad():
        lengths = _lengths(job)
        if sum(lengths) * 2 >= max(lengths, default=0) * len(lengths):
            return decode_at(job, lengths)
        results = [
            decode_at(job._replace(q=job.q[i : i + 1], requests=[request]), lengths[i : i + 1])
            for i, request in enumerate(job.requests)
        ]
        out, lse, mass = zip(*results, strict=True)
        return torch.cat(out), _cat(lse), _cat(mass)


def _cat(parts: tuple[torch.Tensor | None, ...]) -> torch.Tensor | None:
    given = [part for part in parts if part is not None]
    return torch.cat(given) if given else None


def _lengths(job: Job) -> list[int]:
    source = job.paged.seq_lens if job.buckets is None else job.buckets.seq_lens  # type: ignore[union-attr]
    return source.cpu()[job.requests].tolist()


def _hide(scores: torch.Tensor, part: Plain | Coded, own: torch.Tensor | None, job: Job) -> torch.Tensor:
    """Set ``scores [G, R, N]`` to -inf, in place, for tokens hidden from the queries at ``own [G, q_len, 1, 1]``."""
    if part.valid is not None:
        scores.masked_fill_(~part.valid.unsqueeze(1), -torch.inf)
    if own is not None:
        assert part.position is not None
        position = part.position[:, None, None].long()
        hidden = position > own
        if job.sliding_window is not None:
            hidden |= position <= own - job.sliding_window
        by_query = scores.unflatten(1, (own.shape[1], -1))
        by_query.masked_fill_(hidden, -torch.inf)
    return scores


def _softmax(scores: torch.Tensor, sinks: torch.Tensor | None, certain: bool) -> torch.Tensor:
    """Softmax over the last axis; zeros for a row of -inf, unless ``certain`` rules that out."""
    logits = scores if sinks is None else torch.cat([scores, sinks], 2)
    weights = torch.softmax(logits, 2)
    if not certain or sinks is not None:  # a sink may be -inf
        weights = weights.masked_fill_((logits == -torch.inf).all(2, keepdim=True), 0.0)
    return weights[:, :, : scores.shape[2]]


def decode_at(job: Job, lengths: list[int]) -> Result:
    """Decode with these lengths. Later tokens are hidden from several queries, but not from a single one."""
    batch, q_len, heads, dim = job.q.shape
    kv_heads, group, device = job.kv_heads, job.group, job.q.device
    groups, rows = batch * kv_heads, q_len * group
    ordered = q_len > 1 or job.sliding_window is not None
    if job.buckets is not None:
        parts = tier_parts(job.buckets, job.requests, job.q.dtype, ordered or job.return_mass)
    else:
        assert job.paged is not None
        parts = paged_parts(job.paged, job.requests)
    own = None
    if ordered:
        first = torch.tensor(lengths, dtype=torch.int64, device=device).repeat_interleave(kv_heads) - q_len
        own = (first.unsqueeze(1) + torch.arange(q_len, device=device)).view(groups, q_len, 1, 1)

    def by_query(x: torch.Tensor) -> torch.Tensor:
        size = x.shape[2]  # explicit: -1 is ambiguous for an empty batch
        return x.reshape(batch, kv_heads, q_len, group, size).transpose(1, 2).reshape(batch, q_len, heads, size)

    # Rows of a KV head: its query heads, query by query.
    q = job.q.float().mul(job.scale).view(batch, q_len, kv_heads, group, dim).transpose(1, 2)
    q = q.reshape(groups, rows, dim)
    if job.buckets is not None and job.buckets.balance is not None:
        q = q * factors(job.buckets.balance[job.requests]).flatten(0, 1).unsqueeze(1)
    parts_scores = []
    for part in parts:
        s = part.scores(q)
        if job.softcap is not None:
            s = torch.tanh(s / job.softcap) * job.softcap
        parts_scores.append(_hide(s, part, own, job))
    scores = torch.cat(parts_scores, 2) if parts else torch.zeros(groups, rows, 0, dtype=torch.float32, device=device)
    sinks = None
    if job.sinks is not None:
        sinks = job.sinks.view(1, kv_heads, 1, group).expand(batch, -1, q_len, -1).reshape(groups, rows, 1)
    certain = not ordered and any(part.least > 0 for part in parts)
    weights = _softmax(scores, sinks, certain)

    out = None
    mass = torch.zeros(groups, job.max_length, dtype=torch.float32, device=device) if job.return_mass else None
    sizes = [s.shape[2] for s in parts_scores]
    for part, part_weights in zip(parts, weights.split(sizes, 2), strict=True):
        value = part.values(part_weights)
        out = value if out is None else out.add_(value)
        if mass is not None:
            assert part.position is not None
            position = part.position.long()
            if part.valid is not None:
                position = position.masked_fill(~part.valid, 0)
            mass.scatter_add_(1, position, part_weights.sum(1))
    out = torch.zeros_like(q) if out is None else out
    lse = None
    if job.return_lse:
        logits = scores if sinks is None else torch.cat([scores, sinks], 2)
        lse = by_query(torch.logsumexp(logits, 2, keepdim=True))[..., 0]
    return by_query(out).to(job.q.dtype), lse, None if mass is None else mass.view(batch, kv_heads, job.max_length)
