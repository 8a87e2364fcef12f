"""The warning for a budget that is too small for a model."""

from __future__ import annotations

import copy
import re
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import eval_model
from hf_model import make, prompt
from kvstrata.hf import StrataCache, guard
from kvstrata.hf.calibrate import calibrate
from kvstrata.hf.guard import BudgetWarning, Guard, Sample, WindowGuard
from kvstrata.hf.logits import Logits
from kvstrata.layout import Format
from kvstrata.quant.calibration import Calibration, LayerCalibration
from test_hard_models import scaled

SMALL = dict(budget=0.25, page_tokens=16, recent_tokens=12)
# Attributed to kvstrata, where the suite turns warnings into errors.
pytestmark = pytest.mark.filterwarnings("default::kvstrata.hf.guard.BudgetWarning")


def forward(model: torch.nn.Module, ids: torch.Tensor, mask: torch.Tensor | None = None, **options) -> list[str]:
    cache = StrataCache(model.config, **SMALL | options)
    with warnings.catch_warnings(record=True) as caught, torch.no_grad():
        warnings.simplefilter("always")
        model(ids, attention_mask=mask, past_key_values=cache)
        if mask is None:
            model(ids[:, :1], past_key_values=cache)
    assert cache.guard is None
    return [str(w.message) for w in caught if issubclass(w.category, BudgetWarning)]


def test_an_easy_model_gives_no_warning():
    assert forward(eval_model.model(), eval_model.tokens(160)) == []


def test_a_hard_model_gives_one_warning():
    hard, ids = scaled(eval_model.model(), 8.0), eval_model.tokens(160)
    assert forward(hard, ids) == []  # with a balance
    found = forward(hard, ids, balance=False)
    assert len(found) == 1
    assert "budget=0.25 is too small for this model: estimated attention error" in found[0]
    advised = float(found[0].split("try budget=")[1])
    assert 0.25 < advised < 1
    assert forward(hard, ids, balance=False, budget=advised) == []


def test_advice_for_chosen_tiers_is_without_them():
    hard, ids = scaled(eval_model.model(), 8.0), eval_model.tokens(160)
    (found,) = forward(hard, ids, balance=False, budget=0.21, tiers=["K2V2"])
    advised = re.search(r"try budget=([0-9.]+) without tiers=$", found)
    assert forward(hard, ids, balance=False, budget=float(advised[1])) == []


def test_a_model_is_checked_once(monkeypatch: pytest.MonkeyPatch):
    hard, ids = scaled(eval_model.model()), eval_model.tokens(160)
    assert len(forward(hard, ids, balance=False)) == 1
    with monkeypatch.context() as patch:
        patch.setattr(Guard, "add", None)
        assert forward(hard, ids, balance=False) == []
        assert forward(hard, ids[:, :50], balance=False, budget=0.3) == []  # too short to tell
    assert len(forward(hard, ids, balance=False, budget=0.3)) == 1


@pytest.mark.parametrize("turns", [(30, 160), (30, 40, 140), (5, 6, 70, 150)])
def test_a_long_turn_after_short_ones_is_checked(turns: tuple[int, ...], monkeypatch: pytest.MonkeyPatch):
    def talk(model: Any, mask: torch.Tensor | None = None, **options: Any) -> list[str]:
        cache, begin = StrataCache(model.config, **SMALL | options), 0
        with warnings.catch_warnings(record=True) as caught, torch.no_grad():
            warnings.simplefilter("always")
            for end in turns:
                seen = None if mask is None else mask[:, :end]
                model(ids[:, begin:end], attention_mask=seen, past_key_values=cache)
                assert cache.guard is None
                begin = end
        return [str(w.message) for w in caught if issubclass(w.category, BudgetWarning)]

    hard, ids = scaled(eval_model.model(), 8.0), eval_model.tokens(max(turns), rows=2)
    mask = torch.ones_like(ids)
    mask[0, : turns[0] + 5] = 0
    assert talk(hard) == []  # with a balance
    (found,) = talk(hard, balance=False)
    advised = float(found.split("try budget=")[1])
    assert 0.25 < advised < 1
    with monkeypatch.context() as patch:
        patch.setattr(Guard, "add", None)
        assert talk(hard, balance=False) == []
    guard._seen.clear()
    assert len(talk(hard, mask, balance=False)) == 1
    assert talk(hard, mask, balance=False, budget=advised) == []


