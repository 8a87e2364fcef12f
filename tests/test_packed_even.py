"""Even batches of decode_packed on CUDA: blocks belong to head caches, and their warps merge what they found."""

from __future__ import annotations

import pytest
import torch

from conftest import HAS_GPU
from kvstrata import Format, decode_packed
from kvstrata.attention.packed_decode import cuda as decode_cuda
from kvstrata.attention.packed_decode import op as decode_op
from packed_model import DEVICE, Batch, calibration_of, kernels, needs_emulator  # noqa: F401

pytestmark = needs_emulator


def written(batch: Batch) -> tuple[set[int], decode_cuda.Plan]:
    """Slots of partials that a step of one query writes, and its plan."""
    workspace = torch.full((1 << 25,), 0xFF, dtype=torch.uint8, device=DEVICE)
    q = batch.queries([1] * len(batch.lengths), 1)
    given = (q, batch.pages, batch.block_table, batch.seq_lens, batch.fmt)
    decode_packed(*given, workspace=workspace, backend="cuda")
    plan = next(reversed(decode_op._plans.known.values()))
    sums = workspace[plan.sums_offset : plan.nbytes].view(torch.float32).view(plan.slots, -1, 2)
    return set(sums[:, 0, 0].isfinite().nonzero().flatten().tolist()), plan


@pytest.mark.parametrize(("lengths", "kv_heads"), [([500], 2), ([100, 100, 100], 2), ([35], 4), ([70, 0, 65, 80], 1)])
def test_a_partial_of_each_block(lengths: list[int], kv_heads: int) -> None:
    """One request, equal lengths, hardly a token, nearly equal lengths and an empty request."""
    batch = Batch(Format.parse("K4V4", 64, 16), lengths, kv_heads=kv_heads, capacity=40)
    slots, plan = written(batch)
    splits = plan.work[decode_cuda.SPLITS]
    assert splits == plan.decode_blocks // (len(lengths) * kv_heads) > 0
    longest = -(-max(lengths) // 16)
    deep = -(-longest // (splits * plan.cut.warps))
    expected = set()
    for head_cache in range(len(lengths) * kv_heads):
        stages = -(-lengths[head_cache // kv_heads] // 16)
        expected |= {head_cache * splits + i for i in range(-(-stages // (deep * plan.cut.warps)))}
    assert slots == expected
    batch.check("cuda")


def test_a_ragged_batch_is_split_by_cost() -> None:
    batch = Batch(Format.parse("K4V4", 64, 16), [1500, 1, 1, 1], kv_heads=1)
    slots, plan = written(batch)
    splits = plan.work[decode_cuda.SPLITS]
    assert splits > 0
    if not HAS_GPU:  # which has more blocks than the request has stages
        assert len(slots) > splits + 3  # the long request has more than its share of blocks
    batch.check("cuda")


CASES: dict[str, tuple[tuple, list[int], dict, dict]] = {
    "18 columns in two blocks": (("K4V4", 64, 16), [90, 90], {}, dict(q_lens=[3, 3], group=6)),
    "ragged queries, a request without": (("K2V2", 64, 32), [70, 70, 70], {}, dict(q_lens=[2, 0, 3], group=2)),
    "window": (("K4V4", 64, 16), [150, 150], dict(pages_per_block=4), dict(sliding_window=90)),
    "partials larger than pages": (("K2V2", 256, 16), [40, 40], dict(dtype=torch.float16), dict(group=1)),
    "odd head_dim": (("K3V2", 80, 32), [100, 100], {}, {}),
    "calibrated, sinks": (("K4V4", 64, 16), [60, 60], dict(calibration=True), dict(sinks=torch.tensor([0.5, 2.0] * 3))),
    "loud": (("K8V4", 64, 16), [130], {}, dict(loud=30.0)),
}


@pytest.mark.parametrize("name", CASES)
def test_evenly_split_decode_equals_the_model(name: str) -> None:
    (fmt, dim, tokens), lengths, batch, call = CASES[name]
    if batch.get("calibration"):
        batch = batch | dict(calibration=calibration_of(2, dim))
    if "sinks" in call:
        call = call | dict(sinks=call["sinks"].to(DEVICE))
    Batch(Format.parse(fmt, dim, tokens), lengths, **batch).check("cuda", **call)


def test_alternating_layers_are_remembered() -> None:
    """Calls with and without a window, again and again: only the first of each is checked."""
    fmt = Format.parse("K4V4", 64, 16)
    batch = Batch(fmt, [90, 40])
    q = batch.queries([1, 1], 1)
    given = (q, batch.pages, batch.block_table, batch.seq_lens, fmt)
    first = [decode_packed(*given, sliding_window=window, backend="cuda") for window in (None, 20)]
    checked = []
    real, decode_op._decode = decode_op._decode, lambda *a, **k: checked.append(a) or real(*a, **k)
    try:
        for window, want in zip((None, 20) * 2, first * 2, strict=True):
            assert torch.equal(decode_packed(*given, sliding_window=window, backend="cuda"), want)
    finally:
        decode_op._decode = real
    assert not checked
