"""Codes of many pages at once, as float32, with few passes over memory: the hot spot of the CPU path.

Pages are transposed so that the same word of all pages of a bucket is one row, ``[words, pages]``. Every step is then a
pass over long rows, and reordering words only selects rows:

    pages [G, M, words] ──turn──▶ [G, words, M] ──select rows──▶ [G, .., M] ──shift, mask──▶ codes [G, dims, tokens, M]

Shifts and masks are cheapest if rows with equal shifts are adjacent, so dims and tokens have their own order. With the
registers r, halves and lanes 4 g + t of ``layout/fragments.py``:

            dims                                tokens
    K       r // 2, half, step, t               r % 2, tile, g
    V       r % 2, step, g                      half, r // 2, tile, t

`dims` and `v_order` bring the query, the output and the weights into that order. For 3 bits the high bits are first
put above their low ones: fields of registers 0, 2 and of 1, 3 go to separate words, where three bits fit.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from . import fragments
from .format import Format
from .fragments import STEP_DIMS, TILE_TOKENS, Side

# Masks of registers 0, 2 (even) and 1, 3 (odd), both halves: low bits, and the high bit directly above.
LOW_EVEN, LOW_ODD, HIGH_EVEN, HIGH_ODD = 0x00330033, 0x00CC00CC, 0x00440044, 0x01100110


class _High(NamedTuple):
    """Shifts and masks that put the high plane of 3-bit codes above the low one; all but ``rows`` broadcast."""

    rows: torch.Tensor  # int64, flat: words of the high plane
    turn: torch.Tensor  # how far they are rotated right,
    back: torch.Tensor  # or to the left,
    kept: torch.Tensor  # and the bits that stay in the word
    low_shift: torch.Tensor  # shift that brings a fragment of the low plane to bit 0
    low_mask: torch.Tensor  # along r % 2
    high_mask: torch.Tensor


class _Plan(NamedTuple):
    """Index and shift tensors for one side of a format; axes as above, of size 1 if nothing changes along them."""

    full: tuple[int, ...]  # all axes
    shape: tuple[int, ...]  # of ``rows``
    joined: tuple[int, ...]  # shape of the words that fields are taken from; for 3 bits `_join` creates them
    rows: torch.Tensor  # int64, flat: which word of the page
    shift: torch.Tensor  # int32, brings a field of the word to bit 0
    mask: int
    high: _High | None  # 3 bit


def _in_order(x: torch.Tensor, side: Side) -> torch.Tensor:
    """Reorder a table ``[token, dim]`` by the axes above."""
    tiles, steps = x.shape[0] // TILE_TOKENS, x.shape[1] // STEP_DIMS
    if side == "k":  # tile, r % 2, g | step, r // 2, t, half
        return x.view(tiles, 2, 8, steps, 2, 4, 2).permute(4, 6, 3, 5, 1, 0, 2)
    # tile, r // 2, t, half | step, r % 2, g
    return x.view(tiles, 2, 4, 2, steps, 2, 8).permute(5, 4, 6, 3, 1, 0, 2)


def _narrow(x: torch.Tensor) -> torch.Tensor:
    """Reduce axes along which nothing changes to size 1."""
    for axis in range(x.dim()):
        first = x.narrow(axis, 0, 1)
        x = first if bool((x == first).all()) else x
    return x


@functools.lru_cache(maxsize=256)
def _plan(bits: int, offset: int, head_dim: int, page_tokens: int, side: Side, device: torch.device) -> _Plan:
    tables = fragments.places(bits, head_dim, page_tokens, side)
    words = [_in_order((offset + byte) // 4, side) for byte, _ in tables]
    shifts = [_in_order(byte % 4 * 8 + bit, side) for byte, bit in tables]
    rows, shift, high = _narrow(words[0]), shifts[0], None
    joined = tuple(rows.shape)

    def ints(*tensors: torch.Tensor) -> list[torch.Tensor]:
        return [x.to(device, torch.int32).unsqueeze(-1) for x in tensors]

    if bits == 3:
        odd_axis = 4 if side == "k" else 0
        axes = [torch.arange(n, device="cpu") for n in (page_tokens, head_dim)]
        token, dim = torch.meshgrid(*axes, indexing="ij")
        far, near = (token, dim) if side == "k" else (dim, token)  # r % 2 picks 8 of one, r // 2 and half of the other
        base = _in_order(2 * (far // 8 % 2 + 2 * (near // 8 % 2)) + 16 * (near % 2), side)  # 2 r + 16 half
        turn = _narrow((shifts[1] - base - 2) % 32)
        kept = 2 ** (32 - turn.clamp(min=1)) - 1  # for a rotation by 0 the sign bit does not matter
        along = [1] * 7
        along[odd_axis] = 2
        masks = [torch.tensor(m, device="cpu").view(along) for m in ((LOW_EVEN, LOW_ODD), (HIGH_EVEN, HIGH_ODD))]
        high_rows = _narrow(words[1]).expand(rows.shape).flatten().to(device)
        low_shift = _narrow(shift - base)
        high = _High(high_rows, *ints(turn, 32 - turn, kept, low_shift, *masks))
        joined = tuple(torch.broadcast_shapes(rows.shape, turn.shape, low_shift.shape, tuple(along)))
        shift = base
    return _Plan(
        tuple(words[0].shape),
        tuple(rows.shape),
        joined,
        rows.flatten().to(device),
        ints(_narrow(shift))[0],
        2**bits - 1,
        high,
    )


def turn(pages: torch.Tensor, format: Format) -> torch.Tensor:
    """Transpose the codes of ``pages`` uint8 ``[G, M, bytes]`` to int32 ``[G, words, M]``."""
    return pages[:, :, : format.scale_offset].view(torch.int32).transpose(1, 2).contiguous()


def _select(words: torch.Tensor, rows: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Select rows of ``words [G, n, M]`` into ``[G, *shape, M]``."""
    return words.index_select(1, rows).view(words.shape[0], *shape, words.shape[2])


