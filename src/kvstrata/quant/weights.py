"""Balance and centre of K from the projections of Q and K, assuming inputs of unit variance.

A bias is the same for every token, but RoPE rotates it: the centre is its mean over positions, and the rest of it
contributes to the mean squares of K from which the balance is computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeGuard

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .calibration import LARGEST_CENTRE, pair_balance
from .rope import mean_rotation, pair_channels

HORIZON = 2048  # positions over which a centre is averaged


def is_plain(weight: object) -> TypeGuard[torch.Tensor]:
    """True for a tensor that holds the weights themselves: floating point of 16 bit or more, without scales.

    False for tensors on the meta device and for subclasses that wrap others, such as torchao's quantised ones.
    """
    wraps_others: bool = is_traceable_wrapper_subclass(weight)
    if not isinstance(weight, torch.Tensor) or weight.is_meta or wraps_others:
        return False
    return weight.is_floating_point() and weight.element_size() >= 2


def balance_from_weights(
    q: tuple[torch.Tensor, torch.Tensor | None],
    k: tuple[torch.Tensor, torch.Tensor | None],
    kv_heads: int,
    dim: int,
    rope: Sequence[float],
    interleaved: bool,
) -> torch.Tensor | None:
    """Balance float32 ``[kv_heads, dim]`` from the projections of Q and K.

    Args:
        q, k: weight ``[rows, inputs]`` and bias ``[rows]`` or None; KV head by KV head, Q with its query heads.
        rope: radians per position of K's rotated channel pairs, empty for none.
        interleaved: see `pair_channels`.

    Returns None if the rows do not match these head counts, or are not finite.
    """
    if q[0].shape[0] % (kv_heads * dim) or k[0].shape[0] != kv_heads * dim:
        return None
    squares, whole = [], []
    for (weight, bias), is_k in ((k, True), (q, False)):
        norms = torch.linalg.vector_norm(weight.detach(), dim=1, dtype=torch.float32)
        by_row = with_bias = norms.square().view(kv_heads, -1, dim).mean(1)
        if bias is not None:
            offset = bias.detach().float().square().view(kv_heads, -1, dim)
            with_bias = by_row + offset.mean(1)
            if is_k:  # the centre removes the part that survives RoPE
                offset = offset * (1 - _steady(rope, dim, interleaved).to(offset.device))
            by_row = by_row + offset.mean(1)
        squares.append(by_row)
        whole.append(with_bias)
    if not all(bool(x.isfinite().all()) for x in squares):
        return None
    return pair_balance(squares[0], squares[1], len(rope), interleaved, whole[0])


def centre_from_bias(
    bias: torch.Tensor, kv_heads: int, dim: int, rope: Sequence[float], interleaved: bool
) -> torch.Tensor | None:
    """Centre float32 ``[kv_heads, dim]`` of the model's K, not divided by a balance: the mean of the rotated bias over
    the positions of the horizon.

    Arguments are those of `balance_from_weights`. Returns None if the bias does not match these head counts, or is
    larger than a centre may be.
    """
    if bias.numel() != kv_heads * dim or not bool((bias.abs() <= LARGEST_CENTRE).all()):
        return None
    own, pairs = bias.detach().float().view(kv_heads, dim), len(rope)
    if not pairs:
        return own
    cos, sin = (x.to(own.device) for x in _turn(rope))
    one, two = pair_channels(pairs, interleaved=interleaved)
    x, y = own[:, one], own[:, two]
    centre = own.clone()
    centre[:, one], centre[:, two] = x * cos - y * sin, y * cos + x * sin
    return centre


def _turn(rope: Sequence[float]) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean cos and sin ``[pairs]`` over the horizon."""
    angle = torch.tensor(rope, dtype=torch.float64, device="cpu")
    cos, sin = mean_rotation(angle, torch.tensor([HORIZON], device="cpu"))
    return cos[0], sin[0]


def _steady(rope: Sequence[float], dim: int, interleaved: bool) -> torch.Tensor:
    """Share of a constant's energy that remains in its mean over the horizon, per channel; 1 without RoPE."""
    share = torch.ones(dim, dtype=torch.float32, device="cpu")
    if rope:
        cos, sin = _turn(rope)
        by_pair = cos.square() + sin.square()
        share[: 2 * len(rope)] = by_pair.repeat_interleave(2) if interleaved else by_pair.repeat(2)
    return share