def test_a_calibration_is_a_setting_of_its_own(tmp_path: Path):
    """One that was checked says nothing about a cache without one, nor about another one; copies are the same."""
    hard, ids = scaled(eval_model.model(), 8.0), eval_model.tokens(160)
    poor, good = Calibration([LayerCalibration(torch.ones(2, 64))] * 2), calibrate(hard, ids)
    good.save(tmp_path / "good.safetensors")
    assert forward(hard, ids, calibration=good) == forward(hard, ids) == []
    assert len(forward(hard, ids, calibration=poor)) == 1
    for again in (None, copy.deepcopy(poor), tmp_path / "good.safetensors"):
        assert forward(hard, ids, calibration=again) == []
    assert len(guard._seen[hard.model.layers[0].self_attn]) == 3, "checked once each"


def test_chosen_tiers_are_a_setting_of_their_own():
    hard, ids = scaled(eval_model.model(), 8.0), eval_model.tokens(160)
    for options, count in (({}, 1), (dict(tiers=["K4V3", "K2V2"]), 1), ({}, 0)):
        assert len(forward(hard, ids, balance=False, **options)) == count


def test_no_estimate_without_a_fraction(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Guard, "add", None)
    hard, ids = scaled(eval_model.model()), eval_model.tokens(160)
    assert forward(hard, ids, budget=None) == []
    assert forward(hard, ids, budget=1.0) == []


def test_padding_does_not_count():
    hard, ids = scaled(eval_model.model()), eval_model.tokens(160, rows=2)
    mask = torch.ones(2, 160, dtype=torch.long)
    mask[0, :120] = 0
    padded = torch.where(mask == 1, ids, 0)
    (found,) = forward(hard, padded, mask, balance=False)
    guard._seen.clear()
    (alone,) = forward(hard, ids[1:], balance=False)
    assert found == alone


@pytest.mark.parametrize("name", ["gemma2", "gpt-oss"])
def test_softcaps_and_sinks_are_those_of_the_model(name: str, monkeypatch: pytest.MonkeyPatch):
    """The output that errors are relative to is the one that the model's own attention has."""
    model, outputs, truths = make(name), [], []
    real_add = Guard.add

    def add(self, layer, query, key, value, real, logits):
        sample = guard.Sample.of_tiers(self.cache, layer, 0, query[0], key[0], value[0], logits)
        truths.append(sample.truth.flatten(0, 1))  # [heads, queries, D]
        real_add(self, layer, query, key, value, real, logits)

    monkeypatch.setattr(Guard, "add", add)
    full = [i for i, kind in enumerate(model.config.layer_types) if kind == "full_attention"]
    for i in full:
        attention = model.model.layers[i].self_attn
        attention.o_proj.register_forward_pre_hook(lambda module, args: outputs.append(args[0][0]))
    cache = StrataCache(model.config, **SMALL | dict(budget=0.5))
    with torch.no_grad():
        model(prompt(1, 100), past_key_values=cache)
    asked = torch.linspace(50, 99, guard.QUERIES).long()
    assert len(truths) == len(outputs) == len(full)
    for truth, out in zip(truths, outputs, strict=True):
        torch.testing.assert_close(truth.transpose(0, 1).flatten(1), out[asked], rtol=1e-4, atol=1e-4)


