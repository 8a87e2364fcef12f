"""One checked call of ``prefill_packed``, the input of every backend."""

from __future__ import annotations

from typing import NamedTuple

import torch

from kvstrata.attention.arguments import check_scoring
from kvstrata.attention.prefill.op import HEAD_DIMS
from kvstrata.checks import check_int, check_tensor, fail
from kvstrata.layout import Format
from kvstrata.layout.blocks import Blocks
from kvstrata.store.packed.arguments import (
    check_block_table,
    check_calibration,
    check_ints,
    check_lengths,
    check_memory,
    check_new_rows,
    check_pages,
    check_plain_rows,
    check_query,
)
from kvstrata.store.packed.plain_rows import RowTensors

Result = tuple[torch.Tensor, torch.Tensor | None]
STAGED = 512 << 20  # bytes of unpacked K and V rows at a time


class Tensors(NamedTuple):
    """Tensors of one call, as given."""

    q: torch.Tensor
    k_new: torch.Tensor
    v_new: torch.Tensor
    pages: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    cu_seqlens_q: torch.Tensor
    balance: torch.Tensor | None = None
    centre: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    tail_k: torch.Tensor | None = None
    tail_v: torch.Tensor | None = None
    tail_slots: torch.Tensor | None = None
    sink_k: torch.Tensor | None = None
    sink_v: torch.Tensor | None = None
    sink_slots: torch.Tensor | None = None
    workspace: torch.Tensor | None = None
    cu_seqlens_k: torch.Tensor | None = None

    @property
    def rows(self) -> RowTensors:
        return RowTensors(*self[10:16])


class Options(NamedTuple):
    """Arguments that are not tensors."""

    scale: float | None = None
    sliding_window: int | None = None
    softcap: float | None = None
    max_seqlen_q: int | None = None
    max_seqlen_k: int | None = None
    total_tokens: int | None = None
    exact_lengths: bool = False
    return_lse: bool = False


class Job(NamedTuple):
    """Arguments of one call after checking."""

    tensors: Tensors
    options: Options
    blocks: Blocks
    out: torch.Tensor | None = None  # [T, Hq, D], contiguous

    @property
    def format(self) -> Format:
        return self.blocks.format

    @property
    def max_tokens(self) -> int:
        """Tokens that a row of the block table can list."""
        return self.tensors.block_table.shape[1] * self.blocks.block_size

    @property
    def cu_seqlens_k(self) -> torch.Tensor | None:
        """Prefix sums that the caller gave; None where a length may be beyond the block table, whose rows are fewer."""
        most = self.options.max_seqlen_k
        return self.tensors.cu_seqlens_k if most is not None and most <= self.max_tokens else None


def padded_dim(head_dim: int) -> int:
    """Elements of an unpacked row: the smallest head_dim of `prefill_attention` that is at least ``head_dim``."""
    return next((dim for dim in HEAD_DIMS if dim >= head_dim), head_dim)


def check(
    tensors: Tensors, format: Format, options: Options, out: torch.Tensor | None = None, *, address: bool = True
) -> Job:
    """Check everything but the contents of tensors; ``address``: they are in memory, not fake tensors."""
    q, k, v, pages, block_table, seq_lens, cu_seqlens_q, balance, centre, sinks, *_ = tensors
    blocks = check_pages(pages, format, address)
    device = pages.device
    check_query(q, blocks, device)
    check_tensor("cu_seqlens_q", cu_seqlens_q)
    requests = check_lengths(seq_lens, cu_seqlens_q, device)
    check_block_table(block_table, requests, blocks, device)
    if tensors.cu_seqlens_k is not None:
        sizes = f"[{requests + 1}], one more than seq_lens"
        check_ints("cu_seqlens_k", tensors.cu_seqlens_k, sizes, requests + 1, device)
    check_new_rows(("k_new", "v_new"), k, v, blocks, device, q)
    check_scoring(options.scale, options.softcap, options.sliding_window, sinks, q)
    check_calibration(balance, centre, blocks, device)
    check_plain_rows(tensors.rows, blocks, q.dtype, requests, device, address)
    check_memory(out, tensors.workspace, q, address)
    for name in ("max_seqlen_q", "max_seqlen_k", "total_tokens"):
        if (given := getattr(options, name)) is not None:
            check_int(name, given, 0)
    if options.max_seqlen_q == 0 and q.shape[0]:
        fail("max_seqlen_q", "at least 1, as q has rows", 0)
    if options.exact_lengths and None in (options.max_seqlen_q, options.max_seqlen_k, options.total_tokens):
        fail("exact_lengths", "False without max_seqlen_q, max_seqlen_k and total_tokens", True)
    return Job(tensors, options, blocks, out)
