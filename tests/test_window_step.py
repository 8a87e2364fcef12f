"""One decode step of a layer with a sliding window: Triton kernels against torch, and StepSlots against positions."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("transformers")

from kvstrata.hf import window_step, window_triton
from kvstrata.hf.logits import Logits
from kvstrata.hf.window_counts import (
    LEAVING_SLOT,
    LENGTH,
    PACKED_LEN,
    PAGE_SLOT,
    TAIL_SLOT,
    Geometry,
    RowCounts,
    StepSlots,
)
from kvstrata.hf.window_rows import RowCalibration
from kvstrata.layout import Format

SHAPES = [(1, 1, 1, 32, 1), (3, 2, 4, 64, 8), (2, 1, 16, 128, 64), (2, 3, 17, 48, 20), (1, 2, 2, 256, 33)]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def layer_of(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> SimpleNamespace:
    rows, kv_heads, _, dim, tail = shape
    calibration = RowCalibration(rows, kv_heads, dim, device)
    calibration.balance.copy_(torch.randint(-3, 4, calibration.balance.shape).float().exp2())
    calibration.centre.copy_(torch.randn(calibration.centre.shape))
    k, v = torch.randn(2, rows, kv_heads, tail + 1, dim).to(device, dtype)
    return SimpleNamespace(tail_k=k, tail_v=v, calibration=calibration)


def strided(rows: int, heads: int, dim: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """``[rows, heads, 1, D]`` as a view of a projection."""
    return torch.randn(rows, 1, heads + 1, dim + 8).to(device, dtype)[:, :, 1:, :dim].transpose(1, 2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_roll_equals_torch(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    """Bit for bit, including values that overflow float16 and NaN; Triton's interpreter truncates to bfloat16."""
    tolerance = 2**-7 if dtype == torch.bfloat16 and device.type == "cpu" else 0
    torch.manual_seed(0)
    rows, kv_heads, group, dim, tail = shape
    layer = layer_of(shape, dtype, device)
    layer.tail_k[0, 0, :, 0] *= 60000 if dtype == torch.float16 else 1
    query, key, value = (strided(rows, n, dim, torch.float32, device) for n in (kv_heads * group, kv_heads, kv_heads))
    key[0, 0, 0, :3] = torch.tensor([1e6, float("nan"), -float("inf")])
    twin = SimpleNamespace(tail_k=layer.tail_k.clone(), tail_v=layer.tail_v.clone(), calibration=layer.calibration)
    slot = torch.randint(0, tail + 1, (rows,), dtype=torch.int32, device=device)
    slot = torch.stack([slot, (slot + 1) % (tail + 1)])
    given = window_triton.roll(layer, slot, query, key, value)
    expected = window_step._Reference.roll(twin, slot, query, key, value)
    for x, y in zip((*given, layer.tail_k, layer.tail_v), (*expected, twin.tail_k, twin.tail_v), strict=True):
        assert x.dtype == dtype
        torch.testing.assert_close(x, y, rtol=tolerance, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["plain", "sinks", "softcap"])
