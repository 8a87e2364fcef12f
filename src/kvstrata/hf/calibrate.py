"""`calibrate`: balance and centres of a model's K, from one forward over some text."""

from __future__ import annotations

from typing import Any

import torch

from kvstrata.cache.policy.centre import CENTRE_TOKENS, centre_of
from kvstrata.quant.calibration import Calibration, LayerCalibration, pair_balance

from . import attention, balance
from .cache import StrataCache
from .hybrid import HybridLayer
from .layer import StrataLayer

HORIZON = 4096  # positions over which centres are averaged


class _Recorder(StrataLayer):
    """Layer that attends as the model does and records statistics of its K and Q instead of storing rows."""

    calibration = LayerCalibration()  # of a layer that is left plain for the shape of its K and V

    def attend(self, call: attention.AttentionCall) -> torch.Tensor:
        query, key, rope = call.query, call.key, self.owner.unfinished.rope
        real = torch.ones(len(query), query.shape[2], dtype=torch.bool, device=query.device)
        turned = balance.interleaved(call.module)
        k, q, _ = balance.squares(query, key, real, rope, turned)
        pairs = 0 if turned is None else len(rope)
        own = pair_balance(k.mean(0), q.mean(0), pairs, bool(turned))
        rows = key.float().nan_to_num(0.0, 0.0, 0.0)[:, :, :CENTRE_TOKENS]
        present = torch.ones_like(rows[..., :1], dtype=torch.bool)
        present[:, :, : balance.SINKS] = False  # attention sinks
        horizon = torch.full((len(rows),), HORIZON, device=rows.device)
        centre = centre_of(rows * present, present, rope, horizon).mean(0)
        self.calibration = LayerCalibration(own.cpu(), (centre / own).float().cpu())
        self.columns += query.shape[2]
        if self.owner.shares:
            self.attend_shared = lambda query, mask, model_attention, logits: model_attention(
                query, key, call.value, mask
            )
        return call.model_attention(query, key, call.value, call.mask)


class _HybridRecorder(_Recorder, HybridLayer):
    """`_Recorder` that keeps the other states of its layer."""


def _recorder(layer: StrataLayer) -> _Recorder:
    """Recorder in place of a layer."""
    if isinstance(layer, HybridLayer):
        return _HybridRecorder(layer.owner, layer.place, layer.index, layer.number_of_states)
    return _Recorder(layer.owner, layer.place, layer.index)


@torch.no_grad()
def calibrate(model: Any, ids: torch.Tensor, name: str = "") -> Calibration:
    """Balance and centres of the layers that a `StrataCache` compresses, from one forward.

    Args:
        model: a transformers model in eval mode.
        ids: int64 ``[rows, tokens]`` without padding, at least 16 tokens per row; a few hundred tokens are plenty.
        name: name of the model, kept in the calibration.

    Returns a `Calibration` without sensitivities; a layer that is left plain for the shape of its K and V has neither
    balance nor centre. Not safe under CUDA-graph capture.

    Raises ValueError for fewer tokens, and for a model none of whose layers can be compressed.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> sizes = dict(num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=64)
        >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=64, hidden_size=64, intermediate_size=64, **sizes))
        >>> calibrate(model, torch.randint(0, 64, (1, 100))).shape
        (2, 64)
    """
    if ids.dim() != 2 or ids.shape[1] < balance.ENOUGH:
        raise ValueError(f"ids: expected [rows, at least {balance.ENOUGH} tokens], got shape {tuple(ids.shape)}")
    cache = StrataCache(model.config, budget=None)
    recorders = [_recorder(layer) for layer in cache.layers if isinstance(layer, StrataLayer)]
    for recorder in recorders:
        cache.layers[recorder.place] = recorder
    model(ids, past_key_values=cache, use_cache=True)
    if len(cache.plain_layers) == len(cache.layers):
        raise ValueError(f"model: expected one with layers to compress, got {cache.plain_layers}")
    return Calibration([recorder.calibration for recorder in recorders], model=name)
