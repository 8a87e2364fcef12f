"""The balance of a row's K, from its prompt or from the model's weights.

A prompt attends by the model's own function before it is stored, so its queries and keys are at hand. Some tens of
tokens are enough: the balance is a fourth root, rounded to a power of two. The first tokens are left out if there are
others, since models have attention sinks whose K is like no other. A shorter prompt uses the rows of ``q_proj`` and
``k_proj``, as if the inputs of these were of unit variance.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch

from kvstrata.cache.policy.centre import mean_turn
from kvstrata.quant.calibration import pair_balance

SINKS = 4  # first tokens that are left out
ENOUGH = 16  # tokens of a prompt that are preferred to weights
FEWEST = 4  # tokens that are used where there are no weights
MOST = 512  # tokens that are looked at
HORIZON = 2048  # positions that a balance and a centre are planned for, or twice the tokens of a prompt
PRIOR = 32  # tokens that weigh as much as the assumption that both channels of a pair are alike
LEAST = 1 / 32  # of a pair's energy, for each of its channels


def interleaved(module: torch.nn.Module) -> bool | None:
    """True if the model's RoPE pairs channels (2 i, 2 i + 1), False for (i, i + n), None if that is unknown."""
    function = getattr(sys.modules.get(type(module).__module__), "rotate_half", None)
    if function is None:
        return None
    turned = function(torch.arange(1.0, 9.0, device="cpu")).abs().tolist()
    return {5.0: False, 2.0: True}.get(turned[0])


def from_prompt(
    query: torch.Tensor,
    key: torch.Tensor,
    real: torch.Tensor,
    rope: Sequence[float],
    is_interleaved: bool | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Balance of each row, float32 ``[rows, kv_heads, D]``, and how many of its tokens were looked at, ``[rows]``.

    Args:
        query: ``[rows, heads, n, D]``, as it multiplies K; ``key [rows, kv_heads, n, D]``.
        real: bool ``[rows, n]``, False for padding.
        rope: radians per position of K's rotated channel pairs, empty for none.
        is_interleaved: how RoPE pairs channels, see `interleaved`; None takes channels as the prompt has them.
    """
    k_square, q_square, count = squares(query, key, real, rope, is_interleaved)
    return pair_balance(k_square, q_square), count


def squares(
    query: torch.Tensor,
    key: torch.Tensor,
    real: torch.Tensor,
    rope: Sequence[float],
    is_interleaved: bool | None,
    positions: int = HORIZON,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Expected squares of centred K and of Q, float64 ``[rows, kv_heads, D]``; tokens looked at, ``[rows]``.

    They are means over ``positions``, twice as many as a row has tokens if that is more. Arguments are those of
    `from_prompt`. Where RoPE pairs channels in an unknown way, they are those of the prompt, K with its centre.
    """
    kv_heads = key.shape[1]
    number, tokens = real.cumsum(1) - 1, real.sum(1)
    skipped = (tokens - FEWEST).clamp(min=1, max=SINKS)
    use = real & (number >= skipped.unsqueeze(1)) & (number < SINKS + MOST)
    if use.device.type == "cpu":  # on a CPU, drop columns behind the last used one; on a GPU that would need a sync
        last = int(use.any(0).nonzero().flatten()[-1:].sum()) + 1
        use, number, query, key = use[:, :last], number[:, :last], query[:, :, :last], key[:, :, :last]
    weight = use.double() / use.sum(1, keepdim=True).clamp(min=1)
    k, q = (
        torch.where(use[:, None, :, None], x, 0).nan_to_num(0.0, 0.0, 0.0).double().transpose(1, 2)
        for x in (key, query)
    )
    if rope and is_interleaved is None:
        k_square, q_square = (torch.einsum("rnhd,rn->rhd", x.square(), weight) for x in (k, q))
    else:
        angle = torch.tensor(rope, dtype=torch.float64, device=k.device)
        turn = number.unsqueeze(-1) * angle  # [rows, n, pairs]
        horizon, count = (2 * tokens).clamp(min=positions), use.sum(1, keepdim=True)
        ahead = [torch.complex(*(x.double() for x in mean_turn(by * angle, horizon))) for by in (1, 2)]
        ahead.append(ahead[1] * (count / (count + PRIOR)))
        k_square = _ahead(k, weight, turn, ahead, bool(is_interleaved), centred=True)
        q_square = _ahead(q, weight, turn, ahead, bool(is_interleaved), centred=False)
    return k_square, q_square.unflatten(1, (kv_heads, -1)).mean(2), use.sum(1)


def _ahead(
    x: torch.Tensor,
    weight: torch.Tensor,
    turn: torch.Tensor,
    ahead: Sequence[torch.Tensor],
    is_interleaved: bool,
    centred: bool,
) -> torch.Tensor:
    """Expected squares ``[rows, heads, D]`` of rows ``x [rows, n, heads, D]``, less their centre if ``centred``.

    A pair of channels is a complex number z. Turned back to position 0, rows have the means c of z, e of |z|² and p of
    z², which says how unlike the two channels are. Over all positions to come these are c·μ1, e and p·μ2, and the
    squares of the channels (e ± Re p·μ2) / 2; a centre takes |c·μ1|² from e and (c·μ1)² from p·μ2. ``ahead``, complex
    ``[rows, pairs]``, has μ1, μ2 and the part of μ2 that p - c² counts with. ``turn [rows, n, pairs]`` is the angle of
    each token, and ``weight [rows, n]`` sums to 1.
    """
    one, two = _pairs(turn.shape[-1], is_interleaved)
    by = weight[:, :, None, None]
    z = torch.complex(x[..., one], x[..., two]) * torch.polar(torch.ones_like(turn), -turn).unsqueeze(2)
    mean, square = (z * by).sum(1), (z * z * by).sum(1)
    size = (z.abs().square() * by).sum(1)
    first, second, trusted = (factor.unsqueeze(1) for factor in ahead)
    differ = mean.square() * second + (square - mean.square()) * trusted
    found = (x.square() * by).sum(1)  # of channels that are not turned
    if centred:
        centre = mean * first
        size, differ = size - centre.abs().square(), differ - centre.square()
        found -= (x * by).sum(1).square()
    found[..., one] = torch.maximum(size + differ.real, LEAST * size) / 2
    found[..., two] = torch.maximum(size - differ.real, LEAST * size) / 2
    return found.clamp(min=0)


def _pairs(pairs: int, is_interleaved: bool) -> tuple[slice, slice]:
    """First and second channels of the pairs that RoPE turns."""
    if is_interleaved:
        return slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2)
    return slice(pairs), slice(pairs, 2 * pairs)


