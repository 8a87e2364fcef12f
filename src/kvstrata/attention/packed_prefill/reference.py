"""``prefill_packed`` in torch: float32, request by request. It is the CPU path and the reference for the kernels."""

from __future__ import annotations

import torch

from kvstrata.attention.arguments import kernel_sinks
from kvstrata.attention.prefill import reference as prefill
from kvstrata.attention.prefill.job import PrefillJob
from kvstrata.quant import reference as quant
from kvstrata.store.packed.arguments import check_entries, check_starts
from kvstrata.store.packed.plain_rows import split_of, tail_index

from .job import Job, Result


def prefix_rows(job: Job, request: int, length: int, total: int) -> tuple[torch.Tensor, torch.Tensor]:
    """First ``length`` of a request's ``total`` tokens in the model's space: float32 ``k, v [length, kv_heads, D]``."""
    f, blocks, tensors = job.format, job.blocks, job.tensors
    plain, split = tensors.rows, split_of(tensors.rows, request, total, f.page_tokens)
    count, window = -(-length // blocks.block_size), job.options.sliding_window
    entries = tensors.block_table[request, :count].long()
    seen = split.sinks if window is None else max(split.sinks, length - window + 1)  # first position read from a page
    check_entries(entries[seen // blocks.block_size : -(-min(length, split.packed) // blocks.block_size)], blocks)
    rows = tensors.pages[entries.clamp(0, blocks.num_blocks - 1)]  # others are not seen
    whole = rows.view(count, blocks.kv_heads, blocks.pages_per_block, f.page_bytes)
    stored = quant.restore(*quant.dequantize_page(whole, f), f)
    k, v = (x.permute(0, 2, 3, 1, 4).flatten(0, 2)[:length] for x in stored)
    if tensors.centre is not None:
        k = k + tensors.centre
    if tensors.balance is not None:
        k = k * tensors.balance
    position = torch.arange(length, device=k.device)
    for slot, live, at, sides in (
        (split.sink_slot, position < split.sinks, lambda x: x, (plain.sink_k, plain.sink_v)),
        (split.tail_slot, position >= split.packed, lambda x: tail_index(plain, x), (plain.tail_k, plain.tail_v)),
    ):
        if live.any():
            index = at(position[live])
            for to, kept in zip((k, v), sides, strict=True):
                assert kept is not None
                to[live] = kept[slot][:, index].transpose(0, 1).float()
    return k, v


def run(job: Job) -> Result:
    """Compute out, and lse or None; raises ValueError for rows or blocks that are not there."""
    q, k_new, v_new, _, _, seq_lens, cu, *_ = job.tensors
    options, sinks = job.options, job.tensors.sinks
    ends = cu.tolist()
    check_starts(ends, q.shape[0], "q", options.max_seqlen_q)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if job.out is None else job.out
    out.zero_()
    lse = torch.full(q.shape[:2], -torch.inf, dtype=torch.float32, device=q.device)
    scale = job.format.head_dim**-0.5 if options.scale is None else float(options.scale)
    with torch.no_grad():
        for request, length in enumerate(seq_lens.tolist()):
            rows = slice(ends[request], ends[request + 1])
            new = rows.stop - rows.start
            if new <= 0:
                continue
            prefix = min(max(length - new, 0), job.max_tokens)
            k, v = prefix_rows(job, request, prefix, prefix + new)
            k, v = (torch.cat([x, y[rows].float()]) for x, y in ((k, k_new), (v, v_new)))
            one = PrefillJob(
                q[rows].float().unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0), None, None, new, len(k), True, scale,
                options.sliding_window, options.softcap, None if sinks is None else kernel_sinks(sinks), True,
            )  # fmt: skip
            part, tops = prefill.run(one)
            assert tops is not None
            out[rows], lse[rows] = part[0].to(q.dtype), tops[0]
    return out, lse if options.return_lse else None
