"""One checked call of ``store_packed``, the input of every backend."""

from __future__ import annotations

from typing import NamedTuple

import torch

from kvstrata.layout import Format
from kvstrata.layout.blocks import Blocks

from .arguments import check_calibration, check_new_rows, check_pages, check_slot_mapping


class Job(NamedTuple):
    """Arguments of one call after checking."""

    k: torch.Tensor  # [T, H, D], inner stride 1
    v: torch.Tensor
    pages: torch.Tensor  # uint8 [num_blocks, H, pages_per_block * page_bytes]
    slot_mapping: torch.Tensor  # int32 or int64 [T]
    blocks: Blocks
    balance: torch.Tensor | None  # float32 [H, D], contiguous
    centre: torch.Tensor | None

    @property
    def format(self) -> Format:
        return self.blocks.format


def check(
    k: torch.Tensor,
    v: torch.Tensor,
    pages: torch.Tensor,
    slot_mapping: torch.Tensor,
    format: Format,
    balance: torch.Tensor | None,
    centre: torch.Tensor | None,
    *,
    address: bool = True,
) -> Job:
    """Check everything but the slots; ``address``: pages is in memory, not a fake tensor."""
    blocks = check_pages(pages, format, address)
    check_new_rows(("k", "v"), k, v, blocks, pages.device)
    check_slot_mapping(slot_mapping, k.shape[0], pages.device)
    check_calibration(balance, centre, blocks, pages.device)
    return Job(k, v, pages, slot_mapping, blocks, balance, centre)