def from_weights(
    module: torch.nn.Module, kv_heads: int, dim: int, rope: Sequence[float], is_interleaved: bool | None
) -> torch.Tensor | None:
    """Balance ``[kv_heads, D]`` of an attention module from its projections, or None where they do not determine it."""
    q_proj, k_proj = (getattr(module, name, None) for name in ("q_proj", "k_proj"))
    normed = any(getattr(module, name, None) is not None for name in ("q_norm", "k_norm", "q_layernorm", "k_layernorm"))
    if normed or (rope and is_interleaved is None):
        return None
    squares = []
    for linear, heads in ((k_proj, kv_heads), (q_proj, None)):
        weight, bias = getattr(linear, "weight", None), getattr(linear, "bias", None)
        if not isinstance(linear, torch.nn.Linear) or weight is None or not weight.is_floating_point():
            return None
        if weight.shape[0] % (kv_heads * dim) or (heads and weight.shape[0] != heads * dim):
            return None
        by_row = weight.detach().float().square().sum(1).view(kv_heads, -1, dim).mean(1)
        if bias is not None:
            offset = bias.detach().float().square().view(kv_heads, -1, dim)
            if heads:  # the centre removes what RoPE leaves of it
                offset = offset * (1 - _steady(rope, dim, bool(is_interleaved)).to(offset.device))
            by_row = by_row + offset.mean(1)
        squares.append(by_row)
    return pair_balance(squares[0], squares[1], len(rope), bool(is_interleaved))


def centre_from_bias(
    module: torch.nn.Module, kv_heads: int, dim: int, rope: Sequence[float], is_interleaved: bool
) -> torch.Tensor | None:
    """Centre ``[kv_heads, D]`` of K: the mean of ``k_proj``'s bias over positions of the horizon; None without one."""
    bias = getattr(getattr(module, "k_proj", None), "bias", None)
    if not isinstance(bias, torch.Tensor) or bias.numel() != kv_heads * dim:
        return None
    own, pairs = bias.detach().float().view(kv_heads, dim), len(rope)
    if not pairs:
        return own
    cos, sin = (
        x[0].to(own.device) for x in mean_turn(torch.tensor(rope, dtype=torch.float64), torch.tensor([HORIZON]))
    )
    two = _pairs(pairs, is_interleaved)
    x, y = own[:, two[0]], own[:, two[1]]
    centre = own.clone()
    centre[:, two[0]], centre[:, two[1]] = x * cos - y * sin, y * cos + x * sin
    return centre


def _steady(rope: Sequence[float], dim: int, is_interleaved: bool) -> torch.Tensor:
    """Share of a constant's energy that is left in its mean over the horizon, per channel; 1 without RoPE."""
    share = torch.ones(dim)
    if rope:
        cos, sin = mean_turn(torch.tensor(rope, dtype=torch.float64), torch.tensor([HORIZON]))
        by_pair = cos[0].square() + sin[0].square()
        share[: 2 * len(rope)] = by_pair.repeat_interleave(2) if is_interleaved else by_pair.repeat(2)
    return share
