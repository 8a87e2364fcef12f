"""A compressed `StrataCache` on tiny random models, against a cache that dequantises and against single runs."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")
from transformers import AutoModelForCausalLM, LlamaConfig

import kvstrata
from hf_model import EXACT, FAMILIES, SIZES, SMALL, dequantising, greedy, make, prompt
from kvstrata import AttentionOutput
from kvstrata.hf import StrataCache, steps


@pytest.fixture
def reference(monkeypatch):
    """Run something over a cache that dequantises."""

    def run(job):
        with monkeypatch.context() as patch:
            patch.setattr(kvstrata, "decode_attention", dequantising)
            return job()

    return run


@pytest.mark.parametrize("name", FAMILIES)
def test_decode_equals_dequantising(name: str, monkeypatch) -> None:
    """Every call of a text, on the bytes that the cache holds then. With numba, single tokens have their own loop."""
    decode, loops, queries = kvstrata.decode_attention, steps._cpu_loops("cpu"), []

    def compare(given, q, cache, layer, **options) -> None:
        expected = dequantising(q, cache, layer, **options, return_mass=True)
        torch.testing.assert_close(given.out, expected.out, atol=2e-5, rtol=1e-4)
        if given.mass is not None:
            torch.testing.assert_close(given.mass, expected.mass, atol=2e-5, rtol=1e-4)
        queries.append(q.shape[1])

    def compared(q, cache, layer=0, *, return_mass=False, plan=None, **options):
        given = decode(q, cache, layer, return_mass=return_mass, plan=plan, **options)
        compare(given if return_mass else AttentionOutput(given), q, cache, layer, **options)
        return given

    monkeypatch.setattr(kvstrata, "decode_attention", compared)
    if loops is not None:
        step = loops.LayerStep.__call__

        def compared_step(self, query, key, value, scale, softcap, sinks):
            given = step(self, query, key, value, scale, softcap, sinks)
            options = dict(scale=scale, softcap=softcap, sinks=sinks)
            compare(AttentionOutput(given), query.transpose(1, 2), self.cache, self.layer, **options)
            return given

        monkeypatch.setattr(loops.LayerStep, "__call__", compared_step)
    model, ids = make(name), prompt(2, 60)
    cache = StrataCache(model.config, **EXACT)
    with torch.no_grad():
        model(ids, past_key_values=cache)
        for tokens in prompt(2, 60, seed=2).split([1, 1, 3, 1, 8, 1, 16, 20, *[1] * 9], 1):
            model(tokens, past_key_values=cache)
    counts = cache.tiered.memory().tokens
    assert sum(counts.values()) > counts["K32V32"] > 0, "nothing was compressed"
    assert set(queries) == {1, 3, 8, 16}
    assert len(queries) % 16 == 0, "a call was not compared"
    cache.tiered.check()


def test_beams_equal_dequantising(reference) -> None:
    model, ids = make("llama"), prompt(2, 50)

    def tokens() -> torch.Tensor:
        return greedy(model, ids, StrataCache(model.config, **EXACT), num_beams=3, num_return_sequences=2, new=40)

    assert torch.equal(tokens(), reference(tokens))


@pytest.mark.parametrize("how", ["assistant", "lookup"])
@pytest.mark.parametrize("name", ["llama", "qwen2-mixed"])
def test_assisted_decoding_gives_the_tokens_of_greedy(name: str, how: str, reference) -> None:
    model = make(name)
    ids = prompt(1, 20).repeat(1, 3)
    options = dict(prompt_lookup_num_tokens=4) if how == "lookup" else dict(assistant_model=make(name, seed=3))
    assert torch.equal(
        greedy(model, ids, StrataCache(model.config, budget=1.0), new=30, **options), greedy(model, ids, new=30)
    )

    def tokens() -> torch.Tensor:
        return greedy(model, ids, StrataCache(model.config, **EXACT), new=40, **options)

    assert torch.equal(tokens(), reference(tokens))


def test_cropped_tokens_leave_no_trace(reference) -> None:
    """Rejected tokens leave no trace in what is read afterwards, padded rows included."""
    model, ids = make("llama"), prompt(2, 70)
    mask = torch.ones(2, 70, dtype=torch.long)
    mask[1, :25] = 0

    def logits(rejected: int) -> torch.Tensor:
        cache = StrataCache(model.config, **EXACT, policy="recency")
        with torch.no_grad():
            model(ids, attention_mask=mask, past_key_values=cache)
            if rejected:
                more = torch.cat([mask, torch.ones(2, rejected, dtype=torch.long)], 1)
                model(prompt(2, rejected, seed=9), attention_mask=more, past_key_values=cache)
                cache.crop(-rejected)
            assert cache.get_seq_length() == 70
            assert [cache.tiered.length(row, 1) for row in (0, 1)] == [70, 45]
            more = torch.cat([mask, torch.ones(2, 1, dtype=torch.long)], 1)
            return model(prompt(2, 1, seed=4), attention_mask=more, past_key_values=cache).logits

    torch.testing.assert_close(logits(3), reference(lambda: logits(3)), atol=2e-4, rtol=1e-3)
    torch.testing.assert_close(logits(3), logits(0), atol=2e-4, rtol=1e-3)
    cache = StrataCache(model.config)
    with pytest.raises(ValueError, match="tokens_to_remove"):
        cache.crop(3)


def test_padded_batch_equals_single_runs() -> None:
    model, lengths = make("llama"), [80, 33, 57]
    rows = [prompt(1, n, seed=n) for n in lengths]
    ids = torch.cat([torch.nn.functional.pad(row, (80 - row.shape[1], 0)) for row in rows])
    mask = (ids != 0).long()
    cache = StrataCache(model.config, **SMALL)
    batch = greedy(model, ids, cache, attention_mask=mask, new=40)
    for row, alone in enumerate(rows):
        own = StrataCache(model.config, **SMALL)
        assert torch.equal(greedy(model, alone, own, new=40)[0, -40:], batch[row, -40:])
        assert cache.tiered.length(row) == own.tiered.length(0) == lengths[row] + 39
        for layer in range(2):
            assert torch.equal(cache.tiered.tier_map(layer, row), own.tiered.tier_map(layer))
    cache.tiered.check()


def test_evicting_prompt_in_chunks_equals_dequantising(reference) -> None:
    model, ids = make("llama"), prompt(2, 90)

    def logits() -> torch.Tensor:
        cache = StrataCache(model.config, **EXACT | dict(budget=0.08), evict=True)
        with torch.no_grad():
            logits = [model(tokens, past_key_values=cache).logits for tokens in ids.split([30, 40, 18, 1, 1], 1)]
        assert cache.tiered.gather(0)[0].shape[1] < 90
        return torch.cat(logits, 1)

    torch.testing.assert_close(logits(), reference(logits), atol=2e-4, rtol=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_cuda_agrees_with_cpu(dtype: torch.dtype) -> None:
    """A random model of SmolLM2's shape, less deep: logits of prompt and decode steps through the fused path."""
    torch.manual_seed(0)
    shape = dict(hidden_size=576, intermediate_size=1536, num_attention_heads=9, num_key_value_heads=3, head_dim=64)
    config = LlamaConfig(**SIZES | shape | dict(num_hidden_layers=4))
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    ids, following = prompt(2, 500), prompt(2, 24, seed=2)

    def logits(device: str) -> torch.Tensor:
        model.to(device)
        options = dict(policy="recency", recent_tokens=32, page_tokens=16, tiers=["K4V4", "K3V3", "K2V2"])
        cache = StrataCache(model.config, budget=0.3, dtype=dtype, **options)
        with torch.no_grad():
            logits = [model(ids.to(device), past_key_values=cache).logits[:, -1:]]
            for tokens in following.to(device).split([1, 1, 4, 1, 8, 1, *[1] * 8], 1):
                logits.append(model(tokens, past_key_values=cache).logits)
        assert cache.tiered.memory().tokens["K2V2"] > 0
        return torch.cat(logits, 1).cpu()

    expected, given = logits("cpu"), logits("cuda")
    # Queries and outputs are rounded to the cache's dtype on both sides; codes may differ where K was at an edge.
    assert (given - expected).abs().max() <= 16 * torch.finfo(dtype).eps * expected.std()
