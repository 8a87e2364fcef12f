"""One checked call of ``prefill_packed``, as every backend takes it."""

from __future__ import annotations

from typing import NamedTuple

import torch

from kvstrata.attention.arguments import check_positive, check_sinks, check_sliding_window
from kvstrata.attention.packed_decode.job import check_memory, check_query, check_tables
from kvstrata.layout import Format
from kvstrata.layout.blocks import Blocks, blocks_of, check_alignment
from kvstrata.store.packed.job import check_calibration
from kvstrata.store.packed.plain_rows import RowTensors, check_rows

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
    """Arguments that are no tensors."""

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


def check_prefix_sums(name: str, cu: torch.Tensor, seq_lens: torch.Tensor) -> None:
    if not isinstance(cu, torch.Tensor) or cu.dtype != torch.int32 or tuple(cu.shape) != (seq_lens.shape[0] + 1,):
        given = f"{cu.dtype} {tuple(cu.shape)}" if isinstance(cu, torch.Tensor) else repr(cu)
        raise ValueError(f"{name}: expected int32 [{seq_lens.shape[0] + 1}], one more than seq_lens, got {given}")
    if not cu.is_contiguous():
        raise ValueError(f"{name}: expected contiguous memory, got stride {cu.stride(0)}")
    if cu.device != seq_lens.device:
        raise ValueError(f"{name}: expected a tensor on {seq_lens.device}, where seq_lens is, got {cu.device}")


def check(
    tensors: Tensors, format: Format, options: Options, out: torch.Tensor | None = None, *, address: bool = True
) -> Job:
    """Check everything but the contents of tensors; ``address``: they are memory, not fake tensors."""
    q, k, v, pages, block_table, seq_lens, cu_seqlens_q, balance, centre, sinks, *_ = tensors
    blocks = blocks_of(pages, format)
    if address:
        check_alignment(pages)
    check_query(q, blocks, pages.device)
    if not isinstance(cu_seqlens_q, torch.Tensor):
        raise TypeError(f"cu_seqlens_q: expected a tensor, got {type(cu_seqlens_q).__name__}")
    check_tables(block_table, seq_lens, cu_seqlens_q, pages.device)
    if tensors.cu_seqlens_k is not None:
        check_prefix_sums("cu_seqlens_k", tensors.cu_seqlens_k, seq_lens)
    shape = (q.shape[0], blocks.kv_heads, format.head_dim)
    for name, x in (("k_new", k), ("v_new", v)):
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name}: expected a tensor, got {type(x).__name__}")
        if tuple(x.shape) != shape:
            raise ValueError(f"{name}: expected {shape}, one row per query, got shape {tuple(x.shape)}")
        if x.dtype != q.dtype:
            raise TypeError(f"{name}: expected {q.dtype} as q, got {x.dtype}")
        if x.stride(2) != 1:
            raise ValueError(f"{name}: expected an inner stride of 1, got {x.stride(2)}")
        if x.device != q.device:
            raise ValueError(f"{name}: expected a tensor on {q.device}, where q is, got {x.device}")
    check_positive("scale", options.scale)
    check_positive("softcap", options.softcap)
    check_sliding_window(options.sliding_window)
    check_sinks(sinks, q.shape[1], q.device)
    check_calibration(balance, centre, blocks, pages.device)
    check_rows(tensors.rows, blocks, q.dtype, seq_lens.shape[0], pages.device, address)
    check_memory(out, tensors.workspace, q)
    for name in ("max_seqlen_q", "max_seqlen_k", "total_tokens"):
        given = getattr(options, name)
        if given is not None and (type(given) is not int or given < 0):
            raise ValueError(f"{name}: expected an int of at least 0, got {given!r}")
    if options.exact_lengths and None in (options.max_seqlen_q, options.max_seqlen_k, options.total_tokens):
        raise ValueError("exact_lengths: expected False without max_seqlen_q, max_seqlen_k and total_tokens, got True")
    return Job(tensors, options, blocks, out)
