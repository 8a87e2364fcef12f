"""`calibrate`: balance and centres of a model's K, from one forward over some text."""

from __future__ import annotations

from typing import Any

import torch

from kvstrata.cache.policy.centre import CENTRE_TOKENS, centre_of
from kvstrata.quant.calibration import Calibration, LayerCalibration, pair_balance

from . import attention, balance
from .cache import StrataCache
from .layer import StrataLayer
from .rope import frequencies

HORIZON = 4096  # positions over which centres are averaged


class _Recorder(StrataLayer):
    """Layer that attends as the model does and records statistics of its K and Q instead of storing rows."""

    def __init__(self, owner: StrataCache, place: int, index: int, rope: list[float]) -> None:
        super().__init__(owner, place, index)
        self.rope, self.calibration = rope, LayerCalibration()

    def attend(self, call: attention.AttentionCall) -> torch.Tensor:
        query, key = call.query, call.key
        real = torch.ones(len(query), query.shape[2], dtype=torch.bool, device=query.device)
        turned = balance.interleaved(call.module)
        k, q, _ = balance.squares(query, key, real, self.rope, turned)
        pairs = 0 if turned is None else len(self.rope)
        own = pair_balance(k.mean(0), q.mean(0), pairs, bool(turned))
        rows = key.float().nan_to_num(0.0, 0.0, 0.0)[:, :, :CENTRE_TOKENS]
        present = torch.ones_like(rows[..., :1], dtype=torch.bool)
        present[:, :, : balance.SINKS] = False  # attention sinks
        horizon = torch.full((len(rows),), HORIZON, device=rows.device)
        centre = centre_of(rows * present, present, self.rope, horizon).mean(0)
        self.calibration = LayerCalibration(own.cpu(), (centre / own).float().cpu())
        self.columns += query.shape[2]
        return call.model_attention(query, key, call.value, call.mask)


@torch.no_grad()
def calibrate(model: Any, ids: torch.Tensor, name: str = "") -> Calibration:
    """Balance and centres of the layers that a `StrataCache` compresses, from one forward.

    Args:
        model: a transformers model in eval mode.
        ids: int64 ``[rows, tokens]`` without padding, at least 16 tokens per row; a few hundred tokens are plenty.
        name: name of the model, kept in the calibration.

    Returns a `Calibration` without sensitivities. Not safe under CUDA-graph capture.

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
    text = model.config.get_text_config(decoder=True)
    dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    rope = frequencies(text, dim) or []
    for place, layer in enumerate(cache.layers):
        if isinstance(layer, StrataLayer):
            cache.layers[place] = _Recorder(cache, place, layer.index, rope)
    model(ids, past_key_values=cache, use_cache=True)
    layers = [layer.calibration for layer in cache.layers if isinstance(layer, _Recorder)]
    if not layers:
        raise ValueError(f"model: expected one with layers to compress, got {cache.plain_layers}")
    return Calibration(layers, model=name)
