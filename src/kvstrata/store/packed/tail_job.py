"""One call of ``store_packed`` with a tail or sink rows, checked: what every backend is given."""

from __future__ import annotations

from typing import NamedTuple

import torch

from kvstrata.layout import Format

from .job import Job, check
from .plain_rows import RowTensors, check_rows


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


def _check_lengths(name: str, x: torch.Tensor, count: int | None, device: torch.device) -> None:
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name}: expected a tensor with a tail or sink_tokens, got {type(x).__name__}")
    if x.dtype != torch.int32:
        raise TypeError(f"{name}: expected torch.int32, got {x.dtype}")
    if x.dim() != 1 or (count is not None and x.shape[0] != count) or (x.shape[0] > 1 and x.stride(0) != 1):
        expected = "contiguous [B]" if count is None else f"contiguous [{count}], one more than seq_lens"
        raise ValueError(f"{name}: expected {expected}, got shape {tuple(x.shape)} and strides {x.stride()}")
    if x.device != device:
        raise ValueError(f"{name}: expected a tensor on {device}, where pages is, got {x.device}")


def check_tail(tensors: TailTensors, format: Format, *, address: bool = True) -> TailJob:
    """Check everything but the contents of tensors; ``address``: they are memory, not fake tensors."""
    t = tensors
    job = check(t.k, t.v, t.pages, t.slot_mapping, format, t.balance, t.centre, address=address)
    device = t.pages.device
    _check_lengths("seq_lens", t.seq_lens, None, device)
    requests, tokens = t.seq_lens.shape[0], t.k.shape[0]
    if t.cu_seqlens_q is not None:
        _check_lengths("cu_seqlens_q", t.cu_seqlens_q, requests + 1, device)
    elif tokens and (requests == 0 or tokens % requests):
        raise ValueError(f"k: expected as many tokens for each of {requests} requests, or cu_seqlens_q, got {tokens}")
    check_rows(t.rows, job.blocks, t.k.dtype, requests, device, address)
    return TailJob(job, t.rows, t.seq_lens, t.cu_seqlens_q)
