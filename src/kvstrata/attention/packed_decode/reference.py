"""``decode_packed`` in torch: float32 on the packed bytes. It is the CPU path and the reference for the kernels."""

from __future__ import annotations

import numpy as np
import torch

from kvstrata.attention.decode.parts import Coded
from kvstrata.store.packed.arguments import check_entries, check_starts
from kvstrata.store.packed.plain_rows import Split, split_of, tail_index

from .job import Job, Result


def pages_of(job: Job, request: int, first: int, last: int) -> torch.Tensor:
    """Pages ``first .. last - 1`` of a request: uint8 ``[kv_heads, pages, page_bytes]``, a copy."""
    blocks, per_block = job.blocks, job.blocks.pages_per_block
    low, high = first // per_block, -(-last // per_block)
    entries = job.block_table[request, low:high].long()
    check_entries(entries, blocks)
    rows = job.pages[entries]  # [blocks, H, bytes]
    by_page = rows.view(high - low, blocks.kv_heads, per_block, job.format.page_bytes).transpose(0, 1).flatten(1, 2)
    return by_page[:, first - low * per_block : last - low * per_block].contiguous()


def _plain_rows(job: Job, split: Split, length: int) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Sink and tail rows of a request: float32 ``k, v [kv_heads, n, D]`` and positions ``[n]`` each."""
    rows, device, parts = job.rows, job.q.device, []
    if split.sinks:
        position = torch.arange(split.sinks, device=device)
        parts.append((rows.sink_k, rows.sink_v, split.sink_slot, position, position))
    if length > split.packed:
        position = torch.arange(split.packed, length, device=device)
        parts.append((rows.tail_k, rows.tail_v, split.tail_slot, position, tail_index(rows, position)))
    return [(k[slot][:, at].float(), v[slot][:, at].float(), position) for k, v, slot, position, at in parts]  # type: ignore[index]


def attend(job: Job, request: int, q: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Out ``[n, Hq, D]`` and lse ``[n, Hq]``, float32, of the last n positions of a request, ``q [n, Hq, D]``."""
    queries, heads, dim = q.shape
    kv_heads, group, f = job.blocks.kv_heads, job.group, job.format
    plain_q = q.float().view(queries, kv_heads, group, dim).transpose(0, 1)
    rows = plain_q
    if job.balance is not None:
        rows = (rows * job.balance.view(kv_heads, 1, 1, dim)).to(q.dtype).float()
    rows, plain_q = (x.reshape(kv_heads, queries * group, dim) * job.scale for x in (rows, plain_q))
    own = torch.arange(length - queries, length, device=q.device).repeat_interleave(group).unsqueeze(1)
    split = split_of(job.rows, request, length, f.page_tokens)
    first = split.sinks // f.page_tokens
    if job.sliding_window is not None:
        first = max(first, max(length - queries - job.sliding_window + 1, 0) // f.page_tokens)
    last = -(-split.packed // f.page_tokens)
    parts: list[tuple[torch.Tensor, torch.Tensor, Coded | torch.Tensor]] = []  # scores, positions, values
    if last > first:
        pages = pages_of(job, request, first, last)
        position = torch.arange(first * f.page_tokens, last * f.page_tokens, device=q.device)
        position = position.view(1, last - first, f.page_tokens).expand(kv_heads, -1, -1)
        centre = torch.zeros(kv_heads, 1, dim, dtype=torch.float32, device=q.device)
        if job.centre is not None:
            centre = job.centre.unsqueeze(1)
        count = np.full(kv_heads, split.packed - first * f.page_tokens)
        coded = Coded(pages, f, centre, count, position)
        assert coded.position is not None
        scores = coded.scores(rows).masked_fill(coded.position[0] < split.sinks, -torch.inf)
        parts.append((scores, coded.position[0], coded))
    for k, v, position in _plain_rows(job, split, length):
        parts.append((plain_q @ k.mT, position, v))
    logits = torch.zeros(kv_heads, queries * group, 0, dtype=torch.float32, device=q.device)
    for scores, position, _ in parts:
        if job.softcap is not None:
            scores = torch.where(scores == -torch.inf, scores, torch.tanh(scores / job.softcap) * job.softcap)
        seen = position <= own
        if job.sliding_window is not None:
            seen &= position > own - job.sliding_window
        logits = torch.cat([logits, scores.masked_fill(~seen, -torch.inf)], 2)
    tokens = logits.shape[2]
    if job.sinks is not None:
        sinks = job.sinks.view(kv_heads, 1, group).expand(-1, queries, -1).reshape(kv_heads, queries * group, 1)
        logits = torch.cat([logits, sinks], 2)
    lse = torch.logsumexp(logits, 2)
    safe = torch.where(lse == -torch.inf, 0.0, lse).unsqueeze(2)
    out = torch.zeros(kv_heads, queries * group, dim, dtype=torch.float32, device=q.device)
    weights = (logits[:, :, :tokens] - safe).exp().split([scores.shape[2] for scores, *_ in parts], 2)
    for weight, (_, _, values) in zip(weights, parts, strict=True):
        out = out + (weight @ values if isinstance(values, torch.Tensor) else values.values(weight))
    by_head = (x.view(kv_heads, queries, group, -1).transpose(0, 1).reshape(queries, heads, -1) for x in (out, lse))
    out, lse = by_head
    return out, lse[..., 0]


def decode(job: Job) -> Result:
    """Compute out, and lse or None; raises ValueError for rows or blocks that are not there."""
    starts = range(0, job.q.shape[0] + 1, job.most_queries)
    ends = list(starts) if job.cu_seqlens_q is None else job.cu_seqlens_q.tolist()
    check_starts(ends, job.q.shape[0], "q", job.most_queries)
    out = torch.empty_like(job.q, memory_format=torch.contiguous_format) if job.out is None else job.out
    out.zero_()
    lse = torch.full(job.q.shape[:2], -torch.inf, dtype=torch.float32, device=job.q.device)
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
