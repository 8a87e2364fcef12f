"""Balance of a row's K, from its prompt or from the model's weights.

A prompt attends with the model's own function before it is stored, so its queries and keys are at hand. A few dozen
tokens are enough: the balance is a fourth root, rounded to a power of two. The first tokens are left out if there are
others, because the K of attention sinks is atypical. A shorter prompt uses the weights (hf/weights.py),
assuming inputs of unit variance, and so does a prompt that repeats one token: it does not tell how K varies.

The estimate counts all tokens alike, while errors matter where queries attend. With tiers the two agree: tokens that
receive attention are wide. With one format for all, some heads get worse, so only those with much to gain are balanced.

Tiers round K so that its error has hardly a component along the mean query (`quant.reference.aim`). What queries have
in common then causes no noise, and the balance counts only the rest of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from importlib.util import find_spec
from typing import NamedTuple

import numpy as np
import torch

from kvstrata.cache.policy.centre import rope_tables
from kvstrata.quant.calibration import pair_balance
from kvstrata.quant.reference import LARGEST
from kvstrata.quant.rope import mean_rotation

from . import rope as rope_of
from . import weights
from .moments import Moments, PromptSample, channels, sums

SINKS = 4  # leading tokens that are left out: attention sinks
ENOUGH = 16  # with at least as many tokens, the prompt is used rather than the weights
FEWEST = 4  # minimum number of tokens if there are no weights to use
MOST = 512  # maximum number of tokens used
AHEAD = 2048  # horizon: positions over which energies are averaged
NEXT = 512  # positions over which the mean query is averaged: RoPE turns it, and a direction is fixed
PRIOR = 32  # strength of the prior that both channels of a pair are alike, in tokens
LEAST = 1 / 32  # a channel has at least half of this share of its pair's energy, a 64th
SAME = 1e-4  # squared distance of V to the token before, relative to its square, up to which a token repeats it
REPEATED = 4  # a row with fewer than one in this many tokens that differ from the one before it is a repeated token
WORTH = 0.6  # expected noise of scores, relative to none balanced, up to which one format is balanced


class Estimate(NamedTuple):
    """Balance of rows and their mean query, float32 ``[rows, kv_heads, D]``; a query of zeros is not known."""

    balance: torch.Tensor
    query: torch.Tensor


class Squares(NamedTuple):
    """Expected squares and mean of a prompt's rows, float32 ``[rows, kv_heads, D]``; tokens used, ``[rows]``."""

    k: torch.Tensor  # of K less its centre
    k_whole: torch.Tensor
    q: torch.Tensor
    query: torch.Tensor  # mean of Q
    q_rest: torch.Tensor  # of Q less its mean
    tokens: torch.Tensor


def of_first_prompt(
    query: torch.Tensor,
    key: torch.Tensor,
    new: np.ndarray,
    useful: np.ndarray,
    module: torch.nn.Module,
    rope: Sequence[float],
    has_tiers: bool,
    real: torch.Tensor | None = None,
    aims: bool = False,
) -> Estimate:
    """Estimate of each row from its tokens, or its balance from the weights if it has few, without a query.

    Arguments are those of `from_prompt`; ``new`` is ``real`` on the host, ``useful`` is from `useful_tokens`,
    ``module`` is the model's attention. Without ``real`` it is uploaded, and the host waits for that.
    """
    turned, first = rope_of.interleaved(module), slice(columns_needed(new))
    rope = rope if rope_of.applies(module) else ()
    if real is None:
        real = torch.from_numpy(new).to(key.device, non_blocking=True)
    prompt = query.detach()[:, :, first], key.detach()[:, :, first]
    (own, mean), counts = from_prompt(*prompt, real, rope, turned, has_tiers, aims)
    if too_short(useful):
        by_weights = weights.balance_of(module, key.shape[1], key.shape[3], rope, turned)
        instead = torch.ones_like(own) if by_weights is None else by_weights.to(own.device).expand_as(own)
        counts = torch.minimum(counts, torch.from_numpy(useful).to(counts.device, non_blocking=True))
        enough = counts >= (FEWEST if by_weights is None else ENOUGH)
        own = torch.where(enough.view(-1, 1, 1), own, instead)
        mean = mean * enough.view(-1, 1, 1)
    return Estimate(own, mean)


def too_short(useful: np.ndarray) -> bool:
    """True if a row of ``useful [rows]`` has too few tokens for an estimate where the weights determine a balance."""
    return bool(useful.min() < SINKS + ENOUGH)


