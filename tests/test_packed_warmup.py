"""Kernels of packed pages compiled ahead: what stores and decode steps load is among them."""

from __future__ import annotations

import pytest
import torch

import emulator
import kvstrata
from conftest import HAS_GPU
from kvstrata import Format, jit
from kvstrata.attention import packed_warmup
from kvstrata.attention.packed_decode import cuda as decode_cuda
from kvstrata.store.packed import cuda as store_cuda
from kvstrata.store.packed import op as store_op
from kvstrata.store.packed import tail_cuda
from packed_model import Batch, calibration_of, without_cuda


@pytest.mark.skipif(HAS_GPU or bool(emulator.missing()), reason="emulates")
def test_what_runs_was_compiled_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    without_cuda(monkeypatch)
    loaded: set[jit.Named] = set()
    fake = emulator.launcher()
    load = fake.load
    fake.load = lambda source, entry, arch=None: loaded.add((source, entry)) or load(source, entry, arch)
    for module in (store_cuda, decode_cuda):
        monkeypatch.setattr(module, "jit", fake)
    fmt = Format.parse("K4V4", 64, 16)
    calibration = calibration_of(2, 64)
    batch = Batch(fmt, [30, 20], calibration=calibration)
    q = batch.queries([1, 1], 3)
    pages, table, lengths = batch.pages, batch.block_table, batch.seq_lens
    for waves in (0, 4):
        monkeypatch.setattr(store_cuda, "WAVES", waves)
        monkeypatch.setattr(store_op, "_plans", type(store_op._plans)())
        k, v = torch.randn(2, 20, 2, 64).bfloat16()
        kvstrata.store_packed(k, v, pages, torch.arange(20).int(), fmt, calibration=calibration, backend="cuda")
    for options in ({}, dict(sliding_window=9), dict(fixed_split=16)):
        kvstrata.decode_packed(q, pages, table, lengths, fmt, calibration=calibration, backend="cuda", **options)
    ahead = packed_warmup.kernels_needed(fmt, 6, 2, torch.bfloat16, windowed=True, balanced=True, arch="sm_90")
    assert len(loaded) >= 5
    assert loaded <= set(ahead)
    plain = packed_warmup.kernels_needed(fmt, 6, 2, torch.bfloat16, arch="sm_90")
    assert not loaded <= set(plain)
    decode_cuda._kernel.cache_clear()
    monkeypatch.setattr(tail_cuda, "jit", fake)
    loaded.clear()
    slots = torch.tensor([1, 0], dtype=torch.int32)
    given = dict(tail=kvstrata.PlainRows(*torch.zeros(2, 2, 2, 16, 64).bfloat16(), slots), backend="cuda")
    kvstrata.store_packed(k[:2], v[:2], pages, torch.tensor([29, 51]).int(), fmt, seq_lens=lengths, **given)
    for q_lens in ([1, 1], [3, 3]):
        for options in ({}, dict(sliding_window=9)):
            kvstrata.decode_packed(batch.queries(q_lens, 3), pages, table, lengths, fmt, **given, **options)
    ahead = packed_warmup.kernels_needed(fmt, 6, 2, torch.bfloat16, q_len=3, windowed=True, plain=True, arch="sm_90")
    assert len(loaded) >= 4
    assert loaded <= set(ahead)
    decode_cuda._kernel.cache_clear()


def test_invalid_warmup_arguments_are_named() -> None:
    fmt = Format.parse("K4V4", 64, 16)
    on_cpu = dict(device="cpu")
    for message, (given, options) in {
        "fmt: expected a Format": (("K4V4", 8, 2), {}),
        "heads: expected a multiple of 2": ((fmt, 7, 2), {}),
        "kv_heads: expected an int": ((fmt, 8, 0), {}),
        "dtype: expected float32": ((fmt, 8, 2), dict(dtype=torch.int8)),
        "slot_dtype: expected torch.int32": ((fmt, 8, 2), dict(slot_dtype=torch.int16)),
    }.items():
        with pytest.raises((ValueError, TypeError), match=message):
            kvstrata.warmup_packed(*given, **on_cpu, **options)  # type: ignore[arg-type]
