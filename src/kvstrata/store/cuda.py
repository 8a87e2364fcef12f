"""``store_kv`` in CUDA C++: prepares the launch of a kernel in ``store.cu`` for a checked task.

Shapes are template parameters, so the kernel divides only by constants; pointers are written into the launch's
parameter struct on every call.
"""

from __future__ import annotations

import functools
import struct
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from kvstrata import jit
from kvstrata.jit import tuned

from .job import Rows, Task

SOURCE = Path(__file__).with_name("store.cu")
CXX = {
    torch.float32: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "e4m3",
    torch.float8_e5m2: "e5m2",
    torch.int32: "int",
    torch.int64: "long long",
}
# struct Params: source, cache and scale of K and of V, slots; 5 strides of each side; stride of slots, bound, tokens.
PARAMS = struct.Struct("7Q 5q 5q q q i4x")
POINTERS = struct.Struct("7Q")


@dataclass(frozen=True)
class Config:
    """Launch shape of a kernel of ``store.cu``.

    ``direct`` and ``staged``: threads per block, vectors per thread, maximum bytes of a vector in the cache. ``bulk``:
    rows per block, one thread each.
    """

    kernel: str = "direct"
    threads: int = 256
    per: int = 1
    vector: int = 16

    def __post_init__(self) -> None:
        if self.kernel not in ("direct", "staged", "bulk"):
            raise ValueError(f"kernel: expected direct, staged or bulk, got {self.kernel!r}")

    @classmethod
    def of(cls, choice: tuned.Choice) -> Config:
        """Config of a choice from `space.py`."""
        return cls("bulk", threads=32, per=choice["rows"]) if choice["kernel"] == "bulk" else cls(**choice)


@dataclass(frozen=True)
class Shape:
    """A task as the kernels see it: vectors per head row, vector width, index width."""

    task: Task
    elements: int
    k_vectors: int
    v_vectors: int
    wide_index: bool


def alignment(*values: int) -> int:
    """Largest power of two, at most 16, that divides all values."""
    bits = 16
    for value in values:
        bits |= value
    return bits & -bits


