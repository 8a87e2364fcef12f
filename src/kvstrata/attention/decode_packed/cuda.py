"""``decode_packed`` in CUDA C++: packed.cu, where every warp cuts its own work, and packed_combine.cu.

Nothing is prepared outside the two launches: the work follows from the lengths, on the device. A `Plan` holds their
parameters for calls of one shape; scratch is the caller's workspace or allocated by the call.
"""

from __future__ import annotations

import functools
import math
import struct

import torch

from kvstrata import jit
from kvstrata.attention.decode.cuda import ALONE, FOLDER, _inverse
from kvstrata.attention.decode.stages import (
    FEW,
    NAMES,
    SLOTS,
    Cut,
    begin_cost,
    combine_entry,
    cost,
    cut_of,
    few_begin,
    few_cost,
    slot_bytes,
    stage_tokens,
)
from kvstrata.layout import Format

from .job import Job, Result

WORK = "2q15i4x"  # struct PackedWork
# struct PackedParams: struct Params of decode_state.cuh, then pages, table, balance; strides; stages of a block.
DECODE = struct.Struct("9q5q6i2f3i5q 3q3qqi4x" + WORK)
COMBINE = struct.Struct("8q2q3q7if" + WORK)
MOST_COST = (1 << 31) - 1


def missing(job: Job) -> str | None:
    """Reason why these kernels cannot run the job, or None."""
    if reason := jit.missing():
        return reason
    if job.q.dtype not in NAMES:
        return f"cuda: expected q in float16 or bfloat16, got {job.q.dtype}"
    if not job.format.rotate:
        return "cuda: expected a format with rotation, got rotate=False"
    if job.max_tokens >= 1 << 31 or job.q.shape[0] * job.group >= 1 << 31:
        return f"cuda: expected fewer than 2^31 tokens in a row of block_table, got {job.max_tokens}"
    return None


def entry_of(format: Format, dtype: torch.dtype, ordered: bool, cut: Cut) -> str:
    """Template instance of packed.cu; ``ordered``: visibility depends on positions."""
    sizes = f"{format.head_dim},{format.page_tokens},{cut.width},{cut.warps},{cut.resident}"
    return f"decode_packed<{NAMES[dtype]},{str(ordered).lower()},{sizes},Tier<{format.k_bits},{format.v_bits}>>"


def combine_entry_of(dtype: torch.dtype, head_dim: int, warps: int) -> str:
    return combine_entry(dtype, head_dim, warps).replace("combine", "combine_packed", 1)


def shared_of(format: Format, cut: Cut) -> int:
    """Dynamic shared memory of a block, in bytes; positions are not stored."""
    return cut.warps * SLOTS * (slot_bytes((format,)) - 4 * format.page_tokens)


@functools.lru_cache(maxsize=256)
def _kernel(source: str, entry: str, device: int) -> jit.Kernel:
    return jit.load(FOLDER / source, entry, jit.arch_of(device))


def _aligned(q: torch.Tensor) -> torch.Tensor:
    """Return q, copied if its rows do not start at multiples of 4 bytes, which is what the kernel reads."""
    odd = any(stride * q.element_size() % 4 for stride in q.stride()[:2]) or q.data_ptr() % 4
    return q.clone(memory_format=torch.contiguous_format) if odd else q


