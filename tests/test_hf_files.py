"""A `StrataCache` saved, loaded, copied and pickled: generation goes on with the same tokens."""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from hf_model import SMALL, greedy, make, prompt
from kvstrata.cache import TieredCache
from kvstrata.hf import StrataCache
from kvstrata.quant.calibration import Calibration, LayerCalibration


def begun(name: str = "llama", **options) -> tuple:
    """A model, a padded batch with some tokens written, its mask, and the cache, with mass in its ledger.

    Steps report their mass at once, so the last tokens are two of one forward, as in assisted decoding.
    """
    model, ids = make(name), prompt(2, 90)
    mask = torch.ones_like(ids)
    mask[1, :25] = 0
    cache = StrataCache(model.config, **SMALL | options)
    ids = torch.cat([greedy(model, ids, cache, attention_mask=mask, new=21), prompt(2, 2, seed=6)], 1)
    mask = torch.cat([mask, torch.ones(2, 23, dtype=torch.long)], 1)
    with torch.no_grad():
        positions = mask.cumsum(1)[:, 110:-1] - 1
        model(ids[:, 110:-1], attention_mask=mask[:, :-1], position_ids=positions, past_key_values=cache)
    return model, ids, mask, cache


def go_on(model, ids: torch.Tensor, mask: torch.Tensor, cache: StrataCache) -> torch.Tensor:
    return greedy(model, ids, cache, attention_mask=mask, new=40)


def saved(cache: StrataCache, config, path: Path) -> StrataCache:
    cache.save(path)
    return StrataCache.load(config, path)


def through_torch(cache: StrataCache, config, path: Path) -> StrataCache:
    file = io.BytesIO()
    torch.save(cache, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


WAYS = {
    "file": saved,
    "pickle": lambda cache, config, path: pickle.loads(pickle.dumps(cache)),
    "torch.save": through_torch,
    "copy": lambda cache, config, path: copy.copy(cache),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_generation_continues_with_the_same_tokens(name: str, way: str, tmp_path: Path) -> None:
    model, ids, mask, cache = begun(name)
    compressed = next(layer for layer in cache.layers if hasattr(layer, "ledger"))
    assert compressed.ledger.queries > 0
    twin = WAYS[way](cache, model.config, tmp_path / "cache.safetensors")
    twin.tiered.check()
    assert (twin.get_seq_length(), twin.plain_layers) == (cache.get_seq_length(), cache.plain_layers)
    assert twin.memory().tokens == cache.memory().tokens
    assert twin.tiered.reports.steps == cache.tiered.reports.steps > 0, "layers would take other turns"
    expected = go_on(model, ids, mask, cache)
    assert torch.equal(go_on(model, ids, mask, twin), expected)
    assert twin.memory().tokens == cache.memory().tokens
    assert sum(n for tier, n in twin.memory().tokens.items() if tier != "K16V16") > 0


def test_a_file_of_another_model_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "cache.safetensors"
    model, _, _, cache = begun()
    cache.save(path)
    with pytest.raises(ValueError, match=r"path: expected a StrataCache of this model, .* num_key_value_heads"):
        StrataCache.load(make("llama-mha").config, path)
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    with pytest.raises(ValueError, match="the file is damaged"):
        StrataCache.load(model.config, path)
    cache.tiered.save(path)
    with pytest.raises(ValueError, match=r"kind: expected 'kvstrata.strata_cache', got 'kvstrata.cache'"):
        StrataCache.load(model.config, path)
    with pytest.raises(FileNotFoundError, match="path: expected a file in a folder that exists"):
        cache.save(tmp_path / "nowhere" / "cache.safetensors")


def test_an_empty_cache_is_saved(tmp_path: Path) -> None:
    model = make("llama")
    cache = saved(StrataCache(model.config, **SMALL), model.config, tmp_path / "empty.safetensors")
    assert cache.options["budget"] == 0.5
    in_bytes = saved(StrataCache(model.config, budget_bytes=10**8), model.config, tmp_path / "bytes.safetensors")
    assert in_bytes.options == dict(budget_bytes=10**8)
    assert torch.equal(
        greedy(model, prompt(1, 40), cache), greedy(model, prompt(1, 40), StrataCache(model.config, **SMALL))
    )


def test_a_tiered_cache_is_pickled() -> None:
    cache = TieredCache(2, 1, 32, budget=0.6, recent_tokens=16, page_tokens=16, max_requests=3, dtype=torch.float32)
    k, v = torch.randn(2, 300, 1, 32)
    for layer in range(2):
        cache.append(layer, k, v, requests=[2, 0], seq_lens=[200, 100])
    for twin in (pickle.loads(pickle.dumps(cache)), copy.copy(cache)):
        twin.check()
        assert twin.requests == (0, 2)
        assert torch.equal(twin.gather(1, 2)[0], cache.gather(1, 2)[0])
        twin.append(0, k[:5], v[:5], requests=[2])
        assert (twin.length(2), cache.length(2)) == (205, 200)


def test_a_loaded_cache_takes_its_calibration_again(tmp_path: Path) -> None:
    """A file has balance and centres of its rows; later prompts of the loaded cache need the calibration itself."""
    model, ids = make("llama"), prompt(1, 120)
    layers = [LayerCalibration(torch.full((2, 32), 2.0**i), torch.randn(2, 32)) for i in range(2)]
    calibration = Calibration(layers)
    cache = StrataCache(model.config, **SMALL, calibration=calibration, capture=False)
    greedy(model, ids, cache, new=4)
    cache.save(tmp_path / "cache.safetensors")
    loaded = StrataCache.load(model.config, tmp_path / "cache.safetensors", calibration=calibration, capture=False)
    assert loaded.forward.capture is False
    for x in (cache, loaded):
        x.crop(-x.get_seq_length())
    assert torch.equal(greedy(model, ids, loaded), greedy(model, ids, cache))
    assert torch.equal(loaded.tiered.balance, cache.tiered.balance)
    with pytest.raises(
        ValueError, match="calibration: expected 2 layers of 2 KV heads and head_dim 32, got one with 1"
    ):
        StrataCache.load(model.config, tmp_path / "cache.safetensors", calibration=Calibration(layers[:1]))
    for x in (cache, loaded):
        x.reset()
    assert torch.equal(greedy(model, ids, loaded), greedy(model, ids, cache))
    assert loaded.calibration is calibration
    assert torch.equal(loaded.tiered.centre, cache.tiered.centre)
