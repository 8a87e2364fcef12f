"""``store_packed`` with a tail or sink rows in plain torch, request by request: the CPU path and the reference.

All reads of the tail come before all writes: a call that completes a page and begins another reads and writes one row.
"""

from __future__ import annotations

import torch

from . import reference
from .arguments import check_starts
from .plain_rows import split_of, tail_index
from .tail_job import TailJob


def store(job: TailJob) -> None:
    """Store the rows of a checked call."""
    base, rows, page = job.store, job.rows, job.store.format.page_tokens
    k, v, slot = base.k, base.v, base.slot_mapping.long()
    packed_now = torch.ones(len(slot), dtype=torch.bool, device=slot.device)  # rows to pack in this call
    from_tail: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []  # k, v, slots of tokens from the tail
    copies: list[tuple[torch.Tensor, int, torch.Tensor, torch.Tensor]] = []  # to, slot, index, rows
    each = len(slot) // max(job.requests, 1)
    ends = [each * i for i in range(job.requests + 1)] if job.cu_seqlens_q is None else job.cu_seqlens_q.tolist()
    check_starts(ends, len(slot), "k")
    stored = (slot >= 0) & (slot < base.blocks.slots)
    for request, length in enumerate(job.seq_lens.tolist()):
        first, last = ends[request], ends[request + 1]
        begin = length - (last - first)
        if last <= first or begin < 0:
            continue
        split = split_of(rows, request, length, page)
        position = torch.arange(begin, length, device=slot.device)
        live = stored[first:last]
        if split.sink_slot >= 0:
            kept = torch.nonzero(live & (position < rows.sink_tokens)).flatten()
            for to, x in ((rows.sink_k, k), (rows.sink_v, v)):
                copies.append((to, split.sink_slot, position[kept], x[first + kept]))  # type: ignore[arg-type]
        if split.tail_slot < 0:
            continue
        packed_now[first:last] = position < split.packed
        in_page = begin % page
        if in_page and begin - in_page < split.packed and live[0]:  # tokens of a page that this call completes
            index = tail_index(rows, torch.arange(begin - in_page, begin, device=slot.device))
            assert rows.tail_k is not None
            assert rows.tail_v is not None
            older = (x[split.tail_slot][:, index].transpose(0, 1).clone() for x in (rows.tail_k, rows.tail_v))
            from_tail.append((*older, slot[first] - in_page + torch.arange(in_page, device=slot.device)))
        kept = torch.nonzero(live & (position >= length - rows.tail_tokens)).flatten()
        for to, x in ((rows.tail_k, k), (rows.tail_v, v)):
            copies.append((to, split.tail_slot, tail_index(rows, position[kept]), x[first + kept]))  # type: ignore[arg-type]
    packed = [torch.cat([x[packed_now], *(part[i] for part in from_tail)]) for i, x in enumerate((k, v, slot))]
    reference.store_packed(base._replace(k=packed[0], v=packed[1], slot_mapping=packed[2]))
    for to, number, index, x in copies:
        to[number][:, index] = x.transpose(0, 1)
