"""Checked arguments of ``store_packed`` with a tail or sink rows, as passed to every backend."""

from __future__ import annotations

from typing import NamedTuple

import torch

from kvstrata.checks import fail
from kvstrata.layout import Format

from .arguments import check_lengths, check_plain_rows
from .job import Job, check
from .plain_rows import RowTensors


class TailTensors(NamedTuple):
    """Tensors of one call, as given."""

    k: torch.Tensor  # [T, H, D]
    v: torch.Tensor
    pages: torch.Tensor
    slot_mapping: torch.Tensor
    seq_lens: torch.Tensor  # int32 [B]
    cu_seqlens_q: torch.Tensor | None  # int32 [B + 1]; None: T / B rows each
    balance: torch.Tensor | None
    centre: torch.Tensor | None
    tail_k: torch.Tensor | None
    tail_v: torch.Tensor | None
    tail_slots: torch.Tensor | None
    sink_k: torch.Tensor | None
    sink_v: torch.Tensor | None
    sink_slots: torch.Tensor | None

    @property
    def rows(self) -> RowTensors:
        return RowTensors(*self[8:])


class TailJob(NamedTuple):
    """Arguments of one call after checking."""

    store: Job
    rows: RowTensors
    seq_lens: torch.Tensor
    cu_seqlens_q: torch.Tensor | None

    @property
    def requests(self) -> int:
        return self.seq_lens.shape[0]


def check_tail(tensors: TailTensors, format: Format, *, address: bool = True) -> TailJob:
    """Check everything but the contents of tensors; ``address``: they are memory, not fake tensors."""
    t = tensors
    job = check(t.k, t.v, t.pages, t.slot_mapping, format, t.balance, t.centre, address=address)
    device = t.pages.device
    requests, tokens = check_lengths(t.seq_lens, t.cu_seqlens_q, device), t.k.shape[0]
    if t.cu_seqlens_q is None and tokens and (requests == 0 or tokens % requests):
        fail("k", f"as many tokens for each of {requests} requests, or cu_seqlens_q", tokens)
    check_plain_rows(t.rows, job.blocks, t.k.dtype, requests, device, address)
    return TailJob(job, t.rows, t.seq_lens, t.cu_seqlens_q)
