"""Launcher of prefill_v2.cu, the forward attention kernel that the prefill work started from."""

from __future__ import annotations

import math
import struct
from pathlib import Path

import torch

from kvstrata import jit

SOURCE = Path(__file__).parent / "prefill_v2.cu"
NAMES = {torch.float16: "f16", torch.bfloat16: "bf16"}
PARAMS = struct.Struct("4q4if4x")
ROWS, THREADS = 32, 128


def entry(dtype: torch.dtype) -> str:
    return f"prefill_v2<{NAMES[dtype]}>"


def launch(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, *, causal: bool) -> jit.Launch:
    """Launch for contiguous tensors ``[B, H, S, 64]`` with equal heads; the scale is ``64 ** -0.5``."""
    for x in (q, k, v, out):
        if x.shape[3] != 64 or not x.is_contiguous() or x.shape[:2] != q.shape[:2]:
            raise ValueError(f"expected contiguous [{q.shape[0]}, {q.shape[1]}, tokens, 64], got {tuple(x.shape)}")
    units, blocks = q.shape[0] * q.shape[1], -(-q.shape[2] // ROWS)
    params = PARAMS.pack(
        *(x.data_ptr() for x in (q, k, v, out)), q.shape[2], k.shape[2], blocks, causal, 0.125 * math.log2(math.e)
    )
    kernel = jit.load(SOURCE, entry(q.dtype))
    return jit.Launch(kernel, units * blocks, THREADS, params)
