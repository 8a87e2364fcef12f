"""``prefill_attention`` in torch: float32, sequence by sequence, a block of queries at a time. The CPU path and the
truth that kernels are tested with."""

from __future__ import annotations

import torch

from .prefill import PrefillJob, Result

SCORES = 1 << 25  # float32 at a time


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, own: torch.Tensor, first: int, job: PrefillJob
) -> tuple[torch.Tensor, torch.Tensor]:
    """``q [Hq, m, D]`` at positions ``own [m]`` over ``k, v [Hkv, n, D]`` from position ``first`` on, float32."""
    kv_heads, n, dim = k.shape
    scores = torch.bmm(q.reshape(kv_heads, -1, dim), k.transpose(1, 2)).mul_(job.scale).view(q.shape[0], -1, n)
    if job.softcap is not None:
        scores = scores.div_(job.softcap).tanh_().mul_(job.softcap)
    if job.causal:
        position = first + torch.arange(n, device=q.device)
        hidden = position > own.unsqueeze(1)
        if job.window is not None:
            hidden |= position <= own.unsqueeze(1) - job.window
        scores.masked_fill_(hidden, -torch.inf)
    logits = scores
    if job.sinks is not None:
        logits = torch.cat([scores, job.sinks.view(-1, 1, 1).expand(-1, scores.shape[1], 1)], 2)
    lse = torch.logsumexp(logits, 2) if logits.shape[2] else torch.full(logits.shape[:2], -torch.inf, device=q.device)
    weights = torch.exp(scores.sub_(lse.masked_fill(lse == -torch.inf, 0.0).unsqueeze(2)))
    return torch.bmm(weights.view(kv_heads, -1, n), v).view(q.shape), lse


def _sequence(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, job: PrefillJob) -> tuple[torch.Tensor, torch.Tensor]:
    """``q [Hq, Sq, D]`` over ``k, v [Hkv, Sk, D]``: float32 out and lse."""
    heads, queries, _ = q.shape
    keys = k.shape[1]
    out = torch.empty(q.shape, device=q.device)
    lse = torch.empty(q.shape[:2], device=q.device)
    k, v = k.float(), v.float()
    block = max(1, SCORES // max(heads * keys, 1))
    for begin in range(0, queries, block):
        end = min(begin + block, queries)
        own = torch.arange(begin, end, device=q.device) + keys - queries
        low, high = 0, keys
        if job.causal:  # keys that some query of the block sees
            high = max(0, keys - queries + end)
            low = 0 if job.window is None else min(max(0, keys - queries + begin - job.window + 1), high)
        part = slice(low, high)
        out[:, begin:end], lse[:, begin:end] = _attend(q[:, begin:end].float(), k[:, part], v[:, part], own, low, job)
    return out, lse


def run(job: PrefillJob) -> Result:
    """out, lse or None."""
    out, lse = job.outputs()
    with torch.no_grad():
        if job.cu_seqlens_q is None or job.cu_seqlens_k is None:
            for i in range(job.sequences):
                o, s = _sequence(job.q[i], job.k[i], job.v[i], job)
                out[i] = o
                if lse is not None:
                    lse[i] = s
            return out, lse
        ends_q, ends_k = job.cu_seqlens_q.tolist(), job.cu_seqlens_k.tolist()
        for i in range(job.sequences):
            rows, keys = slice(*ends_q[i : i + 2]), slice(*ends_k[i : i + 2])
            q, k, v = (x.transpose(0, 1) for x in (job.q[rows], job.k[keys], job.v[keys]))
            o, s = _sequence(q, k, v, job)
            out[rows] = o.transpose(0, 1)
            if lse is not None:
                lse[rows] = s.transpose(0, 1)
        return out, lse
