"""``repack`` in CUDA C++: from a job to one launch of ``repack.cu``."""

from __future__ import annotations

import functools
import struct
from pathlib import Path

import torch

from .. import jit
from .pages import PageKind
from .quantize_op import CXX
from .quantize_reference import GAUSSIAN_STEP, K_GAIN
from .repack_op import Job

SOURCE = Path(__file__).with_name("repack.cu")
TIERS = 16
WARPS = 8  # a block; two a move
# struct Params: packed, pointers, k, v, centre; two strides in bytes; n, units; step and gain; six numbers a tier.
PARAMS = struct.Struct(f"5Q 2q 2i 18f {6 * TIERS}i")
CONSTANTS = [table.get(bits, 0.0) for table in (GAUSSIAN_STEP, K_GAIN) for bits in range(9)]


def entry_of(plain: PageKind, lossy: PageKind) -> str:
    """The template instantiation for the pages of a cache."""
    f = lossy.format
    flags = ", ".join(str(flag).lower() for flag in (plain.keeps_importance, f.rotate, f.centre))
    position = "short" if plain.position_dtype == torch.int16 else "int"
    return f"repack<{CXX[plain.dtype]}, {f.head_dim}, {f.page_tokens}, {position}, {flags}>"


@functools.lru_cache(maxsize=64)
def _kernel(entry: str, device: int) -> jit.Kernel:
    return jit.load(SOURCE, entry, jit.arch_of(device))


def repack(job: Job) -> None:
    """Launch; a warp per side of a move, of which those that begin a chain have work."""
    kinds, device = job.kinds, job.packed.get_device()
    if len(kinds) > TIERS:
        raise ValueError(f"tiers: expected at most {TIERS}, got {len(kinds)}")
    numbers = []
    for kind in kinds:
        f = kind.format
        widths = (0, 0) if f.plain else (f.k_bits, f.v_bits)
        numbers += [*widths, f.v_offset, f.scale_offset, kind.position_offset, kind.importance_offset]
    numbers += [0] * (6 * (TIERS - len(kinds)))
    centre = job.centre.contiguous()
    rows = [(0, 0) if x is None else (x.data_ptr(), x.stride(0) * x.element_size()) for x in (job.k, job.v)]
    params = PARAMS.pack(
        job.packed.data_ptr(), job.pool.pointers.data_ptr(), rows[0][0], rows[1][0], centre.data_ptr(),
        rows[0][1], rows[1][1], len(job.packed), job.pool.units, *CONSTANTS, *numbers,
    )  # fmt: skip
    with torch.cuda.device(device):
        jit.bind_context(device)
        kernel = _kernel(entry_of(kinds[0], kinds[-1]), device)
        launch = jit.Launch(kernel, -(-2 * len(job.packed) // WARPS), 32 * WARPS, params)
        launch(jit.current_stream(device))
