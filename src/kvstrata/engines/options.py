"""Options of an engine: the format of the pages, and a calibration file.

An engine counts bytes per token and KV head and expects the same number for every block size, so formats are limited to
head dims whose pages of 16, 32 and 64 tokens have equal bytes per token.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvstrata.layout import Format

KEY = "kvstrata"
HEAD_DIMS = (64, 128, 256)
BLOCK_SIZES = (16, 32, 64, 128, 256)  # tokens of an engine's block
PREFERRED_BLOCK_SIZE = 64  # one page, the size that decode kernels stream best
MOST_QUERIES = 16  # maximum queries of a request in a decode call: one token and 15 drafts
MOST_GROUP = 16  # maximum query heads per KV head
TAIL_TOKENS = 64  # rows of a tail; or a multiple
EXAMPLE = '{"kvstrata": {"format": "K4V4"}}'


@dataclass(frozen=True)
class Options:
    """Options of one engine.

    Args:
        format: name of the packed format, such as ``K4V4``.
        calibration: path of a calibration file, or None.
        tail: whether each request keeps its unfinished page at 16 bit.
        weights: whether balance and centre of K come from the model's weights in layers without a calibration.

    Raises ValueError or TypeError, naming the option.
    """

    format: str
    calibration: str | None = None
    tail: bool = False
    weights: bool = True

    def __post_init__(self) -> None:
        try:
            plain = Format.parse(self.format, HEAD_DIMS[0]).plain
        except ValueError as error:
            raise ValueError(
                f"kvstrata.format: expected K and V of 8, 4, 3 or 2 bits such as 'K4V4', got {self.format!r}"
            ) from error
        if plain:
            raise ValueError(f"kvstrata.format: expected a quantised format such as 'K4V4', got {self.format!r}")
        if type(self.calibration) not in (str, type(None)):
            given = type(self.calibration).__name__
            raise TypeError(f"kvstrata.calibration: expected the path of a calibration file, got {given}")
        for name in ("tail", "weights"):
            if type(getattr(self, name)) is not bool:
                raise TypeError(f"kvstrata.{name}: expected true or false, got {getattr(self, name)!r}")

    @classmethod
    def parse(cls, config: Any) -> Options:
        """Options from an engine's configuration such as ``{"kvstrata": {"format": "K4V4"}}``."""
        given = config.get(KEY) if isinstance(config, Mapping) else None
        if not isinstance(given, Mapping) or "format" not in given:
            raise ValueError(f"additional_config: expected {EXAMPLE}, got {config!r}")
        known = tuple(cls.__dataclass_fields__)
        if unknown := sorted(set(given) - set(known)):
            raise ValueError(f"additional_config: expected options of kvstrata among {known}, got {unknown[0]!r}")
        return cls(**given)

    def format_of(self, head_dim: int, block_size: int) -> Format:
        """Format of the pages in blocks of ``block_size`` tokens: pages of 64 tokens, or the largest that fit."""
        if head_dim not in HEAD_DIMS:
            raise ValueError(f"head_dim: expected one of {HEAD_DIMS}, got {head_dim}")
        if block_size not in BLOCK_SIZES:
            raise ValueError(f"block_size: expected one of {BLOCK_SIZES}, got {block_size}")
        return Format.parse(self.format, head_dim, math.gcd(64, block_size))

    def bytes_per_token(self, head_dim: int) -> int:
        """Bytes of K, V and scales of one token of one KV head, in blocks of any size."""
        return self.format_of(head_dim, PREFERRED_BLOCK_SIZE).bytes_per_token


def tail_tokens(drafts: int) -> int:
    """Rows of a tail, for pages of any size, if a step may reject up to ``drafts`` tokens of a request."""
    return -(-(TAIL_TOKENS - 1 + max(drafts, 1)) // TAIL_TOKENS) * TAIL_TOKENS


def layer_index(name: str) -> int:
    """Index of a layer from its name in the model, such as 3 from ``model.layers.3.self_attn.attn``.

    Raises ValueError unless the name has exactly one number.
    """
    numbers = re.findall(r"(?<=\.)\d+(?=\.|$)", "." + name)
    if len(numbers) != 1:
        raise ValueError(f"name: expected a layer with one number such as 'model.layers.3.attn', got {name!r}")
    return int(numbers[0])


def heads_of_rank(total: int, local: int, rank: int, ranks: int) -> slice:
    """KV heads of a tensor-parallel rank; with more ranks than heads, consecutive ranks hold the same head.

    Raises ValueError if ``total`` heads over ``ranks`` ranks do not give ``local`` each.
    """
    if local != max(total // ranks, 1) or (total % ranks and ranks % total):
        raise ValueError(f"calibration: expected {local} KV heads on each of {ranks} ranks, got a file with {total}")
    first = rank * total // ranks
    return slice(first, first + local)
