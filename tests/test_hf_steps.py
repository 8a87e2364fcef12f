"""Decode steps of a `StrataCache` as operators: captured, compiled, and the tokens of eager ones.

On a CPU "captured" means the same code around a `GraphRunner` that runs the step eagerly.
"""

from __future__ import annotations

import copy
import gc
import warnings
from functools import lru_cache, partial

import pytest
import torch

pytest.importorskip("transformers")
from torch._dynamo.testing import CompileCounter
from transformers import DynamicCache, PreTrainedModel

from hf_model import SMALL, greedy, make, prompt
from kvstrata.hf import StrataCache, attention, forward


def padded(columns: int = 60) -> tuple[torch.Tensor, torch.Tensor]:
    ids = prompt(2, columns)
    mask = torch.ones_like(ids)
    mask[1, :9] = 0
    return ids, mask


def caches(model, **options) -> tuple[StrataCache, StrataCache]:
    """An eager cache and a captured one."""
    return tuple(StrataCache(model.config, **SMALL | options, capture=capture) for capture in (False, True))


@pytest.mark.parametrize(("name", "new"), [("llama", 40), ("phi3", 12)])
def test_captured_steps_give_the_tokens_of_eager_ones(name: str, new: int) -> None:
    """Left padding, page edges and settlings; contents and importance are the same as well."""
    model, (ids, mask) = make(name), padded()
    eager, captured = caches(model)
    expected, given = (greedy(model, ids, cache, attention_mask=mask, new=new) for cache in (eager, captured))
    assert torch.equal(given, expected)
    assert captured.forward.runner is not None, "nothing was captured"
    assert eager.forward.runner is None
    captured.tiered.check()
    assert captured.get_seq_length() == eager.get_seq_length() == 59 + new
    assert captured.memory() == eager.memory()
    counts = captured.memory().tokens
    assert sum(counts.values()) > counts["K16V16"], "nothing was compressed"
    for row in range(2):
        a, b = (cache.tiered.buckets.snapshot(1, [row]) for cache in (eager, captured))
        assert torch.equal(a.tier, b.tier)
        assert torch.equal(a.importance, b.importance)


def test_without_compression_captured_steps_equal_dynamic_cache() -> None:
    model, (ids, mask) = make("llama"), padded()
    cache = StrataCache(model.config, budget=1.0, capture=True)
    expected = greedy(model, ids, attention_mask=mask)
    assert torch.equal(greedy(model, ids, cache, attention_mask=mask), expected)
    assert cache.forward.runner is not None


@pytest.mark.parametrize(
    "options", [dict(num_beams=3), dict(prompt_lookup_num_tokens=4), dict(eos_token_id=list(range(2, 20)))]
)
def test_other_decoding_methods_give_the_same_tokens_captured(options: dict) -> None:
    model, rows = make("llama"), 1 if "prompt_lookup_num_tokens" in options else 2
    ids = prompt(rows, 20).repeat(1, 3)
    expected, given = (
        greedy(model, ids, cache, attention_mask=torch.ones_like(ids), new=16, **options)
        for cache in caches(model, max_batch=6)
    )
    assert torch.equal(given, expected)


def test_chat_turns_give_the_same_tokens_captured() -> None:
    """A prompt drops the graph, and the next step captures another."""
    model, texts = make("llama"), [prompt(1, 50)] * 2
    both, graphs = caches(model), []
    for turn in range(3):
        texts = [greedy(model, text, cache, new=8) for text, cache in zip(texts, both, strict=True)]
        assert torch.equal(*texts)
        graphs.append(both[1].forward.runner)
        texts = [torch.cat([text, prompt(1, 20, seed=turn)], 1) for text in texts]
    assert len({id(graph) for graph in graphs}) == 3


