"""Calibration of a layer from the model's weights, without a file.

An engine passes rows to an attention layer, not the projection that computed them. But the module that owns the layer
also owns the projection: `Owner` records it when the layer becomes its child. After weights are loaded,
`calibration_of` finds the projections of Q and K and the RoPE among the module's children. Modules are recognised by
their attributes, so no engine is imported. On a tensor-parallel rank, weights are the rank's rows, and so is everything
computed from them.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.nn.modules.module import register_module_module_registration_hook

from kvstrata.quant.calibration import LayerCalibration
from kvstrata.quant.projection import NORMS, Norm, Projection, is_plain, norm_of, probed
from kvstrata.quant.weights import balance_from_weights, centre_from_weights

FAR = 1024  # position whose angle resolves slow pairs, which a 16-bit row at position 1 does not


class Owner:
    """The module that owns an attention layer, if an attribute ``owner`` of the layer's ``impl`` is this object.

    The first instance adds a hook that is called for every module of the process that becomes a child; it changes none.
    """

    _watched = False

    def __init__(self) -> None:
        self._module: weakref.ref[torch.nn.Module] | None = None
        if not Owner._watched:
            Owner._watched = True
            register_module_module_registration_hook(_record_owner)

    def get(self) -> torch.nn.Module | None:
        """The module; None if the layer is not a child of any."""
        return None if self._module is None else self._module()


def _record_owner(module: torch.nn.Module, name: str, child: torch.nn.Module | None) -> None:
    owner = getattr(getattr(child, "impl", None), "owner", None)
    if isinstance(owner, Owner):
        owner._module = weakref.ref(module)


@torch.no_grad()
def calibration_of(
    module: torch.nn.Module, heads: int, kv_heads: int, dim: int, has_rope: bool
) -> tuple[LayerCalibration | None, str]:
    """Calibration of a layer from the projections of its owner, on their device, and its sources or why it is None.

    Args:
        module: owner of the layer: children with ``num_heads``, ``num_kv_heads`` and ``head_size`` (a fused
            projection), or ``q_proj`` and ``k_proj``; a RoPE with ``cos_sin_cache`` and ``is_neox_style``.
        heads, kv_heads, dim: sizes of the layer on this rank.
        has_rope: True if the model has RoPE, for a module without one.

    A balance of ones is left out. Quantised projections are called with random inputs.
    """
    children: dict[str, Any] = dict(module.named_children())
    known = {name for names in NORMS for name in names}
    if norm := next((name for name in children if "norm" in name and name not in known), None):
        return None, f"Q or K may be normalised after its projection ({norm})"
    rope = _rope(module, children, dim, has_rope)
    if rope is None:
        return None, "its RoPE is of an unknown kind"
    projections = _projections(children, heads, kv_heads, dim)
    if projections is None:
        return None, "no projection with as many heads was found"
    if not all(bool(x.isfinite().all()) for own in projections for x in own[:2] if x is not None):
        return None, "its weights are not finite"
    normed = []
    for projection, names in zip(projections, NORMS, strict=True):
        norms = [children[name] for name in names if children.get(name) is not None]
        own = [_norm(norm, dim) for norm in norms]
        if None in own or len(own) > 1:
            return None, f"Q or K is normalised in an unknown way ({type(norms[0]).__name__})"
        normed.append(projection._replace(norm=own[0]) if own else projection)
    q, k = normed
    balance = balance_from_weights(q, k, kv_heads, dim, *rope)
    balance = None if balance is None or bool((balance == 1).all()) else balance
    centre = centre_from_weights(k, kv_heads, dim, *rope)
    centre = None if centre is None or not bool(centre.any()) else centre
    if centre is not None and balance is not None:
        centre = centre / balance
    parts = [name for name, x in (("balance", balance), ("centre", centre)) if x is not None]
    if parts:
        return LayerCalibration(balance, centre), " and ".join(parts)
    is_known = all(own.weight is not None or own.norm is not None for own in (q, k))
    return None, "its weights need none" if is_known else "its weights are quantised, and K has no bias"


def _norm(norm: torch.nn.Module, dim: int) -> Norm | None:
    """A norm, if it has a forward in torch operators; others may be kernels or communicate between ranks."""
    is_torch = isinstance(norm, (torch.nn.LayerNorm, torch.nn.RMSNorm))
    forward = norm.forward if is_torch else getattr(norm, "forward_native", None)
    return None if forward is None else norm_of(getattr(norm, "weight", None), dim, forward)


def update(calibration: LayerCalibration | None, own: LayerCalibration | None) -> None:
    """Write ``own``, from new weights, into the tensors of ``calibration``, in place; adds no tensors."""
    if calibration is None:
        return
    balance, centre = (None, None) if own is None else (own.balance, own.centre)
    if calibration.balance is None and balance is not None and centre is not None:
        centre = centre * balance
    if calibration.balance is not None:
        calibration.balance.copy_(torch.ones_like(calibration.balance) if balance is None else balance)
    if calibration.centre is not None:
        calibration.centre.copy_(torch.zeros_like(calibration.centre) if centre is None else centre)


def _projections(children: dict[str, Any], heads: int, kv_heads: int, dim: int) -> tuple[Projection, Projection] | None:
    """Projections of Q and K; None if there are none with these heads."""
    sizes = [heads * dim, kv_heads * dim]
    for child in children.values():
        if all(hasattr(child, name) for name in ("num_heads", "num_kv_heads", "head_size")):
            if (child.num_heads, child.num_kv_heads, child.head_size) != (heads, kv_heads, dim):
                return None
            weight, bias = _values(child)
            rows = sum(sizes) + kv_heads * int(getattr(child, "v_head_size", dim))
            (q, k), (q_bias, k_bias) = (_rows(x, rows, sizes) for x in (weight, bias))
            return Projection(q, q_bias), Projection(k, k_bias)
    linears = [children.get(name) for name in ("q_proj", "k_proj")]
    if None in linears:
        return None
    (q, q_bias), (k, k_bias) = (
        [_rows(x, size, [size])[0] for x in _values(linear)] for linear, size in zip(linears, sizes, strict=True)
    )
    return Projection(q, q_bias), Projection(k, k_bias)


def _values(linear: Any) -> tuple[Any, Any]:
    """Weight and bias of a linear layer of this rank; estimates if the weight cannot be read."""
    weight, bias = (getattr(linear, name, None) for name in ("weight", "bias"))
    held = next((x for x in (*linear.parameters(), *linear.buffers()) if not x.is_meta), None)
    inputs = getattr(linear, "input_size", None) or getattr(linear, "in_features", None)
    if is_plain(weight) or held is None or type(inputs) is not int:
        return weight, bias
    own = probed(lambda x: linear.forward(x[0]), inputs, getattr(linear, "params_dtype", torch.bfloat16), held.device)
    return own.weight, bias if is_plain(bias) else own.bias


def _rows(x: Any, rows: int, sizes: list[int]) -> list[torch.Tensor | None]:
    """The first ``sizes`` of ``rows`` rows; None for each if ``x`` is something else."""
    if not is_plain(x) or x.shape[0] != rows:
        return [None] * len(sizes)
    return list(x.detach()[: sum(sizes)].split(sizes))


def _rope(
    module: torch.nn.Module, children: dict[str, Any], dim: int, has_rope: bool
) -> tuple[tuple[float, ...], bool] | None:
    """Radians per position of the RoPE pairs, and whether pairs are (2 i, 2 i + 1); None if unknown."""
    rotation = next((child for child in children.values() if hasattr(child, "cos_sin_cache")), None)
    if rotation is None:
        without = not has_rope or getattr(module, "rotary_emb", module) is None  # a layer without RoPE
        return ((), False) if without else None
    table, is_neox = rotation.cos_sin_cache, getattr(rotation, "is_neox_style", None)
    if not isinstance(table, torch.Tensor) or table.dim() != 2 or len(table) < 2 or type(is_neox) is not bool:
        return None
    pairs, far = table.shape[1] // 2, min(FAR, len(table) - 1)
    if 2 * pairs > dim:
        return None
    near_row, far_row = table[[1, far]].cpu().double()
    first, last = (torch.atan2(row[pairs : 2 * pairs], row[:pairs]) for row in (near_row, far_row))
    angles = torch.where(first * far < 1, last / far, first)
    return tuple(angles.tolist()), not is_neox
