"""One checked call of ``decode_packed``, the input of every backend."""

from __future__ import annotations

from typing import NamedTuple

import torch

from kvstrata.attention.arguments import check_scoring, kernel_sinks
from kvstrata.checks import check_int, fail
from kvstrata.layout import Format
from kvstrata.layout.blocks import Blocks
from kvstrata.store.packed.arguments import (
    check_address,
    check_block_table,
    check_calibration,
    check_lengths,
    check_memory,
    check_pages,
    check_plain_rows,
    check_query,
)
from kvstrata.store.packed.plain_rows import RowTensors

Result = tuple[torch.Tensor, torch.Tensor | None]
MOST_QUERIES = 16  # maximum queries per request, unless max_seqlen_q is given


class Options(NamedTuple):
    """Arguments that are not tensors."""

    scale: float | None = None
    sliding_window: int | None = None
    softcap: float | None = None
    max_seqlen_q: int | None = None
    fixed_split: int | None = None
    return_lse: bool = False


class Tensors(NamedTuple):
    """Tensors of one call, as given."""

    q: torch.Tensor
    pages: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    cu_seqlens_q: torch.Tensor | None = None
    balance: torch.Tensor | None = None
    centre: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    workspace: torch.Tensor | None = None
    tail_k: torch.Tensor | None = None
    tail_v: torch.Tensor | None = None
    tail_slots: torch.Tensor | None = None
    sink_k: torch.Tensor | None = None
    sink_v: torch.Tensor | None = None
    sink_slots: torch.Tensor | None = None

    @property
    def rows(self) -> RowTensors:
        return RowTensors(*self[9:15])


class Job(NamedTuple):
    """Arguments of one call after checking."""

    q: torch.Tensor  # [T, Hq, D], inner stride 1
    pages: torch.Tensor  # uint8 [num_blocks, H, pages_per_block * page_bytes]
    block_table: torch.Tensor  # int32 [B, max_blocks], inner stride 1
    seq_lens: torch.Tensor  # int32 [B], contiguous
    cu_seqlens_q: torch.Tensor | None  # int32 [B + 1], contiguous
    balance: torch.Tensor | None  # float32 [H, D]
    centre: torch.Tensor | None
    sinks: torch.Tensor | None  # float32 [Hq]
    workspace: torch.Tensor | None  # uint8
    blocks: Blocks
    most_queries: int  # maximum queries per request
    scale: float
    sliding_window: int | None
    softcap: float | None
    fixed_split: int | None
    return_lse: bool
    rows: RowTensors = RowTensors()
    out: torch.Tensor | None = None  # [T, Hq, D], contiguous

    @property
    def format(self) -> Format:
        return self.blocks.format

    @property
    def requests(self) -> int:
        return self.seq_lens.shape[0]

    @property
    def group(self) -> int:
        """Query heads of one KV head."""
        return self.q.shape[1] // self.blocks.kv_heads

    @property
    def max_tokens(self) -> int:
        """Tokens that a row of the block table can list."""
        return self.block_table.shape[1] * self.blocks.block_size


def _most_queries(tensors: Tensors, given: int | None) -> int:
    tokens, requests = tensors.q.shape[0], tensors.seq_lens.shape[0]
    if given is not None:
        check_int("max_seqlen_q", given, 1)
    if tensors.cu_seqlens_q is not None:
        return MOST_QUERIES if given is None else given
    if given is not None:
        fail("max_seqlen_q", "None without cu_seqlens_q", given)
    if tokens == requests == 0:
        return 1
    if requests == 0 or tokens % requests or tokens == 0:
        fail("q", f"as many tokens for each of {requests} requests, or cu_seqlens_q", f"{tokens} tokens")
    return tokens // requests


def check(
    tensors: Tensors, format: Format, options: Options, out: torch.Tensor | None = None, *, address: bool = True
) -> Job:
    """Check everything but the contents of tensors; ``address``: they are in memory, not fake tensors."""
    q, pages, block_table, seq_lens, cu_seqlens_q, balance, centre, sinks, workspace, *_ = tensors
    blocks = check_pages(pages, format, address)
    device = pages.device
    check_query(q, blocks, device)
    requests = check_lengths(seq_lens, cu_seqlens_q, device)
    check_block_table(block_table, requests, blocks, device)
    check_scoring(options.scale, options.softcap, options.sliding_window, sinks, q)
    check_calibration(balance, centre, blocks, device)
    check_plain_rows(tensors.rows, blocks, q.dtype, requests, device, address)
    check_memory(out, workspace, q, address)
    if address and out is not None:
        check_address("out", out)
    if options.fixed_split is not None:
        check_int("fixed_split", options.fixed_split, 1)
    most = _most_queries(tensors, options.max_seqlen_q)
    scale = format.head_dim**-0.5 if options.scale is None else float(options.scale)
    return Job(
        q, pages, block_table, seq_lens, cu_seqlens_q, balance, centre, None if sinks is None else kernel_sinks(sinks),
        workspace, blocks, most, scale, options.sliding_window, options.softcap, options.fixed_split,
        options.return_lse, tensors.rows, out,
    )  # fmt: skip