def test_changed_rows_are_captured_again() -> None:
    model, ids = make("llama"), prompt(3, 50)
    logits = []
    for cache in caches(model, max_batch=4):
        with torch.no_grad():
            model(ids, past_key_values=cache)
            out = [model(ids[:, :1], past_key_values=cache).logits for _ in range(3)]
            cache.batch_select_indices(torch.tensor([2, 0]))
            out += [model(input_ids=ids[:2, :1], past_key_values=cache).logits for _ in range(3)]
            cache.crop(-2)
            out += [model(input_ids=ids[:2, :1], past_key_values=cache).logits for _ in range(2)]
        logits.append(torch.cat(out))
    torch.testing.assert_close(*logits, rtol=0, atol=0)


def test_moved_weights_are_captured_again() -> None:
    model, ids = make("llama"), prompt(1, 40)
    eager, captured = caches(model)
    with torch.no_grad():
        for cache in (eager, captured):
            model(ids, past_key_values=cache)
        for number in range(6):
            a, b = (model(input_ids=ids[:, :1], past_key_values=cache).logits for cache in (eager, captured))
            assert torch.equal(a, b)
            if number == 3:
                before = captured.forward.runner
                assert before is not None
                for parameter in model.parameters():
                    parameter.data = parameter.data * 1.01
    assert captured.forward.runner is not before


@pytest.fixture
def counter(monkeypatch: pytest.MonkeyPatch):
    """Compile by dynamo alone, and count the graphs."""
    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = partial(torch.compile, forward._call_plainly, fullgraph=True, dynamic=False, backend=counter)
    monkeypatch.setattr(forward.Forward, "_compiled", staticmethod(lru_cache(maxsize=1)(compiled)))
    yield counter
    torch._dynamo.reset()


def test_a_compiled_forward_is_one_graph_for_all_steps_and_caches(counter: CompileCounter) -> None:
    """No graph break, and no recompilation over page edges, settlings, padding and the next cache."""
    model, (ids, mask) = make("llama"), padded()
    for options in (dict(), dict(attention_mask=mask)):
        expected = greedy(model, ids, StrataCache(model.config, **SMALL), new=20, **options)
        cache = StrataCache(model.config, **SMALL, compile=True, capture=True)
        assert torch.equal(greedy(model, ids, cache, new=20, **options), expected)
        assert cache.decoding == "compiled and run as if captured"
    assert counter.frame_count == 1


def test_steps_of_a_compiled_model_have_no_graph_break() -> None:
    """`torch.compile` by the user: prompts break the graph, steps do not, whatever their number."""
    torch._dynamo.reset()
    model, ids = make("llama"), prompt(2, 40)
    expected = greedy(model, ids, StrataCache(model.config, **SMALL), new=20)
    counter = CompileCounter()
    with torch.no_grad():
        cache = StrataCache(model.config, **SMALL)
        token = model(ids, past_key_values=cache).logits[:, -1:].argmax(-1)
        model.forward = torch.compile(model.forward, backend=counter, fullgraph=True)
        tokens = [token]
        for _ in range(19):
            tokens.append(model(input_ids=tokens[-1], past_key_values=cache).logits.argmax(-1))
    assert torch.equal(torch.cat(tokens, 1), expected[:, 40:])
    assert counter.frame_count == 1
    torch._dynamo.reset()


def test_a_forward_that_cannot_be_captured_is_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """One warning, and the tokens are those of eager steps, that of the failed capture included."""
    model, ids = make("llama"), prompt(2, 60)
    expected = greedy(model, ids, StrataCache(model.config, **SMALL), new=8)

    def capture(self) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(forward.kvstrata.GraphRunner, "capture", capture)
    cache = StrataCache(model.config, **SMALL, capture=True)
    with pytest.warns(UserWarning, match="decode steps run eagerly, the forward cannot be captured") as caught:
        assert torch.equal(greedy(model, ids, cache, new=8), expected)
    assert sum("eagerly" in str(x.message) for x in caught) == 1
    assert cache.decoding.startswith("eager: the forward cannot be captured")
    cache.tiered.check()


