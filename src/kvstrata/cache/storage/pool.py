"""The page pool: slabs of bytes, divided into pages, with reference counts.

    slab 0 (K16V16)          slab 1 (K4V4)                slab 2 (none)
    [page][page][page]       [page][page][page][page]     |                |
    |<- slab_bytes of addresses ->|

A slab is one uint8 tensor that never moves (on the CPU a part of one address range, see address_space.py). It holds the
whole pages of its tier that fit into ``slab_bytes``, so a page costs its own bytes in every tier. When its last page is
released the slab is empty: it is reused by a tier of its size, or replaced by a slab of another size. A page's handle
is its byte offset in the address space of all slabs, ``slab_bytes`` each, divided by UNIT: ``handle // units`` is the
slab, ``handle % units * UNIT`` the offset in it. A kernel adds that to ``pointers[slab]``. Reference counts are on the
host; a page may have several owners (forks), and only a sole owner may write it.

`allocate` returns all pages or none; transaction.py frees pages when a later part of an operation fails. `release`,
`trim` and `compact` with a workspace allocate nothing on the device.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import torch

from kvstrata import jit
from kvstrata.layout.format import UNIT

from .address_space import Space
from .free_lists import FreeLists, merged, without
from .uploads import Uploads

POISON = 0xFF  # NaN as fp16, bf16 and fp32; -1 as a position
EMPTY = -1
MOVED_TOGETHER = 256  # pages that `compact` copies per call


class Pool:
    """Pages of several strides (one per tier) from slabs of up to ``slab_bytes``."""

    def __init__(
        self,
        strides: Sequence[int],
        slab_bytes: int,
        capacity: int,
        device: torch.device,
        debug: bool = False,
    ) -> None:
        for tier, stride in enumerate(strides):
            if stride % UNIT or not 0 < stride <= slab_bytes:
                raise ValueError(f"strides[{tier}]: expected a multiple of {UNIT} up to {slab_bytes}, got {stride}")
        if slab_bytes % UNIT:
            raise ValueError(f"slab_bytes: expected a multiple of {UNIT}, got {slab_bytes}")
        self.units = slab_bytes // UNIT
        if capacity * self.units > 2**31:
            raise ValueError(f"capacity: expected at most {2**31 // self.units} slabs of {slab_bytes}, got {capacity}")
        self.strides = tuple(strides)
        self.slab_bytes = slab_bytes
        self.per_slab = tuple(slab_bytes // stride for stride in strides)
        self.slab_sizes = tuple(n * stride for n, stride in zip(self.per_slab, strides, strict=True))  # bytes, per tier
        self.device = device
        self.debug = debug
        self.space = Space(capacity * slab_bytes) if device.type == "cpu" else None
        self.slabs: list[torch.Tensor | None] = [None] * capacity
        self.pointers = torch.zeros(capacity, dtype=torch.int64, device=device)
        self._device_number = self.pointers.get_device()
        self.sizes = np.zeros(capacity, np.int64)  # bytes of each slab, 0 for none
        self._uploads = Uploads(device)
        self.streams: dict[int, torch.cuda.Stream] = {}  # streams on which the slabs were used, by handle
        self.tier = np.full(capacity, EMPTY, np.int8)
        self.refs = np.zeros((capacity, max(self.per_slab)), np.int32)
        self.shares = False  # True once any page has had two owners
        self.nbytes = 0  # bytes of all slabs, including empty ones
        self.free = FreeLists(self.per_slab, capacity)
        self._steps = np.asarray(self.strides) // UNIT
        self._offsets = [
            np.arange(0, n * step, step, dtype=np.int32)
            for n, step in zip(self.per_slab, self._steps.tolist(), strict=True)
        ]  # of the pages of a slab, per tier
        self._pages = [0] * len(self.strides)  # pages with an owner, per tier
        self._slabs = [0] * len(self.strides)  # per tier
        self._empty = np.zeros(0, np.int64)  # slabs without a page, ascending
        self._gone = np.zeros(0, np.int64)  # slabs that were freed, ascending
        self._workspace: torch.Tensor | None = None
        self._fresh = 0  # slabs from here on were never allocated

    @property
    def capacity(self) -> int:
        return len(self.slabs)

    @property
    def allocated(self) -> np.ndarray:
        """True for each slab that is allocated, including empty ones."""
        return self.sizes > 0

    @property
    def slab_count(self) -> int:
        """Number of allocated slabs, including empty ones."""
        return self.slabs_in_use + len(self._empty)

    @property
    def slabs_in_use(self) -> int:
        """Slabs that hold a page."""
        return sum(self._slabs)

    @property
    def is_crowded(self) -> bool:
        """True if holes in slabs should be closed, so that an operation does not run out of slab indices.

        Tables hold twice the slabs of all pages, unless handles cannot address as many; then memory runs out about as
        soon.
        """
        few = (self.capacity + 1) * self.units > 2**31
        return self.slabs_in_use > self.capacity * (3 if few else 2) // 4

    def pages(self, tier: int) -> int:
        """Pages of a tier in use, each counted once."""
        return self._pages[tier]

    def slabs_of(self, tier: int) -> int:
        return self._slabs[tier]

    def _locate(self, handles: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Slab and index in it."""
        handles = handles.astype(np.int64, copy=False)
        slab = handles // self.units
        step = self._steps[self.tier[slab]]
        return slab, ((handles - slab * self.units) / step).astype(np.int64)  # exact: no remainder

    def _new_slab(self, index: int, size: int) -> torch.Tensor:
        assert self.space is not None
        return self.space.bytes[index * self.slab_bytes : index * self.slab_bytes + size]

    def _open(self, needed: dict[int, int]) -> None:
        """Give each tier more slabs: empty ones of its size, then new ones that replace other empty ones."""
        opened: dict[int, np.ndarray] = {}
        for tier, n in needed.items() if len(self._empty) else ():
            opened[tier] = self._empty[self.sizes[self._empty] == self.slab_sizes[tier]][:n]
            self._empty = without(self._empty, opened[tier])
        more = {tier: n - len(opened.get(tier, ())) for tier, n in needed.items()}
        try:
            self._drop(self._empty[: sum(more.values())])
            new = self._allocate_slabs(more)
        except BaseException:
            for slabs in opened.values():
                self._empty = merged(self._empty, slabs)
            raise
        for tier, n in needed.items():
            slabs = merged(opened[tier], new[tier]) if tier in opened else new[tier]
            self.tier[slabs] = tier
            self._slabs[tier] += n
            self.free.open(tier, slabs)

    def _allocate_slabs(self, needed: dict[int, int]) -> dict[int, np.ndarray]:
        """Allocate slabs for each tier; returns their indices, ascending."""
        n, left = sum(needed.values()), self.capacity - self._fresh
        if not n:
            return dict.fromkeys(needed, self._gone[:0])
        if len(self._gone) + left < n:
            raise RuntimeError(f"pool: expected {n} free slabs, got {len(self._gone) + left} of {self.capacity}")
        new = max(n - len(self._gone), 0)
        unused = merged(self._gone[:n], np.arange(self._fresh, self._fresh + new))
        sizes = [self.slab_sizes[tier] for tier, many in needed.items() for _ in range(many)]
        numbers = unused.tolist()
        with torch.inference_mode(False):
            if self.space is None:
                slabs = [torch.empty(size, dtype=torch.uint8, device=self.device) for size in sizes]
            else:
                slabs = [self._new_slab(index, size) for index, size in zip(numbers, sizes, strict=True)]
        self._point(unused, np.array([slab.data_ptr() for slab in slabs], np.int64))
        for index, slab in zip(numbers, slabs, strict=True):
            self.slabs[index] = slab.fill_(POISON) if self.debug else slab
        self._gone, self._fresh = self._gone[n:], self._fresh + new
        self.sizes[unused] = sizes
        self.nbytes += sum(sizes)
        ends = itertools.accumulate(needed.values())
        return {tier: unused[end - n : end] for (tier, n), end in zip(needed.items(), ends, strict=True)}

    def _point(self, slabs: np.ndarray, addresses: np.ndarray) -> None:
        """Update the slab addresses that kernels read."""
        if self.space is not None:
            self.pointers.numpy()[slabs] = addresses
        elif len(slabs) == 1:
            self.pointers[int(slabs[0])].fill_(int(addresses[0]))
        elif int(slabs[-1]) - int(slabs[0]) + 1 == len(slabs):
            self.fill(self.pointers[int(slabs[0]) : int(slabs[-1]) + 1], addresses)
        else:
            entries = self.to_device(np.stack([slabs, addresses]))
            self.pointers[entries[0]] = entries[1]

    def allocate(self, tier: int, n: int) -> np.ndarray:
        """Handles of ``n`` pages of a tier; see `allocate_all`."""
        return self.allocate_all({tier: n})[tier]

    def allocate_all(self, pages: dict[int, int]) -> dict[int, np.ndarray]:
        """Handles of ``pages[tier]`` pages of each tier, each with one owner. Their bytes are undefined.

        Pages come from the lowest slabs with a free one. Allocates nothing if memory runs out.
        """
        needed = {}
        for tier, n in pages.items():
            missing = n - (self._slabs[tier] * self.per_slab[tier] - self._pages[tier])
            if missing > 0:
                needed[tier] = -(-missing // self.per_slab[tier])
        if needed:
            self._open(needed)
        return {tier: self._take(tier, n) for tier, n in pages.items()}

    def take_some(self, tier: int, least: int, most: int) -> np.ndarray:
        """Handles, int32, of at least ``least`` pages of a tier, ``most`` if possible: free ones, else of new slabs.

        Slabs are taken whole; new ones never enter the free lists.
        """
        per_slab, most = self.per_slab[tier], max(least, most)
        free = self._slabs[tier] * per_slab - self._pages[tier]
        if free >= least:
            return self._take(tier, min(free, most)).astype(np.int32)
        fewest, slabs = -(-(least - free) // per_slab), (most - free) // per_slab
        if len(self._empty):
            self._open({tier: fewest})
            return self._take(tier, free + fewest * per_slab).astype(np.int32)
        try:
            new = self._allocate_slabs({tier: max(fewest, slabs)})[tier]
        except torch.OutOfMemoryError:
            if slabs <= fewest:
                raise
            new = self._allocate_slabs({tier: fewest})[tier]
        self.tier[new] = tier
        self._slabs[tier] += len(new)
        self._pages[tier] += len(new) * per_slab
        self.free.used[new] = per_slab
        for slab in new.tolist():  # each is a run of memory
            self.refs[slab, :per_slab] = 1
        pages = np.add.outer((new * self.units).astype(np.int32), self._offsets[tier]).reshape(-1)
        return np.concatenate([self._take(tier, free).astype(np.int32), pages]) if free else pages

    def _take(self, tier: int, n: int) -> np.ndarray:
        """Take free pages."""
        if n == 0:
            return np.zeros(0, np.int64)
        slab, index = self.free.take(tier, n)
        self.refs.reshape(-1)[slab * self.refs.shape[1] + index] = 1
        self._pages[tier] += n
        return slab * self.units + index * (self.strides[tier] // UNIT)

    def owners(self, handles: np.ndarray) -> np.ndarray:
        """Reference counts."""
        return self.refs[self._locate(handles)]

    def retain(self, handles: np.ndarray) -> None:
        """Add an owner to each page; a handle may appear more than once."""
        if handles.size == 0:
            return
        np.add.at(self.refs, self._locate(handles), 1)
        self.shares = True

    def release(self, handles: np.ndarray) -> None:
        """Remove an owner from each page; pages without owners are freed, and slabs without pages become empty."""
        if handles.size == 0:
            return
        slab, index = self._locate(handles)
        refs, page = self.refs.reshape(-1), slab * self.refs.shape[1] + index
        np.subtract.at(refs, page, 1)
        left = refs[page]
        if (left < 0).any():
            raise RuntimeError(f"pool: page {int(handles[left < 0][0])} released more often than it was owned")
        if self.shares:  # otherwise a page released twice was detected above
            page = np.unique(page[left == 0])
        if not len(page):
            return
        if self.debug:
            for handle in handles[left == 0].tolist():
                self._bytes(handle, 0, self.strides[self.tier[handle // self.units]]).fill_(POISON)
        self._give(page)

    def _give(self, page: np.ndarray) -> None:
        """Free pages, each given once by its index in ``refs``; slabs that lose their last page leave their tier."""
        slabs, counts = self.free.give(page, self.tier)
        tiers = self.tier[slabs]
        empty = self.free.used[slabs] == 0
        for tier, n in enumerate(np.bincount(tiers, counts, len(self.strides)).tolist()):
            self._pages[tier] -= int(n)
        if empty.any():
            emptied, tiers = slabs[empty], tiers[empty]
            for tier in sorted(set(tiers.tolist())):
                of_tier = emptied[tiers == tier]
                self._slabs[tier] -= len(of_tier)
                self.free.close(tier, of_tier)
            self.tier[emptied] = EMPTY
            self._empty = merged(self._empty, emptied)

    def _bytes(self, handle: int, start: int, size: int) -> torch.Tensor:
        slab = self.slabs[handle // self.units]
        assert slab is not None
        first = handle % self.units * UNIT + start
        return slab[first : first + size]

    def read(self, handles: np.ndarray, start: int, size: int) -> torch.Tensor:
        """Copies of bytes ``start .. start + size`` of pages: uint8 ``[n, size]``; one indexed read for all pages."""
        if handles.size == 0:
            return torch.empty(0, size, dtype=torch.uint8, device=self.device)
        if self.space is not None:
            data = self.space.runs(start, size)[handles]
            return torch.from_numpy(data.view(np.uint8).reshape(len(handles), size))
        from .page_triton import gather

        return gather(self, self.to_device(handles), start, size)

    def write(self, handles: np.ndarray, start: int, data: torch.Tensor) -> None:
        """Inverse of `read`; no page may appear twice."""
        if handles.size == 0:
            return
        if self.space is not None:
            rows = data.contiguous().numpy().view(f"V{data.shape[1]}")
            self.space.runs(start, data.shape[1])[handles] = rows.reshape(len(handles))
        else:
            from .page_triton import scatter

            scatter(self, self.to_device(handles), start, data)

    def copy(self, old: np.ndarray, new: np.ndarray, tier: int) -> None:
        """Copy whole pages of a tier."""
        if old.size == 0:
            return
        if self.space is not None:
            pages = self.space.runs(0, self.strides[tier])
            pages[new] = pages[old]
        else:
            from .page_triton import copy

            copy(self, self.to_device(old), self.to_device(new), self.strides[tier])

    def load_copy(self) -> None:
        """Compile what `copy` needs on a GPU, before a step that compacts slabs needs it."""
        if self.space is None:
            from .page_triton import load_copy

            load_copy(self, self.strides)

    def clear(self, handles: np.ndarray, tier: int) -> None:
        """Zero whole pages of a tier."""
        if handles.size == 0:
            return
        if self.space is not None:
            self.space.runs(0, self.strides[tier])[handles] = np.zeros(1, f"V{self.strides[tier]}")
        else:
            self.clear_at(self.to_device(handles), tier)

    def clear_at(self, handles: torch.Tensor, tier: int) -> None:
        """`clear` of handles that are on the GPU."""
        from .page_triton import clear

        clear(self, handles, self.strides[tier])

    def to_device(self, array: np.ndarray) -> torch.Tensor:
        """Copy of a small host array; on a GPU through pinned memory, so the host does not wait."""
        if self.space is not None or array.size == 0:
            return torch.from_numpy(np.ascontiguousarray(array)).to(self.device)
        self.note_stream()
        return self._uploads.copy(array, self.streams.values())

    def fill(self, target: torch.Tensor, array: np.ndarray) -> None:
        """Copy a contiguous host array into a flat device tensor of its type and size, as `to_device` does."""
        if self.space is not None:
            target.copy_(torch.from_numpy(array))
        elif array.size:
            self.note_stream()
            self._uploads.fill(target, array, self.streams.values())

    def note_stream(self) -> int:
        """Record torch's current stream: memory of slabs is not reused before its work so far is done.

        Returns its handle, 0 on a CPU.
        """
        if self.space is not None:
            return 0
        handle = jit.current_stream(self._device_number)
        if handle not in self.streams:
            self.record_stream(torch.cuda.current_stream(self.device))
        return handle

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        self.streams[stream.cuda_stream] = stream

    def _drop(self, slabs: np.ndarray) -> None:
        """Free empty slabs; the allocator reuses their memory when the streams that used it are done."""
        if not len(slabs):
            return
        for index in slabs.tolist():
            slab = self.slabs[index]
            assert slab is not None
            for stream in self.streams.values():
                slab.record_stream(stream)
            self.slabs[index] = None
            if self.space is not None:
                self.space.forget(index * self.slab_bytes, self.slab_bytes)
        for run in [slabs] if len(slabs) == 1 else np.split(slabs, np.flatnonzero(np.diff(slabs) > 1) + 1):
            self.pointers[int(run[0]) : int(run[-1]) + 1].fill_(0)
        self.nbytes -= int(self.sizes[slabs].sum())
        self.sizes[slabs] = 0
        self._empty, self._gone = without(self._empty, slabs), merged(self._gone, slabs)

    def trim(self, spare: int = 0, nbytes: int | None = None) -> None:
        """Free empty slabs, all but ``spare``; with ``nbytes`` only until the pool takes no more than that."""
        slabs = self._empty[spare:]
        if nbytes is not None:
            left = self.nbytes - np.cumsum(self.sizes[slabs[::-1]])  # the highest are freed first
            slabs = slabs[::-1][: int(np.count_nonzero(left > nbytes)) + (self.nbytes > nbytes)][::-1]
        self._drop(slabs)

    def workspace(self) -> torch.Tensor:
        """Device memory for the handles that `compact` works on, always the same tensor."""
        if self._workspace is None:
            with torch.inference_mode(False):
                self._workspace = torch.empty(2, MOVED_TOGETHER, dtype=torch.int64, device=self.device)
        return self._workspace

    def compact(self, tier: int, workspace: torch.Tensor | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Move pages from the last slabs of a tier into holes of the first: handles before (sorted) and after.

        Nothing is allocated on the device when ``workspace`` is given.
        """
        workspace = self.workspace() if workspace is None else workspace
        per_slab, step = self.per_slab[tier], self.strides[tier] // UNIT
        slabs = np.flatnonzero(self.tier[: self._fresh] == tier)
        keep = -(-self.pages(tier) // per_slab)
        from_row, from_index = np.nonzero(self.refs[slabs[keep:], :per_slab] > 0)
        to_row, to_index = np.nonzero(self.refs[slabs[:keep], :per_slab] == 0)
        from_slab, to_slab = slabs[keep:][from_row], slabs[:keep][to_row[: len(from_row)]]
        to_index = to_index[: len(from_row)]
        old, new = from_slab * self.units + from_index * step, to_slab * self.units + to_index * step
        self._move(old, new, tier, workspace)
        self.refs[to_slab, to_index] = self.refs[from_slab, from_index]
        self.free.recount(tier, np.unique(to_slab), self.refs)
        self._pages[tier] += len(new)
        self.refs[from_slab, from_index] = 1
        self.release(old)
        return old, new

    def _move(self, old: np.ndarray, new: np.ndarray, tier: int, workspace: torch.Tensor) -> None:
        """`copy` in parts, without allocating on the device."""
        for start in range(0, len(old), MOVED_TOGETHER):
            part = slice(start, start + MOVED_TOGETHER)
            if self.space is not None:
                self.copy(old[part], new[part], tier)
                continue
            from .page_triton import copy

            handles = workspace[:, : len(old[part])]
            for row, values in zip(handles, (old[part], new[part]), strict=True):
                row.copy_(torch.from_numpy(values))
            copy(self, handles[0], handles[1], self.strides[tier])
