"""Balance and centre of K from the projections that make Q and K, as if their inputs were of unit variance.

What a bias adds is the same for every token and turned by RoPE: the centre takes its mean over positions, and what is
left of it counts as part of K's mean squares, which the balance is made of.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .calibration import pair_balance
from .rope import mean_rotation, pair_channels

HORIZON = 2048  # positions that a centre is planned for


def is_plain(weight: object) -> bool:
    """True for a tensor whose numbers are the weights: floating point of 16 bit or more, so not one with scales."""
    return isinstance(weight, torch.Tensor) and weight.is_floating_point() and weight.element_size() >= 2


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

    Returns None where the rows are not those of so many heads.
    """
    if q[0].shape[0] % (kv_heads * dim) or k[0].shape[0] != kv_heads * dim:
        return None
    squares = []
    for (weight, bias), is_k in ((k, True), (q, False)):
        norms = torch.linalg.vector_norm(weight.detach(), dim=1, dtype=torch.float32)
        by_row = norms.square().view(kv_heads, -1, dim).mean(1)
        if bias is not None:
            offset = bias.detach().float().square().view(kv_heads, -1, dim)
            if is_k:  # the centre removes what RoPE leaves of it
                offset = offset * (1 - _steady(rope, dim, interleaved).to(offset.device))
            by_row = by_row + offset.mean(1)
        squares.append(by_row)
    return pair_balance(squares[0], squares[1], len(rope), interleaved)


def centre_from_bias(
    bias: torch.Tensor, kv_heads: int, dim: int, rope: Sequence[float], interleaved: bool
) -> torch.Tensor | None:
    """Centre float32 ``[kv_heads, dim]`` of the model's K, not divided by a balance: the mean of the bias, as it is
    turned at the positions of the horizon.

    Arguments are those of `balance_from_weights`. Returns None where the bias is not that of so many heads.
    """
    if bias.numel() != kv_heads * dim:
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
    """Share of a constant's energy that is left in its mean over the horizon, per channel; 1 without RoPE."""
    share = torch.ones(dim, device="cpu")
    if rope:
        cos, sin = _turn(rope)
        by_pair = cos.square() + sin.square()
        share[: 2 * len(rope)] = by_pair.repeat_interleave(2) if interleaved else by_pair.repeat(2)
    return share
