"""Warns during a prompt if the budget is too small for a model.

The first new tokens of a prompt are rounded as the tiers of the budget round them, with the balance and the centre of
the cache, and some of its queries attend to them. The estimate is the relative error of a layer's attention output:

    error(fraction)^2 = share * error(wider tier)^2 + (1 - share) * error(narrower tier)^2

with the two tiers whose bytes per token enclose the fraction. It ignores importance, which gives the wider tier to
tokens that matter, and the bytes of tables. Layers with a sliding window have one format, so their error is that of the
format (`WindowGuard`). Each model is checked once per setting (budget, formats, balance and
calibration) and process.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from weakref import WeakKeyDictionary

import numpy as np
import torch

from kvstrata.cache import TieredCache
from kvstrata.cache.policy.balance import factors_of
from kvstrata.cache.policy.centre import centre_of, horizon
from kvstrata.cache.storage.page import loops_for
from kvstrata.layout import Format, rotation
from kvstrata.quant import reference as quant
from kvstrata.quant.calibration import Calibration

from .logits import Logits

FEWEST = 64  # minimum number of prompt tokens for an estimate
MOST = 256  # maximum number of tokens used
QUERIES = 16  # queries that attend to them
LIMIT = 0.5  # relative error of a layer's attention output above which to warn: docs/hf.md
LADDER = ("K8V8", "K8V4", "K4V4", "K4V3", "K3V2", "K2V2")  # formats assumed for a recommended budget
ADVICE = (0.25, 0.3, 0.35, 0.4, 0.5, 0.6)  # budgets that a warning may recommend

Checked = tuple[torch.nn.Module, object]  # a model's attention, and the setting it is checked with

_seen: WeakKeyDictionary[torch.nn.Module, set[object]] = WeakKeyDictionary()


class BudgetWarning(UserWarning):
    """The budget of a cache is estimated to change the attention output of a layer considerably."""


class Sample:
    """Some queries of a prompt, and the rows of K and V that they attend to, in one layer of one request.

    Args:
        query: ``[heads, n, D]``, the request's first n tokens; key, value: ``[kv_heads, n, D]``.
        balance, centre: ``[kv_heads, D]`` of K. ``balance=None``: no balance. ``centre=None``: estimated from the rows.
        direction: int8, same shape, of the error of K (`quant.reference.aim`), or None.
        rope, interleaved: of K's rotated pairs, see `centre_of`; the centre is that of ``ahead`` positions.
        plain: numbers of sink and recent tokens, which stay at 16 bit.
    """

    def __init__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        logits: Logits,
        *,
        balance: torch.Tensor | None,
        centre: torch.Tensor | None,
        rope: Sequence[float],
        interleaved: bool | None,
        ahead: torch.Tensor,
        plain: tuple[int, int],
        direction: torch.Tensor | None = None,
    ) -> None:
        self.direction = None if direction is None else direction.unsqueeze(1)
        tokens = min(query.shape[1], MOST)
        query_index = torch.linspace(tokens // 2, tokens - 1, QUERIES, dtype=torch.float32, device=query.device).long()
        token_index = torch.arange(tokens, device=query.device)
        self.logits = logits
        self.query = query[:, query_index].float().unflatten(0, (key.shape[0], -1))  # [kv_heads, group, QUERIES, D]
        self.k, self.v = (x[:, :tokens].float().nan_to_num(0.0, 0.0, 0.0) for x in (key, value))
        self.hidden = token_index > query_index.unsqueeze(1)
        sinks, recent = plain[0], min(plain[1], tokens // 8)
        self.is_plain = (token_index > query_index.unsqueeze(1) - recent) | (token_index < sinks)
        self.balance = torch.ones_like(self.k[:, :1]) if balance is None else balance.unsqueeze(1)
        if centre is None:
            present = torch.ones_like(self.k[None, ..., :1], dtype=torch.bool)
            centre = centre_of(self.k[None], present, rope, ahead, interleaved)[0]
        self.centre = centre.unsqueeze(1)
        self.truth = self._attend(self.k, self.v)

    @classmethod
    def of_tiers(
        cls,
        cache: TieredCache,
        layer: int,
        request: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        logits: Logits,
    ) -> Sample:
        """Sample of a layer of a TieredCache, with its balance, centre and direction."""
        balance, tokens = factors_of(cache, layer, [request]), min(query.shape[1], MOST)
        return cls(
            query, key, value, logits, balance=None if balance is None else balance[0],
            centre=cache.centre[request, layer] if cache._centred[request, layer] else None, rope=cache.rope,
            interleaved=cache.interleaved, ahead=horizon(torch.tensor([tokens], device=query.device), cache.max_tokens),
            plain=(cache.sink_tokens, cache.recent_tokens),
            direction=None if cache.direction is None else cache.direction[request, layer],
        )  # fmt: skip

    def error(self, form: Format) -> float:
        """Relative error of the attention output with all but sink and recent tokens in a format."""
        centre = self.centre if form.centre else torch.zeros_like(self.centre)
        rows, centre_row = self.k / self.balance, centre / self.balance
        k = _rounded(rows, centre_row, form.k_bits, form.rotate, quant.K_GAIN, self.direction)
        v = _rounded(self.v, None, form.v_bits, form.rotate, quant.V_GAIN)
        out = self._attend(k * self.balance + centre, v)
        return float(((out - self.truth).square().sum() / self.truth.square().sum()).sqrt())

    def _attend(self, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        scores = torch.where(self.is_plain, self._scores(self.k), self._scores(k)).masked_fill(self.hidden, -torch.inf)
        if self.logits.sinks is not None:
            sinks = self.logits.sinks.float().view(*scores.shape[:2], 1, 1).expand(-1, -1, QUERIES, 1)
            scores = torch.cat([scores, sinks], -1)
        weights = scores.softmax(-1)[..., : k.shape[1]]
        plain = torch.where(self.is_plain, weights, 0.0)
        return plain @ self.v.unsqueeze(1) + (weights - plain) @ v.unsqueeze(1)

    def _scores(self, k: torch.Tensor) -> torch.Tensor:
        scores = self.query @ k.unsqueeze(1).transpose(-1, -2) * self.logits.scale
        softcap = self.logits.softcap
        return scores if softcap is None else (scores / softcap).tanh() * softcap


def _rounded(
    x: torch.Tensor,
    centre: torch.Tensor | None,
    bits: int,
    rotate: bool,
    gain: dict[int, float],
    direction: torch.Tensor | None = None,
) -> torch.Tensor:
    """Rows ``[..., D]`` after a round trip through pages with ``bits`` bits per value, float32, without the centre."""
    flat = x.flatten(0, -2)
    if (loops := loops_for(flat)) is None:
        codes, scale = quant.quantize_plain(x, centre, bits, rotate, gain[bits], direction)
    else:  # the same codes
        by_row, own = (None if one is None else one.expand_as(x).flatten(0, -2) for one in (centre, direction))
        codes, scale = loops.quantize_plain(flat, by_row, bits, rotate, gain[bits], own)
        codes, scale = codes.view(x.shape), scale.view(x.shape[:-1])
    rows = quant.decode(codes, scale, bits)
    return rotation.rotate(rows) if rotate else rows


def error_at(fraction: float, prices: Sequence[float], formats: Sequence[Format], sample: Sample) -> float:
    """Estimated error at a fraction of 16 bit; ``prices`` are the formats' bytes as such fractions, widest first."""
    below = next((i for i, price in enumerate(prices) if price <= fraction), len(prices) - 1)
    if below == 0 or prices[below] > fraction:
        return sample.error(formats[below])
    share = (fraction - prices[below]) / (prices[below - 1] - prices[below])
    wide, narrow = (sample.error(formats[i]) if part else 0.0 for i, part in ((below - 1, share), (below, 1 - share)))
    return float((share * wide**2 + (1 - share) * narrow**2) ** 0.5)


