"""Rows of a float32 model as fp16: the compiled loop against torch, number for number."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("numba")
from kvstrata.layout.half_numba import BLOCK, to_half


def test_every_fp16_value_and_the_midpoints_round_correctly() -> None:
    """All finite fp16 numbers, the middle of any two, its neighbours, and what has no place in fp16."""
    halves = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(torch.float16)
    exact = halves[halves.isfinite()].float().sort().values
    middle = (exact[1:].double() + exact[:-1].double()).div(2).float()
    up, down = (torch.nextafter(middle, torch.tensor(end)) for end in (torch.inf, -torch.inf))
    odd = torch.tensor([torch.inf, -torch.inf, torch.nan, 1e30, 65519.9, 65520.0, -65520.0, 1e-30, -1e-45, 0.0, -0.0])
    x = torch.cat([exact, middle, up, down, odd])
    want, found = x.half().clamp_(-65504, 65504), to_half(x)
    assert found.isnan().equal(x.isnan())
    there = ~x.isnan()
    assert found[there].view(torch.int16).equal(want[there].view(torch.int16))


@pytest.mark.parametrize("n", [0, 1, 3, BLOCK - 1, BLOCK, BLOCK + 1])
def test_rows_of_any_number_and_stride(n: int) -> None:
    x = torch.randn(3, n, 2).transpose(0, 1)
    found = to_half(x)
    assert found.is_contiguous()
    assert found.equal(x.half())
