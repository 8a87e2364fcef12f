"""Arguments of `StrataCache`, from code and from files, and the errors that name a bad one."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
from transformers import AutoModelForCausalLM, LlamaConfig

from hf_model import SIZES, SMALL, greedy, make, prompt
from kvstrata.cache import BudgetExceeded, TieredCache
from kvstrata.hf import StrataCache


def test_plain_layers_are_reported() -> None:
    model = make("gemma3")
    cache = StrataCache(model.config, **SMALL)
    assert cache.plain_layers == {0: "sliding window of 16"}
    assert "layer 0 plain: sliding window of 16" in repr(cache)
    greedy(model, prompt(1, 60), cache)
    memory = cache.memory()
    assert memory.kinds["plain_layers"] >= 2 * 15 * 2 * 32 * 4
    assert memory.total == cache.tiered.memory().total + memory.kinds["plain_layers"] <= memory.allowed


def test_head_dim_that_does_not_fit_stays_uncompressed() -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES, head_dim=24)).eval()
    cache, ids = StrataCache(model.config, budget=0.25), prompt(1, 30)
    with pytest.warns(UserWarning, match="compresses no layer"):
        tokens = greedy(model, ids, cache)
    assert torch.equal(tokens, greedy(model, ids))
    assert cache.plain_layers[1] == "head_dim 24, not a multiple of 16 from 32 to 256"
    assert cache.memory().total == cache.memory().full > 0


def test_errors_name_what_is_wrong(tmp_path: Path) -> None:
    model, ids = make("llama"), prompt(1, 20)
    config = model.config
    with pytest.raises(TypeError, match="windows: expected an option"):
        StrataCache(config, windows=3)
    with pytest.raises(TypeError, match=r"max_requests: expected to be left out.*max_batch="):
        StrataCache(config, max_requests=3)
    with pytest.raises(TypeError, match=r"config: expected the model's, model\.config, got LlamaForCausalLM"):
        StrataCache(model)
    for name, value in (("max_batch", 0), ("max_batch", "a"), ("importance_queries", "a"), ("max_tokens", 0)):
        with pytest.raises(ValueError, match=f"{name}: expected an int (of at least|from) 1.*, got {value!r}"):
            StrataCache(config, **{name: value})
    with pytest.raises(ValueError, match=r"dtype: expected one of .* got 'float16'"):
        StrataCache(config, dtype="float16")
    with pytest.raises(ValueError, match="recent_tokens: expected an int"):
        StrataCache(config, recent_tokens=0)
    with pytest.raises(ValueError, match="budget: expected a fraction"):
        StrataCache(config, budget=2.0)
    with pytest.raises(ValueError, match=r"budget: expected a fraction .* bytes are budget_bytes"):
        StrataCache(config, 10**9)
    with pytest.raises(ValueError, match=r"budget: expected to be left out, since budget_bytes is given, got 0\.25"):
        StrataCache(config, budget=0.25, budget_bytes=10**9)
    with pytest.raises(ValueError, match=r"budget: expected more than 0\.\d+, which K2V2 of 32"):
        StrataCache(config, budget=0.1)
    with pytest.raises(ValueError, match=r"budget_bytes: expected at least \d+ for tables and slabs, got 1000$"):
        StrataCache(config, budget_bytes=1000)
    with pytest.raises(BudgetExceeded):
        greedy(
            model,
            prompt(1, 300),
            StrataCache(config, budget_bytes=100_000, page_tokens=16, max_tokens=512, recent_tokens=200),
        )
    strange = copy.deepcopy(config)
    strange._attn_implementation_internal = "flash_attention_2"
    with pytest.raises(ValueError, match='"sdpa" or "eager", got \'flash_attention_2\''):
        StrataCache(strange)
    with torch.no_grad(), pytest.raises(NotImplementedError, match="attention_mask: expected causal order"):
        model(ids, attention_mask=torch.ones(1, 1, 20, 20, dtype=torch.bool), past_key_values=StrataCache(config))


def test_options_override_arguments_of_a_file(tmp_path: Path) -> None:
    model = make("llama")
    path = tmp_path / "advice.json"
    path.write_text(json.dumps(dict(budget=0.4, tiers=["K4V2", "K2V2"], recent_tokens=32)))
    cache = StrataCache.from_file(model.config, path, recent_tokens=48)
    assert cache.options == dict(budget=0.4, tiers=["K4V2", "K2V2"], recent_tokens=48)
    cache = StrataCache.from_file(model.config, path, budget_bytes=10**8)
    assert cache.options == dict(budget_bytes=10**8, tiers=["K4V2", "K2V2"], recent_tokens=32)
    assert "budget_bytes=100000000" in repr(cache)
    path.write_text("[1]")
    with pytest.raises(ValueError, match="a JSON object"):
        StrataCache.from_file(model.config, path)
    path.write_text("{budget")
    with pytest.raises(ValueError, match=r"path: expected a JSON object of arguments in .*advice\.json, got"):
        StrataCache.from_file(model.config, path)


def test_kernels_are_compiled_before_the_first_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """`warmup` for a cache as the model's first forward makes it; that forward asks for the same kernels."""
    from kvstrata.attention import cache_warmup
    from kvstrata.hf import cache as module

    asked = []

    def note(tiered: TieredCache, heads: int | None, *rest: object) -> list:
        asked.append((tiered.formats, tiered.dtype, tiered.max_tokens, heads))
        return []

    monkeypatch.setattr(cache_warmup, "load_kernels", note)
    monkeypatch.setattr(module, "load_kernels", note)
    model = make("llama")
    cache = StrataCache(model.config, **SMALL)
    cache.warmup(model)
    with pytest.raises(RuntimeError, match="expected a cache with tokens"):
        _ = cache.tiered
    with torch.no_grad():
        model(prompt(1, 40), past_key_values=cache)
    assert len(asked) == 2
    assert asked[0] == asked[1]
    assert asked[0][3] == model.config.num_attention_heads
