"""Order of the codes in a page: the words that a lane loads are its operands of ``mma.m16n8k16``.

A page is split into tiles of 16 tokens and steps of 16 dims. In every tile and step each of 32 lanes (g = lane // 4,
t = lane % 4) owns eight values, numbered by register r = 0..3 and half = 0..1:

            token in tile                dim in step
    K       g + 8 (r % 2)                2 t + 8 (r // 2) + half
    V       2 t + 8 (r // 2) + half      g + 8 (r % 2)

Over the page a lane has W 32-bit words of codes. In memory these are 16-byte chunks, lane by lane, then, for the rest
of W / 4, one 8-byte and one 4-byte chunk per lane: every load of a warp is contiguous.

    [lane 0: words 0-3][lane 1: words 0-3] .. [lane 31] [lane 0: words 4-7] .. | [8-byte rest] .. | [4-byte rest] ..

`_place` defines the word and shift of a code; everything else follows from it through index tables.
"""

from __future__ import annotations

import functools
from typing import Literal

import torch

Side = Literal["k", "v"]

BITS = (2, 3, 4, 8)
PAGE_TOKENS = (16, 32, 64)
TILE_TOKENS = 16
STEP_DIMS = 16
LANES = 32


def check_bits(bits: int, name: str = "bits") -> int:
    if type(bits) is not int or bits not in BITS:
        raise ValueError(f"{name}: expected one of {BITS}, got {bits!r}")
    return bits


def check_head_dim(head_dim: int) -> int:
    if type(head_dim) is not int or head_dim % STEP_DIMS or not 32 <= head_dim <= 256:
        raise ValueError(f"head_dim: expected a multiple of {STEP_DIMS} from 32 to 256, got {head_dim!r}")
    return head_dim


def check_page_tokens(page_tokens: int) -> int:
    if type(page_tokens) is not int or page_tokens not in PAGE_TOKENS:
        raise ValueError(f"page_tokens: expected one of {PAGE_TOKENS}, got {page_tokens!r}")
    return page_tokens


def _check_side(side: str) -> None:
    if side not in ("k", "v"):
        raise ValueError(f"side: expected 'k' or 'v', got {side!r}")


def planes(bits: int) -> tuple[tuple[int, int], ...]:
    """(width, lowest bit) of the fields that store a code: 3 bit has a 2-bit and a 1-bit plane."""
    return ((2, 0), (1, 2)) if bits == 3 else ((bits, 0),)


