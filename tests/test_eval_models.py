"""`kvstrata eval`, `advise` and `calibrate` on models whose layers differ in shape or kind."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import transformers
from torch import nn
from transformers import AutoModelForCausalLM, DynamicCache, Gemma3TextConfig, LlamaConfig, MistralConfig

import hf_zoo
from conftest import invoke
from eval_model import Letters
from hf_model import SIZES, sharpen
from kvstrata.hf.calibrate import calibrate
from kvstrata.quant.calibration import Calibration
from kvstrata.tools.eval import contenders, plot, results, texts
from kvstrata.tools.eval import model as models
from kvstrata.tools.eval.kivi import KiviCache
from kvstrata.tools.eval.measure import decode
from kvstrata.tools.eval.packed import at_bytes, by_weights
from kvstrata.tools.eval.sizes import LayerSizes, ModelSizes, sizes_of

TOKENS = 400
OWN = SIZES | dict(vocab_size=96, pad_token_id=None, eos_token_id=2, head_dim=32)
MIXED = dict(layer_types=["sliding_attention", "full_attention"], sliding_window=256)


def from_zoo(name: str, **more: Any) -> Any:
    if name not in transformers.CONFIG_MAPPING:
        pytest.skip("not in this transformers")
    kind = transformers.CONFIG_MAPPING[name]
    return hf_zoo._shrink(kind, kind().to_dict(), hf_zoo.MORE.get(name, {}) | more)


CONFIGS: dict[str, Callable[[], Any]] = {
    "windows": lambda: MistralConfig(**OWN, sliding_window=256),
    "mixed windows": lambda: Gemma3TextConfig(**OWN, **MIXED, query_pre_attn_scalar=24),
    "shared": lambda: from_zoo("gemma3n_text"),
    "head sizes": lambda: from_zoo("gemma4_text", global_head_dim=64, sliding_window=256),
    "states": lambda: from_zoo("falcon_h1"),
    "linear": lambda: from_zoo("qwen3_next", layer_types=["linear_attention", "full_attention"]),
    "heads": lambda: LlamaConfig(**OWN),
    "pruned": lambda: LlamaConfig(**OWN | dict(num_hidden_layers=3)),
}
# K and V of the layers that store them.
LAYERS = {
    "windows": [(2, 32, 32)] * 2,
    "mixed windows": [(2, 32, 32)] * 2,
    "shared": [(2, 32, 32)] * 2,
    "head sizes": [(2, 32, 32), (2, 64, 64)],
    "states": [(2, 32, 32)] * 2,
    "linear": [(2, 32, 32)],
    "heads": [(2, 32, 32), (4, 32, 32)],
    "pruned": [(2, 32, 32)] * 2,
}


def model_of(name: str) -> Any:
    torch.manual_seed(0)
    model = sharpen(AutoModelForCausalLM.from_config(CONFIGS[name](), attn_implementation="sdpa").eval())
    if name == "pruned":
        del model.model.layers[2:]
    if name == "heads":
        attention = model.model.layers[1].self_attn
        attention.num_key_value_groups = 1
        attention.k_proj, attention.v_proj = (nn.Linear(64, 128, bias=False) for _ in range(2))
    return model


@pytest.fixture(params=CONFIGS)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def run(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Any]:
    """`kvstrata` with the model in place of a real one, and a text of letters."""
    model = model_of(name)
    monkeypatch.setattr(models, "load", lambda path, device, dtype: (model.to(device), Letters()))
    monkeypatch.setattr(plot, "plot", lambda quality, path: path)
    monkeypatch.setattr(contenders, "peers", list)  # depend on what is installed
    (tmp_path / "words.txt").write_text(texts.text("prose")[:6000])
    return lambda *given: invoke(*given, "--text", tmp_path / "words.txt")


def test_bytes_are_those_of_the_layers_that_store_them(name: str) -> None:
    """K and V at 16 bit, and states as a cache of transformers holds them."""
    model = model_of(name)
    sizes = sizes_of(model)
    assert list(sizes.layers) == [LayerSizes(*layer) for layer in LAYERS[name]]
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(torch.zeros(2, 12, dtype=torch.long), past_key_values=cache)
    states = sizes.states * 2
    assert bool(states) == (name in ("states", "linear"))
    kv = (getattr(layer, side, None) for layer in cache.layers for side in ("keys", "values"))
    kept = sum(x.nbytes for x in kv if torch.is_tensor(x))
    assert sizes.full_bytes(2, 12) == kept // 2 + states
    held = sum(x.nbytes for layer in cache.layers for x in contenders._tensors(vars(layer)) if x.dim())
    assert held == kept + states


@pytest.mark.filterwarnings("ignore::kvstrata.hf.guard.BudgetWarning")
def test_eval_measures_every_cache_that_a_model_allows(name: str, run: Callable[..., Any], tmp_path: Path) -> None:
    out = tmp_path / "q.json"
    done = run("eval", "--quick", "--tokens", TOKENS, "--budget", "0.5", "--no-needles", "--out", out)
    assert done.exit_code == 0, done.output
    kept = results.load(out)
    rows = {row.name.split()[0]: row for row in kept.rows}
    assert rows.keys() == {"16", "kvstrata"} | (set() if name == "states" else {"KIVI-style"})
    assert ("KIVI-style" in kept.absent) == (name == "states")
    full = sizes_of(model_of(name)).full_bytes(1, TOKENS)
    assert all(row.full == full for row in rows.values())
    assert 0.1 * full < rows["kvstrata"].bytes < full
    if "KIVI-style" in rows:
        states = sizes_of(model_of(name)).states
        assert rows["KIVI-style"].bytes - states <= 0.52 * (full - states)


@pytest.mark.filterwarnings("ignore::kvstrata.hf.guard.BudgetWarning")
def test_widths_and_packed_pages(name: str, run: Callable[..., Any], tmp_path: Path) -> None:
    """A comparison that a model does not allow is refused in one line."""
    short = ("--tokens", TOKENS, "--chunk", 64, "--no-peers", "--no-needles")
    done = run("eval", "--bits", 3, *short, "--out", tmp_path / "bits.json")
    if name == "windows":
        assert done.exit_code == 2
        assert "--bits: expected a model with full attention, got one with sliding windows only" in done.output
    else:
        assert done.exit_code == 0, done.output
    done = run("eval", "--packed", "K4V4", *short, "--out", tmp_path / "packed.json")
    refusal = "--packed: expected layers of attention or of other states, got LinearAttentionAndFullAttentionLayer"
    assert done.exit_code == (2 if name == "states" else 0), done.output
    assert (refusal if name == "states" else "packed K4V4") in re.sub(r"\s+", " ", done.output)


@pytest.mark.filterwarnings("ignore::kvstrata.hf.guard.BudgetWarning")
def test_advice_and_calibration(name: str, run: Callable[..., Any], tmp_path: Path) -> None:
    """Of a model with windows only, no layer has a sensitivity."""
    calibration = tmp_path / "c.safetensors"
    done = run("calibrate", "--tokens", 128, "--sensitivity", "--out", calibration)
    assert done.exit_code == 0, done.output
    measured = Calibration.load(calibration)
    if name == "heads":
        assert "No sensitivities: layers have K and V of different shapes" in done.output
    else:
        assert len(measured.k_sensitivity) == len(measured.layers)
    if name == "windows":
        assert "No sensitivities: only layers of full attention are measured" in done.output
        assert measured.bits == 0
    assert bool(measured.layers) == (name != "windows")
    done = run("advise", "--tokens", TOKENS, "--kl", 10, "--calibration", calibration, "--out", tmp_path / "a.json")
    assert done.exit_code == 0, done.output
    fractions = [float(x) for x in re.findall(r"budget [0-9.]+: ([0-9.]+) of 16 bit, KL [0-9.-]+,", done.output)]
    assert fractions
    assert all(0 < x < 1 for x in fractions)


@pytest.mark.parametrize("name", ["linear", "shared"])
def test_the_baseline_keeps_states_and_shared_layers(name: str) -> None:
    model = model_of(name)
    ids = torch.randint(0, 96, (1, 100), generator=torch.Generator().manual_seed(1))
    _, exact = decode(model, ids, DynamicCache(config=model.config), chunk=10, keep=True)
    scores, _ = decode(model, ids, KiviCache(model.config, 8, 8), chunk=10, exact=exact)
    assert sum(scores.kl[0]) / sum(scores.count) < 1e-3


def test_packed_pages_need_layers_of_one_kind() -> None:
    model = model_of("head sizes")
    calibration = calibrate(model, torch.randint(0, 96, (1, 64)))
    with pytest.raises(ValueError, match=r"expected layers of one shape with --calibration, got \(2, 32\) and \(2, 64"):
        at_bytes("K4V4", sizes_of(model), TOKENS, (), calibration)
    for layer, message in (
        (LayerSizes(2, 64, 32), "--packed: expected K and V of one size, got 64 and 32"),
        (LayerSizes(2, 512, 512), "--packed: expected head_dim to be a multiple of 16 from 32 to 256, got 512"),
    ):
        with pytest.raises(ValueError, match=message):
            at_bytes("K4V4", ModelSizes((LayerSizes(2, 32, 32), layer), None), TOKENS, (), None)


@pytest.mark.parametrize("name", ["linear", "shared", "pruned"])
def test_packed_pages_get_the_calibration_of_their_layer(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers of states come before it, or layers that share its K and V, or none of the file, after it."""
    monkeypatch.setattr("kvstrata.hf.window.LEAST", 1)
    model = model_of(name)
    sizes = sizes_of(model)
    own = calibrate(model, torch.randint(0, 96, (1, 80), generator=torch.Generator().manual_seed(1)))
    ours, _ = at_bytes("K4V4", sizes, 256, by_weights(model, sizes), own)
    layers, parts = ours.make(model.config, 1, 256).layers, own.of_model(model.config.num_hidden_layers)
    assert len(sizes.places) == len(LAYERS[name]) < len(parts)
    for place in sizes.places:
        assert parts[place].centre is not None
        assert torch.equal(layers[place].calibration.centre, parts[place].centre)


@pytest.mark.parametrize("name", ["eval", "advise", "calibrate"])
def test_a_model_with_other_sizes_of_k_than_of_v_is_refused(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = from_zoo("mimo_v2_flash", head_dim=64, v_head_dim=32, sliding_window=256)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    monkeypatch.setattr(models, "load", lambda path, device, dtype: (model.to(device), Letters()))
    done = invoke(name, "--out", tmp_path / "out", "--text", "prose")
    assert done.exit_code == 2, done.output
    assert "config: expected layers to compress, got K and V of different shapes, (2, 64) and (2, 32)" in done.output
