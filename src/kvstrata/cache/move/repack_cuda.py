"""Single arrivals in CUDA C++: from moves of one phase to a launch of ``repack.cu``."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import torch

from kvstrata import jit
from kvstrata.cache.storage.page import PageFormat
from kvstrata.layout.format import MAX_TIERS
from kvstrata.quant.op import CXX
from kvstrata.quant.reference import GAUSSIAN_STEP, K_GAIN, V_GAIN, aim_factor

from .launches import kernel
from .repack_job import Job

SOURCE = Path(__file__).with_name("repack.cu")
WARPS = 8  # per block; two per move
# struct Params: packed, pointers, k, v, centre, direction; two strides in bytes; n, units; step and gains; six numbers
# per tier.
PARAMS = struct.Struct(f"6Q 2q 2i 27f 9i {6 * MAX_TIERS}i")
HEAD = struct.Struct("6Q 2q 2i")  # fields that change from launch to launch
ROWS_OFFSET = 2 * 8  # offset of the addresses of k and v
CONSTANTS = [table.get(bits, 0.0) for table in (GAUSSIAN_STEP, K_GAIN, V_GAIN) for bits in range(9)]
PER_GAIN = [aim_factor(K_GAIN[bits]) if bits in K_GAIN else 0 for bits in range(9)]


@lru_cache(maxsize=64)
def entry_of(plain: PageFormat, lossy: PageFormat) -> str:
    """The template instantiation for the pages of a cache."""
    f = lossy.format
    flags = ", ".join(str(flag).lower() for flag in (plain.keeps_importance, f.rotate, f.centre))
    position = "short" if plain.position_dtype == torch.int16 else "int"
    return f"repack<{CXX[plain.dtype]}, {f.head_dim}, {f.page_tokens}, {position}, {flags}>"


def kernels_needed(page_formats: Sequence[PageFormat]) -> list[jit.Named]:
    """The kernel of single arrivals."""
    return [(SOURCE, entry_of(page_formats[0], page_formats[-1]))]


@lru_cache(maxsize=16)
def _params(page_formats: tuple[PageFormat, ...]) -> bytes:
    """Parameters for tiers, without addresses."""
    numbers = []
    for kind in page_formats:
        f = kind.format
        widths = (0, 0) if f.plain else (f.k_bits, f.v_bits)
        numbers += [*widths, f.v_offset, f.scale_offset, kind.position_offset, kind.importance_offset]
    return PARAMS.pack(*[0] * 10, *CONSTANTS, *PER_GAIN, *numbers, *[0] * (6 * (MAX_TIERS - len(page_formats))))


def launch(job: Job, first: int, n: int) -> jit.Launch:
    """Launch moves ``first .. first + n - 1``, none of which reads where another writes; one warp per side of a move.

    The caller keeps the job's tensors alive and their device's context current.
    """
    page_formats, device = job.page_formats, job.packed.get_device()
    rows = [(0, 0) if x is None else (x.data_ptr(), x.stride(0) * x.element_size()) for x in (job.k, job.v)]
    direction = 0 if job.direction is None else job.direction.data_ptr()
    packed = job.packed.data_ptr() + first * job.packed.stride(0) * job.packed.element_size()
    params = bytearray(_params(page_formats))
    HEAD.pack_into(
        params, 0, packed, job.pool.pointers.data_ptr(), rows[0][0], rows[1][0], job.centre.data_ptr(), direction,
        rows[0][1], rows[1][1], n, job.pool.units,
    )  # fmt: skip
    entry = entry_of(page_formats[0], page_formats[-1])
    return jit.Launch(kernel(SOURCE, entry, device), -(-2 * n // WARPS), 32 * WARPS, params)
