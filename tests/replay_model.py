"""Random lists of copies on poisoned buffers, and an independent model of a plan: rows by ``.copy_``."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from hypothesis import strategies as st

from conftest import HAS_GPU
from kvstrata import backends
from kvstrata.replay import Bound, CopyPlan

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
MOVED = [torch.int32, torch.int64, torch.uint8, torch.bool, torch.float16, torch.bfloat16, torch.float32, torch.float64,
         torch.float8_e4m3fn, torch.complex64, torch.complex128]  # fmt: skip
CAST = [torch.int32, torch.int64, torch.int16, torch.uint8, torch.int8, torch.bool, torch.float16, torch.bfloat16,
        torch.float32]  # fmt: skip

DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
BACKENDS = ["reference", "triton"] + ["cuda"] * (HAS_GPU and not backends.missing("cuda", DEVICE))


def ints(*shape: int, seed: int = 0, device: torch.device = DEVICE) -> torch.Tensor:
    return torch.randint(1, 1 << 30, shape, generator=torch.Generator().manual_seed(seed)).int().to(device)


@dataclass
class Copies:
    """The arguments of a plan, the pools that its buffers are views of, and sources."""

    dst: list[torch.Tensor] = field(default_factory=list)
    src: list[torch.Tensor | None] = field(default_factory=list)
    fill: list = field(default_factory=list)
    rows: list[Bound | None] = field(default_factory=list)
    lengths: list[Bound | None] = field(default_factory=list)
    cast: list[bool] = field(default_factory=list)
    pools: list[torch.Tensor] = field(default_factory=list)

    @property
    def options(self) -> dict:
        return dict(fill=self.fill, rows=self.rows, lengths=self.lengths, cast=self.cast)

    def poison(self) -> None:
        for pool in self.pools:
            pool.fill_(0xA5)

    def expected(self, src: list[torch.Tensor | None] | None = None) -> list[torch.Tensor]:
        """Every byte of every pool after a run: rows and their tails, one ``.copy_`` or ``fill_`` after the other."""
        out = []
        for i, (dst, source) in enumerate(zip(self.dst, src or self.src, strict=True)):
            pool = self.pools[i].clone()
            out.append(pool)
            if source is None:
                continue
            target = pool.view(dst.dtype).as_strided(dst.shape, dst.stride(), dst.storage_offset())
            one(target, source, self.fill[i], self.rows[i], self.lengths[i])
        return out


def count(bound: Bound | None, at: int, most: int) -> int:
    if bound is None:
        return most
    value = int(bound.tensor.reshape(-1)[at])
    return min(max(-(-value // bound.per) + bound.extra, 0), most)


def one(dst: torch.Tensor, src: torch.Tensor, fill, rows: Bound | None, lengths: Bound | None) -> None:
    if dst.dim() <= 1:
        dst, src = dst.reshape(-1) if dst.dim() == 0 else dst, src.reshape(-1)
        n = min(count(rows, 0, src.shape[0]), count(lengths, 0, src.shape[0]))
        dst[:n].copy_(src[:n])
        if fill == "last":
            dst[n:].fill_(dst[n - 1].item() if n else 0)
        elif fill is not None:
            dst[n:].fill_(fill)
        return
    alive = count(rows, 0, src.shape[0])
    for i in range(dst.shape[0]):
        if dst.dim() == 3:
            n1, n2 = src.shape[1:]
            if i < alive:
                dst[i, :n1, :n2].copy_(src[i])
                if fill is not None:
                    dst[i, n1:].fill_(fill)
                    dst[i, :, n2:].fill_(fill)
            elif fill is not None:
                dst[i].fill_(fill)
            continue
        n = count(lengths, i, src.shape[1]) if i < alive else 0
        if n:
            dst[i, :n].copy_(src[i, :n])
        if fill is not None:
            dst[i, n:].fill_(fill)


def view(shape, dtype, gaps, offset, flip, device) -> tuple[torch.Tensor, torch.Tensor]:
    """A poisoned pool of bytes and a strided view of it; ``flip`` transposes the two last dimensions in memory."""
    order = list(range(len(shape)))
    if flip and len(shape) > 1:
        order[-1], order[-2] = order[-2], order[-1]
    strides, step = [0] * len(shape), 1
    for dim in reversed(order):
        strides[dim] = step
        step = step * max(shape[dim], 1) + gaps[dim]
    pool = torch.full((2 * (offset + step + 8) * dtype.itemsize,), 0xA5, dtype=torch.uint8, device=device)
    return pool, pool.view(dtype).as_strided(shape, strides, offset)


def values(shape, dtype, cast, generator) -> torch.Tensor:
    """Random bits, or where values are converted, small numbers that every dtype holds."""
    if cast:
        return torch.randint(0, 100, tuple(shape), generator=generator).to(dtype)
    if dtype == torch.bool:
        return torch.randint(0, 2, tuple(shape), generator=generator).bool()
    raw = torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).reshape(tuple(shape)) if raw.numel() else torch.empty(tuple(shape), dtype=dtype)


def fillable(dtype: torch.dtype) -> bool:
    return dtype not in (torch.complex64, torch.complex128)


@st.composite
def copies(draw, device: torch.device, most: int = 6) -> Copies:
    out = Copies()
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1 << 16)))
    for _ in range(draw(st.integers(0, most))):
        cast = draw(st.integers(0, 3)) == 0
        dtype = draw(st.sampled_from(CAST if cast else MOVED))
        source_dtype = draw(st.sampled_from(CAST)) if cast else dtype
        dims = draw(st.integers(0, 3))
        widest = {0: [], 1: [70], 2: [7, 40], 3: [4, 5, 20]}[dims]
        shape = [draw(st.integers(0, n)) for n in widest]
        live = [draw(st.one_of(st.just(n), st.integers(0, n))) for n in shape]
        gap = st.lists(st.sampled_from([0, 0, 1, 4, 16]), min_size=dims, max_size=dims)
        offset, flips = st.sampled_from([0, 0, 1, 3, 8]), st.integers(0, 3)
        pool, dst = view(shape, dtype, draw(gap), draw(offset), draw(flips) == 0, device)
        _, src = view(live, source_dtype, draw(gap), draw(offset), draw(flips) == 0, device)
        src.copy_(values(live, source_dtype, cast, generator).to(device))
        fill = draw(st.sampled_from([None, None, 0, 1, "last" if dims <= 1 else 0])) if fillable(dtype) else None
        kind = draw(st.sampled_from(["", "", "rows", "lengths", "both"]))
        rows = lengths = None
        whole = st.sampled_from([torch.int32, torch.int64])
        bound = dict(per=draw(st.integers(1, 3)), extra=draw(st.integers(-1, 1)))
        if kind in ("rows", "both") and dims >= 1:
            number = draw(st.integers(-2, live[0] * bound["per"] + 2))
            rows = Bound(torch.tensor([number], dtype=draw(whole), device=device), **bound)
        if kind in ("lengths", "both") and dims in (1, 2) and (dims == 2 or rows is None):
            each = 1 if dims == 1 else live[0] + 1
            numbers = torch.randint(-2, max(live[-1], 1) * bound["per"] + 3, (2 * each,), generator=generator)
            numbers = numbers.to(draw(whole)).to(device)
            lengths = Bound(numbers[:1] if dims == 1 else numbers[:: draw(st.integers(1, 2))][:each], **bound)
        if draw(st.integers(0, 9)) == 0:
            src = None
        out.dst.append(dst)
        out.src.append(src)
        out.fill.append(fill)
        out.rows.append(rows)
        out.lengths.append(lengths)
        out.cast.append(cast)
        out.pools.append(pool)
    return out


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return (
        torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device).copy_(tensor).reshape(-1).view(torch.uint8)
    )


def check(call: Copies, backend: str) -> None:
    """Run with sources given to ``run``, then with those of the plan, and compare every byte of all pools."""
    for bound in (False, True):
        call.poison()
        expected = call.expected()
        before = [None if t is None else t.clone() for t in call.src]
        plan = CopyPlan(call.dst, call.src if bound else None, backend=backend, **call.options)
        for _ in range(2):
            plan.run() if bound else plan.run(call.src)
        for i, (pool, want) in enumerate(zip(call.pools, expected, strict=True)):
            assert torch.equal(pool, want), (i, call.dst[i], call.src[i], call.fill[i], call.rows[i], call.lengths[i])
        for old, new in zip(before, call.src, strict=True):
            if old is not None:
                assert torch.equal(raw(old), raw(new))


def int32(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**31), 2**31, shape, generator=generator).int().to(DEVICE)


def buffers() -> list[torch.Tensor]:
    return [torch.zeros(8, dtype=torch.int32, device=DEVICE), torch.zeros(8, 16, dtype=torch.int32, device=DEVICE)]
