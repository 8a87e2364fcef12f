"""Unquantised rows in addition to packed pages: the newest, unfinished page of each request, and its first tokens.

    position        0 .. sink_tokens     .. end of the last full page      .. seq_len
    read from       sink rows            packed pages                      tail rows

Both are the engine's memory, ``[max_requests, kv_heads, tokens, head_dim]``, and a request has a slot in each or none.
Position p is row ``p % tail_tokens`` of the tail. A page is packed once, when its last token is stored; sink tokens are
also packed like all others, so the bytes of full pages do not depend on either.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class PlainRows(NamedTuple):
    """Unquantised K and V rows that an engine keeps in addition to packed pages, as a tail or for sink tokens.

    ``k``, ``v``: ``[max_requests, kv_heads, tokens, head_dim]`` in the model's dtype; the rows of a KV head are
    contiguous, strides are multiples of 16 bytes. As a tail, ``tokens`` is a multiple of ``page_tokens``; as sink
    tokens any number. ``slots``: int32 ``[B]``, the first index of k and v for each request of the call. Negative: the
    request has no such rows, and all its tokens are in the pages.

    Example:
        >>> k, v = torch.zeros(2, 64, 8, 16, 128, dtype=torch.bfloat16)  # 64 requests, 8 KV heads, pages of 16 tokens
        >>> tail = PlainRows(k, v, slots=torch.tensor([3, 0, -1], dtype=torch.int32))
        >>> tail.k.shape
        torch.Size([64, 8, 16, 128])
    """

    k: torch.Tensor
    v: torch.Tensor
    slots: torch.Tensor


class RowTensors(NamedTuple):
    """Tail and sink rows of a call in the form that operators take; None for absent ones."""

    tail_k: torch.Tensor | None = None
    tail_v: torch.Tensor | None = None
    tail_slots: torch.Tensor | None = None
    sink_k: torch.Tensor | None = None
    sink_v: torch.Tensor | None = None
    sink_slots: torch.Tensor | None = None

    @property
    def tail_tokens(self) -> int:
        return 0 if self.tail_k is None else self.tail_k.shape[2]

    @property
    def sink_tokens(self) -> int:
        return 0 if self.sink_k is None else self.sink_k.shape[2]


def row_tensors(tail: PlainRows | None, sink_tokens: PlainRows | None) -> RowTensors:
    """Tensors of tail and sink rows; errors name the argument."""
    for name, rows in (("tail", tail), ("sink_tokens", sink_tokens)):
        if rows is not None and not isinstance(rows, PlainRows):
            raise TypeError(f"{name}: expected PlainRows(k, v, slots), got {type(rows).__name__}")
        if rows is not None and rows.k is None:  # of no rows all three would be None
            raise TypeError(f"{name}.k: expected a tensor, got NoneType")
    nothing = (None, None, None)
    return RowTensors(*(nothing if tail is None else tail), *(nothing if sink_tokens is None else sink_tokens))


class Split(NamedTuple):
    """Position ranges of a request: sink rows ``[0, sinks)``, pages ``[sinks, packed)``, tail ``[packed, length)``."""

    sinks: int  # positions in the request's sink rows
    packed: int  # end of the positions in pages
    tail_slot: int  # negative: none
    sink_slot: int


def split_of(rows: RowTensors, request: int, length: int, page_tokens: int) -> Split:
    """Split of a request of ``length`` tokens; synchronises."""
    tail, sink = (
        -1 if k is None or slots is None or int(slots[request]) >= k.shape[0] else int(slots[request])
        for k, slots in ((rows.tail_k, rows.tail_slots), (rows.sink_k, rows.sink_slots))
    )
    packed = length // page_tokens * page_tokens if tail >= 0 else length
    return Split(min(rows.sink_tokens, packed) if sink >= 0 else 0, packed, tail, sink)


def tail_index(rows: RowTensors, positions: torch.Tensor) -> torch.Tensor:
    return positions % rows.tail_tokens
