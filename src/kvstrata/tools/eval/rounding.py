"""Rounding simulated in floats, to separate the cost of a format from that of packing, pages and settling.

All rows stay exact. Rows between sink and recent tokens are rounded whenever a chunk reads them: K minus its mean over
all tokens so far, rotated, mid-rise levels with the optimal step for a Gaussian, and the scale that fits these levels
best, times the gains of pages. Scales are exact. With the mean of all tokens it knows more than a cache, whose centre
is fixed when the first tokens are quantised.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, DynamicLayer

from kvstrata.layout.rotation import rotate
from kvstrata.quant.reference import GAUSSIAN_STEP, K_GAIN, V_GAIN

from .sizes import replaced_layers

SCALE_BYTES = 4  # two fp16 scales per token and KV head


def round_rows(x: torch.Tensor, bits: int, gain: float) -> torch.Tensor:
    """Rows ``[..., tokens, D]`` after rounding to ``bits`` bits per value in the rotated space, times ``gain``."""
    x = rotate(x.float())
    step = x.square().mean(-1, keepdim=True).sqrt().clamp(min=1e-8) * GAUSSIAN_STEP[bits]
    half = (2**bits - 1) / 2
    level = (x / step + half).round().clamp(0, 2 * half) - half
    scale = (x * level).sum(-1) / level.square().sum(-1) * gain
    return rotate(level * scale.unsqueeze(-1))


class RoundedLayer(DynamicLayer):
    """``keys`` and ``values`` are exact; what attention gets is rounded."""

    is_croppable = False

    def __init__(self, k_bits: int, v_bits: int, recent_tokens: int, sink_tokens: int) -> None:
        super().__init__()
        self.bits, self.recent_tokens, self.sink_tokens = (k_bits, v_bits), recent_tokens, sink_tokens

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        past = self.get_seq_length()
        k, v = super().update(key_states, value_states, *args, **kwargs)
        old = slice(self.sink_tokens, max(past - self.recent_tokens, self.sink_tokens))
        if old.start == old.stop:
            return k, v
        k, v = k.clone(), v.clone()
        k_bits, v_bits = self.bits
        centre = k[..., :past, :].float().mean(-2, keepdim=True)
        rounded = round_rows(k[..., old, :] - centre, k_bits, K_GAIN[k_bits])
        k[..., old, :] = (rounded + centre).to(k.dtype)
        v[..., old, :] = round_rows(v[..., old, :], v_bits, V_GAIN[v_bits]).to(v.dtype)
        return k, v

    @property
    def nbytes(self) -> int:
        """Bytes of a real cache: codes and fp16 scales of the old rows, and the other rows at 16 bit."""
        if not self.is_initialized:
            return 0
        rows, dim = self.keys.shape[:2].numel(), self.keys.shape[-1]
        old = max(self.get_seq_length() - self.recent_tokens - self.sink_tokens, 0)
        plain = self.get_seq_length() - old
        return rows * (plain * 4 * dim + old * (dim * sum(self.bits) // 8 + SCALE_BYTES))


class RoundedCache(Cache):
    """One `RoundedLayer` per layer of a model with full attention."""

    def __init__(
        self, config: PreTrainedConfig, k_bits: int, v_bits: int, recent_tokens: int, sink_tokens: int
    ) -> None:
        text = config.get_text_config(decoder=True)
        kinds = getattr(text, "layer_types", None) or ["full_attention"] * text.num_hidden_layers
        if other := sorted(set(kinds) - {"full_attention"}):
            raise ValueError(f"config: expected layers of full attention only, got {', '.join(other)}")
        super().__init__(
            layers=replaced_layers(config, lambda: RoundedLayer(k_bits, v_bits, recent_tokens, sink_tokens))
        )
