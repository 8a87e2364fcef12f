"""Balance and centre of K in layers with a sliding window: of each row, and of a calibration."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from transformers import DynamicCache, Gemma3TextConfig, LlamaConfig

from hf_model import SIZES, prompt
from kvstrata.hf import StrataCache
from kvstrata.hf.calibrate import calibrate
from kvstrata.hf.window import WindowLayer
from kvstrata.hf.window_rows import RowCalibration
from kvstrata.quant.calibration import Calibration, LayerCalibration
from test_hf_window import IDS, SMALL, WIDE, error, logits, make, short_windows, where

__all__ = ["short_windows", "where"]  # fixtures


def test_biases_of_k_are_centred_in_each_row(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    model = make("mistral-window", where)
    for layer in model.model.layers:
        bias = torch.zeros(2, 32)
        bias[:, [14, 15, 30, 31]] = 20.0  # pairs that hardly turn: the same score for all tokens
        layer.self_attn.k_proj.bias = torch.nn.Parameter(bias.flatten().to(where))
    expected = logits(model, DynamicCache(config=model.config))

    def run() -> tuple[float, WindowLayer]:
        cache = StrataCache(model.config, **SMALL, budget=0.25)
        return error(logits(model, cache), expected), cache.layers[0]

    centred, layer = run()
    assert layer.calibration.centre.abs().amax((1, 2)).min() > 1
    assert not torch.equal(layer.calibration.centre[0], layer.calibration.centre[2])
    monkeypatch.setattr(RowCalibration, "fix_centres", lambda *args: None)
    assert centred < 0.8 * run()[0]


@pytest.mark.filterwarnings("ignore:budget=:UserWarning")
def test_padding_does_not_change_the_centre(where: str) -> None:
    """Centres are means over the positions from a row's first token on, not from its padding on."""
    model = make("mistral-window", where)
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.self_attn.q_proj.weight, std=0.5)
        layer.self_attn.k_proj.bias = torch.nn.Parameter(torch.full((64,), 5.0, device=where))
    ids = prompt(1, 90, seed=3).to(where)
    found = []
    for padding in (0, 7, 60):
        columns = torch.cat([ids.new_zeros(1, padding), ids], 1)
        mask = (torch.arange(padding + 90, device=where) >= padding).long()[None]
        cache = StrataCache(model.config, **SMALL | dict(max_batch=1), budget=0.25)
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        with torch.no_grad():
            model(columns, past_key_values=cache, attention_mask=mask, position_ids=positions)
        cache.memory()  # prompts are stored
        found.append(cache.layers[0].calibration)
    for other in found[1:]:
        torch.testing.assert_close(other.balance, found[0].balance)
        torch.testing.assert_close(other.centre, found[0].centre, rtol=1e-4, atol=1e-4)
    assert float(found[0].centre.abs().max()) > 0.5


def calibration_of(model: Any) -> Calibration:
    """From another text, without a warning that nothing is compressed."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return calibrate(model, prompt(1, 90, seed=7).to(model.device), "tiny")


@pytest.mark.parametrize("name", ["mistral-window", "gemma3"])
def test_a_calibration_covers_windows(name: str, tmp_path: Path, where: str) -> None:
    """Pages depend on a row's own K and V alone, also from a file."""
    model = make(name, where)
    made = calibration_of(model)
    assert [len(made.layers), len(made.windows)] == ([0, 2] if name == "mistral-window" else [1, 1])
    made.save(tmp_path / "calibration.safetensors")
    read = Calibration.load(tmp_path / "calibration.safetensors")
    assert read.model == "tiny"
    for a, b in zip(made.windows, read.windows, strict=True):
        assert torch.equal(a.balance.cpu(), b.balance)
        assert torch.equal(a.centre.cpu(), b.centre)
    ids, pages = prompt(2, 70).to(where), []
    for rows in ([0], [0, 1]):
        cache = StrataCache(model.config, **SMALL, budget=0.3, calibration=read)
        with torch.no_grad():
            model(ids[rows], past_key_values=cache)
        layer = cache.layers[0]
        assert torch.equal(layer.calibration.balance[0].cpu(), made.windows[0].balance.cpu())
        assert torch.equal(layer.calibration.centre[-1].cpu(), made.windows[0].centre.cpu())
        pages.append(layer.pages[: layer.ring_blocks])
    assert torch.equal(*pages)
    cache = StrataCache(model.config, **WIDE, calibration=read)
    assert error(logits(model, cache), logits(model, DynamicCache(config=model.config))) < 0.013


def test_a_calibration_of_other_windows_is_refused() -> None:
    model = make("mistral-window")
    made = calibration_of(model)
    fewer = replace(made, windows=made.windows[:1], kinds=["none", "window"])
    with pytest.raises(ValueError, match="expected 2 layers with a sliding window, got one of tiny with 1"):
        StrataCache(model.config, **SMALL, budget=0.3, calibration=fewer)
    with pytest.raises(ValueError, match="expected one without layers of full attention, got one with 2"):
        StrataCache(model.config, **SMALL, budget=0.3, calibration=Calibration(made.windows))
    other = LayerCalibration(torch.ones(4, 32))
    cache = StrataCache(model.config, **SMALL, budget=0.3, calibration=replace(made, windows=[other, other]))
    with pytest.raises(ValueError, match=r"calibration: expected 2 KV heads and head_dim 32 .* got \(4, 32\)"):
        model(IDS, past_key_values=cache)


def test_a_calibration_of_other_kinds_of_layers_is_refused() -> None:
    """As many layers of each kind, in another order; a layer more that is in neither list; `format=` alike."""
    own = LayerCalibration(torch.ones(2, 32))
    full, window = "full_attention", "sliding_attention"
    given = Calibration([own], windows=[own], kinds=["window", "layer"])
    sizes = dict(SIZES, head_dim=32)
    right, wrong = (
        Gemma3TextConfig(**sizes, sliding_window=256, layer_types=x) for x in ([window, full], [full, window])
    )
    for options in (dict(budget=0.25), dict(format="K4V4", max_tokens=64), dict(budget=1.0)):
        StrataCache(right, calibration=given, **options)
        with pytest.raises(ValueError, match="expected full attention in layer 0, got one with 'window' there"):
            StrataCache(wrong, calibration=given, **options)
        llama = LlamaConfig(**sizes)
        with pytest.raises(ValueError, match="expected full attention in layer 1, got one with 'none' there"):
            StrataCache(llama, calibration=Calibration([own], kinds=["layer", "none"]), **options)
        with pytest.raises(ValueError, match="expected one of a model with 2 layers, got one with 3"):
            StrataCache(llama, calibration=Calibration([own] * 2, kinds=["layer", "none", "layer"]), **options)
