"""``decode_attention`` on the CPU in compiled loops, for a `TieredCache`: per request and KV head one pass over K, a
softmax and one pass over V, on torch's number of threads (``units_numba.py``). The reference takes over for a
`PagedCache` and without numba.
"""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any, NamedTuple

import numpy as np
import torch

from kvstrata.cache.move.append_numba import KINDS, NO_BALANCE
from kvstrata.cache.storage.views import BucketedCacheLayer
from kvstrata.layout.format import Format
from kvstrata.layout.fragments import words_per_lane
from kvstrata.layout.rotation import block_of
from kvstrata.threads import openmp, share_out

from .job import Job, Result
from .units_numba import (
    ADDRESSES,
    CODES,
    FIELDS,
    LAYER,
    OUT,
    QUERIES,
    REQUESTS,
    SCALE,
    SINKS,
    SOFTCAP,
    WINDOW,
    address_of_work,
    decode_units,
    merge_heads,
)  # fmt: skip

THREADED = 2048  # tokens of all KV heads; with fewer, starting another thread takes longer than the work
NO_SINKS = np.empty(0, np.float32)
LSE, MASS = 3, 4  # indices in `Memory`


class _Tier(NamedTuple):
    """Row of the table that the loops read; offsets are bytes from the start of a page."""

    kind: int
    k_bits: int
    v_bits: int
    k_words: int  # per lane
    v_words: int
    v_offset: int
    scale_offset: int
    position_offset: int


def missing(job: Job) -> str | None:
    """Reason why numba cannot run this job, or None."""
    if job.buckets is None or job.buckets.space is None:
        return "numba reads a TieredCache on the CPU"
    return None


@functools.lru_cache(maxsize=64)
def _tiers(formats: tuple[Format, ...], offsets: tuple[int, ...], dtype: torch.dtype) -> np.ndarray:
    rows = []
    for f, position in zip(formats, offsets, strict=True):
        if f.plain:
            rows.append(_Tier(KINDS[dtype], 0, 0, 0, 0, f.v_offset, 0, position))
        else:
            assert f.rotate, "codes of a TieredCache are of rotated, centred rows"
            k_words, v_words = (words_per_lane(bits, f.head_dim, f.page_tokens) for bits in (f.k_bits, f.v_bits))
            rows.append(_Tier(CODES, f.k_bits, f.v_bits, k_words, v_words, f.v_offset, f.scale_offset, position))
    return np.array(rows, np.int64)


def decode(job: Job) -> Result:
    """Compute out, lse or None, and mass or None."""
    assert job.buckets is not None
    sinks = NO_SINKS if job.sinks is None else job.sinks.detach().float().contiguous().numpy()
    shape: Any = tuple(job.q.shape)
    memory = memory_of(shape, job.kv_heads, job.max_length if job.return_mass else 0)
    out, results = attend(
        views(job.buckets, job.q.dtype), np.array(job.requests, np.int64), job.q.detach().float().contiguous(), memory,
        job.max_length, job.scale, job.sliding_window or 0, job.softcap or 0.0, sinks,
    )  # fmt: skip
    lse = torch.from_numpy(memory.array(results, LSE)) if job.return_lse else None
    mass = torch.from_numpy(memory.array(results, MASS)) if job.return_mass else None
    return out.to(job.q.dtype), lse, mass


class LayerViews(NamedTuple):
    """First arguments of `decode_units`: numpy views of a layer and the table of its tiers; and as fields of `work`."""

    arguments: tuple[Any, ...]
    fields: np.ndarray


def _fields(*values: Any) -> np.ndarray:
    """Arguments in the form of `work`."""
    flat: list[int] = []
    for x in values:
        flat += [x.ctypes.data, *x.shape] if isinstance(x, np.ndarray) else [int(x)]
    return np.array(flat, np.int64)


class Memory(NamedTuple):
    """Memory of a call: the last arguments of `decode_units`, and where they are in one array of float32."""

    q: tuple[int, int, int, int]
    parts: int
    shapes: list[tuple[int, int, int]]  # of sums, stats, weights, lse, mass
    starts: np.ndarray  # in the array, in bytes
    size: int
    fields: np.ndarray  # of `work`, from the queries on, with 0 for addresses

    def array(self, memory: np.ndarray, index: int) -> np.ndarray:
        first, shape = int(self.starts[index]) // 4, self.shapes[index]
        return memory[first : first + math.prod(shape)].reshape(shape)


