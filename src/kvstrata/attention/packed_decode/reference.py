"""``decode_packed`` in torch: float32 on the packed bytes. It is the CPU path, and kernels are tested against it."""

from __future__ import annotations

import numpy as np
import torch

from kvstrata.attention.decode.parts import Coded

from .job import Job, Result


def pages_of(job: Job, request: int, first: int, last: int) -> torch.Tensor:
    """Pages ``first .. last - 1`` of a request: uint8 ``[kv_heads, pages, page_bytes]``, a copy."""
    blocks, per_block = job.blocks, job.blocks.pages_per_block
    low, high = first // per_block, -(-last // per_block)
    rows = job.pages[job.block_table[request, low:high].long()]  # [blocks, H, bytes]
    by_page = rows.view(high - low, blocks.kv_heads, per_block, job.format.page_bytes).transpose(0, 1).flatten(1, 2)
    return by_page[:, first - low * per_block : last - low * per_block].contiguous()


def attend(job: Job, request: int, q: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Out ``[n, Hq, D]`` and lse ``[n, Hq]``, float32, of the last n positions of a request, ``q [n, Hq, D]``."""
    queries, heads, dim = q.shape
    kv_heads, group, f = job.blocks.kv_heads, job.group, job.format
    rows = q.float().view(queries, kv_heads, group, dim).transpose(0, 1)
    if job.balance is not None:
        rows = (rows * job.balance.view(kv_heads, 1, 1, dim)).to(q.dtype).float()
    rows = rows.reshape(kv_heads, queries * group, dim) * job.scale
    own = torch.arange(length - queries, length, device=q.device).repeat_interleave(group).unsqueeze(1)
    first = 0
    if job.sliding_window is not None:
        first = max(length - queries - job.sliding_window + 1, 0) // f.page_tokens
    last = -(-length // f.page_tokens)
    out = torch.zeros(kv_heads, queries * group, dim, device=q.device)
    logits = torch.zeros(kv_heads, queries * group, 0, device=q.device)
    weights_of = None
    if last > first:
        pages = pages_of(job, request, first, last)
        position = torch.arange(first * f.page_tokens, last * f.page_tokens, device=q.device)
        position = position.view(1, last - first, f.page_tokens).expand(kv_heads, -1, -1)
        centre = torch.zeros(kv_heads, 1, dim, device=q.device) if job.centre is None else job.centre.unsqueeze(1)
        count = np.full(kv_heads, length - first * f.page_tokens)
        weights_of = Coded(pages, f, centre, count, position)
        logits = weights_of.scores(rows)
        if job.softcap is not None:
            logits = torch.tanh(logits / job.softcap) * job.softcap
        assert weights_of.position is not None
        seen = weights_of.position[0] <= own
        if job.sliding_window is not None:
            seen &= weights_of.position[0] > own - job.sliding_window
        logits = logits.masked_fill(~seen, -torch.inf)
    tokens = logits.shape[2]
    if job.sinks is not None:
        sinks = job.sinks.view(kv_heads, 1, group).expand(-1, queries, -1).reshape(kv_heads, queries * group, 1)
        logits = torch.cat([logits, sinks], 2)
    lse = torch.logsumexp(logits, 2)
    if weights_of is not None:
        safe = torch.where(lse == -torch.inf, 0.0, lse).unsqueeze(2)
        out = weights_of.values((logits[:, :, :tokens] - safe).exp())
    by_head = (x.view(kv_heads, queries, group, -1).transpose(0, 1).reshape(queries, heads, -1) for x in (out, lse))
    out, lse = by_head
    return out, lse[..., 0]


def decode(job: Job) -> Result:
    """Compute out, and lse or None."""
    out = torch.zeros(job.q.shape, dtype=job.q.dtype, device=job.q.device)
    lse = torch.full(job.q.shape[:2], -torch.inf, dtype=torch.float32, device=job.q.device)
    starts = range(0, job.q.shape[0] + 1, job.most_queries)
    ends = list(starts) if job.cu_seqlens_q is None else job.cu_seqlens_q.tolist()
    with torch.no_grad():
        for request, length in enumerate(job.seq_lens.tolist()):
            first, last = ends[request], ends[request + 1]
            if first == last:
                continue
            length = min(max(length, 0), job.max_tokens)
            rows, tops = attend(job, request, job.q[first:last], length)
            out[first:last] = rows.to(out.dtype)
            lse[first:last] = tops
    return out, lse if job.return_lse else None
