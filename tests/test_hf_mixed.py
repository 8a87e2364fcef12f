"""Combinations of what a `StrataCache` does: layers of several kinds, steps that failed, modes of autograd."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
from transformers import DynamicCache

import test_hf_window as windows
from hf_model import SMALL, make, prompt
from hf_zoo import tiny_model
from kvstrata.attention.decode import plan as plans
from kvstrata.hf import StrataCache, window

KINDS = [dict(budget=1.0, dtype=torch.float32), dict(format="K8V8", max_tokens=128)]


def uneven(which: int) -> Any:
    """A model in which a layer has more KV heads than the other."""
    model = make("llama")
    own = model.model.layers[which].self_attn
    for name in ("k_proj", "v_proj"):
        setattr(own, name, torch.nn.Linear(64, 4 * 32, bias=False))
    own.num_key_value_groups = 1
    return model


@torch.no_grad()
def logits(model: Any, cache: Any, ids: torch.Tensor, sizes: tuple[int, ...]) -> torch.Tensor:
    """Logits of all columns, given in forwards of these sizes."""
    parts = ids.split(sizes, 1)
    return torch.cat([model(input_ids=part, past_key_values=cache).logits for part in parts], 1)


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("options", KINDS, ids=["tiers", "format"])
def test_steps_where_the_last_layer_turns_out_to_be_plain(which: int, options: dict[str, Any]) -> None:
    """It does not end a step, nor does a forward in which that turns out stay open."""
    model, ids, sizes = uneven(which), prompt(2, 50), (40, 1, 1, 1, 4, 1, 1, 1)
    cache = StrataCache(model.config, **options)
    given = logits(model, cache, ids, sizes)
    expected = logits(model, DynamicCache(config=model.config), ids, sizes)
    assert list(cache.plain_layers) == [1]
    assert cache.get_seq_length() == 50
    assert float((given - expected).norm() / expected.norm()) < (0.02 if "format" in options else 1e-4)


def failed(model: Any, ids: torch.Tensor, columns: int) -> StrataCache:
    """A cache of so many columns after a step that the second layer did not survive."""
    cache = StrataCache(model.config, budget=1.0)
    logits(model, cache, ids[:, :columns], (columns,))
    hook = model.model.layers[1].register_forward_pre_hook(lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        logits(model, cache, ids[:, :1], (1,))
    hook.remove()
    return cache


@pytest.mark.parametrize("sizes", [(4, 1, 1), (20, 1)])
def test_more_tokens_after_a_step_that_failed(sizes: tuple[int, ...]) -> None:
    model, ids = make("llama"), prompt(2, 61)
    columns = 61 - sum(sizes)
    cache, whole = failed(model, ids, columns), StrataCache(model.config, budget=1.0)
    logits(model, whole, ids[:, :columns], (columns,))
    given, expected = (logits(model, x, ids[:, columns:], sizes) for x in (cache, whole))
    assert torch.equal(given, expected)
    assert cache.tiered.length(0) == cache.get_seq_length() == 61
    cache.tiered.check()


@pytest.mark.parametrize("way", ["deepcopy", "pickle", "save"])
def test_copies_after_a_step_that_failed(way: str, tmp_path: Path) -> None:
    model, ids = make("llama"), prompt(2, 46)
    cache, whole = failed(model, ids, 40), StrataCache(model.config, budget=1.0)
    logits(model, whole, ids[:, :40], (40,))
    if way == "deepcopy":
        twin = copy.deepcopy(cache)
    elif way == "pickle":
        twin = pickle.loads(pickle.dumps(cache))
    else:
        cache.save(tmp_path / "a.safetensors")
        twin = StrataCache.load(model.config, tmp_path / "a.safetensors")
    expected = logits(model, whole, ids[:, 40:], (1,) * 6)
    for one in (twin, cache):
        assert torch.equal(logits(model, one, ids[:, 40:], (1,) * 6), expected)
        assert one.tiered.length(0) == 46
        one.tiered.check()


@torch.no_grad()
def test_a_plan_is_up_to_date_wherever_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers with as many KV heads and other query heads have plans of their own."""
    model, ids = make("llama"), prompt(1, 40)
    own = model.model.layers[1].self_attn
    own.q_proj, own.o_proj = torch.nn.Linear(64, 8 * 32), torch.nn.Linear(8 * 32, 64)
    own.num_key_value_groups = 4
    cache, updated = StrataCache(model.config, **SMALL), []
    update = plans.DecodePlan.update

    def noted(self, *args: Any) -> None:
        updated.append(self.heads)
        update(self, *args)

    monkeypatch.setattr(plans.DecodePlan, "update", noted)
    logits(model, cache, ids, (39, 1))
    assert updated == [4, 8]


