"""Engines: bytes of a block, a batch's two parts, and a layer over an engine's memory."""

from __future__ import annotations

import importlib.util
import itertools
import json
import subprocess
import sys

import pytest
import torch

from conftest import HAS_GPU
from kvstrata import Format
from kvstrata.engines import packed, warmup
from kvstrata.engines.batch import make_batch, runs, split
from kvstrata.engines.options import BLOCK_SIZES, HEAD_DIMS, Options, heads_of_rank, layer_index
from kvstrata.engines.packed import PackedLayer
from kvstrata.engines.workspace import workspace

DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
FORMATS = ("K8V8", "K8V4", "K4V4", "K4V2", "K3V3", "K2V2")


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_bytes_of_a_token_do_not_depend_on_the_block(name, head_dim):
    options = Options(name)
    for block_size in BLOCK_SIZES:
        fmt = options.format_of(head_dim, block_size)
        assert block_size % fmt.page_tokens == 0
        assert fmt.block_bytes(block_size, 3) == 3 * block_size * options.bytes_per_token(head_dim)
        assert block_size * fmt.bytes_per_token % 16 == 0  # strides of blocks and heads


def test_block_of_64_is_one_page():
    assert Options("K4V4").format_of(128, 64) == Format.parse("K4V4", 128, 64)
    assert Options("K4V4").bytes_per_token(128) * 3.7 < 2 * 2 * 128  # 3.7 times the tokens of bfloat16


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (None, "additional_config: expected"),
        ({}, "additional_config: expected"),
        ({"kvstrata": "K4V4"}, "additional_config: expected"),
        ({"kvstrata": {}}, "additional_config: expected"),
        ({"kvstrata": {"format": "K16V16"}}, "kvstrata.format: expected a quantised format"),
        ({"kvstrata": {"format": "int4"}}, "kvstrata.format: expected K and V of 8, 4, 3 or 2 bits"),
        ({"kvstrata": {"format": "K5V4"}}, "such as 'K4V4', got 'K5V4'"),
        ({"kvstrata": {"format": 4}}, "kvstrata.format: expected K and V of 8, 4, 3 or 2 bits such as 'K4V4', got 4"),
        ({"kvstrata": {"format": "K4V4", "tails": 1}}, "got 'tails'"),
        ({"kvstrata": {"format": "K4V4", "tail": 64}}, "kvstrata.tail: expected true or false, got 64"),
        ({"kvstrata": {"format": "K4V4", "calibration": 3}}, "kvstrata.calibration: expected the path"),
    ],
)
def test_wrong_options_are_named_in_the_error(config, message):
    with pytest.raises((ValueError, TypeError), match=message):
        Options.parse(config)


def test_options_are_parsed():
    given = {"kvstrata": {"format": "K8V4", "calibration": "a.safetensors"}, "other": 1}
    assert Options.parse(given) == Options("K8V4", "a.safetensors")


@pytest.mark.parametrize(("head_dim", "block_size"), [(80, 64), (128, 48), (128, 8), (128, 512)])
def test_unsupported_sizes_are_named(head_dim, block_size):
    with pytest.raises(ValueError, match="head_dim" if head_dim == 80 else "block_size"):
        Options("K4V4").format_of(head_dim, block_size)


def test_heads_of_a_rank():
    assert [heads_of_rank(8, 2, rank, 4) for rank in range(4)] == [slice(2 * r, 2 * r + 2) for r in range(4)]
    assert [heads_of_rank(2, 1, rank, 4).start for rank in range(4)] == [0, 0, 1, 1]
    for total, local, ranks in ((8, 4, 4), (6, 1, 4), (3, 1, 2)):
        with pytest.raises(ValueError, match="calibration: expected"):
            heads_of_rank(total, local, 0, ranks)


def test_layer_index_is_the_only_number_in_the_name():
    assert layer_index("model.layers.13.self_attn.attn") == 13
    assert layer_index("layers.0") == 0
    for name in ("model.attn", "model.layers.1.experts.2.attn"):
        with pytest.raises(ValueError, match="one number"):
            layer_index(name)


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


def batch_of(queries, lengths, *, threshold=1, tokens=None, bounds=True, **options):
    """A batch as an engine gives it; the block table says in row r, column c: 100 r + c."""
    starts = torch.tensor([0, *queries]).cumsum(0).int()
    table = 100 * torch.arange(len(queries))[:, None] + torch.arange(4)
    return make_batch(
        starts,
        starts,
        ints(*lengths),
        table.int(),
        tokens=sum(queries) if tokens is None else tokens,
        max_query_len=max(queries),
        max_seq_len=200,
        threshold=threshold,
        seq_lens_cpu=ints(*lengths) if bounds else None,
        **options,
    )


def test_split_counts_the_short_requests_in_front():
    assert split(ints(0, 1, 2, 7, 8), 1) == 2  # the last one is behind a longer one
    assert split(ints(0, 5), 1) == 0
    assert split(ints(0, 1, 2), 1) == 2
    assert split(ints(0, 3, 3, 4), 3) == 3


def test_a_batch_of_decodes_only():
    batch = batch_of([1, 1, 1], [5, 9, 70])
    assert batch.prefills == ()
    (decode,) = batch.decodes
    assert (decode.tokens, decode.cu_seqlens_q, decode.max_seqlen_q) == (3, None, None)