def test_merge_equals_torch(shape: tuple[int, ...], dtype: torch.dtype, kind: str, device: torch.device) -> None:
    """Rows of any tail length, rows without packed tokens, and poison behind the tail's tokens."""
    torch.manual_seed(1)
    rows, kv_heads, group, dim, tail = shape
    layer, heads = layer_of(shape, dtype, device), kv_heads * group
    if kind == "softcap":
        layer.calibration.centre.zero_()
    query = strided(rows, heads, dim, dtype, device)
    length = torch.randint(1, 3 * tail, (rows,), dtype=torch.int32)
    unused = [
        (row, [slot for slot in range(tail + 1) if (n - 1 - slot) % (tail + 1) >= min(n, tail)])
        for row, n in enumerate(length.tolist())
    ]
    for row, slots in unused:
        layer.tail_k[row, :, slots] = 100.0
        layer.tail_v[row, :, slots] = 1e4
    assert all(slots for _, slots in unused)
    packed = torch.randn(rows, heads, dim).to(device, dtype)
    lse = torch.randn(rows, heads, device=device)
    lse[0] = -torch.inf
    packed[0] = 0
    sinks = torch.randn(heads, device=device).to(dtype) if kind == "sinks" else None
    logits = Logits(dim**-0.5, 3.0 if kind == "softcap" else None, sinks)
    length = length.to(device)
    given = window_triton.merge(layer, length, query, packed, lse, logits)
    for row, slots in unused:
        layer.tail_v[row, :, slots] = 0
    expected = window_step._Reference.merge(layer, length, query, packed, lse, logits)
    assert given.shape == (rows, 1, heads, dim)
    assert given.dtype == dtype
    tolerance = {torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 1.6e-2}[dtype]  # two roundings of the output
    torch.testing.assert_close(given, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.gpu
@pytest.mark.sanitizer
def test_steps_under_sanitizers(device: torch.device) -> None:
    """Whole steps of a layer, from the first token to past the window, in padded rows."""
    window, kv_heads, dim, form = 40, 2, 64, Format.parse("K4V3", 64, 16)
    geometry, calibration = Geometry(window, tail=5, ring=48, rows=3), RowCalibration(3, kv_heads, dim, device)
    tails = (torch.zeros(3, kv_heads, 6, dim, dtype=torch.bfloat16, device=device) for _ in range(2))
    layer = SimpleNamespace(
        format=form, pages=torch.zeros(9, kv_heads, form.page_bytes, dtype=torch.uint8, device=device),
        table=(torch.arange(3).view(3, 1) * 3 + torch.arange(6) % 3).int().to(device),
        calibration=calibration, **dict(zip(("tail_k", "tail_v"), tails, strict=True)),
    )  # fmt: skip
    slots, counts = StepSlots(geometry, device), RowCounts.empty(3).grown([0, 1, 4], 5)
    for _ in range(110):
        slots.fill(counts)
        query, key, value = (strided(3, n, dim, torch.bfloat16, device) for n in (8, kv_heads, kv_heads))
        packed_query = window_step.store(layer, slots, query, key, value)
        out = window_step.read(layer, slots, query, packed_query, Logits(dim**-0.5))
        counts = slots.after
    assert torch.isfinite(out).all()


def test_slots_follow_positions() -> None:
    """Tail and pages of a simulated row hold what StepSlots says, from the first token to several turns of the ring."""
    geometry = Geometry(window=40, tail=5, ring=48, rows=2)
    counts, slots = RowCounts.empty(2), StepSlots(geometry, torch.device("cpu"))
    counts = counts.grown([0, 3], 5)
    tails, rings = [{}, {p: p for p in range(3)}], [{}, {}]
    for _ in range(300):
        slots.fill(counts)
        tail_slot, leaving, page_slot, packed, length = slots.device.tolist()
        for row, n in enumerate(counts.lengths):
            for _ in range(2):  # the second time after a failure
                if page_slot[row] >= 0:
                    rings[row][page_slot[row] - 48 * row] = tails[row][leaving[row]]
                tails[row][tail_slot[row]] = n
            assert length[row] == n + 1
            newest = range(max(n - 4, 0), n + 1)
            assert [tails[row][p % 6] for p in newest] == list(newest)
            seen = [rings[row][slot % 48] for slot in range(max(packed[row] - 35, 0), packed[row])]
            assert seen == list(range(max(n - 39, 0), max(n - 4, 0)))
            assert packed[row] <= 96
        counts = slots.after
    assert [TAIL_SLOT, LEAVING_SLOT, PAGE_SLOT, PACKED_LEN, LENGTH] == [0, 1, 2, 3, 4]


def test_counts_after_a_crop() -> None:
    """Tokens that were packed are not packed again, unless they were removed."""
    counts = RowCounts.empty(2).grown([60, 4], 8).cropped(10)
    assert counts.lengths == [50, 0]
    assert counts.held == [0, 0]
    assert counts.packed_to == [50, 0]
    assert counts.written_to == [52, 0]
    assert counts.lacks(8)
    refilled = counts.refilled(8)
    assert not refilled.lacks(8)
    again = refilled.grown([1, 1], 8)
    assert (again.lengths, again.held, again.packed_to, again.written_to) == ([51, 1], [8, 1], [50, 0], [52, 0])
    assert counts.unpacked([9, 9], 8) == [1]
