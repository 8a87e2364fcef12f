"""``store_packed`` in plain torch: the CPU path and the reference for the kernels.

Bytes of a page have fields of several tokens. All fields of a call are cleared first and then set: they are disjoint,
so their values can be added in any order.
"""

from __future__ import annotations

import torch

from kvstrata.checks import fail
from kvstrata.layout import fragments, scales
from kvstrata.layout.fragments import Side
from kvstrata.quant import reference as quant
from kvstrata.quant.calibration import LARGEST_CENTRE

from .job import Job


def _live(job: Job) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows that are stored and their slots; the last row for equal slots."""
    slot = job.slot_mapping.long()
    row = torch.arange(slot.shape[0], device=slot.device)
    live = (slot >= 0) & (slot < job.blocks.slots)
    slot, row = slot[live], row[live]
    unique, inverse = torch.unique(slot, return_inverse=True)
    last = torch.full_like(unique, -1).scatter_reduce_(0, inverse, row, "amax")
    return last, unique


def _write_fields(
    flat: torch.Tensor, start: torch.Tensor, token: torch.Tensor, codes: torch.Tensor, bits: int, side: Side, job: Job
) -> None:
    """Write fields of ``codes [n, H, D]`` at slots ``token [n]`` of pages whose codes begin at ``start [n, H]``."""
    f = job.format
    tables = fragments.places(bits, f.head_dim, f.page_tokens, side)
    for (width, low), (byte, bit) in zip(fragments.planes(bits), tables, strict=True):
        index = start.unsqueeze(-1) + byte.to(flat.device)[token].unsqueeze(1)
        shift = bit.to(flat.device)[token].unsqueeze(1)
        mask = torch.tensor(2**width - 1, dtype=torch.uint8, device=flat.device)
        old = (flat[index] >> shift) & mask
        change = (((codes >> low) & mask) - old) << shift  # uint8, modulo 256
        flat.index_add_(0, index.flatten(), change.flatten())


def store_packed(job: Job) -> None:
    """Store the rows of a checked call; raises ValueError for a centre beyond the range of scales."""
    if job.centre is not None and not bool((job.centre.abs() <= LARGEST_CENTRE).all()):
        fail("calibration.centre", f"finite numbers up to {LARGEST_CENTRE}", "other values")
    row, slot = _live(job)
    if len(row) == 0:
        return
    f, blocks = job.format, job.blocks
    k, v = job.k[row].float(), job.v[row].float()
    if job.balance is not None:
        k = k * job.balance.reciprocal()
    k_codes, k_scale = quant.quantize_plain(k, job.centre, f.k_bits, f.rotate, quant.K_GAIN[f.k_bits])
    v_codes, v_scale = quant.quantize_plain(v, None, f.v_bits, f.rotate, quant.V_GAIN[f.v_bits])
    block, offset = slot // blocks.block_size, slot % blocks.block_size
    token = offset % f.page_tokens
    heads = torch.arange(blocks.kv_heads, device=slot.device)
    begin = block * blocks.block_stride + offset // f.page_tokens * f.page_bytes
    start = begin.unsqueeze(1) + heads * blocks.head_stride
    span = (blocks.num_blocks - 1) * blocks.block_stride + (blocks.kv_heads - 1) * blocks.head_stride
    flat = job.pages.as_strided((span + blocks.pages_per_block * f.page_bytes,), (1,))
    _write_fields(flat, start, token, k_codes, f.k_bits, "k", job)
    _write_fields(flat, start + f.v_offset, token, v_codes, f.v_bits, "v", job)
    index = torch.arange(2 * f.page_tokens, dtype=torch.int16).view(torch.uint8)
    k_index, v_index = (x.view(torch.int16).long().to(slot.device) for x in scales.unpack_scales(index))
    for scale, number in ((k_scale, k_index), (v_scale, v_index)):
        offset = start + f.scale_offset + 2 * number[token].unsqueeze(1)
        raw = scale.contiguous().view(torch.uint8).view(*scale.shape, 2)
        flat[offset] = raw[..., 0]
        flat[offset + 1] = raw[..., 1]
