"""Tokens as flat lists: bucket, slot, position and importance of each, without its values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
import torch

NEW = -1  # tier of a token that is in no bucket yet
DROP = -1  # target of a token that leaves the cache
COLUMNS = ("head_cache", "tier", "slot", "position", "importance")


@dataclass(frozen=True)
class Fresh:
    """New tokens of places, each a (request, layer), whose rows are packed ``[rows, kv_heads, D]``."""

    counts: np.ndarray  # int [places], tokens
    rows: np.ndarray  # int [places], the first row
    positions: np.ndarray  # int [places], of the first row
    initial: np.ndarray  # float32 [places], importance if none is given
    importance: torch.Tensor | None = None  # float32 [rows, kv_heads]

    def packed(self) -> np.ndarray:
        """Pack the fields for kernels: int32 ``[4, places]``."""
        packed = np.empty((4, len(self.counts)), np.int32)
        packed[0], packed[1], packed[2] = self.counts, self.rows, self.positions
        packed[3] = self.initial.astype(np.float32).view(np.int32)
        return packed


@dataclass(frozen=True)
class Tokens:
    """Tokens of requests, each in one layer; flat ``[n]``.

    ``head_cache`` is (index of the request) * kv_heads + head; with ``tier`` it identifies a bucket. ``slot`` counts in
    the bucket; for new tokens it is the row of their values.
    """

    head_cache: torch.Tensor
    tier: torch.Tensor
    slot: torch.Tensor
    position: torch.Tensor
    importance: torch.Tensor  # float32

    def __len__(self) -> int:
        return len(self.head_cache)

    def __getitem__(self, index: torch.Tensor | slice) -> Tokens:
        return Tokens(*(getattr(self, name)[index] for name in COLUMNS))

    def renumbered(self, index: torch.Tensor, kv_heads: int) -> Tokens:
        """Tokens whose request i becomes request ``index[i]``."""
        head_cache = index[self.head_cache // kv_heads] * kv_heads + self.head_cache % kv_heads
        return replace(self, head_cache=head_cache)

    @staticmethod
    def cat(parts: Sequence[Tokens], head_caches: Sequence[int] | None = None) -> Tokens:
        """Concatenation; with ``head_caches``, the number of each part, they are renumbered across all parts."""
        if head_caches is not None:
            firsts = accumulate(head_caches, initial=0)
            parts = [
                replace(part, head_cache=part.head_cache + first) for part, first in zip(parts, firsts, strict=False)
            ]
        return Tokens(*(torch.cat([getattr(part, name) for part in parts]) for name in COLUMNS))
