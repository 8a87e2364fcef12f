"""``prefill_attention`` in torch: float32, sequence by sequence, a block of queries at a time.

It is the CPU path and the reference for the kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

from .job import PrefillJob, Result

SCORES = 1 << 25  # elements of the score matrix held at once, float32


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, own: torch.Tensor, first: int, job: PrefillJob
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of ``q [Hq, m, D]`` at positions ``own [m]`` over ``k, v [Hkv, n, D]`` at ``first ..``, float32."""
    (heads, m, dim), (kv_heads, n) = q.shape, k.shape[:2]
    rows = heads // kv_heads * m
    scores = torch.bmm(q.reshape(kv_heads, rows, dim), k.transpose(1, 2)).mul_(job.scale).view(heads, m, n)
    if job.softcap is not None:
        scores = scores.div_(job.softcap).tanh_().mul_(job.softcap)
    if job.causal:
        position = first + torch.arange(n, device=q.device)
        hidden = position > own.unsqueeze(1)
        if job.sliding_window is not None:
            hidden |= position <= own.unsqueeze(1) - job.sliding_window
        scores.masked_fill_(hidden, -torch.inf)
    # A sink is one more score; without one it is -inf, so that a maximum exists even without keys.
    if job.sinks is None:
        sink = torch.full((heads, 1, 1), -torch.inf, dtype=torch.float32, device=q.device)
    else:
        sink = job.sinks.view(-1, 1, 1)
    top = torch.cat([scores, sink.expand(heads, m, 1)], 2).amax(2, keepdim=True)
    safe = top.masked_fill(top == -torch.inf, 0.0)
    weights = scores.sub_(safe).exp_()
    total = weights.sum(2, keepdim=True) + torch.exp(sink - safe)
    out = torch.bmm(weights.view(kv_heads, rows, n), v).view(q.shape) / total.masked_fill(total == 0.0, 1.0)
    return out, (safe + total.log()).squeeze(2)


def _sequence(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, job: PrefillJob) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of ``q [Hq, Sq, D]`` over ``k, v [Hkv, Sk, D]``: float32 out and lse."""
    heads, queries, _ = q.shape
    keys = k.shape[1]
    out = torch.empty(q.shape, dtype=torch.float32, device=q.device)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    k, v = k.float(), v.float()
    block = max(1, SCORES // max(heads * keys, 1))
    for begin in range(0, queries, block):
        end = min(begin + block, queries)
        own = torch.arange(begin, end, device=q.device) + keys - queries
        low, high = 0, keys
        if job.causal:  # keys that some query of the block sees
            high = max(0, keys - queries + end)
            low = (
                0 if job.sliding_window is None else min(max(0, keys - queries + begin - job.sliding_window + 1), high)
            )
        part = slice(low, high)
        out[:, begin:end], lse[:, begin:end] = _attend(q[:, begin:end].float(), k[:, part], v[:, part], own, low, job)
    return out, lse


def run(job: PrefillJob) -> Result:
    """Run a checked job."""
    out, lse = job.outputs()
    rows: Sequence[int | slice] = range(job.sequences)
    keys = rows
    if job.cu_seqlens_q is not None and job.cu_seqlens_k is not None:
        rows, keys = ([slice(*ends) for ends in pairwise(cu.tolist())] for cu in (job.cu_seqlens_q, job.cu_seqlens_k))
    with torch.no_grad():
        for own, seen in zip(rows, keys, strict=True):
            q, k, v = (x.transpose(0, 1) for x in (job.q[own], job.k[seen], job.v[seen]))
            o, s = _sequence(q, k, v, job)
            out[own] = o.transpose(0, 1)
            if lse is not None:
                lse[own] = s.transpose(0, 1)
    return out, lse