def _is_new(module: torch.nn.Module, real: np.ndarray, setting: object) -> bool:
    """True if a prompt is long enough for an estimate, and the model was not checked with this setting before."""
    return bool(real.size) and real.sum(1).max() >= FEWEST and setting not in _seen.get(module, ())


def _note(checked: Checked | None) -> None:
    """Note that a model was checked with a setting."""
    if checked is not None:
        _seen.setdefault(checked[0], set()).add(checked[1])


def _warn(fraction: float, error: float, where: str, instead: str) -> None:
    warnings.warn(
        f"budget={fraction:g} is too small for this model: estimated attention error {100 * error:.0f} % in {where};"
        f" try {instead}",
        BudgetWarning,
        stacklevel=3,
    )


class Guard:
    """Error estimate of one cache, collected layer by layer over a prompt; created by `begin`."""

    def __init__(self, cache: TieredCache, request: int, chosen: bool = False) -> None:
        self.cache, self.request, self.fraction = cache, request, float(cache.budget.amount or 0)
        self.chosen = chosen  # tiers are the user's, so a recommended budget needs others
        self.worst, self.layer = 0.0, 0
        self.advice: float | None = 0.0  # smallest sufficient budget so far, None if there is none
        self.checked: Checked | None = None

    @classmethod
    def begin(
        cls,
        cache: TieredCache,
        module: torch.nn.Module,
        real: np.ndarray,
        chosen: bool = False,
        calibration: Calibration | None = None,
    ) -> Guard | None:
        """Guard for a prompt's new tokens, ``real [rows, n]`` without padding; None if too short or checked before.

        ``chosen``: the user chose the cache's tiers. ``calibration`` is the one that the cache uses.
        """
        if not isinstance(cache.budget.amount, float):
            return None
        given = None if calibration is None else calibration.fingerprint
        setting = (cache.budget.amount, cache.formats, cache.balance is None, given)
        if not _is_new(module, real, setting):
            return None
        guard = cls(cache, int(real.sum(1).argmax()), chosen)
        guard.checked = module, setting
        return guard

    @torch.no_grad()
    def add(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        real: torch.Tensor,
        logits: Logits,
    ) -> None:
        """Estimate a layer: ``query [rows, heads, n, D]``, ``key, value [rows, kv_heads, n, D]``, ``real [rows, n]``"""
        cache, chosen = self.cache, real[self.request].nonzero().flatten()[:MOST]
        q, k, v = (x[self.request].detach()[:, chosen] for x in (query, key, value))
        sample = Sample.of_tiers(cache, layer, self.request, q, k, v, logits)
        whole = cache.page_tokens * cache.budget.token_bytes
        prices = [price / whole for price in cache.budget.page_price[1:]]
        error = error_at(self.fraction, prices, cache.formats[1:], sample)
        if error > self.worst:
            self.worst, self.layer = error, layer
        if error > LIMIT and self.advice is not None:
            formats = [Format.parse(name, cache.head_dim, cache.page_tokens) for name in LADDER]
            extra = cache.budget.page_price[1] - cache.formats[1].page_bytes  # positions and importance
            prices = [(form.page_bytes + extra) / whole for form in formats]
            choices = (x for x in ADVICE if x > self.fraction)
            enough = next((x for x in choices if error_at(x, prices, formats, sample) <= LIMIT / 2), None)
            self.advice = None if enough is None else max(self.advice, enough)

    def finish(self) -> None:
        """Warn if a layer's error is above the limit; the model counts as checked from now on."""
        _note(self.checked)
        if self.worst > LIMIT:
            instead = f"budget={self.advice:g}" if self.advice else "budget=1.0"
            if self.chosen:
                instead += " without tiers="
            _warn(self.fraction, self.worst, f"layer {self.layer}", instead)


