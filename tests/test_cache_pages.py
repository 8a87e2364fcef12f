"""Under the cache: the pool that pages come from, and rows in pages."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from kvstrata.cache.policy.sizes import Sizes
from kvstrata.cache.storage import page as pages
from kvstrata.cache.storage import pool
from kvstrata.cache.storage.uploads import RING_BYTES, Uploads
from kvstrata.layout import Format
from kvstrata.quant import reference as quant

CPU = torch.device("cpu")


# The pool


def test_pages_at_a_budget_of_half_the_memory_are_not_compacted_at_every_step() -> None:
    """32 layers of 64 x 32,768 tokens: about 7,900 slabs of the 15,525 that handles can name."""
    slab = 8_852_480  # bytes
    p = pool.Pool([slab], slab, 2**31 // (slab // 64), CPU)
    assert p.capacity == 15_525
    p._slabs = [7_900]
    assert not p.is_crowded
    p._slabs = [11_700]
    assert p.is_crowded
    p = pool.Pool([slab], slab, 100, CPU)  # twice the slabs of all pages: an operation may need half of them at once
    p._slabs = [50]
    assert not p.is_crowded
    p._slabs = [51]
    assert p.is_crowded


def small_pool(**options) -> pool.Pool:
    return pool.Pool([256, 128, 64], 512, 8, CPU, debug=True, **options)


def test_pool_takes_the_lowest_page_and_retypes_empty_slabs() -> None:
    p = small_pool()
    a = p.allocate(0, 3)
    assert a.tolist() == [0, 4, 8]
    b = p.allocate(2, 2)
    assert p.slab_count == 3
    p.release(a)
    assert p.slabs_of(0) == 0
    assert p.slab_count == 3  # empty ones wait
    assert p.allocate(1, 5).tolist() == [0, 2, 4, 6, 8]
    p.release(b)
    p.trim()
    assert p.slab_count == 2
    assert (p.pointers == 0).sum() == 6


def test_pool_gives_some_pages_free_ones_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then whole new slabs; as few as needed where memory is short, and nothing where it does not suffice."""
    p = pool.Pool([256, 128], 512, 32, CPU)
    taken = [p.allocate(0, 3)]
    taken.append(p.take_some(0, 1, 8))
    assert (len(taken[-1]), p.slabs_of(0)) == (1, 2)  # the free one
    taken.append(p.take_some(0, 3, 5))
    assert (len(taken[-1]), p.slabs_of(0), p.pages(0)) == (4, 4, 8)  # two slabs
    p.release(taken.pop(0)[:1])
    new_slab, granted = pool.Pool._new_slab, [True, False, True]

    def some(self, index: int, size: int) -> torch.Tensor:
        if not granted.pop(0):
            raise torch.OutOfMemoryError
        return new_slab(self, index, size)

    monkeypatch.setattr(pool.Pool, "_new_slab", some)
    taken.append(p.take_some(0, 2, 7))  # three slabs are refused, one is not
    assert (len(taken[-1]), p.pages(0)) == (3, 10)
    granted += [False, False]
    with pytest.raises(torch.OutOfMemoryError):
        p.take_some(0, 2, 7)
    assert p.pages(0) == 10
    monkeypatch.undo()
    every = np.concatenate(taken)
    assert len(np.unique(every)) == len(every) == 8
    p.release(every)
    assert (p.pages(0), p.slabs_of(0)) == (2, 2)  # the two that were not given back
    assert len(p.take_some(0, 2, 0)) == 2  # as many as are needed, whatever is asked for beside
    assert len(p.take_some(0, 1, 0)) == 2  # an empty slab


def test_slabs_of_large_caches_hold_what_one_launch_takes() -> None:
    """Without a budget as many requests as one launch gives pages ahead, at most one of 64 slabs; else small ones."""

    def slab(requests: int, amount: float | None = None) -> tuple[int, int]:
        sizes = Sizes(amount, 32, 8, 128, 68, 64, torch.bfloat16, CPU, requests, 4096, 64, True, None)
        stride = sizes.page_formats(["K8V8"])[0].stride
        size, _ = sizes.slabs(stride, 2)
        return size // stride, requests * 256 * 65 * stride // size

    assert slab(256)[0] == slab(16)[0] == 4096
    assert slab(4)[0] == 4 * 256
    assert slab(1)[0] < 1024
    assert all(slab(n)[1] >= 64 for n in (1, 2, 3, 4, 16, 256))
    assert slab(256, 0.25)[0] <= 130


