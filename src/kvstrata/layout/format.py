"""Formats: what a page of one KV head contains, at which offsets.

[K codes][V codes][scales]       2, 3, 4 and 8 bit: codes in fragment order, fp16 scales
[K rows][V rows]                 16 and 32 bit: plain rows [page_tokens, head_dim] in the model's dtype
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

from . import scales
from .fragments import BITS, check_head_dim, check_page_tokens, code_bytes

PLAIN_BITS = (16, 32)
UNIT = 64  # bytes: pages begin at a multiple of it, and page handles count in it
MAX_TIERS = 8  # maximum number of formats in one cache


@dataclass(frozen=True)
class Format:
    """Layout of a page: bits of K and V, head dim, tokens, and the transformation of rows before quantisation.

    Args:
        k_bits, v_bits: 2, 3, 4 or 8 for codes; 16 or 32, the same for both, for plain rows in the model's dtype.
        head_dim: a multiple of 16 from 32 to 256.
        page_tokens: 16, 32 or 64 tokens of one KV head.
        rotate: whether rows are rotated (`rotation.rotate`). Always False for plain rows.
        centre: whether a vector per KV head, which the caller keeps, is subtracted from K before the rotation. Always
            False for plain rows.

    Immutable and hashable.

    Raises ValueError, naming the argument, for a size or number of bits that is not in these lists.

    Example:
        >>> Format(4, 2, 128).name, Format(4, 2, 128).bytes_per_token
        ('K4V2', 100)
    """

    k_bits: int
    v_bits: int
    head_dim: int
    page_tokens: int = 64
    rotate: bool = True
    centre: bool = True

    def __post_init__(self) -> None:
        for name, bits in (("k_bits", self.k_bits), ("v_bits", self.v_bits)):
            if type(bits) is not int or bits not in BITS + PLAIN_BITS:
                raise ValueError(f"{name}: expected one of {BITS + PLAIN_BITS}, got {bits!r}")
        if (self.k_bits in PLAIN_BITS or self.v_bits in PLAIN_BITS) and self.k_bits != self.v_bits:
            raise ValueError(f"v_bits: expected {self.k_bits} as k_bits, got {self.v_bits} (plain rows do not mix)")
        check_head_dim(self.head_dim)
        check_page_tokens(self.page_tokens)
        for name, flag in (("rotate", self.rotate), ("centre", self.centre)):
            if type(flag) is not bool:
                raise ValueError(f"{name}: expected True or False, got {flag!r}")
        if self.plain:
            object.__setattr__(self, "rotate", False)
            object.__setattr__(self, "centre", False)

    @classmethod
    def parse(
        cls, name: str, head_dim: int, page_tokens: int = 64, *, rotate: bool = True, centre: bool = True
    ) -> Format:
        """Format of a name such as ``K4V2``; raises ValueError for any other form."""
        match = re.fullmatch(r"K([1-9][0-9]*)V([1-9][0-9]*)", name) if isinstance(name, str) else None
        if match is None:
            raise ValueError(f"name: expected K<bits>V<bits> such as 'K4V2', got {name!r}")
        return cls(int(match[1]), int(match[2]), head_dim, page_tokens, rotate, centre)

    @property
    def name(self) -> str:
        return f"K{self.k_bits}V{self.v_bits}"

    @property
    def plain(self) -> bool:
        """True if pages hold rows in the model's dtype instead of codes."""
        return self.k_bits in PLAIN_BITS

    def _side_bytes(self, bits: int) -> int:
        if self.plain:
            return self.page_tokens * self.head_dim * bits // 8
        return code_bytes(bits, self.head_dim, self.page_tokens)

    @cached_property
    def k_bytes(self) -> int:
        """Bytes of K codes (or rows) of a page, from byte 0."""
        return self._side_bytes(self.k_bits)

    @cached_property
    def v_bytes(self) -> int:
        """Bytes of V codes (or rows) of a page, from ``v_offset``."""
        return self._side_bytes(self.v_bits)

    @property
    def scale_bytes(self) -> int:
        """Bytes of the scales of a page, from ``scale_offset``."""
        return 0 if self.plain else scales.BYTES_PER_TOKEN * self.page_tokens

    @property
    def k_offset(self) -> int:
        return 0

    @property
    def v_offset(self) -> int:
        return self.k_bytes

    @property
    def scale_offset(self) -> int:
        return self.k_bytes + self.v_bytes

    @cached_property
    def page_bytes(self) -> int:
        """Bytes of a page, including padding; a multiple of 64."""
        return self.scale_offset + self.scale_bytes

    @property
    def bytes_per_token(self) -> int:
        """Bytes of K, V, scales and padding of one token of one KV head; always whole."""
        return self.page_bytes // self.page_tokens

    @property
    def bits_per_value(self) -> float:
        """Bits per value of K and V, including scales and padding."""
        return self.bytes_per_token * 8 / (2 * self.head_dim)

    def block_bytes(self, block_size: int, kv_heads: int = 1) -> int:
        """Bytes of a block of ``block_size`` tokens of ``kv_heads`` KV heads in one layer.

        Raises ValueError unless ``block_size`` is a multiple of ``page_tokens`` and ``kv_heads`` is positive.
        """
        if type(block_size) is not int or block_size < 1 or block_size % self.page_tokens:
            raise ValueError(f"block_size: expected a multiple of {self.page_tokens}, got {block_size!r}")
        if type(kv_heads) is not int or kv_heads < 1:
            raise ValueError(f"kv_heads: expected an int of at least 1, got {kv_heads!r}")
        return block_size // self.page_tokens * self.page_bytes * kv_heads

    def tokens_in(self, nbytes: int, kv_heads: int = 1, layers: int = 1, block_size: int | None = None) -> int:
        """Number of tokens that fit ``nbytes`` in whole blocks of all layers; blocks of one page if no size is given.

        Raises ValueError for a negative ``nbytes``, or sizes that `block_bytes` does not take.
        """
        if type(nbytes) is not int or nbytes < 0:
            raise ValueError(f"nbytes: expected an int of at least 0, got {nbytes!r}")
        if type(layers) is not int or layers < 1:
            raise ValueError(f"layers: expected an int of at least 1, got {layers!r}")
        size = self.page_tokens if block_size is None else block_size
        return nbytes // (self.block_bytes(size, kv_heads) * layers) * size
