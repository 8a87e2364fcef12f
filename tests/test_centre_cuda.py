"""Kernels that fix K's centre (centre.cu), on a GPU or emulated, against centre.py."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch

import emulator
import gates
from kvstrata.cache import TieredCache
from kvstrata.cache.policy import centre, centre_cuda
from kvstrata.cache.storage.page import NewRows, PageFormat
from kvstrata.cache.storage.tokens import Fresh
from kvstrata.layout import Format
from kvstrata.quant import reference as quant

HEADS = 2


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A GPU, or the CPU that emulates one."""
    yield from emulator.kernels_here(monkeypatch, centre_cuda)


def make(device: str, dim: int = 32, **options) -> TieredCache:
    options = dict(budget=None, page_tokens=16, dtype=torch.float32, max_tokens=4096, max_requests=3) | options
    return TieredCache(2, HEADS, dim, device=device, **options)


def turned(x: torch.Tensor, rope: list[float], start: int, neighbours: bool) -> torch.Tensor:
    """Rows ``[n, heads, D]`` as RoPE turns them at the positions from ``start`` on."""
    n, out = len(rope), x.clone()
    one, two = (slice(0, 2 * n, 2), slice(1, 2 * n, 2)) if neighbours else (slice(n), slice(n, 2 * n))
    by = (torch.arange(start, start + len(x)).double()[:, None] * torch.tensor(rope).double()).unsqueeze(1)
    out[..., one] = (x[..., one] * by.cos() - x[..., two] * by.sin()).to(x.dtype)
    out[..., two] = (x[..., two] * by.cos() + x[..., one] * by.sin()).to(x.dtype)
    return out


def reference(k: torch.Tensor, rope: tuple[float, ...], most: int, interleaved: bool | None = None) -> torch.Tensor:
    """Centres ``[heads, D]`` of all rows ``k [n, heads, D]`` from position 0 on, by centre.py."""
    table = torch.zeros(1, HEADS, centre.CENTRE_TOKENS, k.shape[2])
    first = k[: centre.CENTRE_TOKENS].float().transpose(0, 1)
    table[0, :, : first.shape[1]] = first
    takes_part = torch.zeros_like(table, dtype=torch.bool)
    takes_part[0, :, : first.shape[1]] = first.abs() <= quant.LARGEST
    positions = centre.horizon(torch.tensor([len(k)]), most)
    return centre.centre_of(torch.where(takes_part, table, 0.0), takes_part, rope, positions, interleaved)[0]


def computed(
    cache: TieredCache, k: dict[tuple[int, int], torch.Tensor], stored: dict[tuple[int, int], int], strided: bool
) -> torch.Tensor:
    """Centres of places (request, layer) whose first rows are stored before the others come as new ones."""
    for (request, layer), n in stored.items():
        if n:
            rows = k[request, layer][:n].to(cache.device)
            cache.append(layer, rows, rows, [request], [n])
    requests, layers = (np.array(x) for x in zip(*k, strict=True))
    new = [rows[stored[place] :] for place, rows in k.items()]
    counts = np.array([len(x) for x in new])
    rows = torch.cat(new).to(cache.device)
    if strided:  # heads before tokens, in a wider tensor
        wide = torch.full((HEADS, len(rows), rows.shape[2] + 3), math.nan, dtype=rows.dtype, device=rows.device)
        wide[..., : rows.shape[2]] = rows.transpose(0, 1)
        rows = wide[..., : rows.shape[2]].transpose(0, 1)
    else:
        rows = rows.flatten(0, 1)
    begin = np.array([stored[place] for place in k])
    fresh = Fresh(counts, np.cumsum(counts) - counts, begin, np.zeros(len(counts), np.float32))
    before = cache.centre.clone()
    with cache._operation() as change:
        every = np.ones(len(k), bool)
        out = centre_cuda.centres_of_places(cache, change, layers, requests, every, fresh, NewRows(rows, rows)).rows
        assert torch.equal(cache.centre, before), "stored when the transaction completes"
    return out.unflatten(0, (-1, HEADS))


