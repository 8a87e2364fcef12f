"""Attention of a later prompt on a GPU, over earlier tokens and itself: one launch of `prefill_attention`, no mask.

The model's own function aligns its causal mask to the first key, so it would need an explicit mask and a slower kernel.
"""

from __future__ import annotations

import torch

import kvstrata
from kvstrata.attention.prefill.op import HEAD_DIMS

from .logits import Logits

DTYPES = (torch.float16, torch.bfloat16)


def supports(query: torch.Tensor) -> bool:
    """True if `attend` supports ``query [rows, heads, n, D]`` and is faster than the model's own function."""
    return query.is_cuda and query.shape[-1] in HEAD_DIMS and query.dtype in DTYPES


def attend(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, logits: Logits) -> torch.Tensor:
    """Attention output ``[rows, n, heads, D]`` of the last n columns, each over all columns up to its own.

    ``query [rows, heads, n, D]``, ``keys, values [rows, kv_heads, columns, D]``: columns are tokens in order.
    """
    q, k, v = (x.transpose(1, 2) for x in (query, keys, values))
    out = kvstrata.prefill_attention(q, k, v, scale=logits.scale, softcap=logits.softcap, sinks=logits.sinks)
    assert isinstance(out, torch.Tensor)
    return out
