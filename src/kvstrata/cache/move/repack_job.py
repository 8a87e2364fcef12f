"""Arguments of ``repack``, common to all backends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from kvstrata.cache.storage.page import PageFormat
from kvstrata.cache.storage.pool import Pool


class Job(NamedTuple):
    """The arguments of one call."""

    pool: Pool
    page_formats: Sequence[PageFormat]
    packed: torch.Tensor  # int32 [n, 12], columns as in moves.COLUMNS
    k: torch.Tensor | None  # new rows [rows, D] in the dtype of plain pages, inner stride 1
    v: torch.Tensor | None
    centre: torch.Tensor  # float32 [m, D], subtracted from plain K that is quantised
    direction: torch.Tensor | None = None  # int8 [m, D] of K, see `quant.reference.aim`
