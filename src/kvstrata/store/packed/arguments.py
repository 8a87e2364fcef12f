"""Argument checks that the packed ops share: errors name the argument, what is expected and what was given."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Protocol

import torch

from kvstrata.checks import check_tensor, fail
from kvstrata.layout import Format
from kvstrata.layout.blocks import ALIGNMENT, Blocks, blocks_of, check_apart

from .plain_rows import RowTensors

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Tensors of operators that callers give as part of an argument.
ARGUMENTS = {f"{short}_{side}": f"{name}.{side}" for short, name in (("tail", "tail"), ("sink", "sink_tokens"))
             for side in ("k", "v", "slots")}  # fmt: skip
ARGUMENTS |= {name: f"calibration.{name}" for name in ("balance", "centre")}


class Calibration(Protocol):
    """Calibration of a layer: float32 ``[kv_heads, head_dim]`` or None each, applied before the rotation.

    K is divided by ``balance`` and Q multiplied with it; ``centre`` is subtracted from balanced K.
    """

    @property
    def balance(self) -> torch.Tensor | None: ...

    @property
    def centre(self) -> torch.Tensor | None: ...


def check_strided(name: str, x: torch.Tensor) -> None:
    """Raise TypeError for anything but a tensor with strides, such as a sparse one, which has no address."""
    check_tensor(name, x)
    if x.layout != torch.strided:
        fail(name, "a strided tensor", x.layout, TypeError)


def check_address(name: str, x: torch.Tensor) -> None:
    if x.is_meta:
        fail(name, "a tensor in memory", "one on meta")
    if x.data_ptr() % ALIGNMENT:
        fail(name, f"an address that is a multiple of {ALIGNMENT}", f"{x.data_ptr():#x}")


def check_device(name: str, x: torch.Tensor, device: torch.device, where: str = "pages") -> None:
    if x.device != device:
        fail(name, f"a tensor on {device}, where {where} is", x.device)


def check_optional(names: Sequence[str], tensors: Sequence[object]) -> None:
    """Raise TypeError for what is neither a tensor nor None, by the caller's name of an operator's argument."""
    for name, x in zip(names, tensors, strict=True):
        if x is not None and not isinstance(x, torch.Tensor):
            fail(ARGUMENTS.get(name, name), "a tensor", type(x).__name__, TypeError)


def check_pages(pages: torch.Tensor, format: Format, address: bool) -> Blocks:
    """Sizes of an engine's blocks; ``address``: they are in memory, not a fake tensor."""
    check_strided("pages", pages)
    blocks = blocks_of(pages, format)
    if address:
        check_address("pages", pages)
    return blocks


def calibration_tensors(calibration: Calibration | None) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Balance and centre of a layer, each of which may be None."""
    if calibration is None:
        return None, None
    try:
        return calibration.balance, calibration.centre
    except AttributeError:
        fail("calibration", "an object with balance and centre", type(calibration).__name__, TypeError)


def check_calibration(
    balance: torch.Tensor | None, centre: torch.Tensor | None, blocks: Blocks, device: torch.device
) -> None:
    shape = (blocks.kv_heads, blocks.format.head_dim)
    for name, x in (("calibration.balance", balance), ("calibration.centre", centre)):
        if x is None:
            continue
        check_strided(name, x)
        if x.dtype != torch.float32 or tuple(x.shape) != shape:
            fail(name, f"float32 {shape}", f"{x.dtype} {tuple(x.shape)}")
        if not x.is_contiguous():
            fail(name, "a contiguous tensor", f"strides {x.stride()}")
        check_device(name, x, device)


def check_new_rows(
    names: tuple[str, str], k: torch.Tensor, v: torch.Tensor, blocks: Blocks, device: torch.device,
    q: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """Check rows ``[T, kv_heads, head_dim]`` of new tokens; for prefills they have q's dtype, and a row per query."""
    sizes = (blocks.kv_heads, blocks.format.head_dim)
    for name, x in zip(names, (k, v), strict=True):
        check_strided(name, x)
        if x.dim() != 3 or tuple(x.shape[1:]) != sizes:
            fail(name, f"[tokens, {sizes[0]}, {sizes[1]}] as pages and fmt", f"shape {tuple(x.shape)}")
        first, like = ("q", q) if q is not None else (names[0], k)
        if x.shape[0] != like.shape[0]:
            fail(name, f"{like.shape[0]} tokens as {first}", f"shape {tuple(x.shape)}")
        if x.dtype not in DTYPES:
            fail(name, "float32, float16 or bfloat16", x.dtype, TypeError)
        if x.dtype != like.dtype:
            fail(name, f"{like.dtype} as {first}", x.dtype, TypeError)
        if x.stride(2) != 1:
            fail(name, "an inner stride of 1", x.stride(2))
        check_device(name, x, device)


