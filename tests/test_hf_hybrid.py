"""Layers with states in addition to K and V, and layers that share the K and V of others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import transformers
from transformers import AutoModelForCausalLM, DynamicCache

from hf_model import greedy, prompt
from hf_zoo import logits, tiny_config, tiny_model, verdict
from kvstrata.hf import StrataCache, window
from kvstrata.hf.hybrid import HybridLayer

WIDE = dict(budget=0.6, dtype=torch.float32, recent_tokens=8, page_tokens=16)  # K8V8
KINDS = {"falcon_h1": (0, 2), "gemma3n_text": (1, 2), "gemma4_text": (2, 2)}


@pytest.mark.filterwarnings("ignore:StrataCache compresses no layer")
@pytest.mark.parametrize("name", KINDS)
def test_logits_equal_those_of_dynamic_cache(name: str) -> None:
    if name not in transformers.CONFIG_MAPPING:
        pytest.skip("not in this transformers")
    assert verdict(name, "sdpa") == "equal, {} of {} layers plain".format(*KINDS[name])


def error(given: torch.Tensor, expected: torch.Tensor) -> float:
    return float((given - expected).norm() / expected.norm())


# States in addition to K and V


def test_states_and_packed_tokens() -> None:
    """Compressed, reordered and reset: states are those of the rows, and counted."""
    model = tiny_model("falcon_h1", "sdpa")
    expected, cache = logits(model, DynamicCache(config=model.config)), StrataCache(model.config, **WIDE)
    assert error(logits(model, cache), expected) < 0.01
    states = sum(x.nbytes for layer in cache.layers for x in layer.states())
    assert cache.memory().kinds["plain_layers"] == states > 0
    assert cache.tiered.memory().tokens["K8V8"] > 0
    before = [x.clone() for x in cache.layers[0].states()]
    cache.batch_select_indices(torch.tensor([1, 0]))
    cache.reorder_cache(torch.tensor([1, 1]))
    assert all(torch.equal(x, y[[0, 0]]) for x, y in zip(cache.layers[0].states(), before, strict=True))
    cache.reset()
    assert error(logits(model, cache), expected) < 0.01


def test_beams_of_a_hybrid_model() -> None:
    model, ids = tiny_model("falcon_h1", "sdpa"), prompt(2, 20)
    options = dict(num_beams=3, new=8, eos_token_id=None)
    cache = StrataCache(model.config, budget=1.0)
    assert torch.equal(greedy(model, ids, cache, **options), greedy(model, ids, **options))
    assert all(isinstance(layer, HybridLayer) for layer in cache.layers)


def test_states_are_kept_if_k_and_v_cannot_be_compressed() -> None:
    """The state is there before K and V are seen, and goes to transformers' own layer."""
    config = tiny_config("falcon_h1")
    config.head_dim = 24
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    cache = StrataCache(config, budget=1.0)
    with pytest.warns(UserWarning, match="compresses no layer"):
        given = logits(model, cache)
    torch.testing.assert_close(given, logits(model, DynamicCache(config=config)))
    assert cache.plain_layers[0].startswith("head_dim 24")
    assert repr(cache).startswith("StrataCache(0 layers,")


def test_states_are_not_saved(tmp_path: Path) -> None:
    model = tiny_model("falcon_h1", "sdpa")
    cache = StrataCache(model.config, budget=1.0)
    logits(model, cache)
    with pytest.raises(NotImplementedError, match=r"save: expected layers of .* layer 0 is a HybridLayer"):
        cache.save(tmp_path / "a.safetensors")


# Layers that share K and V


@pytest.fixture
def sharing() -> Any:
    if "gemma3n_text" not in transformers.CONFIG_MAPPING:
        pytest.skip("not in this transformers")
    return tiny_model("gemma3n_text", "sdpa")


def test_shared_k_and_v_are_stored_once(sharing: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of four layers read what the others stored, packed: in prompts, in steps, and a few tokens at a time."""
    monkeypatch.setattr(window, "LEAST", 16)
    expected = logits(sharing, DynamicCache(config=sharing.config))
    cache = StrataCache(sharing.config, **WIDE)
    assert error(logits(sharing, cache), expected) < 0.02
    assert repr(cache) == "StrataCache(1 layers and 1 of sliding windows, budget=0.6)"
    assert [cache.tiered.length(row) for row in range(2)] == [60, 51]
    cache.tiered.check()


def test_generating_with_shared_k_and_v(sharing: Any) -> None:
    ids = prompt(2, 30)
    cache = StrataCache(sharing.config, budget=1.0)
    assert torch.equal(greedy(sharing, ids, cache, new=20), greedy(sharing, ids, new=20))


def test_k_and_v_are_not_stored_twice(sharing: Any) -> None:
    """A model whose config does not say that it shares."""
    cache = StrataCache(sharing.config, budget=1.0)
    cache.shares = False
    with pytest.raises(RuntimeError, match="reads them itself"):
        logits(sharing, cache)
