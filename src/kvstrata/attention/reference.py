"""``decode_attention`` in torch: float32 on the packed bytes, the CPU path and the truth that kernels are tested with.

Parts (one per tier) give scores, one softmax runs over all of them, parts take the weights back. No loop over heads or
pages; requests of very different lengths go one by one, so that padding never costs more than the tokens.
"""

from __future__ import annotations

import torch

from .op import Job, Result
from .parts import Coded, Plain, paged_parts, tier_parts


def decode(job: Job) -> Result:
    """out, lse or None, mass or None."""
    with torch.no_grad():
        lengths = _lengths(job)
        if sum(lengths) * 2 >= max(lengths, default=0) * len(lengths):
            return _decode(job, lengths)
        results = [
            _decode(job._replace(q=job.q[i : i + 1], requests=[request]), lengths[i : i + 1])
            for i, request in enumerate(job.requests)
        ]
        out, lse, mass = zip(*results, strict=True)
        return torch.cat(out), _cat(lse), _cat(mass)


def _cat(parts: tuple[torch.Tensor | None, ...]) -> torch.Tensor | None:
    given = [part for part in parts if part is not None]
    return torch.cat(given) if given else None


def _lengths(job: Job) -> list[int]:
    source = job.paged.lengths if job.buckets is None else job.buckets.length  # type: ignore[union-attr]
    return source.cpu()[job.requests].tolist()


def _hidden(part: Plain | Coded, lengths: list[int], job: Job) -> torch.Tensor:
    """What a query must not see: bool ``[G, q_len or 1, 1, N]``."""
    hidden = ~part.valid
    q_len = job.q.shape[1]
    if q_len == 1 and job.window is None:
        return hidden[:, None, None]
    last = torch.tensor(lengths, device=hidden.device).repeat_interleave(job.kv_heads).unsqueeze(1) - q_len
    last = (last + torch.arange(q_len, device=hidden.device)).view(-1, q_len, 1, 1)  # a query's own position
    position = part.position[:, None, None].long()
    hidden = hidden[:, None, None] | (position > last)
    return hidden if job.window is None else hidden | (position <= last - job.window)


def _decode(job: Job, lengths: list[int]) -> Result:
    batch, q_len, heads, dim = job.q.shape
    kv_heads, group = job.kv_heads, job.group
    if job.buckets is not None:
        parts = tier_parts(job.buckets, job.requests, job.q.dtype)
    else:
        assert job.paged is not None
        parts = paged_parts(job.paged, job.requests)
    device = job.q.device
    # Rows of a KV head: its query heads, query by query.
    q = job.q.float().mul(job.scale).view(batch, q_len, kv_heads, group, dim).transpose(1, 2)
    q = q.reshape(batch * kv_heads, q_len * group, dim)
    scores = []
    for part in parts:
        s = part.scores(q)
        if job.softcap is not None:
            s = job.softcap * torch.tanh(s / job.softcap)
        shape = (len(s), q_len, group, -1)
        scores.append(s.reshape(shape).masked_fill_(_hidden(part, lengths, job), -torch.inf).flatten(1, 2))
    empty = torch.empty(*q.shape[:2], 0, device=device)
    weights = torch.cat(scores, 2) if scores else empty
    sink = torch.full((1,), -torch.inf, device=device)
    if job.sinks is not None:
        sink = job.sinks.view(1, kv_heads, 1, group).expand(batch, -1, q_len, -1).reshape(*q.shape[:2], 1)
    top = torch.maximum(weights.amax(2, keepdim=True), sink) if scores else sink.expand(*q.shape[:2], 1)
    finite = torch.where(top == -torch.inf, 0.0, top)
    weights = weights.sub_(finite).exp_()
    total = weights.sum(2, keepdim=True) + torch.exp(sink - finite)
    weights.div_(torch.where(total == 0, 1.0, total))

    out = torch.zeros_like(q)
    mass = torch.zeros(batch * kv_heads, job.max_length, device=device) if job.return_mass else None
    at = 0
    for part in parts:
        n = part.valid.shape[1]
        own = weights[:, :, at : at + n]
        at += n
        out += part.values(own)
        if mass is not None:
            mass.scatter_add_(1, part.position.long().masked_fill(~part.valid, 0), own.sum(1))

    def by_query(x: torch.Tensor) -> torch.Tensor:
        return x.view(batch, kv_heads, q_len, group, -1).transpose(1, 2).reshape(batch, q_len, heads, -1)

    lse = by_query(finite + total.log())[..., 0] if job.return_lse else None
    return by_query(out).to(job.q.dtype), lse, None if mass is None else mass.view(batch, kv_heads, -1)
