"""Result of an attention op with optional log-sum-exp and mass."""

from __future__ import annotations

from typing import NamedTuple

import torch


class AttentionOutput(NamedTuple):
    """Attention output with optional log-sum-exp and attention mass, None unless requested.

    Attributes:
        out: ``[batch, seq, heads, dim]`` or ragged ``[tokens, heads, dim]``, in q's shape and dtype.
        lse: float32 ``[batch, seq, heads]`` or ragged ``[tokens, heads]``, natural log-sum-exp of the scores.
        mass: float32 ``[batch, kv_heads, max length]``, softmax weight of each position, summed over queries and over
            the query heads of a KV head.

    The op allocates these tensors; under CUDA-graph capture a replay overwrites them.

    Example:
        >>> q, k, v = torch.randn(3, 1, 100, 8, 64)
        >>> result = kvstrata.prefill_attention(q, k, v, return_lse=True)
        >>> result.out.shape, result.lse.shape, result.mass
        (torch.Size([1, 100, 8, 64]), torch.Size([1, 100, 8]), None)
    """

    out: torch.Tensor
    lse: torch.Tensor | None = None
    mass: torch.Tensor | None = None
