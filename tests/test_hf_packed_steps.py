"""Decode steps of `StrataCache(format=...)`: compiled by `generate` or by hand, or captured, as eager ones."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("transformers")
from torch._dynamo.backends.registry import lookup_backend
from transformers import CompileConfig, DynamicCache

from hf_model import greedy, make, prompt
from kvstrata.hf import StrataCache
from kvstrata.hf.packed_op import Layer, strata_packed
from kvstrata.hf.packed_rows import PackedRows
from kvstrata.layout import Format
from test_hf_packed import forwards, packed


class Graphs:
    """A backend of torch.compile that counts graphs; a function of it survives the copies that `generate` makes."""

    def __init__(self) -> None:
        self.count, inner = 0, lookup_backend("aot_eager")

        def backend(graph, inputs, **options):
            self.count += 1
            return inner(graph, inputs)

        self.backend = backend


@pytest.fixture
def graphs() -> Iterator[Graphs]:
    torch._dynamo.reset()
    yield Graphs()
    torch._dynamo.reset()


def masks(ids: torch.Tensor) -> torch.Tensor:
    mask = torch.ones_like(ids)
    mask[1, :9] = 0
    return mask


def test_generate_compiles_steps_once(graphs: Graphs) -> None:
    """One whole graph for 40 steps over page edges, for padding and for the next cache."""
    model, ids = make("llama"), prompt(2, 40)
    assert packed(model).is_compileable
    config = CompileConfig(fullgraph=True, backend=graphs.backend, mode=None)
    config._compile_all_devices = True
    for mask in (torch.ones_like(ids), masks(ids)):
        expected = greedy(model, ids, packed(model, "K4V4"), new=41, attention_mask=mask)
        cache = packed(model, "K4V4")
        given = greedy(model, ids, cache, new=41, attention_mask=mask, compile_config=config)
        assert torch.equal(given, expected)
        assert cache.state.seq_lens.tolist() == (mask.sum(1) + 40).tolist()
    assert graphs.count == 1


def test_a_model_compiled_by_hand_is_one_graph(graphs: Graphs) -> None:
    """Without a mask and positions: the length is a tensor. At the end of the room the assertion fails."""
    model, ids = make("llama"), prompt(2, 40)
    room = 40 + 24
    expected = greedy(model, ids, packed(model), new=25)
    with torch.no_grad():
        cache = packed(model, max_tokens=room)
        tokens = [model(ids, past_key_values=cache).logits[:, -1:].argmax(-1)]
        step = torch.compile(model.forward, backend=graphs.backend, fullgraph=True)
        for _ in range(24):
            tokens.append(step(input_ids=tokens[-1], past_key_values=cache).logits.argmax(-1))
        assert torch.equal(torch.cat(tokens, 1), expected[:, 40:])
        assert graphs.count == 1
        with pytest.raises(RuntimeError, match="max_tokens"):
            step(input_ids=tokens[-1], past_key_values=cache)


def test_the_first_token_of_a_row_in_a_compiled_step_is_exact(graphs: Graphs) -> None:
    """The step compiled for rows that may have no token is one graph, and so is the one for rows that have some."""
    model, ids = make("llama"), prompt(2, 44)
    mask = torch.ones_like(ids)
    mask[1, :40] = 0
    expected = forwards(model, DynamicCache(), ids, (39, *[1] * 5), mask)[1, 40]
    cache = packed(model, "K2V2")
    forwards(model, cache, ids[:, :39], (39,), mask)
    step = torch.compile(model.forward, backend=graphs.backend, fullgraph=True)
    seen = torch.zeros(2, 1, 1, cache.state.tokens, dtype=torch.bool)
    seen[..., :39] = mask[:, None, None, :39] == 1
    for column in range(39, 44):
        seen[..., column] = (mask[:, column] == 1)[:, None, None]
        positions = (mask[:, : column + 1].sum(1, keepdim=True) - 1).clamp(min=0)
        new = dict(input_ids=ids[:, column : column + 1], attention_mask=seen, position_ids=positions)
        with torch.no_grad():
            out = step(**new, past_key_values=cache).logits[1, 0]
        if column == 40:
            torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)
    assert graphs.count == 1


def test_captured_steps_give_the_tokens_of_eager_ones() -> None:
    """By the cache itself; on a CPU a GraphRunner runs the step eagerly."""
    model, ids = make("llama"), prompt(2, 40)
    for options in (dict(), dict(attention_mask=masks(ids)), dict(num_beams=2)):
        expected = greedy(model, ids, packed(model, "K4V4", max_batch=4), new=12, **options)
        cache = packed(model, "K4V4", max_batch=4, capture=True)
        assert not cache.is_compileable
        assert torch.equal(greedy(model, ids, cache, new=12, **options), expected)
        assert cache.forward.runner is not None, "nothing was captured"
    assert cache.decoding == "run as if captured"


def test_drafts_and_rows_between_captured_steps() -> None:
    model, ids = make("llama"), prompt(3, 40)
    logits = []
    for capture in (False, True):
        cache = packed(model, capture=capture)
        with torch.no_grad():
            out = [model(ids, past_key_values=cache).logits[:, -1:]]
            out += [model(input_ids=ids[:, :1], past_key_values=cache).logits for _ in range(3)]
            out.append(model(input_ids=ids[:, :5], past_key_values=cache).logits)
            cache.crop(-3)
            cache.batch_select_indices(torch.tensor([2, 0]))
            out += [model(input_ids=ids[:2, :1], past_key_values=cache).logits for _ in range(3)]
        assert (cache.forward.runner is not None) == capture
        logits.append(torch.cat([x.flatten() for x in out]))
    torch.testing.assert_close(*logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("queries", [1, 3, 20])
def test_the_operator_is_what_it_declares(queries: int) -> None:
    fmt, rows = Format.parse("K4V4", 64, 16), PackedRows(2, 4, 16, torch.device("cpu"))
    pages = torch.zeros(8, 2, fmt.page_bytes, dtype=torch.uint8)
    q, (k, v) = torch.randn(2, 4, queries, 64), torch.randn(2, 2, 2, queries, 64)
    rows.advance(None, 5)
    rows.advance(None, queries)
    tensors = (rows.block_table, rows.seq_lens, rows.columns, rows.real, rows.first, rows.slot, None, None, None)
    arguments = (q, k, v, pages, *tensors, "K4V4", 16, 0.125, None, True, -1, True)
    torch.library.opcheck(torch.ops.kvstrata.strata_packed.default, arguments)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("queries", [1, 3, 20])
def test_the_operator_is_captured_with_padding(queries: int) -> None:
    """Replayed for other tokens and other padding than those it was captured with."""
    device, fmt = torch.device("cuda"), Format.parse("K4V4", 64, 16)
    rows, eager_rows = (PackedRows(2, 16, 16, device) for _ in range(2))
    pages = torch.zeros(32, 2, fmt.page_bytes, dtype=torch.uint8, device=device)
    eager_pages = pages.clone()
    q = torch.randn(2, 8, queries, 64, dtype=torch.bfloat16, device=device)
    k, v = torch.randn(2, 2, 2, queries, 64, dtype=torch.bfloat16, device=device)
    mask = torch.ones(2, 1, queries, rows.tokens, dtype=torch.bool, device=device)
    logits = type("Logits", (), dict(scale=0.125, softcap=None, sinks=None))

    def step(pages: torch.Tensor, rows: PackedRows) -> torch.Tensor:
        rows.advance(mask, queries)
        return strata_packed(q, k, v, pages, rows, Layer(), fmt, logits, padded=True)

    for _ in range(2):
        step(pages, rows)
        step(eager_pages, eager_rows)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step(pages, rows)
    for number in range(6):
        q.normal_()
        k.normal_()
        mask.fill_(True)
        start = int(rows.columns)
        for query in range(queries):
            mask[1, 0, query, start + query] = (query + number) % 3 != 0
        graph.replay()
        expected = step(eager_pages, eager_rows)
        new = eager_rows.real[:, start : start + queries]
        assert torch.equal(rows.seq_lens, eager_rows.seq_lens)
        assert torch.equal(pages, eager_pages)
        torch.testing.assert_close(out[new], expected[new], rtol=2e-2, atol=2e-2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_generate_compiles_and_captures_on_a_gpu() -> None:
    """`generate`'s own compilation, the cache's own graph and eager steps give the same tokens."""
    torch._dynamo.reset()
    model = make("llama").to("cuda", torch.float32)
    ids = prompt(2, 60).to("cuda")
    texts = {}
    for name, options, given in (
        ("eager", dict(capture=False), dict(disable_compile=True)),
        ("captured", dict(capture=True), {}),
        ("compiled", dict(), {}),
    ):
        for mask in (torch.ones_like(ids), masks(ids)):
            cache = StrataCache(model.config, format="K8V8", page_tokens=16, max_tokens=160, **options)
            text = greedy(model, ids, cache, new=40, attention_mask=mask, **given)
            texts.setdefault(name, []).append(text)
            if name == "captured":
                assert cache.forward.runner is not None
    assert hasattr(model, "_compiled_call"), "nothing was compiled"
    for name in ("captured", "compiled"):
        for text, expected in zip(texts[name], texts["eager"], strict=True):
            assert torch.equal(text, expected), name