@torch.no_grad()
def test_models_with_their_own_position_numbering() -> None:
    """RoBERTa counts from the index of padding on; a captured step must not count columns for it."""
    model, ids = tiny_model("roberta", "sdpa"), prompt(2, 30).clamp(max=99)
    eager, captured = (
        logits(model, StrataCache(model.config, budget=1.0, capture=capture), ids, (24, *[1] * 6))
        for capture in (False, True)
    )
    assert torch.equal(captured, eager)


@pytest.mark.parametrize("modes", ["in", "ni", "iin"])
def test_windows_in_inference_mode_and_out_of_it(modes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(window, "LEAST", 32)
    model, ids = windows.make("gemma3"), prompt(2, 110)
    cache, whole = (StrataCache(model.config, **windows.WIDE) for _ in range(2))
    parts = ids.split([110 - 20 * (len(modes) - 1), *[20] * (len(modes) - 1)], 1)
    for mode, part in zip(modes, parts, strict=True):
        sizes = (part.shape[1],) if part is parts[0] else (1,) * 20
        with torch.inference_mode(mode == "i"):
            given = logits(model, cache, part, sizes).clone()
            cache.reorder_cache(torch.tensor([1, 0]))
            cache.reorder_cache(torch.tensor([1, 0]))
        assert torch.equal(given, logits(model, whole, part, sizes))


@pytest.mark.parametrize("options", [dict(windows.WIDE, max_batch=3), dict(format="K8V8", max_tokens=256)])
def test_rows_that_cannot_be_picked_change_nothing(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers with a window, which move their rows themselves, beside others."""
    monkeypatch.setattr(window, "LEAST", 32)
    model, ids = windows.make("gemma3"), prompt(3, 90)
    caches = [StrataCache(model.config, **options) for _ in "12"]
    for cache in caches:
        logits(model, cache, ids[:, :70], (70,))
    refused = caches[0]
    for wrong in ([1, -1, 0], [3, 0, 1]):
        with pytest.raises(IndexError, match=r"beam_idx: expected rows from 0 to 2, got (-1|3)"):
            refused.reorder_cache(torch.tensor(wrong))
        with pytest.raises(IndexError, match=r"indices: expected rows from 0 to 2, got (-1|3)"):
            refused.batch_select_indices(torch.tensor(wrong))
    with pytest.raises(IndexError, match="indices: expected a mask of 3 rows, got 2"):
        refused.batch_select_indices(torch.tensor([True, False]))
    if "max_batch" in options:
        for pick in (refused.reorder_cache, refused.batch_select_indices):
            with pytest.raises(ValueError, match="max_batch: expected at least 4 rows, got 3"):
                pick(torch.tensor([1, 2, 0, 0]))
    found, expected = (logits(model, cache, ids[:, 70:], (4, 16)) for cache in caches)
    assert torch.equal(found, expected)
    for cache in caches:
        cache.batch_select_indices(torch.tensor([False, True, True]))
    found, expected = (logits(model, cache, ids[:2, :3], (3,)) for cache in caches)
    assert torch.equal(found, expected)


def test_window_tails_keep_no_autograd_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(window, "LEAST", 32)
    model, ids = windows.make("mistral-window"), prompt(1, 40)
    cache = StrataCache(model.config, **windows.WIDE)
    for part in ids.split([38, 1, 1], 1):
        model(input_ids=part, past_key_values=cache)
    assert not any(layer.tail_k.requires_grad or layer.tail_v.requires_grad for layer in cache.layers)
