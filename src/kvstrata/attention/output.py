"""Result of an attention op that was asked for more than its output."""

from __future__ import annotations

from typing import NamedTuple

import torch


class AttentionOutput(NamedTuple):
    """Attention output with its optional extras, None where not asked for.

    Example:
        >>> q, k, v = torch.randn(3, 1, 100, 8, 64)
        >>> made = kvstrata.prefill_attention(q, k, v, return_lse=True)
        >>> made.out.shape, made.lse.shape, made.mass
        (torch.Size([1, 100, 8, 64]), torch.Size([1, 100, 8]), None)
    """

    out: torch.Tensor  # q's shape and dtype
    lse: torch.Tensor | None = None  # float32 [batch, seq, heads], ragged [tokens, heads]
    mass: torch.Tensor | None = None  # float32 [batch, KV heads, longest length], by position
