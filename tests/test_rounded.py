"""jit/include/rounded.cuh against float64, on a GPU: approximations of the hardware and what corrects them."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
import torch

from kvstrata import jit

KERNEL = """
#include "rounded.cuh"
struct Params { const float *a, *b; float *root, *inverse, *quotient; long long n; };
extern "C" __global__ void rounded(const __grid_constant__ Params p) {
  for (long long i = blockIdx.x * 256ll + threadIdx.x; i < p.n; i += gridDim.x * 256ll) {
    p.root[i] = square_root(p.b[i]);
    p.inverse[i] = reciprocal(p.b[i]);
    p.quotient[i] = divide(p.a[i], p.b[i]);
  }
}
"""


def on_the_gpu(a: torch.Tensor, b: torch.Tensor, folder: Path) -> list[torch.Tensor]:
    source = folder / "rounded.cu"
    source.write_text(KERNEL)
    out = [torch.empty_like(b) for _ in range(3)]
    params = struct.pack("5Qq", *(x.data_ptr() for x in (a, b, *out)), len(b))
    jit.bind_context(0)
    jit.Launch(jit.load(source, "rounded"), 1024, 256, params)(jit.current_stream(0))
    return out


@pytest.mark.gpu
@pytest.mark.parametrize("exponent", [127, 128, 100, 150])
def test_every_mantissa(exponent: int, tmp_path: Path) -> None:
    b = (torch.arange(2**23, dtype=torch.int32, device="cuda") + (exponent << 23)).view(torch.float32)
    a = torch.randint(-(2**31), 2**31, (2**23,), generator=torch.Generator().manual_seed(exponent)).float().cuda()
    root, inverse, quotient = on_the_gpu(a, b, tmp_path)
    for got, want in ((root, b.double().sqrt()), (inverse, 1 / b.double()), (quotient, a.double() / b.double())):
        wrong = (got != want.float()).nonzero()
        assert not len(wrong), f"{len(wrong)} of {len(b)}, the first at {float(b[wrong[0]]).hex()}"


@pytest.mark.gpu
def test_quotients_of_whole_numbers(tmp_path: Path) -> None:
    """Sums that scales are fitted with: a divided by b, b up to 256 * 255^2."""
    generator = torch.Generator().manual_seed(0)
    b = torch.randint(1, 256 * 255**2, (2**24,), generator=generator).float().cuda()
    a = (torch.randint(0, 2**31, (2**24,), generator=generator)).float().cuda()
    assert torch.equal(on_the_gpu(a, b, tmp_path)[2], (a.double() / b.double()).float())