@functools.lru_cache(maxsize=64)
def memory_of(q: tuple[int, int, int, int], kv_heads: int, longest: int) -> Memory:
    """Memory of a call with queries of this shape, and mass of ``longest`` tokens.

    A head cache is read in two parts if two threads could not share the heads of a request equally. This depends on
    neither the batch nor the threads, and so neither does the output.
    """
    parts, (batch, q_len, heads, dim) = 1 + kv_heads % 2, q
    units, rows = batch * kv_heads * parts, q_len * (heads // kv_heads)
    sums, stats, weights = (units, rows, dim), (units, rows, 2), (units, rows, longest)
    lse, mass = (batch, q_len, heads), (batch, kv_heads, longest)
    shapes = [sums, stats, weights, lse, mass]
    sizes = [-(-math.prod(shape) // 16) * 16 for shape in shapes]
    starts = np.array([0, *itertools.accumulate(sizes)][:-1], np.int64) * 4
    fields = [0, *q, 0, 0, 0, 0, 0, parts, 0, *sums, 0, *stats, 0, *weights, 0, *q, 0, *lse, 0, *mass]
    return Memory(q, parts, shapes, starts, sum(sizes), np.array(fields, np.int64))


def attend(
    layer: LayerViews, requests: np.ndarray, q: torch.Tensor, plan: Memory, tokens: int, scale: float, window: int,
    softcap: float, sinks: np.ndarray,
) -> tuple[torch.Tensor, np.ndarray]:  # fmt: skip
    """Output ``[B, q_len, Hq, D]``, and the array of ``plan`` with the other results.

    ``q``: float32, contiguous, without gradient, values in the order of ``plan.q``. ``tokens``: the most of a request.
    """
    memory, out = np.empty(plan.size, np.float32), torch.empty(plan.q, dtype=torch.float32, device="cpu")
    units, heads = plan.shapes[0][0], plan.shapes[0][0] // plan.parts
    if plan.shapes[MASS][2]:
        plan.array(memory, MASS).fill(0)
    threads = torch.get_num_threads() if heads * tokens >= THREADED else 1
    team = openmp() if min(threads, units) > 1 else None
    if team is not None:
        data = np.zeros(FIELDS, np.int64)
        data[LAYER], data[QUERIES:] = layer.fields, plan.fields
        data[ADDRESSES] = plan.starts + memory.ctypes.data
        data[REQUESTS], data[REQUESTS + 1] = requests.ctypes.data, len(requests)
        data[QUERIES], data[OUT], data[WINDOW] = q.data_ptr(), out.data_ptr(), window
        data[SINKS], data[SINKS + 1] = sinks.ctypes.data, len(sinks)
        numbers = data.view(np.float32)
        numbers[2 * SCALE], numbers[2 * SOFTCAP] = scale, softcap
        team(address_of_work(), data.ctypes.data, threads, 0)
        return out, memory
    sums, stats, weights, lse, mass = (plan.array(memory, index) for index in range(5))
    arguments = (
        *layer.arguments, requests, q.numpy().reshape(plan.q), np.float32(scale), window, np.float32(softcap), sinks,
        plan.parts, sums, stats, weights, out.numpy(), lse, mass,
    )  # fmt: skip
    share_out(decode_units, arguments, units, threads)
    if plan.parts > 1:
        merge_heads(*arguments, 0, heads)
    return out, memory


def views(buckets: BucketedCacheLayer, dtype: torch.dtype) -> LayerViews:
    """Views of a layer, made once."""
    kept = buckets.kept
    if dtype not in kept:
        assert buckets.space is not None
        space, balance, page = buckets.space.numpy(), buckets.balance, buckets.formats[0]
        tensors = (buckets.seq_lens, buckets.page_table, buckets.count, buckets.centre)
        arrays, layers = zip(*map(_all_layers, tensors if balance is None else (*tensors, balance)), strict=True)
        assert len(set(layers)) == 1, "tables of different layers"
        arguments = (
            space.view(np.uint32),
            space.view(np.uint16),
            buckets.position_dtype == torch.int32,
            layers[0],
            *arrays,
            *([NO_BALANCE] if balance is None else []),
            _tiers(buckets.formats, buckets.position_offsets, dtype),
            page.page_tokens,
            block_of(page.head_dim),
        )
        kept[dtype] = LayerViews(arguments, _fields(*arguments))
    return kept[dtype]


def _all_layers(x: torch.Tensor) -> tuple[np.ndarray, int]:
    """The ``[requests, layers, ...]`` tensor that ``x [requests, ...]`` is a layer of, and the layer.

    A single layer is in C order only if the cache has one layer; all layers together always are, so the loops are
    compiled once.
    """
    inner = max(x[:1].numel(), 1)
    layers, layer = max(x.stride(0) // inner, 1), x.storage_offset() % max(x.stride(0), inner) // inner
    whole = x.as_strided(
        (x.shape[0], layers, *x.shape[1:]), (layers * inner, inner, *x.stride()[1:]), x.storage_offset() - layer * inner
    )
    return whole.numpy(), layer
