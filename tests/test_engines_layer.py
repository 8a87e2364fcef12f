"""A layer over an engine's memory, step by step against float attention."""

from __future__ import annotations

import itertools

import pytest
import torch

from conftest import HAS_GPU
from kvstrata.engines import packed, warmup
from kvstrata.engines.batch import make_batch
from kvstrata.engines.options import Options
from kvstrata.engines.packed import PackedLayer
from kvstrata.engines.workspace import workspace

DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
FORMATS = ("K8V8", "K8V4", "K4V4", "K4V2", "K3V3", "K2V2")


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


def cache_of(options, blocks, kv_heads, block_size, head_dim, layout="LBHNC"):
    """Poisoned memory of two layers as vLLM lays it out; the second layer's view ``[B, H, N, C]``."""
    sizes = dict(L=2, B=blocks, H=kv_heads, N=block_size, C=options.bytes_per_token(head_dim))
    memory = torch.full([sizes[axis] for axis in layout], 0xFF, dtype=torch.uint8, device=DEVICE)
    return memory.permute([layout.index(axis) for axis in "LBHNC"])[1]


@pytest.mark.parametrize("layout", ["LBHNC", "BLHNC", "BHLNC"])
def test_pages_are_the_engines_memory(layout):
    options = Options("K4V4")
    cache = cache_of(options, 3, 2, 128, 64, layout)
    layer = PackedLayer(options, 4, 2, 64, 0.125)
    pages, fmt = layer.pages(cache)
    assert pages.shape == (3, 2, 2 * fmt.page_bytes)
    assert pages.data_ptr() == cache.data_ptr()
    assert pages.untyped_storage().data_ptr() == cache.untyped_storage().data_ptr()


def test_other_layouts_are_refused():
    options = Options("K4V4")
    layer = PackedLayer(options, 4, 2, 64, 0.125)
    with pytest.raises(ValueError, match="contiguous bytes per block and KV head"):
        layer.pages(cache_of(options, 3, 2, 64, 64, "LBNHC"))
    with pytest.raises(ValueError, match="68 bytes per token"):
        layer.pages(cache_of(Options("K8V8"), 3, 2, 64, 64))
    with pytest.raises(ValueError, match="heads: expected 1 to 16"):
        PackedLayer(options, 34, 2, 64, 0.125)


def attention(q, k, v, scale, window=None, softcap=None, sinks=None):
    """Float32 causal attention of the last ``len(q)`` tokens of one request."""
    heads = q.shape[1] // k.shape[1]
    k, v = (x.float().repeat_interleave(heads, 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.float(), k) * scale
    if softcap:
        scores = softcap * (scores / softcap).tanh()
    at = torch.arange(k.shape[0], device=q.device)
    own = at[k.shape[0] - q.shape[0] :, None]
    seen = (at <= own) & (at > own - (window or k.shape[0]))
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.float()[:, None, None].expand(-1, q.shape[0], 1)], -1)
    weights = scores.softmax(-1)[..., : k.shape[0]]
    return torch.einsum("hqk,khd->qhd", weights, v)


