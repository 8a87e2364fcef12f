"""Attention in its simplest form, for the sweeps of decode, prefill, packed pages and settling."""

from __future__ import annotations

import torch


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, own: torch.Tensor, position: torch.Tensor | None = None, *,
    causal: bool = True, window: int | None = None, softcap: float | None = None, sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Output ``[Sq, Hq, D]``, lse ``[Sq, Hq]`` and weights ``[Sq, Hq, n]`` in float32.

    ``q [Sq, Hq, D]`` is at positions ``own [Sq]``, ``k`` and ``v [Hkv, n, D]`` at ``position [Hkv, n]`` (None: in
    order). A query that sees no key gives zeros, and an lse of -inf or its sink logit.
    """
    group, dim = q.shape[1] // len(k), q.shape[2]
    wide_k, wide_v = (x.float().repeat_interleave(group, 0) for x in (k, v))
    score = torch.einsum("qhd,hnd->qhn", q.float(), wide_k) * dim**-0.5
    if softcap:
        score = softcap * torch.tanh(score / softcap)
    if causal:
        key = torch.arange(k.shape[1]) if position is None else position.repeat_interleave(group, 0)
        own = own.view(-1, 1, 1)
        hidden = (key > own) | (key < 0)
        if window is not None:
            hidden |= key <= own - window
        score = score.masked_fill(hidden, -torch.inf)
    sink = torch.full((q.shape[1],), -torch.inf) if sinks is None else sinks
    lse = torch.cat([score, sink.view(1, -1, 1).expand(len(q), -1, 1)], 2).logsumexp(2)
    weight = torch.exp(score - lse.masked_fill(lse == -torch.inf, 0.0).unsqueeze(2))
    return torch.einsum("qhn,hnd->qhd", weight, wide_v), lse, weight
