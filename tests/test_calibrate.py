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
from hf_model import scaled
from hf_zoo import tiny_model
from kvstrata.hf import StrataCache, window
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
    assert len(calibration.of_model(model.config.num_hidden_layers)) == model.config.num_hidden_layers
    assert all(layer.balance is not None and layer.centre is not None for layer in calibration.layers)
    cache = StrataCache(model.config, calibration=calibration, **OPTIONS)
    expected = logits(model, DynamicCache(config=model.config))
    assert (logits(model, cache) - expected).norm() < 0.02 * expected.norm()


@pytest.mark.filterwarnings("ignore:StrataCache compresses no layer")
def test_a_model_without_layers_to_compress_is_refused() -> None:
    """Its config has a head_dim for each kind of layer."""
    with pytest.raises(ValueError, match=r"model: expected one with layers to compress, got .*head_dim 512"):
        calibrate(model_of("gemma4_text"), IDS)


@pytest.mark.parametrize(("side", "name"), [("k_proj", "K"), ("q_proj", "Q")])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_k_or_q_that_is_not_finite_is_refused(side: str, name: str, value: float) -> None:
    model = model_of("gemma3_text")
    with torch.no_grad():
        getattr(model.model.layers[1].self_attn, side).weight[0, 0] = value
    with pytest.raises(ValueError, match=f"model: expected finite {name} in layer 1, got NaN or infinity"):
        calibrate(model, IDS)


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


def biased(value: float, context: int = 1024) -> Any:
    """GPT-NeoX with partial RoPE and a channel of K outside it that is nearly the same for all tokens."""
    torch.manual_seed(0)
    sizes = dict(vocab_size=128, hidden_size=128, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4)
    config = transformers.GPTNeoXConfig(**sizes, rotary_pct=0.25, max_position_embeddings=context)
    model = transformers.GPTNeoXForCausalLM(config).eval()
    with torch.no_grad():
        linear = model.gpt_neox.layers[1].attention.query_key_value
        weight = linear.weight.view(4, 3, 32, 128)
        weight.mul_(10)
        weight[:, 1, -1] *= 0.01
        linear.bias.view(4, 3, 32)[:, 1, -1] = value
    return model


@pytest.mark.parametrize("value", [300.0, 500.0, 20000.0])
@pytest.mark.parametrize("noise", [0.01, 0.0])
def test_a_large_channel_with_little_noise_stays_within_float16(value: float, noise: float) -> None:
    """Its balance is small, by which K is divided; from a prompt, a calibration and the weights."""
    model, ids = biased(value), torch.randint(0, 128, (1, 300), generator=torch.Generator().manual_seed(1))
    if not noise:
        with torch.no_grad():
            model.gpt_neox.layers[1].attention.query_key_value.weight.view(4, 3, 32, 128)[:, 1, -1] = 0
    sizes = dict(recent_tokens=16, page_tokens=16)
    given = [dict(budget=0.6, **sizes), dict(budget=0.6, calibration=calibrate(model, ids), **sizes)]
    with torch.no_grad():
        expected = model(ids, past_key_values=DynamicCache(config=model.config)).logits[:, -20:]
        for options in (*given, dict(format="K8V8", max_tokens=400)):
            cache = StrataCache(model.config, **options)
            model(ids[:, :280], past_key_values=cache)
            found = model(ids[:, 280:], past_key_values=cache).logits
            assert float((found - expected).norm() / expected.norm()) < 0.1, options


def test_centres_are_averaged_over_no_more_positions_than_the_model_has() -> None:
    ids = torch.randint(0, 128, (1, 300), generator=torch.Generator().manual_seed(1))
    centres = [calibrate(biased(3.0, context), ids).layers[1].centre for context in (1024, 4096, 1 << 17)]
    assert not torch.equal(centres[0], centres[1])
    assert torch.equal(centres[1], centres[2])


