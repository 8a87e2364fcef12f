"""The packed benchmark on small shapes: its checks pass for what is right and fail for what is wrong."""

from __future__ import annotations

import pytest
import torch

from kvstrata.tools.bench.cases import packed
from kvstrata.tools.bench.cases.decode import Shape


@pytest.mark.parametrize("q_len", [1, 4])
def test_decode_is_checked_with_several_queries(device: torch.device, q_len: int) -> None:
    shape = Shape(3, 256, heads=4, kv_heads=2, head_dim=64, q_len=q_len)
    bench = packed.build("K4V4", shape, False, 1, device)
    out = bench.contenders["kvstrata"](0)
    assert isinstance(out, torch.Tensor)
    bench.check("kvstrata", 0, out)
    for wrong in (out.roll(1, 0), torch.full_like(out, torch.nan)):
        with pytest.raises(AssertionError):
            bench.check("kvstrata", 0, wrong)