def _join(plan: _Plan, low: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    """Join the two planes of 3-bit codes into fields of three bits, at bit 2 r + 16 half, with even and odd r apart."""
    assert plan.high is not None
    rows, turn, back, kept, low_shift, low_mask, high_mask = plan.high
    word = _select(words, rows, plan.shape)
    high = (word >> turn).bitwise_and_(kept)  # a rotation: bits that the sign filled are cleared,
    high.bitwise_or_(word << back)  # bits shifted out are inserted (none for a rotation by 0: back is 32)
    joined = torch.empty(words.shape[0], *plan.joined, words.shape[2], dtype=torch.int32, device=words.device)
    torch.bitwise_and(low >> low_shift, low_mask, out=joined)
    return joined.bitwise_or_(torch.bitwise_and(high, high_mask, out=torch.empty_like(joined)))


def unpack(words: torch.Tensor, format: Format, side: Side) -> torch.Tensor:
    """Codes of one side of pages that `turn` transposed: float32 ``[G, D, P * M]`` in the order above."""
    bits, offset = (format.k_bits, format.k_offset) if side == "k" else (format.v_bits, format.v_offset)
    plan = _plan(bits, offset, format.head_dim, format.page_tokens, side, words.device)
    picked = _select(words, plan.rows, plan.shape)
    if bits == 3:
        picked = _join(plan, picked, words)
    groups, _, pages = words.shape
    # A plain broadcast would choose its own memory order; this one suits what follows.
    codes = torch.empty(groups, *plan.full, pages, dtype=torch.int32, device=words.device)
    torch.bitwise_right_shift(picked, plan.shift, out=codes).bitwise_and_(plan.mask)
    return codes.float().view(groups, format.head_dim, format.page_tokens * pages)


@functools.lru_cache(maxsize=64)
def dims(head_dim: int, side: Side) -> torch.Tensor:
    """Dim of each row of codes that `unpack` returns."""
    x = torch.arange(head_dim, device="cpu")
    if side == "k":
        return x.view(-1, 2, 4, 2).permute(1, 3, 0, 2).flatten()
    return x.view(-1, 2, 8).permute(1, 0, 2).flatten()


def k_order(x: torch.Tensor) -> torch.Tensor:
    """Reorder ``[.., M, P]`` from token order to ``[.., P * M]`` in the order of K's codes."""
    *lead, pages, tokens = x.shape
    tiled = x.reshape(*lead, pages, tokens // TILE_TOKENS, 2, 8)
    return tiled.movedim((-2, -3, -1, -4), (-4, -3, -2, -1)).reshape(*lead, tokens * pages)


def v_order(x: torch.Tensor, pages: int) -> torch.Tensor:
    """Reorder ``[.., P * M]`` from the order of K's codes to that of V's."""
    *lead, n = x.shape
    split = x.view(*lead, 2, n // pages // TILE_TOKENS, 4, 2, pages)  # r % 2 of K is r // 2 of V; g is 2 t + half
    return split.movedim(-2, -5).reshape(*lead, n)
