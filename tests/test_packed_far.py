"""Packed pools whose blocks or heads lie more than 2^31 bytes apart, as in an engine's allocation for all layers."""

from __future__ import annotations

import pytest
import torch

from conftest import HAS_GPU
from kvstrata import Format, copy_pages, decode_packed, prefill_packed, store_packed
from packed_model import DEVICE, each_backend, memory, without_cuda
from test_far_offsets import apart, room_of


@each_backend
@pytest.mark.parametrize("axis", [0, 1])
def test_offsets_beyond_32_bits_give_the_same_bytes_and_outputs(
    backend: str, axis: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All ops give the bytes and outputs of a small pool; offsets that wrap would reach other bytes of the room."""
    if not HAS_GPU:
        without_cuda(monkeypatch)
    fmt = Format.parse("K4V4", 64, 16)
    near = memory(fmt, 3, 3, 1)
    far = apart(near, axis, room_of(torch.uint8))
    generator = torch.Generator().manual_seed(0)
    k, v = torch.randn(2, 43, 3, 64, generator=generator).half().to(DEVICE)
    table = torch.tensor([[2, 0, 1]], dtype=torch.int32, device=DEVICE)
    position = torch.arange(43, device=DEVICE)
    slots = table[0].long()[position // 16] * 16 + position % 16
    q = torch.randn(1, 6, 64, generator=generator).half().to(DEVICE)
    lengths, cu = (torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in ([43], [0, 1]))
    results = []
    for pages in (near, far):
        for part in (slice(40), slice(40, 43)):
            store_packed(k[part], v[part], pages, slots[part], fmt, backend=backend)
        results.append([pages.clone(), decode_packed(q, pages, table, lengths, fmt, backend=backend)])
        if backend != "cuda":
            new = (k[42:], v[42:])
            results[-1].append(prefill_packed(q, *new, pages, table, lengths, cu, fmt, backend=backend))
        copy_pages(pages, pages, *torch.tensor([[2], [0]], device=DEVICE), backend=backend)
        results[-1].append(pages.clone())
    assert torch.equal(results[0][-1][0], results[0][0][2]), "block 2 was copied to block 0"
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)