def test_centres_are_averaged_over_all_of_a_text_that_is_longer_than_the_context() -> None:
    ids = torch.randint(0, 128, (1, 300), generator=torch.Generator().manual_seed(1))
    centres = [calibrate(biased(3.0, context), ids).layers[1].centre for context in (64, 300, 400)]
    assert torch.equal(centres[0], centres[1])
    assert not torch.equal(centres[1], centres[2])


def test_attention_sinks_do_not_count() -> None:
    """K of the first layer depends on its own token alone."""
    model, other = eval_model.model(), IDS.clone()
    other[:, :4] = 3
    one, two = (calibrate(model, ids).layers[0] for ids in (IDS, other))
    assert torch.equal(one.balance, two.balance)
    torch.testing.assert_close(one.centre, two.centre)
    other[:, 4:8] = 3
    assert (calibrate(model, other).layers[0].centre - one.centre).norm() > 0.01 * one.centre.norm()


def test_all_rows_count_alike() -> None:
    ids = torch.cat([IDS, torch.full_like(IDS, 5)])
    ids[1, ::3] = 9
    model = scaled(eval_model.model())
    one, other, alone = (calibrate(model, x) for x in (ids, ids.flip(0), ids[:1]))
    for a, b, c in zip(one.layers, other.layers, alone.layers, strict=True):
        assert torch.equal(a.balance, b.balance)
        torch.testing.assert_close(a.centre, b.centre, rtol=1e-4, atol=1e-4)
        assert not torch.equal(a.balance, c.balance)
        assert (a.centre - c.centre).norm() > 0.1 * c.centre.norm()


def test_windows_are_centred_with_their_own_rope(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(window, "LEAST", 1)
    model = model_of("gemma3_text")
    before = calibrate(model, IDS)
    model.config.rope_parameters["full_attention"]["rope_theta"] = 100.0  # the model itself has made its table
    after = calibrate(model, IDS)
    assert torch.equal(before.windows[0].centre, after.windows[0].centre)
    assert not torch.equal(before.layers[0].centre, after.layers[0].centre)


def test_windows_balance_only_heads_that_gain_much(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their pages have one format; a layer with tiers balances all heads."""
    monkeypatch.setattr(window, "LEAST", 1)
    model = model_of("gemma3_text")
    for layer in model.model.layers:
        layer.self_attn.k_norm.weight.data[[15, 31]] = 2.0  # a pair that hardly turns, three times as large
    given = calibrate(model, IDS)
    assert all((own.balance == 1).all() for own in given.windows)
    assert all((own.balance[:, 15] >= 2 * own.balance.median()).all() for own in given.layers)
    assert min(len(given.windows), len(given.layers)) >= 1


def test_format_with_a_plain_layer_uses_each_layers_own_part_of_a_calibration() -> None:
    sizes = dict(vocab_size=128, hidden_size=128, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4)
    config = transformers.LlamaConfig(**sizes, num_key_value_heads=2, head_dim=64)
    model = transformers.LlamaForCausalLM(config).eval()
    other = model.model.layers[1].self_attn
    other.num_key_value_groups = 1
    other.k_proj, other.v_proj = (nn.Linear(128, 256, bias=False) for _ in range(2))
    calibration = calibrate(model, IDS)
    cache = StrataCache(model.config, format="K4V4", max_tokens=400, calibration=calibration)
    for _ in range(2):
        with torch.no_grad():
            model(IDS, past_key_values=cache)
        assert list(cache.plain_layers) == [1]
        for place in (0, 2, 3):
            assert torch.equal(cache.layers[place].calibration.centre, calibration.layers[place].centre)
        cache.reset()


@pytest.mark.parametrize("options", [dict(budget=0.5), dict(format="K4V4")], ids=str)
def test_something_else_than_a_calibration_is_named(options: dict[str, Any]) -> None:
    config = transformers.LlamaConfig(num_hidden_layers=2, num_attention_heads=4, head_dim=64)
    with pytest.raises(TypeError, match="calibration: expected a Calibration or the path of its file, got int"):
        StrataCache(config, **options, calibration=3)
