"""Sums of a prompt for its balance: the Triton kernel against torch."""

from __future__ import annotations

import pytest
import torch

from kvstrata.hf import moments, moments_triton

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # without a GPU Triton runs in its interpreter


SHAPES = [
    (1, 2, 4, 300, 64, 32),
    (2, 1, 1, 1, 80, 16),
    (1, 3, 16, 37, 96, 48),
    (1, 1, 2, 129, 256, 0),
    (3, 2, 3, 20, 32, 12),
]


def given(rows: int, kv_heads: int, group: int, n: int, dim: int, turned: int) -> tuple[torch.Tensor, ...]:
    """Views with gaps between heads and columns, padding, and numbers that are not finite or not in fp16."""
    torch.manual_seed(n + dim)
    query = torch.randn(rows, n, group * kv_heads, dim + 16, dtype=torch.bfloat16).transpose(1, 2)[..., :dim]
    key = 3 * torch.randn(rows, kv_heads, n + 3, dim, dtype=torch.bfloat16)[:, :, :n]
    use = torch.rand(rows, n) < 0.9
    use[:, n // 2] = True
    weight = use.float() / use.sum(1, keepdim=True)
    query[:, :, ~use[0]] = float("nan")
    key[0, 0, n // 2, :3] = torch.tensor([float("inf"), float("nan"), -1e30])
    number = torch.arange(n).expand(rows, -1) - 2  # padding before the first token
    turn = torch.rand(max(1, n - 3), turned) * 6
    return query, key, weight, number, turn.cos(), turn.sin()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("interleaved", [False, True])
def test_the_kernel_sums_as_torch_does(shape: tuple[int, ...], interleaved: bool) -> None:
    query, key, weight, number, cos, sin = (x.to(DEVICE) for x in given(*shape))
    found = moments_triton.sums(moments.PromptSample(query, key, weight, number, (cos, sin), 1e4, interleaved))
    query, key, weight, number, cos, sin = (x.cpu() for x in (query, key, weight, number, cos, sin))
    want = moments.sums(moments.PromptSample(query, key, weight, number, (cos, sin), 1e4, interleaved))
    size = want.abs().amax((0, 1, 3), keepdim=True).clamp(min=1e-6)
    torch.testing.assert_close(found.cpu() / size, want / size, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("interleaved", [False, True])
def test_the_loops_sum_as_torch_does(shape: tuple[int, ...], interleaved: bool) -> None:
    moments_numba = pytest.importorskip("kvstrata.hf.moments_numba")
    query, key, weight, number, cos, sin = given(*shape)
    sample = moments.PromptSample(query, key, weight, number, (cos, sin), 1e4, interleaved)
    found, want = moments_numba.sums(sample), moments.sums(sample)
    size = want.abs().amax((0, 1, 3), keepdim=True).clamp(min=1e-6)
    torch.testing.assert_close(found / size, want / size, rtol=1e-4, atol=2e-5)


def test_channels_of_all_pairs_are_all_channels() -> None:
    for interleaved in (False, True):
        slices = moments.channels(12, 32, is_interleaved=interleaved)
        assert sorted(i for pair in slices for part in pair for i in range(32)[part]) == list(range(32))


def test_the_kernel_compiles_without_spills() -> None:
    from ahead import compile_triton

    types = dict(q_ptr="*bf16", k_ptr="*bf16", weight_ptr="*fp32", number_ptr="*i64", cos_ptr="*fp32", sin_ptr="*fp32")
    types |= dict(out_ptr="*fp32", columns="i32", largest="fp32")
    sizes = dict(KV_HEADS=8, GROUP=4, PAIRS=64, TURNED=64, POSITIONS=516, INTERLEAVED=False, WIDE=64, BLOCK_N=8)
    sizes |= dict(SPAN=moments_triton.SPAN, SUMS=moments_triton.SUMS)
    used = compile_triton("kvstrata.hf.moments_triton", "moments_kernel", 90, types, sizes, num_warps=4)
    assert used["STACK"] == used["LOCAL"] == 0
    assert used["REG"] <= 255
