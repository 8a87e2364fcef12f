"""The contender of packed pages with a tail: what a chunk sees of older tokens, and the bytes that it counts."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")

from transformers import DynamicCache

import eval_model
from hf_model import scaled
from hf_zoo import tiny_model
from kvstrata.hf.calibrate import calibrate
from kvstrata.layout import Format
from kvstrata.quant.calibration import Calibration, LayerCalibration
from kvstrata.tools.eval.contenders import layer_bytes
from kvstrata.tools.eval.measure import decode
from kvstrata.tools.eval.packed import PackedLayer, at_bytes, by_weights, packed
from kvstrata.tools.eval.sizes import sizes_of

NONE = [LayerCalibration()] * 2


def test_a_calibration_has_all_layers() -> None:
    sizes = sizes_of(eval_model.model())
    for layers, heads, message in (
        (1, 2, "expected one of a model with 2 layers, got one with 1"),
        (2, 4, "expected 2 KV heads and head_dim 64 in layer 0, got one with 4 and 64"),
    ):
        calibration = Calibration([LayerCalibration(torch.ones(heads, 64))] * layers)
        with pytest.raises(ValueError, match=f"calibration: {message}"):
            at_bytes("K4V4", sizes, 256, NONE, calibration)


def test_layers_with_a_window_get_their_own_part_of_a_calibration(monkeypatch: pytest.MonkeyPatch) -> None:
    """A calibration has two lists; pages of one format are in every layer."""
    monkeypatch.setattr("kvstrata.hf.window.LEAST", 1)
    model = tiny_model("gemma3_text", "sdpa")
    text = model.config.get_text_config(decoder=True)
    ids = torch.randint(3, 96, (1, 80), generator=torch.Generator().manual_seed(1))
    calibration = calibrate(model, ids)
    sizes = sizes_of(model)
    ours, _ = at_bytes("K4V4", sizes, 256, [LayerCalibration()] * sizes.count, calibration)
    full, windows = iter(calibration.layers), iter(calibration.windows)
    given = [layer.calibration for layer in ours.make(model.config, 1, 256).layers]
    assert len(given) == len(text.layer_types)
    assert len(calibration.windows)
    for kind, own in zip(text.layer_types, given, strict=True):
        assert torch.equal(own.centre, next(windows if kind == "sliding_attention" else full).centre)


def test_layers_without_a_calibration_use_the_weights() -> None:
    """Pairs of K scaled by up to 30 and of Q by as much the other way cost nothing."""
    model, ids = eval_model.model(), eval_model.tokens(192)
    hard = scaled(model)

    def kl(net: torch.nn.Module, layers: list[LayerCalibration]) -> float:
        exact = decode(net, ids, DynamicCache(config=net.config), prompt=0, chunk=64, keep=True)[1]
        cache = packed("K4V4", layers).make(net.config, len(ids), 192)
        scores, _ = decode(net, ids, cache, prompt=0, chunk=64, exact=exact)
        return sum(map(sum, scores.kl)) / sum(scores.count)

    sizes = sizes_of(hard)
    weights = by_weights(hard, sizes)
    easy = kl(model, NONE)
    assert kl(hard, weights) < 1.5 * easy
    assert kl(hard, NONE) > 3 * easy
    first = LayerCalibration(torch.ones(2, 64), torch.randn(2, 64))
    ours, _ = at_bytes("K4V4", sizes, 192, weights, Calibration([first, LayerCalibration()]))
    own = [layer.calibration for layer in ours.make(hard.config, 1, 192).layers]
    assert torch.equal(own[0].centre, first.centre)
    assert torch.equal(own[1].balance, weights[1].balance)


@pytest.mark.parametrize("tokens", [200, 256])
def test_tiers_get_the_bytes_of_packed_pages(tokens: int) -> None:
    """Of full pages, the tail and sink tokens."""
    model = eval_model.model()
    sizes = sizes_of(model)
    ours, tiers = at_bytes("K4V4", sizes, tokens, NONE, None)
    cache = ours.make(model.config, 1, tokens)
    with torch.no_grad():
        model(eval_model.tokens(tokens), past_key_values=cache, use_cache=True)
    share = layer_bytes(cache) / sizes.full_bytes(1, tokens)
    assert share - 0.001 <= tiers.budget <= share


def test_a_layer_reads_what_it_stored() -> None:
    calibration = LayerCalibration(torch.full((2, 64), 4.0), torch.randn(2, 64))
    layer = PackedLayer("K8V8", 16, 4, calibration)
    generator = torch.Generator().manual_seed(0)
    k, v = torch.randn(2, 3, 2, 60, 64, generator=generator)  # rows, heads, tokens, D
    seen = 0
    for count in (10, 20, 1, 17, 12):
        new = slice(seen, seen + count)
        for got, x in zip(layer.update(k[:, :, new], v[:, :, new]), (k, v), strict=True):
            full = seen // 16 * 16
            assert torch.equal(got[:, :, full:], x[:, :, full : seen + count]), "the tail and the chunk itself"
            if full:
                assert torch.equal(got[:, :, :4], x[:, :, :4]), "sink tokens"
                error = (got - x[:, :, : seen + count])[:, :, 4:full]
                assert 0 < error.norm() / x[:, :, 4:full].norm() < 0.05
        seen += count
    assert layer.get_seq_length() == 60
    assert layer.nbytes == 3 * 2 * (3 * Format.parse("K8V8", 64, 16).page_bytes + 4 * 20 * 64)