class WindowGuard:
    """Error estimate of the layers with a sliding window, in their one format, over a prompt.

    ``request``: row of the batch with the most tokens, ``fraction``: the cache's budget.
    """

    def __init__(self, request: int, fraction: float) -> None:
        self.request, self.fraction = request, fraction
        self.worst, self.where, self.advice = 0.0, "", 0.0
        self.checked: Checked | None = None

    @classmethod
    def begin(
        cls, fraction: float, module: torch.nn.Module, real: np.ndarray, setting: tuple[object, ...]
    ) -> WindowGuard | None:
        """Guard for a prompt's new tokens, ``real [rows, n]`` without padding; None if too short or checked before."""
        setting = fraction, *setting
        if not _is_new(module, real, setting):
            return None
        guard = cls(int(real.sum(1).argmax()), fraction)
        guard.checked = module, setting
        return guard

    def add(self, place: int, form: Format, sample: Sample, format_at: Callable[[float], Format | None]) -> None:
        """Estimate the ``place``-th layer of the model, in format ``form``; ``format_at`` a budget it has another."""
        error = sample.error(form)
        if error > self.worst:
            self.worst, self.where = error, f"layer {place}, a sliding window in {form.name}"
        if error > LIMIT:
            wider = ((x, format_at(x)) for x in ADVICE if x > self.fraction)
            enough = next((x for x, other in wider if other and sample.error(other) <= LIMIT / 2), 1.0)
            self.advice = max(self.advice, enough)

    def finish(self) -> None:
        """Warn if a layer's error is above the limit; the model counts as checked from now on."""
        _note(self.checked)
        if self.worst > LIMIT:
            _warn(self.fraction, self.worst, self.where, f"budget={self.advice:g}")