def _pointer(x: torch.Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


class Plan:
    """Launches of calls that look alike; pointers are written before each."""

    def __init__(self, job: Job, device: int) -> None:
        f, blocks, self.device = job.format, job.blocks, device
        properties = torch.cuda.get_device_properties(device)
        columns = job.most_queries * job.group
        cut = cut_of((f,), columns, jit.arch_of(device))
        self.cut, self.y = cut, -(-columns // (8 * cut.width))
        shared = shared_of(f, cut)
        fit = properties.shared_memory_per_multiprocessor // (shared + 1280)
        multiprocessors = properties.multi_processor_count
        per = max(min(cut.resident // cut.warps, fit), 1)
        grid = multiprocessors * per
        self.tokens = stage_tokens(f)
        max_stages = -(-job.max_tokens // self.tokens)
        self.head_caches = job.requests * blocks.kv_heads
        split = 0 if job.fixed_split is None else -(-job.fixed_split // self.tokens)
        self.chunks = self.head_caches * -(-max_stages // split) if split else grid * cut.warps * cut.waves
        self.slots, self.columns = self.chunks + self.head_caches, 8 * cut.width * self.y
        costs, worst = [cost(f), begin_cost(f)], self.head_caches * (begin_cost(f) + max_stages * cost(f))
        costs = [max(n // -(-worst // MOST_COST), 1) for n in costs] if worst > MOST_COST else costs
        self.work = (
            job.requests, blocks.kv_heads, job.most_queries, job.sliding_window or 0, self.tokens, job.max_tokens,
            *costs, few_cost(f), few_begin(f), FEW * self.chunks, self.chunks, split, multiprocessors,
            per * cut.warps,
        )  # fmt: skip
        ordered = job.sliding_window is not None or job.most_queries > 1
        decode = _kernel("packed.cu", entry_of(f, job.q.dtype, ordered, cut), device)
        decode_params, combine_params = self._params(job)
        threads = 32 * cut.warps
        self.decode = jit.Launch(decode, (grid, self.y), threads, decode_params, shared=shared, overlap=True)
        all_columns = self.head_caches * columns
        warps = self._combine_warps(f.head_dim, all_columns, grid, multiprocessors, bool(split))
        combine = _kernel("packed_combine.cu", combine_entry_of(job.q.dtype, f.head_dim, warps), device)
        shape = (all_columns, 32 * warps) if warps > 1 else (-(-all_columns // 4), 128)
        self.combine = jit.Launch(combine, *shape, combine_params, overlap=True)
        self.multiprocessors = multiprocessors

    @property
    def nbytes(self) -> int:
        """Bytes of scratch."""
        return self.slots * self.columns * (self.head_dim + 2) * 4

    def _combine_warps(self, head_dim: int, columns: int, grid: int, multiprocessors: int, fixed: bool) -> int:
        """Warps per column; 1 is the kernel of single warps. Independent of the batch with fixed splits."""
        self.head_dim = head_dim
        fewest = max(4, -(-head_dim // 32))
        if fixed:
            return fewest
        if self.chunks <= ALONE * self.head_caches and columns >= multiprocessors:
            return 1
        return 16 if columns < 2 * grid else fewest

    def _params(self, job: Job) -> tuple[bytes, bytes]:
        """Parameters of both launches, with all addresses but those of scratch and results."""
        q, blocks, f = job.q, job.blocks, job.format
        size, log2e = q.element_size(), math.log2(math.e)
        cu, seq_lens = _pointer(job.cu_seqlens_q), job.seq_lens.data_ptr()
        by_group, by_heads = _inverse(job.group), _inverse(blocks.kv_heads)
        block_stages = blocks.block_size // self.tokens
        sizes = torch.cuda.get_device_properties(self.device).multi_processor_count
        decode = DECODE.pack(
            q.data_ptr(), 0, 0, 0, seq_lens, _pointer(job.centre), 0, 0, 0,
            0, q.stride(0) * size, q.stride(1) * size, 1, 0,
            job.most_queries, job.group, blocks.kv_heads, self.chunks, self.head_caches, sizes,
            job.scale * log2e, (job.softcap or 0.0) * log2e, job.sliding_window or 0, 0, 0,
            0, 0, by_group, by_heads, _inverse(sizes),
            job.pages.data_ptr(), job.block_table.data_ptr(), _pointer(job.balance),
            job.block_table.stride(0), blocks.block_stride, blocks.head_stride, _inverse(block_stages), block_stages,
            seq_lens, cu, *self.work,
        )  # fmt: skip
        # A softcap applies to whole scores, so packed.cu then adds the centre's part itself.
        centre = 0 if job.softcap else _pointer(job.centre)
        columns = job.most_queries * job.group
        combine = COMBINE.pack(
            0, 0, 0, 0, _pointer(job.sinks), q.data_ptr(), centre, _pointer(job.balance),
            q.stride(0) * size, q.stride(1) * size, _inverse(columns), by_group, by_heads,
            job.most_queries, job.group, blocks.kv_heads, self.y, 8 * self.cut.width, 2, self.head_caches,
            job.scale * log2e, seq_lens, cu, *self.work,
        )  # fmt: skip
        assert f.head_dim == q.shape[2]
        return decode, combine

    def run(self, job: Job) -> Result:
        """Run a job that looks like the plan's."""
        q = job.q
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device) if job.return_lse else None
        scratch = job.workspace
        if scratch is None:
            scratch = torch.empty(self.nbytes, dtype=torch.uint8, device=q.device)
        elif scratch.numel() < self.nbytes or scratch.data_ptr() % 16:
            raise ValueError(
                f"workspace: expected {self.nbytes} bytes at a multiple of 16, got {scratch.numel()} at "
                f"{scratch.data_ptr():#x}"
            )
        partial_out = scratch.data_ptr()
        partial_sum = partial_out + self.slots * self.columns * self.head_dim * 4
        decode, combine = self._params(job)
        self.decode.params[:] = decode
        struct.pack_into("2q", self.decode.params, 6 * 8, partial_out, partial_sum)
        self.combine.params[:] = combine
        struct.pack_into("4q", self.combine.params, 0, partial_out, partial_sum, out.data_ptr(), _pointer(lse))
        stream = jit.current_stream(self.device)
        self.decode(stream)
        self.combine(stream)
        return out, lse
