"""Decode attention in CUDA C++: a work list, one launch over all tiers, one launch that combines.

    worklist.cu   counts, page tables --> stages in (tier, request, KV head) order, split into chunks of equal cost
    decode.cu     a warp takes a chunk: pages --> partials
    combine.cu    partials --> out, lse
    rows.cu       table row of each request, if row i is not request i
    observe.cu    at the start of a step: selects the layers whose mass is added to importance (observe.py)

`WorkPlan` holds the work list and the scratch memory for one shape of call. The device builds the list before every use
or, with a `DecodePlan`, once per step for all layers; the host never waits. Calls without a plan share one per shape
and stream (`decode`), for any layer.
"""

from __future__ import annotations

import functools
import math
import struct
import threading
from collections import OrderedDict
from collections.abc import Hashable
from pathlib import Path
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch

from kvstrata import jit
from kvstrata.cache.storage.scratch import register
from kvstrata.layout.format import MAX_TIERS, Format

from . import observe_cuda
from .job import Job, Result
from .observe import Observation
from .scratch import Sizes, layers_at_once, list_bytes
from .source import Source
from .stages import (
    COSTS,
    FEW,
    NAMES,
    Cut,
    begin_cost,
    combine_entry,
    cost,
    decode_entry,
    features,
    few_begin,
    few_cost,
    shared_of,
    stage_tokens,
    tuned_cut,
)

if TYPE_CHECKING:
    from kvstrata.store.paged_cache import PagedCache


FOLDER = Path(__file__).parent
PARTS = 16  # blocks that write one layer's list; more if their shared memory would not suffice
BASE_BYTES, BASES_BYTES = 16, 32 * 1024  # shared memory of worklist.cu: per bucket, and at most per block
KEPT = 8  # plans per cache for calls that pass none
ALONE = 12  # up to this many chunks per KV head of a request, one warp combines the partials

WORKLIST = struct.Struct(f"9q4q4q15i{3 * MAX_TIERS}i4x")
DECODE = struct.Struct("10q5q6i2f3i5q")  # followed by observe_cuda.PLACE
COMBINE = struct.Struct("9q7q7if")
ROWS_AT_ONCE = 1016  # as in rows.cu
ROWS = struct.Struct(f"q2i{ROWS_AT_ONCE}i")
TABLES, PLAIN, LAYER = (1 * 8, "3q"), (13 * 8, "q"), (17 * 8, "i")  # offset and type in WORKLIST


def missing(job: Job) -> str | None:
    """Reason why these kernels cannot run the job, or None."""
    if reason := jit.missing():
        return reason
    if job.q.dtype not in NAMES:
        return f"cuda: expected q in float16 or bfloat16, got {job.q.dtype}"
    if job.buckets is not None and len(job.buckets.formats) > MAX_TIERS:
        return f"cuda: expected at most {MAX_TIERS} tiers, got {len(job.buckets.formats)}"
    if job.paged is not None and (reason := _missing_rows(job.paged)):
        return reason
    return None


def _aligned(q: torch.Tensor) -> torch.Tensor:
    """Return q, copied if its rows do not start at multiples of 4 bytes, which is what the kernel reads."""
    odd = any(stride * q.element_size() % 4 for stride in q.stride()[:3]) or q.data_ptr() % 4
    return q.clone(memory_format=torch.contiguous_format) if odd else q


def _missing_rows(cache: PagedCache) -> str | None:
    if cache.k.dtype not in NAMES:
        return f"cuda: expected blocks in float16 or bfloat16, got {cache.k.dtype}"
    if cache.head_dim % 16 or not 32 <= cache.head_dim <= 256:
        return f"cuda: expected a head_dim that is a multiple of 16 from 32 to 256, got {cache.head_dim}"
    if cache.block_size % 16:
        return f"cuda: expected blocks of a multiple of 16 tokens, got {cache.block_size}"
    if cache.k.stride() != cache.v.stride():
        return f"cuda: expected k and v with the same strides, got {cache.k.stride()} and {cache.v.stride()}"
    if any(n * 2 % 16 for n in cache.k.stride()[:3]) or cache.k.data_ptr() % 16 or cache.v.data_ptr() % 16:
        return f"cuda: expected rows at multiples of 16 bytes, got strides {cache.k.stride()}"
    return None


