"""`StrataCache` on tiny random models: without compression it gives what DynamicCache gives."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from transformers import DynamicCache

from hf_model import EXACT, FAMILIES, SMALL, greedy, make, prompt, scaled
from kvstrata.hf import StrataCache


@pytest.mark.parametrize("name", FAMILIES)
def test_budget_one_equals_dynamic_cache(name: str) -> None:
    model, ids = make(name), prompt(2, 40)
    expected = greedy(model, ids)
    cache = StrataCache(model.config, budget=1.0)
    assert torch.equal(greedy(model, ids, cache), expected)
    cache.tiered.check()
    assert cache.get_seq_length() == 63
    assert torch.equal(greedy(model, ids), expected), "the model is not what it was for other caches"


def test_sampling_equals_dynamic_cache() -> None:
    model, ids = make("llama"), prompt(2, 30)
    runs = []
    for cache in (None, StrataCache(model.config, budget=None)):
        torch.manual_seed(7)
        runs.append(model.generate(ids, past_key_values=cache, max_new_tokens=20, do_sample=True, top_k=20))
    assert torch.equal(*runs)


def test_several_turns_on_one_cache_equal_dynamic_cache() -> None:
    model = make("qwen3")
    caches = DynamicCache(config=model.config), StrataCache(model.config, budget=1.0)
    texts = [prompt(1, 30), prompt(1, 30)]
    for turn in range(3):
        texts = [greedy(model, text, cache, new=12) for text, cache in zip(texts, caches, strict=True)]
        assert torch.equal(*texts)
        texts = [torch.cat([text, prompt(1, 5 + 20 * turn, seed=turn)], 1) for text in texts]


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt-oss", "qwen2-mixed"])
def test_chunked_prefill_equals_dynamic_cache(name: str) -> None:
    model, ids = make(name), prompt(2, 50)
    cache = StrataCache(model.config, budget=1.0)
    assert torch.equal(greedy(model, ids, cache, prefill_chunk_size=20), greedy(model, ids))


@pytest.mark.parametrize("padding", ["left", "right"])
def test_padding_without_compression_equals_dynamic_cache(padding: str) -> None:
    """A forward over padded rows, then a decode step; logits as DynamicCache gives them, pads not stored."""
    model, ids = make("llama"), prompt(3, 30)
    lengths = [30, 7, 19]
    columns = torch.arange(30)
    mask = torch.stack([columns < n if padding == "right" else columns >= 30 - n for n in lengths]).long()
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    step = dict(
        input_ids=prompt(3, 2, seed=5),
        attention_mask=torch.cat([mask, torch.ones(3, 2, dtype=torch.long)], 1),
        position_ids=torch.tensor(lengths).unsqueeze(1) + torch.arange(2),
    )
    logits = []
    cache = StrataCache(model.config, budget=1.0)
    with torch.no_grad():
        for past in (DynamicCache(config=model.config), cache):
            first = model(ids, attention_mask=mask, position_ids=positions, past_key_values=past).logits
            logits.append((first[mask.bool()], model(**step, past_key_values=past).logits))
    for expected, given in zip(*logits, strict=True):
        torch.testing.assert_close(given, expected, atol=1e-5, rtol=1e-4)
    assert [cache.tiered.length(row) for row in range(3)] == [n + 2 for n in lengths]


def test_beams_without_compression_equal_dynamic_cache() -> None:
    model, ids = make("qwen2-mixed"), prompt(2, 30)
    mask = torch.ones_like(ids)
    mask[1, :9] = 0
    options = dict(num_beams=3, new=30, attention_mask=mask)
    assert torch.equal(
        greedy(model, ids, StrataCache(model.config, budget=1.0), **options), greedy(model, ids, **options)
    )


def test_rows_are_selected_and_repeated() -> None:
    model, ids = make("qwen2-mixed"), prompt(3, 40)
    cache = StrataCache(model.config, **SMALL, max_batch=6)
    with torch.no_grad():
        model(ids, past_key_values=cache)
        before = [cache.tiered.gather(0, row)[0] for row in range(3)]
        cache.batch_select_indices(torch.tensor([2, 0]))
        cache.batch_repeat_interleave(3)
        for row, source in enumerate([2, 2, 2, 0, 0, 0]):
            assert torch.equal(cache.tiered.gather(0, row)[0], before[source])
        logits = model(ids[[2, 2, 2, 0, 0, 0], :1], past_key_values=cache).logits
        torch.testing.assert_close(logits[0], logits[2])
        cache.tiered.check()
        with pytest.raises(ValueError, match="max_batch: expected at least 12"):
            cache.batch_repeat_interleave(2)
        with pytest.raises(ValueError, match="6 rows as before, got 2"):
            model(ids[:2], past_key_values=cache)
        cache.reset()
        assert cache.get_seq_length() == 0
        model(ids[:2], past_key_values=cache)
    assert cache.tiered.requests == (0, 1)


def test_memory_stays_within_the_budget() -> None:
    model = make("llama")
    cache = StrataCache(model.config, **SMALL)
    greedy(model, prompt(2, 700), cache, new=8)
    memory = cache.memory()
    assert cache.tiered.dtype == torch.float16
    assert memory.full == 2 * 707 * 2 * 2 * 2 * 32 * 2  # rows, tokens, layers, heads, K and V, D, bytes of 16 bit
    assert memory.total <= memory.allowed <= 0.5 * memory.full


def test_two_ranks_generate_what_one_does(tmp_path: Path) -> None:
    """Of two processes with tp_plan="auto", as torchrun starts them, each keeps its own heads.

    By recency: with importance the heads of a rank share its bytes, so that another number of ranks chooses otherwise.
    """
    model, ids = scaled(make("qwen2")), prompt(2, 50)
    model.save_pretrained(tmp_path)
    torch.save(ids, tmp_path / "ids.pt")
    caches = [dict(budget=1.0), dict(EXACT, policy="recency")]
    packed = StrataCache(model.config, format="K4V4", max_tokens=64)
    model(ids, past_key_values=packed)
    alone = [greedy(model, ids, StrataCache(model.config, **options)) for options in caches]
    script = Path(__file__).parent / "hf_ranks.py"
    env = os.environ | dict(CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1")
    done = subprocess.run([sys.executable, script, tmp_path], stderr=subprocess.PIPE, text=True, env=env, timeout=600)
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        written = torch.load(tmp_path / f"rank{rank}.pt")
        assert written["kv_heads"] == [1, 1], "a rank holds more than its own heads"
        for expected, given in zip(alone, written["tokens"], strict=True):
            assert torch.equal(given, expected)
        for layer, parts in zip(packed.layers, written["layers"], strict=True):
            for name, whole, part in zip(layer.calibration._fields, layer.calibration, parts, strict=True):
                assert torch.equal(whole[rank : rank + 1], part), f"{name} is not that of the rank's weights"


@pytest.mark.slow
def test_small_real_model_equals_dynamic_cache() -> None:
    """SmolLM2, where it is installed: nothing compressed gives DynamicCache's text."""
    from kvstrata.tools.eval.model import default_folder, load

    try:
        default_folder()
    except LookupError as error:
        pytest.skip(str(error))
    model, tokenizer = load(None)
    ids = tokenizer("The first ten prime numbers are", return_tensors="pt").input_ids
    assert torch.equal(greedy(model, ids, StrataCache(model.config, budget=1.0)), greedy(model, ids))