def rows(n: int, dim: int, rope: list[float], neighbours: bool, seed: int = 0) -> torch.Tensor:
    """Rows with much in common that RoPE turned."""
    generator = torch.Generator().manual_seed(seed)
    common = 4 * torch.randn(1, HEADS, dim, generator=generator)
    noise = torch.randn(n, HEADS, dim, generator=generator)
    return turned(common + noise, rope, 5, neighbours)


@pytest.mark.parametrize(
    ("dim", "pairs", "dtype"),
    [
        (32, 16, torch.float32), (64, 24, torch.float16), (80, 40, torch.bfloat16), (128, 64, torch.bfloat16),
        (256, 32, torch.float32), (256, 128, torch.bfloat16), (128, 0, torch.float16),
    ],
)  # fmt: skip
@pytest.mark.parametrize("interleaved", [None, False, True])
def test_centres_are_those_of_the_reference(
    device: str, dim: int, pairs: int, dtype: torch.dtype, interleaved: bool | None
) -> None:
    """Stored rows, new ones and both; places of either pairing and of neither; values that do not take part."""
    rope = [1e4 ** -(i / pairs) for i in range(pairs)]
    cache = make(device, dim, dtype=dtype, rope=rope or None, interleaved=interleaved)
    k, stored = {}, {}
    for place, n, old, neighbours in (((0, 0), 90, 90, False), ((1, 1), 1300, 70, True), ((2, 0), 1100, 0, False)):
        x = rows(n, dim, rope, neighbours, seed=n)
        if place == (2, 0):
            x = torch.randn(n, HEADS, dim, generator=torch.Generator().manual_seed(7)) + 3
        x[3, 0, 5], x[4, 1], x[9, 0, dim - 1], x[:, 1, 7] = math.nan, math.inf, -7e4, math.nan
        x[11, 0], x[80, :, dim - 2] = 5e3, -6e4  # far above the others
        k[place], stored[place] = x.to(dtype), old
    out = computed(cache, k, stored, strided=dim != 128)
    for number, ((request, layer), x) in enumerate(k.items()):
        want = reference(x, cache.rope, cache.max_tokens, interleaved)
        torch.testing.assert_close(out[number].cpu(), want, rtol=1e-5, atol=1e-5)
        assert torch.equal(cache.centre[request, layer], out[number])
        assert cache._centred[request, layer]
    assert not cache.centre[0, 1].any()
    assert not cache._centred[0, 1]


@pytest.mark.parametrize("old", [0, 40, 90])
def test_a_row_far_above_the_others_is_left_out(device: str, old: int) -> None:
    """Bit for bit as if it were no number, in its head only; rows of some tens of times the others take part."""
    rope = [1e2 ** -(i / 16) for i in range(16)]
    out = []
    for value in (math.nan, 5e3):
        x = rows(90, 32, rope, False)
        x[7, 0], x[12, 0] = value, value
        x[:3, 1] *= 20
        out.append(computed(make(device, rope=rope), {(0, 0): x}, {(0, 0): old}, strided=False))
    assert torch.equal(*out)
    torch.testing.assert_close(out[1][0].cpu(), reference(x, make(device, rope=rope).rope, 4096), rtol=1e-5, atol=1e-5)


def test_a_balance_does_not_change_the_centre_of_the_model(device: str) -> None:
    """Bit for bit in the cache; what is subtracted from stored rows is divided as they are."""
    rope = [1e2 ** -(i / 16) for i in range(16)]
    power = torch.randint(-5, 6, (3, HEADS, 32), generator=torch.Generator().manual_seed(2))
    by = power.float().exp2()
    k = {(1, 0): rows(300, 32, rope, True), (2, 1): rows(90, 32, rope, False, seed=3)}
    plain, balanced = make(device, rope=rope), make(device, rope=rope, balance=True)
    for layer in range(2):
        balanced.set_balance(layer, by.to(balanced.device), [0, 1, 2])
    out = computed(plain, k, {(1, 0): 0, (2, 1): 0}, strided=False)
    given = {place: x / by[place[0]] for place, x in k.items()}  # new rows come divided, as an append hands them on
    own = computed(balanced, given, {(1, 0): 0, (2, 1): 0}, strided=False)
    for number, (request, layer) in enumerate(k):
        assert torch.equal(balanced.centre[request, layer], plain.centre[request, layer])
        assert torch.equal(own[number].cpu() * by[request], out[number].cpu())
    with balanced._operation() as change:
        every, ids, layers = np.ones(2, bool), np.array([1, 2]), np.array([0, 1])
        again = centre_cuda.centres_of_places(balanced, change, layers, ids, every, None, None).rows
    assert torch.equal(again.unflatten(0, (-1, HEADS)), own), "stored ones are divided, too"


