"""The byte layout against a slow model that walks lanes, and its inverse; formats; rotation; the tables in the docs."""

from __future__ import annotations

import contextlib
import functools
import io
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import HAS_GPU
from kvstrata import layout
from kvstrata.layout import Format, fragments, hadamard, rotate, rotation, rows, scales, unpack_triton
from kvstrata.layout.format import MAX_TIERS, UNIT
from kvstrata.quant.reference import dequantize_page

DEVICE = torch.device("cuda" if HAS_GPU else "cpu")

BITS = [2, 3, 4, 8]
DIMS = list(range(32, 257, 16))
TOKENS = [16, 32, 64]
SIDES = ["k", "v"]
DOCS = Path(__file__).parents[1] / "docs"


def random_codes(*shape: int, bits: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 2**bits, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@functools.cache
def model_words(bits: int, dim: int, tokens: int) -> int:
    fragments = tokens // 16 * (dim // 16)
    if bits == 3:
        return math.ceil(fragments / 2) + math.ceil(fragments / 4)
    return math.ceil(fragments * 8 * bits / 32)


def model_byte(word: int, lane: int, words: int) -> int:
    """The first byte of a lane's word: 16-byte chunks, an 8-byte and a 4-byte rest."""
    chunks, rest = divmod(words, 4)
    if word < 4 * chunks:
        return word // 4 * 512 + lane * 16 + word % 4 * 4
    at, i = chunks * 512, word - 4 * chunks
    if rest == 1:
        return at + lane * 4
    if i < 2:
        return at + lane * 8 + 4 * i
    return at + 256 + lane * 4


def model_pack(codes: np.ndarray, bits: int, side: str) -> np.ndarray:
    """One page, lane by lane and bit field by bit field."""
    tokens, dim = codes.shape
    steps, words = dim // 16, model_words(bits, dim, tokens)
    memory = [0] * (words * 128)

    def put(lane: int, word: int, shift: int, field: int) -> None:
        memory[model_byte(word, lane, words) + shift // 8] += field << shift % 8

    codes = codes.tolist()
    for lane in range(32):
        g, t = lane >> 2, lane & 3
        for tile in range(tokens // 16):
            for step in range(steps):
                j = tile * steps + step
                for r in range(4):
                    for half in range(2):
                        if side == "k":
                            token, d = g + 8 * (r % 2), 16 * step + 2 * t + 8 * (r // 2) + half
                        else:
                            token, d = 2 * t + 8 * (r // 2) + half, 16 * step + g + 8 * (r % 2)
                        code = codes[16 * tile + token][d]
                        if bits == 8:
                            put(lane, 2 * j + r // 2, 16 * (r % 2) + 8 * half, code)
                        elif bits == 4:
                            put(lane, j, 8 * (r // 2) + 4 * (r % 2) + 16 * half, code)
                        else:
                            put(lane, j // 2, 8 * (j % 2) + 2 * r + 16 * half, code & 3)
                        if bits == 3:
                            low_words, q = (tokens // 16 * steps + 1) // 2, j % 4
                            bit = (2 * r + 2 + q % 2 + 8 * (q // 2) + 16 * half) % 32
                            put(lane, low_words + j // 4, bit, code >> 2)
    return np.array(memory, dtype=np.uint8)  # raises where two fields met in a byte and passed 255


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("bits", BITS)
def test_pack_equals_the_model_for_every_head_dim(bits: int, tokens: int) -> None:
    for dim in DIMS:
        for side in SIDES:
            codes = random_codes(tokens, dim, bits=bits, seed=dim)
            packed = fragments.pack(codes, bits, side)
            np.testing.assert_array_equal(packed.numpy(), model_pack(codes.numpy(), bits, side))
            assert torch.equal(fragments.unpack(packed, bits, dim, tokens, side), codes)


@settings(max_examples=300)
@given(
    bits=st.sampled_from(BITS),
    dim=st.sampled_from(DIMS),
    tokens=st.sampled_from(TOKENS),
    side=st.sampled_from(SIDES),
    lead=st.lists(st.integers(0, 3), max_size=2),
    seed=st.integers(0, 1 << 16),
)
def test_unpack_inverts_pack(bits, dim, tokens, side, lead, seed) -> None:
    codes = random_codes(*lead, tokens, dim, bits=bits, seed=seed)
    packed = fragments.pack(codes, bits, side)
    assert packed.shape == (*lead, fragments.code_bytes(bits, dim, tokens))
    assert torch.equal(fragments.unpack(packed, bits, dim, tokens, side), codes)


@settings(max_examples=100)
@given(bits=st.sampled_from(BITS), dim=st.sampled_from(DIMS), side=st.sampled_from(SIDES), seed=st.integers(0, 1 << 16))
def test_every_bit_of_a_full_page_is_a_code(bits, dim, side, seed) -> None:
    packed = random_codes(2, fragments.code_bytes(bits, dim, 64), bits=8, seed=seed)
    assert torch.equal(fragments.pack(fragments.unpack(packed, bits, dim, 64, side), bits, side), packed)


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("bits", BITS)
def test_padding_is_zero_and_ignored(bits: int, tokens: int) -> None:
    for dim in DIMS:
        full = torch.full((tokens, dim), 2**bits - 1, dtype=torch.uint8)
        packed = fragments.pack(full, bits, "k")
        assert np.unpackbits(packed.numpy()).sum() == tokens * dim * bits
        padding = 0xFF - packed
        assert fragments.unpack(padding, bits, dim, tokens, "k").count_nonzero() == 0


def test_strided_input_and_high_bits() -> None:
    wide = random_codes(2, 64, 96, bits=8)
    codes = wide[..., ::3]
    packed = fragments.pack(codes, 3, "v")
    assert torch.equal(packed, fragments.pack(codes.contiguous() & 7, 3, "v"))
    spread = torch.zeros(2, packed.shape[1] + 1, dtype=torch.uint8)
    spread[:, 1:] = packed
    assert torch.equal(fragments.unpack(spread[:, 1:], 3, 32, 64, "v"), codes & 7)


@pytest.mark.parametrize("tokens", TOKENS)
def test_scales_of_a_tile(tokens: int) -> None:
    k, v = torch.randn(2, 3, tokens).half()
    packed = scales.pack_scales(k, v)
    assert packed.shape == (3, 4 * tokens)
    halves = packed.view(torch.float16)
    for tile in range(tokens // 16):
        for g in range(8):
            at = 32 * tile + 4 * g
            token = 16 * tile + g
            want = torch.stack([k[:, token], k[:, token + 8], v[:, token], v[:, token + 8]], 1)
            assert torch.equal(halves[:, at : at + 4], want)
    unpacked = scales.unpack_scales(packed)
    assert torch.equal(unpacked[0], k)
    assert torch.equal(unpacked[1], v)


@triton.jit
def read_page(page_ptr, k_ptr, v_ptr, DIM: tl.constexpr, TOKENS: tl.constexpr, K_BITS: tl.constexpr,
              V_BITS: tl.constexpr, V_OFFSET: tl.constexpr, SCALE_OFFSET: tl.constexpr):  # fmt: skip
    """Rows of a page, as decode and prefill read them."""
    token = tl.arange(0, TOKENS)[:, None]
    dim = tl.arange(0, DIM)[None, :]
    live = (token >= 0) & (dim >= 0)
    words = page_ptr.to(tl.pointer_type(tl.int32))
    scale_ptr = (page_ptr + SCALE_OFFSET).to(tl.pointer_type(tl.float16))
    k = unpack_triton.load_levels(words, token, dim, live, K_BITS, DIM, TOKENS, True)
    v = unpack_triton.load_levels(words + V_OFFSET // 4, token, dim, live, V_BITS, DIM, TOKENS, False)
    tl.store(k_ptr + token * DIM + dim, k * unpack_triton.load_scales(scale_ptr, token, token >= 0, 0))
    tl.store(v_ptr + token * DIM + dim, v * unpack_triton.load_scales(scale_ptr, token, token >= 0, 1))


def read_with_numba(page: torch.Tensor, format: Format) -> list[torch.Tensor]:
    """Rows of a page as the CPU's decode reads them: products of codes with one number that is 1, for each in turn."""
    unpack_numba = pytest.importorskip("kvstrata.layout.unpack_numba", reason="numba is not installed")
    from kvstrata.layout import products_numba

    tokens, dim, page_bytes = format.page_tokens, format.head_dim, page.numpy()
    steps, tiles = dim // 16, tokens // 16
    sides = []
    for side, bits, offset in ((0, format.k_bits, format.k_offset), (1, format.v_bits, format.v_offset)):
        count = fragments.words_per_lane(bits, dim, tokens)
        lanes, above = np.empty((count, 32), np.uint32), (tiles * steps + 1) // 2
        unpack_numba.lanes_of(page_bytes[offset : offset + count * 128].view(np.uint32), count, lanes)
        size = tokens if side else dim
        by, sums = np.empty((size, size // 16, 16), np.float32), np.zeros((size, tokens * dim // size), np.float32)
        products_numba.arrange(np.eye(size, dtype=np.float32), bits, by)
        for i in range(steps if side else tiles):
            walk = (i, steps, tiles) if side else (i * steps, 1, steps)
            products_numba.add_products(lanes, bits, above, *walk, by, 0, sums, 16 * i)
        levels = torch.from_numpy(sums if side else sums.T) - (2**bits - 1) / 2
        scratch, scale = np.empty(2 * tokens, np.uint32), np.empty(tokens, np.float32)
        words, halves = page_bytes.view(np.uint32), page_bytes.view(np.uint16)
        unpack_numba.scales_of(words, halves, format.scale_offset, side, scratch, scale)
        sides.append(levels * torch.from_numpy(scale).unsqueeze(1))
    return sides


@pytest.mark.parametrize(("name", "dim", "tokens"), [("K8V4", 32, 32), ("K3V2", 64, 16), ("K2V3", 32, 16)])
def test_all_readers_agree_on_a_random_page(name: str, dim: int, tokens: int) -> None:
    """Codes of any bits: the reference, numba's loops and Triton's loads find the same values and scales."""
    format, random = Format.parse(name, dim, tokens), torch.Generator().manual_seed(dim + tokens)
    page = torch.randint(256, (format.page_bytes,), dtype=torch.uint8, generator=random)
    page[format.scale_offset :] = torch.rand(2 * tokens, generator=random).half().view(torch.uint8)
    wanted = dequantize_page(page, format)
    found = torch.empty(2, tokens, dim, device=DEVICE)
    read_page[(1,)](page.to(DEVICE), found[0], found[1], DIM=dim, TOKENS=tokens, K_BITS=format.k_bits,
                    V_BITS=format.v_bits, V_OFFSET=format.v_offset, SCALE_OFFSET=format.scale_offset)  # fmt: skip
    for want, by_triton, by_numba in zip(wanted, found.cpu(), read_with_numba(page, format), strict=True):
        assert torch.equal(by_triton, want)
        assert torch.equal(by_numba, want)


def test_constants_are_the_same_in_every_language() -> None:
    text = (Path(layout.__file__).parent / "page.cuh").read_text()
    constants = {name: int(value) for name, value in re.findall(r"constexpr int (\w+) = (\d+);", text)}
    assert constants == {
        "kUnitBytes": UNIT, "kMaxTiers": MAX_TIERS,
        "kTileScaleBytes": scales.BYTES_PER_TOKEN * fragments.TILE_TOKENS,
    }  # fmt: skip
    assert unpack_triton.UNIT.value == UNIT


@settings(max_examples=100)
@given(
    bits=st.sampled_from(BITS),
    dim=st.integers(1, 80).map(lambda n: 8 * n),
    lead=st.lists(st.integers(0, 3), max_size=2),
    seed=st.integers(0, 1 << 16),
)
def test_rows_and_their_inverse(bits, dim, lead, seed) -> None:
    codes = random_codes(*lead, dim, bits=bits, seed=seed)
    packed = rows.pack_rows(codes, bits)
    assert packed.shape == (*lead, dim * bits // 8)
    assert torch.equal(rows.unpack_rows(packed, bits, dim), codes)


def test_rows_byte_by_byte() -> None:
    codes = torch.tensor([1, 2, 3, 0, 7, 6, 5, 4], dtype=torch.uint8)
    assert rows.pack_rows(codes, 8).tolist() == codes.tolist()
    assert rows.pack_rows(codes, 4).tolist() == [0x21, 0x03, 0x67, 0x45]
    assert rows.pack_rows(codes & 3, 2).tolist() == [0b00_11_10_01, 0b00_01_10_11]
    assert rows.pack_rows(codes, 3).tolist() == [0b00_11_10_01, 0b00_01_10_11, 0b11110000]


@pytest.mark.parametrize(
    ("name", "head_dim", "tokens", "expected"),
    [
        ("K16V16", 128, 64, (16384, 16384, 0)),
        ("K32V32", 64, 16, (4096, 4096, 0)),
        ("K8V8", 128, 64, (8192, 8192, 256)),
        ("K4V2", 128, 64, (4096, 2048, 256)),
        ("K3V3", 128, 64, (3072, 3072, 256)),
        ("K3V2", 80, 64, (1920, 1280, 256)),
        ("K2V2", 48, 16, (256, 256, 64)),  # three fragments in two words
        ("K3V4", 48, 16, (384, 384, 64)),  # and one word for their high bits
        ("K3V8", 112, 32, (1408, 3584, 128)),  # 14 fragments: 7 + 4 words
    ],
)
def test_format_sizes_and_offsets_match_the_expected_bytes(name, head_dim, tokens, expected) -> None:
    format = Format.parse(name, head_dim, tokens)
    k_bytes, v_bytes, scale_bytes = expected
    assert (format.k_bytes, format.v_bytes, format.scale_bytes) == expected
    assert (format.k_offset, format.v_offset, format.scale_offset) == (0, k_bytes, k_bytes + v_bytes)
    assert format.page_bytes == k_bytes + v_bytes + scale_bytes
    assert format.bytes_per_token * tokens == format.page_bytes
    assert format.name == name


def test_page_bytes_of_every_format_match_the_model() -> None:
    for k_bits in BITS:
        for v_bits in BITS:
            for dim in DIMS:
                full = Format(k_bits, v_bits, dim)
                assert full.bytes_per_token == dim * (k_bits + v_bits) // 8 + 4
                for tokens in TOKENS:
                    format = Format(k_bits, v_bits, dim, tokens)
                    words = model_words(k_bits, dim, tokens) + model_words(v_bits, dim, tokens)
                    assert format.page_bytes == 128 * words + 4 * tokens
                    assert format.page_bytes % 64 == 0
                    assert format.page_bytes == format.bytes_per_token * tokens
                    assert format.bytes_per_token >= full.bytes_per_token


def test_formats_compare_and_hash_by_value() -> None:
    assert Format(4, 2, 128) == Format.parse("K4V2", 128)
    assert len({Format(4, 2, 128), Format.parse("K4V2", 128), Format(4, 2, 128, rotate=False)}) == 2
    plain = Format(16, 16, 64)
    assert plain.plain
    assert not plain.rotate
    assert not plain.centre
    assert plain.bits_per_value == 16


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Format(5, 4, 64), r"k_bits: expected one of \(2, 3, 4, 8, 16, 32\), got 5"),
        (lambda: Format(4, 1, 64), r"v_bits: expected one of .*, got 1"),
        (lambda: Format(4, True, 64), r"v_bits: expected one of .*, got True"),
        (lambda: Format(16, 4, 64), r"v_bits: expected 16 as k_bits, got 4"),
        (lambda: Format(4, 4, 72), r"head_dim: expected a multiple of 16 from 32 to 256, got 72"),
        (lambda: Format(4, 4, 16), r"head_dim: .* got 16"),
        (lambda: Format(4, 4, 272), r"head_dim: .* got 272"),
        (lambda: Format(4, 4, 64.0), r"head_dim: .* got 64.0"),
        (lambda: Format(4, 4, 64, 48), r"page_tokens: expected one of \(16, 32, 64\), got 48"),
        (lambda: Format(4, 4, 64, rotate=1), r"rotate: expected True or False, got 1"),
        (lambda: Format.parse("K04V4", 64), r"name: expected K<bits>V<bits> such as 'K4V2', got 'K04V4'"),
        (lambda: Format.parse("V4K2", 64), r"name: expected K<bits>V<bits> such as 'K4V2', got 'V4K2'"),
        (lambda: Format.parse(42, 64), r"name: expected .*, got 42"),
        (lambda: Format.parse("K6V4", 64), r"k_bits: expected one of .*, got 6"),
        (lambda: fragments.pack(torch.zeros(64, 64, dtype=torch.uint8), 5, "k"), "bits: expected"),
        (lambda: fragments.pack(torch.zeros(64, dtype=torch.uint8), 4, "k"), "codes: expected"),
        (lambda: fragments.pack(torch.zeros(64, 64, dtype=torch.uint8), 4, "q"), "side: expected 'k' or 'v', got 'q'"),
        (lambda: fragments.pack(torch.zeros(48, 64, dtype=torch.uint8), 4, "k"), "page_tokens: expected"),
        (
            lambda: fragments.unpack(torch.zeros(3, dtype=torch.uint8), 4, 64, 64, "k"),
            r"packed: expected \[..., 2048\]",
        ),
        (lambda: rows.pack_rows(torch.zeros(12, dtype=torch.uint8), 4), "dim: expected a positive multiple of 8"),
        (lambda: rows.unpack_rows(torch.zeros(5, dtype=torch.uint8), 4, 16), "packed: expected 8 bytes per row, got 5"),
        (lambda: scales.pack_scales(torch.zeros(16).half(), torch.zeros(32).half()), "v: expected shape"),
        (lambda: scales.unpack_scales(torch.zeros(65, dtype=torch.uint8)), r"packed: expected \[..., 64\]"),
        (lambda: rotation.block_of(0), "dim: expected a positive number, got 0"),
    ],
)
def test_bad_values_are_named(make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: fragments.pack(torch.zeros(64, 64), 4, "k"), "codes: expected torch.uint8, got torch.float32"),
        (lambda: fragments.unpack(torch.zeros(2048), 4, 64, 64, "k"), "packed: expected torch.uint8"),
        (lambda: rows.pack_rows(torch.zeros(16), 4), "codes: expected torch.uint8"),
        (lambda: rows.unpack_rows(torch.zeros(8), 4, 16), "packed: expected torch.uint8"),
        (lambda: scales.pack_scales(torch.zeros(16), torch.zeros(16)), "k: expected torch.float16"),
        (lambda: scales.unpack_scales(torch.zeros(64)), "packed: expected torch.uint8"),
        (lambda: rotate(torch.zeros(64, dtype=torch.int32)), "x: expected a floating-point tensor"),
    ],
)
def test_bad_dtypes_are_named(make, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        make()


@pytest.mark.parametrize("dim", DIMS)
def test_rotation_is_orthonormal_and_its_own_inverse(dim: int) -> None:
    h = hadamard(dim)
    torch.testing.assert_close(h @ h.T, torch.eye(dim), rtol=0, atol=1e-6)
    assert torch.equal(h, h.T)
    x = torch.randn(5, 3, dim)
    torch.testing.assert_close(rotate(x), x @ h, rtol=0, atol=1e-5)
    torch.testing.assert_close(rotate(rotate(x)), x, rtol=0, atol=1e-5)
    torch.testing.assert_close(rotate(x).norm(dim=-1), x.norm(dim=-1))


def test_blocks_of_the_rotation() -> None:
    assert [rotation.block_of(dim) for dim in (64, 80, 96, 112, 128, 192, 256)] == [64, 16, 32, 16, 128, 64, 256]
    h = hadamard(96)
    assert torch.equal(h.abs() > 0, torch.block_diag(*[torch.ones(32, 32)] * 3) > 0)


def test_rotation_in_the_order_it_promises() -> None:
    """Bit for bit: butterflies one by one in float32, distance 1 first, the factor last."""
    x = np.random.default_rng(0).standard_normal(96).astype(np.float32)
    y, distance = x.copy(), 1
    while distance < 32:
        for i in range(96):
            if not i & distance:
                y[i], y[i + distance] = y[i] + y[i + distance], y[i] - y[i + distance]
        distance *= 2
    y *= np.float32(32**-0.5)
    np.testing.assert_array_equal(rotate(torch.from_numpy(x)).numpy(), y)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_rotation_keeps_the_dtype(dtype: torch.dtype) -> None:
    x = torch.randn(4, 128, dtype=dtype)
    assert rotate(x).dtype == dtype
    error = (rotate(x).double() - x.double() @ hadamard(128).double()).abs().max()
    assert error < 8 * torch.finfo(dtype).eps + 1e-6


def blocks_with_output() -> list[tuple[str, str]]:
    """The Python blocks of docs/formats.md, each with the table that follows it."""
    text = (DOCS / "formats.md").read_text()
    return re.findall(r"```python\n(.*?)```\n\n((?:\|[^\n]*\n)+)", text, re.DOTALL)


def test_the_docs_have_their_tables() -> None:
    text = (DOCS / "formats.md").read_text()
    assert len(blocks_with_output()) == text.count("```python") == 2


@pytest.mark.parametrize("index", range(2))
def test_tables_in_the_docs_are_what_the_code_prints(index: int) -> None:
    code, table = blocks_with_output()[index]
    printed = io.StringIO()
    with torch.random.fork_rng(), contextlib.redirect_stdout(printed):
        exec(compile(code, f"formats.md block {index}", "exec"), {})
    if "manual_seed" not in code:
        assert printed.getvalue() == table
        return
    # Random rows: numbers in decibels, and sums differ by platform in their last digits.
    number = r"\d+\.\d"
    assert re.sub(number, "#", printed.getvalue()) == re.sub(number, "#", table)
    got, want = ([float(n) for n in re.findall(number, text)] for text in (printed.getvalue(), table))
    assert got == pytest.approx(want, abs=0.11)
