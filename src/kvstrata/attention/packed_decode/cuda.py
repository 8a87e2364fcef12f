"""``decode_packed`` in CUDA C++: packed.cu, where every warp computes its own work items, and packed_combine.cu.

Nothing is prepared outside the two launches: the device derives the work from ``seq_lens``. A `PackedDecodePlan` holds
their parameters for calls of one shape; scratch is the caller's workspace or allocated by the call.
"""

from __future__ import annotations

import functools
import math
import struct
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from kvstrata import jit
from kvstrata.attention.decode.cuda import ALONE, FOLDER, _inverse
from kvstrata.attention.decode.stages import (
    FEW,
    NAMES,
    PORTABLE_SHARED,
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
from kvstrata.layout.format import MAX_TIERS, Format

from .job import Job, Result

WORK = "4q22iq"  # struct PackedWork
BASE = f"10q5q6i2f3i5q qf3i{MAX_TIERS}i"  # struct Params of decode_state.cuh
# struct PackedParams: its base, then pages, table, balance; plain rows and their strides; strides; stages of a block.
DECODE = struct.Struct(BASE + "3q4q4q3q2q2i" + WORK)
COMBINE = struct.Struct("8q2q3q7if" + WORK)
# 8-byte words that hold addresses, which change from call to call. In DECODE: q; lengths, centre, list, partials
# and sums; pages, table, balance, tail and sink rows. The first of COMBINE: partials, sums, out, lse, sinks, q, centre,
# balance.
QUERY, LENGTHS, PAGES = 0, 4, struct.calcsize(BASE) // 8
DECODE_WORK, COMBINE_WORK = ((x.size - struct.calcsize(WORK)) // 8 for x in (DECODE, COMBINE))
SPLITS, MULTIPROCESSORS = 14, 16  # indices in the numbers of WORK
PLAIN_TOKENS = 16  # tokens per stage of plain rows
MOST_WARPS = 8  # maximum warps per column in packed_combine.cu
MOST_COST = 1 << 30
MOST_TOKENS = 1 << 24  # per request: the index of 16 tokens has 21 bits of a stage's meta (work.cuh)


def missing(job: Job) -> str | None:
    """Reason why these kernels cannot run the job, or None."""
    if reason := jit.missing():
        return reason
    if job.q.dtype not in NAMES:
        return f"cuda: expected q in float16 or bfloat16, got {job.q.dtype}"
    if not job.format.rotate:
        return "cuda: expected a format with rotation, got rotate=False"
    columns = job.most_queries * job.group
    if job.requests * job.blocks.kv_heads * columns**2 >= 1 << 32:  # divide.cuh
        return f"cuda: expected a smaller batch or max_seqlen_q, got {job.requests} rows of up to {columns} columns"
    if job.max_tokens > MOST_TOKENS:
        return f"cuda: expected at most {MOST_TOKENS} tokens in a row of block_table, got {job.max_tokens}"
    if job.blocks.block_size > MOST_TOKENS >> 8:  # divide.cuh: stages of a request times stages of a block
        return f"cuda: expected at most {MOST_TOKENS >> 8} tokens in a block, got {job.blocks.block_size}"
    if job.q.shape[0] * job.group >= 1 << 31:
        return f"cuda: expected fewer than 2^31 rows of q per KV head, got {job.q.shape[0] * job.group}"
    return None


def _flag(value: bool) -> str:
    return str(value).lower()


def entry_of(format: Format, dtype: torch.dtype, ordered: bool, cut: Cut, plain: bool = False) -> str:
    """Template instance of packed.cu; ``ordered``: visibility depends on positions; ``plain``: a tail or sink rows."""
    sizes = f"{format.head_dim},{format.page_tokens},{cut.width},{cut.warps},{cut.resident}"
    tier = f"Tier<{format.k_bits},{format.v_bits}>"
    return f"decode_packed<{NAMES[dtype]},{_flag(ordered)},{sizes},{tier},{_flag(plain)}>"


def combine_entry_of(dtype: torch.dtype, head_dim: int, warps: int, plain: bool = False) -> str:
    entry = combine_entry(dtype, head_dim, warps).replace("combine", "combine_packed", 1)
    return f"{entry[:-1]},{_flag(plain)}>"


def kernels_needed(
    format: Format, dtype: torch.dtype, group: int, q_len: int = 1, *, windowed: bool = False, arch: str
) -> list[jit.Named]:
    """Kernels of steps with up to ``q_len`` queries per request; ``windowed``: also with a sliding window."""
    if dtype not in NAMES or not format.rotate:
        return []
    needed = []
    for queries in range(1, q_len + 1):
        cut = cut_of((format,), queries * group, arch)
        for ordered in {queries > 1, windowed or queries > 1}:
            needed.append((FOLDER / "packed.cu", entry_of(format, dtype, ordered, cut)))
    fewest = max(4, -(-format.head_dim // 32))
    combine = [combine_entry_of(dtype, format.head_dim, warps) for warps in sorted({1, fewest, MOST_WARPS})]
    return list(dict.fromkeys([*needed, *((FOLDER / "packed_combine.cu", entry) for entry in combine)]))


def shared_of(format: Format, cut: Cut, plain: bool = False) -> int:
    """Dynamic shared memory of a block, in bytes; positions are not stored."""
    codes, rows = slot_bytes((format,)) - 4 * format.page_tokens, PLAIN_TOKENS * format.head_dim * 4
    if plain:
        return cut.warps * SLOTS * max(codes, rows)
    return cut.warps * max(SLOTS * codes, 8 * cut.width * format.head_dim * 4)  # or one partial per warp


def packed_cut(format: Format, columns: int, arch: str, plain: bool = False) -> Cut:
    """Launch configuration; fewer warps if stages of plain rows would take too much shared memory."""
    cut = cut_of((format,), columns, arch)
    if plain and arch < "sm_90" and shared_of(format, cut, plain) > PORTABLE_SHARED:
        return replace(cut, warps=1)
    return cut


@functools.lru_cache(maxsize=256)
def _kernel(source: str, entry: str, device: int) -> jit.Kernel:
    return jit.load(FOLDER / source, entry, jit.arch_of(device))


def _aligned(q: torch.Tensor) -> torch.Tensor:
    """Return q, copied if its rows do not start at multiples of 4 bytes, which is what the kernel reads."""
    odd = any(stride * q.element_size() % 4 for stride in q.stride()[:2]) or q.data_ptr() % 4
    return q.clone(memory_format=torch.contiguous_format) if odd else q


def _pointer(x: torch.Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


class Grid(NamedTuple):
    """Launch configuration of packed.cu for requests with up to ``columns`` query rows per KV head."""

    cut: Cut
    y: int  # blocks that share the columns
    shared: int  # bytes
    multiprocessors: int
    per: int  # blocks per multiprocessor

    @property
    def chunks(self) -> int:
        """Number of partials of a call without fixed splits, not counting head caches that begin inside a chunk."""
        return self.multiprocessors * self.per * self.cut.warps * self.cut.waves

    @property
    def columns(self) -> int:
        return 8 * self.cut.width * self.y


def grid_of(format: Format, columns: int, device: int, plain: bool) -> Grid:
    properties = torch.cuda.get_device_properties(device)
    cut = packed_cut(format, columns, jit.arch_of(device), plain)
    shared = shared_of(format, cut, plain)
    fit = properties.shared_memory_per_multiprocessor // (shared + 1280)
    per = max(min(cut.resident // cut.warps, fit), 1)
    return Grid(cut, -(-columns // (8 * cut.width)), shared, properties.multi_processor_count, per)


@functools.lru_cache(maxsize=1024)
def workspace_bytes(
    format: Format, requests: int, kv_heads: int, group: int, most_queries: int, device: int, plain: bool = False
) -> int:
    """Bytes of scratch memory of a call without fixed splits; ``plain``: with a tail or sink tokens."""
    grid = grid_of(format, most_queries * group, device, plain)
    return (grid.chunks + (1 + plain) * requests * kv_heads) * grid.columns * (4 * format.head_dim + 8)


class PackedDecodePlan:
    """Launches of calls with the same signature; pointers are written before each."""

    def __init__(self, job: Job, device: int) -> None:
        f, blocks, self.device = job.format, job.blocks, device
        columns = job.most_queries * job.group
        self.plain = plain = any(x is not None for x in job.rows)
        sizes = grid_of(f, columns, device, plain)
        self.cut, self.y, shared, multiprocessors, per = sizes
        cut, grid = self.cut, multiprocessors * per
        self.decode_blocks = grid
        self.tokens = stage_tokens(f)
        max_stages = -(-job.max_tokens // self.tokens)
        if plain:
            max_stages += f.page_tokens // PLAIN_TOKENS + -(-job.rows.sink_tokens // PLAIN_TOKENS)
        self.head_caches = job.requests * blocks.kv_heads
        split = 0 if job.fixed_split is None else -(-job.fixed_split // self.tokens)
        self.chunks = self.head_caches * -(-max_stages // split) if split else sizes.chunks
        self.slots, self.columns = self.chunks + (1 + plain) * self.head_caches, sizes.columns
        splits = 0 if plain or split else grid // self.head_caches  # blocks per head cache in an even batch
        costs, worst = [cost(f), begin_cost(f)], self.head_caches * (begin_cost(f) + max_stages * cost(f))
        costs = [max(n // -(-worst // MOST_COST), 1) for n in costs] if worst > MOST_COST else costs
        self.work = (
            job.requests, blocks.kv_heads, job.group, job.most_queries, job.sliding_window or 0,
            self.tokens.bit_length() - 1, job.max_tokens,
            *costs, few_cost(f), few_begin(f), FEW * self.chunks, self.chunks, split, splits, cut.warps,
            multiprocessors, per * cut.warps,
            *(0 if x is None else x.shape[0] for x in (job.rows.tail_k, job.rows.sink_k)),
            job.rows.sink_tokens, f.page_tokens.bit_length() - 1, _inverse(splits * cut.warps) if splits else 0,
        )  # fmt: skip
        ordered = job.sliding_window is not None or job.most_queries > 1
        decode = _kernel("packed.cu", entry_of(f, job.q.dtype, ordered, cut, plain), device)
        decode_params, combine_params = self._params(job)
        threads = 32 * cut.warps
        self.decode = jit.Launch(decode, (grid, self.y), threads, decode_params, shared=shared, overlap=True)
        all_columns = self.head_caches * columns
        warps = self._combine_warps(f.head_dim, all_columns, grid, multiprocessors, bool(split))
        combine = _kernel("packed_combine.cu", combine_entry_of(job.q.dtype, f.head_dim, warps, plain), device)
        shape = (all_columns, 32 * warps) if warps > 1 else (-(-all_columns // 4), 128)
        self.combine = jit.Launch(combine, *shape, combine_params, overlap=True)
        self.capped, self.return_lse = bool(job.softcap), job.return_lse
        self.words = tuple(memoryview(x.params).cast("q") for x in (self.decode, self.combine))
        self.optional = plain or any(x is not None for x in (job.cu_seqlens_q, job.balance, job.centre, job.sinks))
        self.sums_offset = self.slots * self.columns * f.head_dim * 4
        self.nbytes = self.sums_offset + self.slots * self.columns * 8  # bytes of scratch memory

    def _combine_warps(self, head_dim: int, columns: int, grid: int, multiprocessors: int, fixed: bool) -> int:
        """Warps per column; 1 is the kernel of single warps. Independent of the batch with fixed splits."""
        fewest = max(4, -(-head_dim // 32))
        if fixed:
            return fewest
        if self.chunks <= ALONE * self.head_caches and columns >= multiprocessors:
            return 1
        return MOST_WARPS if columns < 2 * grid else fewest

    def _params(self, job: Job) -> tuple[bytes, bytes]:
        """Parameters of both launches except for the addresses, which `run` writes."""
        q, blocks = job.q, job.blocks
        size, log2e = q.element_size(), math.log2(math.e)
        by_group, by_heads = _inverse(job.group), _inverse(blocks.kv_heads)
        block_stages, strides = blocks.block_size // self.tokens, (q.stride(0) * size, q.stride(1) * size)
        multiprocessors = self.work[MULTIPROCESSORS]
        strides_of = (
            n * size for x in (job.rows.tail_k, job.rows.sink_k) for n in (x.stride()[:2] if x is not None else (0, 0))
        )
        decode = DECODE.pack(
            *(0,) * 10, 0, *strides, 1, 0,
            job.most_queries, job.group, blocks.kv_heads, self.chunks, self.head_caches, multiprocessors,
            job.scale * log2e, (job.softcap or 0.0) * log2e, job.sliding_window or 0, 0, 0,
            0, 0, by_group, by_heads, _inverse(multiprocessors), 0, 0.0, 0, 0, 0, *(0,) * MAX_TIERS,
            *(0,) * 7, *strides_of, job.block_table.stride(0), blocks.block_stride, blocks.head_stride,
            _inverse(block_stages), _inverse(self.head_caches), block_stages, job.rows.tail_tokens, *(0,) * 4,
            *self.work,
        )  # fmt: skip
        combine = COMBINE.pack(
            *(0,) * 8, *strides, _inverse(job.most_queries * job.group), by_group, by_heads,
            job.most_queries, job.group, blocks.kv_heads, self.y, 8 * self.cut.width, 2, self.head_caches,
            job.scale * log2e, *(0,) * 4, *self.work,
        )  # fmt: skip
        return decode, combine

    def _point_optional(
        self, cu_seqlens_q: torch.Tensor | None, balance: torch.Tensor | None, centre: torch.Tensor | None,
        sinks: torch.Tensor | None, rows: list[torch.Tensor | None],
    ) -> None:  # fmt: skip
        """Write the addresses of optional tensors; all calls of a plan omit the same ones."""
        decode, combine = self.words
        decode[DECODE_WORK + 1] = combine[COMBINE_WORK + 1] = _pointer(cu_seqlens_q)
        decode[PAGES + 2] = combine[7] = _pointer(balance)
        decode[LENGTHS + 1] = _pointer(centre)
        # A softcap applies to complete scores, so packed.cu then adds the centre's part itself.
        combine[4], combine[6] = _pointer(sinks), 0 if self.capped else _pointer(centre)
        if self.plain:
            tail_k, tail_v, tail_slots, sink_k, sink_v, sink_slots = map(_pointer, rows)
            for i, address in enumerate((tail_k, tail_v, sink_k, sink_v)):
                decode[PAGES + 3 + i] = address
            decode[DECODE_WORK + 2] = combine[COMBINE_WORK + 2] = tail_slots
            decode[DECODE_WORK + 3] = combine[COMBINE_WORK + 3] = sink_slots

    def run(self, memory: tuple[Any, ...]) -> Result:
        """Run a call with the plan's signature: its `Tensors`, and the output or None."""
        q, pages, table, seq_lens, cu_seqlens_q, balance, centre, sinks, scratch, *rows, out = memory
        if out is None:
            out = torch.empty_like(q, memory_format=torch.contiguous_format)
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device) if self.return_lse else None
        if scratch is None:
            scratch = torch.empty(self.nbytes, dtype=torch.uint8, device=q.device)
        elif scratch.numel() < self.nbytes or scratch.data_ptr() % 16:
            raise ValueError(
                f"workspace: expected {self.nbytes} bytes at a multiple of 16, got {scratch.numel()} at "
                f"{scratch.data_ptr():#x}"
            )
        decode, combine = self.words
        lengths, partial_out = seq_lens.data_ptr(), scratch.data_ptr()
        decode[QUERY] = combine[5] = q.data_ptr()
        decode[LENGTHS] = decode[DECODE_WORK] = combine[COMBINE_WORK] = lengths
        decode[LENGTHS + 3] = combine[0] = partial_out
        decode[LENGTHS + 4] = combine[1] = partial_out + self.sums_offset
        decode[PAGES], decode[PAGES + 1], combine[2] = pages.data_ptr(), table.data_ptr(), out.data_ptr()
        if lse is not None:
            combine[3] = lse.data_ptr()
        if self.optional:
            self._point_optional(cu_seqlens_q, balance, centre, sinks, rows)
        stream = jit.current_stream(self.device)
        self.decode(stream)
        self.combine(stream)
        return out, lse
