"""Offsets that do not fit 32 bits: strides past 2^31, positions past 2^20.

Such bugs were in other projects: vllm#47671, vllm#50427, sglang#20389, SageAttention#386.
"""

from __future__ import annotations

import pytest
import torch

from conftest import HAS_GPU
from decode_model import DEVICE, Case, check
from emulator import CUDA, EMULATED, on
from kvstrata import PagedCache, TieredCache, decode_attention, prefill_attention, prefill_attention_cached
from kvstrata.cache.move import append as append_op
from kvstrata.cache.move import apply
from kvstrata.cache.storage.address_space import Space
from kvstrata.replay import CopyPlan

FAR = 1 << 30  # elements; index 2 of an axis with this stride does not fit 31 bits


def room_of(dtype: torch.dtype) -> torch.Tensor:
    """2 FAR elements and some more before the middle and after it; on the CPU, addresses that nothing is behind."""
    elements = 4 * FAR + (1 << 16)
    if HAS_GPU:
        return torch.empty(elements, dtype=dtype, device=DEVICE)
    return Space(elements * dtype.itemsize).bytes.view(dtype)


def apart(near: torch.Tensor, axis: int, room: torch.Tensor, number: int = 0) -> torch.Tensor:
    """A copy with entries along ``axis`` FAR elements apart, from the middle of the room on: an offset that wraps at
    2^31 or 2^32 reads something else there, without a fault."""
    strides = list(near.select(axis, 0).contiguous().stride())
    strides.insert(axis, FAR)
    return room.as_strided(near.shape, strides, 2 * FAR + (number << 13)).copy_(near)


@pytest.mark.parametrize(
    ("attend", "name", "axis"),
    [
        *((decode_attention, "reference", axis) for axis in range(3)),
        *((decode_attention, "triton", axis) for axis in range(3)),
        *((prefill_attention_cached, "triton", axis) for axis in range(3)),
    ],
)
def test_pages_rows_and_heads_far_apart(attend, name: str, axis: int) -> None:
    """Pages of a large pool; the rows of a page, or the heads, outermost in it. fp8, so that 4 GiB are enough."""
    room = room_of(torch.uint8)
    near = torch.randn(2, 3, 3, 3, 64).to(torch.float8_e4m3fn).to(DEVICE)
    k, v = (apart(x.view(torch.uint8), axis, room, i).view(x.dtype) for i, x in enumerate(near))
    table = torch.tensor([[2, 0, 1]], dtype=torch.int32, device=DEVICE)
    lengths = torch.tensor([8], dtype=torch.int32, device=DEVICE)
    q = torch.randn(1, 3, 6, 64, device=DEVICE)
    want = decode_attention(q, PagedCache(near[0], near[1], table, lengths), backend="reference")
    got = attend(q, PagedCache(k, v, table, lengths), backend=name)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


@on(EMULATED, CUDA)
@pytest.mark.parametrize("axis", [0, 2])
def test_pages_and_heads_far_apart_in_cuda(backend: str, axis: int) -> None:
    """The same cache for that kernel: 16 bit, pages of 16 rows."""
    room = room_of(torch.float16)
    near = torch.randn(2, 3, 16, 3, 64).half().to(DEVICE)
    k, v = (apart(x, axis, room, i) for i, x in enumerate(near))
    table = torch.tensor([[2, 0, 1]], dtype=torch.int32, device=DEVICE)
    lengths = torch.tensor([43], dtype=torch.int32, device=DEVICE)
    check(Case(PagedCache(k, v, table, lengths), torch.randn(1, 2, 6, 64).half().to(DEVICE), [0], [43]), backend)


@pytest.mark.parametrize(
    ("name", "axis"),
    [
        ("reference", 2), ("triton", 0), ("triton", 2),
        pytest.param("cuda", 0, marks=pytest.mark.gpu), pytest.param("cuda", 2, marks=pytest.mark.gpu),
    ],
)  # fmt: skip
def test_sequences_and_heads_far_apart(name: str, axis: int) -> None:
    """32 heads of 128 over 600,000 tokens, heads before tokens, in small: head 16 begins past 2^31."""
    room = room_of(torch.float16)
    near = torch.randn(3, 3, 9, 3, 64).half().to(DEVICE)
    q, k, v = (apart(x, axis, room, i) for i, x in enumerate(near))
    want = prefill_attention(*near, backend="reference")
    torch.testing.assert_close(prefill_attention(q, k, v, backend=name), want, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("axis", [0, 1])
def test_appended_rows_far_apart(axis: int, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare = append_op.prepare_append
    monkeypatch.setattr(apply, "prepare_append", lambda job: prepare(job, "triton"))
    room, near = room_of(torch.float16), torch.randn(2, 3, 3, 32).half().to(DEVICE)
    cache = TieredCache(1, 3, 32, budget=None, dtype=torch.float16, device=DEVICE, page_tokens=16)
    cache.append(0, *(apart(x, axis, room, i) for i, x in enumerate(near)))
    for got, want in zip(cache.gather(0), near, strict=False):
        assert torch.equal(got, want.transpose(0, 1))


@pytest.mark.parametrize("name", ["reference", "triton", CUDA])
def test_copies_from_and_to_rows_far_apart(name: str) -> None:
    room, near = room_of(torch.uint8), torch.randint(0, 256, (3, 40), dtype=torch.uint8, device=DEVICE)
    source, target = apart(near, 0, room), apart(torch.zeros_like(near), 0, room, 1)
    through = torch.zeros_like(near)
    CopyPlan([through], [source], backend=name).run()
    CopyPlan([target], [through], backend=name).run()
    assert torch.equal(target, near)


@on(
    pytest.param("emulated", marks=[*EMULATED.marks, pytest.mark.slow]),
    CUDA,
    pytest.param("triton", marks=pytest.mark.gpu),
)
def test_positions_past_2_20(backend: str) -> None:
    """Plain pages of a million tokens: which are in the window is known by a number of their stage."""
    length = (1 << 20) + 20
    k, v = torch.randn(2, 2, 16, 1, 32).half().to(DEVICE)
    table = torch.zeros(1, length // 16 + 1, dtype=torch.int32, device=DEVICE)
    table[0, -2:] = 1  # page 0 again and again, and another at the end
    cache = PagedCache(k, v, table, torch.tensor([length], dtype=torch.int32, device=DEVICE))
    q = torch.randn(1, 1, 1, 32).half().to(DEVICE)
    want = decode_attention(q, cache, sliding_window=20, backend="reference")
    got = decode_attention(q, cache, sliding_window=20, backend=backend)
    torch.testing.assert_close(got, want, atol=2e-3, rtol=2e-3)
