"""A decode step with the packed ops, captured once and replayed for 1,000 steps of growing requests."""

from __future__ import annotations

import pytest
import torch

from kvstrata import Format, PlainRows, decode_packed, store_packed
from packed_model import DEVICE, POISON

STEPS, REQUESTS, KV_HEADS, GROUP = 1000, 6, 2, 4


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["cuda", "triton"])
@pytest.mark.parametrize(("window", "plain"), [(None, False), (100, False), (None, True), (100, True)])
def test_thousand_replayed_steps_equal_eager_ones(backend: str, window: int | None, plain: bool) -> None:
    """Lengths, slots and rows of a step are made inside the graph; every output must be that of an eager call.

    With ``plain`` requests have a tail and sink rows, and what they hold later is not what a step read: outputs are
    compared with those of eager steps, made after another.
    """
    fmt = Format.parse("K4V4", 128, 64)
    block_size, dim = 128, fmt.head_dim
    begin = torch.tensor([0, 5, 63, 64, 127, 500], dtype=torch.int32, device=DEVICE)
    width = -(-(int(begin.max()) + STEPS) // block_size)
    table = torch.randperm(REQUESTS * width, device=DEVICE).int().view(REQUESTS, width)
    pages = torch.full((REQUESTS * width, KV_HEADS, 2 * fmt.page_bytes), POISON, dtype=torch.uint8, device=DEVICE)
    k, v = torch.randn(2, STEPS, REQUESTS, KV_HEADS, dim, device=DEVICE).bfloat16()
    q = torch.randn(STEPS, REQUESTS, KV_HEADS * GROUP, dim, device=DEVICE).bfloat16()
    history = torch.zeros_like(q)
    prompt = torch.randn(2, int(begin.sum()), KV_HEADS, dim, device=DEVICE).bfloat16()
    row = torch.arange(REQUESTS, device=DEVICE).repeat_interleave(begin.long())
    position = torch.cat([torch.arange(int(n), device=DEVICE) for n in begin])
    where = table[row, position // block_size].long() * block_size + position % block_size
    rows: dict[str, PlainRows] = {}
    if plain:
        slots = torch.tensor([3, 0, -1, 6, 1, 2], dtype=torch.int32, device=DEVICE)  # one request has neither
        sizes = ((REQUESTS + 1, KV_HEADS, 64, dim), (REQUESTS + 1, KV_HEADS, 4, dim))
        tail, sinks = (torch.full((2, *size), torch.nan, device=DEVICE).bfloat16() for size in sizes)
        rows = dict(tail=PlainRows(*tail, slots), sink_tokens=PlainRows(*sinks, slots))
    cu = torch.cat([begin.new_zeros(1), begin.cumsum(0, dtype=torch.int32)])
    store_packed(*prompt, pages, where, fmt, backend=backend, seq_lens=begin, cu_seqlens_q=cu, **rows)
    kept = [x.clone() for x in (pages, *(y for z in rows.values() for y in z))]

    step, seq_lens = torch.zeros(1, dtype=torch.int64, device=DEVICE), begin.clone()
    every = torch.arange(REQUESTS, device=DEVICE)

    def run() -> None:
        last = seq_lens.long()
        slots = table[every, last // block_size].long() * block_size + last % block_size
        seq_lens.add_(1)
        new = [x.index_select(0, step)[0] for x in (k, v, q)]
        store_packed(new[0], new[1], pages, slots, fmt, backend=backend, seq_lens=seq_lens, **rows)
        out = decode_packed(new[2], pages, table, seq_lens, fmt, sliding_window=window, backend=backend, **rows)
        history.index_copy_(0, step, out.unsqueeze(0))
        step.add_(1)

    def restart() -> None:
        step.zero_()
        seq_lens.copy_(begin)
        for x, y in zip((pages, *(y for z in rows.values() for y in z)), kept, strict=True):
            x.copy_(y)

    run()
    restart()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for _ in range(STEPS):
        graph.replay()
    assert torch.equal(seq_lens, begin + STEPS)
    if plain:
        replayed, bytes_then = history.clone(), pages.clone()
        restart()
        for at in range(STEPS):
            run()
            if at in (0, 1, 62, 63, 64, 500, STEPS - 1):
                wanted = decode_packed(
                    q[at], pages, table, seq_lens, fmt, sliding_window=window, backend="reference", **rows
                )
                wanted = wanted.float()
                assert (history[at].float() - wanted).norm() / wanted.norm() < 1e-2, f"step {at}"
        assert torch.equal(replayed, history)
        assert torch.equal(bytes_then, pages)
        return
    for at in [0, 1, 62, 63, 64, *range(100, STEPS, 150), STEPS - 1]:
        lengths = begin + at + 1
        eager = decode_packed(q[at], pages, table, lengths, fmt, sliding_window=window, backend=backend)
        assert torch.equal(history[at], eager), f"step {at}"
        wanted = decode_packed(q[at], pages, table, lengths, fmt, sliding_window=window, backend="reference").float()
        assert (history[at].float() - wanted).norm() / wanted.norm() < 1e-2, f"step {at}"
