"""Projections of Q and K of an attention module: rows of ``q_proj`` and ``k_proj``, or of one fused projection."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor, Shard
from transformers.pytorch_utils import Conv1D

from kvstrata.quant.weights import is_plain

try:
    from accelerate.utils import align_module_device, has_offloaded_params
except ImportError:  # then no weights are offloaded
    has_offloaded_params = None

# By attention class: the fused projection, and whether its rows are Q, K and V of each head in turn, or all Q, K, V.
FUSED = {
    "GPT2Attention": ("c_attn", False),
    "GPTNeoXAttention": ("query_key_value", True),
    "Phi3Attention": ("qkv_proj", False),
    "Phi4MultimodalAttention": ("qkv_proj", False),
}
NORMS = ("q_norm", "k_norm", "q_layernorm", "k_layernorm", "query_layernorm", "key_layernorm")


class Projection(NamedTuple):
    """Rows KV head by KV head, Q with its query heads. None for what is missing, quantised, adapted or not known."""

    weight: torch.Tensor | None = None  # [rows, inputs]
    bias: torch.Tensor | None = None  # [rows]


def linears(module: torch.nn.Module) -> list[Any]:
    """The layers that compute Q and K; None for one that the module does not have."""
    fused = FUSED.get(type(module).__name__)
    names = ("q_proj", "k_proj") if fused is None else fused[:1]
    return [getattr(module, name, None) for name in names]


def are_normed(module: torch.nn.Module) -> bool:
    """True if Q or K is normalised after its projection."""
    return any(getattr(module, name, None) is not None for name in NORMS)


def of_q_and_k(module: torch.nn.Module, kv_heads: int, dim: int) -> tuple[Projection, Projection]:
    """Projections of Q and K; of distributed weights, the rows of this rank."""
    if are_normed(module):
        return Projection(), Projection()
    layers = linears(module)
    rows = [_values(layer) for layer in layers]
    if len(rows) == 2:
        return rows[0], rows[1]
    if isinstance(layers[0], torch.nn.Module) and any(isinstance(x, DTensor) for x in layers[0].parameters()):
        return Projection(), Projection()  # which of them are Q, K and V depends on the plan
    _, by_head = FUSED[type(module).__name__]
    (q, k), (q_bias, k_bias) = (_split(x, kv_heads * dim, kv_heads, by_head) for x in rows[0])
    return Projection(q, q_bias), Projection(k, k_bias)


def _values(layer: Any) -> Projection:
    """Weight and bias of a layer, fetched if accelerate keeps them elsewhere between forwards."""
    given = [getattr(layer, name, None) for name in Projection._fields]
    if has_offloaded_params is not None and has_offloaded_params(layer):
        with align_module_device(layer, "cpu"):
            given = [getattr(layer, name, None) for name in Projection._fields]
    weight, bias = map(_local, given)
    if not isinstance(layer, (torch.nn.Linear, Conv1D)):  # such as an adapter, whose own weights are to be added
        weight = None
    return Projection(weight.mT if isinstance(layer, Conv1D) and weight is not None else weight, bias)


def _local(x: Any) -> torch.Tensor | None:
    """The values of a weight or a bias; of a distributed one this rank's rows. None if it has none of them."""
    if isinstance(x, DTensor):
        x = x.to_local() if x.placements == (Shard(0),) else None
    return x if is_plain(x) else None


def _split(x: torch.Tensor | None, size: int, kv_heads: int, by_head: bool) -> list[torch.Tensor | None]:
    """Rows of Q and of K in a fused projection whose K has ``size`` rows; None if there are not as many."""
    if x is None or len(x) < 3 * size or (by_head and len(x) != 3 * size):
        return [None, None]
    if by_head:
        parts = x.unflatten(0, (kv_heads, 3, -1))
        return [parts[:, i].flatten(0, 1) for i in (0, 1)]
    return [x[: len(x) - 2 * size], x[len(x) - 2 * size : len(x) - size]]
