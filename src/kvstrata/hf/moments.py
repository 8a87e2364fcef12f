"""Means over the tokens of a prompt from which the balance of K is estimated, on any device.

Channels come in pairs: those that RoPE rotates into each other, then the rest in order. A pair of K is rotated back to
position 0, so that means over tokens refer to one position; of a pair of Q
only second moments are needed, which rotate by twice the angle.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class Moments(NamedTuple):
    """Means, float32 ``[rows, kv_heads, pairs]``; ``x`` and ``y`` are the channels of a pair that is rotated back."""

    k_first: torch.Tensor  # squares of the first channel
    k_second: torch.Tensor
    x: torch.Tensor
    y: torch.Tensor
    k_unlike: torch.Tensor  # x² - y²
    k_cross: torch.Tensor  # 2 x y
    q_first: torch.Tensor  # of Q likewise, also over the query heads of a KV head
    q_second: torch.Tensor
    q_unlike: torch.Tensor
    q_cross: torch.Tensor


def channels(pairs: int, dim: int, *, is_interleaved: bool) -> list[tuple[slice, slice]]:
    """First and second channels of the pairs that RoPE rotates, and of the others."""
    turned = (slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2))
    if not is_interleaved:
        turned = (slice(pairs), slice(pairs, 2 * pairs))
    return [turned, (slice(2 * pairs, dim, 2), slice(2 * pairs + 1, dim, 2))]


class PromptSample(NamedTuple):
    """Columns of a prompt that the balance is estimated from."""

    query: torch.Tensor  # [rows, heads, n, D]; values that are not finite count as 0
    key: torch.Tensor  # [rows, kv_heads, n, D], likewise
    weight: torch.Tensor  # float32 [rows, n], 0 for unused columns, whose rows may hold anything
    number: torch.Tensor  # integers [rows, n], positions of the used ones
    tables: tuple[torch.Tensor, torch.Tensor]  # cos and sin of each rotated pair's angle, float32 [positions, pairs]
    largest: float  # values are clamped to it
    is_interleaved: bool  # RoPE rotates channels (2 i, 2 i + 1), not (i, i + pairs)


def sums(sample: PromptSample) -> torch.Tensor:
    """`Moments` weighted by ``weight`` over columns, in torch, stacked: ``[rows, kv_heads, 10, pairs]``."""
    query, key, weight, number, tables, largest, is_interleaved = sample
    dim, turned = key.shape[-1], tables[0].shape[1]
    pairs = channels(turned, dim, is_interleaved=is_interleaved)
    cos, sin = (
        torch.nn.functional.pad(table[number.clamp(0, len(table) - 1)], (0, dim // 2 - turned), value=rest).unsqueeze(2)
        for table, rest in zip(tables, (1.0, 0.0), strict=True)
    )

    def in_pairs(x: torch.Tensor) -> list[torch.Tensor]:
        return [torch.cat([x[..., pair[i]] for pair in pairs], -1) for i in (0, 1)]

    used = (weight > 0)[:, None, :, None]
    k, q = (torch.where(used, x, 0).float().nan_to_num(0.0, 0.0, 0.0).clamp(-largest, largest) for x in (key, query))
    a, b = in_pairs(k.transpose(1, 2))  # [rows, n, kv_heads, pairs]
    x, y = a * cos + b * sin, b * cos - a * sin
    of_k = [a * a, b * b, x, y, x * x - y * y, 2 * x * y]
    a, b = in_pairs(q.unflatten(1, (key.shape[1], -1)).permute(0, 3, 1, 2, 4))
    unlike, cross = (a * a - b * b).mean(3), 2 * (a * b).mean(3)
    cos, sin = cos * cos - sin * sin, 2 * cos * sin
    of_q = [(a * a).mean(3), (b * b).mean(3), unlike * cos + cross * sin, cross * cos - unlike * sin]
    return torch.stack([torch.einsum("rnhp,rn->rhp", x, weight) for x in (*of_k, *of_q)], 2)
