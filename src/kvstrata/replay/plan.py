"""``CopyPlan``: many copies into fixed buffers, planned once, run in one launch.

Buffers, fills and bounds are checked when the plan is created. Sources are checked once per signature (shape, strides,
dtype, device) and once per address. Later runs with the same signatures cost one comparison in C++, the addresses and
the launch.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch

from kvstrata.backends import BACKENDS, resolve
from kvstrata.call_cache import guard_of

from . import reference
from .copies import (
    Bound,
    Fill,
    Move,
    Names,
    Signature,
    check_bound,
    check_count,
    check_fill,
    check_list,
    check_source,
    move_of,
    names_of,
    shape,
)
from .memory import overlap, self_overlaps, span

REMEMBERED = 4096
Source = torch.Tensor | None
DATA_PTR = torch.Tensor.data_ptr
Addresses = tuple[int, ...]
# Triton's tables that graphs read by address: never freed, since a graph may outlive its plan. They are small.
_captured: dict[int, torch.Tensor] = {}


class Described:
    """One copy from sources of one signature: its move, and its packed descriptor for CUDA C++."""

    def __init__(self, move: Move, packed: bytes = b"") -> None:
        self.move, self.packed = move, packed
        self.safe: set[int] = set()  # addresses that were checked not to overlap any buffer


class KnownSources:
    """Sources with the same signatures: a guard that recognises them, known addresses, and data of the backend."""

    def __init__(self, copies: list[Described | None]) -> None:
        self.copies = copies
        self.guard: Callable[..., bool] = lambda *given: False  # not replaced if a source is None
        self.seen: set[Addresses] = set()
        self.prepared: Any = None


def _per_copy(value: Any, count: int, name: str) -> list[Any]:
    """Expand one value for all copies to one for each."""
    if isinstance(value, (list, tuple)):
        if len(value) != count:
            raise ValueError(f"{name}: expected one value or {count}, one for each copy, got {len(value)}")
        return list(value)
    return [value] * count


def _bounds(value: Any, count: int, name: str) -> list[Bound | None]:
    out: list[Bound | None] = []
    for i, bound in enumerate(_per_copy(value, count, name)):
        if bound is None or isinstance(bound, Bound):
            out.append(bound)
        elif isinstance(bound, torch.Tensor):
            out.append(Bound(bound))
        else:
            raise TypeError(f"{name}[{i}]: expected a tensor, a Bound or None, got {type(bound).__name__}")
    return out


class CopyPlan:
    """Copies into fixed buffers, all in one launch.

    Args:
        dst: the buffers: tensors of up to three dimensions and any strides, on one device. Mutated by ``run``. None may
            share memory with another, or with itself.
        src: sources of ``run()``, one tensor for each buffer, or None to leave that buffer unchanged; a tensor may be
            given several times. A source has as many dimensions as its buffer and at most its size; it is copied to
            the corner at index 0. None: sources are passed to every ``run``.
        fill: a number, ``"last"`` or None for all copies, or a sequence with one for each. The part of a buffer that
            the source does not cover gets that value; ``"last"`` (1-D only) repeats the last covered element, as the
            offsets of padding rows require (0 if nothing is covered). None leaves that part unchanged. An empty source
            covers nothing, so with a fill all of its buffer is filled.
        rows: a bound of the rows (dimension 0) that are copied, read on the device: a tensor of one int32 or int64, a
            ``Bound``, or a sequence with one or None for each copy.
        lengths: bounds of each row's columns (the last dimension): a tensor ``[rows]`` or a ``Bound`` for a 2-D copy,
            of one element for a 1-D copy; also a sequence. ``Bound(seq_lens, per=16)`` copies the live pages of a page
            table.
        cast: True converts values if dtypes differ, as ``Tensor.copy_`` does; also a sequence. If False, differing
            dtypes are an error and copies move bits.
        backend: ``auto``, ``reference``, ``triton`` or ``cuda``.

    Raises ValueError or TypeError, naming the argument, before anything is written. ``run`` is safe on any stream and
    under graph capture (with Triton, once the same addresses were seen before); a captured run reads the same addresses
    at every replay, so keep buffers, sources and bounds alive as long as the graph. A launch of the CUDA backend holds
    28 copies; more take another launch. Not for use by two threads at once.

    Example:
        >>> ids, table = torch.zeros(4, dtype=torch.int32), torch.zeros(4, 3, dtype=torch.int32)
        >>> plan = CopyPlan([ids, table], fill=-1)
        >>> plan.run([torch.tensor([7, 8], dtype=torch.int32), torch.ones(2, 2, dtype=torch.int32)])
        >>> ids.tolist(), table.tolist()
        ([7, 8, -1, -1], [[1, 1, -1], [1, 1, -1], [-1, -1, -1], [-1, -1, -1]])
    """

    def __init__(
        self,
        dst: Sequence[torch.Tensor],
        src: Sequence[Source] | None = None,
        *,
        fill: Fill | Sequence[Fill] = None,
        rows: torch.Tensor | Bound | Sequence[Any] | None = None,
        lengths: torch.Tensor | Bound | Sequence[Any] | None = None,
        cast: bool | Sequence[bool] = False,
        backend: str = "auto",
    ) -> None:
        check_list(dst, "dst")
        self.dst = tuple(dst)
        count = len(self.dst)
        self.names = names_of(count, casts=True)  # for errors; `GraphRunner` sets its own
        check_buffers(self.dst, self.names)
        self.fill = _per_copy(fill, count, "fill")
        self.rows, self.lengths = _bounds(rows, count, "rows"), _bounds(lengths, count, "lengths")
        self.cast = [bool(value) for value in _per_copy(cast, count, "cast")]
        self.device = self.dst[0].device if self.dst else torch.device("cpu")
        self.backend = resolve(backend, self.device) if self.dst or backend not in BACKENDS else "reference"
        self.addresses = tuple(t.data_ptr() for t in self.dst)
        self._targets = [Signature.of(t) for t in self.dst]
        self._spans = sorted((*span(t), i) for i, t in enumerate(self.dst) if t.numel())
        self._starts = [first for first, _, _ in self._spans]
        # If spans are disjoint, only the last one that starts before the end of a tensor can overlap it.
        self._disjoint = all(end <= start for (_, end, _), (start, _, _) in pairwise(self._spans))
        for i, buffer in enumerate(self.dst):
            check_fill(self.fill[i], buffer, f"fill[{i}]")
            self._check_bounds(i)
        self._described: list[dict[Signature, Described]] = [{} for _ in self.dst]
        self._by_signature: dict[tuple[Signature | None, ...], KnownSources] = {}
        self._latest: KnownSources | None = None
        self._groups = self._kernels()
        self._single = self._groups[0] if len(self._groups) == 1 else None
        self._loaded: KnownSources | None = None  # signatures and addresses that the launches hold now
        self._loaded_addresses: Addresses = ()
        self._src: tuple[Source, ...] | None = None
        self._bound: tuple[KnownSources, Addresses] | None = None
        if src is not None:
            check_list(src, "src")
            self._src = tuple(src)
            self._bound = self._bind(self._src)

    def _check_bounds(self, i: int) -> None:
        rows, lengths, buffer = self.rows[i], self.lengths[i], self.dst[i]
        if rows is not None:
            check_bound(rows, f"rows[{i}]", self.device, None)
        if lengths is not None:
            if rows is not None and buffer.dim() < 2:
                raise ValueError(f"lengths[{i}]: expected None for a 1-D copy whose rows are bounded, got both")
            if buffer.dim() > 2:
                raise ValueError(f"lengths[{i}]: expected None for a 3-D copy, got one for {shape(buffer)}")
            check_bound(lengths, f"lengths[{i}]", self.device, 0 if buffer.dim() == 2 else None)
        for name, bound in (("rows", rows), ("lengths", lengths)):
            if bound is not None and (other := self._overlapped(bound.tensor)) is not None:
                raise ValueError(f"{name}[{i}]: expected memory that no copy writes, got some of dst[{other}]")

    def _kernels(self) -> list[Any]:
        """Launches of the CUDA backend, compiled and loaded here so that any run may be captured."""
        if self.backend != "cuda":
            return []
        from . import cuda as copy_cuda

        launches = []
        for i in range(0, len(self.dst), copy_cuda.MOST):
            dst, casts = self.dst[i : i + copy_cuda.MOST], any(self.cast[i : i + copy_cuda.MOST])
            launches.append(copy_cuda.Copies(len(dst), casts, self.device))
        return launches

    def run(self, src: Sequence[Source] | None = None) -> None:
        """Copy ``src``, or the sources that the plan was created with, into the buffers, in place.

        Args:
            src: a tensor or None for each buffer, at most of its shape ``[D0, D1, D2]``; None for the plan's own.

        Never synchronises; safe under graph capture as described above. Raises ValueError or TypeError, naming the
        source, before anything is written, and RuntimeError if Triton captures addresses that it has not seen.
        """
        if src is None:
            if self._bound is None:
                raise ValueError("src: expected a tensor for each of dst (the plan has no sources), got None")
            self._start(*self._bound)
            return
        known = self._latest
        if known is not None and len(src) == len(self.dst) and known.guard(*src):
            addresses = tuple(map(DATA_PTR, src))  # type: ignore[arg-type]
            if addresses in known.seen:
                # Fast path of almost every run, inlined because it adds to the cost of the launch.
                if self._single is not None and self._loaded is known:
                    self._single.write(self._single.params, 0, *addresses)
                    self._loaded_addresses = addresses
                    self._single.go()
                else:
                    self._start(known, addresses, src)
                return
        known, addresses = self._bind(src)
        self._latest = known
        self._start(known, addresses, src)

    def _start(self, known: KnownSources, addresses: Addresses, src: Sequence[Source] | None = None) -> None:
        if self._groups:
            if self._loaded is not known or self._loaded_addresses != addresses:
                self._load(known, addresses)
            for group in self._groups:
                group.go()
        elif self.backend == "triton":
            self._run_triton(known, addresses)
        else:
            with torch.no_grad():
                for i, source in enumerate(self._src or () if src is None else src):
                    if source is not None:
                        reference.copy(self.dst[i], source, self.fill[i], self.rows[i], self.lengths[i])

    def _load(self, known: KnownSources, addresses: Addresses) -> None:
        """Write the descriptors for these signatures, and the addresses, into the launches."""
        from .cuda import NOTHING, blocks_of

        if known.prepared is None:
            tails, first = [], 0
            for group in self._groups:
                copies = known.copies[first : first + group.count]
                blocks = [blocks_of(c.move) if c else 0 for c in copies]
                tails.append(group.tail([c.packed if c else NOTHING for c in copies], blocks))
                first += group.count
            known.prepared = tails
        first = 0
        for group, tail in zip(self._groups, known.prepared, strict=True):
            if self._loaded is not known:
                group.load(*tail)
            group.write(group.params, 0, *addresses[first : first + group.count])
            first += group.count
        self._loaded, self._loaded_addresses = known, addresses

    def _run_triton(self, known: KnownSources, addresses: Addresses) -> None:
        from . import triton as copy_triton

        known.prepared = tables = known.prepared or {}
        capturing = self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        if addresses not in tables:
            if capturing:
                raise RuntimeError("run: Triton can capture only sources it has seen; run once before capturing")
            if len(tables) >= REMEMBERED:
                tables.clear()
            lines, first = [], 0
            for i, copy in enumerate(known.copies):
                if copy is None or copy.move.elements == 0:
                    continue
                target = self.addresses[i]
                lines.append(copy_triton.row_of(first, addresses[i], target, copy.move, *self._kernel_bounds(i)))
                first += copy_triton.blocks_of(copy.move)
            casts = copy_triton.has_casts([copy.move for copy in known.copies if copy])
            tables[addresses] = (torch.tensor(lines, dtype=torch.int64).to(self.device), first, casts)
        if capturing:
            table = tables[addresses][0]
            _captured[table.data_ptr()] = table
        copy_triton.launch(*tables[addresses])

    def _kernel_bounds(self, i: int) -> tuple[Bound | None, int, Bound | None]:
        """Lengths, their stride in bytes, rows. For the kernel a 1-D copy is one row, so its ``rows`` are a length."""
        rows, lengths = self.rows[i], self.lengths[i]
        if self.dst[i].dim() < 2:
            return rows or lengths, 0, None
        step = lengths.tensor.stride(0) * lengths.tensor.itemsize if lengths else 0
        return lengths, step, rows

    def _bind(self, src: Sequence[Source]) -> tuple[KnownSources, Addresses]:
        """Check sources whose signatures or addresses are new; returns both."""
        check_count(src, len(self.dst))
        signature: list[Signature | None] = []
        addresses: list[int] = []
        copies: list[Described | None] = []
        for i, source in enumerate(src):
            if source is None:
                signature.append(None)
                addresses.append(0)
                copies.append(None)
                continue
            if not isinstance(source, torch.Tensor):
                raise TypeError(f"{self.names[i].source}: expected a tensor or None, got {type(source).__name__}")
            look, address = Signature.of(source), source.data_ptr()
            copy = self._described[i].get(look) or self._describe(i, source, look)
            if address not in copy.safe:
                self._check_address(i, source)
                if len(copy.safe) >= REMEMBERED:
                    copy.safe.clear()
                copy.safe.add(address)
            signature.append(look)
            addresses.append(address)
            copies.append(copy)
        where, key = tuple(addresses), tuple(signature)
        known = self._by_signature.get(key)
        if known is None:
            if len(self._by_signature) >= REMEMBERED:
                self._by_signature.clear()
            known = self._by_signature[key] = KnownSources(copies)
        elif copies and None not in copies:  # seen again: worth a guard, built again since it depends on the grad mode
            known.guard = guard_of(src)  # type: ignore[arg-type]
        if len(known.seen) >= REMEMBERED:
            known.seen.clear()
        known.seen.add(where)
        return known, where

    def _describe(self, i: int, source: torch.Tensor, look: Signature) -> Described:
        check_source(source, self.dst[i], self.cast[i], self.names[i])
        rows, lengths = self.rows[i], self.lengths[i]
        if lengths is not None and source.dim() == 2:
            check_bound(lengths, f"lengths[{i}]", self.device, source.shape[0])
        bounded = rows is not None or lengths is not None
        move = move_of(look, self._targets[i], self.fill[i], bounded)
        described = Described(move)
        if self._groups:
            from . import cuda as copy_cuda

            described = Described(move, copy_cuda.pack(move, self.addresses[i], *self._kernel_bounds(i)))
        if len(self._described[i]) >= REMEMBERED:
            self._described[i].clear()
        self._described[i][look] = described
        return described

    def _overlapped(self, tensor: torch.Tensor) -> int | None:
        """Index of the first buffer that shares memory with ``tensor``, or None."""
        first, end = span(tensor)
        k = bisect.bisect_left(self._starts, end)
        for start, stop, i in self._spans[max(k - 1, 0) if self._disjoint else 0 : k]:
            if stop > first and start < end and overlap(tensor, self.dst[i]):
                return i
        return None

    def _check_address(self, i: int, source: torch.Tensor) -> None:
        if source.numel():
            name = self.names[i].source
            _check_aligned(source, name)
            if (other := self._overlapped(source)) is not None:
                raise ValueError(f"{name}: expected memory that no copy writes, got some of {self.names[other].target}")


def _check_aligned(tensor: torch.Tensor, name: str) -> None:
    if tensor.data_ptr() % tensor.itemsize:
        raise ValueError(f"{name}: expected an address aligned to {tensor.itemsize}, got {tensor.data_ptr():#x}")


def check_buffers(dst: Sequence[torch.Tensor], names: Sequence[Names]) -> None:
    """Check the buffers of a plan: tensors of up to three dimensions, on one device, without overlap."""
    target_names = [name.target for name in names]
    for i, buffer in enumerate(dst):
        if not isinstance(buffer, torch.Tensor):
            raise TypeError(f"{target_names[i]}: expected a tensor, got {type(buffer).__name__}")
        if buffer.dim() > 3:
            raise ValueError(f"{target_names[i]}: expected at most 3 dimensions, got {shape(buffer)}")
        if buffer.device != dst[0].device:
            raise ValueError(
                f"{target_names[i]}: expected a tensor on {dst[0].device} as {target_names[0]} is,"
                f" got one on {buffer.device}"
            )
        if self_overlaps(buffer):
            raise ValueError(
                f"{target_names[i]}: expected elements that do not share memory, got strides {buffer.stride()}"
            )
        _check_aligned(buffer, target_names[i])
    spans = sorted((*span(t), i) for i, t in enumerate(dst) if t.numel())
    if all(end <= start for (_, end, _), (start, _, _) in pairwise(spans)):
        return
    for k, (_, end, i) in enumerate(spans):
        for start, _, j in spans[k + 1 :]:
            if start >= end:
                break
            if overlap(dst[i], dst[j]):
                later, earlier = target_names[max(i, j)], target_names[min(i, j)]
                raise ValueError(f"{later}: expected separate memory, got some of {earlier}")