def test_padded_decodes_keep_the_captured_shapes():
    """A graph of 4 requests replays a step of 3: the last row has no query and no token."""
    starts = ints(0, 1, 2, 3, 3)
    batch = make_batch(starts, starts, ints(5, 9, 70, 0), torch.zeros(4, 2, dtype=torch.int32), tokens=4,
                       max_query_len=1, max_seq_len=70, threshold=1)  # fmt: skip
    (decode,) = batch.decodes
    assert (decode.tokens, decode.cu_seqlens_q, decode.seq_lens.tolist()) == (4, None, [5, 9, 70, 0])


def test_drafts_are_decodes_with_ragged_queries():
    batch = batch_of([4, 2, 4], [50, 20, 7], threshold=4)
    assert batch.prefills == ()
    (decode,) = batch.decodes
    assert (decode.tokens, decode.cu_seqlens_q.tolist(), decode.max_seqlen_q) == (10, [0, 4, 6, 10], 4)


def test_padding_tokens_without_requests_need_the_ragged_call():
    (decode,) = batch_of([1, 1, 1], [5, 9, 70], tokens=8).decodes
    assert (decode.tokens, decode.cu_seqlens_q.tolist()) == (8, [0, 1, 2, 3])


def test_mixed_batch_is_split_into_decodes_and_prefills():
    batch = batch_of([1, 1, 40, 7], [5, 9, 100, 7], tokens=64)
    (decode,), (part,) = batch.decodes, batch.prefills
    assert (decode.tokens, decode.seq_lens.tolist()) == (2, [5, 9])
    assert decode.block_table[:, 0].tolist() == [0, 100]
    assert (part.first, part.tokens, part.cu_seqlens_q.tolist()) == (2, 47, [0, 40, 47])
    assert part.block_table[:, 0].tolist() == [200, 300]
    assert (part.max_seqlen_q, part.max_seqlen_k, part.total_tokens, part.prefix) == (40, 100, 107, True)
    assert part.cu_seqlens_k.tolist() == [0, 100, 107]


def test_first_chunks_need_no_pages():
    assert not batch_of([40, 7], [40, 7]).prefills[0].prefix
    assert not batch_of([1, 40, 7], [9, 40, 7]).prefills[0].prefix
    assert batch_of([40, 7], [40, 8]).prefills[0].prefix
    (unknown,) = batch_of([40, 7], [40, 7], bounds=False).prefills
    assert unknown.prefix
    assert (unknown.max_seqlen_k, unknown.total_tokens, unknown.exact) == (200, 400, False)
    parts = batch_of([40, 17, 30], [40, 17, 30], bounds=False, most_tokens=399).prefills  # scratch for no more
    assert [(part.first, part.total_tokens) for part in parts] == [(0, 200), (40, 200), (57, 200)]


@pytest.mark.parametrize(
    ("queries", "lengths", "options", "calls"),
    [
        ([7, 40, 900, 1024, 8000], [7, 50, 900, 1024, 9000], {}, [range(3), range(3, 4), range(4, 5)]),
        ([1024, 1024, 1024], [2000, 2000, 2001], {}, [range(2), range(2, 3)]),  # equals go together
        ([1024, 1024], None, {}, [range(1), range(1, 2)]),
        ([3, 16, 17, 18], [90, 16, 90, 18], dict(short=16), [range(2), range(2, 4)]),
        ([20, 30, 40], [100, 100, 100], dict(most_tokens=250), [range(2), range(2, 3)]),
        ([20], [300], dict(most_tokens=250), [range(1)]),
        ([20, 30, 40], None, dict(most_tokens=250, max_seq_len=100), [range(2), range(2, 3)]),  # unknown: the longest
        ([2, 3], [300, 300], dict(short=4, most_tokens=250), [range(2)]),  # nothing is unpacked for them
        ([], [], {}, []),
    ],
)
def test_requests_of_one_call(queries, lengths, options, calls):
    assert list(runs(queries, lengths, **(dict(short=0, most_tokens=None) | options))) == calls


def test_short_chunks_are_decoded():
    batch = batch_of([1, 3, 5, 40], [9, 70, 5, 99], short=16)
    one, short = batch.decodes
    assert (one.first, one.tokens) == (0, 1)
    assert (short.first, short.tokens, short.cu_seqlens_q.tolist(), short.max_seqlen_q) == (1, 8, [0, 3, 8], 8)
    assert short.block_table[:, 0].tolist() == [100, 200]
    assert [part.first for part in batch.prefills] == [9]


def test_slots_of_tails_follow_their_requests():
    batch = batch_of([1, 3, 40, 2000], [9, 70, 99, 2000], short=16, tail_slots=ints(5, 2, 7, 0))
    assert [part.tail_slots.tolist() for part in batch.decodes] == [[5], [2]]
    assert [part.tail_slots.tolist() for part in batch.prefills] == [[7], [0]]
    rows = batch.rows
    assert (rows.tokens, rows.cu_seqlens_q.tolist(), rows.tail_slots.tolist()) == (
        2044,
        [0, 1, 4, 44, 2044],
        [5, 2, 7, 0],
    )
    assert batch_of([1, 1], [9, 70], tail_slots=ints(1, 0)).rows.cu_seqlens_q is None


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


def test_importing_without_vllm_says_what_to_install():
    if importlib.util.find_spec("vllm") is not None:
        pytest.skip("vLLM is installed")
    code = "import kvstrata.engines, sys; assert 'vllm' not in sys.modules; import kvstrata.engines.vllm"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "ImportError: kvstrata.engines.vllm needs vLLM 0.32" in result.stderr
    code = "from kvstrata.engines import register_vllm; register_vllm()"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "pip install 'kvstrata[vllm]'" in result.stderr


def test_options_survive_json():
    assert Options.parse(json.loads('{"kvstrata": {"format": "K4V4"}}')) == Options("K4V4")