@functools.lru_cache(maxsize=256)
def _decode_kernel(
    formats: tuple[Format, ...],
    dtype: torch.dtype,
    cut: Cut,
    device: int,
    *,
    mass: bool,
    observe: bool,
    balanced: bool,
    rows: bool,
    ordered: bool,
) -> jit.Kernel:
    arch = jit.arch_of(device)
    entry = decode_entry(
        formats, dtype, cut.width, arch, mass=mass, observe=observe, balanced=balanced, rows=rows, ordered=ordered,
        cut=cut,
    )  # fmt: skip
    return jit.load(FOLDER / "decode.cu", entry, arch)


@functools.lru_cache(maxsize=256)
def _combine_kernel(dtype: torch.dtype, head_dim: int, warps: int, device: int) -> jit.Kernel:
    return jit.load(FOLDER / "combine.cu", combine_entry(dtype, head_dim, warps), jit.arch_of(device))


def _pointer(x: torch.Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


def _row(x: torch.Tensor, index: int) -> int:
    """Address of ``x[index]``."""
    return x.data_ptr() + index * x.stride(0) * x.element_size()


@functools.cache
def _inverse(number: int) -> int:
    """Reciprocal for divide.cuh: exact for dividends below 2^32 / number."""
    return -(-(2**32) // number)


def list_parts(head_caches: int, tiers: int) -> tuple[int, int]:
    """Number of blocks that write one layer's list, and the dynamic shared memory of each in bytes."""
    parts = max(min(PARTS, head_caches // 8), -(-head_caches * tiers * BASE_BYTES // BASES_BYTES), 1)
    return parts, -(-head_caches // parts) * tiers * BASE_BYTES


class WorkPlan:
    """Work list and scratch memory of calls with these sizes, for one layer or several consecutive ones.

    ``fixed_split``: tokens of a KV head per partial (4-bit tokens; others in proportion to their cost), independent of
    the rest of the batch, so that the output of a request is batch-invariant.
    """

    def __init__(
        self,
        source: Source,
        requests: tuple[int, ...],
        kv_heads: int,
        heads: int,
        q_len: int,
        *,
        layers: int = 1,
        layer_strides: tuple[int, int] = (0, 0),
        fixed_split: int | None = None,
        cut: Cut | None = None,
        observation: Observation | None = None,
    ) -> None:
        device = source.table.device
        self.device = device.index if device.index is not None else torch.cuda.current_device()
        self.q_len, self.kv_heads, self.formats = q_len, kv_heads, source.formats
        tiers, max_pages = len(self.formats), source.table.shape[-1]
        self.layers, self.layer_strides, self.observation = layers, layer_strides, observation
        first = self.formats[0]
        columns = q_len * heads // self.kv_heads
        properties = torch.cuda.get_device_properties(device)
        if cut is None:
            tokens = max_pages * source.page_tokens
            shape = features(self.formats, source.rows[1] > 0, len(requests) * kv_heads, tokens, columns)
            gpu = None if fixed_split is not None else properties.name
            shared = properties.shared_memory_per_multiprocessor
            cut = tuned_cut(self.formats, columns, shape, gpu, jit.arch_of(self.device), shared)
        self.cut, self.width, self.warps = cut, cut.width, cut.warps
        self.blocks = -(-columns // (8 * self.width))
        self.shared = shared_of(self.formats, cut)
        fit = properties.shared_memory_per_multiprocessor // (self.shared + 1280)
        resident = cut.resident // self.warps
        self.multiprocessors = properties.multi_processor_count
        self.grid = self.multiprocessors * max(min(resident, fit), 1)
        self.costs = [cost(f) for f in self.formats]
        self.tokens = [stage_tokens(f) for f in self.formats]
        head_caches = len(requests) * kv_heads
        per_head_cache = max_pages * (source.page_tokens // min(self.tokens)) + tiers
        self.capacity = head_caches * per_head_cache
        self.fixed_cost, self.chunks = 0, self.grid * self.warps * cut.waves
        if fixed_split is not None:
            self.fixed_cost = max(fixed_split * COSTS[4] * first.head_dim // (64 * 128), max(self.costs))
            self.chunks = head_caches * (-(-per_head_cache * max(self.costs) // self.fixed_cost) + tiers)
        self.head_caches, buckets = head_caches, tiers * head_caches
        one = list_bytes(self.capacity, self.chunks, buckets)
        self.at_once = layers_at_once(layers, one, list_parts(head_caches, tiers)[0], self.multiprocessors)
        columns = 8 * self.width * self.blocks  # including padding of the last block
        self.sizes = Sizes(self.at_once, self.capacity, self.chunks, buckets, columns, first.head_dim)
        ints = functools.partial(torch.empty, dtype=torch.int32, device=device)
        self.stages = ints(self.at_once, max(self.capacity, 1), 4)
        self.parts = ints(self.at_once, self.chunks, 8)
        self.slots = ints(self.at_once, max(buckets, 1), 2)
        floats = functools.partial(torch.empty, dtype=torch.float32, device=device)
        self.partial_out = floats(self.chunks + buckets, columns, first.head_dim)
        self.partial_sum = floats(self.chunks + buckets, columns, 2)
        self._row_numbers = ints(max(len(requests), 1))
        self._set_requests(requests)
        self._lists: tuple[int, int] | None = None  # capture id and first layer of the current lists
        self._captured = False
        self._launches: dict[Hashable, jit.Launch] = {}
        self._worklist = self._make_worklist(source)
        self._rows_kernel = jit.load(FOLDER / "rows.cu", "rows", jit.arch_of(self.device))  # not during a capture
        if observation is not None:
            self._observe_kernel = jit.load(FOLDER / "observe.cu", "observe", jit.arch_of(self.device))

    @property
    def nbytes(self) -> int:
        """Bytes of scratch on the device."""
        return self.sizes.nbytes

    def _set_requests(self, requests: tuple[int, ...]) -> None:
        self.requests = requests
        in_order = requests == tuple(range(len(requests)))
        self.rows = 0 if in_order else self._row_numbers.data_ptr()  # address; 0: row i is request i

    def _make_worklist(self, x: Source) -> jit.Launch:
        pad, first = [0] * (MAX_TIERS - len(self.formats)), self.formats[0]
        seen = (0, 0)
        if (own := self.observation) is not None:
            seen = (own.weights.data_ptr(), own.cache.reports.state.data_ptr())
        params = WORKLIST.pack(
            self.rows, x.table.data_ptr(), x.counts.data_ptr(), _pointer(x.slabs),
            *(y.data_ptr() for y in (self.stages, self.parts, self.slots)), *seen,
            x.table.stride(0), self.layer_strides[0], x.counts.stride(0), self.layer_strides[1], *x.rows,
            0, len(self.requests), self.kv_heads, len(self.formats), x.table.shape[-1], x.units, self.capacity,
            self.chunks, self.fixed_cost, 0 if self.fixed_cost else begin_cost(first), FEW * self.chunks,
            few_begin(first), self.multiprocessors, self.grid // self.multiprocessors * self.warps, x.page_tokens,
            *self.tokens, *pad, *self.costs, *pad, *map(few_cost, self.formats), *pad,
        )  # fmt: skip
        kernel = jit.load(FOLDER / "worklist.cu", "worklist", jit.arch_of(self.device))
        parts, shared = list_parts(self.head_caches, len(self.formats))
        jit.bind_context(self.device)
        return jit.Launch(kernel, (self.at_once, parts), 1024, params, shared=shared)

    def read(self, source: Source, requests: tuple[int, ...]) -> None:
        """Build the next list from another layer, or for other requests, with the same sizes."""
        if self.requests != requests:
            self._set_requests(requests)
            struct.pack_into("q", self._worklist.params, 0, self.rows)
        tables = (source.table.data_ptr(), source.counts.data_ptr(), _pointer(source.slabs))
        struct.pack_into(TABLES[1], self._worklist.params, TABLES[0], *tables)
        struct.pack_into(PLAIN[1], self._worklist.params, PLAIN[0], source.rows[0])

    def update(self, rows: bool = True) -> None:
        """Build the list from the current contents of the cache; ``rows``: upload the rows of `requests` first."""
        if self.head_caches:
            if rows and self.rows:
                self._send_rows()
            if self.observation is not None:
                params = observe_cuda.begin(self.observation)
                jit.Launch(self._observe_kernel, 1, 1024, params)(jit.current_stream(self.device))
            self._make_lists(self._capture(), 0)

    def _send_rows(self) -> None:
        for i in range(0, len(self.requests), ROWS_AT_ONCE):
            batch = self.requests[i : i + ROWS_AT_ONCE]
            params = ROWS.pack(self.rows + 4 * i, len(batch), 0, *batch, *[0] * (ROWS_AT_ONCE - len(batch)))
            jit.Launch(self._rows_kernel, 1, 1024, params)(jit.current_stream(self.device))

    def _capture(self) -> int:
        """Id of the capture that the current stream is part of, 0 for none."""
        if self.at_once == self.layers or not torch.cuda.is_current_stream_capturing():
            return 0
        self._captured = True
        return jit.capture_id(jit.current_stream(self.device))

    def _make_lists(self, capture: int, first: int) -> None:
        struct.pack_into(LAYER[1], self._worklist.params, LAYER[0], first)
        self._worklist(jit.current_stream(self.device))
        self._lists = (capture, first)

    def _index(self, layer: int) -> int:
        """Index of a layer's list, which is built if it is not current.

        A replay changes lists without the host noticing, and may start from any state. So a capture relies only on
        lists that it built itself, and eager calls rely on none after a capture.
        """
        if self.at_once == self.layers:
            return layer
        capture, first = self._capture(), min(layer // self.at_once * self.at_once, self.layers - self.at_once)
        if self._lists != (capture, first) or (self._captured and not capture):
            self._make_lists(capture, first)
        return layer - first

    def run(self, job: Job, layer: int = 0) -> Result:
        """Run a job over one of the plan's layers."""
        q, source = job.q, Source.of(job)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        lse = mass = None
        if job.return_lse or job.return_mass:
            lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
        elif self.observation is not None:
            lse = self.observation.lse
        index = self._index(layer) if self.head_caches else 0
        if self.head_caches:
            self._decode(job, source, index, None, None)
            self._combine(job, source, index, out, lse)
        if job.return_mass:
            mass = torch.zeros(q.shape[0], self.kv_heads, job.max_length, dtype=torch.float32, device=q.device)
            if self.head_caches:
                self._decode(job, source, index, lse, mass)
        if self.observation is not None and self.head_caches:
            for block in range(self.blocks):
                self._decode(job, source, index, lse, None, observe_cuda.place(self.observation, layer, block))
        return out, lse if job.return_lse else None, mass

    def _decode(
        self, job: Job, x: Source, index: int, lse: torch.Tensor | None, mass: torch.Tensor | None, place: bytes = b""
    ) -> None:
        """Attend; with ``mass`` or ``place`` (`observe_cuda.place`) run the second pass, which adds to it."""
        q, second = job.q, mass is not None or bool(place)
        size, log2e = q.element_size(), math.log2(math.e)
        ordered = second or job.sliding_window is not None or self.q_len > 1
        centre_stride = 0 if x.centre is None else x.centre.stride(0)
        params = DECODE.pack(
            q.data_ptr(), _row(self.stages, index), _row(self.parts, index), self.rows,
            x.lengths.data_ptr(), _pointer(x.centre), _pointer(x.balance),
            _pointer(mass if second else self.partial_out), self.partial_sum.data_ptr(), _pointer(lse),
            *(n * size for n in q.stride()[:3]), x.lengths.stride(0), centre_stride,
            self.q_len, job.group, self.kv_heads, self.chunks, self.head_caches, self.multiprocessors,
            job.scale * log2e, (job.softcap or 0.0) * log2e, job.sliding_window or 0,
            x.position_bytes if ordered else 0, job.max_length, x.rows[3], x.v_offset,
            *map(_inverse, (job.group, self.kv_heads, self.multiprocessors)),
        ) + (place or observe_cuda.NOWHERE)  # fmt: skip
        key = (q.dtype, second, ordered, bool(place), x.balance is not None)
        if key not in self._launches:
            kernel = _decode_kernel(
                self.formats, q.dtype, self.cut, self.device, mass=second, observe=bool(place),
                balanced=x.balance is not None, rows=x.rows[1] > 0, ordered=ordered,
            )  # fmt: skip
            self._launches[key] = jit.Launch(
                kernel, (self.grid, 1 if place else self.blocks), 32 * self.warps, params, shared=self.shared,
                overlap=mass is None,
            )  # fmt: skip
        self._start(key, params)

    def _combine(self, job: Job, x: Source, index: int, out: torch.Tensor, lse: torch.Tensor | None) -> None:
        q = job.q
        # A softcap applies to complete scores, so decode.cu then adds the centre's part itself.
        centre = None if job.softcap or x.centre is None else x.centre
        params = COMBINE.pack(
            self.partial_out.data_ptr(), self.partial_sum.data_ptr(), _row(self.slots, index), out.data_ptr(),
            _pointer(lse), _pointer(job.sinks), q.data_ptr(), _pointer(centre), self.rows,
            *(n * q.element_size() for n in q.stride()[:3]), 0 if centre is None else centre.stride(0),
            *map(_inverse, (self.q_len * job.group, job.group, self.kv_heads)),
            self.q_len, job.group, self.kv_heads, self.blocks, 8 * self.width, len(self.formats), self.head_caches,
            job.scale * math.log2(math.e),
        )  # fmt: skip
        if out.dtype not in self._launches:
            head_dim, columns = out.shape[3], self.head_caches * self.q_len * job.group
            warps = self._combine_warps(head_dim, columns)
            kernel = _combine_kernel(out.dtype, head_dim, warps, self.device)
            grid, threads = (columns, 32 * warps) if warps > 1 else (-(-columns // 4), 128)
            self._launches[out.dtype] = jit.Launch(kernel, grid, threads, params, overlap=True)
        self._start(out.dtype, params)

    def _start(self, key: Hashable, params: bytes) -> None:
        launch = self._launches[key]
        launch.params[:] = params
        launch(jit.current_stream(self.device))

    def _combine_warps(self, head_dim: int, columns: int) -> int:
        """Warps per column; 1 is the kernel of single warps. Independent of the batch with fixed splits."""
        fewest, chosen = max(4, -(-head_dim // 32)), self.cut.combine
        if chosen or self.fixed_cost:
            return chosen if chosen == 1 else max(fewest, chosen)
        if self.chunks <= ALONE * self.head_caches and columns >= self.multiprocessors:
            return 1
        return 16 if columns < 2 * self.grid else fewest


Plans = OrderedDict[Hashable, WorkPlan]  # least recently used first
_PLANS: Plans = OrderedDict()  # for all PagedCaches
_OWNED: WeakKeyDictionary[object, Plans] = WeakKeyDictionary()  # for each TieredCache, as long as it lives


def _plan_of(job: Job, source: Source, device: int) -> WorkPlan:
    """Plan for calls of this shape on this stream and thread, shared by all layers."""
    requests, sizes = tuple(job.requests), (job.kv_heads, job.q.shape[2], job.q.shape[1])
    key: tuple[Hashable, ...] = (len(requests), *sizes, jit.current_stream(device), threading.get_ident())
    plans = _PLANS if job.owner is None else _OWNED.setdefault(job.owner, OrderedDict())
    if job.owner is None:
        table, counts = source.table, source.counts
        key += (device, source.formats, table.shape, table.stride(0), counts.stride(0))
        key += (source.page_tokens, source.units, source.rows[1:])
    plan = plans.get(key)
    if plan is None:
        plan = plans[key] = WorkPlan(source, requests, *sizes)
        if job.owner is not None:
            register(job.owner, plan)
        if len(plans) > KEPT:
            plans.popitem(last=False)
        plan.update()
        return plan
    plans.move_to_end(key)
    same_requests = plan.requests == requests
    plan.read(source, requests)
    plan.update(rows=not same_requests)
    return plan


def decode(job: Job) -> Result:
    """Run one call; without a plan it builds its own list and keeps the scratch memory for calls of this shape."""
    if (q := _aligned(job.q)) is not job.q:
        job = job._replace(q=q)
    device = q.get_device()
    with torch.cuda.device(device):
        jit.bind_context(device)
        if job.plan is not None:
            return job.plan.cuda().run(job, job.layer)
        source = Source.of(job)
        if not torch.cuda.is_current_stream_capturing():
            return _plan_of(job, source, device).run(job)
        # Scratch allocated during a capture is in the graph's memory pool, so it may be freed here like any other
        # intermediate: the pool reuses it for later calls of the capture and is freed with the graph. Overlapping
        # launches allow that: worklist.cu, the first to write to it again, starts when all kernels before it are done,
        # and decode.cu and combine.cu wait for the kernel before them (pdl.cuh) before they write.
        plan = WorkPlan(source, tuple(job.requests), job.kv_heads, q.shape[2], q.shape[1])
        plan.update()
        return plan.run(job)
