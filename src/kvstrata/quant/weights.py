"""Balance and centre of K from the projections of Q and K, assuming inputs of unit variance.

A bias is the same for every token, but RoPE rotates it: the centre is its mean over positions, and the rest of it
contributes to the mean squares of K from which the balance is computed. After a norm, a channel has its share of the
head's energy times the square of the norm's gain.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .calibration import LARGEST_CENTRE, pair_balance
from .projection import Projection
from .rope import mean_rotation, pair_channels

HORIZON = 2048  # positions over which a centre is averaged


def balance_from_weights(
    q: Projection, k: Projection, kv_heads: int, dim: int, rope: Sequence[float], interleaved: bool
) -> torch.Tensor | None:
    """Balance float32 ``[kv_heads, dim]`` from the projections of Q and K.

    ``rope``: radians per position of K's rotated channel pairs, empty for none; ``interleaved``: see `pair_channels`.

    Returns None if weights are unknown or not finite, or do not match these head counts.
    """
    squares, whole = [], []
    for projection, is_k in ((k, True), (q, False)):
        parts = _outputs(projection, kv_heads, dim)
        if parts is None or (is_k and parts[0].shape[1] != 1):
            return None
        own, constant = parts
        by_row = with_constant = own.mean(1)
        if constant is not None:
            offset = constant.square()
            with_constant = by_row + offset.mean(1)
            if is_k:  # the centre removes the part that survives RoPE
                offset = offset * (1 - _steady(rope, dim, interleaved).to(offset.device))
            by_row = by_row + offset.mean(1)
        squares.append(by_row)
        whole.append(with_constant)
    if not all(bool(x.isfinite().all()) for x in squares):
        return None
    return pair_balance(squares[0], squares[1], len(rope), interleaved, whole[0])


def _outputs(projection: Projection, kv_heads: int, dim: int) -> tuple[torch.Tensor, torch.Tensor | None] | None:
    """Mean squares of a projection's output without its constant part, and that part or None.

    Both are ``[kv_heads, heads of each, dim]``. None if they are unknown, or if there are other numbers of heads.
    """
    weight, bias, norm = projection
    if weight is not None:
        own = torch.linalg.vector_norm(weight.detach(), dim=1, dtype=torch.float32).square()
    elif norm is not None:  # rows are taken to be alike
        own, bias = torch.ones(max(kv_heads, len(norm.gain)) * dim, device=norm.gain.device), None
    else:
        return None
    if len(own) % (kv_heads * dim) or (bias is not None and bias.shape != own.shape):
        return None
    own, constant = own.view(-1, dim), None if bias is None else bias.detach().float().view(-1, dim)
    if norm is not None:
        if len(norm.gain) not in (1, len(own)):
            return None
        if constant is not None:
            own = own + constant.square()
        mean = own.mean() if norm.is_whole else own.mean(1, keepdim=True)
        own = own / mean.clamp(min=1e-30) * norm.gain.square()
        constant = None if norm.shift is None else norm.shift.expand_as(own)
    shape = (kv_heads, -1, dim)
    return own.reshape(shape), None if constant is None else constant.reshape(shape)


def centre_from_weights(
    k: Projection, kv_heads: int, dim: int, rope: Sequence[float], interleaved: bool
) -> torch.Tensor | None:
    """Centre float32 ``[kv_heads, dim]`` of the model's K, not divided by a balance.

    It is K's bias, or the shift of its norm, rotated and averaged over the positions of the horizon. Arguments are
    those of `balance_from_weights`. Returns None if there is none, if it does not match these head counts, or if it is
    larger than a centre may be.
    """
    constant = k.bias if k.norm is None else k.norm.shift
    if constant is None or not bool((constant.abs() <= LARGEST_CENTRE).all()):
        return None
    if k.norm is not None:
        constant = constant.expand(kv_heads, dim) if len(constant) == 1 else constant
    if constant.numel() != kv_heads * dim:
        return None
    own, pairs = constant.detach().float().reshape(kv_heads, dim), len(rope)
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
