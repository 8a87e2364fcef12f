"""Projection of Q or K as far as it is known, with the norm that may follow it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeGuard

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

PROBES = 128  # random inputs from which weights are estimated: the squares of rows within about 13 %
NOISE = 0.01  # a bias below this share of its row's other outputs is rounding

# Names that attention modules give to the norms of Q and of K
NORMS = (("q_norm", "q_layernorm", "query_layernorm"), ("k_norm", "k_layernorm", "key_layernorm"))


class Norm(NamedTuple):
    """A norm of heads: values divided by their root mean square, times gain, plus shift."""

    gain: torch.Tensor  # float32 [heads or 1, dim]
    shift: torch.Tensor | None  # same shape
    is_whole: bool  # the root mean square is that of all heads together, not of each


class Projection(NamedTuple):
    """Rows KV head by KV head, Q with its query heads. None for what is missing or not known."""

    weight: torch.Tensor | None = None  # [rows, inputs], or another matrix whose rows have about the same products
    bias: torch.Tensor | None = None  # [rows]
    norm: Norm | None = None


def is_plain(weight: object) -> TypeGuard[torch.Tensor]:
    """True for a tensor that holds the weights themselves: floating point of 16 bit or more, without scales.

    False for tensors on the meta device and for subclasses that wrap others, such as torchao's quantised ones.
    """
    wraps_others: bool = is_traceable_wrapper_subclass(weight)
    if not isinstance(weight, torch.Tensor) or weight.is_meta or wraps_others:
        return False
    return weight.is_floating_point() and weight.element_size() >= 2


@torch.no_grad()
def probed(call: Callable[[torch.Tensor], object], inputs: int, dtype: torch.dtype, device: torch.device) -> Projection:
    """A projection whose weights cannot be read, from what its forward ``call`` returns for random rows and their
    negatives, ``[1, rows, inputs]``.

    For x of unit variance, the products of two rows W_i x and W_j x have the mean W_i · W_j. Tells nothing if the
    forward fails or returns something else.
    """
    x = torch.randn(PROBES, inputs, generator=torch.Generator().manual_seed(0), device="cpu")
    try:
        out = call(torch.cat([x, -x]).unsqueeze(0).to(device, dtype))
    except Exception:  # whatever a foreign layer may raise
        return Projection()
    out = out[0] if isinstance(out, tuple) else out  # some return their bias beside it
    if (
        not is_plain(out)
        or not out.dim()
        or out.numel() != 2 * PROBES * out.shape[-1]
        or not bool(out.isfinite().all())
    ):
        return Projection()
    one, other = out.reshape(2, PROBES, -1).float()
    bias, varying = ((one + other) / 2).mean(0), (one - other) / 2
    has_bias = bool((bias.abs() > NOISE * varying.square().mean(0).sqrt()).any())
    return Projection(varying.mT / PROBES**0.5, bias if has_bias else None)


@torch.no_grad()
def norm_of(weight: object, dim: int, call: Callable[[torch.Tensor], torch.Tensor]) -> Norm | None:
    """A norm, from what its forward ``call`` returns for ones with alternating signs; None if it is not one.

    Such rows, ``[1, 1, *weight.shape]``, have mean 0 and mean square 1, so RMS and layer norms return ± gain + shift,
    however they apply parameters. ``weight`` is the norm's: ``[dim]``, ``[heads, dim]`` or, for a norm of all heads,
    ``[heads * dim]``.
    """
    if not is_plain(weight) or weight.dim() not in (1, 2) or weight.numel() % dim:
        return None
    if weight.dim() == 2 and weight.shape[1] != dim:
        return None
    sign = torch.ones_like(weight).view(-1, 2)
    sign[:, 1] = -1
    sign = sign.view_as(weight)
    one, other, larger = (call(factor * sign[None, None])[0, 0] for factor in (1, -1, 4))
    if any(x.shape != weight.shape or not bool(x.isfinite().all()) for x in (one, other, larger)):
        return None
    if not torch.allclose(one.float(), larger.float(), rtol=0.02, atol=1e-3):
        return None
    one, other = one.float().view(-1, dim), other.float().view(-1, dim)
    shift = (one + other) / 2
    gain = (one - other) / 2 * sign.float().view(-1, dim)
    return Norm(gain, shift if bool(shift.any()) else None, weight.dim() == 1 and weight.numel() > dim)