@torch.no_grad()
def useful_tokens(value: torch.Tensor, new: np.ndarray) -> np.ndarray:
    """Number of tokens of each row that an estimate can use, ``[rows]``: all, or few if most repeat the one before.

    Equal tokens have equal V, because V has no RoPE. Waits for the device.

    Args:
        value: ``[rows, kv_heads, n, D]`` of the first compressed layer.
        new: bool ``[rows, n]``, False for padding.
    """
    columns = columns_needed(new)
    v = value[:, :, :columns].float()
    moved = (v[:, :, 1:] - v[:, :, :-1]).square().sum((1, 3))
    differs = (moved > SAME * v[:, :, 1:].square().sum((1, 3))).cpu().numpy()
    compared = new[:, 1:columns] & new[:, : columns - 1] & (new.cumsum(1)[:, : columns - 1] > SINKS)
    different = (differs & compared).sum(1)
    repeats = REPEATED * different < compared.sum(1)
    return np.where(repeats, np.minimum(different, ENOUGH - 1), new.sum(1))


def columns_needed(real: np.ndarray) -> int:
    """Number of leading columns that contain the tokens `from_prompt` uses; ``real [rows, n]``, False for padding."""
    number = real.cumsum(1)
    used = (real & (number <= SINKS + MOST)).any(0)
    return int(np.flatnonzero(used)[-1:].sum()) + 1


def from_prompt(
    query: torch.Tensor,
    key: torch.Tensor,
    real: torch.Tensor,
    rope: Sequence[float],
    is_interleaved: bool | None,
    has_tiers: bool = True,
    aims: bool = False,
) -> tuple[Estimate, torch.Tensor]:
    """Estimate of each row, and the number of its tokens that were used, ``[rows]``.

    Args:
        query: ``[rows, heads, n, D]``, scaled as for the product with K; ``key [rows, kv_heads, n, D]``.
        real: bool ``[rows, columns]`` of the whole prompt, False for padding; the first n columns are used.
        rope: radians per position of K's rotated channel pairs, empty for none.
        is_interleaved: how RoPE pairs channels, see `rope.interleaved`; None balances single channels.
        has_tiers: tokens that receive attention get wider formats. If not, heads that gain little are not balanced.
        aims: K is rounded so that its error has hardly a component along the mean query.
    """
    own = squares(query, key, real, rope, is_interleaved)
    balance = from_squares(own.k, own.k_whole, own.q_rest if aims else own.q, rope, is_interleaved, has_tiers)
    return Estimate(balance, own.query), own.tokens


def from_squares(
    k_square: torch.Tensor,
    k_whole: torch.Tensor,
    q_square: torch.Tensor,
    rope: Sequence[float],
    is_interleaved: bool | None,
    has_tiers: bool,
) -> torch.Tensor:
    """Balance of expected squares ``[..., kv_heads, D]``, see `squares`; other arguments are those of `from_prompt`."""
    pairs = 0 if is_interleaved is None else len(rope)
    own = pair_balance(k_square, q_square, pairs, bool(is_interleaved), k_whole)
    if has_tiers:
        return own
    noise = (k_square / own.square()).sum(-1) * (q_square * own.square()).sum(-1)
    gains = noise <= WORTH * k_square.sum(-1) * q_square.sum(-1)
    return torch.where(gains.unsqueeze(-1), own, 1.0)


def load_kernels(
    heads: int, kv_heads: int, dim: int, dtype: torch.dtype, device: torch.device, rope: Sequence[float],
    is_interleaved: bool | None,
) -> None:  # fmt: skip
    """Compile and load what `from_prompt` needs on a CUDA device."""
    if device.type == "cuda":
        q = torch.zeros(1, 64, heads, dim, dtype=dtype, device=device).transpose(1, 2)
        from_prompt(q, q[:, :kv_heads], q.new_ones(1, 64, dtype=torch.bool), rope, is_interleaved)