def test_pool_refcounts_pages() -> None:
    p = small_pool()
    a = p.allocate(1, 2)
    p.retain(a[[0, 0]])
    assert p.owners(a).tolist() == [3, 1]
    p.release(a[[0, 0, 1]])
    assert p.owners(a).tolist() == [1, 0]
    with pytest.raises(RuntimeError, match="more often"):
        p.release(a[[0, 0]])


def test_pool_poisons_what_is_free() -> None:
    p = small_pool()
    a = p.allocate(1, 2)
    p.write(a, 0, torch.zeros(2, 128, dtype=torch.uint8))
    p.release(a[:1])
    assert (p.read(a[:1], 0, 128) == pool.POISON).all()
    assert (p.read(a[1:], 0, 128) == 0).all()


def test_pool_compacts_without_losing_a_byte() -> None:
    p = small_pool()
    a = p.allocate(1, 10)
    data = torch.arange(10, dtype=torch.uint8).unsqueeze(1).expand(10, 128).contiguous()
    p.write(a, 0, data)
    keep = np.array([1, 6, 9])
    p.retain(a[[6]])
    p.release(np.delete(a, keep))
    old, new = p.compact(1)
    where = dict(zip(old.tolist(), new.tolist(), strict=True))
    moved = np.array([where.get(h, h) for h in a[keep].tolist()])
    assert torch.equal(p.read(moved, 0, 128), data[keep])
    assert p.owners(moved).tolist() == [1, 2, 1]
    assert p.slabs_of(1) == 1


def test_pool_rejects_invalid_arguments() -> None:
    with pytest.raises(ValueError, match=r"strides\[1\]: expected a multiple of 64"):
        pool.Pool([256, 100], 512, 4, CPU)
    with pytest.raises(ValueError, match="capacity: expected at most"):
        pool.Pool([64], 1 << 30, 1 << 10, CPU)
    p = pool.Pool([512], 512, 2, CPU)
    with pytest.raises(RuntimeError, match="expected 3 free slabs, got 2 of 2"):
        p.allocate(0, 3)


class Recorded(torch.Tensor):
    """A slab that remembers the streams it was told of."""

    streams: list[object]

    def record_stream(self, stream: object) -> None:
        self.streams.append(stream)


def test_freed_slabs_are_recorded_on_the_streams_that_used_them() -> None:
    """Slabs that are trimmed, and those that make way for another tier; one in use is left alone."""
    p = pool.Pool([640, 448], 1024, 3, CPU)
    handles = p.allocate(0, 3)
    p.streams.update({1: "prefill", 2: "decode"})
    slabs = []
    for index, slab in enumerate(p.slabs):
        slabs.append(slab.as_subclass(Recorded))
        slabs[-1].streams = []
        p.slabs[index] = slabs[-1]
    p.release(handles[:2])
    p.allocate(1, 2)
    assert [slab.streams for slab in slabs] == [["prefill", "decode"], [], []]
    p.trim()
    assert [slab.streams for slab in slabs] == [["prefill", "decode"], ["prefill", "decode"], []]


def test_a_stream_is_noted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every operation asks for torch's current stream by its number; an object is made of it the first time."""

    class Stream:
        def __init__(self, number: int) -> None:
            self.cuda_stream = number

    p, current, made = small_pool(), [7], []
    p.space = None  # as on a GPU
    monkeypatch.setattr(pool.jit, "current_stream", lambda device: current[0])
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: made.append(Stream(current[0])) or made[-1])
    for number in (7, 7, 9, 7, 9):
        current[0] = number
        p.note_stream()
    assert [stream.cuda_stream for stream in made] == [7, 9]
    p.record_stream(Stream(11))
    assert sorted(p.streams) == [7, 9, 11]


# Pages


