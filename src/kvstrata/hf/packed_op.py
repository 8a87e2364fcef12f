"""``kvstrata::strata_packed``: one layer of a forward over packed pages; stores K and V of new columns and attends.

All state is in tensors (packed_rows.py) that were updated before the first layer. The operator mutates the pages. It
may be part of compiled code and of any CUDA graph: a captured call needs nothing from the host.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

import kvstrata
from kvstrata.attention.prefill.op import HEAD_DIMS
from kvstrata.layout import Format

from .logits import Logits
from .packed_rows import PackedRows

DECODE_QUERIES = 16  # more new columns than this are a prompt


class Layer(NamedTuple):
    """Calibration of one layer, as the packed ops take it."""

    balance: torch.Tensor | None = None  # float32 [kv_heads, D]
    centre: torch.Tensor | None = None


class _New(NamedTuple):
    """New columns of a forward, on the device."""

    real: torch.Tensor  # bool [rows, queries]
    slots: torch.Tensor  # int32 [rows * queries], -1 for padding


def _new_columns(rows: Any, queries: int) -> _New:
    real, seq_lens, columns, first = rows
    own = real.index_select(1, columns - queries + torch.arange(queries, device=real.device))
    rank = own.cumsum(1, dtype=torch.int32)
    position = (seq_lens - rank[:, -1]).unsqueeze(1) + rank - 1
    return _New(own, torch.where(own, first.unsqueeze(1) + position, -1).flatten())


def _flat(x: torch.Tensor) -> torch.Tensor:
    """``[rows, heads, n, D]`` as rows ``[rows * n, heads, D]`` with an inner stride of 1."""
    x = x.squeeze(2) if x.shape[2] == 1 else x.transpose(1, 2).flatten(0, 1)
    return x if x.stride(2) == 1 else x.contiguous()


def _operator(query: Any, key: Any, value: Any, pages: Any, block_table: Any, seq_lens: Any, columns: Any, real: Any,
              first: Any, slot: Any, balance: Any, centre: Any, sinks: Any, format: str, page_tokens: int, scale: float,
              softcap: float | None, padded: bool, start: int, may_begin: bool) -> torch.Tensor:  # fmt: skip
    """Operator ``kvstrata::strata_packed``; ``padded``: new columns may be padding; ``start``: -1 if unknown;
    ``may_begin``: these may be the first tokens of a row."""
    rows, heads, queries, dim = query.shape
    fmt = Format.parse(format, dim, page_tokens)
    given: dict[str, Any] = dict(calibration=Layer(balance, centre))
    scores: dict[str, Any] = dict(scale=scale, softcap=softcap, sinks=sinks)
    q, k, v = _flat(query), _flat(key), _flat(value)
    if queries == 1 and start:  # a step, also if the host does not know its place
        kvstrata.store_packed(k, v, pages, slot, fmt, **given)
        out = kvstrata.decode_packed(q, pages, block_table, seq_lens, fmt, **given, **scores)
        assert isinstance(out, torch.Tensor)
        if may_begin:
            out = _exact_in_new_rows(out, q, k, v, (slot >= 0).unsqueeze(1), seq_lens, **scores)
        return out.view(rows, 1, heads, dim)
    new = _new_columns((real, seq_lens, columns, first), queries)
    kvstrata.store_packed(k, v, pages, new.slots, fmt, **given)
    captured = query.is_cuda and torch.cuda.is_current_stream_capturing()
    if captured:
        start = 1
    elif start < 0:
        start = int(columns) - queries
    if queries <= DECODE_QUERIES and start:
        order, by_column = None, q
        if padded:  # the last query has the newest position
            order = new.real.to(torch.uint8).sort(dim=1, stable=True).indices
            order = (order + queries * torch.arange(rows, device=order.device).unsqueeze(1)).flatten()
            q = q[order]
        out = kvstrata.decode_packed(q, pages, block_table, seq_lens, fmt, **given, **scores)
        assert isinstance(out, torch.Tensor)
        if order is not None:
            out = torch.empty_like(out).index_copy_(0, order, out)
        if may_begin:
            out = _exact_in_new_rows(out, by_column, k, v, new.real, seq_lens, **scores)
    elif not start and not padded and dim in HEAD_DIMS:
        q, k, v = (x.view(rows, queries, -1, dim) for x in (q, k, v))
        out = kvstrata.prefill_attention(q, k, v, **scores)
    else:
        bounds: dict[str, Any] = {}
        if captured:
            bounds = dict(max_seqlen_q=queries, max_seqlen_k=real.shape[1], total_tokens=rows * real.shape[1])
        out = _ragged(q, k, v, pages, block_table, seq_lens, fmt, new, captured, given | scores | bounds)
    return out.view(rows, queries, heads, dim)  # type: ignore[union-attr]


def _exact_in_new_rows(
    out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    real: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """``out [rows * n, heads, D]`` with the attention of unquantised K and V in rows without earlier tokens.

    ``q [rows * n, heads, D]``, ``k, v [rows * n, kv_heads, D]`` of new columns, ``real [rows, n]`` False for padding.
    """
    rows, n = real.shape
    own_q = q.view(rows, n, k.shape[1], -1, q.shape[2]).float()  # [rows, n, kv_heads, group, D]
    own_k, own_v = (x.view(rows, n, *x.shape[1:]).float() for x in (k, v))
    scores = torch.einsum("rqhgd,rkhd->rhgqk", own_q, own_k) * scale
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    order = torch.arange(n, device=q.device)
    seen = real.unsqueeze(1) & (order <= order.unsqueeze(1))  # [rows, queries, keys]
    scores = scores.masked_fill(~seen[:, None, None], -torch.inf)
    if sinks is not None:
        sink = sinks.float().view(1, k.shape[1], -1, 1, 1).expand(rows, -1, -1, n, 1)
        scores = torch.cat([scores, sink], -1)
    exact = torch.einsum("rhgqk,rkhd->rqhgd", scores.softmax(-1)[..., :n], own_v).reshape(out.shape)
    begins = (seq_lens == real.sum(1)).unsqueeze(1) & real
    return torch.where(begins.view(-1, 1, 1), exact.to(out.dtype), out)


def _ragged(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    pages: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    fmt: Format,
    new: _New,
    captured: bool,
    options: dict[str, Any],
) -> torch.Tensor:
    """`prefill_packed` of the new columns that are tokens; padding yields zeros."""
    cu = torch.zeros(len(seq_lens) + 1, dtype=torch.int32, device=q.device)
    torch.cumsum(new.real.sum(1), 0, dtype=torch.int32, out=cu[1:])
    is_token = new.real.flatten()
    if captured:  # as many rows as columns, tokens first
        chosen = (~is_token).to(torch.uint8).sort(dim=0, stable=True).indices
    else:
        chosen = is_token.nonzero().flatten()
    if not captured and len(chosen) == len(q):
        out = kvstrata.prefill_packed(q, k, v, pages, block_table, seq_lens, cu, fmt, **options)
        assert isinstance(out, torch.Tensor)
        return out
    own_q, own_k, own_v = (x.index_select(0, chosen) for x in (q, k, v))
    part = kvstrata.prefill_packed(own_q, own_k, own_v, pages, block_table, seq_lens, cu, fmt, **options)
    assert isinstance(part, torch.Tensor)
    out = torch.zeros_like(q, memory_format=torch.contiguous_format).index_copy_(0, chosen, part)
    return torch.where(is_token.view(-1, 1, 1), out, 0) if captured else out


_library = torch.library.Library("kvstrata", "FRAGMENT")
_library.define(
    "strata_packed(Tensor query, Tensor key, Tensor value, Tensor(a!) pages, Tensor block_table, Tensor seq_lens,"
    " Tensor columns, Tensor real, Tensor first, Tensor slot, Tensor? balance, Tensor? centre, Tensor? sinks,"
    " str format, int page_tokens, float scale, float? softcap, bool padded, int start,"
    " bool may_begin) -> Tensor"
)
_library.impl("strata_packed", _operator, "CompositeExplicitAutograd")


@torch.library.register_fake("kvstrata::strata_packed", lib=_library)
def _fake(query: Any, *arguments: Any) -> torch.Tensor:
    rows, heads, queries, dim = query.shape
    return query.new_empty(rows, queries, heads, dim)


def strata_packed(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    pages: torch.Tensor,
    rows: PackedRows,
    calibration: Layer,
    fmt: Format,
    logits: Logits,
    *,
    padded: bool,
    start: int = -1,
    may_begin: bool = True,
) -> torch.Tensor:
    """Store K and V of the newest n columns and return their attention output ``[rows, n, heads, D]``.

    Args:
        query: ``[rows, heads, n, D]``; key, value: ``[rows, kv_heads, n, D]``, in one dtype.
        pages: uint8 ``[blocks of all rows, kv_heads, fmt.page_bytes]``. Mutated: the bits of the new tokens.
        rows: lengths, which already include the n columns.
        calibration: calibration of the layer.
        fmt: format of the pages.
        logits: how scores become logits.
        padded: some of the new columns may be padding.
        start: number of columns before the new ones; -1 reads it from the device if needed.
        may_begin: some of the new columns may be the first tokens of a row; False saves some time.

    Up to 16 new columns after earlier ones are read from the pages, and so is a single one if ``start`` is -1. First
    columns, more than 16, and with ``may_begin`` the first tokens of a row that had only padding attend to each other
    unquantised, and to earlier ones in the pages. Safe under
    ``torch.compile(fullgraph=True)``, and under CUDA-graph capture after an eager call of the same shapes. Raises what
    `store_packed`, `decode_packed` and `prefill_packed` raise.
    """
    return torch.ops.kvstrata.strata_packed(
        query, key, value, pages, rows.block_table, rows.seq_lens, rows.columns, rows.real, rows.first, rows.slot,
        *calibration, logits.sinks, fmt.name, fmt.page_tokens, logits.scale, logits.softcap, padded,
        start, may_begin,
    )  # fmt: skip
