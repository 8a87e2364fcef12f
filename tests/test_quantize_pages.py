"""quantize_pages: every backend that this machine has against the reference, which is built from whole pages."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import emulator
from conftest import HAS_GPU
from kvstrata.layout import Format, fragments, rotate, scales
from kvstrata.layout.format import UNIT
from kvstrata.quant import op as quantize_op
from kvstrata.quant import reference
from kvstrata.quant.op import quantize_pages

DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
BACKENDS = ["triton"] + (["cuda"] if HAS_GPU else [])
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


class Call:
    """Rows, a poisoned pool and pages at shuffled places; every third slot of the last page is empty."""

    def __init__(self, format: Format, dtype: torch.dtype, *, pages: int = 3, heads: int = 2, integers: bool = False,
                 centred: bool = False, directed: bool = False, seed: int = 0, gap: int = 0) -> None:  # fmt: skip
        generator = torch.Generator().manual_seed(seed)
        tokens, dim = pages * format.page_tokens + 5, format.head_dim
        shape = (2, tokens, heads, dim + gap)
        x = (
            torch.randint(-8, 9, shape, generator=generator).float()
            if integers
            else torch.randn(shape, generator=generator)
        )
        if not integers:
            x[..., 3] *= 12  # a channel of outliers
            x += torch.randn(heads, 1, generator=generator) * 2
        self.k, self.v = x.to(dtype).to(DEVICE)[..., :dim]
        self.format = format
        step = format.page_bytes // UNIT
        order = torch.randperm(pages + 2, generator=generator)[:pages]
        self.pages = (order * step + 1).int().to(DEVICE)
        self.pool = torch.full(((pages + 2) * format.page_bytes + 2 * UNIT,), 0xFF, dtype=torch.uint8, device=DEVICE)
        rows = torch.randperm(tokens, generator=generator)[: pages * format.page_tokens].view(pages, -1).int()
        rows[-1, ::3] = -1
        self.source = rows.to(DEVICE)
        self.heads = torch.randint(0, heads, (pages,), generator=generator).int().to(DEVICE)
        self.centre = self.centres = None
        if centred:
            self.centre = torch.randn(4, dim, generator=generator).to(DEVICE)
            self.centres = torch.randint(0, 4, (pages,), generator=generator).int().to(DEVICE)
        self.direction = None
        if directed:
            queries = torch.randn(4, dim, generator=generator)
            self.direction = reference.direction_of(queries, format.rotate).to(DEVICE)
            self.centres = torch.randint(0, 4, (pages,), generator=generator).int().to(DEVICE)

    def run(self, backend: str) -> torch.Tensor:
        """The pool after the call, on the CPU."""
        pool = self.pool.clone()
        quantize_pages(
            self.k, self.v, pool, self.pages, self.source, self.heads, self.format,
            centre=self.centre, centres=self.centres, direction=self.direction, backend=backend,
        )  # fmt: skip
        return pool.cpu()

    def parts(self, pool: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """K codes, V codes, K scales, V scales of the pages."""
        f = self.format
        at = self.pages.long().cpu().unsqueeze(1) * UNIT + torch.arange(f.page_bytes)
        k_raw, v_raw, scale_raw = pool[at].split([f.k_bytes, f.v_bytes, f.scale_bytes], -1)
        codes = (fragments.unpack(raw, bits, f.head_dim, f.page_tokens, side)
                 for raw, bits, side in ((k_raw, f.k_bits, "k"), (v_raw, f.v_bits, "v")))  # fmt: skip
        return (*codes, *scales.unpack_scales(scale_raw))


FORMATS = [(4, 4), (8, 8), (3, 3), (2, 2), (4, 2), (8, 3)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [32, 48, 64, 80, 96, 112, 128, 256])
@pytest.mark.parametrize(("k_bits", "v_bits"), FORMATS)
def test_bytes_of_every_format(backend, dtype, dim, k_bits, v_bits) -> None:
    if not HAS_GPU and (dim not in (32, 80, 128) or (dtype == torch.float16)):
        pytest.skip("one kind is enough under the interpreter")
    assert_bit_exact(Call(Format(k_bits, v_bits, dim), dtype, centred=True), backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("dim", "bits"), [*zip(range(144, 256, 16), [*FORMATS, (3, 8)], strict=True)])
def test_bytes_of_other_head_dims(backend: str, dim: int, bits: tuple[int, int]) -> None:
    assert_bit_exact(Call(Format(*bits, dim, 16), torch.bfloat16), backend)


def assert_bit_exact(call: Call, backend: str) -> None:
    """All bytes of the pool are those of the reference; none beside the pages is touched."""
    got, want = call.run(backend), call.run("reference")
    for name, a, b in zip(
        ("K codes", "V codes", "K scales", "V scales"), call.parts(got), call.parts(want), strict=True
    ):
        assert torch.equal(a, b), f"{name}: {int((a != b).sum())} of {a.numel()} differ"
    assert torch.equal(got, want)
    at = call.pages.long().cpu().unsqueeze(1) * UNIT + torch.arange(call.format.page_bytes)
    rest = torch.ones(got.numel(), dtype=torch.bool)
    rest[at.flatten()] = False
    assert (got[rest] == 0xFF).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_any_call_gives_the_bytes_of_the_reference(backend: str) -> None:
    @settings(max_examples=30 if HAS_GPU else 12)
    @given(
        bits=st.tuples(st.sampled_from([2, 3, 4, 8]), st.sampled_from([2, 3, 4, 8])),
        dim=st.sampled_from(range(32, 257, 16) if HAS_GPU else [32, 48, 64]),
        page_tokens=st.sampled_from([16, 32, 64]),
        dtype=st.sampled_from(DTYPES),
        rotated=st.booleans(),
        centred=st.booleans(),
        directed=st.booleans(),
        gap=st.sampled_from([0, 16]),
        alone=st.booleans(),  # whether a warp goes through all pages
        seed=st.integers(0, 1000),
    )
    def run(bits, dim, page_tokens, dtype, rotated, centred, directed, gap, alone, seed) -> None:
        format = Format(*bits, dim, page_tokens, rotate=rotated)
        call = Call(format, dtype, pages=2, centred=centred, directed=directed, gap=gap, seed=seed)
        with pytest.MonkeyPatch.context() as patch:
            if alone:
                patch.setattr(quantize_op, "ROUNDS", {256: 0})
            assert_bit_exact(call, backend)

    run()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_rows_that_are_not_finite_stay_alone(backend: str, bits: int) -> None:
    """NaN, infinities, huge values and zeros: as in the reference, and no other row changes."""
    rows_stay_alone(backend, Format(bits, bits, 64))


def rows_stay_alone(backend: str, format: Format, directed: bool = False) -> None:
    call = Call(format, torch.bfloat16, centred=True, directed=directed)
    clean = call.parts(call.run(backend))
    rows = call.source[0, :6].long()
    head = int(call.heads[0])
    for x in (call.k, call.v):
        x[rows[0], head, 5] = float("nan")
        x[rows[1], head, 6] = float("inf")
        x[rows[2], head, 7] = float("-inf")
        x[rows[3], head] = 3e38
        x[rows[4], head] = 0
        x[rows[5], head] = 1e-30
    assert_bit_exact(call, backend)
    dirty = call.parts(call.run(backend))
    assert all(part.isfinite().all() for part in dirty[2:])
    for a, b in zip(clean, dirty, strict=True):
        assert torch.equal(a[0, 6:], b[0, 6:])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("bits", "dim"), [((4, 3), 64), ((2, 8), 128), ((8, 2), 256), ((3, 4), 48)])
def test_rows_of_any_size(backend: str, dtype: torch.dtype, bits: tuple[int, int], dim: int) -> None:
    rows_of_any_size(backend, Format(*bits, dim, 64), dtype)


def rows_of_any_size(backend: str, format: Format, dtype: torch.dtype, directed: bool = False) -> None:
    """Rows of all powers of two, with values of any size below; also subnormal rows, and rows at the centre."""
    generator = torch.Generator().manual_seed(3)
    call = Call(format, dtype, pages=3, heads=1, centred=True, directed=directed)
    smallest = max(-149, round(math.log2(torch.finfo(dtype).smallest_normal)) - 12)
    for x in (call.k, call.v):
        for page, (least, end) in enumerate(((-14, 17), (smallest, 17), (-30, 16))):
            size = torch.arange(format.page_tokens).remainder(end - least)[:, None] + least
            below = torch.randn(format.page_tokens, format.head_dim, generator=generator).abs()
            rows = (size - below * torch.tensor([0.3, 3.0, 30.0])[size % 3]).exp2()
            sign = torch.randn(rows.shape, generator=generator).sign()
            x[call.source[page].long(), 0] = (sign * rows).clamp(-65000, 65000).to(x)
        if backend == "triton" and not HAS_GPU:  # the interpreter converts subnormal bfloat16 incorrectly
            x[x.abs() < torch.finfo(torch.bfloat16).smallest_normal] = 0
    at = call.source[1, 20:24].long()
    centre = call.centre[int(call.centres[1])]
    call.k[at, 0] = (centre * torch.tensor([1, 1.01, 1.1, -1]).to(centre)[:, None]).to(call.k)
    assert_bit_exact(call, backend)


@pytest.mark.parametrize("backend", ["reference", *BACKENDS])
def test_empty_slots_and_no_pages(backend: str) -> None:
    call = Call(Format(4, 4, 64), torch.float16)
    codes_k, _, scale_k, scale_v = call.parts(call.run(backend))
    assert (scale_k[-1, ::3] == 0).all()
    assert (scale_v[-1, ::3] == 0).all()
    assert (codes_k[-1, ::3] == 8).all()
    call.pages, call.source, call.heads = call.pages[:0], call.source[:0], call.heads[:0]
    assert (call.run(backend) == 0xFF).all()


def test_reference_pages_come_back(device: torch.device) -> None:
    """Pages, dequantised and rotated back, equal the rows within the format's error."""
    call = Call(Format(8, 8, 64), torch.float32)
    pool = call.run("auto")
    at = call.pages.long().cpu().unsqueeze(1) * UNIT + torch.arange(call.format.page_bytes)
    k, _ = reference.dequantize_page(pool[at], call.format)
    rows = call.k.cpu()[call.source[0].long().cpu(), int(call.heads[0])]
    error = (rotate(k[0]) - rows).norm() / rows.norm()
    assert error < 0.02


