<<<<<<< HEAD
"""Result of an attention op that returns more than its output."""
=======
"""Result of an attention op with optional log-sum-exp and mass."""
>>>>>>> w/docs

from __future__ import annotations

from typing import NamedTuple

import torch


class AttentionOutput(NamedTuple):
<<<<<<< HEAD
    """Attention output with its optional extras; those not requested are None.

    out: q's shape and dtype.
    lse: float32 ``[batch, seq, heads]`` (ragged: ``[tokens, heads]``), natural log-sum-exp of the scores.
    mass: float32 ``[batch, KV heads, longest length]``, attention weight per position; `decode_attention` only.

    A named tuple of tensors that the op allocated. Safe under CUDA-graph capture: a replay overwrites these tensors.
=======
    """Attention output with optional log-sum-exp and attention mass, None unless requested.

    Attributes:
        out: ``[batch, seq, heads, dim]`` or ragged ``[tokens, heads, dim]``, in q's shape and dtype.
        lse: float32 ``[batch, seq, heads]`` or ragged ``[tokens, heads]``, natural log-sum-exp of the scores.
        mass: float32 ``[batch, kv_heads, max length]``, softmax weight of each position, summed over queries and over
            the query heads of a KV head.
>>>>>>> w/docs

    Example:
        >>> q, k, v = torch.randn(3, 1, 100, 8, 64)
        >>> result = kvstrata.prefill_attention(q, k, v, return_lse=True)
        >>> result.out.shape, result.lse.shape, result.mass
        (torch.Size([1, 100, 8, 64]), torch.Size([1, 100, 8]), None)
    """

    out: torch.Tensor
    lse: torch.Tensor | None = None
    mass: torch.Tensor | None = None
