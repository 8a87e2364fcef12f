"""Packed blocks for tests: an engine's memory with holes and poison, and what its tokens decode to."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from itertools import accumulate
from types import SimpleNamespace

import pytest
import torch

import emulator
from conftest import HAS_GPU
from kvstrata import Format, decode_packed, store_packed
from kvstrata.quant import reference as quant

DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
POISON = 0xFF
needs_emulator = pytest.mark.skipif(not HAS_GPU and bool(emulator.missing()), reason=str(emulator.missing()))
EMULATED = pytest.param("cuda", marks=needs_emulator)
BACKENDS = ["reference", "triton", EMULATED]
each_backend = pytest.mark.parametrize("backend", BACKENDS)


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Emulated CUDA kernels in every test of a module that imports this."""
    if not HAS_GPU:
        without_cuda(monkeypatch)


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


EPS = {torch.float32: 2e-6, torch.float16: 2**-11, torch.bfloat16: 2**-8}


class Batch:
    """Requests in blocks of an engine: a block table with holes, free blocks full of poison, tokens in any order.

    ``shared``: the second request begins with the first block of the first.
    """

    def __init__(self, fmt: Format, lengths: list[int], *, kv_heads: int = 2, pages_per_block: int = 1,
                 dtype: torch.dtype = torch.bfloat16, calibration: Calibration | None = None, strided: bool = False,
                 shared: bool = False, capacity: int = 0, seed: int = 0) -> None:  # fmt: skip
        generator = torch.Generator().manual_seed(seed)
        self.fmt, self.lengths, self.dtype, self.calibration = fmt, lengths, dtype, calibration
        self.kv_heads, self.block_size = kv_heads, pages_per_block * fmt.page_tokens
        needed = [-(-n // self.block_size) for n in lengths]
        width = max([*needed, capacity, 1])
        blocks = sum(needed) + 3
        order = torch.randperm(blocks, generator=generator).int()
        self.block_table = torch.full((len(lengths), width), 1 << 28, dtype=torch.int32)  # far outside
        for row, count in enumerate(needed):
            self.block_table[row, :count], order = order[:count], order[count:]
        if shared:
            self.block_table[1, 0] = self.block_table[0, 0]
        self.pages = memory(fmt, blocks, kv_heads, pages_per_block, strided)
        self.slots = [self.slots_of(row, torch.arange(n)) for row, n in enumerate(lengths)]
        slots = torch.cat(self.slots)
        k, v = (torch.randn(len(slots), kv_heads, fmt.head_dim, generator=generator) for _ in range(2))
        if calibration is not None and calibration.centre is not None:
            k = k + calibration.centre.cpu()
        if calibration is not None and calibration.balance is not None:
            k = k * calibration.balance.cpu()
        mixed = torch.randperm(len(slots), generator=generator)
        self.store(k[mixed], v[mixed], slots[mixed])
        self.block_table = self.block_table.to(DEVICE)
        self.seq_lens = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)

    def slots_of(self, row: int, positions: torch.Tensor) -> torch.Tensor:
        block = self.block_table[row].cpu()[positions // self.block_size].long()
        return block * self.block_size + positions % self.block_size

    def store(self, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor, backend: str = "reference") -> None:
        k, v = (x.to(self.dtype).to(DEVICE) for x in (k, v))
        for first in range(0, len(slots), 64):  # slots of a call must differ, and shared blocks have some twice
            part = slice(first, first + 64)
            unique = torch.unique(slots[part], return_inverse=True)[1].bincount().max().item() if len(slots) else 0
            if unique <= 1 or backend == "reference":
                store_packed(k[part], v[part], self.pages, slots[part].to(DEVICE), self.fmt,
                             calibration=self.calibration, backend=backend)  # fmt: skip

    def rows(self, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        return stored_rows(self.pages, self.fmt, self.slots[row], self.calibration)

    def queries(self, q_lens: list[int], group: int, loud: float = 1.0, seed: int = 1) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        q = loud * torch.randn(sum(q_lens), self.kv_heads * group, self.fmt.head_dim, generator=generator)
        return q.to(self.dtype).to(DEVICE)

    def expected(
        self, q: torch.Tensor, q_lens: list[int], low: bool = False, scale: float | None = None,
        sliding_window: int | None = None, softcap: float | None = None, sinks: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """out and lse in float32, one query and head at a time; with ``low`` products are done in q's dtype."""
        q, heads = q.cpu(), q.shape[1]
        out, lse = torch.zeros(q.shape), torch.full(q.shape[:2], -torch.inf)
        cast = (lambda x: x.to(q.dtype)) if low else (lambda x: x.float())
        at = 0
        for row, (length, n) in enumerate(zip(self.lengths, q_lens, strict=True)):
            k, v = self.rows(row)
            for i in range(n):
                own = max(length - n + i, -1)  # a query before the first token sees nothing
                low_end = 0 if sliding_window is None else max(own - sliding_window + 1, 0)
                for h in range(heads):
                    keys, values = (x[low_end : own + 1, h * self.kv_heads // heads] for x in (k, v))
                    score = (cast(keys) @ cast(q[at, h])).float() * (scale or q.shape[2] ** -0.5)
                    if softcap is not None:
                        score = softcap * torch.tanh(score / softcap)
                    logits = score if sinks is None else torch.cat([score, sinks[h : h + 1].float().cpu()])
                    if len(logits):
                        lse[at, h] = logits.logsumexp(0)
                        out[at, h] = (cast(logits.softmax(0)[: len(score)]) @ cast(values)).float()
                at += 1
        return (out.to(q.dtype).float() if low else out), lse

    def check(self, backend: str, q_lens: list[int] | None = None, group: int = 3, ragged: bool | None = None,
              loud: float = 1.0, **options: object) -> None:  # fmt: skip
        """A backend against the model."""
        q_lens = q_lens or [1] * len(self.lengths)
        q = self.queries(q_lens, group, loud)
        cu = None
        if len(set(q_lens)) > 1 or ragged:
            cu = torch.tensor([0, *accumulate(q_lens)], dtype=torch.int32, device=DEVICE)
        known = {name: options[name] for name in ("scale", "sliding_window", "softcap", "sinks") if name in options}
        result = decode_packed(
            q, self.pages, self.block_table, self.seq_lens, self.fmt, calibration=self.calibration, cu_seqlens_q=cu,
            return_lse=True, backend=backend, **options,
        )  # fmt: skip
        self.compare(result, q, q_lens, known)

    def compare(self, result: object, q: torch.Tensor, q_lens: list[int], options: dict) -> None:
        want = self.expected(q, q_lens, **options)
        low = want if q.dtype == torch.float32 else self.expected(q, q_lens, low=True, **options)
        for name, a, b, c in zip(("out", "lse"), result, want, low, strict=False):  # type: ignore[call-overload]
            a = a.float().cpu()
            assert a.shape == b.shape, name
            live = b.isfinite()
            assert torch.equal(a.isfinite(), live), name
            if not live.any():
                continue
            largest = b[live].abs().max().clamp(min=1e-3)
            allowed = 2 * (c - b)[live].abs().max() + 4 * EPS[self.dtype] * largest
            error = (a - b)[live].abs().max()
            assert error <= allowed, f"{name}: {error} > {allowed}"


def without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on "cuda" is the emulator for the packed ops, on three multiprocessors."""
    from kvstrata.attention.packed_decode import cuda as decode_cuda
    from kvstrata.attention.packed_decode import op as decode_op
    from kvstrata.store.packed import copy, tail_cuda, tail_op
    from kvstrata.store.packed import cuda as store_cuda
    from kvstrata.store.packed import op as store_op

    properties = SimpleNamespace(name="emulated", multi_processor_count=3, shared_memory_per_multiprocessor=233472)
    launcher = emulator.launcher()
    for module in (store_cuda, store_op, tail_cuda, tail_op, decode_cuda, decode_op, copy):
        monkeypatch.setattr(module, "jit", launcher)
    for module in (store_op, tail_op, decode_op):
        monkeypatch.setattr(module, "missing", lambda backend, device: None)
        monkeypatch.setattr(module, "_plans", type(module._plans)())
    monkeypatch.setattr(copy, "missing", lambda backend, device: None)
    monkeypatch.setattr(copy, "_launches", type(copy._launches)())
    for kernel in (decode_cuda._kernel, copy._kernel):
        kernel.cache_clear()
    monkeypatch.setattr(store_cuda, "_multiprocessors", lambda device: 3)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: -1, raising=False)  # as get_device() of the CPU
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