def check_query(q: torch.Tensor, blocks: Blocks, device: torch.device) -> None:
    check_strided("q", q)
    heads, dim = blocks.kv_heads, blocks.format.head_dim
    if q.dim() != 3 or q.shape[2] != dim or q.shape[1] == 0 or q.shape[1] % heads:
        fail("q", f"[tokens, a multiple of {heads}, {dim}]", f"shape {tuple(q.shape)}")
    if q.dtype not in DTYPES:
        fail("q", "float32, float16 or bfloat16", q.dtype, TypeError)
    if q.stride(2) != 1:
        fail("q", "an inner stride of 1", q.stride(2))
    check_device("q", q, device)


def check_slot_mapping(slot_mapping: torch.Tensor, tokens: int, device: torch.device) -> None:
    check_strided("slot_mapping", slot_mapping)
    if slot_mapping.dtype not in (torch.int32, torch.int64):
        fail("slot_mapping", "int32 or int64", slot_mapping.dtype, TypeError)
    if tuple(slot_mapping.shape) != (tokens,):
        fail("slot_mapping", f"[{tokens}], one slot per token", f"shape {tuple(slot_mapping.shape)}")
    check_device("slot_mapping", slot_mapping, device)


def check_ints(name: str, x: torch.Tensor, sizes: str, count: int | None, device: torch.device) -> None:
    """Check an int32 tensor: one contiguous dimension of ``count`` numbers, or any; ``sizes`` describes it."""
    check_strided(name, x)
    if x.dtype != torch.int32:
        fail(name, "torch.int32", x.dtype, TypeError)
    if x.dim() != 1 or (count is not None and x.shape[0] != count) or (x.shape[0] > 1 and x.stride(0) != 1):
        fail(name, f"contiguous {sizes}", f"shape {tuple(x.shape)} and strides {x.stride()}")
    check_device(name, x, device)


def check_lengths(seq_lens: torch.Tensor, cu_seqlens_q: torch.Tensor | None, device: torch.device) -> int:
    """Check the lengths of requests and the starts of their rows; returns the number of requests."""
    check_ints("seq_lens", seq_lens, "[B]", None, device)
    requests = seq_lens.shape[0]
    if cu_seqlens_q is not None:
        check_ints("cu_seqlens_q", cu_seqlens_q, f"[{requests + 1}], one more than seq_lens", requests + 1, device)
    return requests


def check_block_table(block_table: torch.Tensor, requests: int, blocks: Blocks, device: torch.device) -> None:
    check_strided("block_table", block_table)
    if block_table.dtype != torch.int32:
        fail("block_table", "torch.int32", block_table.dtype, TypeError)
    if block_table.dim() != 2 or block_table.shape[0] != requests:
        fail("block_table", f"[{requests}, max_blocks], one row per length", f"shape {tuple(block_table.shape)}")
    if block_table.shape[1] > 1 and block_table.stride(1) != 1:
        fail("block_table", "an inner stride of 1", block_table.stride(1))
    check_device("block_table", block_table, device)
    if blocks.num_blocks == 0 and block_table.numel():
        fail("pages", "at least one block, as block_table has entries", 0)


def check_starts(starts: Sequence[int], rows: int, of: str, most: int | None = None) -> None:
    """Check cu_seqlens_q as read by the host: rows of the tensor ``of``, and at most ``most`` for a request."""
    if outside := [start for start in starts if not 0 <= start <= rows]:
        fail("cu_seqlens_q", f"numbers from 0 to {rows}, the rows of {of}", outside[0])
    longest = max((end - start for start, end in itertools.pairwise(starts)), default=0)
    if most is not None and longest > most:
        fail("max_seqlen_q", f"at least {longest}, as many rows as a request has in cu_seqlens_q", most)


