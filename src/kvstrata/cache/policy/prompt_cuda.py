"""Appends prompts to one layer with launches prepared by the first: every layer gets the same tokens with other rows.

    first layer   plan, counts, lists, launches ──▶ kept
    others        pages ──one upload──▶ addresses of rows and of the layer's tables ──▶ the same launches

Without mass the plan depends on lengths alone, and so do the lists of moves and the sizes of all launches. Layers
differ only in their pages, the addresses of K and V, and where they begin in tables and centres. Parameters are
rewritten in place; the numbers of places and of table entries stay those of the first layer.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import numpy as np

from kvstrata import jit
from kvstrata.cache.move import moves_cuda, repack_cuda
from kvstrata.cache.move.apply import CountedMoves
from kvstrata.cache.move.launches import Launches
from kvstrata.cache.storage.page import NewRows
from kvstrata.quant.op import ROW_BYTES

from . import centre_cuda
from .centre_cuda import Centres

if TYPE_CHECKING:
    from kvstrata.cache.state import CacheState
    from kvstrata.cache.storage.transaction import Transaction

ADDRESS = struct.Struct("Q")


class Prepared:
    """Parameters of launches that are reused layer by layer. Valid on the stream they were prepared on."""

    def __init__(
        self, cache: CacheState, layer: int, requests: np.ndarray, rows: NewRows, device: int, centred: np.ndarray
    ) -> None:
        """``centred``: whether each of the requests had a centre before."""
        self._layer, self._requests, self._centred, self._device = layer, requests, centred, device
        self._centred_after = cache._centred[requests, layer]
        self._stream = None if cache.device.type == "cpu" else jit.current_stream(cache.device.index or 0)
        self._strides = (rows.k.stride(0), rows.v.stride(0))
        self._of_k: list[tuple[bytearray, int]] = []  # parameters that contain the address of K
        self._of_v: list[tuple[bytearray, int]] = []
        self._of_layer: list[tuple[bytearray, int, int, int]] = []

    def _add_layer_addresses(self, cache: CacheState, params: bytearray, offsets: dict[str, int]) -> None:
        """Record the parameters that are addresses of per-layer tables: buffer, offset, address for layer 0, stride."""
        heads, tiers, max_pages = cache.buckets.page_table.shape[2:]
        sizes = {"count": 4 * heads * tiers, "table": 4 * heads * tiers * max_pages, "reports": 8}
        sizes |= {"stored": 4 * heads * cache.head_dim}
        sizes |= dict.fromkeys(("balance", "direction"), heads * cache.head_dim)
        for name in sizes.keys() & offsets.keys():
            [address] = ADDRESS.unpack_from(params, offsets[name])
            if address:
                self._of_layer.append((params, offsets[name], address - self._layer * sizes[name], sizes[name]))

    def fits(self, cache: CacheState, layer: int) -> bool:
        """True if a layer is as empty as the first one was, with the same share of the budget."""
        where, shares = (self._requests, layer), cache.budget.shares
        if shares and shares[layer] != shares[self._layer]:
            return False
        if cache.buckets.host_count[where].any() or cache._lengths[where].any():
            return False
        if not np.array_equal(cache._centred[where], self._centred):
            return False
        return self._stream is None or self._stream == jit.current_stream(self._device)

    def accepts(self, rows: NewRows) -> bool:
        """True for rows with the alignment that the kernels need and the strides of the first rows."""
        if (rows.k.data_ptr() | rows.v.data_ptr()) % ROW_BYTES:
            return False
        return (rows.k.stride(0), rows.v.stride(0)) == self._strides

    def _point(self, layer: int, rows: NewRows) -> None:
        """Write addresses of rows and of the layer's tables into the parameters."""
        for addresses, row in ((self._of_k, rows.k.data_ptr()), (self._of_v, rows.v.data_ptr())):
            for params, offset in addresses:
                ADDRESS.pack_into(params, offset, row)
        for params, offset, address, size in self._of_layer:
            ADDRESS.pack_into(params, offset, address + layer * size)


class PreparedPrompt(Prepared):
    """Launches that the first layer of prompts without mass prepared: everything but the rows."""

    def __init__(
        self,
        cache: CacheState,
        layer: int,
        requests: np.ndarray,
        rows: NewRows,
        centres: Centres,
        moved: CountedMoves,
        centred: np.ndarray,
    ) -> None:
        """Called before the transaction that moves the rows is complete."""
        super().__init__(cache, layer, requests, rows, moved.launches.device, centred)
        buckets, counted = cache.buckets, moved.counted
        self._counts = buckets.host_count[requests, layer]
        stores = () if centres.store is None else centres.store.launches
        kept = (centres, moved.lists, counted.uploaded, counted.memory, counted.lease)
        self._compute = centres.compute
        self._launches = Launches(moved.launches.device, (*stores, *moved.launches.launches), kept)
        self._entries = moved.exchanged.entered[:, 0]  # in the flat table, of the first layer
        tier = self._entries // buckets.max_pages % len(buckets.page_formats)
        self._of_tier = [np.flatnonzero(tier == t) for t in range(len(buckets.page_formats))]
        self._pages = {t: len(of_tier) for t, of_tier in enumerate(self._of_tier)}
        self._packed, self._uploaded = counted.packed, counted.uploaded
        self._copies = counted.copies()
        self._of_k += [(counted.params, moves_cuda.OFFSETS["k"]), (centres.params, centre_cuda.OFFSETS["k"])]
        self._of_v.append((counted.params, moves_cuda.OFFSETS["v"]))
        for params in moved.lists.of_rows:
            self._of_k.append((params, repack_cuda.ROWS_OFFSET))
            self._of_v.append((params, repack_cuda.ROWS_OFFSET + 8))
        self._add_layer_addresses(cache, counted.params, moves_cuda.OFFSETS)
        self._add_layer_addresses(cache, centres.params, centre_cuda.OFFSETS)

    def prepare(self, cache: CacheState, change: Transaction, layer: int, rows: NewRows) -> None:
        """Allocate pages and update the host's tables; tokens are written when the transaction completes."""
        buckets, where = cache.buckets, (self._requests, layer)
        taken = change.allocate_all(self._pages)
        table, count = buckets.host_table.reshape(-1), buckets.host_count
        entries = self._entries + (layer - self._layer) * (count[0, 0].size * buckets.max_pages)
        handles = np.empty(len(entries), np.int64)
        for of_tier, of_pages in zip(self._of_tier, taken.values(), strict=True):
            handles[of_tier] = of_pages
        numbers = self._packed[: 4 * len(entries) + 2 * len(taken[0])].view(np.int64)
        numbers[1 : 2 * len(entries) : 2], numbers[2 * len(entries) :] = handles, taken[0]
        buckets.pool.fill(self._uploaded, self._packed)
        for mirror, original in self._copies:
            mirror.copy_(original)
        if not buckets.by_cuda:
            buckets.pool.clear(taken[0], 0)
        self._point(layer, rows)
        self._compute.run()  # before the tables change: host and device share them if kernels are emulated

        def restore() -> None:
            table[entries], count[where], cache._centred[where] = -1, 0, self._centred

        change.undo(restore)
        table[entries], count[where], cache._centred[where] = handles, self._counts, self._centred_after
        buckets.forget(self._requests, change)

        def run(_kept: NewRows = rows) -> None:
            self._launches.run()

        change.launch(run)
