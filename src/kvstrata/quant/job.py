"""Arguments of ``quantize_pages``, common to all backends."""

from __future__ import annotations

from typing import NamedTuple

import torch

from kvstrata.layout import Format


class Job(NamedTuple):
    """The arguments of one call."""

    k: torch.Tensor
    v: torch.Tensor
    pool: torch.Tensor
    pages: torch.Tensor
    source: torch.Tensor
    heads: torch.Tensor
    format: Format
    centre: torch.Tensor | None
    centres: torch.Tensor | None
    direction: torch.Tensor | None = None  # int8 [m, D], rows as those of centre
