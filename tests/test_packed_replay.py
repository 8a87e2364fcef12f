"""A decode step with the packed ops, captured once and replayed for 1,000 steps of growing requests."""

from __future__ import annotations

import pytest
import torch

from kvstrata import Format, decode_packed, store_packed
from packed_model import DEVICE, POISON

STEPS, REQUESTS, KV_HEADS, GROUP = 1000, 6, 2, 4


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["cuda", "triton"])
@pytest.mark.parametrize("window", [None, 100])
def test_a_thousand_steps(backend: str, window: int | None) -> None:
    """Lengths, slots and rows of a step are made inside the graph; every output must be that of an eager call."""
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
    store_packed(*prompt, pages, where, fmt, backend=backend)

    step, seq_lens = torch.zeros(1, dtype=torch.int64, device=DEVICE), begin.clone()
    every = torch.arange(REQUESTS, device=DEVICE)

    def run() -> None:
        last = seq_lens.long()
        slots = table[every, last // block_size].long() * block_size + last % block_size
        seq_lens.add_(1)
        rows = [x.index_select(0, step)[0] for x in (k, v, q)]
        store_packed(rows[0], rows[1], pages, slots, fmt, backend=backend)
        out = decode_packed(rows[2], pages, table, seq_lens, fmt, sliding_window=window, backend=backend)
        history.index_copy_(0, step, out.unsqueeze(0))
        step.add_(1)

    run()
    step.zero_()
    seq_lens.copy_(begin)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for _ in range(STEPS):
        graph.replay()
    assert torch.equal(seq_lens, begin + STEPS)
    for at in [0, 1, 62, 63, 64, *range(100, STEPS, 150), STEPS - 1]:
        lengths = begin + at + 1
        eager = decode_packed(q[at], pages, table, lengths, fmt, sliding_window=window, backend=backend)
        assert torch.equal(history[at], eager), f"step {at}"
        wanted = decode_packed(q[at], pages, table, lengths, fmt, sliding_window=window, backend="reference").float()
        assert (history[at].float() - wanted).norm() / wanted.norm() < 1e-2, f"step {at}"
