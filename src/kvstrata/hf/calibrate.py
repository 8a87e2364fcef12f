"""`calibrate`: balance and centres of a model's K, from one forward over some text."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import torch

from kvstrata.cache.policy.centre import CENTRE_TOKENS, centre_of
from kvstrata.quant.calibration import Calibration, LayerCalibration

from . import attention, balance, support
from .cache import StrataCache
from .hybrid import HybridLayer
from .layer import StrataLayer
from .rope import interleaved, layer_frequencies
from .window import WindowLayer, window_of

HORIZON = 4096  # positions over which centres are averaged: no more than the model has, no fewer than the rows used


def _statistics(
    layer: _Recorder | _WindowRecorder, call: attention.AttentionCall, kind: str, has_tiers: bool
) -> LayerCalibration:
    """Balance and centre of a layer, from K and Q of one call without padding."""
    query, key = call.query, call.key
    for name, x in (("K", key), ("Q", query)):
        if not bool(x.isfinite().all()):
            raise ValueError(f"model: expected finite {name} in layer {layer.place}, got NaN or infinity")
    real = torch.ones(len(query), query.shape[2], dtype=torch.bool, device=query.device)
    rope, turned = layer_frequencies(call.module, layer.owner._text, key.shape[3], kind), interleaved(call.module)
    each = balance.squares(query, key, real, rope, turned, follows=False)
    k, whole, mean, *of_q = (x.mean(0) for x in (each.k, each.k_whole, each.query, each.q, each.q_rest))
    own, aimed = (balance.from_squares(k, whole, q, rope, turned, has_tiers) for q in of_q)
    rows = key.float().nan_to_num(0.0, 0.0, 0.0)[:, :, :CENTRE_TOKENS]
    present = torch.ones_like(rows[..., :1], dtype=torch.bool)
    present[:, :, : balance.SINKS] = False  # attention sinks
    ahead = max(min(HORIZON, support.context(layer.owner._text) or HORIZON), rows.shape[2])
    horizon = torch.full((len(rows),), ahead, device=rows.device)
    centre = centre_of(rows * present, present, rope, horizon, turned).mean(0)
    parts = LayerCalibration(own.cpu(), (centre / own).float().cpu())
    return replace(parts, query=mean.cpu(), aimed=aimed.cpu()) if has_tiers else parts


def _attend(layer: _Recorder | _WindowRecorder, call: attention.AttentionCall) -> torch.Tensor:
    """The model's own attention, also for layers that share these K and V."""
    query, key, value, mask, _, model_attention, *_ = call
    layer.columns += query.shape[2]
    if layer.owner.shares:
        layer.attend_shared = lambda query, mask, model_attention, logits: model_attention(query, key, value, mask)
    return model_attention(query, key, value, mask)


class _Recorder(StrataLayer):
    """Layer that attends as the model does and records statistics of its K and Q instead of storing rows."""

    statistics = LayerCalibration()  # of a layer that is left plain for the shape of its K and V

    def attend(self, call: attention.AttentionCall) -> torch.Tensor:
        self.statistics = _statistics(self, call, "full_attention", has_tiers=True)
        return _attend(self, call)


class _HybridRecorder(_Recorder, HybridLayer):
    """`_Recorder` that keeps the other states of its layer."""


class _WindowRecorder(WindowLayer):
    """`_Recorder` of a layer with a sliding window."""

    statistics = LayerCalibration()

    def attend(self, call: attention.AttentionCall) -> torch.Tensor:
        self.statistics = _statistics(self, call, "sliding_attention", has_tiers=False)
        return _attend(self, call)


def _recorder(layer: StrataLayer) -> _Recorder:
    """Recorder in place of a layer."""
    if isinstance(layer, HybridLayer):
        return _HybridRecorder(layer.owner, layer.place, layer.index, layer.number_of_states)
    return _Recorder(layer.owner, layer.place, layer.index)


@torch.no_grad()
def calibrate(model: Any, ids: torch.Tensor, name: str = "") -> Calibration:
    """Balance and centres of the layers that a `StrataCache` compresses, sliding windows included, from one forward.

    Args:
        model: a transformers model in eval mode.
        ids: int64 ``[rows, tokens]`` without padding, at least 16 tokens per row; a few hundred tokens are plenty.
        name: name of the model, kept in the calibration.

    Returns a `Calibration` without sensitivities; a layer that is left plain for the shape of its K and V has neither
    balance nor centre. Not safe under CUDA-graph capture.

    Raises ValueError for fewer tokens, for a row that repeats one token, for a model none of whose layers can be
    compressed, and for K or Q that is not finite.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> sizes = dict(num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=64)
        >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=64, hidden_size=64, intermediate_size=64, **sizes))
        >>> calibrate(model, torch.randint(0, 64, (1, 100))).shape
        (2, 64)
    """
    if ids.dim() != 2 or ids.shape[1] < balance.ENOUGH or not len(ids):
        raise ValueError(
            f"ids: expected [at least one row, at least {balance.ENOUGH} tokens], got shape {tuple(ids.shape)}"
        )
    used = ids[:, balance.SINKS : balance.SINKS + balance.MOST]
    different = int((used[:, 1:] != used[:, :-1]).sum(1).min())
    if balance.REPEATED * different < used.shape[1] - 1:
        raise ValueError(
            f"ids: expected text, got a row of which {different} of the {used.shape[1]} tokens used differ from the one"
            " before; a repeated token does not tell how K varies"
        )
    with warnings.catch_warnings():  # without a budget it leaves out windows, which are recorded all the same
        warnings.filterwarnings("ignore", "StrataCache compresses no layer")
        cache = StrataCache(model.config, budget=None)
    recorders = [_recorder(layer) for layer in cache.layers if isinstance(layer, StrataLayer)]
    for recorder in recorders:
        cache.layers[recorder.place] = recorder
    windows: list[_WindowRecorder] = []
    for place, layer in enumerate(cache.layers):
        if window := window_of(cache._text, place, layer):
            cache.layers[place] = _WindowRecorder(cache, place, len(windows), window, 1.0, 0)
            windows.append(cache.layers[place])
            del cache.plain_layers[place]
    model(ids, past_key_values=cache, use_cache=True)
    if len(cache.plain_layers) == len(cache.layers):
        raise ValueError(f"model: expected one with layers to compress, got {cache.plain_layers}")
    own, of_windows = ([recorder.statistics for recorder in group] for group in (recorders, windows))
    kinds = ["none"] * max(support.size(cache._text, "num_hidden_layers") or 0, len(cache.layers))
    for kind, group in (("layer", recorders), ("window", windows)):
        for recorder in group:
            kinds[recorder.place] = kind
    return Calibration(own, model=name, windows=of_windows, kinds=kinds)
