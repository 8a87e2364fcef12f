"""``repack`` in CUDA C++: from a job to one launch of ``repack.cu``."""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable
from pathlib import Path

import torch

from kvstrata import jit
from kvstrata.cache.storage.page import PageFormat
from kvstrata.quant.op import CXX
from kvstrata.quant.reference import GAUSSIAN_STEP, K_GAIN, V_GAIN

from .repack_job import Job

SOURCE = Path(__file__).with_name("repack.cu")
TIERS = 16
WARPS = 8  # a block; two a move
# struct Params: packed, pointers, k, v, centre; two strides in bytes; n, units; step and gains; six numbers a tier.
PARAMS = struct.Struct(f"5Q 2q 2i 27f {6 * TIERS}i 4x")
CONSTANTS = [table.get(bits, 0.0) for table in (GAUSSIAN_STEP, K_GAIN, V_GAIN) for bits in range(9)]


def entry_of(plain: PageFormat, lossy: PageFormat) -> str:
    """The template instantiation for the pages of a cache."""
    f = lossy.format
    flags = ", ".join(str(flag).lower() for flag in (plain.keeps_importance, f.rotate, f.centre))
    position = "short" if plain.position_dtype == torch.int16 else "int"
    return f"repack<{CXX[plain.dtype]}, {f.head_dim}, {f.page_tokens}, {position}, {flags}>"


@functools.lru_cache(maxsize=64)
def _kernel(entry: str, device: int) -> jit.Kernel:
    return jit.load(SOURCE, entry, jit.arch_of(device))


def launch(job: Job, first: int, n: int) -> jit.Launch:
    """Of moves ``first .. first + n - 1``: a warp per side of a move, of which those that begin a chain have work.

    The caller keeps the job's tensors, and holds the context of their device.
    """
    page_formats, device = job.page_formats, job.packed.get_device()
    if len(page_formats) > TIERS:
        raise ValueError(f"tiers: expected at most {TIERS}, got {len(page_formats)}")
    numbers = []
    for kind in page_formats:
        f = kind.format
        widths = (0, 0) if f.plain else (f.k_bits, f.v_bits)
        numbers += [*widths, f.v_offset, f.scale_offset, kind.position_offset, kind.importance_offset]
    numbers += [0] * (6 * (TIERS - len(page_formats)))
    rows = [(0, 0) if x is None else (x.data_ptr(), x.stride(0) * x.element_size()) for x in (job.k, job.v)]
    params = PARAMS.pack(
        job.packed[first:].data_ptr(), job.pool.pointers.data_ptr(), rows[0][0], rows[1][0], job.centre.data_ptr(),
        rows[0][1], rows[1][1], n, job.pool.units, *CONSTANTS, *numbers,
    )  # fmt: skip
    kernel = _kernel(entry_of(page_formats[0], page_formats[-1]), device)
    return jit.Launch(kernel, -(-2 * n // WARPS), 32 * WARPS, params)


def prepare(job: Job) -> Callable[[], None]:
    """All moves of a job in one launch."""
    device = job.packed.get_device()
    job = job._replace(centre=job.centre.contiguous())
    with torch.cuda.device(device):
        jit.bind_context(device)
        moves = launch(job, 0, len(job.packed))

    def run(_kept: Job = job) -> None:
        with torch.cuda.device(device):
            jit.bind_context(device)
            moves(jit.current_stream(device))

    return run
