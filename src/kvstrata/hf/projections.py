"""Projections of Q and K of an attention module, and the norms that follow them.

Rows are those of ``q_proj`` and ``k_proj``, or of one fused projection. Quantised and adapted ones are probed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Shard
from transformers.pytorch_utils import Conv1D

from kvstrata.quant.projection import NORMS, Norm, Projection, is_plain, norm_of, probed

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


LINEAR = (torch.nn.Linear, Conv1D)


def linears(module: torch.nn.Module) -> list[Any]:
    """The layers that compute Q and K; None for one that the module does not have."""
    fused = FUSED.get(type(module).__name__)
    names = ("q_proj", "k_proj") if fused is None else fused[:1]
    return [getattr(module, name, None) for name in names]


def norms(module: torch.nn.Module) -> list[Any]:
    """The norms that follow the projections of Q and K; None for none."""
    found = ([getattr(module, name, None) for name in names] for names in NORMS)
    return [next((norm for norm in own if norm is not None), None) for own in found]


def of_q_and_k(module: torch.nn.Module, kv_heads: int, dim: int) -> tuple[Projection, Projection]:
    """Projections of Q and K; of distributed weights, the rows of this rank."""
    layers, q_norm, k_norm = linears(module), *norms(module)
    rows = [_values(layer, module) for layer in layers]
    if len(rows) == 2:
        q, k = rows
    elif isinstance(layers[0], torch.nn.Module) and any(isinstance(x, DTensor) for x in layers[0].parameters()):
        return Projection(), Projection()  # which of them are Q, K and V depends on the plan
    else:
        _, by_head = FUSED[type(module).__name__]
        (q_rows, k_rows), (q_bias, k_bias) = (_split(x, kv_heads * dim, kv_heads, by_head) for x in rows[0][:2])
        q, k = Projection(q_rows, q_bias), Projection(k_rows, k_bias)
    return _with_norm(q, q_norm, dim), _with_norm(k, k_norm, dim)


@contextmanager
def _present(layer: Any) -> Iterator[None]:
    """Context in which a layer has the weights that accelerate keeps elsewhere between forwards."""
    if has_offloaded_params is None or not has_offloaded_params(layer):
        yield
        return
    with align_module_device(layer, "cpu"):
        yield


def are_plain(module: torch.nn.Module) -> bool:
    """True if weights and biases of the projections of Q and K can be read, and are all that their forwards use."""
    return all(
        _is_linear(x) and _local(getattr(x, "weight", None)) is not None for x in linears(module) if x is not None
    )


def _is_linear(layer: Any) -> bool:
    return isinstance(layer, LINEAR) and type(layer).forward in (x.forward for x in LINEAR)


def _values(layer: Any, module: torch.nn.Module) -> Projection:
    """Weight and bias of a layer of ``module``."""
    if layer is None:
        return Projection()
    with _present(layer):
        weight, bias = (_local(getattr(layer, name, None)) for name in ("weight", "bias"))
        if not isinstance(layer, LINEAR):  # its own weight may be one of several
            weight = None
        own = Projection(weight.mT if isinstance(layer, Conv1D) and weight is not None else weight, bias)
        if weight is not None and _is_linear(layer):
            return own
        found = _probed(layer, module)
    if found.weight is None:
        return own
    return found._replace(bias=bias) if isinstance(layer, LINEAR) else found


def _probed(layer: Any, module: Any) -> Projection:
    """Estimate of a layer whose weights cannot be read, such as a quantised one or one with an adapter.

    Its forward is called without the layer's hooks. Nothing in training, where calls may have effects.
    """
    config, device = getattr(module, "config", None), _device_of(layer)
    inputs = getattr(layer, "in_features", None) or getattr(config, "hidden_size", None)
    if device is None or type(inputs) is not int or any(x.training for x in layer.modules()):
        return Projection()
    held = [x.dtype for x in (*layer.parameters(), *module.parameters()) if x.is_floating_point() and x.itemsize > 1]
    known = dict.fromkeys([getattr(config, "dtype", None), *held, torch.bfloat16, torch.float16, torch.float32])
    for dtype in (x for x in known if isinstance(x, torch.dtype)):  # a model may have been cast after loading
        for call in (lambda x: type(layer).forward(layer, x), lambda x: type(layer).forward(layer, x[0])):
            own = probed(call, inputs, dtype, device)  # some layers take rows without a batch
            if own.weight is not None:
                return own
    return Projection()


def _device_of(layer: torch.nn.Module) -> torch.device | None:
    """Device on which a layer computes; None if it is unknown."""
    tensors = [*layer.parameters(), *layer.buffers()]
    if not tensors:  # those of torch.ao.quantization pack them
        return torch.device("cpu")
    hooks: Any = (getattr(x, "_hf_hook", None) for x in layer.modules())  # accelerate's, of offloaded weights
    devices = [torch.device(x.execution_device) for x in hooks if getattr(x, "execution_device", None) is not None]
    return next(iter([x.device for x in tensors if not x.is_meta] + devices), None)


def _with_norm(projection: Projection, norm: Any, dim: int) -> Projection:
    """The projection with the norm that follows it; nothing if that is unknown."""
    if norm is None:
        return projection
    known = _norm(norm, dim)
    return Projection() if known is None else projection._replace(norm=known)


def _norm(norm: Any, dim: int) -> Norm | None:
    with _present(norm):
        return norm_of(getattr(norm, "weight", None), dim, lambda x: type(norm).forward(norm, x))


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