@pytest.mark.parametrize("name", ["K32V32", "K8V8", "K4V2", "K3V3", "K2V4"])
@pytest.mark.parametrize(("dim", "tokens"), [(64, 64), (48, 16), (80, 32)])
def test_rows_in_pages_as_the_layout_packs_them(name: str, dim: int, tokens: int) -> None:
    """Token by token into a page of garbage gives what packing the page at once gives."""
    kind = pages.PageFormat(Format.parse(name, dim, tokens), torch.float32, torch.int16, True, CPU)
    plain = pages.PageFormat(Format.parse("K32V32", dim, tokens), torch.float32, torch.int16, True, CPU)
    k, v = torch.randn(2, 2 * tokens, dim)
    position = torch.randperm(2 * tokens)
    source = pages.Rows(k, v, None, None, position, torch.rand(2 * tokens))
    wanted = source if kind.format.plain else kind.encode(source, plain, torch.zeros(2 * tokens, dim))
    staged = torch.randint(0, 256, (2, kind.stride), dtype=torch.uint8)
    at = torch.randperm(2 * tokens)
    for part in at.split(5):
        kind.write(staged, part // tokens, part % tokens, wanted[part])
    back = kind.read(staged, at // tokens, at % tokens)
    for name_ in ("k", "v", "k_scale", "v_scale", "position", "importance"):
        a, b = getattr(back, name_), getattr(wanted[at], name_)
        assert (a is None and b is None) or torch.equal(a, b), name_
    whole = quant.quantize_page(*(x.view(2, tokens, dim) for x in (k, v)), kind.format)
    clean = torch.zeros(2, kind.stride, dtype=torch.uint8)
    kind.write(clean, at // tokens, at % tokens, wanted[at])
    assert torch.equal(clean[:, : kind.format.page_bytes], whole)


def test_an_unchanged_width_keeps_its_codes() -> None:
    four, mixed = (
        pages.PageFormat(Format.parse(name, 64, 16), torch.float32, torch.int16, True, CPU) for name in ("K4V4", "K4V2")
    )
    plain = pages.PageFormat(Format.parse("K32V32", 64, 16), torch.float32, torch.int16, True, CPU)
    k, v = torch.randn(2, 8, 64)
    start = four.encode(pages.Rows(k, v, None, None, torch.arange(8), torch.zeros(8)), plain, None)
    moved = mixed.encode(start, four, None)
    assert moved.k is start.k
    assert moved.k_scale is start.k_scale
    assert moved.v.max() <= 3


@pytest.mark.skipif(pages._numba() is None, reason="numba is not there")
@pytest.mark.parametrize("aimed", [False, True])
@pytest.mark.parametrize("dim", [32, 80, 128])
def test_compiled_loops_give_the_bytes_of_torch(dim: int, aimed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """From rows to codes to fewer codes and back, into pages that hold other tokens already."""
    chance = torch.Generator().manual_seed(dim)
    k, v = torch.randn(2, 40, dim, generator=chance).mul_(torch.rand(2, 40, 1, generator=chance) * 1e3)
    k[3], v[5, 7], k[7] = 0.0, torch.inf, 1e30
    centre = torch.randn(40, dim, generator=chance)
    direction = quant.direction_of(torch.randn(40, dim, generator=chance), True) if aimed else None
    place = torch.randperm(48, generator=chance)[:40]
    plain, *kinds = (
        pages.PageFormat(Format.parse(name, dim, 16), torch.float32, torch.int16, True, torch.device("cpu"))
        for name in ("K32V32", "K8V4", "K4V3", "K3V2")
    )

    def run(compiled_rows: int) -> list[torch.Tensor]:
        monkeypatch.setattr(pages, "COMPILED_ROWS", compiled_rows)
        rows, source = pages.Rows(k, v, None, None, torch.arange(40), torch.rand(40)), plain
        found = []
        for kind in kinds:
            rows = kind.encode(rows, source, centre if source is plain else None, direction)
            raw = torch.full((3, kind.stride), 0xA5, dtype=torch.uint8)
            kind.write(raw, place // 16, place % 16, rows)
            rows, source = kind.read(raw, place // 16, place % 16), kind
            found += [raw[:, : kind.format.page_bytes], rows.k, rows.v]
        return found

    for compiled, plain_torch in zip(run(1), run(1 << 30), strict=True):
        assert torch.equal(compiled, plain_torch)


@pytest.mark.skipif(pages._numba() is None, reason="numba is not there")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("threads", "aimed"), [(1, False), (1, True), (3, True)])
def test_gathered_rows_are_quantised_to_the_codes_of_torch(
    dtype: torch.dtype, threads: int, aimed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chosen rows of any dtype, in any order and more than once, on several threads: the codes of torch."""
    from kvstrata.cache.storage import page_numba

    monkeypatch.setattr(page_numba, "SHARED_ROWS", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    chance = torch.Generator().manual_seed(7)
    k, v = (torch.randn(2, 150, 32, generator=chance) * torch.logspace(-9, 4, 150).unsqueeze(1)).to(dtype)
    k[3], k[7, 2], v[5, 1], v[6, :2], v[8, 3] = 0.0, torch.nan, torch.inf, -torch.inf, torch.finfo(dtype).max
    row = torch.randint(0, 150, (200,), generator=chance, dtype=torch.int32)
    row[:6] = torch.tensor([3, 5, 6, 7, 8, 149])
    head_cache = torch.randint(0, 4, (200,), generator=chance, dtype=torch.int32)
    centre = torch.randn(4, 32, generator=chance)
    direction = quant.direction_of(torch.randn(4, 32, generator=chance), True) if aimed else None
    for name in ("K8V4", "K4V3", "K3V2"):
        kind = pages.PageFormat(Format.parse(name, 32, 16), dtype, torch.int16, True, CPU)
        found = []
        for compiled_rows in (1, 1 << 30):
            monkeypatch.setattr(pages, "COMPILED_ROWS", compiled_rows)
            found.append(kind.encode_new(pages.NewRows(k, v), row, centre, head_cache, direction))
        for compiled, plain_torch in zip(*found, strict=True):
            assert all(map(torch.equal, compiled, plain_torch))


@pytest.mark.skipif(pages._numba() is None, reason="numba is not there")
@pytest.mark.parametrize(("dim", "rotated"), [(64, True), (96, True), (256, False)])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_compiled_codes_for_a_direction_are_those_of_torch(bits: int, dim: int, rotated: bool) -> None:
    """Directions of random and of largest weights, rows of all sizes, from values and from codes."""
    from kvstrata.cache.storage import page_numba

    chance = torch.Generator().manual_seed(dim)
    x = torch.randn(130, dim, generator=chance) * torch.logspace(-10, 5, 130).unsqueeze(1)
    x[3], x[5], x[7, 2:], x[9, 4], x[11] = 0.0, torch.inf, 0.0, torch.nan, 2.0**-24
    x[13, 1] = 60_000
    x[15] = 0.0
    x[15, :5] = torch.tensor([4.5, 4.5, 4.5, 4.5, -7.5]) * 2.0**-32  # its codes for this direction oppose it
    directions = quant.direction_of(torch.randn(5, dim, generator=chance), rotated)
    directions[1] = 31 - 62 * torch.randint(0, 2, (dim,), generator=chance, dtype=torch.int8)
    directions[2], directions[3] = 31, 0
    directions[4, 5:], directions[4, :5] = 0, torch.tensor([31, 31, 31, 31, -10])
    number = torch.randint(0, 5, (130,), generator=chance)
    number[15] = 4
    gain, rows = quant.K_GAIN[bits], directions[number]
    wanted = quant.quantize_plain(x, None, bits, rotated, gain, rows)
    for given in (rows, page_numba.Source(directions, number)):
        found = page_numba.quantize_plain(x, None, bits, rotated, gain, given)
        assert torch.equal(found[0], wanted[0])
        assert torch.equal(found[1].view(torch.int16), wanted[1].view(torch.int16))  # the sign of a zero, too
    coded = quant.quantize_plain(x, None, 8, rotated, 1.0)
    wanted = quant.quantize_coded(*coded, 8, bits, rotated, gain, rows)
    assert all(map(torch.equal, page_numba.quantize_coded(*coded, 8, bits, rotated, gain, rows), wanted))
    assert torch.equal(wanted[0], quant.quantize_coded(*coded, 8, bits, rotated, gain)[0]) == (bits == 8)


@pytest.mark.skipif(pages._numba() is None, reason="numba is not there")
def test_only_k_has_a_direction(monkeypatch: pytest.MonkeyPatch) -> None:
    """And only where its width changes."""
    plain, wide, narrow, mixed = (
        pages.PageFormat(Format.parse(name, 64, 16), torch.float32, torch.int16, True, CPU)
        for name in ("K32V32", "K4V4", "K3V3", "K4V3")
    )
    k, v = torch.randn(2, 80, 64, generator=torch.Generator().manual_seed(0))
    direction = quant.direction_of(torch.randn(1, 64, generator=torch.Generator().manual_seed(1)), True).expand(80, 64)
    for compiled_rows in (1, 1 << 30):
        monkeypatch.setattr(pages, "COMPILED_ROWS", compiled_rows)
        rows = pages.Rows(k, v, None, None, torch.arange(80), torch.zeros(80))
        for source, kind in ((plain, wide), (wide, narrow), (wide, mixed)):
            without, found = kind.encode(rows, source, None), kind.encode(rows, source, None, direction)
            assert torch.equal(found.v, without.v)
            assert torch.equal(found.v_scale, without.v_scale)
            assert torch.equal(found.k, without.k) == (kind is mixed)
            rows = without if kind is wide else rows
        index, number = torch.arange(80), torch.zeros(80, dtype=torch.int64)
        given = (pages.NewRows(k, v), index, torch.zeros(1, 64), number)
        without, found = narrow.encode_new(*given), narrow.encode_new(*given, direction[:1])
        assert not torch.equal(found[0][0], without[0][0])
        assert all(map(torch.equal, found[1], without[1]))


@pytest.mark.skipif(pages._numba() is None, reason="numba is not there")
@pytest.mark.parametrize("name", ["K8V4", "K4V3", "K3V2"])
@pytest.mark.parametrize(("dim", "tokens"), [(64, 64), (48, 16)])
def test_whole_pages_have_the_bytes_of_single_tokens(
    name: str, dim: int, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens that fill some pages in order, and only the begin and the end of others, between those that were there."""
    kind = pages.PageFormat(Format.parse(name, dim, tokens), torch.float32, torch.int16, True, CPU)
    place = torch.cat([torch.arange(3, 3 * tokens + 5), torch.arange(4 * tokens, 5 * tokens - 1)])
    n, chance = len(place), torch.Generator().manual_seed(1)
    k, v = (
        torch.randint(0, 2**bits, (n, dim), generator=chance, dtype=torch.uint8)
        for bits in (kind.format.k_bits, kind.format.v_bits)
    )
    scale = torch.rand(2, n, generator=chance).half()
    rows = pages.Rows(k, v, scale[0], scale[1], torch.arange(n), torch.rand(n, generator=chance))
    found = []
    for compiled_rows in (1, 1 << 30):
        monkeypatch.setattr(pages, "COMPILED_ROWS", compiled_rows)
        raw = torch.full((5, kind.stride), 0xA5, dtype=torch.uint8)
        kind.write(raw, place // tokens, place % tokens, rows)
        found.append(raw)
    assert torch.equal(*found)


@pytest.mark.gpu
def test_uploads_behind_a_busy_stream_arrive_as_they_were() -> None:
    """The ring of pinned memory goes round while the device is far behind, from two streams."""
    uploads = Uploads(torch.device("cuda"))
    streams = [torch.cuda.current_stream(), torch.cuda.Stream()]
    random, sent = np.random.default_rng(0), []
    torch.cuda._sleep(200_000_000)
    for number in range(600):
        array = random.integers(0, 1 << 30, (2, int(random.integers(1, 5000))))
        with torch.cuda.stream(streams[number % 2]):
            sent.append((array.copy(), uploads.copy(array, streams)))
    torch.cuda.synchronize()
    assert all(np.array_equal(there.cpu().numpy(), array) for array, there in sent)


@pytest.mark.parametrize(("sizes", "rounds"), [([64], 2), ([4096], 4), ([512 << 10], 4), ([8, 120, 4096, 70_000], 4)])
def test_the_ring_of_uploads_waits_before_it_is_reused(sizes: list[int], rounds: int) -> None:
    """No byte is given out again before an event that was recorded after its last use was waited for."""
    state = dict(issued=0, done=0)  # uploads so far; the last one that is known to be done

    class Stream:
        def record_event(self) -> SimpleNamespace:
            issued = state["issued"]
            return SimpleNamespace(synchronize=lambda: state.update(done=max(state["done"], issued)))

    ring, used, random = Uploads(torch.device("cpu")), {}, np.random.default_rng(0)
    for number in range(1, rounds * RING_BYTES * len(sizes) // sum(sizes)):
        size = int(random.choice(sizes))
        first = ring._reserve(size, [Stream()])
        assert first + size <= RING_BYTES
        for chunk in range(first // 64, -(-(first + size) // 64)):
            assert used.get(chunk, 0) <= state["done"], "bytes that may be on their way"
            used[chunk] = number
        state["issued"] = number
    assert state["done"] > 0
