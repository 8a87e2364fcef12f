"""Centres of K computed by kernels over pages and new rows (centre.cu): two launches for all places, no waiting."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import lru_cache
from itertools import repeat
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvstrata import jit
from kvstrata.cache.move.launches import Launches, kernel, prepare
from kvstrata.cache.storage.page import NewRows, PageFormat
from kvstrata.cache.storage.scratch import Lease
from kvstrata.cache.storage.tokens import Fresh
from kvstrata.quant.op import CXX
from kvstrata.quant.rope import mean_rotation

from .centre import CENTRE_TOKENS, HORIZON, rope_tables
from .plan_cuda import upload

if TYPE_CHECKING:
    from kvstrata.cache.state import CacheState
    from kvstrata.cache.storage.transaction import Transaction

SOURCE = Path(__file__).with_name("centre.cu")
THREADS, FINISH_THREADS, CHUNKS, PAIRINGS = 1024, 256, 32, 3  # as in centre.cu
WRONG = {None: 0, True: 1, False: 2}  # the pairing that is not computed, by ``interleaved``
# struct Params of centre.cu, in its order.
POINTERS = (
    "table", "count", "pointers", "begun", "places", "turns", "ahead", "k", "means", "lengths", "centres", "stored",
    "balance", "direction", "directions",
)  # fmt: skip
PARAMS = struct.Struct(f"{len(POINTERS)}Q 2q 11i 4x")
OFFSETS = {name: 8 * i for i, name in enumerate(POINTERS)}  # of the pointers in the struct


@dataclass(frozen=True)
class Centres:
    """Centres of stored K of places; ``compute`` writes them, ``store`` copies them into the cache."""

    rows: torch.Tensor  # float32 [places * kv_heads, D]
    directions: torch.Tensor | None  # int8, same shape: the cache's, see `quant.reference.aim`
    params: bytearray  # of all launches
    compute: Launches
    store: Launches | None  # None if there are no new centres


def entry_of(plain: PageFormat) -> str:
    """The kernel that sums rows of plain pages."""
    position = "short" if plain.position_dtype == torch.int16 else "int"
    return f"sum<{CXX[plain.dtype]}, {position}>"


def kernels_needed(plain: PageFormat) -> list[jit.Named]:
    """Kernels that compute and store centres."""
    return [(SOURCE, entry) for entry in (entry_of(plain), "finish<>", "store<>")]


def centres_of_places(
    cache: CacheState,
    change: Transaction,
    layers: np.ndarray,
    requests: np.ndarray,
    coded: np.ndarray,
    fresh: Fresh | None,
    rows: NewRows | None,
) -> Centres:
    """Centres of stored K of places, each a (request, layer); their kernels are queued.

    Places that get codes (``coded``) for the first time have centres computed from their plain and new tokens, stored
    when the transaction completes. ``rows.k``: ``[n * kv_heads, D]`` or ``[n, kv_heads, D]``, any strides.
    """
    buckets, device, heads, dim = cache.buckets, cache.device, cache.kv_heads, cache.head_dim
    plain, index, pairs = buckets.page_formats[0], device.index or 0, len(cache.rope)
    begun = np.flatnonzero(coded & ~cache._centred[requests, layers])
    n, places = len(begun), requests * cache.layers + layers
    number = np.full(len(places), -1)
    number[begun] = np.arange(n)
    k = None if fresh is None or rows is None else _by_head(rows.k, heads)
    counts, row, first = (np.zeros(n, np.int64),) * 3
    lengths = cache._lengths[requests[begun], layers[begun]].astype(np.int64)
    if fresh is not None and k is not None:
        counts, row, first = (x[begun] for x in (fresh.counts, fresh.rows, fresh.positions))
        lengths = np.where(counts > 0, first + counts, lengths)
    arrays = {
        "begun": np.stack([places[begun], begun, counts, row, first]).astype(np.int32),
        "places": np.stack([places, number]).astype(np.int32),
    }
    tensors = {
        "table": buckets.page_table, "count": buckets.count, "pointers": buckets.pool.pointers, "stored": cache.centre,
        "centres": torch.empty(len(places), heads, dim, dtype=torch.float32, device=device),
        "means": torch.empty(n, heads, PAIRINGS, dim, dtype=torch.float32, device=device),
        "lengths": torch.empty(n, heads, PAIRINGS, dtype=torch.float32, device=device),
    }  # fmt: skip
    if pairs and n:
        horizon = np.minimum(np.maximum(2 * lengths, HORIZON), cache.max_tokens)
        arrays["ahead"] = _ahead(cache.rope, tuple(horizon.tolist()))
        tensors["turns"] = _rope_tables(cache.rope, device)
    if k is not None:
        tensors["k"] = k
    if cache.balance is not None:
        tensors["balance"] = cache.balance
    if cache.direction is not None:
        tensors["direction"] = cache.direction
        tensors["directions"] = torch.empty(len(places), heads, dim, dtype=torch.int8, device=device)
    addresses, kept = upload(buckets, arrays)
    addresses |= {name: x.data_ptr() for name, x in tensors.items()}
    strides = (0, 0) if k is None else (x * k.element_size() for x in k.stride()[:2])
    packed = PARAMS.pack(
        *map(addresses.get, POINTERS, repeat(0)), *strides, n, len(places), heads, len(buckets.page_formats),
        buckets.max_pages, buckets.pool.units, buckets.page_tokens.bit_length() - 1, plain.position_offset, dim, pairs,
        WRONG[cache.interleaved],
    )  # fmt: skip
    params = bytearray(packed)
    held = ({name: x for name, x in tensors.items() if name != "k"}, kept)  # the caller keeps the rows alive

    def launch(entry: str, grid: int, threads: int = FINISH_THREADS, shared: int = 0) -> jit.Launch:
        return jit.Launch(kernel(SOURCE, entry, index), grid, threads, params, shared=shared)

    def compute() -> list[jit.Launch]:
        sums = [launch(entry_of(plain), n * heads, THREADS, 3 * CHUNKS * (dim // 2) * 4)] if n else []
        return [*sums, launch("finish<>", len(places))]

    computed = prepare(index, compute if len(places) else list, held)
    computed.run()
    stored = prepare(index, lambda: [launch("store<>", n)], held) if n else None
    if stored is not None:
        change.set(cache._centred, (requests[begun], layers[begun]), True)
        change.launch(stored.run)
    directions = tensors["directions"].flatten(0, 1) if "directions" in tensors else None
    return Centres(tensors["centres"].flatten(0, 1), directions, params, computed, stored)


def stored_centres(cache: CacheState, places: int, n: int, lease: Lease) -> Centres:
    """`centres_of_places` if all have a centre; int32 ``places [n]`` are on the device at this address."""
    buckets, heads, dim, index = cache.buckets, cache.kv_heads, cache.head_dim, cache.device.index or 0
    rows = lease.take("centres", n * heads * dim, torch.float32).view(-1, dim)
    addresses = {"places": places, "centres": rows.data_ptr(), "stored": cache.centre.data_ptr()}
    if cache.balance is not None:
        addresses["balance"] = cache.balance.data_ptr()
    directions = None
    if cache.direction is not None:
        directions = lease.take("directions", n * heads * dim, torch.int8).view(-1, dim)
        addresses |= {"direction": cache.direction.data_ptr(), "directions": directions.data_ptr()}
    sizes = (len(buckets.page_formats), buckets.max_pages, buckets.pool.units, 0, 0, dim, 0, 0)
    params = bytearray(PARAMS.pack(*map(addresses.get, POINTERS, repeat(0)), 0, 0, 0, n, heads, *sizes))

    def compute() -> list[jit.Launch]:
        return [jit.Launch(kernel(SOURCE, "finish<>", index), n, FINISH_THREADS, params)]

    computed = prepare(index, compute, (lease, cache.centre, cache.balance, cache.direction))
    computed.run()
    return Centres(rows, directions, params, computed, None)


def _by_head(k: torch.Tensor, heads: int) -> torch.Tensor:
    """New rows as ``[n, kv_heads, D]`` with contiguous channels."""
    k = k if k.stride(-1) == 1 else k.contiguous()
    return k if k.ndim == 3 else k.unflatten(0, (-1, heads))


@lru_cache(maxsize=8)
def _rope_tables(rope: tuple[float, ...], device: torch.device) -> torch.Tensor:
    """Cos and sin of each pair's angle at the first positions: float32 ``[CENTRE_TOKENS, pairs, 2]``."""
    return torch.stack(rope_tables(rope, CENTRE_TOKENS, device), -1).contiguous()


@lru_cache(maxsize=64)
def _ahead(rope: tuple[float, ...], positions: tuple[int, ...]) -> np.ndarray:
    """Mean cos and sin over the given numbers of positions: float32 ``[n, pairs, 2]``; equal for all layers."""
    angle = torch.tensor(rope, dtype=torch.float64)
    return torch.stack(mean_rotation(angle, torch.tensor(positions)), -1).numpy()
