"""Tokens as flat lists: where each one is and what the cache knows of it, without its values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch

NEW = -1  # the tier of a token that is in no bucket yet
DROP = -1  # the target of one that leaves the cache


@dataclass(frozen=True)
class Tokens:
    """Tokens of some requests, each in a layer; flat ``[n]``.

    ``head_cache`` is (index of the request) * kv_heads + head; with ``tier`` it names a bucket. ``slot`` counts in the
    bucket; for new tokens it is the row of the values that come with them.
    """

    head_cache: torch.Tensor
    tier: torch.Tensor
    slot: torch.Tensor
    position: torch.Tensor
    importance: torch.Tensor  # float32

    def __len__(self) -> int:
        return len(self.head_cache)

    def __getitem__(self, at: torch.Tensor | slice) -> Tokens:
        return Tokens(self.head_cache[at], self.tier[at], self.slot[at], self.position[at], self.importance[at])

    def renumbered(self, index: torch.Tensor, kv_heads: int) -> Tokens:
        """The same tokens with their requests at other indices: ``index`` of the old."""
        head_cache = index[self.head_cache // kv_heads] * kv_heads + self.head_cache % kv_heads
        return replace(self, head_cache=head_cache)

    @staticmethod
    def cat(parts: Sequence[Tokens], head_caches: Sequence[int] | None = None) -> Tokens:
        """With ``head_caches``, how many each part has, they count through all parts; else they are the same."""
        if head_caches is not None:
            ends = accumulate(head_caches, initial=0)
            parts = [replace(part, head_cache=part.head_cache + at) for part, at in zip(parts, ends, strict=False)]
        names = ("head_cache", "tier", "slot", "position", "importance")
        return Tokens(*(torch.cat([getattr(part, name) for part in parts]) for name in names))