class Requests:
    """An engine's requests over one layer: rows, blocks and steps; rows of K and V are kept to compare."""

    def __init__(self, layer, cache, kv_heads, dim, dtype, short=0):
        self.layer, self.cache, self.size, self.short = layer, cache, (kv_heads, dim), short
        self.dtype, self.heads = dtype, 2 * kv_heads
        self.rows, self.blocks = {}, {}
        self.free = torch.randperm(cache.shape[0] - 1, generator=torch.Generator().manual_seed(3)).add(1).tolist()
        self.generator = torch.Generator().manual_seed(5)

    def randn(self, *shape):
        return torch.randn(*shape, generator=self.generator).to(self.dtype).to(DEVICE)

    def step(self, new, threshold=1, padding=0):
        """New tokens of requests, as {request: count}; returns out and what float32 attention gives."""
        block_size = self.cache.shape[2]
        slots = []
        total = sum(new.values()) + padding
        q, k, v = self.randn(total, self.heads, self.size[1]), *self.randn(2, total, *self.size)
        at = 0
        for request, count in new.items():
            rows = self.rows.setdefault(request, [k[:0], v[:0]])
            blocks = self.blocks.setdefault(request, [])
            for position in range(len(rows[0]), len(rows[0]) + count):
                if position // block_size == len(blocks):
                    blocks.append(self.free.pop())
                slots.append(blocks[position // block_size] * block_size + position % block_size)
            self.rows[request] = [torch.cat([old, x[at : at + count]]) for old, x in zip(rows, (k, v), strict=True)]
            at += count
        lengths = ints(*(len(self.rows[request][0]) for request in new))
        starts = torch.tensor([0, *new.values()]).cumsum(0).int()
        widest = max(len(self.blocks[request]) for request in new)
        table = ints(*[[*b, *[-1] * (widest - len(b))] for b in (self.blocks[r] for r in new)])
        tails = None if self.layer.tail is None else ints(*(7 - ord(request) % 7 for request in new)).to(DEVICE)
        batch = make_batch(
            starts.to(DEVICE), starts, lengths.to(DEVICE), table.to(DEVICE), tokens=at, max_query_len=max(new.values()),
            max_seq_len=int(lengths.max()), threshold=threshold, seq_lens_cpu=lengths, short=self.short,
            most_tokens=80, tail_slots=tails,
        )  # fmt: skip
        slot_mapping = torch.tensor(slots + [-1] * (padding // 2), device=DEVICE)  # fewer slots than rows, as in vLLM
        self.layer.store(k, v, self.cache, slot_mapping, batch.rows)
        out = torch.full_like(q, torch.nan)
        self.layer.attend(q, k, v, self.cache, batch, out)
        x = self.layer
        expected = [
            attention(q[a:b], *self.rows[request], x.scale, x.sliding_window, x.softcap, x.sinks)
            for request, (a, b) in zip(new, itertools.pairwise(starts), strict=True)
        ]
        return out[:at].float(), torch.cat(expected)


@pytest.mark.parametrize(
    ("block_size", "given"),
    [
        (64, {}),
        (16, {"sliding_window": 20}),
        (128, {"softcap": 5.0, "sinks": True}),
    ],
)
@pytest.mark.parametrize("tail", [False, True])
def test_steps_of_a_layer_match_float_attention(block_size, given, tail):
    """First chunks, a prefix, mixed batches, drafts and padding, at 8 bit: the error is that of the codes."""
    options, kv_heads, dim = Options("K8V8"), 2, 64
    if given.get("sinks"):
        given = given | {"sinks": torch.randn(4, generator=torch.Generator().manual_seed(1)).to(DEVICE)}
    layer = PackedLayer(options, 4, kv_heads, dim, dim**-0.5, **given)
    cache = cache_of(options, 40 if block_size == 16 else 12, kv_heads, block_size, dim, "BLHNC")
    dtype = torch.float32 if DEVICE.type == "cpu" else torch.bfloat16
    if tail:
        layer.tail = tail_of(8, kv_heads, 128, dim, dtype)
    requests = Requests(layer, cache, kv_heads, dim, dtype, short=16 if tail or block_size == 16 else 0)
    steps = [
        ({"a": 40, "b": 9}, 1, 0),  # first chunks
        ({"a": 1, "b": 1}, 1, 0),
        ({"a": 1, "b": 30, "c": 17}, 1, 5),  # a decode, a chunk with a prefix, a new request, padding
        ({"c": 1, "a": 1, "b": 1}, 1, 2),
        ({"a": 3, "c": 1, "b": 2}, 4, 0),  # drafts
        ({"a": 1, "c": 2, "b": 33}, 4, 0),
    ]
    for number, (new, threshold, padding) in enumerate(steps):
        out, expected = requests.step(new, threshold, padding)
        assert (out - expected).abs().max() < 0.03, number
        assert (out - expected).abs().mean() < 0.004, number


def tail_of(requests, kv_heads, tokens, dim, dtype):
    return tuple(torch.full((2, requests, kv_heads, tokens, dim), torch.nan, dtype=dtype, device=DEVICE))


def test_unfinished_pages_are_exact_with_a_tail():
    """At 2 bit: as long as a request has less than a page, nothing is rounded; a full page is, at once."""
    options, dtype = Options("K2V2"), torch.float32 if DEVICE.type == "cpu" else torch.bfloat16
    layer = PackedLayer(options, 4, 2, 64, 0.125)
    layer.tail = tail_of(8, 2, 64, 64, dtype)
    requests = Requests(layer, cache_of(options, 12, 2, 64, 64), 2, 64, dtype, short=16)
    for new in ({"a": 40, "b": 9}, {"a": 1, "b": 1}, {"a": 1, "b": 20}, {"a": 2, "b": 3}):
        out, expected = requests.step(new)
        assert (out - expected).abs().max() < (1e-4 if dtype == torch.float32 else 0.02)
    out, expected = requests.step({"b": 1, "a": 20})
    assert (out[:1] - expected[:1]).abs().max() < 0.02
    out, expected = requests.step({"a": 1, "b": 1})
    assert (out[0] - expected[0]).abs().max() > 0.05
    with pytest.raises(ValueError, match="rows: expected those of the batch"):
        layer.store(*torch.randn(2, 3, 2, 64, device=DEVICE).to(dtype), requests.cache, torch.arange(3, device=DEVICE))
    with pytest.raises(ValueError, match="batch: expected tail_slots"):
        layer.tail_of(None)


@pytest.mark.parametrize("tail", [None, tail_of(5, 2, 64, 64, torch.float32)], ids=["plain", "tail"])
def test_warmup_steps_run_and_leave_no_trace(tail):
    layer = PackedLayer(Options("K4V4"), 4, 2, 64, 0.125)
    layer.tail = tail
    small = [[(20, 20), (40, 40)], [(20, 84), (40, 40)], [(1, 70), (1, 9)], [(3, 70), (16, 64)]]
    warmup.run_steps(layer, 4, 16, torch.float32 if DEVICE.type == "cpu" else torch.bfloat16, DEVICE, small)
    assert layer.tail is tail
    assert all(x.isnan().all() for x in tail or ())
    if DEVICE.type == "cpu":
        warmup.warm_up(layer, 4, 64, torch.float32, DEVICE)  # nothing to do


def test_a_decode_step_is_one_call_into_the_engines_output(monkeypatch):
    """No copy behind it, no second call, and nothing of the lengths is read on the host."""
    calls = []
    original = packed.decode_packed

    def recorded(q, *tensors, **options):
        calls.append((q.data_ptr(), options["out"].data_ptr(), tuple(options["out"].shape)))
        return original(q, *tensors, **options)

    monkeypatch.setattr(packed, "decode_packed", recorded)
    layer = PackedLayer(Options("K4V4"), 4, 2, 64, 0.125)
    cache = cache_of(layer.options, 4, 2, 64, 64)
    dtype = torch.float32 if DEVICE.type == "cpu" else torch.bfloat16
    rows = torch.randn(3, 8, 64, device=DEVICE).to(dtype)
    q, k, v = rows.split([4, 2, 2], 1)  # strided, as a fused projection gives them
    layer.store(k, v, cache, torch.tensor([64, 128, 192], device=DEVICE))
    starts, lengths = ints(0, 1, 2, 3), ints(1, 1, 1)
    batch = make_batch(
        starts.to(DEVICE), starts, lengths.to(DEVICE), ints(1, 2, 3)[:, None].to(DEVICE), tokens=3, max_query_len=1,
        max_seq_len=1, threshold=1,
    )  # fmt: skip
    out = torch.full((3, 4, 64), torch.nan, dtype=dtype, device=DEVICE)
    layer.attend(q, k, v, cache, batch, out)
    assert calls == [(q.data_ptr(), out.data_ptr(), (3, 4, 64))]
    assert not out.isnan().any()


def test_scratch_is_shared_and_kept():
    if DEVICE.type == "cpu":
        assert workspace(DEVICE, 1000) is None
        return
    first = workspace(DEVICE, 1000)
    assert workspace(DEVICE, first.numel()) is first
    larger = workspace(DEVICE, first.numel() + 1)
    assert larger.numel() >= 2 * first.numel()
    assert workspace(DEVICE, 10) is larger
    with torch.cuda.stream(torch.cuda.Stream()):
        assert workspace(DEVICE, 10) is not larger
    assert workspace(DEVICE, 0) is None


def test_padded_drafts_equal_single_requests():
    """A graph of 3 requests with 4 tokens each replays a step of 2 with 4 and 2; what is behind them is padding."""
    options = Options("K4V4")
    layer = PackedLayer(options, 4, 2, 64, 0.125)
    cache = cache_of(options, 4, 2, 64, 64)
    torch.manual_seed(0)
    dtype = torch.float32 if DEVICE.type == "cpu" else torch.bfloat16
    q, k, v = (torch.randn(n, heads, 64, device=DEVICE).to(dtype) for n, heads in ((12, 4), (40, 2), (40, 2)))
    slots = torch.cat([torch.arange(64, 94), torch.arange(192, 202)]).to(DEVICE)
    layer.store(k, v, cache, slots)
    outs = []
    for starts, lengths, blocks, tokens in (
        ((0, 4, 6, 6), (30, 10, 0), (1, 3, 0), 12),
        ((0, 4, 6), (30, 10), (1, 3), 6),
    ):
        cu, table = ints(*starts).to(DEVICE), ints(*blocks)[:, None].to(DEVICE)
        given = dict(tokens=tokens, max_query_len=4, max_seq_len=30, threshold=4)
        batch = make_batch(cu, cu.cpu(), ints(*lengths).to(DEVICE), table, **given)
        out = torch.zeros_like(q)
        layer.attend(q, k[:12], v[:12], cache, batch, out)
        outs.append(out[:6].float())
    assert (outs[0] - outs[1]).abs().max() < (1e-5 if dtype == torch.float32 else 0.02)
    assert outs[0].abs().min() > 0
