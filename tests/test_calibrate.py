"""`calibrate` of models with other layers than those of full attention alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import transformers
from torch import nn
from transformers import DynamicCache

import eval_model
from hf_zoo import tiny_model
from kvstrata.hf import StrataCache
from kvstrata.hf.calibrate import calibrate

OPTIONS = dict(budget=0.6, dtype=torch.float32, recent_tokens=8, page_tokens=16)  # K8V8
IDS = torch.randint(3, 96, (1, 80), generator=torch.Generator().manual_seed(1))


def model_of(name: str) -> Any:
    if name not in transformers.CONFIG_MAPPING:
        pytest.skip("not in this transformers")
    return tiny_model(name, "sdpa")


@torch.no_grad()
def logits(model: Any, cache: Any) -> torch.Tensor:
    """Logits of a second turn, which attends to a first one in the cache."""
    model(IDS[:, :64], past_key_values=cache, use_cache=True)
    return model(IDS[:, 64:], past_key_values=cache, use_cache=True).logits


@pytest.mark.parametrize(
    ("name", "layers"), [("falcon_h1", 2), ("zamba2", 1), ("gemma3n_text", 1)], ids=["states", "mixed", "shared"]
)
def test_layers_with_states_and_shared_layers(name: str, layers: int) -> None:
    model = model_of(name)
    calibration = calibrate(model, IDS, name)
    assert len(calibration.layers) == layers
    assert all(layer.balance is not None and layer.centre is not None for layer in calibration.layers)
    cache = StrataCache(model.config, calibration=calibration, **OPTIONS)
    expected = logits(model, DynamicCache(config=model.config))
    assert (logits(model, cache) - expected).norm() < 0.02 * expected.norm()


@pytest.mark.filterwarnings("ignore:StrataCache compresses no layer")
def test_a_model_without_layers_to_compress_is_refused() -> None:
    """Its config has a head_dim for each kind of layer."""
    with pytest.raises(ValueError, match=r"model: expected one with layers to compress, got .*head_dim 512"):
        calibrate(model_of("gemma4_text"), IDS)


def test_a_layer_of_another_shape_has_no_balance() -> None:
    """The calibration still fits a cache, which leaves that layer plain."""
    model = eval_model.model()
    attention = model.model.layers[1].self_attn
    attention.num_key_value_groups = 1
    for name in ("k_proj", "v_proj"):
        setattr(attention, name, nn.Linear(attention.q_proj.in_features, attention.q_proj.out_features, bias=False))
    calibration = calibrate(model, IDS)
    assert [layer.shape for layer in calibration.layers] == [(2, 64), None]
    cache = StrataCache(model.config, calibration=calibration, **OPTIONS)
    expected = logits(model, DynamicCache(config=model.config))
    assert (logits(model, cache) - expected).norm() < 0.02 * expected.norm()
    assert list(cache.plain_layers) == [1]