DIRECTION = torch.zeros(2, 64, dtype=torch.int8, device=DEVICE)
BAD = {
    "k": (lambda c: setattr(c, "k", c.k[..., :32]), ValueError, r"k: expected \[tokens, heads, 64\]"),
    "v": (lambda c: setattr(c, "v", c.v[:1]), ValueError, "v: expected shape"),
    "dtype": (lambda c: vars(c).update(k=c.k.double(), v=c.v.double()), TypeError, "k: expected float32"),
    "v dtype": (lambda c: setattr(c, "v", c.v.float()), TypeError, "v: expected torch.float16"),
    "pool dtype": (lambda c: setattr(c, "pool", c.pool.view(torch.int8)), TypeError, "pool: expected torch.uint8"),
    "pool size": (lambda c: setattr(c, "pool", c.pool[:-1]), ValueError, "pool: expected a contiguous run"),
    "pages": (lambda c: setattr(c, "pages", c.pages.long()), TypeError, "pages: expected torch.int32"),
    "source": (lambda c: setattr(c, "source", c.source[:, :5]), ValueError, r"source: expected shape \(3, 64\)"),
    "heads": (lambda c: setattr(c, "heads", c.heads[:1]), ValueError, r"heads: expected shape \(3,\)"),
    "centre": (lambda c: setattr(c, "centre", torch.zeros(1, 64)), ValueError, "centres: expected rows of centre"),
    "centres": (lambda c: setattr(c, "centres", c.heads), ValueError, "centres: expected None without centre"),
    "direction": (lambda c: setattr(c, "direction", DIRECTION), ValueError, "centres: expected rows of centre"),
    "direction dtype": (
        lambda c: vars(c).update(direction=DIRECTION.float(), centres=c.heads), ValueError,
        r"direction: expected int8 \[rows, 64\], got torch.float32",
    ),
    "direction shape": (
        lambda c: vars(c).update(direction=DIRECTION[:, :32], centres=c.heads), ValueError,
        r"direction: expected int8 \[rows, 64\], got torch.int8 of shape \(2, 32\)",
    ),
    "direction rows": (
        lambda c: vars(c).update(direction=DIRECTION, centre=torch.zeros(3, 64, device=DEVICE), centres=c.heads),
        ValueError, r"direction: expected int8 \[3, 64\]",
    ),
    "direction strides": (
        lambda c: vars(c).update(direction=DIRECTION.T.contiguous().T, centres=c.heads), ValueError,
        "direction: expected a contiguous tensor",
    ),
    "direction device": (
        lambda c: vars(c).update(direction=DIRECTION.to("meta"), centres=c.heads), ValueError,
        "direction: expected a tensor on",
    ),
    "format": (lambda c: setattr(c, "format", Format(16, 16, 64)), ValueError, "format: expected a quantised format"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named(name: str) -> None:
    change, error, message = BAD[name]
    call = Call(Format(4, 4, 64), torch.float16)
    change(call)
    with pytest.raises(error, match=message):
        call.run("auto")


def test_unknown_and_unavailable_backends() -> None:
    call = Call(Format(4, 4, 64), torch.float16)
    with pytest.raises(ValueError, match="backend: expected one of"):
        call.run("fast")
    if not HAS_GPU:
        with pytest.raises(RuntimeError, match="cuda needs CUDA tensors"):
            call.run("cuda")


@pytest.mark.gpu
def test_graph_replay_reads_new_rows() -> None:
    call = Call(Format(4, 2, 128), torch.bfloat16)
    call.run("cuda")
    pool = call.pool.clone()
    arguments = (call.k, call.v, pool, call.pages, call.source, call.heads, call.format)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        quantize_pages(*arguments, backend="cuda")
    for seed in range(3):
        fresh = Call(call.format, torch.bfloat16, seed=seed)
        call.k.copy_(fresh.k)
        call.v.copy_(fresh.v)
        pool.fill_(0xFF)
        graph.replay()
        assert torch.equal(pool.cpu(), call.run("cuda"))


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The CUDA backend without CUDA."""
    if HAS_GPU or emulator.missing() is not None:
        pytest.skip("the kernel runs on the GPU here" if HAS_GPU else str(emulator.missing()))
    monkeypatch.setattr(quantize_op, "jit", emulator.launcher())
    monkeypatch.setattr(quantize_op, "missing", lambda backend, device: None)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    quantize_op._kernel.cache_clear()
    yield
    quantize_op._kernel.cache_clear()


@pytest.fixture
def cuda(request: pytest.FixtureRequest) -> None:
    """The CUDA backend, emulated where there is no GPU."""
    if not HAS_GPU:
        request.getfixturevalue("emulated")


@pytest.mark.parametrize(
    ("k_bits", "v_bits", "dim", "dtype", "page_tokens"),
    [
        (4, 4, 128, torch.bfloat16, 64),
        (3, 2, 64, torch.float16, 32),
        (8, 3, 64, torch.float32, 16),
        (2, 3, 48, torch.bfloat16, 32),
        (4, 8, 80, torch.float16, 16),
    ],
)
def test_cuda_kernel_equals_the_reference(emulated: None, monkeypatch, k_bits, v_bits, dim, dtype, page_tokens) -> None:
    """Warps that make one tile after the other, from strided rows, empty slots and rows to be cleaned among them."""
    format = Format(k_bits, v_bits, dim, page_tokens)
    for pages, warps in ((1, 1), (7, 1), (7, 3)):
        monkeypatch.setattr(quantize_op, "ROUNDS", {256: warps * page_tokens // 16})
        call = Call(format, dtype, pages=pages, centred=True, gap=8 * (pages > 1))
        assert_bit_exact(call, "cuda")
        call.k[call.source[0, 1].long(), call.heads[0]] = float("inf")
        call.v[call.source[0, 2].long(), call.heads[0], 5] = float("nan")
        assert_bit_exact(call, "cuda")


@pytest.mark.parametrize("bits", [3, 8])
def test_rows_stay_alone_in_the_cuda_kernel(emulated: None, bits: int) -> None:
    rows_stay_alone("cuda", Format(bits, bits, 64))


@pytest.mark.parametrize(
    ("bits", "dim", "dtype"),
    [
        ((4, 2), 128, torch.bfloat16),
        ((8, 3), 256, torch.float16),
        ((2, 4), 80, torch.bfloat16),
        ((3, 8), 64, torch.float32),
    ],
)
def test_rows_of_any_size_in_the_cuda_kernel(emulated: None, bits, dim: int, dtype: torch.dtype) -> None:
    rows_of_any_size("cuda", Format(*bits, dim, 64), dtype)


@pytest.mark.parametrize(
    ("bits", "dim", "page_tokens", "dtype"),
    [
        ((4, 3), 128, 64, torch.bfloat16),
        ((3, 2), 128, 32, torch.float16),
        ((2, 2), 128, 16, torch.float32),
        ((2, 4), 64, 64, torch.bfloat16),
        ((3, 8), 64, 16, torch.float32),
        ((8, 2), 64, 32, torch.float16),
        ((4, 2), 256, 16, torch.bfloat16),
        ((3, 3), 256, 16, torch.float32),
        ((2, 3), 48, 32, torch.bfloat16),
        ((3, 3), 80, 64, torch.float16),
        ((4, 3), 96, 32, torch.bfloat16),
        ((4, 4), 192, 16, torch.float16),
    ],
)
@pytest.mark.parametrize("centred", [False, True])
def test_directions_in_the_cuda_kernel(cuda: None, monkeypatch, bits, dim, page_tokens, dtype, centred: bool) -> None:
    """Pages in any order of their directions; empty slots, rows to be cleaned, rows that are not rotated among them."""
    for pages, warps, rotated in ((1, 1, True), (7, 1, True), (7, 3, True), (3, 1, False)):
        monkeypatch.setattr(quantize_op, "ROUNDS", {256: warps * page_tokens // 16})
        format = Format(*bits, dim, page_tokens, rotate=rotated, centre=centred)
        call = Call(format, dtype, pages=pages, centred=centred, directed=True, gap=8 * (pages > 1), seed=pages)
        assert_bit_exact(call, "cuda")
        directed = call.parts(call.run("cuda"))
        call.k[call.source[0, 1].long(), call.heads[0]] = float("inf")
        assert_bit_exact(call, "cuda")
        call.direction = torch.zeros_like(call.direction)
        zeros = call.run("cuda")
        call.direction = None
        call.centres = call.centres if centred else None
        assert torch.equal(zeros, call.run("cuda")), "zeros leave the codes as they are"
        changed = (directed[0] != call.parts(zeros)[0]).any(-1).float().mean()
        assert changed > 0.4 if bits[0] != 8 else changed < 0.1, "of 8 bits, only the row that is not finite"


@pytest.mark.parametrize("bits", [(2, 2), (4, 3)])
def test_rows_with_a_direction_stay_alone_in_the_cuda_kernel(cuda: None, bits: tuple[int, int]) -> None:
    rows_stay_alone("cuda", Format(*bits, 64), directed=True)


@pytest.mark.parametrize(
    ("bits", "dim", "dtype"),
    [
        ((4, 2), 128, torch.bfloat16),
        ((2, 3), 256, torch.float16),
        ((3, 4), 80, torch.bfloat16),
        ((3, 8), 64, torch.float32),
    ],
)
def test_rows_of_any_size_with_a_direction_in_the_cuda_kernel(cuda: None, bits, dim: int, dtype: torch.dtype) -> None:
    rows_of_any_size("cuda", Format(*bits, dim, 64), dtype, directed=True)


def test_the_largest_weights_in_the_cuda_kernel(cuda: None) -> None:
    """Directions of the largest weights of any signs, and rows along them or against them: shifts at their ends."""
    for bits in (2, 3, 4):
        call = Call(Format(bits, bits, 128, rotate=False), torch.bfloat16, directed=True)
        signs = torch.randint(0, 2, (4, 128), generator=torch.Generator().manual_seed(bits)) * 2 - 1
        call.direction = (reference.DIRECTION_MOST * signs).to(torch.int8).to(DEVICE)
        for page, head in enumerate(call.heads.tolist()):
            rows = call.source[page, 1:3].long()
            along = signs[int(call.centres[page])].to(call.k)
            call.k[rows[0], head], call.k[rows[1], head] = along, -along * 300
        assert_bit_exact(call, "cuda")


def test_rows_that_the_cuda_kernel_cannot_copy(emulated: None) -> None:
    call = Call(Format(4, 4, 64), torch.float16, gap=4)
    with pytest.raises(ValueError, match="backend: expected rows and pool aligned to 16 bytes"):
        call.run("cuda")
