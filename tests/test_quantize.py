"""Quantisation: exact codes, quality against theory, and the rows that break quantisers."""

from __future__ import annotations

import doctest
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstrata.layout import Format, rotate
from kvstrata.layout import format as format_module
from kvstrata.quant import dequantize, quantize, reference

BITS = [2, 3, 4, 8]
DIMS = list(range(32, 257, 16))
INF, NAN = float("inf"), float("nan")
# Signal-to-noise of the uniform quantiser with the best step on a Gaussian, dB; checked by integration below.
THEORY = {2: 9.25, 3: 14.27, 4: 19.38, 8: 40.57}
# Measured on Gaussian rows after rotation, D 64 / 128 / 256, dB, rounded down: lower is a regression.
FLOOR = {
    2: {64: 9.35, 128: 9.28, 256: 9.25},
    3: {64: 14.45, 128: 14.35, 256: 14.28},
    4: {64: 19.65, 128: 19.48, 256: 19.40},
    8: {64: 44.55, 128: 43.78, 256: 43.12},
}


def sqnr(x: torch.Tensor, y: torch.Tensor) -> float:
    x, y = x.double(), y.double()
    return 10 * math.log10(x.square().sum() / (x - y).square().sum())


def gaussian(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def uniform_quantiser_on_a_gaussian(bits: int, step: float) -> float:
    """dB by integration over the density, from -12 to 12 standard deviations."""
    x = np.linspace(-12, 12, 1_000_001)
    density = np.exp(-x * x / 2) / math.sqrt(2 * math.pi)
    level = np.clip(np.floor(x / step), -(2 ** (bits - 1)), 2 ** (bits - 1) - 1) + 0.5
    return -10 * math.log10(float(((x - level * step) ** 2 * density).sum() * (x[1] - x[0])))


@pytest.mark.parametrize("bits", BITS)
def test_constants_are_the_optimal_steps(bits: int) -> None:
    step = reference.GAUSSIAN_STEP[bits]
    best = uniform_quantiser_on_a_gaussian(bits, step)
    assert best == pytest.approx(THEORY[bits], abs=0.01)
    for other in (0.97 * step, 1.03 * step):
        assert uniform_quantiser_on_a_gaussian(bits, other) < best


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("bits", BITS)
def test_quality_on_gaussian_rows(bits: int, dim: int) -> None:
    x = gaussian(8192, dim)
    got = sqnr(x, dequantize(quantize(x, bits)))
    assert got >= THEORY[bits] - 0.2
    assert got >= FLOOR[bits][dim]
    if bits < 8:  # more than this the row's own scale cannot win: something else is measured
        assert got <= THEORY[bits] + 0.5


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("bits", BITS)
def test_quality_for_every_head_dim(bits: int, dim: int) -> None:
    x = gaussian(1024, dim)
    assert sqnr(x, dequantize(quantize(x, bits))) >= THEORY[bits] - 0.2


@pytest.mark.parametrize("dim", [64, 80, 96, 128])
@pytest.mark.parametrize("bits", BITS)
def test_rotation_helps_against_outlier_channels(bits: int, dim: int) -> None:
    x = gaussian(2048, dim)
    x[:, 5] *= 20
    straight = sqnr(x, dequantize(quantize(x, bits, format=Format(bits, bits, dim, rotate=False))))
    rotated = sqnr(x, dequantize(quantize(x, bits)))
    assert rotated > straight + 2


def fit(x: torch.Tensor, step: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of rows with given steps."""
    codes, z = reference.encode(x, step, bits)
    return codes, reference.refit(z, step, codes, bits)


def test_8_bit_never_clips() -> None:
    """A Laplace tail, where the RMS step would clip."""
    uniform = torch.rand(4096, 128, generator=torch.Generator().manual_seed(0)) - 0.5
    x = -uniform.sign() * (1 - 2 * uniform.abs()).clamp(min=1e-7).log()
    fitted = reference.decode(*fit(x, reference.step_of(x, 8), 8), 8)
    assert sqnr(x, fitted) > 40
    assert ((x - fitted).abs().amax(-1) <= 0.75 * reference.step_of(x, 8)).all()  # half a step, and the refit
    rms = x.square().mean(-1).sqrt() * reference.GAUSSIAN_STEP[8]
    assert sqnr(x, reference.decode(*fit(x, rms, 8), 8)) < 30


@settings(max_examples=200)
@given(
    bits=st.sampled_from(BITS),
    step=st.floats(2**-24, 65504, width=32),
    values=st.lists(st.floats(width=32, allow_nan=False, min_value=-65504, max_value=65504), min_size=1, max_size=8),
    ties=st.lists(st.integers(-130, 130), max_size=8),
)
def test_codes_given_the_step_bit_for_bit(bits, step, values, ties) -> None:
    """One rounding to float32 for the inverse, none for the product; ties and borders among the values."""
    step = np.float32(step)
    x = np.concatenate([np.array(values, np.float32), np.array(ties, np.float32) * step])
    inverse = Fraction(float(np.float32(1) / step))
    n = np.array([math.floor(Fraction(float(value)) * inverse) for value in x])
    want = (np.clip(n, -(2 ** (bits - 1)), 2 ** (bits - 1) - 1) + 2 ** (bits - 1)).astype(np.uint8)
    got, z = reference.encode(torch.from_numpy(x), torch.tensor(step), bits)
    np.testing.assert_array_equal(got.numpy(), want)
    assert z.tolist() == [math.floor(Fraction(float(value)) * inverse * 256) for value in x]


def test_codes_at_level_borders_round_down() -> None:
    x = torch.tensor([-9.0, -2.0, -1.5, -1.0, -1e-30, -0.0, 0.0, 0.5, 1.0, 1.99, 2.0, 9.0])
    assert reference.encode(x, torch.tensor(1.0), 2)[0].tolist() == [0, 0, 0, 1, 1, 2, 2, 2, 3, 3, 3, 3]
    assert reference.levels(torch.arange(4), 2).tolist() == [-1.5, -0.5, 0.5, 1.5]


@pytest.mark.parametrize("bits", BITS)
def test_refit_is_the_least_squares_scale(bits: int) -> None:
    x = gaussian(64, 128)
    codes, scale = fit(x, reference.step_of(x, bits), bits)
    assert scale.dtype == torch.float16
    level = (codes.double() - (2**bits - 1) / 2).unsqueeze(-1)
    solution = torch.linalg.lstsq(level, x.double().unsqueeze(-1)).solution.flatten()
    torch.testing.assert_close(scale.double(), solution, rtol=2**-8, atol=0)  # of values in 1/256 steps


@pytest.mark.parametrize("bits", BITS)
def test_decode_is_exact(bits: int) -> None:
    codes = torch.arange(2**bits, dtype=torch.uint8).repeat(1000, 1)
    scale = torch.rand(1000).half()
    want = (codes.double() - (2**bits - 1) / 2) * scale.double().unsqueeze(-1)
    assert torch.equal(reference.decode(codes, scale, bits).double(), want)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("rotated", [True, False])
@pytest.mark.parametrize("bits", BITS)
def test_rows_that_break_quantisers(bits: int, rotated: bool, dtype: torch.dtype) -> None:
    format = Format(bits, bits, 64, rotate=rotated)
    largest = torch.finfo(dtype).max
    fills = [
        0.0,
        -0.0,
        NAN,
        INF,
        -INF,
        largest,
        -largest,
        65504.0,
        1e-30,
        -1e-30,
        1e-7,
        2**-24,
        torch.finfo(dtype).tiny,
    ]
    x = torch.stack([torch.full((64,), fill, dtype=torch.float64) for fill in fills]).to(dtype)
    mixed = gaussian(6, 64).to(dtype)
    mixed[0, 3], mixed[1, 4], mixed[2, 5], mixed[3, 6], mixed[4, ::2], mixed[4, 1::2] = (
        NAN,
        INF,
        -INF,
        largest,
        INF,
        -INF,
    )
    x = torch.cat([x, mixed])
    packed = quantize(x, bits, format=format)
    assert packed.scale.isfinite().all()
    assert (packed.scale >= 0).all()
    for out in (torch.float16, torch.bfloat16, torch.float32):
        assert dequantize(packed, out).isfinite().all()
    back = dequantize(packed, torch.float32)
    for row in (0, 1, 2):  # zeros, and NaN which counts as zero
        assert packed.scale[row] == 0
        assert (back[row] == 0).all()
    clamped = x.double().nan_to_num(nan=0.0).clamp(-65504, 65504)
    # A least-squares fit is a projection: never longer than the row, up to the 1/256 steps that values are rounded to.
    assert (back.double().norm(dim=-1) <= clamped.norm(dim=-1) * (1 + 2**-8) + 2**-22).all()
    if not rotated:
        assert (back[3:8].sign() == clamped[3:8].sign()).all()
    # NaN counts as 0 and inf as the largest: the same codes as if they had been written so.
    same = quantize(clamped.to(torch.float64), bits, format=format)
    assert torch.equal(same.codes, packed.codes)
    assert torch.equal(same.scale, packed.scale)
    assert (back[8:10].abs() <= 2**-24).all()


@pytest.mark.parametrize("bits", BITS)
def test_zero_rows_have_the_middle_code(bits: int) -> None:
    x = torch.zeros(3, 64)
    codes, scale = fit(x, reference.step_of(x, bits), bits)
    assert (codes == 2 ** (bits - 1)).all()
    assert (scale == 0).all()


def test_scales_saturate() -> None:
    z, codes, step = (
        torch.full((1, 64), 256.0).double(),
        torch.full((1, 64), 2, dtype=torch.uint8),
        torch.tensor([1e30]),
    )
    assert reference.refit(z, step, codes, 2).item() == 65504
    assert reference.refit(-z, step, codes, 2).item() == 0


@pytest.mark.parametrize("name", ["K8V8", "K8V4", "K4V4", "K4V3", "K4V2", "K3V3", "K3V2", "K2V2", "K2V8"])
@pytest.mark.parametrize(("head_dim", "tokens"), [(64, 64), (80, 16), (96, 32), (128, 64)])
def test_pages_round_trip(name: str, head_dim: int, tokens: int) -> None:
    format = Format.parse(name, head_dim, tokens)
    k, v = gaussian(2, 3, 2, tokens, head_dim) * torch.tensor([1.0, 30.0])[:, None, None]
    centre = 5 * gaussian(head_dim, seed=1)
    k, centre = ((256 * x).round() / 256 for x in (k + centre, centre))  # on the grid of any row: no code is in between
    pages = reference.quantize_page(k, v, format, centre)
    assert pages.shape == (3, 2, format.page_bytes)
    assert pages.dtype == torch.uint8
    got_k, got_v = reference.dequantize_page(pages, format)
    # The same as rows one by one, which have their own packing.
    rows_k, rows_v = quantize(k - centre, format.k_bits, format=format), quantize(v, format.v_bits, format=format)
    back_k, back_v = reference.restore(got_k, got_v, format)
    # A scale has its gain before it is rounded to fp16: 2^-11 here and there, and at 0 what rotation rounds.
    for x, back, rows, gain in (
        (k - centre, back_k, rows_k, reference.K_GAIN[format.k_bits]),
        (v, back_v, rows_v, reference.V_GAIN[format.v_bits]),
    ):
        torch.testing.assert_close(back, gain * dequantize(rows), rtol=2**-10, atol=2**-10 * float(k.abs().max()))
        assert sqnr(x, back / gain) > THEORY[rows.bits] - 0.2
        assert sqnr(x, back) > THEORY[rows.bits] - 0.35
    with_centre, _ = reference.restore(got_k, got_v, format, centre)
    torch.testing.assert_close(with_centre, back_k + centre)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_gains_make_up_for_what_codes_lose_of_a_row(bits: int) -> None:
    format = Format(bits, bits, 128)
    k, v = gaussian(2, 16, 64, 128)
    got_k, got_v = reference.restore(*reference.dequantize_page(reference.quantize_page(k, v, format), format), format)
    norm = (got_k.norm(dim=-1) / k.norm(dim=-1)).mean().item()
    assert norm == pytest.approx(1, abs=3e-3)
    # Along the row itself: 1 is unbiased, the closest row has 1 - e, and V lies at a quarter of e below 1.
    along = ((got_v * v).sum() / v.square().sum()).item()
    error = 10 ** (-THEORY[bits] / 10)
    assert along == pytest.approx((1 - error) ** 0.25, abs=3e-3)
    assert reference.V_GAIN[bits] == pytest.approx(reference.K_GAIN[bits] ** 1.5, abs=2e-4)


def errors(k: torch.Tensor, bits: int, direction: torch.Tensor | None) -> torch.Tensor:
    """Of rotated rows, with the gain of K."""
    codes, scale = reference.quantize_plain(k, None, bits, True, reference.K_GAIN[bits], direction)
    rotated = reference.transform(reference.clean(k), None, True) * reference.length(k.shape[-1], True)
    return (reference.decode(codes, scale, bits) - rotated).double()


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_errors_have_no_component_along_a_direction(bits: int, dim: int) -> None:
    """Almost none, for little more error as a whole; the lengths of the rows stay what they were."""
    k, query = gaussian(2048, dim), gaussian(dim, seed=1)
    direction = reference.direction_of(query, True)
    assert direction.abs().max() == reference.DIRECTION_MOST
    without, aimed = errors(k, bits, None), errors(k, bits, direction)
    along = [(error @ direction.double()).square().mean() for error in (without, aimed)]
    assert along[1] < 0.15 * along[0]
    assert aimed.square().sum() < 1.03 * without.square().sum()
    scores = [(error @ rotate(query).double()).square().mean() for error in (without, aimed)]
    assert scores[1] < 0.15 * scores[0]


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dim", [32, 80])
def test_a_direction_of_zeros_changes_no_code(bits: int, dim: int) -> None:
    """Nor does any direction at 8 bit; each row has its own."""
    k = gaussian(64, dim) * torch.logspace(-10, 5, 64).unsqueeze(1)
    direction = reference.direction_of(gaussian(64, dim, seed=1), True)
    direction[::2] = 0
    given = (k, gaussian(dim, seed=2), bits, True, reference.K_GAIN[bits])
    plain, aimed = reference.quantize_plain(*given), reference.quantize_plain(*given, direction)
    same = slice(None) if bits == 8 else slice(None, None, 2)
    assert all(torch.equal(x[same], y[same]) for x, y in zip(plain, aimed, strict=True))
    assert torch.equal(plain[0], aimed[0]) == (bits == 8)


@pytest.mark.parametrize("bits", BITS)
def test_directions_for_rows_that_break_quantisers(bits: int) -> None:
    """Huge, tiny and empty rows and queries: codes of the width, finite scales, at most 31 per weight."""
    k = gaussian(12, 64)
    k[0], k[1], k[2], k[3], k[4, 5], k[5, 6], k[6], k[7, 1:] = 0, 1e30, 2.0**-24, -INF, INF, NAN, 1e-30, 0
    queries = gaussian(8, 64, seed=1)
    queries[0], queries[1, 3], queries[2], queries[3], queries[4], queries[5, 1:] = 0, NAN, INF, 1e38, 1e-40, 0
    directions = reference.direction_of(queries, True)
    assert directions.dtype == torch.int8
    assert directions.abs().max() == 31
    assert not directions[:3].any()
    extreme = 31 * torch.tensor([[1], [-1]], dtype=torch.int8).expand(2, 64)
    for direction in torch.cat([directions, extreme]):
        codes, scale = reference.quantize_plain(k, None, bits, True, reference.K_GAIN[bits], direction)
        assert int(codes.max()) < 2**bits
        assert scale.isfinite().all()
        assert (scale >= 0).all()
        assert scale[0] == 0
    coded = reference.quantize_coded(*reference.quantize_plain(k, None, 8, True, 1.0), 8, bits, True, 1.0, extreme[0])
    assert int(coded[0].max()) < 2**bits
    assert coded[1].isfinite().all()


def test_a_token_is_independent_of_its_page() -> None:
    format = Format(3, 2, 64)
    k, v = gaussian(2, 64, 64)
    before = reference.dequantize_page(reference.quantize_page(k, v, format), format)
    k[7], v[9] = NAN, INF
    after = reference.dequantize_page(reference.quantize_page(k, v, format), format)
    others_k, others_v = torch.arange(64) != 7, torch.arange(64) != 9
    assert torch.equal(before[0][others_k], after[0][others_k])
    assert torch.equal(before[1][others_v], after[1][others_v])
    assert (after[0][7] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_plain_pages_keep_every_bit(dtype: torch.dtype) -> None:
    format = Format(8 * dtype.itemsize, 8 * dtype.itemsize, 48, 32)
    k, v = gaussian(2, 3, 32, 48).to(dtype)
    k[0, 0, :3] = torch.tensor([NAN, INF, -0.0])
    pages = reference.quantize_page(k, v, format)
    assert pages.shape == (3, format.page_bytes)
    got = reference.dequantize_page(pages, format, dtype)
    for x, y in zip((k, v), got, strict=True):
        assert torch.equal(x.view(torch.uint8), y.view(torch.uint8))
    assert torch.equal(pages[1, : format.k_bytes].view(dtype), k[1].flatten())


def test_centring_leaves_softmax_as_it_is() -> None:
    q, k, v = gaussian(4, 64).double(), gaussian(200, 64, seed=1).double() + 3, gaussian(200, 64, seed=2).double()
    centre = k.mean(0)
    plain = torch.softmax(q @ k.T / 8, -1) @ v
    torch.testing.assert_close(torch.softmax(q @ (k - centre).T / 8, -1) @ v, plain)
    # and with everything rotated, as decode computes it
    rotated = torch.softmax(rotate(q) @ rotate(k - centre).T / 8, -1) @ rotate(v)
    torch.testing.assert_close(rotate(rotated), plain)


def test_centring_helps_where_channels_are_shifted() -> None:
    """Attention over quantised K gets closer to the exact result."""
    format = Format(4, 4, 64)
    shift = torch.zeros(64)
    shift[::9] = 8
    q, k, v = gaussian(8, 64), gaussian(64, 64, seed=1) + shift, gaussian(64, 64, seed=2)
    exact = torch.softmax(q @ k.T / 8, -1)
    error = []
    for centre in (None, k.mean(0)):
        got, _ = reference.dequantize_page(reference.quantize_page(k, v, format, centre), format)
        error.append((torch.softmax(rotate(q) @ got.T / 8, -1) - exact).square().sum())
    assert error[1] < error[0] / 4


@settings(max_examples=60)
@given(
    bits=st.sampled_from(BITS),
    dim=st.sampled_from([8, 24, 64, 80, 128, 576]),
    lead=st.lists(st.integers(0, 4), max_size=3),
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32]),
)
def test_packed_rows_of_any_shape(bits, dim, lead, dtype) -> None:
    x = gaussian(*lead, dim).to(dtype)
    before = x.clone()
    packed = quantize(x, bits)
    assert torch.equal(x, before)
    assert packed.codes.shape == (*lead, dim * bits // 8)
    assert packed.scale.shape == tuple(lead)
    assert packed.shape == x.shape
    assert packed.nbytes == math.prod(lead) * (dim * bits // 8 + 2)
    assert dequantize(packed).dtype == dtype
    assert dequantize(packed, torch.float64).dtype == torch.float64
    assert dequantize(packed).shape == x.shape


def test_requantising_is_stable() -> None:
    """A second trip through the same width changes little: codes move only where rows were at a border."""
    x = gaussian(256, 128)
    for bits in BITS:
        once = dequantize(quantize(x, bits))
        assert sqnr(once, dequantize(quantize(once, bits))) > THEORY[bits] - 0.2


def test_gradients_do_not_leak() -> None:
    packed = quantize(torch.randn(2, 64, requires_grad=True), 4)
    assert not packed.scale.requires_grad


PAGE = torch.zeros(64, 64)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: quantize(PAGE, 5), ValueError, r"bits: expected one of \(2, 3, 4, 8\), got 5"),
        (lambda: quantize(PAGE, 16), ValueError, "bits: expected one of"),
        (lambda: quantize(PAGE, 4, backend="vulkan"), ValueError, r"backend: expected one of .*, got 'vulkan'"),
        (lambda: quantize(PAGE.int(), 4), TypeError, "x: expected a floating-point tensor, got torch.int32"),
        (lambda: quantize(torch.zeros(3, 12), 4), ValueError, r"x: expected .* multiple of 8, got shape \(3, 12\)"),
        (lambda: quantize(torch.tensor(1.0), 4), ValueError, "x: expected"),
        (lambda: quantize(PAGE, 4, format=Format(4, 4, 128)), ValueError, r"x: expected \[..., 128\]"),
        (lambda: quantize(PAGE, 8, format=Format(4, 2, 64)), ValueError, "bits: expected 4 or 2 as in K4V2, got 8"),
        (lambda: dequantize(quantize(PAGE, 4), torch.int8), TypeError, "dtype: expected a floating-point type"),
        (
            lambda: reference.quantize_page(PAGE[:32], PAGE, Format(4, 4, 64)),
            ValueError,
            r"k: expected \[..., 64, 64\]",
        ),
        (lambda: reference.quantize_page(PAGE, PAGE[None], Format(4, 4, 64)), ValueError, "v: expected shape"),
        (lambda: reference.quantize_page(PAGE, PAGE.int(), Format(4, 4, 64)), TypeError, "v: expected a floating"),
        (
            lambda: reference.quantize_page(PAGE, PAGE, Format(4, 4, 64, centre=False), PAGE[0]),
            ValueError,
            "centre: expected None",
        ),
        (lambda: reference.quantize_page(PAGE, PAGE, Format(16, 16, 64)), TypeError, "k: expected a 16-bit type"),
        (
            lambda: reference.dequantize_page(torch.zeros(8, dtype=torch.uint8), Format(4, 4, 64)),
            ValueError,
            r"pages: expected \[..., 4352\] for K4V4",
        ),
        (lambda: reference.dequantize_page(PAGE, Format(4, 4, 64)), TypeError, "pages: expected torch.uint8"),
        (
            lambda: reference.dequantize_page(torch.zeros(16384, dtype=torch.uint8), Format(16, 16, 64)),
            TypeError,
            "dtype: expected the 16-bit type of the rows, got None",
        ),
    ],
)
def test_bad_input_is_named(call, error, message: str) -> None:
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("module", [reference, format_module])
def test_examples_in_docstrings(module) -> None:
    failed, tried = doctest.testmod(module)
    assert tried
    assert not failed


@pytest.mark.parametrize("dim", [8, 24, 64, 80])
def test_row_sum_does_not_depend_on_other_rows(dim: int) -> None:
    """In the same order for one row as for many, and the sum up to rounding."""
    x = torch.randn(50, dim, generator=torch.Generator().manual_seed(dim))
    sums = reference.row_sum(x)
    torch.testing.assert_close(sums.double(), x.double().sum(-1), rtol=1e-5, atol=1e-5)
    assert torch.equal(torch.stack([reference.row_sum(row) for row in x]), sums)
    assert torch.equal(reference.row_sum(x.view(5, 10, dim)).flatten(), sums)
