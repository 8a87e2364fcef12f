"""A KIVI-style cache as our own baseline: K by channel, V by token, packed, with a 16-bit residual.

K is quantised in blocks of ``group`` tokens, each channel of a block with its own scale and zero; V by token, ``group``
channels together. Codes are asymmetric (min-max), 2, 3, 4 or 8 bits, packed without padding; scales and zeros are
fp16. The last ``residual`` tokens, and those that do not fill a block yet, stay at 16 bit. After the scheme of Liu et
al., "KIVI: A Tuning-Free Asymmetric 2bit Quantization for KV Cache"; independent implementation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, DynamicLayer

from kvstrata.layout.rows import pack_rows, unpack_rows

from .sizes import replaced_layers


@dataclass(frozen=True)
class Block:
    """Quantised groups along the last dim: packed codes, and fp16 scale and zero of each group."""

    codes: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor
    bits: int
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scale.nbytes + self.zero.nbytes


def quantize_groups(x: torch.Tensor, bits: int, group: int) -> Block:
    """Quantise ``x [..., n]``, n a multiple of ``group``, to min-max codes."""
    grouped = x.float().unflatten(-1, (-1, group))
    low, high = grouped.amin(-1, keepdim=True).half(), grouped.amax(-1, keepdim=True).half()
    scale = ((high.float() - low.float()) / (2**bits - 1)).half()
    step = scale.float().clamp(min=2.0**-24)
    codes = ((grouped - low.float()) / step).round().clamp(0, 2**bits - 1).to(torch.uint8)
    return Block(pack_rows(codes, bits), scale, low, bits, tuple(x.shape))


def dequantize_groups(block: Block, group: int) -> torch.Tensor:
    """Dequantise to float32, in the shape that was quantised."""
    codes = unpack_rows(block.codes, block.bits, group).float()
    return (codes * block.scale.float() + block.zero.float()).reshape(block.shape)


class KiviLayer(DynamicLayer):
    """Cache layer whose ``keys`` and ``values`` are the residual; older tokens are in ``blocks``."""

    is_croppable = False

    def __init__(self, k_bits: int, v_bits: int, group: int, residual: int) -> None:
        super().__init__()
        self.bits, self.group, self.residual = (k_bits, v_bits), group, residual
        self.blocks: list[tuple[Block, Block]] = []
        self.quantised = 0
        self.keys: torch.Tensor
        self.values: torch.Tensor

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return all of K and V with old tokens dequantised, then quantise full blocks beyond the residual."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        recent_k, recent_v = (
            torch.cat([old.to(torch.float16), new.to(torch.float16)], -2) if old.numel() else new.to(torch.float16)
            for old, new in ((self.keys, key_states), (self.values, value_states))
        )
        old = [self._read(*pair) for pair in self.blocks]
        k = torch.cat([*(pair[0].to(key_states.dtype) for pair in old), recent_k.to(key_states.dtype)], -2)
        v = torch.cat([*(pair[1].to(key_states.dtype) for pair in old), recent_v.to(key_states.dtype)], -2)
        # A chunk sees its own tokens exactly.
        k[..., -key_states.shape[-2] :, :], v[..., -key_states.shape[-2] :, :] = key_states, value_states
        move = max(recent_k.shape[-2] - self.residual, 0) // self.group * self.group
        if move:
            self.blocks.append(
                (
                    quantize_groups(recent_k[..., :move, :].transpose(-1, -2), self.bits[0], self.group),
                    quantize_groups(recent_v[..., :move, :], self.bits[1], min(self.group, recent_v.shape[-1])),
                )
            )
            self.quantised += move
        self.keys, self.values = recent_k[..., move:, :].clone(), recent_v[..., move:, :].clone()
        return k, v

    def _read(self, k: Block, v: Block) -> tuple[torch.Tensor, torch.Tensor]:
        return dequantize_groups(k, self.group).transpose(-1, -2), dequantize_groups(v, min(self.group, v.shape[-1]))

    def get_seq_length(self) -> int:
        return self.quantised + (self.keys.shape[-2] if self.is_initialized and self.keys.numel() else 0)

    @property
    def nbytes(self) -> int:
        recent = self.keys.nbytes + self.values.nbytes if self.is_initialized else 0
        return sum(k.nbytes + v.nbytes for k, v in self.blocks) + recent


class KiviCache(Cache):
    """One `KiviLayer` per layer of a model that stores K and V; it keeps all tokens of those with a window, too.

    ValueError for layers with attention and other states in one.
    """

    def __init__(self, config: PreTrainedConfig, k_bits: int, v_bits: int, group: int = 32, residual: int = 32) -> None:
        super().__init__(layers=replaced_layers(config, lambda: KiviLayer(k_bits, v_bits, group, residual)))
