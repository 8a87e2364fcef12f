"""Packed pages: tokens stored in a few calls into blocks with holes, then decoded, prefilled and copied.

Rows are read back from the bytes page by page; they must be close to the rows given, and the output close to attention
over them. In most trials requests also have a tail or sink tokens, which must read exactly as given. Blocks of
no request keep their poison, and so do pages that are not full while the tail has their tokens. The last tokens of a
request are prefilled again over those before them, with K and V as they were given. The CUDA
backend also stores a long prompt in one call, for which it has a kernel of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import torch

import kvstrata
from kvstrata import PlainRows
from kvstrata.layout import Format
from kvstrata.quant import reference as quant
from kvstrata.store.packed import cuda as store_cuda

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

    plain: dict[str, Any] = _plain_rows(draw, len(lengths), heads, fmt, dtype)
    packed = [n // tokens * tokens if _slot(plain.get("tail"), row) >= 0 else n for row, n in enumerate(lengths)]
    what += "".join(f", {name} of {x.k.shape[2]} for {x.slots.tolist()}" for name, x in plain.items())

    block_size = per_block * tokens
    counts = [-(-n // block_size) for n in lengths]
    order = draw.order(sum(counts) + 2).int()
    table = torch.full((len(lengths), max(max(counts), 1)), 1 << 28, dtype=torch.int32)
    for row, blocks in enumerate(order[: sum(counts)].split(counts)):
        table[row, : len(blocks)] = blocks
    pages = torch.full((len(order), heads, per_block * fmt.page_bytes), POISON, dtype=torch.uint8, device=draw.device)
    k, v = (draw.normal(sum(lengths), heads, dim).to(dtype).to(draw.device) for _ in range(2))
    slots = torch.cat([_slots(table[row], torch.arange(n), block_size) for row, n in enumerate(lengths)])
    with unsupported_errors(RuntimeError, "aligned"):
        for part, more in _in_order(draw, lengths, plain) if plain else _mixed(draw, len(slots)):
            where = torch.cat([slots[part], torch.tensor([-1])]).to(draw.device)
            index = torch.cat([part, torch.zeros(1, dtype=torch.int64)]).to(draw.device)
            kvstrata.store_packed(
                k[index], v[index], pages, where, fmt, calibration=calibration, backend=backend, **more
            )
    free = order[sum(counts) :].long().to(draw.device)
    assert bool((pages[free] == POISON).all()), f"a free block was written to: {what}"
    for row, end in enumerate(packed):
        parts = pages[order[: sum(counts)].split(counts)[row].long().to(draw.device)]
        unpacked = parts.view(-1, heads, per_block, fmt.page_bytes).transpose(1, 2).flatten(0, 1)[-(-end // tokens) :]
        assert bool((unpacked == POISON).all()), f"a page that is not full was written to: {what}"
    if backend == "cuda":
        _check_prompt(draw, fmt, heads, dtype, calibration, what)
    if sum(q_lens) == 0:
        return what
    exact = _exact(lengths, packed, plain)[:, None, None]
    stored = tuple(
        torch.where(exact, given.float().cpu(), rows)
        for rows, given in zip(_stored(pages.cpu(), fmt, slots, calibration), (k, v), strict=True)
    )
    _compare_rows(stored, (k, v), fmt, calibration, what)

    q = draw.normal(sum(q_lens), heads * group, dim).to(dtype)
    sinks = draw.normal(heads * group) if draw.one(0, 1) else None
    cu = torch.tensor([0, *accumulate(q_lens)], dtype=torch.int32).to(draw.device)
    out = kvstrata.decode_packed(
        q.to(draw.device), pages, table.to(draw.device), torch.tensor(lengths, dtype=torch.int32).to(draw.device), fmt,
        calibration=calibration, sinks=None if sinks is None else sinks.to(draw.device), cu_seqlens_q=cu,
        fixed_split=draw.one(None, 32), backend=backend, **plain, **options,
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
            sinks=None if sinks is None else sinks.to(draw.device), **plain, **options,
            backend="auto" if backend == "cuda" else backend,
        )  # fmt: skip
    except RuntimeError as error:
        if "head_dim" in str(error):  # Triton supports fewer
            return what
        raise
    _compare("prefill", out, _attention(q, seen, lengths, q_lens, sinks, **options), what)
    return what


def _plain_rows(draw: Draw, requests: int, heads: int, fmt: Format, dtype: torch.dtype) -> dict[str, Any]:
    """A tail, sink tokens, both or none: NaN until they are stored, and with slots for some of the requests."""
    plain: dict[str, Any] = {}
    tail, sinks = draw.one(0, 1, 2) * fmt.page_tokens, draw.one(0, draw.size(1, 40), 0)
    for name, rows in (("tail", tail), ("sink_tokens", sinks)):
        if rows:
            k, v = torch.full((2, requests + 1, heads, rows, fmt.head_dim), torch.nan, dtype=dtype).to(draw.device)
            slots = draw.order(requests + 1)[:requests].int()
            slots[draw.integers(5, requests) == 0] = -1
            plain[name] = PlainRows(k, v, slots.to(draw.device))
    return plain


def _slot(rows: PlainRows | None, row: int) -> int:
    return -1 if rows is None else int(rows.slots[row])


def _mixed(draw: Draw, tokens: int) -> Iterator[tuple[torch.Tensor, dict[str, Any]]]:
    """Tokens of each call, in any order."""
    mixed = torch.arange(tokens) if draw.one(0, 1) else draw.order(tokens)
    for part in mixed.tensor_split(draw.size(1, 4)):
        yield part, {}


def _in_order(draw: Draw, lengths: list[int], plain: dict[str, Any]) -> Iterator[tuple[torch.Tensor, dict[str, Any]]]:
    """Tokens of each call in order of position, and the arguments that tell requests apart."""
    steps, done = draw.size(1, 4), [0] * len(lengths)
    for step in range(steps):
        ends = [n if step == steps - 1 else draw.size(at, n) for at, n in zip(done, lengths, strict=True)]
        first = [0, *accumulate(lengths)]
        part = torch.cat([torch.arange(i + at, i + end) for i, at, end in zip(first, done, ends, strict=False)])
        new = [0, *accumulate(end - at for at, end in zip(done, ends, strict=True))]
        tensors = dict(seq_lens=ends, cu_seqlens_q=new)
        yield part, plain | {x: torch.tensor(y, dtype=torch.int32).to(draw.device) for x, y in tensors.items()}
        done = ends


def _exact(lengths: list[int], packed: list[int], plain: dict[str, Any]) -> torch.Tensor:
    """True for positions that are read from sink or tail rows."""
    masks = []
    for row, (length, end) in enumerate(zip(lengths, packed, strict=True)):
        sinks = plain["sink_tokens"].k.shape[2] if _slot(plain.get("sink_tokens"), row) >= 0 else 0
        position = torch.arange(length)
        masks.append((position < min(sinks, end)) | (position >= end))
    return torch.cat(masks)


def _check_prompt(draw: Draw, fmt: Format, heads: int, dtype: torch.dtype, calibration: Any, what: str) -> None:
    """A prompt of so many tokens that a warp has a window of 16 of them, which may begin inside a page."""
    warps = store_cuda.WAVES * store_cuda.BLOCKS * torch.cuda.get_device_properties(draw.device).multi_processor_count
    tokens = store_cuda.WINDOW // 2 * (warps // (2 * heads) + 1) + draw.size(0, 40)
    slots = draw.size(0, fmt.page_tokens) + torch.arange(tokens)
    blocks = -(-(int(slots[-1]) + 1) // fmt.page_tokens)
    pages = torch.full((blocks, heads, fmt.page_bytes), POISON, dtype=torch.uint8, device=draw.device)
    k, v = (draw.normal(tokens, heads, fmt.head_dim).to(dtype).to(draw.device) for _ in range(2))
    kvstrata.store_packed(k, v, pages, slots.to(draw.device), fmt, calibration=calibration, backend="cuda")
    stored = _stored(pages.cpu(), fmt, slots, calibration)
    _compare_rows(stored, (k, v), fmt, calibration, f"a prompt of {tokens}: {what}")


def _compare_rows(
    stored: tuple[torch.Tensor, ...], given: tuple[torch.Tensor, ...], fmt: Format, calibration: Any, what: str
) -> None:
    for name, rows, row, bits in zip("kv", stored, given, (fmt.k_bits, fmt.v_bits), strict=True):
        worst = WORST[bits] * (4.0 if calibration is not None and name == "k" else 1.0)
        off = float((rows - row.float().cpu()).norm() / row.float().norm())
        assert off <= worst, f"{name} is off by {off:.2g}: {what}"


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
    q: torch.Tensor, rows: tuple[torch.Tensor, ...], lengths: list[int], q_lens: list[int],
    sinks: torch.Tensor | None, sliding_window: int | None, softcap: float | None,
) -> torch.Tensor:  # fmt: skip
    """Outputs of all requests, concatenated."""
    k, v = ([part.transpose(0, 1) for part in x.split(lengths)] for x in rows)
    outs = [q.new_zeros(0, *q.shape[1:], dtype=torch.float32)]
    for i, queries in enumerate(q.split(q_lens)):
        own = lengths[i] - len(queries) + torch.arange(len(queries))
        outs.append(attention(queries, k[i], v[i], own, window=sliding_window, softcap=softcap, sinks=sinks)[0])
    return torch.cat(outs)
