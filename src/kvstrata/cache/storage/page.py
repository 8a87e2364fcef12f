"""Tokens of a page: offsets of their codes, scales, position and importance; how to read, write and re-encode them.

A page of the pool is the run of bytes that `layout.Format` describes, followed by the cache's metadata of its tokens:

    [K codes][V codes][scales]  or  [K rows][V rows]      page_bytes, what attention streams
    [positions, int16 or int32][importance, float32]      at position_offset and importance_offset

so both are moved, shared and copied together. The functions here work on copies of whole pages ``[n, stride]``. Writing
a code changes bits of a byte that other tokens may share: differences of disjoint fields are added, which needs no
order and no second copy of the page.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from importlib.util import find_spec
from types import ModuleType
from typing import NamedTuple

import torch

from kvstrata.layout import fragments, scales
from kvstrata.layout.format import UNIT, Format
from kvstrata.quant import reference as quant

Table = tuple[tuple[torch.Tensor, torch.Tensor], ...]
COMPILED_ROWS = 64  # from this many rows on, the loops of page_numba.py are faster than torch


@lru_cache(maxsize=1)
def _numba() -> ModuleType | None:
    if find_spec("numba") is None:
        return None
    from . import page_numba

    return page_numba


def loops_for(x: torch.Tensor) -> ModuleType | None:
    """Compiled loops for rows ``x [n, D]``; None to use torch."""
    return _numba() if x.device.type == "cpu" and len(x) >= COMPILED_ROWS else None


class NewRows(NamedTuple):
    """Plain rows of new tokens ``[n, D]``."""

    k: torch.Tensor
    v: torch.Tensor


@dataclass(frozen=True)
class Rows:
    """``n`` tokens outside a page: values (plain) or codes with scales, positions, importance."""

    k: torch.Tensor  # [n, D]
    v: torch.Tensor
    k_scale: torch.Tensor | None  # fp16 [n]
    v_scale: torch.Tensor | None
    position: torch.Tensor  # int64 [n]
    importance: torch.Tensor  # float32 [n]

    def __getitem__(self, index: torch.Tensor) -> Rows:
        k_scale = None if self.k_scale is None else self.k_scale[index]
        v_scale = None if self.v_scale is None else self.v_scale[index]
        return Rows(self.k[index], self.v[index], k_scale, v_scale, self.position[index], self.importance[index])


@dataclass(frozen=True, eq=False)
class PageFormat:
    """Pages of one tier: a format, and the positions and importance that follow the codes."""

    format: Format
    dtype: torch.dtype  # dtype of plain rows, and of decoded rows
    position_dtype: torch.dtype
    keeps_importance: bool
    device: torch.device

    @cached_property
    def row_bytes(self) -> int:
        """Bytes of K, or of V, of one plain token."""
        return self.format.head_dim * self.dtype.itemsize

    @cached_property
    def v_offset(self) -> int:
        return self.format.v_offset

    @cached_property
    def position_offset(self) -> int:
        return self.format.page_bytes

    @cached_property
    def importance_offset(self) -> int:
        """-1 if no importance is kept."""
        offset = self.position_offset + self.format.page_tokens * self.position_dtype.itemsize
        return offset if self.keeps_importance else -1

    @cached_property
    def stride(self) -> int:
        per_token = self.position_dtype.itemsize + (4 if self.keeps_importance else 0)
        return -(-(self.format.page_bytes + per_token * self.format.page_tokens) // UNIT) * UNIT

    @cached_property
    def _codes(self) -> tuple[tuple[Table, int, int], ...]:
        """For K and V: byte and bit of every value in each plane, the offset of the codes, the width."""
        f = self.format
        sides: list[tuple[Table, int, int]] = []
        widths: tuple[tuple[fragments.Side, int, int], ...] = (
            ("k", f.k_bits, f.k_offset),
            ("v", f.v_bits, f.v_offset),
        )
        for side, bits, offset in widths:
            tables = fragments.places(bits, f.head_dim, f.page_tokens, side)
            sides.append((tuple((a.to(self.device), b.to(self.device)) for a, b in tables), offset, bits))
        return tuple(sides)

    @cached_property
    def _in_order(self) -> torch.Tensor:
        return torch.arange(self.format.page_tokens, device=self.device)

    @cached_property
    def _scale_index(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Index of each token's K and V scale among those of a page; from `layout.scales`."""
        numbers = torch.arange(2 * self.format.page_tokens, dtype=torch.int16)
        k, v = scales.unpack_scales(numbers.view(torch.uint8))
        return k.view(torch.int16).long().to(self.device), v.view(torch.int16).long().to(self.device)

    def plain_rows(self, pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Views ``[n, P, D]`` of K and V in plain pages."""
        f = self.format
        shape = (f.page_tokens, f.head_dim)
        k = pages[:, : f.k_bytes].view(self.dtype).unflatten(1, shape)
        v = pages[:, f.v_offset : f.v_offset + f.v_bytes].view(self.dtype).unflatten(1, shape)
        return k, v

    def _scales(self, pages: torch.Tensor) -> torch.Tensor:
        f = self.format
        return pages[:, f.scale_offset : f.scale_offset + f.scale_bytes].view(torch.float16)

    def positions(self, pages: torch.Tensor, start: int = 0) -> torch.Tensor:
        """View ``[n, P]`` of the positions; ``pages`` begin at byte ``start`` of each page."""
        first = self.position_offset - start
        return pages[:, first : first + self.format.page_tokens * self.position_dtype.itemsize].view(
            self.position_dtype
        )

    def importance(self, pages: torch.Tensor, start: int = 0) -> torch.Tensor:
        """View ``[n, P]`` of the importance; zeros if none is kept."""
        if not self.keeps_importance:
            return torch.zeros(pages.shape[0], self.format.page_tokens, dtype=torch.float32, device=self.device)
        first = self.importance_offset - start
        return pages[:, first : first + 4 * self.format.page_tokens].view(torch.float32)

    def read(self, pages: torch.Tensor, page: torch.Tensor, slot: torch.Tensor) -> Rows:
        """Tokens ``slot[i]`` of ``pages[page[i]]``."""
        position = self.positions(pages)[page, slot].long()
        importance = self.importance(pages)[page, slot]
        if self.format.plain:
            k, v = self.plain_rows(pages)
            return Rows(k[page, slot], v[page, slot], None, None, position, importance)
        sides: list[torch.Tensor] = []
        for tables, offset, bits in self._codes:
            codes = torch.zeros(len(page), self.format.head_dim, dtype=torch.uint8, device=self.device)
            loops = loops_for(codes)
            for (width, low), (byte, bit) in zip(fragments.planes(bits), tables, strict=True):
                if loops is not None:
                    where = (x.contiguous().numpy() for x in (page, slot, byte, bit))
                    flat = pages.contiguous().view(-1).numpy()
                    loops.read_fields(flat, self.stride, offset, *where, width, low, codes.numpy())
                    continue
                field = pages[page.unsqueeze(1), offset + byte[slot]] >> bit[slot]
                codes |= (field & (2**width - 1)) << low
            sides.append(codes)
        k_index, v_index = self._scale_index
        both = self._scales(pages)
        return Rows(sides[0], sides[1], both[page, k_index[slot]], both[page, v_index[slot]], position, importance)

    def write(self, pages: torch.Tensor, page: torch.Tensor, slot: torch.Tensor, rows: Rows) -> None:
        """Inverse of `read`, in place; no token may appear twice."""
        flat, loops = pages.view(-1), loops_for(rows.k)
        position = rows.position.to(self.position_dtype)
        if loops is None:
            self.positions(pages)[page, slot] = position
            if self.keeps_importance:
                self.importance(pages)[page, slot] = rows.importance
        else:
            loops.write_numbers(pages, self.position_offset, page, slot, self._in_order, position)
            if self.keeps_importance:
                loops.write_numbers(pages, self.importance_offset, page, slot, self._in_order, rows.importance)
        if self.format.plain:
            k, v = self.plain_rows(pages)
            k[page, slot], v[page, slot] = rows.k, rows.v
            return
        assert rows.k_scale is not None
        assert rows.v_scale is not None
        sides: tuple[fragments.Side, ...] = ("k", "v")
        for side, (tables, offset, bits), codes in zip(sides, self._codes, (rows.k, rows.v), strict=True):
            if loops is not None:
                loops.write_codes(pages, offset, page, slot, codes, self.format.page_tokens, bits, side)
                continue
            for (width, low), (byte, bit) in zip(fragments.planes(bits), tables, strict=True):
                index, shift, mask = page.unsqueeze(1) * self.stride + offset + byte[slot], bit[slot], 2**width - 1
                change = ((codes >> low) & mask) - ((flat[index] >> shift) & mask)  # uint8, modulo 256
                flat.index_add_(0, index.flatten(), (change << shift).flatten())
        both = self._scales(pages)
        for order, own in zip(self._scale_index, (rows.k_scale, rows.v_scale), strict=True):
            if loops is None:
                both[page, order[slot]] = own
            else:
                loops.write_numbers(pages, self.format.scale_offset, page, slot, order, own)

    def encode(
        self, rows: Rows, source: PageFormat, centre: torch.Tensor | None, direction: torch.Tensor | None = None
    ) -> Rows:
        """Encode tokens from pages of ``source`` for pages of this format; ``centre [n, D]`` is for plain sources.

        From codes to codes nothing is rotated or centred again, and a side whose width does not change keeps its codes.
        ``direction`` int8 ``[n, D]`` is that of K, see `quant.reference.aim`, for sources of either kind.
        """
        assert not self.format.plain
        sides: list[tuple[torch.Tensor, torch.Tensor]] = []
        old, new = source.format, self.format
        for x, scale, was, bits, gain in (
            (rows.k, rows.k_scale, old.k_bits, new.k_bits, quant.K_GAIN),
            (rows.v, rows.v_scale, old.v_bits, new.v_bits, quant.V_GAIN),
        ):
            loops, own_direction = loops_for(x) or quant, None if sides else direction
            if scale is None:
                own_centre = centre if new.centre and not sides else None
                sides.append(loops.quantize_plain(x, own_centre, bits, new.rotate, gain[bits], own_direction))
            elif was == bits:
                sides.append((x, scale))
            else:
                sides.append(loops.quantize_coded(x, scale, was, bits, new.rotate, gain[bits], own_direction))
        (k, k_scale), (v, v_scale) = sides
        return Rows(k, v, k_scale, v_scale, rows.position, rows.importance)

    def encode_new(
        self,
        new: NewRows,
        row: torch.Tensor,
        centre: torch.Tensor,
        head_cache: torch.Tensor,
        direction: torch.Tensor | None = None,
    ) -> tuple[tuple[torch.Tensor, torch.Tensor], ...]:
        """Codes and scales of K and of V of the new rows ``row[i]``, as `encode` computes them.

        ``centre [m, D]``: that of row i is ``centre[head_cache[i]]``; likewise ``direction``, int8.
        """
        f, loops = self.format, loops_for(row)
        if loops is None:
            k, own = new.k.index_select(0, row), centre.index_select(0, head_cache) if f.centre else None
            aim = None if direction is None else direction.index_select(0, head_cache)
            k_side = quant.quantize_plain(k, own, f.k_bits, f.rotate, quant.K_GAIN[f.k_bits], aim)
            v = new.v.index_select(0, row)
            return k_side, quant.quantize_plain(v, None, f.v_bits, f.rotate, quant.V_GAIN[f.v_bits])
        own = loops.Source(centre, head_cache) if f.centre else None
        aim = None if direction is None else loops.Source(direction, head_cache)
        return (
            loops.quantize_plain(loops.Source(new.k, row), own, f.k_bits, f.rotate, quant.K_GAIN[f.k_bits], aim),
            loops.quantize_plain(loops.Source(new.v, row), None, f.v_bits, f.rotate, quant.V_GAIN[f.v_bits]),
        )

    def decode(self, rows: Rows, centre: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """``k, v [n, D]`` in the model's space and dtype."""
        if self.format.plain:
            return rows.k, rows.v
        assert rows.k_scale is not None
        assert rows.v_scale is not None
        k = quant.decode(rows.k, rows.k_scale, self.format.k_bits)
        v = quant.decode(rows.v, rows.v_scale, self.format.v_bits)
        k, v = quant.restore(k, v, self.format, centre if self.format.centre else None)
        largest = min(torch.finfo(self.dtype).max, torch.finfo(torch.float32).max)
        return k.clamp(-largest, largest).to(self.dtype), v.clamp(-largest, largest).to(self.dtype)
