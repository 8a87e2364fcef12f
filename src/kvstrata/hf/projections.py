"""Projections of Q and K of an attention module: rows of ``q_proj`` and ``k_proj``, or of one fused projection."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from transformers.pytorch_utils import Conv1D

from kvstrata.quant import weights

# By attention class: the fused projection, and whether its rows are Q, K and V of each head in turn, or all Q, K, V.
FUSED = {
    "GPT2Attention": ("c_attn", False),
    "GPTNeoXAttention": ("query_key_value", True),
    "Phi3Attention": ("qkv_proj", False),
    "Phi4MultimodalAttention": ("qkv_proj", False),
}
NORMS = ("q_norm", "k_norm", "q_layernorm", "k_layernorm", "query_layernorm", "key_layernorm")


class Projection(NamedTuple):
    """Weight ``[rows, inputs]`` and bias ``[rows]`` or None; rows are KV head by KV head, Q with its query heads."""

    weight: torch.Tensor
    bias: torch.Tensor | None


def linears(module: torch.nn.Module) -> list[Any]:
    """The layers that compute Q and K; None for one that the module does not have."""
    fused = FUSED.get(type(module).__name__)
    names = ("q_proj", "k_proj") if fused is None else fused[:1]
    return [getattr(module, name, None) for name in names]


def are_normed(module: torch.nn.Module) -> bool:
    """True if Q or K is normalised after its projection."""
    return any(getattr(module, name, None) is not None for name in NORMS)


def of_q_and_k(module: torch.nn.Module, kv_heads: int, dim: int) -> tuple[Projection, Projection] | None:
    """Projections of Q and K, or None if an adapter or a quantisation wraps them or their rows are not known."""
    layers = linears(module)
    if not all(isinstance(x, (torch.nn.Linear, Conv1D)) and weights.is_plain(x.weight) for x in layers):
        return None
    rows = [Projection(x.weight.mT if isinstance(x, Conv1D) else x.weight, x.bias) for x in layers]
    if len(rows) == 2:
        return rows[0], rows[1]
    weight, bias = rows[0]
    _, by_head = FUSED[type(module).__name__]
    size = kv_heads * dim
    if len(weight) < 3 * size or (by_head and len(weight) != 3 * size):
        return None
    if by_head:
        parts = [None if x is None else x.unflatten(0, (kv_heads, 3, dim)) for x in (weight, bias)]
        q, k = ([None if x is None else x[:, i].flatten(0, 1) for x in parts] for i in (0, 1))
    else:
        end = len(weight) - size
        q, k = (
            [None if x is None else x[part] for x in (weight, bias)]
            for part in (slice(end - size), slice(end - size, end))
        )
    return Projection(*q), Projection(*k)  # type: ignore[arg-type]
