"""Conversion of a model's attention scores to logits."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Logits(NamedTuple):
    """Scale, soft cap and sink logits, as in `decode_attention`."""

    scale: float
    softcap: float | None = None
    sinks: torch.Tensor | None = None  # [heads]
