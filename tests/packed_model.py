"""Packed blocks for tests: an engine's memory with holes and poison, and what its tokens decode to."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

import emulator
from conftest import HAS_GPU
from kvstrata import Format
from kvstrata.quant import reference as quant

DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
POISON = 0xFF


@dataclass
class Calibration:
    balance: torch.Tensor | None = None
    centre: torch.Tensor | None = None


def calibration_of(kv_heads: int, dim: int, seed: int = 0) -> Calibration:
    generator = torch.Generator().manual_seed(seed)
    balance = torch.randn(kv_heads, dim, generator=generator).exp2()
    return Calibration(balance.to(DEVICE), torch.randn(kv_heads, dim, generator=generator).to(DEVICE))


def memory(fmt: Format, num_blocks: int, kv_heads: int, pages_per_block: int, strided: bool = False) -> torch.Tensor:
    """Blocks full of poison; ``strided``: K/V of another layer lies between two blocks."""
    size = pages_per_block * fmt.page_bytes
    if not strided:
        return torch.full((num_blocks, kv_heads, size), POISON, dtype=torch.uint8, device=DEVICE)
    whole = torch.full((num_blocks, 2, kv_heads, size + 64), POISON, dtype=torch.uint8, device=DEVICE)
    return whole[:, 1, :, 64:]


def stored_rows(
    pages: torch.Tensor, fmt: Format, slots: torch.Tensor, calibration: Calibration | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Float32 ``k, v [n, kv_heads, D]`` of slots in the model's space, from whole pages."""
    blocks, heads, size = pages.shape
    per_block = size // fmt.page_bytes
    whole = pages.cpu().contiguous().view(blocks, heads, per_block, fmt.page_bytes)
    k, v = quant.restore(*quant.dequantize_page(whole, fmt), fmt)
    k, v = (x.permute(0, 2, 3, 1, 4).reshape(-1, heads, fmt.head_dim)[slots.cpu().long()] for x in (k, v))
    if calibration is not None:
        if calibration.centre is not None:
            k = k + calibration.centre.cpu()
        if calibration.balance is not None:
            k = k * calibration.balance.cpu()
    return k, v


def without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on "cuda" is the emulator for the packed ops, on three multiprocessors."""
    from kvstrata.store.packed import cuda as store_cuda
    from kvstrata.store.packed import op as store_op

    properties = SimpleNamespace(name="emulated", multi_processor_count=3, shared_memory_per_multiprocessor=233472)
    launcher = emulator.launcher()
    for module in (store_cuda, store_op):
        monkeypatch.setattr(module, "jit", launcher)
    monkeypatch.setattr(store_op, "missing", lambda backend, device: None)
    monkeypatch.setattr(store_op, "_plans", type(store_op._plans)())
    monkeypatch.setattr(store_cuda, "_multiprocessors", lambda device: 3)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
