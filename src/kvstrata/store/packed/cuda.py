"""``store_packed`` in CUDA C++: quantize_tokens.cu, one warp per window of tokens, KV head and side."""

from __future__ import annotations

import functools
import struct

import torch

from kvstrata import jit
from kvstrata.layout import Format
from kvstrata.quant.op import CXX, ROW_BYTES
from kvstrata.quant.op import SOURCE as QUANTIZE

from .job import Job

SOURCE = QUANTIZE.with_name("quantize_tokens.cu")
# struct Params: k, v, pages, slot_mapping, balance, centre; strides of rows, blocks, heads and slots; sizes.
PARAMS = struct.Struct("6Q7q4i")
POINTERS = struct.Struct("6Q")
WINDOW = 16  # tokens whose runs one warp makes, if there are warps enough
ROUNDS = 4  # waves of warps from which on a warp takes a larger window
BLOCKS = 12  # of one warp, on a multiprocessor


def entry_of(format: Format, dtype: torch.dtype, balanced: bool, slot_dtype: torch.dtype) -> str:
    """Template instance for a format, the dtypes of rows and slots, and whether K is balanced."""
    flags = f"{str(format.rotate).lower()}, {str(balanced).lower()}"
    slot = "int" if slot_dtype == torch.int32 else "long long"
    widths = f"{format.k_bits}, {format.v_bits}, {format.page_tokens}"
    return f"quantize_tokens<{CXX[dtype]}, {format.head_dim}, {widths}, {flags}, {slot}>"


def missing(job: Job) -> str | None:
    """Reason why the kernel cannot run the job, or None."""
    size = job.k.element_size()
    numbers = [n * size for x in (job.k, job.v) for n in x.stride()[:2]] + [job.k.data_ptr(), job.v.data_ptr()]
    if any(n % ROW_BYTES for n in numbers):
        return f"cuda: expected rows of k and v aligned to {ROW_BYTES} bytes, got strides {job.k.stride()}"
    if job.blocks.slots >= 1 << 31:
        return f"cuda: expected fewer than 2^31 slots, got {job.blocks.slots}"
    return None


@functools.lru_cache(maxsize=16)
def _multiprocessors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def window_of(tokens: int, heads: int, multiprocessors: int) -> int:
    """Tokens of a window: 1 as long as a warp per token and head fits a few waves, then up to 16."""
    window = 1
    while window < WINDOW and -(-tokens // window) * heads * 2 > ROUNDS * BLOCKS * multiprocessors:
        window *= 2
    return window


def addresses(job: Job) -> tuple[int, ...]:
    """Addresses in the order of the kernel's parameters; 0 for None."""
    tensors = (job.k, job.v, job.pages, job.slot_mapping, job.balance, job.centre)
    return tuple(0 if x is None else x.data_ptr() for x in tensors)


def plan(job: Job) -> jit.Launch:
    """Launch of a job, complete but for the pointers."""
    device, size, blocks = job.pages.get_device(), job.k.element_size(), job.blocks
    tokens = job.k.shape[0]
    window = window_of(tokens, blocks.kv_heads, _multiprocessors(device))
    params = PARAMS.pack(
        *(0,) * 6, *(n * size for x in (job.k, job.v) for n in x.stride()[:2]),
        blocks.block_stride, blocks.head_stride, job.slot_mapping.stride(0),
        tokens, blocks.slots, blocks.block_size, window,
    )  # fmt: skip
    entry = entry_of(job.format, job.k.dtype, job.balance is not None, job.slot_mapping.dtype)
    kernel = jit.load(SOURCE, entry, jit.arch_of(device))
    return jit.Launch(kernel, (-(-tokens // window), 2 * blocks.kv_heads), 32, params)
