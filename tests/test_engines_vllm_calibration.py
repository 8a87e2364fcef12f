"""Calibration and sinks of our vLLM backend: from a file, from reloaded weights, and in layers that make drafts."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from kvstrata.quant.calibration import Calibration, LayerCalibration
from vllm_standin import DEVICE, configured, layer_of, profile  # noqa: F401


def test_calibration_of_a_rank(engine, tmp_path):
    path = tmp_path / "model.safetensors"
    layers = [LayerCalibration(torch.full((4, 64), 2.0**i), torch.arange(256.0).view(4, 64)) for i in range(3)]
    Calibration(layers).save(path)
    engine.configure({"kvstrata": {"format": "K4V4", "calibration": str(path)}})
    engine.current.rank, engine.current.ranks = 1, 2
    impl = layer_of(engine, num_heads=4, num_kv_heads=2, head_size=64)
    cache = torch.zeros(2, 2, 64, 68, dtype=torch.uint8, device=DEVICE)
    k = torch.randn(1, 2, 64, device=DEVICE)
    slots = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    impl.do_kv_cache_update(SimpleNamespace(layer_name="model.layers.2.attn"), k, k, cache, slots)
    assert impl.layer.calibration.balance.unique().tolist() == [4.0]
    assert impl.layer.calibration.centre[0, 0] == 128.0
    impl = layer_of(engine, num_heads=4, num_kv_heads=2, head_size=64)
    with pytest.raises(ValueError, match="expected a file with layer 3, got 3 layers"):
        impl.do_kv_cache_update(SimpleNamespace(layer_name="model.layers.3.attn"), k, k, cache, slots)


@pytest.mark.parametrize("name", ["model.layers.3.attn", "draft_model.layers.0.attn"])
def test_layers_that_make_drafts_do_not_use_the_calibration_file(engine, tmp_path, name):
    """EAGLE's layers are numbered behind those of the target; a draft model has layers of its own."""
    path = tmp_path / "model.safetensors"
    Calibration([LayerCalibration(torch.full((2, 64), 2.0))] * 3).save(path)
    engine.configure({"kvstrata": {"format": "K4V4", "calibration": str(path)}}, text=dict(num_hidden_layers=3))
    impl = layer_of(engine, num_heads=4, num_kv_heads=2, head_size=64)
    profile(impl, name)
    assert impl.layer.calibration is None
    profile(target := layer_of(engine, num_heads=4, num_kv_heads=2, head_size=64))
    assert target.layer.calibration.balance.unique().tolist() == [2.0]


def test_reloaded_sinks_are_used_at_the_same_address(engine):
    """vLLM writes new weights into the parameter and calls the hook again; graphs hold the address of the copy."""
    sinks = torch.nn.Parameter(torch.zeros(4, dtype=torch.bfloat16, device=DEVICE), requires_grad=False)
    impl = layer_of(engine, num_heads=4, num_kv_heads=2, head_size=64, sinks=sinks)
    impl.process_weights_after_loading(torch.bfloat16)
    address = impl.layer.sinks.data_ptr()
    assert impl.layer.sinks.dtype == torch.float32
    sinks.data.fill_(7.0)
    impl.process_weights_after_loading(torch.bfloat16)
    assert impl.layer.sinks.tolist() == [7.0] * 4
    assert impl.layer.sinks.data_ptr() == address


