"""float32 rows to fp16 on the CPU in a vectorised loop: on some processors torch converts one number at a time."""

from __future__ import annotations

import numpy as np
import torch

from kvstrata.loops import fast

BLOCK = 1024  # numbers at a time: they stay in a core's L1 cache


def to_half(x: torch.Tensor) -> torch.Tensor:
    """``x.to(float16)`` of a float32 tensor on the CPU, clamped to +-65504; contiguous."""
    out = torch.empty(x.shape, dtype=torch.float16, device="cpu")
    _round(x.detach().contiguous().view(-1).numpy(), out.view(-1).view(torch.int16).numpy().view(np.uint16))
    return out


@fast
def _round(values, out):
    """Write fp16 bits of ``values``, rounded to nearest even, to ``out``."""
    bits, space = values.view(np.uint32), np.empty(BLOCK, np.float32)
    for first in range(0, len(values), BLOCK):
        words, rounded = bits[first : first + BLOCK], out[first : first + BLOCK]
        numbers, small = words.view(np.float32), space.view(np.uint32)
        for i in range(len(words)):  # the last bit of 0.5 + x is the last bit of an fp16 subnormal
            space[i] = abs(numbers[i]) + np.float32(0.5)
        for i in range(len(words)):
            size = np.uint32(words[i] & np.uint32(0x7FFFFFFF))
            odd = np.uint32(size >> np.uint32(13)) & np.uint32(1)
            half = np.uint32(np.uint32(size + odd) - np.uint32((112 << 23) - 0xFFF)) >> np.uint32(13)
            half = np.uint32(half if half < np.uint32(0x7BFF) else np.uint32(0x7BFF))
            low = np.uint32(small[i] - np.uint32(126 << 23))
            half = half if size >= np.uint32(113 << 23) else low
            half = half if size <= np.uint32(0x7F800000) else np.uint32(0x7E00)
            rounded[i] = np.uint16(half | (np.uint32(words[i] >> np.uint32(16)) & np.uint32(0x8000)))
