"""The balance of a row's K, from its prompt or from the model's weights.

A prompt attends by the model's own function before it is stored, so its queries and keys are at hand. Some tens of
tokens are enough: the balance is a fourth root, rounded to a power of two. The first tokens are left out if there are
others, since models have attention sinks whose K is like no other. A shorter prompt uses the rows of ``q_proj`` and
``k_proj``, as if the inputs of these were of unit variance.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch

from kvstrata.cache.policy.centre import mean_turn
from kvstrata.quant.calibration import pair_balance, pair_means

SINKS = 4  # first tokens that are left out
ENOUGH = 16  # tokens of a prompt that are preferred to weights
FEWEST = 4  # tokens that are used where there are no weights
MOST = 512  # tokens that are looked at
HORIZON = 2048  # positions that a centre is planned for


def interleaved(module: torch.nn.Module) -> bool | None:
    """True if the model's RoPE pairs channels (2 i, 2 i + 1), False for (i, i + n), None if that is unknown."""
    return _interleaved(getattr(sys.modules.get(type(module).__module__), "rotate_half", None))


@lru_cache(maxsize=64)
def _interleaved(function: Any) -> bool | None:
    if function is None:
        return None
    turned = function(torch.arange(1.0, 9.0, device="cpu")).abs().tolist()
    return {5.0: False, 2.0: True}.get(turned[0])


def columns_needed(real: np.ndarray) -> int:
    """Number of first columns that hold the tokens `from_prompt` looks at; ``real [rows, n]``, False for padding."""
    number = real.cumsum(1)
    used = (real & (number <= SINKS + MOST)).any(0)
    return int(np.flatnonzero(used)[-1:].sum()) + 1


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
        is_interleaved: how RoPE pairs channels, see `interleaved`; None balances single channels.
    """
    k_square, q_square, count = squares(query, key, real, rope, is_interleaved)
    pairs = 0 if is_interleaved is None else len(rope)
    return pair_balance(k_square, q_square, pairs, bool(is_interleaved)), count


def squares(
    query: torch.Tensor, key: torch.Tensor, real: torch.Tensor, rope: Sequence[float], is_interleaved: bool | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Mean squares of centred K and of Q, float64 ``[rows, kv_heads, D]``; tokens looked at, ``[rows]``.

    Arguments are those of `from_prompt`. Where RoPE pairs channels in an unknown way, K counts with its centre.
    """
    kv_heads = key.shape[1]
    number = real.cumsum(1) - 1
    skipped = (real.sum(1, keepdim=True) - FEWEST).clamp(min=1, max=SINKS)
    use = real & (number >= skipped) & (number < SINKS + MOST)
    if use.device.type == "cpu":  # on a CPU, drop columns behind the last used one; on a GPU that would need a sync
        last = int(use.any(0).nonzero().flatten()[-1:].sum()) + 1
        use, query, key = use[:, :last], query[:, :, :last], key[:, :, :last]
    weight = use.double() / use.sum(1, keepdim=True).clamp(min=1)
    k, q = (
        torch.where(use[:, None, :, None], x, 0).nan_to_num(0.0, 0.0, 0.0).double().transpose(1, 2)
        for x in (key, query)
    )
    k_square, q_square = (torch.einsum("rnhd,rn->rhd", x.square(), weight) for x in (k, q))
    if is_interleaved is not None or not rope:
        k_square = pair_means(k_square, len(rope), bool(is_interleaved))
        k_square = (k_square - _centre_square(k, weight, rope, bool(is_interleaved))).clamp(min=0)
    return k_square, q_square.unflatten(1, (kv_heads, -1)).mean(2), use.sum(1)


def _centre_square(k: torch.Tensor, weight: torch.Tensor, rope: Sequence[float], is_interleaved: bool) -> torch.Tensor:
    """Mean square, over the channels of a pair, of the centre that a cache subtracts from ``k [rows, n, kv_heads, D]``.

    The mean of rows turned back to position 0, times what RoPE leaves of a constant; ``weight [rows, n]`` sums to 1.
    """
    pairs, constants = len(rope), _constants(tuple(rope), k.shape[-1], is_interleaved, k.device)
    cos, sin = (x[: k.shape[1]] for x in constants[:2])
    if len(cos) < k.shape[1]:
        cos, sin = _turns(rope, k.shape[1], k.device)
    two = (
        (slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2)) if is_interleaved else (slice(pairs), slice(pairs, 2 * pairs))
    )
    x, y = k[..., two[0]], k[..., two[1]]
    means = k.clone()
    means[..., two[0]], means[..., two[1]] = x * cos + y * sin, y * cos - x * sin
    square = torch.einsum("rnhd,rn->rhd", means, weight).square()
    return pair_means(square, pairs, is_interleaved) * constants[2]


def _turns(rope: Sequence[float], count: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Cos and sin of each pair's angle at the first positions, float64 ``[count, 1, pairs]``."""
    angle = torch.tensor(rope, dtype=torch.float64, device=device)
    turn = torch.arange(count, dtype=torch.float64, device=device).unsqueeze(1) * angle
    return turn.cos().unsqueeze(1), turn.sin().unsqueeze(1)


@lru_cache(maxsize=8)
def _constants(
    rope: tuple[float, ...], dim: int, is_interleaved: bool, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`_turns` of the positions of a usual prompt, and `_steady`, on the device: their upload waits for it."""
    with torch.inference_mode(False), torch.no_grad():
        return *_turns(rope, SINKS + MOST, device), _steady(rope, dim, is_interleaved).to(device)


_of_weights: WeakKeyDictionary[torch.nn.Module, tuple[Any, torch.Tensor | None]] = WeakKeyDictionary()


def from_weights(
    module: torch.nn.Module, kv_heads: int, dim: int, rope: Sequence[float], is_interleaved: bool | None
) -> torch.Tensor | None:
    """Balance ``[kv_heads, D]`` of an attention module from its projections, or None where they do not determine it.

    Computed once for a module, until its weights change.
    """
    sizes = (kv_heads, dim, tuple(rope), is_interleaved)
    linears = [getattr(module, name, None) for name in ("q_proj", "k_proj")]
    weights = [getattr(linear, name, None) for linear in linears for name in ("weight", "bias")]
    tensors = [x for x in weights if isinstance(x, torch.Tensor)]
    if any(x.is_inference() for x in tensors):  # which have no version
        return _from_weights(module, *sizes)
    key = (*sizes, *map(type, linears), *((x.data_ptr(), x._version) for x in tensors))
    known = _of_weights.get(module)
    if known is None or known[0] != key:
        with torch.inference_mode(False), torch.no_grad():
            known = _of_weights[module] = key, _from_weights(module, *sizes)
    return known[1]


def _from_weights(
    module: torch.nn.Module, kv_heads: int, dim: int, rope: Sequence[float], is_interleaved: bool | None
) -> torch.Tensor | None:
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
    two = (
        (slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2)) if is_interleaved else (slice(pairs), slice(pairs, 2 * pairs))
    )
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