def test_calibration_is_there_when_kernels_are_compiled(engine, tmp_path, monkeypatch):
    """Those of a balance are others; under CUDA-graph capture a file could not be copied to the device."""
    path = tmp_path / "model.safetensors"
    Calibration([LayerCalibration(torch.full((2, 64), 2.0), torch.ones(2, 64))] * 3).save(path)
    engine.configure({"kvstrata": {"format": "K4V4", "calibration": str(path)}})
    rehearsed = []
    monkeypatch.setattr(engine.ours, "warm_up", lambda layer, *given: rehearsed.append((layer.calibration, *given)))
    impl = layer_of(engine, num_heads=4, num_kv_heads=2, head_size=64)
    profile(impl)
    ((calibration, heads, block_size, *_),) = rehearsed
    assert calibration is impl.layer.calibration
    assert calibration.balance.unique().tolist() == [2.0]
    assert (heads, block_size) == (4, 64)
    profile(layer_of(engine, num_heads=4, num_kv_heads=2, head_size=64))  # the next layer
    assert len(rehearsed) == 1
    engine.configure({"kvstrata": {"format": "K8V8"}}, block_size=48)  # a later model of the process
    profile(layer_of(engine, num_heads=4, num_kv_heads=2, head_size=64))
    assert [given[2] for given in rehearsed] == [64, 16]


@pytest.mark.parametrize("part", ["balance", "centre"])
def test_kernels_of_each_kind_of_calibration_are_compiled(engine, tmp_path, monkeypatch, part):
    """Layers of one shape, the second without a balance or without a centre."""
    both = LayerCalibration(torch.full((2, 64), 2.0), torch.ones(2, 64))
    Calibration([both, replace(both, **{part: None})]).save(path := tmp_path / "model.safetensors")
    engine.configure({"kvstrata": {"format": "K4V4", "calibration": str(path)}}, text=dict(num_hidden_layers=2))
    compiled = []
    monkeypatch.setattr(engine.ours, "warm_up", lambda layer, *given: compiled.append(layer.calibration))
    for number in (0, 1, 0, 1):
        profile(layer_of(engine, num_heads=4, num_kv_heads=2, head_size=64), f"model.layers.{number}.attn")
    assert [getattr(own, part) is None for own in compiled] == [False, True]


def test_each_layer_gets_its_own_part_of_a_calibration_with_windows(engine, tmp_path):
    """A file has layers in two lists, vLLM numbers them in one."""
    layers, windows = ([LayerCalibration(torch.full((2, 64), 2.0**i)) for i in some] for some in ((0, 1), (2, 3, 4)))
    given = Calibration(layers, windows=windows, kinds=["window", "layer", "window", "window", "none", "layer"])
    options = {"kvstrata": {"format": "K4V4", "calibration": str(tmp_path / "model.safetensors")}}
    engine.configure(options, text=dict(num_hidden_layers=6))
    given.save(tmp_path / "model.safetensors")
    for number, power in enumerate((2, 0, 3, 4, None, 1)):
        profile(impl := layer_of(engine, num_heads=4, num_kv_heads=2, head_size=64), f"model.layers.{number}.attn")
        own = impl.layer.calibration
        assert own is None if power is None else own.balance.unique().tolist() == [2.0**power]
    replace(given, kinds=()).save(tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="expected a file that says which layers have a sliding window, got one"):
        profile(layer_of(engine, num_heads=4, num_kv_heads=2, head_size=64))


@pytest.mark.parametrize(
    ("layers", "size", "message"),
    [
        (0, (2, 64), "path: expected a calibration file"),
        (2, (2, 64), "calibration: expected one of a model with 3 layers, got one with 2"),
        (9, (2, 64), "calibration: expected one of a model with 3 layers, got one with 9"),
        (3, (4, 64), "calibration: expected 2 KV heads on each of 1 ranks, got a file with 4"),
        (3, (2, 128), "calibration: expected head_dim 64, got 128"),
    ],
)
def test_calibrations_of_other_models_are_refused_at_start(engine, tmp_path, layers, size, message):
    path = tmp_path / "model.safetensors"
    if layers:
        Calibration([LayerCalibration(torch.ones(size))] * layers).save(path)
    engine.configure({"kvstrata": {"format": "K4V4", "calibration": str(path)}}, text=dict(num_hidden_layers=3))
    with pytest.raises(ValueError, match=f"^kvstrata: {message}.*[.]$"):
        profile(layer_of(engine, num_heads=4, num_kv_heads=2, head_size=64))
