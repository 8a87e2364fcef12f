"""One checked call of ``decode_packed``, as every backend takes it."""

from __future__ import annotations

from typing import NamedTuple

import torch

from kvstrata.attention.arguments import DTYPES, check_positive, check_sinks, check_sliding_window, kernel_sinks
from kvstrata.layout import Format
from kvstrata.layout.blocks import ALIGNMENT, Blocks, blocks_of, check_alignment
from kvstrata.store.packed.job import check_calibration
from kvstrata.store.packed.plain_rows import RowTensors, check_rows

Result = tuple[torch.Tensor, torch.Tensor | None]
MOST_QUERIES = 16  # of a request, unless max_seqlen_q says otherwise


class Options(NamedTuple):
    """Arguments that are no tensors."""

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
    most_queries: int  # of a request
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


def _fail(argument: str, expected: str, given: object, error: type[Exception] = ValueError) -> None:
    raise error(f"{argument}: expected {expected}, got {given}")


def check_tables(
    block_table: torch.Tensor, seq_lens: torch.Tensor, cu_seqlens_q: torch.Tensor | None, device: torch.device
) -> None:
    """Check dtypes, shapes and devices of the tensors that say where tokens are."""
    for name, x, dims in (
        ("block_table", block_table, 2),
        ("seq_lens", seq_lens, 1),
        ("cu_seqlens_q", cu_seqlens_q, 1),
    ):
        if x is None and name == "cu_seqlens_q":
            continue
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name}: expected a tensor, got {type(x).__name__}")
        if x.dtype != torch.int32:
            _fail(name, "torch.int32", x.dtype, TypeError)
        if x.dim() != dims:
            _fail(name, f"{dims} dimensions", f"shape {tuple(x.shape)}")
        if x.shape[-1] > 1 and x.stride(-1) != 1:
            _fail(name, "an inner stride of 1", x.stride(-1))
        if x.device != device:
            _fail(name, f"a tensor on {device}, where pages is", x.device)
    if seq_lens.shape[0] != block_table.shape[0]:
        _fail("seq_lens", f"{block_table.shape[0]}, one per row of block_table", seq_lens.shape[0])
    if cu_seqlens_q is not None and cu_seqlens_q.shape[0] != seq_lens.shape[0] + 1:
        _fail("cu_seqlens_q", f"{seq_lens.shape[0] + 1}, one more than seq_lens", cu_seqlens_q.shape[0])


def check_query(q: torch.Tensor, blocks: Blocks, device: torch.device) -> None:
    if not isinstance(q, torch.Tensor):
        raise TypeError(f"q: expected a tensor, got {type(q).__name__}")
    heads, dim = blocks.kv_heads, blocks.format.head_dim
    if q.dim() != 3 or q.shape[2] != dim or q.shape[1] == 0 or q.shape[1] % heads:
        _fail("q", f"[tokens, a multiple of {heads}, {dim}]", f"shape {tuple(q.shape)}")
    if q.dtype not in DTYPES:
        _fail("q", "float32, float16 or bfloat16", q.dtype, TypeError)
    if q.stride(2) != 1:
        _fail("q", "an inner stride of 1", q.stride(2))
    if q.device != device:
        _fail("q", f"a tensor on {device}, where pages is", q.device)


def check_memory(out: torch.Tensor | None, workspace: torch.Tensor | None, q: torch.Tensor) -> None:
    """Check the memory that a caller gave for the output and for scratch."""
    for name, x in (("out", out), ("workspace", workspace)):
        if x is None:
            continue
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name}: expected a tensor, got {type(x).__name__}")
        dtype = q.dtype if name == "out" else torch.uint8
        if x.dtype != dtype:
            _fail(name, f"{dtype}", x.dtype, TypeError)
        if not x.is_contiguous():
            _fail(name, "a contiguous tensor", f"strides {x.stride()}")
        if x.device != q.device:
            _fail(name, f"a tensor on {q.device}, where q is", x.device)
    if out is not None and out.shape != q.shape:
        _fail("out", f"shape {tuple(q.shape)} as q", tuple(out.shape))


def _most_queries(tensors: Tensors, given: int | None) -> int:
    tokens, requests = tensors.q.shape[0], tensors.seq_lens.shape[0]
    if given is not None and (type(given) is not int or given < 1):
        _fail("max_seqlen_q", "an int of at least 1", repr(given))
    if tensors.cu_seqlens_q is not None:
        return MOST_QUERIES if given is None else given
    if given is not None:
        _fail("max_seqlen_q", "None without cu_seqlens_q", given)
    if requests == 0 or tokens % requests or tokens == 0:
        if tokens == 0 and requests == 0:
            return 1
        _fail("q", f"as many tokens for each of {requests} requests, or cu_seqlens_q", f"{tokens} tokens")
    return tokens // requests


def check(
    tensors: Tensors, format: Format, options: Options, out: torch.Tensor | None = None, *, address: bool = True
) -> Job:
    """Check everything but the contents of tensors; ``address``: they are memory, not fake tensors."""
    q, pages, block_table, seq_lens, cu_seqlens_q, balance, centre, sinks, workspace, *_ = tensors
    blocks = blocks_of(pages, format)
    if address:
        check_alignment(pages)
    check_query(q, blocks, pages.device)
    check_tables(block_table, seq_lens, cu_seqlens_q, pages.device)
    check_positive("scale", options.scale)
    check_positive("softcap", options.softcap)
    check_sliding_window(options.sliding_window)
    check_sinks(sinks, q.shape[1], q.device)
    check_calibration(balance, centre, blocks, pages.device)
    check_rows(tensors.rows, blocks, q.dtype, seq_lens.shape[0], pages.device, address)
    check_memory(out, workspace, q)
    if address and out is not None and out.data_ptr() % ALIGNMENT:
        _fail("out", f"an address that is a multiple of {ALIGNMENT}", f"{out.data_ptr():#x}")
    split = options.fixed_split
    if split is not None and (type(split) is not int or split < 1):
        _fail("fixed_split", "an int of at least 1", repr(split))
    most = _most_queries(tensors, options.max_seqlen_q)
    scale = format.head_dim**-0.5 if options.scale is None else float(options.scale)
    return Job(
        q, pages, block_table, seq_lens, cu_seqlens_q, balance, centre, None if sinks is None else kernel_sinks(sinks),
        workspace, blocks, most, scale, options.sliding_window, options.softcap, split, options.return_lse,
        tensors.rows, out,
    )  # fmt: skip
