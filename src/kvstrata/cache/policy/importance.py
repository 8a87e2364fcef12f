"""Importance: a running estimate of the attention mass of every token and KV head.

``mean``: pages hold the sum of the mass so far; the estimate divides by the number of queries that could see the token.
That needs no counter per token: queries are reported in the order of tokens, so of the queries reported when the
request had n tokens, a token at position p was seen by min(queries, n - p). One query at the uniform mass 1 / length is
added as a prior, which is all that is known about a token that no query has seen.

``ema``: pages hold the moving average itself, which starts at the uniform mass.
"""

from __future__ import annotations

import numpy as np
import torch

MODES = ("mean", "ema")


def initial(mode: str, length: torch.Tensor) -> torch.Tensor:
    """Initial importance of a new token."""
    return torch.zeros_like(length, dtype=torch.float32) if mode == "mean" else 1.0 / length.float().clamp(min=1)


def initial_of(mode: str, lengths: np.ndarray) -> np.ndarray:
    """`initial` on the host, float32."""
    if mode == "mean":
        return np.zeros(len(lengths), np.float32)
    return initial(mode, torch.from_numpy(lengths)).numpy()


def updated(
    mode: str,
    state: torch.Tensor,
    mass: torch.Tensor,
    queries: int | torch.Tensor,
    owners: torch.Tensor,
    decay: float,
) -> torch.Tensor:
    """The entries after ``queries`` more queries gave ``mass`` in total.

    A page that several requests share gets mass from all of them: each contributes its part, so that the entry stays an
    average over its owners. An owner that reports nothing counts as zero mass.
    """
    mass = mass.float().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).clamp(min=0.0)
    if mode == "mean":
        return (state + mass / owners).clamp(max=torch.finfo(torch.float32).max)
    gain = 1 - decay**queries
    return state + (mass / queries - state) * (gain / owners)


def estimate(
    mode: str,
    state: torch.Tensor,
    position: torch.Tensor,
    length: torch.Tensor,
    queries: torch.Tensor,
    reported: torch.Tensor,
) -> torch.Tensor:
    """Expected mass per query, positive; ``reported`` is the length at the last report."""
    uniform = 1.0 / length.float().clamp(min=1)
    if mode == "ema":
        return state.clamp(min=0.0) + 1e-3 * uniform
    seen = torch.minimum(queries, reported - position).clamp(min=0).float()
    return (state + uniform) / (seen + 1)