def test_a_centre_does_not_depend_on_other_places(device: str) -> None:
    """Bit for bit, whatever other places there are and however many of its rows are new."""
    rope = [1e2 ** -(i / 16) for i in range(16)]
    x = rows(600, 32, rope, True)
    place = {(1, 0): x}
    alone = computed(make(device, rope=rope), place, {(1, 0): 0}, strided=False)
    for old in (150, 600):
        cache = make(device, rope=rope)
        others = {(0, 0): rows(40, 32, rope, False), **place, (2, 1): rows(700, 32, rope, False)}
        out = computed(cache, others, {(0, 0): 10, (1, 0): old, (2, 1): 30}, strided=True)
        assert torch.equal(out[1], alone[0])


def test_tokens_are_summed_by_position_in_whatever_slots_they_are(device: str) -> None:
    """Bit for bit; tokens past the first ones do not take part wherever they are."""
    rope = [1e2 ** -(i / 16) for i in range(16)]
    x = rows(1200, 32, rope, False)
    alone, cache = (make(device, rope=rope) for _ in range(2))
    wanted = computed(alone, {(0, 0): x}, {(0, 0): 1200}, strided=False)
    order = torch.randperm(1200, generator=torch.Generator().manual_seed(1))
    for request, n in ((0, 1200),):
        cache.append(0, x[order].to(device), x[order].to(device), [request], [n])
    kind = cache.buckets.page_formats[0]
    for head in range(HEADS):
        pages = cache.buckets.host_table[0, 0, head, 0, :75].astype(np.int64)
        data = cache.pool.read(pages, 0, kind.stride)
        kind.positions(data).copy_(order.to(data.device).view(75, 16).to(kind.position_dtype))
        cache.pool.write(pages, 0, data)
    every = np.ones(1, bool)
    with cache._operation() as change:
        zero = np.zeros(1, np.int64)
        out = centre_cuda.centres_of_places(cache, change, zero, zero, every, None, None).rows
    assert torch.equal(out.unflatten(0, (-1, HEADS)), wanted)


def test_centres_stay_and_failed_operations_store_none(device: str) -> None:
    cache, zero = make(device, rope=None), np.zeros(1, np.int64)
    x = rows(50, 32, [], False).to(device)
    cache.append(0, x, x, [0], [50])
    for coded in (False, True):
        with contextlib.suppress(KeyError), cache._operation() as change:
            out = centre_cuda.centres_of_places(cache, change, zero, zero, np.array([coded]), None, None).rows
            assert bool(out.any()) == coded
            raise KeyError
        assert not cache.centre.any()
        assert not cache._centred.any()
    cache.centre[0, 0] = 7.0
    cache._centred[0, 0] = True
    with cache._operation() as change:
        out = centre_cuda.centres_of_places(cache, change, zero, zero, np.ones(1, bool), None, None).rows
    assert bool((out == 7.0).all())
    assert bool((cache.centre[0, 0] == 7.0).all())


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])  # sm_89: the code of sm_80
def test_centre_kernels_stay_within_register_limits(arch: str) -> None:
    """No spills in blocks of 1024 threads."""
    pytest.importorskip("cuda.core")
    for dtype, position in ((torch.bfloat16, torch.int16), (torch.float32, torch.int32)):
        kind = PageFormat(Format.parse("K16V16", 128), dtype, position, True, torch.device("cpu"))
        for entry in (centre_cuda.entry_of(kind), "finish<>", "store<>"):
            usage = gates.usage(centre_cuda.SOURCE, entry, arch=arch)
            assert usage.spill_bytes == usage.stack_bytes == 0, usage
            assert usage.shared_bytes <= 9 * 1024, usage
            assert 0 < usage.registers <= 64, usage