def words_per_lane(bits: int, head_dim: int, page_tokens: int) -> int:
    """32-bit words of one side's codes per lane, including padding; ``head_dim / 16 * bits`` for 64 tokens."""
    check_bits(bits)
    fragments = check_head_dim(head_dim) // STEP_DIMS * (check_page_tokens(page_tokens) // TILE_TOKENS)
    return sum(-(-fragments * width // 4) for width, _ in planes(bits))


def code_bytes(bits: int, head_dim: int, page_tokens: int) -> int:
    """Bytes of one side's codes in a page, including padding."""
    return LANES * 4 * words_per_lane(bits, head_dim, page_tokens)


def _place(
    width: int, fragments: int, j: torch.Tensor, r: torch.Tensor, half: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Word and shift of a lane's field of ``width`` bits in fragment ``j = tile * steps + step``."""
    if width == 8:
        return 2 * j + r // 2, 16 * (r % 2) + 8 * half
    if width == 4:
        return j, 8 * (r // 2) + 4 * (r % 2) + 16 * half
    if width == 2:
        return j // 2, 8 * (j % 2) + 2 * r + 16 * half
    # High bits of 3-bit codes, which follow the words of the low bits.
    q = j % 4
    return (fragments + 1) // 2 + j // 4, (2 * r + 2 + q % 2 + 8 * (q // 2) + 16 * half) % 32


def _address(word: torch.Tensor, lane: torch.Tensor, words: int) -> torch.Tensor:
    """Byte at which a lane's word begins."""
    whole, rest = words // 4 * 4, words % 4
    base = whole * LANES * 4
    chunk16 = word // 4 * (LANES * 16) + lane * 16 + word % 4 * 4
    chunk8 = base + lane * 8 + (word - whole) * 4
    chunk4 = base + (LANES * 8 if rest == 3 else 0) + lane * 4
    in_pair = (word - whole < 2) & (rest >= 2)
    return torch.where(word < whole, chunk16, torch.where(in_pair, chunk8, chunk4))


@functools.lru_cache(maxsize=1024)
def places(bits: int, head_dim: int, page_tokens: int, side: Side) -> tuple[tuple[torch.Tensor, torch.Tensor], ...]:
    """For each plane of the codes: byte (int64) and bit within it (uint8) of value ``[token, dim]``."""
    _check_side(side)
    words = words_per_lane(bits, head_dim, page_tokens)
    tiles, steps = page_tokens // TILE_TOKENS, head_dim // STEP_DIMS
    axes = [torch.arange(n, device="cpu") for n in (LANES, tiles, steps, 4, 2)]
    lane, tile, step, r, half = (axis.flatten() for axis in torch.meshgrid(*axes, indexing="ij"))
    long, short = lane // 4 + 8 * (r % 2), 2 * (lane % 4) + 8 * (r // 2) + half
    in_tile, in_step = (long, short) if side == "k" else (short, long)
    value = (TILE_TOKENS * tile + in_tile) * head_dim + STEP_DIMS * step + in_step
    tables = []
    for width, _ in planes(bits):
        word, shift = _place(width, tiles * steps, tile * steps + step, r, half)
        byte, bit = torch.empty_like(value), torch.empty_like(value, dtype=torch.uint8)
        byte[value] = _address(word, lane, words) + shift // 8
        bit[value] = (shift % 8).to(torch.uint8)
        shape = page_tokens, head_dim
        tables.append((byte.view(shape), bit.view(shape)))
    return tuple(tables)


@functools.lru_cache(maxsize=1024)
def _gathers(
    bits: int, head_dim: int, page_tokens: int, side: Side, device: torch.device
) -> tuple[tuple[torch.Tensor, torch.Tensor], ...]:
    """``places`` flattened, on a device."""
    tables = places(bits, head_dim, page_tokens, side)
    return tuple((byte.flatten().to(device), bit.flatten().to(device)) for byte, bit in tables)


@functools.lru_cache(maxsize=1024)
def sources(bits: int, head_dim: int, page_tokens: int, side: Side, device: torch.device) -> tuple[torch.Tensor, ...]:
    """For each plane int32 ``[8 / width, bytes]``: the value whose field is there, or P * D for none."""
    values = page_tokens * head_dim
    tables = []
    for (width, _), (byte, bit) in zip(planes(bits), places(bits, head_dim, page_tokens, side), strict=True):
        source = torch.full((8 // width, code_bytes(bits, head_dim, page_tokens)), values, device="cpu")
        source[bit.flatten().long() // width, byte.flatten()] = torch.arange(values, device="cpu")
        tables.append(source.int().to(device))
    return tuple(tables)


def pack(codes: torch.Tensor, bits: int, side: Side) -> torch.Tensor:
    """Pack uint8 codes ``[..., P, D]`` below ``2 ** bits`` into the codes of pages, uint8 ``[..., bytes]``.

    Bits of padding are zero; bits of a code above ``bits`` are dropped.
    """
    if codes.dtype != torch.uint8:
        raise TypeError(f"codes: expected torch.uint8, got {codes.dtype}")
    if codes.dim() < 2:
        raise ValueError(f"codes: expected [..., page_tokens, head_dim], got shape {tuple(codes.shape)}")
    *lead, page_tokens, head_dim = codes.shape
    size = code_bytes(bits, head_dim, page_tokens)
    flat = codes.reshape(-1, page_tokens * head_dim)
    flat = torch.cat([flat, flat.new_zeros(flat.shape[0], 1)], 1)  # read by padding
    packed = flat.new_zeros(flat.shape[0], size)
    tables = sources(bits, head_dim, page_tokens, side, codes.device)
    for (width, low), table in zip(planes(bits), tables, strict=True):
        fields = (flat >> low) & (2**width - 1)
        for i, source in enumerate(table):
            packed |= fields[:, source] << (i * width)
    return packed.reshape(*lead, size)


def unpack(packed: torch.Tensor, bits: int, head_dim: int, page_tokens: int, side: Side) -> torch.Tensor:
    """Inverse of `pack`: uint8 ``[..., bytes]`` -> uint8 codes ``[..., page_tokens, head_dim]``."""
    size = code_bytes(bits, head_dim, page_tokens)
    if packed.dtype != torch.uint8:
        raise TypeError(f"packed: expected torch.uint8, got {packed.dtype}")
    if packed.dim() < 1 or packed.shape[-1] != size:
        raise ValueError(f"packed: expected [..., {size}], got shape {tuple(packed.shape)}")
    flat = packed.reshape(-1, size)
    codes = flat.new_zeros(flat.shape[0], page_tokens * head_dim)
    tables = _gathers(bits, head_dim, page_tokens, side, packed.device)
    for (width, low), (byte, bit) in zip(planes(bits), tables, strict=True):
        codes |= ((flat[:, byte] >> bit) & (2**width - 1)) << low
    return codes.reshape(*packed.shape[:-1], page_tokens, head_dim)