def squares(
    query: torch.Tensor,
    key: torch.Tensor,
    real: torch.Tensor,
    rope: Sequence[float],
    is_interleaved: bool | None,
    follows: bool = True,
) -> Squares:
    """Expected squares of centred K, K, Q and centred Q, and the mean of Q.

    They are means over `AHEAD` positions, or over twice the tokens of a row if that is more. Arguments are those of
    `from_prompt`. If it is unknown how RoPE pairs channels, they are means over the prompt, without subtracting a
    centre.

    A pair of channels is a complex number z. Rotated back to position 0, rows have the means c of z, e of |z|² and p of
    z², which measures how much the two channels differ. Over all future positions these become c·μ1, e and p·μ2, where
    μ1 and μ2 are the mean rotations by the angle and by twice the angle, and the squares of the channels are
    (e ± Re p·μ2) / 2. Centring K subtracts |c·μ1|² from e and (c·μ1)² from p·μ2. Some models leave out RoPE in some
    layers: where the plain mean is longer than c, it is the centre, as in `policy.centre`.

    The mean of Q is that of the queries to come: over the next `NEXT` positions if they follow the prompt, else over
    the same positions as the energies.
    """
    tokens, real = real.sum(1), real[:, : key.shape[2]]
    number = real.cumsum(1) - 1
    skipped = (tokens - FEWEST).clamp(min=1, max=SINKS)
    use = real & (number >= skipped.unsqueeze(1)) & (number < SINKS + MOST)
    if use.device.type == "cpu":  # on a CPU, drop columns after the last used one; on a GPU that would need a sync
        last = int(use.any(0).nonzero().flatten()[-1:].sum()) + 1
        use, number, query, key = use[:, :last], number[:, :last], query[:, :, :last], key[:, :, :last]
    count = use.sum(1)
    weight = use.float() / count.clamp(min=1).unsqueeze(1)
    is_known = is_interleaved is not None
    cos, sin, angle = _constants(tuple(rope) if is_known else (), number.device)
    means = _moments(PromptSample(query, key, weight, number, (cos, sin), LARGEST, bool(is_interleaved)))
    turned, rest = (slice(cos.shape[1]), slice(cos.shape[1], None))
    (one, two), others = channels(cos.shape[1], key.shape[-1], is_interleaved=bool(is_interleaved))
    sums = torch.empty(5, *key.shape[:2], key.shape[-1], dtype=torch.float32, device=key.device)
    k_square, k_whole, q_square, q_mean, q_rest = sums.unbind(0)
    by_head = _of_heads(query, key.shape[1], weight)
    plain_q = _weighted(by_head, weight)
    centres = (means.x, means.y) if is_known or not rope else (torch.zeros_like(means.x),) * 2
    for channel, k, centre, q in zip(others, means[:2], centres, means[6:8], strict=True):
        k_square[..., channel] = (k[..., rest] - centre[..., rest].square()).clamp(min=0)
        k_whole[..., channel] = k[..., rest]
        q_square[..., channel] = q[..., rest]
        q_mean[..., channel] = plain_q[..., channel]
        q_rest[..., channel] = (q[..., rest] - plain_q[..., channel].square()).clamp(min=LEAST * q[..., rest])
    if not len(angle):
        return Squares(k_square, k_whole, q_square, q_mean, q_rest, count)
    m = Moments(*(x[..., turned] for x in means))
    horizon = (2 * tokens).clamp(min=AHEAD)
    first, second = (torch.complex(*mean_rotation(by * angle, horizon)).unsqueeze(1) for by in (1, 2))
    trust, trust_q = ((n / (n + PRIOR)).view(-1, 1, 1) for n in (count, count * (query.shape[1] // key.shape[1])))
    common, unlike = torch.complex(m.x, m.y), torch.complex(m.k_unlike, m.k_cross)
    centre = common * first
    differ = common.square() * second + (unlike - common.square()) * second * trust - centre.square()
    plain = _plain_mean(key, weight)
    plain = torch.complex(plain[..., one], plain[..., two])
    is_plain = _length(plain) > _length(common)
    removed = torch.where(is_plain, plain, centre).abs().square()
    differ_plain = (m.k_first - m.k_second - plain.square().real) * trust
    _split(k_square, one, two, m.k_first + m.k_second - removed, torch.where(is_plain, differ_plain, differ.real))
    k_whole[..., one], k_whole[..., two] = m.k_first, m.k_second
    unlike = torch.complex(m.q_unlike, m.q_cross)
    _split(q_square, one, two, m.q_first + m.q_second, (unlike * second * trust_q).real)
    common = _turned_back(by_head, weight, number, (cos, sin), (one, two))
    plain = torch.complex(plain_q[..., one], plain_q[..., two])
    if follows:
        first, second = (_next_rotation(by * angle, tokens) for by in (1, 2))
    is_plain = _length(plain) > _length(common)
    mean = torch.where(is_plain, plain, common * first)
    q_mean[..., one], q_mean[..., two] = mean.real, mean.imag
    differ = common.square() * second + (unlike - common.square()) * second * trust_q - mean.square()
    differ_plain = (m.q_first - m.q_second - plain.square().real) * trust_q
    left = (m.q_first + m.q_second - mean.abs().square()).clamp(min=LEAST * (m.q_first + m.q_second))
    _split(q_rest, one, two, left, torch.where(is_plain, differ_plain, differ.real))
    return Squares(k_square, k_whole, q_square, q_mean, q_rest, count)


def _next_rotation(angle: torch.Tensor, begin: torch.Tensor) -> torch.Tensor:
    """Mean rotation by ``angle [pairs]`` over `NEXT` positions from ``begin [rows]`` on: complex ``[rows, 1, n]``."""
    mean = torch.complex(*mean_rotation(angle, torch.full_like(begin, NEXT)))
    turn = begin.double().unsqueeze(1) * angle
    return (mean * torch.complex(turn.cos().float(), turn.sin().float())).unsqueeze(1)


def _of_heads(query: torch.Tensor, kv_heads: int, weight: torch.Tensor) -> torch.Tensor:
    """Mean of the queries of each KV head's group, float32 ``[rows, kv_heads, n, D]``; 0 for unused columns.

    Values that are not finite make that of their group 0: they are left out after the mean, which is smaller.
    """
    rows = query.unflatten(1, (kv_heads, -1)).mean(2, dtype=torch.float32)
    return torch.where((weight > 0)[:, None, :, None], rows, 0).nan_to_num(0.0, 0.0, 0.0).clamp(-LARGEST, LARGEST)


def _weighted(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Sum over tokens of ``rows [rows, kv_heads, n, D]`` times their weights."""
    return (rows * weight[:, None, :, None]).sum(2)  # no product that an autocast would round


def _turned_back(
    rows: torch.Tensor,
    weight: torch.Tensor,
    number: torch.Tensor,
    tables: tuple[torch.Tensor, torch.Tensor],
    pair: tuple[slice, slice],
) -> torch.Tensor:
    """Weighted mean of pairs rotated back to position 0, complex ``[rows, kv_heads, pairs]``."""
    cos, sin = (table[number.clamp(0, len(table) - 1)].unsqueeze(1) for table in tables)
    x, y = rows[..., pair[0]], rows[..., pair[1]]
    return torch.complex(_weighted(x * cos + y * sin, weight), _weighted(y * cos - x * sin, weight))


def _plain_mean(key: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Mean of K over the tokens used, not rotated back: float32 ``[rows, kv_heads, D]``."""
    used = (weight > 0)[:, None, :, None]
    rows = torch.where(used, key, 0).float().nan_to_num(0.0, 0.0, 0.0).clamp(-LARGEST, LARGEST)
    return _weighted(rows, weight)


def _length(mean: torch.Tensor) -> torch.Tensor:
    """Squared length of a complex mean over all heads of a row, ``[rows, 1, 1]``."""
    return mean.abs().square().sum((1, 2), keepdim=True)


def _moments(sample: PromptSample) -> Moments:
    if sample.key.device.type == "cuda":
        from . import moments_triton

        return Moments(*moments_triton.sums(sample).unbind(2))
    if find_spec("numba") is not None:
        from . import moments_numba

        return Moments(*moments_numba.sums(sample).unbind(2))
    return Moments(*sums(sample).unbind(2))


def _split(into: torch.Tensor, one: slice, two: slice, size: torch.Tensor, differ: torch.Tensor) -> None:
    """Write the squares of the two channels of each pair: their sum is ``size``, their difference ``differ``."""
    size = size.clamp(min=0)
    for part, difference in ((one, differ), (two, -differ)):
        into[..., part] = torch.maximum(size + difference, LEAST * size) / 2


@lru_cache(maxsize=8)
def _constants(rope: tuple[float, ...], device: torch.device) -> tuple[torch.Tensor, ...]:
    """Cos and sin ``[positions, pairs]`` of the tokens used, and the angles, float64 ``[pairs]``; cached on the
    device, since an upload synchronises with it."""
    with torch.inference_mode(False), torch.no_grad():
        return *rope_tables(rope, SINKS + MOST, device), torch.tensor(rope, dtype=torch.float64, device=device)