def test_a_model_with_plain_layers_is_eager_without_a_warning() -> None:
    model, ids = make("qwen2-mixed"), prompt(2, 40)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cache = StrataCache(model.config, budget=1.0)
        assert torch.equal(greedy(model, ids, cache), greedy(model, ids))
    assert cache.decoding == "eager: some layers are not compressed"


def test_a_step_that_fails_half_way_is_undone() -> None:
    """The next one is as if it had not been; only what it settled stays settled."""
    model, ids = make("llama"), prompt(2, 50)
    token = dict(input_ids=ids[:, :1])
    broken, whole = (StrataCache(model.config, budget=1.0) for _ in range(2))
    with torch.no_grad():
        for cache in (broken, whole):
            model(ids, past_key_values=cache)
        hook = model.model.layers[1].register_forward_pre_hook(lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(**token, past_key_values=broken)
        hook.remove()
        a, b = (model(**token, past_key_values=cache).logits for cache in (broken, whole))
    assert torch.equal(a, b)
    assert broken.get_seq_length() == 51
    assert [broken.tiered.length(row, layer) for row in range(2) for layer in range(2)] == [51] * 4
    broken.tiered.check()


def test_a_mask_that_changes_is_not_captured() -> None:
    """Padding in the new column goes the eager way; padding that is not that of before is refused."""
    model, (ids, mask) = make("llama"), padded(40)
    cache = StrataCache(model.config, **SMALL, capture=True)
    more = torch.cat([mask, torch.ones(2, 1, dtype=torch.long)], 1)
    with torch.no_grad():
        model(ids, attention_mask=mask, past_key_values=cache)
        assert cache.matches(more)
        other = more.clone()
        other[0, 3] = 0
        assert not cache.matches(other)
        with pytest.raises(NotImplementedError, match="attention_mask"):
            model(input_ids=ids[:, :1], attention_mask=other, past_key_values=cache)
        other = more.clone()
        other[1, -1] = 0
        assert not cache.matches(other)
        model(input_ids=ids[:, :1], attention_mask=other, past_key_values=cache)
    assert [cache.tiered.length(row) for row in range(2)] == [41, 31]


def test_copies_capture_for_themselves() -> None:
    model, ids = make("llama"), prompt(1, 50)
    cache = StrataCache(model.config, **SMALL, capture=True)
    ids = greedy(model, ids, cache, new=10)
    twin = copy.deepcopy(cache)
    assert twin.steps is not cache.steps
    assert twin.forward.capture is True
    assert twin.forward.runner is None
    assert torch.equal(greedy(model, ids, twin, new=10), greedy(model, ids, cache, new=10))


def test_model_calls_are_restored() -> None:
    """While a StrataCache is alive other caches are passed through, and afterwards nothing is left."""
    gc.collect()
    model, ids = make("llama"), prompt(1, 20)
    cache = StrataCache(model.config, **SMALL)
    assert vars(PreTrainedModel).get("__call__") is forward.call
    expected = greedy(model, ids, DynamicCache(config=model.config), new=5)
    del cache
    gc.collect()
    if not list(attention._users):
        assert "__call__" not in vars(PreTrainedModel)
    assert torch.equal(greedy(model, ids, new=5), expected)


def test_the_operator_requires_a_forward_of_its_cache() -> None:
    q = torch.zeros(1, 4, 1, 32)
    with pytest.raises(RuntimeError, match="strata_decode: expected to run in the forward of a StrataCache"):
        torch.ops.kvstrata.strata_decode(q, q, q, torch.zeros(1, dtype=torch.int32), 0, 1.0, None, None)
    model = make("llama")
    cache = StrataCache(model.config, **SMALL)
    with torch.no_grad():
        model(prompt(1, 40), past_key_values=cache)
    with cache.steps.forward(), pytest.raises(RuntimeError, match="expected a cache with room for a token"):
        torch.ops.kvstrata.strata_decode(q, q, q, torch.zeros(1, dtype=torch.int32), 0, 1.0, None, None)
    for name in ("capture", "compile"):
        with pytest.raises(TypeError, match=f"{name}: expected True or False, got 1"):
            StrataCache(model.config, **{name: 1})