def test_errors_between_two_formats():
    formats = [Format.parse(name, 64) for name in ("K8V8", "K4V4", "K2V2")]

    class Known:
        def error(self, form: Format) -> float:
            return {"K8V8": 0.0, "K4V4": 0.3, "K2V2": 0.5}[form.name]

    def at(fraction: float) -> float:
        return guard.error_at(fraction, [0.5, 0.3, 0.1], formats, Known())  # type: ignore[arg-type]

    assert at(0.9) == at(0.5) == 0.0
    assert at(0.3) == pytest.approx(0.3)
    assert at(0.4) == pytest.approx(0.3 * 0.5**0.5)
    assert at(0.2) == pytest.approx(((0.09 + 0.25) / 2) ** 0.5)
    assert at(0.1) == at(0.01) == pytest.approx(0.5)


def test_the_estimate_is_the_error_of_stored_rows():
    """Rounding simulated here is that of pages: the error of one format is that of what the cache gives back."""
    from kvstrata.cache import TieredCache
    from kvstrata.cache.ops.inspect import gather

    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(n, 128, 64, generator=generator).half() for n in (4, 2, 2))
    cache = TieredCache(
        1, 2, 64, budget=0.2, tiers=["K3V2"], policy="uniform", recent_tokens=16, sink_tokens=4, page_tokens=16,
        dtype=torch.float16, max_tokens=256,
    )  # fmt: skip
    cache.append(0, k.transpose(0, 1).unsqueeze(0), v.transpose(0, 1).unsqueeze(0))
    cache.settle()
    sample = guard.Sample.of_tiers(cache, 0, 0, q, k, v, Logits(0.125))
    form = cache.formats[1]
    stored_k, stored_v, positions = gather(cache, 0, [0])
    order = positions[0].argsort(-1).unsqueeze(-1).expand(-1, -1, 64)
    stored_k, stored_v = (x[0].float().gather(1, order) for x in (stored_k, stored_v))
    old = slice(4, 96)  # later pages may be plain still
    centre = sample.centre
    mine = guard._rounded(sample.k, centre, form.k_bits, form.rotate, guard.quant.K_GAIN) + centre
    torch.testing.assert_close(mine[:, old], stored_k[:, old], rtol=2e-3, atol=4e-3)
    mine = guard._rounded(sample.v, None, form.v_bits, form.rotate, guard.quant.V_GAIN)
    torch.testing.assert_close(mine[:, old], stored_v[:, old], rtol=2e-3, atol=4e-3)
    assert 0.05 < sample.error(form) < 1


SHAPE = (2, 64)  # KV heads, D


