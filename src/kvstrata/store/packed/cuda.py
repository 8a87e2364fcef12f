"""``store_packed`` in CUDA C++: one warp per window of tokens, KV head and side.

quantize_tokens.cu serves decode steps and short prompts, where a warp has one window; quantize_prompt.cu serves long
prompts, where it has many and prefetches the rows of the next while it processes one.
"""

from __future__ import annotations

import functools
import struct

import torch

from kvstrata import jit
from kvstrata.layout import Format, fragments
from kvstrata.quant.op import CXX, ROUNDS, ROW_BYTES
from kvstrata.quant.op import SOURCE as QUANTIZE

from .job import Job

SOURCE = QUANTIZE.with_name("quantize_tokens.cu")
PROMPT = QUANTIZE.with_name("quantize_prompt.cu")
# struct Params: k, v, pages, slot_mapping, balance, centre; strides of rows, blocks, heads and slots; sizes; division.
PARAMS = struct.Struct("6Q7q6iI4x")
POINTERS = struct.Struct("6Q")
WINDOW = 16  # maximum tokens per warp, if there are enough warps
WAVES = 4  # from this many waves of warps on, a warp gets a larger window
BLOCKS = 12  # blocks of one warp per multiprocessor


def entry_of(
    format: Format, dtype: torch.dtype, balanced: bool, slot_dtype: torch.dtype, kernel: str = "quantize_tokens"
) -> str:
    """Template instance for a format, the dtypes of rows and slots, and whether K is balanced."""
    flags = f"{str(format.rotate).lower()}, {str(balanced).lower()}"
    slot = "int" if slot_dtype == torch.int32 else "long long"
    widths = f"{format.k_bits}, {format.v_bits}, {format.page_tokens}"
    return f"{kernel}<{CXX[dtype]}, {format.head_dim}, {widths}, {flags}, {slot}>"


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
    """Tokens per window: 1 while a warp per token and head fits a few waves, then up to 16."""
    window = 1
    while window < WINDOW and -(-tokens // window) * heads * 2 > WAVES * BLOCKS * multiprocessors:
        window *= 2
    return window


def divider(number: int) -> tuple[int, int]:
    """Shift and inverse such that ``x // number == x * inverse >> 32 >> shift`` for 0 <= x < 2^31; number > 1."""
    bits = (number - 1).bit_length()
    return bits - 1, -(-(1 << 31 + bits) // number)


def takes_prompts(format: Format, dtype: torch.dtype) -> bool:
    """True if quantize_prompt.cu supports the format: 16-bit rows, and no word that two tiles of a page share."""
    steps = format.head_dim // fragments.STEP_DIMS
    widths = [width for bits in (format.k_bits, format.v_bits) for width, _ in fragments.planes(bits)]
    return dtype.itemsize == 2 and all(steps * width % 4 == 0 for width in widths)


def kernels_needed(format: Format, dtype: torch.dtype, balanced: bool, slot_dtype: torch.dtype) -> list[jit.Named]:
    """Kernels of decode steps and prompts."""
    kinds = (format, dtype, balanced, slot_dtype)
    prompts = [(PROMPT, entry_of(*kinds, "quantize_prompt"))] if takes_prompts(format, dtype) else []
    return [(SOURCE, entry_of(*kinds)), *prompts]


def params_of(job: Job, window: int) -> bytes:
    """Struct Params, complete except for the pointers."""
    blocks, size = job.blocks, job.k.element_size()
    return PARAMS.pack(
        *(0,) * 6, *(n * size for x in (job.k, job.v) for n in x.stride()[:2]),
        blocks.block_stride, blocks.head_stride, job.slot_mapping.stride(0),
        job.k.shape[0], blocks.slots, blocks.block_size, blocks.kv_heads, window, *divider(blocks.block_size),
    )  # fmt: skip


def plan(job: Job) -> jit.Launch:
    """Launch of a job, complete except for the pointers."""
    device, size = job.pages.get_device(), job.k.element_size()
    tokens, heads = job.k.shape[0], job.blocks.kv_heads
    window = window_of(tokens, heads, _multiprocessors(device))
    params = params_of(job, window)
    kinds = (job.format, job.k.dtype, job.balance is not None, job.slot_mapping.dtype)
    if window == WINDOW and takes_prompts(job.format, job.k.dtype):
        kernel = jit.load(PROMPT, entry_of(*kinds, "quantize_prompt"), jit.arch_of(device))
        return _prompt(kernel, job, params)
    kernel = jit.load(SOURCE, entry_of(*kinds), jit.arch_of(device))
    dim = job.format.head_dim
    shared = (WINDOW + 1) * dim * size + 8 * dim  # rows of a run and one of zeros; the centre, twice
    return jit.Launch(kernel, (-(-tokens // window), 2 * heads), 32, params, shared=shared)


def _prompt(kernel: jit.Kernel, job: Job, params: bytes) -> jit.Launch:
    """Launch of quantize_prompt.cu, with rounds of warps as in `quant.op.prepare`."""
    dim, heads = job.format.head_dim, job.blocks.kv_heads
    rows, slots, centre = WINDOW * dim * 2, 2 * WINDOW * job.slot_mapping.element_size(), 4 * dim
    shared = 2 * (rows + slots + centre) + 2 * dim  # and a row of zeros
    share = next(share for most, share in ROUNDS.items() if dim <= most)
    windows = -(-job.k.shape[0] // WINDOW)
    warps = max(1, min(windows, int(kernel.resident(32, shared) * share) // heads))
    rounds = (-(-windows // warps)).bit_length()
    return jit.Launch(kernel, (warps * heads, 1 + rounds), 32, params, shared=shared)


def launch_on(launch: jit.Launch, device: int) -> None:
    """Launch on a device's current stream; making a device current takes as long as a launch."""
    if torch._C._cuda_getDevice() == device:
        launch(jit.current_stream(device))
    else:
        with torch.cuda.device(device):
            launch(jit.current_stream(device))
