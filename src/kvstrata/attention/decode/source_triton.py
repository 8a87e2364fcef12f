"""Tables and pages of a layer as Triton's decode and prefill kernels read them: tensors, numbers, constants."""

from __future__ import annotations

import functools
from typing import Any

import torch

from kvstrata.layout.rotation import block_of

from .job import Job

_captured: dict[tuple[tuple[int, ...], torch.device], torch.Tensor] = {}  # read by graphs, so never freed


@functools.lru_cache(maxsize=256)
def _uploaded(values: tuple[int, ...], device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def on_device(values: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """int32 tensor, cached: every layer of a decode step has the same requests."""
    if (kept := _captured.get((values, device))) is not None:
        return kept
    tensor = _uploaded(values, device)
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        _captured[values, device] = tensor
    return tensor


def tiered(job: Job) -> tuple[list[Any], list[Any], dict[str, Any]]:
    """Tensors, numbers and constants that locate the tokens of a TieredCache."""
    buckets, q = job.buckets, job.q
    assert buckets is not None
    coded = [f for f in buckets.formats if not f.plain]
    tiers = zip(buckets.formats, buckets.position_offsets, buckets.importance_offsets, strict=True)
    offsets = [n for format, *notes in tiers for n in (format.v_offset, format.scale_offset, *notes)]
    formats = sum((f.k_bits | f.v_bits << 4) << 8 * i for i, f in enumerate(buckets.formats) if not f.plain)
    balance = buckets.count if buckets.balance is None else buckets.balance  # has the strides of the centre
    tensors = [buckets.seq_lens, buckets.page_table, buckets.count, buckets.centre, balance, buckets.slab_pointers,
               on_device(tuple(offsets), q.device), q, q, q, q]  # fmt: skip
    numbers = [buckets.seq_lens.stride(0), *buckets.page_table.stride()[:3], *buckets.count.stride()[:2],
               *buckets.centre.stride()[:2], 0, 0, 0, 0, 0, 0, buckets.units]  # fmt: skip
    constants = dict(
        TIERS=len(buckets.formats), FORMATS=formats, TOKENS=buckets.formats[0].page_tokens,
        BLOCK=block_of(q.shape[3]) if any(f.rotate for f in coded) else 1, CENTRED=any(f.centre for f in coded),
        BALANCED=buckets.balance is not None, POSITION_BYTES=buckets.position_dtype.itemsize, MANTISSA=0, SCALED=0,
    )  # fmt: skip
    return tensors, numbers, constants


def paged(job: Job) -> tuple[list[Any], list[Any], dict[str, Any]]:
    """Tensors, numbers and constants that locate the tokens of a PagedCache."""
    cache, q = job.paged, job.q
    assert cache is not None
    k, v = cache.by_head()
    strides = [n for x in (k, v) for n in (x.stride(0), x.stride(2), x.stride(1))]
    mantissa = {torch.float8_e4m3fn: 3, torch.float8_e5m2: 2}.get(k.dtype, 0)
    if mantissa:
        k, v = k.view(torch.uint8), v.view(torch.uint8)
    one = torch.ones(1, dtype=torch.float32, device=q.device) if cache.k_scale is None or cache.v_scale is None else q
    k_scale, v_scale = (one if s is None else s.contiguous() for s in (cache.k_scale, cache.v_scale))
    scaled = 0
    if cache.k_scale is not None or cache.v_scale is not None:
        scaled = max(k_scale.numel(), v_scale.numel())
        k_scale, v_scale = (s.flatten().expand(scaled).contiguous() for s in (k_scale, v_scale))
    scales = [k_scale, v_scale] if scaled else [q, q]
    tensors = [cache.seq_lens, cache.block_table, q, q, q, q, q, k, v, *scales]
    numbers = [1, cache.block_table.stride(0), 0, 0, 0, 0, 0, 0, *strides, 1]
    constants = dict(TIERS=0, FORMATS=0, TOKENS=cache.block_size, BLOCK=1, CENTRED=False, BALANCED=False,
                     POSITION_BYTES=4, MANTISSA=mantissa, SCALED=scaled)  # fmt: skip
    return tensors, numbers, constants