def sample_of(calibration: LayerCalibration, **options: Any) -> Sample:
    """Random rows of K with the spread and the mean of a calibration, which is given to the sample unless told."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(n, 128, 64, generator=generator) for n in (4, 2, 2))
    spread, mean = calibration.balance[:, None], calibration.centre[:, None]
    k, q = (k + mean) * spread, q / spread.repeat_interleave(2, 0)
    own = dict(balance=calibration.balance, centre=calibration.centre * calibration.balance, plain=(4, 16)) | options
    return Sample(q, k, v, Logits(0.125), rope=(), interleaved=False, ahead=torch.tensor([128]), **own)


def uneven() -> LayerCalibration:
    generator = torch.Generator().manual_seed(1)
    balance = torch.randn(SHAPE, generator=generator).round().clamp(-3, 3).exp2()
    return LayerCalibration(balance, 3 * torch.randn(SHAPE, generator=generator))


def test_the_estimate_is_that_of_a_calibrated_cache():
    """Rows are rounded in the space of the balance, around the centre of the calibration; without them more is lost."""
    from kvstrata.cache import TieredCache
    from kvstrata.cache.ops.inspect import gather

    calibration = uneven()
    own = sample_of(calibration)
    cache = TieredCache(
        1, *SHAPE, budget=0.2, tiers=["K3V2"], policy="uniform", recent_tokens=16, sink_tokens=4, page_tokens=16,
        dtype=torch.float32, max_tokens=256, calibration=Calibration([calibration]),
    )  # fmt: skip
    cache.append(0, *(x.transpose(0, 1).unsqueeze(0) for x in (own.k, own.v)))
    cache.settle()
    *stored, positions = gather(cache, 0, [0])
    order = positions[0].argsort(-1).unsqueeze(-1).expand(-1, -1, 64)
    out = own._attend(*(x[0].float().gather(1, order) for x in stored))
    expected = float((out - own.truth).norm() / own.truth.norm())
    form = cache.formats[1]
    assert own.error(form) == pytest.approx(expected, rel=0.1)
    assert sample_of(calibration, balance=None, centre=None).error(form) > 1.15 * expected
    without = sample_of(calibration, centre=torch.zeros(SHAPE)).error(form)
    assert without > 1.15 * expected
    assert own.error(Format.parse("K3V2", 64, centre=False)) == pytest.approx(without)


def test_sinks_and_recent_tokens_are_exact():
    form, calibration = Format.parse("K2V2", 64), uneven()
    assert sample_of(calibration, plain=(128, 0)).error(form) == 0
    none, recent, both = (sample_of(calibration, plain=plain).error(form) for plain in ((0, 0), (0, 16), (16, 16)))
    assert both < 0.98 * recent < 0.98**2 * none


def test_a_sample_has_the_calibration_of_its_layer():
    from kvstrata.cache import TieredCache

    layers = [LayerCalibration(torch.full(SHAPE, 2.0**i), torch.full(SHAPE, 1.0 + i)) for i in range(2)]
    cache = TieredCache(2, *SHAPE, budget=0.3, calibration=Calibration(layers), max_tokens=256)
    q, k, v = (torch.randn(n, 80, 64) for n in (4, 2, 2))
    for layer, balance, centre in ((0, 1.0, 1.0), (1, 2.0, 4.0)):
        sample = Sample.of_tiers(cache, layer, 0, q, k, v, Logits(0.125))
        assert sample.balance.unique().tolist() == [balance]
        assert sample.centre.unique().tolist() == [centre]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
def test_the_worst_layer_is_reported_with_a_budget_for_all(order: tuple[int, ...], monkeypatch: pytest.MonkeyPatch):
    """A budget is enough where it halves the error that is warned of; a layer below the limit asks for none."""
    errors = {0: [0.9, 0.4, 0.2], 1: [0.6, 0.2, 0.2], 2: [0.4, 0.4, 0.4]}  # at 0.25, from 0.3 and from 0.5
    prices = [16384, 8500, 2400]
    cache = SimpleNamespace(
        budget=SimpleNamespace(amount=0.25, token_bytes=256, page_price=prices), page_tokens=64, head_dim=64,
        formats=[Format.parse(name, 64) for name in ("K16V16", "K8V8", "K2V2")],
    )  # fmt: skip
    monkeypatch.setattr(Sample, "of_tiers", lambda cache, layer, *given: layer)
    monkeypatch.setattr(guard, "error_at", lambda x, prices, formats, layer: errors[layer][(x >= 0.3) + (x >= 0.5)])
    own, rows = Guard(cache, 0), torch.zeros(1, 2, 80, 64)
    for layer in order:
        own.add(layer, rows, rows, rows, torch.ones(1, 80, dtype=torch.bool), Logits(0.125))
    assert (own.worst, own.layer, own.advice) == (0.9, 0, 0.5)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
def test_the_worst_window_is_reported_with_a_budget_for_all(order: tuple[int, ...]):
    formats = {x: Format.parse(name, 64) for x, name in ((0.25, "K2V2"), (0.3, "K3V2"), (0.35, "K4V3"))}
    own = WindowGuard(0, 0.25)
    for place in order:
        factor = (1.0, 0.6, 0.5)[place]
        known = SimpleNamespace(error=lambda form, by=factor: by * {2: 0.9, 3: 0.4, 4: 0.2}[form.k_bits])
        own.add(place, formats[0.25], known, formats.get)
    assert (own.worst, own.where) == (0.9, "layer 0, a sliding window in K2V2")
    assert own.advice == 0.35