def shape_of(task: Task, address_bits: int) -> Shape:
    """Split the merged task into vectors as wide as addresses, strides and row lengths allow."""
    task = task.merged()
    source, cache = task.source_dtype.itemsize, task.cache_dtype.itemsize
    elements = min(16 // cache, 32 // source)  # two loads at most, one store
    for rows in _sides(task):
        source_bytes = alignment(*(n * source for n in (rows.source_token, rows.source_head, rows.dim)), address_bits)
        cache_strides = (rows.cache_block, rows.cache_row, rows.cache_head, rows.dim)
        cache_bytes = alignment(*(n * cache for n in cache_strides), address_bits)
        # A wide source vector is several 16-byte loads, so its start needs 16 bytes of alignment and no more.
        fits_source = elements if source_bytes == 16 else max(1, source_bytes // source)
        elements = min(elements, fits_source, max(1, cache_bytes // cache))
    return _shape(task, elements)


def _shape(task: Task, elements: int) -> Shape:
    k_vectors = task.k.dim // elements
    v_vectors = task.v.dim // elements if task.v else 0
    vectors = task.tokens * task.k.heads * max(k_vectors, v_vectors)
    return Shape(task, elements, k_vectors, v_vectors, vectors >= 1 << 30)


def cut(shape: Shape, config: Config) -> Shape:
    """Shape in vectors of at most ``config.vector`` bytes; for ``bulk``, in pieces of rows."""
    if config.kernel == "bulk":
        return replace(shape, task=in_chunks(shape.task))
    elements = min(shape.elements, config.vector // shape.task.cache_dtype.itemsize)
    return shape if elements == shape.elements else _shape(shape.task, elements)


def op_of(shape: Shape) -> str:
    """Template argument for moving one vector: a copy, or a rounding to fp8."""
    task = shape.task
    if task.rounds:
        return f"Round<{CXX[task.source_dtype]}, {CXX[task.cache_dtype]}, {shape.elements}>"
    return f"Copy<{shape.elements * task.cache_dtype.itemsize}>"


def features(shape: Shape) -> dict[str, int | str]:
    """Key of a task in a tuned table: tokens, separate heads, bytes of a contiguous row; sides and vectors."""
    task = shape.task
    sizes = {"tokens": task.tokens, "heads": task.k.heads, "row": _longest(task)}
    return {**sizes, "sides": "kv" if task.v else "k", "vector": op_of(shape)}


def tuned_config(shape: Shape, device: torch.device) -> Config | None:
    """Config from the tuned table of this GPU for a shape; None if there is none or the kernel cannot run it."""
    choice = tuned.lookup("store", torch.cuda.get_device_name(device), features(shape))
    config = Config.of(choice) if choice else None
    return config if config and takes(shape, config) else None


def entry_of(shape: Shape, slot_dtype: torch.dtype, config: Config) -> str:
    """Template instantiation for a shape."""
    task = shape.task
    slot, per_head = CXX[slot_dtype], str(task.scale_per_head).lower()
    if config.kernel == "bulk":
        row_bytes = [rows.dim * task.cache_dtype.itemsize if rows else 0 for rows in (task.k, task.v)]
        return f"store_bulk<{task.k.heads}, {row_bytes[0]}, {row_bytes[1]}, {task.k.block_size}, {slot}, {config.per}>"
    index = "unsigned long long" if shape.wide_index else "unsigned"
    return (
        f"store_{config.kernel}<{op_of(shape)}, {task.k.heads}, {shape.k_vectors}, {shape.v_vectors}, "
        f"{task.k.block_size}, {slot}, {index}, {per_head}, {config.threads}, {config.per}>"
    )


def _sides(task: Task) -> list[Rows]:
    return [task.k] if task.v is None else [task.k, task.v]


def _longest(task: Task) -> int:
    """Bytes of the longest contiguous row in the cache."""
    return max(rows.dim for rows in _sides(task)) * task.cache_dtype.itemsize


# Crossover points of the kernels, measured on an H200: `docs/perf-log.md`.
SMALL = 10 << 20  # bytes stored; below it wide blocks start soonest
BULK_FROM = 24 << 20  # bytes stored; below it the direct kernel starts sooner
BULK_FROM_LATENT = 9 << 20  # without V, if a thread of the direct kernel has half as many bytes in flight
BULK_ROW = 1024  # bytes of a contiguous row; below it there are too many bulk copies
BULK_STAGE = 4096  # bytes in flight per block
BULK_CHUNK = 2048  # the longest single copy


def config_of(backend: str, shape: Shape, arch: str) -> Config:
    """Default config of a backend; ``cuda`` takes the faster of direct and bulk copies."""
    longest = _longest(shape.task)
    stored = shape.task.tokens * shape.task.k.heads * longest * len(_sides(shape.task))
    bulk = Config("bulk", threads=32, per=max(1, min(32, BULK_STAGE // _longest(in_chunks(shape.task)))))
    if backend == "cuda_bulk":
        return bulk
    if backend == "cuda_staged":
        return Config("staged", threads=128, per=1)
    enough = BULK_FROM if shape.task.v else BULK_FROM_LATENT
    hopper = int(arch.removeprefix("sm_")) >= 90
    wins = stored >= enough and longest >= BULK_ROW and hopper and takes(shape, bulk)
    if backend == "cuda" and wins:
        return bulk
    return Config("direct", threads=512, per=1) if stored < SMALL else Config("direct", threads=128, per=2)


def in_chunks(task: Task) -> Task:
    """Task with rows longer than `BULK_CHUNK` split into equal pieces, which count as heads."""
    sides = _sides(task)
    size = task.cache_dtype.itemsize
    fewest = -(-_longest(task) // BULK_CHUNK)
    if task.k.heads > 1 or fewest == 1:
        return task
    fitting = (n for n in range(fewest, 4 * fewest) if all(rows.dim * size % (16 * n) == 0 for rows in sides))
    if (pieces := next(fitting, None)) is None:
        return task

    def cut(rows: Rows) -> Rows:
        dim = rows.dim // pieces
        return replace(rows, heads=pieces, dim=dim, source_head=dim, cache_head=dim)

    return replace(task, k=cut(task.k), v=cut(task.v) if task.v else None)


def takes(shape: Shape, config: Config) -> bool:
    """True if a kernel can move these rows: staged needs vectors of 4 bytes, bulk needs 16 and equal dtypes."""
    task, vector = shape.task, shape.elements * shape.task.source_dtype.itemsize
    if config.vector < task.cache_dtype.itemsize:
        return False
    if config.kernel == "staged":
        return cut(shape, config).elements * task.source_dtype.itemsize >= 4
    if config.kernel == "bulk":
        return vector == 16 and not task.rounds and _longest(in_chunks(task)) * config.per <= 40 << 10
    return True


@functools.cache
def _multiprocessors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def grid_of(shape: Shape, config: Config, device: int) -> int:
    task = shape.task
    if config.kernel == "bulk":
        return -(-task.tokens * task.k.heads // config.per) * (2 if task.v else 1)
    vectors = task.tokens * task.k.heads * max(shape.k_vectors, shape.v_vectors)
    blocks = -(-vectors // (config.threads * config.per))
    if config.kernel == "staged":
        return min(blocks, _multiprocessors(device) * (2048 // config.threads))
    return blocks


def plan(
    task: Task,
    slot_mapping: torch.Tensor,
    address_bits: int,
    backend: str,
    overlap: bool,
    config: Config | None = None,
) -> jit.Launch:
    """Launch of a task, complete except for the pointers."""
    shape = shape_of(task, address_bits)
    arch = jit.arch_of(slot_mapping.device)
    if config is None:
        config = tuned_config(shape, slot_mapping.device) if backend == "cuda" else None
        config = config or config_of(backend, shape, arch)
    if not takes(shape, config):
        vector = shape.elements * task.source_dtype.itemsize
        raise ValueError(
            f"backend: {config.kernel} copies need rows of aligned 16-byte vectors of one dtype (staged: 4 bytes), "
            f"got {vector}-byte vectors of {task.source_dtype} into {task.cache_dtype}; use backend='cuda'"
        )
    shape = cut(shape, config)
    task = shape.task
    source, cache = task.source_dtype.itemsize, task.cache_dtype.itemsize

    def strides(rows: Rows | None) -> tuple[int, ...]:
        if rows is None:
            return (0,) * 5
        in_source, in_cache = (rows.source_token, rows.source_head), (rows.cache_block, rows.cache_row, rows.cache_head)
        return *(n * source for n in in_source), *(n * cache for n in in_cache)

    pointers = (0,) * 7
    params = PARAMS.pack(
        *pointers, *strides(task.k), *strides(task.v), slot_mapping.stride(0), task.slots_in_cache, task.tokens
    )
    kernel = jit.load(SOURCE, entry_of(shape, slot_mapping.dtype, config), arch)
    return jit.Launch(
        kernel, grid_of(shape, config, slot_mapping.get_device()), config.threads, params, overlap=overlap
    )
