"""RoPE for calibration: channels that are rotated together, and the mean rotation over positions."""

from __future__ import annotations

import torch


def pair_channels(pairs: int, *, interleaved: bool) -> tuple[slice, slice]:
    """First and second channels of the pairs that RoPE rotates: (2 i, 2 i + 1) if ``interleaved``, else (i, i + n)."""
    if interleaved:
        return slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2)
    return slice(pairs), slice(pairs, 2 * pairs)


def mean_rotation(angle: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean cos and sin of ``angle [n]`` times 0 .. p - 1, for each p of ``positions``: float32 ``[requests, n]``."""
    n = positions.double().unsqueeze(1)
    half = angle / 2
    whole_turns = half.sin().abs() < 1e-9  # including none
    size = torch.where(whole_turns, 1.0, (n * half).sin() / (n * half.sin()))
    phase = torch.where(whole_turns, 0.0, (n - 1) * half)
    return (size * phase.cos()).float(), (size * phase.sin()).float()
