"""``store_packed`` with a tail or sink rows in CUDA C++: quantize_tail.cu, for decode steps and prompts."""

from __future__ import annotations

import struct

import torch

from kvstrata import jit
from kvstrata.layout import Format
from kvstrata.quant.op import SOURCE as QUANTIZE

from . import cuda
from .tail_job import TailJob, TailTensors

SOURCE = QUANTIZE.with_name("quantize_tail.cu")
ROWS = "3Q2q2i"  # struct PlainRows: k, v, slots; strides; sizes
# struct TailParams: its base, then seq_lens, cu_queries; tail and sinks; requests, rows of each, parts.
TAIL = struct.Struct("2Q" + ROWS + ROWS + "3i4x")
POINTERS = (struct.Struct("2Q"), struct.Struct("3Q"))
TAIL_ROWS = cuda.PARAMS.size + 16
SINK_ROWS = TAIL_ROWS + struct.calcsize(ROWS)


def missing(job: TailJob) -> str | None:
    """Reason why the kernel cannot run the job, or None."""
    return cuda.missing(job.store)


def kernels_needed(format: Format, dtype: torch.dtype, balanced: bool, slot_dtype: torch.dtype) -> list[jit.Named]:
    """The kernel of decode steps and prompts."""
    return [(SOURCE, cuda.entry_of(format, dtype, balanced, slot_dtype, "quantize_tail"))]


def _sizes(k: torch.Tensor | None) -> tuple[int, ...]:
    """Fields of struct PlainRows, with pointers of 0."""
    if k is None:
        return (0,) * 7
    size = k.element_size()
    return (0, 0, 0, k.stride(0) * size, k.stride(1) * size, k.shape[2], k.shape[0])


def plan(job: TailJob) -> jit.Launch:
    """Launch of a job, complete except for the pointers."""
    store, rows, requests = job.store, job.rows, job.requests
    device, blocks, dim = store.pages.get_device(), store.blocks, store.format.head_dim
    tokens, size = store.k.shape[0], store.k.element_size()
    window = cuda.window_of(tokens, blocks.kv_heads, cuda._multiprocessors(device))
    parts = store.format.page_tokens // 16 if window == 1 else 1
    more = TAIL.pack(0, 0, *_sizes(rows.tail_k), *_sizes(rows.sink_k), requests, tokens // max(requests, 1), parts)
    kinds = (store.format, store.k.dtype, store.balance is not None, store.slot_mapping.dtype)
    kernel = jit.load(SOURCE, cuda.entry_of(*kinds, "quantize_tail"), jit.arch_of(device))
    shared = (cuda.WINDOW + 1) * dim * size + 8 * dim  # rows of a run and one of zeros; the centre, twice
    grid = (-(-tokens // window), 2 * blocks.kv_heads * parts)
    return jit.Launch(kernel, grid, 32, cuda.params_of(store, window) + more, shared=shared)


def point(launch: jit.Launch, tensors: TailTensors) -> None:
    """Write the addresses of a call into a launch."""
    k, v, pages, slot_mapping, seq_lens, cu, balance, centre, *rows = (
        0 if x is None else x.data_ptr() for x in tensors
    )
    cuda.POINTERS.pack_into(launch.params, 0, k, v, pages, slot_mapping, balance, centre)
    POINTERS[0].pack_into(launch.params, cuda.PARAMS.size, seq_lens, cu)
    POINTERS[1].pack_into(launch.params, TAIL_ROWS, *rows[:3])
    POINTERS[1].pack_into(launch.params, SINK_ROWS, *rows[3:])
