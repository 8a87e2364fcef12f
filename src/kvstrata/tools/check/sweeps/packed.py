"""Packed pages: tokens stored in a few calls into blocks with holes, then decoded, prefilled and copied.

Rows are read back from the bytes page by page; they must be close to the rows given, and the output close to attention
over them. Blocks of no request keep their poison. The last tokens of a request are prefilled again over those before
them, with K and V as they were given.
"""

from __future__ import annotations

from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import torch

import kvstrata
from kvstrata.layout import Format
from kvstrata.quant import reference as quant

from .draw import CLOSE, FLOATS, POISON, WORST, Draw, unsupported_errors
from .oracle import attention

BACKENDS = ("reference", "triton", "cuda")
SANITIZED = ("cuda",)


def trial(draw: Draw, backend: str) -> str:
    """Any format, page and block size, ragged lengths and queries, windows, soft caps, sinks and calibration."""
    dim, tokens = draw.one(48, 64, 80, 128), draw.one(16, 32, 64)
    fmt = Format(draw.one(2, 3, 4, 8), draw.one(2, 3, 4, 8), dim, tokens)
    heads, group, per_block = draw.size(1, 3), draw.one(1, 2, 4, 8), draw.size(1, 3)
    dtype = draw.one(*FLOATS) if backend != "cuda" else draw.one(torch.float16, torch.bfloat16)
    lengths = [draw.one(0, draw.size(1, 20), draw.size(20, 200)) for _ in range(draw.size(0, 3))]
    lengths.append(draw.size(20, 200))
    q_lens = [draw.size(0, 4) for _ in lengths] if draw.one(0, 1) else [draw.size(1, 3)] * len(lengths)
    options: dict[str, Any] = {"sliding_window": draw.one(None, draw.size(1, 90)), "softcap": draw.one(None, 4.0)}
    calibration = None
    if draw.one(0, 1):
        balance = (draw.normal(heads, dim).round()).exp2().to(draw.device)
        calibration = SimpleNamespace(balance=balance, centre=draw.normal(heads, dim).to(draw.device))
    what = f"{fmt.name} d{dim} pages of {tokens}, {per_block} a block, {dtype}, {lengths}, queries {q_lens}, {options}"

    block_size = per_block * tokens
    counts = [-(-n // block_size) for n in lengths]
    order = draw.order(sum(counts) + 2).int()
    table = torch.full((len(lengths), max(max(counts), 1)), 1 << 28, dtype=torch.int32)
    for row, blocks in enumerate(order[: sum(counts)].split(counts)):
        table[row, : len(blocks)] = blocks
    pages = torch.full((len(order), heads, per_block * fmt.page_bytes), POISON, dtype=torch.uint8, device=draw.device)
    k, v = (draw.normal(sum(lengths), heads, dim).to(dtype).to(draw.device) for _ in range(2))
    slots = torch.cat([_slots(table[row], torch.arange(n), block_size) for row, n in enumerate(lengths)])
    mixed = torch.arange(len(slots)) if draw.one(0, 1) else draw.order(len(slots))
    with unsupported_errors(RuntimeError, "aligned"):
        for part in mixed.tensor_split(draw.size(1, 4)):
            where = torch.cat([slots[part], torch.tensor([-1])]).to(draw.device)
            index = torch.cat([part, torch.zeros(1, dtype=torch.int64)]).to(draw.device)
            kvstrata.store_packed(k[index], v[index], pages, where, fmt, calibration=calibration, backend=backend)
    free = order[sum(counts) :].long().to(draw.device)
    assert bool((pages[free] == POISON).all()), f"a free block was written to: {what}"
    if sum(q_lens) == 0:
        return what
    stored = _stored(pages.cpu(), fmt, slots, calibration)
    for name, rows, given, bits in zip("kv", stored, (k, v), (fmt.k_bits, fmt.v_bits), strict=True):
        worst = WORST[bits] * (4.0 if calibration is not None and name == "k" else 1.0)
        off = float((rows - given.float().cpu()).norm() / given.float().norm())
        assert off <= worst, f"{name} is off by {off:.2g}: {what}"

    q = draw.normal(sum(q_lens), heads * group, dim).to(dtype)
    sinks = draw.normal(heads * group) if draw.one(0, 1) else None
    cu = torch.tensor([0, *accumulate(q_lens)], dtype=torch.int32).to(draw.device)
    out = kvstrata.decode_packed(
        q.to(draw.device), pages, table.to(draw.device), torch.tensor(lengths, dtype=torch.int32).to(draw.device), fmt,
        calibration=calibration, sinks=None if sinks is None else sinks.to(draw.device), cu_seqlens_q=cu,
        fixed_split=draw.one(None, 32), backend=backend, **options,
    )  # fmt: skip
    _compare("decode", out, _attention(q, stored, lengths, q_lens, sinks, **options), what)
    _check_copy(draw, pages, backend, what)

    q_lens = [min(n, length) for n, length in zip(q_lens, lengths, strict=True)]
    new = torch.cat([torch.arange(end - n, end) for end, n in zip(accumulate(lengths), q_lens, strict=True)])
    if not len(new):
        return what
    q, cu = q[: len(new)], torch.tensor([0, *accumulate(q_lens)], dtype=torch.int32).to(draw.device)
    seen = (stored[0].index_copy(0, new, k.cpu().float()[new]), stored[1].index_copy(0, new, v.cpu().float()[new]))
    on_device = new.to(draw.device)
    try:
        out = kvstrata.prefill_packed(
            q.to(draw.device), k[on_device], v[on_device], pages, table.to(draw.device),
            torch.tensor(lengths, dtype=torch.int32).to(draw.device), cu, fmt, calibration=calibration,
            sinks=None if sinks is None else sinks.to(draw.device), **options,
            backend="auto" if backend == "cuda" else backend,
        )  # fmt: skip
    except RuntimeError as error:
        if "head_dim" in str(error):  # Triton supports fewer
            return what
        raise
    _compare("prefill", out, _attention(q, seen, lengths, q_lens, sinks, **options), what)
    return what


def _compare(name: str, out: Any, want: torch.Tensor, what: str) -> None:
    limit = 2 * CLOSE[out.dtype] * max(float(want.norm()), 1e-2)
    off = float((out.float().cpu() - want).norm())
    assert off <= limit, f"the output of {name} is off by {off:.2g} > {limit:.2g}: {what}"


def _check_copy(draw: Draw, pages: torch.Tensor, backend: str, what: str) -> None:
    """Copy some blocks to another pool, with padding; other blocks keep their poison."""
    source, target = draw.order(len(pages)), draw.order(len(pages) + 2)[: len(pages)]
    source[0], target[-1] = -1, len(pages) + 2
    pool = torch.full_like(pages[:1].expand(len(pages) + 2, -1, -1).contiguous(), POISON)
    want = pool.clone()
    live = (source >= 0) & (target < len(pool))
    want[target[live].to(draw.device)] = pages[source[live].to(draw.device)]
    kvstrata.copy_pages(pages, pool, source.to(draw.device), target.to(draw.device), backend=backend)
    assert torch.equal(pool, want), f"a block was copied wrong: {what}"


def _slots(blocks: torch.Tensor, position: torch.Tensor, block_size: int) -> torch.Tensor:
    return blocks[position // block_size].long() * block_size + position % block_size


def _stored(
    pages: torch.Tensor, fmt: Format, slots: torch.Tensor, calibration: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Dequantised rows of slots in the model's space: float32 ``[n, heads, D]``."""
    blocks, heads, _ = pages.shape
    k, v = quant.restore(*quant.dequantize_page(pages.view(blocks, heads, -1, fmt.page_bytes), fmt), fmt)
    k, v = (x.permute(0, 2, 3, 1, 4).reshape(-1, heads, fmt.head_dim)[slots] for x in (k, v))
    if calibration is not None:
        k = (k + calibration.centre.cpu()) * calibration.balance.cpu()
    return k, v


def _attention(
    q: torch.Tensor, rows: tuple[torch.Tensor, torch.Tensor], lengths: list[int], q_lens: list[int],
    sinks: torch.Tensor | None, sliding_window: int | None, softcap: float | None,
) -> torch.Tensor:  # fmt: skip
    """Outputs of all requests, concatenated."""
    k, v = ([part.transpose(0, 1) for part in x.split(lengths)] for x in rows)
    outs = [q.new_zeros(0, *q.shape[1:], dtype=torch.float32)]
    for i, queries in enumerate(q.split(q_lens)):
        own = lengths[i] - len(queries) + torch.arange(len(queries))
        outs.append(attention(queries, k[i], v[i], own, window=sliding_window, softcap=softcap, sinks=sinks)[0])
    return torch.cat(outs)