def check_entries(entries: torch.Tensor, blocks: Blocks) -> None:
    """Check entries of a block table that hold tokens to be read; synchronises."""
    outside = entries[(entries < 0) | (entries >= blocks.num_blocks)]
    if len(outside):
        fail("block_table", f"blocks from 0 to {blocks.num_blocks - 1} for the tokens of a request", int(outside[0]))


def check_memory(out: torch.Tensor | None, workspace: torch.Tensor | None, q: torch.Tensor, address: bool) -> None:
    """Check the memory that the caller passed for the output and for scratch; ``address``: it is no fake tensor."""
    for name, x in (("out", out), ("workspace", workspace)):
        if x is None:
            continue
        check_strided(name, x)
        dtype = q.dtype if name == "out" else torch.uint8
        if x.dtype != dtype:
            fail(name, f"{dtype}", x.dtype, TypeError)
        if not x.is_contiguous():
            fail(name, "a contiguous tensor", f"strides {x.stride()}")
        check_device(name, x, q.device, "q")
    if workspace is not None and workspace.dim() != 1:
        fail("workspace", "one dimension", f"shape {tuple(workspace.shape)}")
    if workspace is not None and address:
        check_address("workspace", workspace)
    if out is not None and out.shape != q.shape:
        fail("out", f"shape {tuple(q.shape)} as q", tuple(out.shape))
    if out is not None and address and q.numel():
        end = q[-1, -1, -1:].data_ptr() + q.element_size()
        if out.data_ptr() < end and q.data_ptr() < out.data_ptr() + out.numel() * out.element_size():
            fail("out", "memory that does not overlap q", f"addresses {out.data_ptr():#x} and {q.data_ptr():#x}")


def _check_side(name: str, x: torch.Tensor, blocks: Blocks, dtype: torch.dtype) -> None:
    heads, dim = blocks.kv_heads, blocks.format.head_dim
    check_strided(name, x)
    if x.dim() != 4 or x.shape[1] != heads or x.shape[3] != dim or 0 in x.shape:
        fail(name, f"[max_requests, {heads}, tokens, {dim}]", f"shape {tuple(x.shape)}")
    if x.dtype != dtype:
        fail(name, f"{dtype} as the call's rows", x.dtype, TypeError)
    strides = x.stride()
    if strides[3] != 1 or strides[2] != dim or any(n * x.element_size() % ALIGNMENT for n in strides[:2]):
        fail(name, f"contiguous rows, other strides multiples of {ALIGNMENT} bytes", strides)
    check_apart(x.flatten(2), name, "requests")


def check_plain_rows(
    rows: RowTensors, blocks: Blocks, dtype: torch.dtype, requests: int, device: torch.device, address: bool
) -> None:
    """Check tail and sink rows of a call; ``address``: they are in memory, not fake tensors."""
    for name, (k, v, slots) in (("tail", rows[:3]), ("sink_tokens", rows[3:])):
        if k is v is slots is None:
            continue
        for side, x in ((f"{name}.k", k), (f"{name}.v", v)):
            _check_side(side, x, blocks, dtype)  # type: ignore[arg-type]
            check_device(side, x, device)  # type: ignore[arg-type]
            if address:
                check_address(side, x)  # type: ignore[arg-type]
        assert k is not None
        assert v is not None
        if v.shape != k.shape or v.stride() != k.stride():
            expected = f"shape {tuple(k.shape)} and strides {k.stride()} as k"
            fail(f"{name}.v", expected, f"{tuple(v.shape)} and {v.stride()}")
        page = blocks.format.page_tokens
        if name == "tail" and k.shape[2] % page:
            fail("tail.k", f"a multiple of {page} tokens, which a page has", k.shape[2])
        check_ints(f"{name}.slots", slots, f"[{requests}], one per request", requests, device)  # type: ignore[arg-type]
