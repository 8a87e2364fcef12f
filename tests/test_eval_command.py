"""The commands `kvstrata eval` and `kvstrata advise` on a tiny random model."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from typer.testing import CliRunner

from eval_model import Letters, model
from kvstrata.hf import StrataCache
from kvstrata.quant.calibration import Calibration, LayerCalibration
from kvstrata.tools.cli import app
from kvstrata.tools.eval import advise, plot, render, results, texts
from kvstrata.tools.eval import model as models


@pytest.fixture
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that is loaded fails the test."""

    def load(name: str | None, device: object = "cpu", dtype: object = None) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(models, "load", load)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--budget", "7"), "budget: expected a fraction"),
        (("--tiers", "K4V4,K9V9"), "tiers: expected formats such as 'K4V2', got 'K9V9'"),
        (("--policy", "best"), "policy: expected one of"),
        (("--packed", "K16V16"), "--packed: expected a quantised format such as K4V4, got 'K16V16'"),
        (("--packed", "K9V9"), "--packed: expected a format such as K4V4, got 'K9V9'"),
        (("--calibration", "a.safetensors"), "--calibration: expected a calibration file, got 'a.safetensors'"),
        (("--chunk", "0"), "--chunk"),
        (("--tokens", "0"), "--tokens"),
    ],
)
def test_bad_requests_are_refused_before_a_model_is_loaded(
    arguments: tuple[str, ...], message: str, no_model: None
) -> None:
    done = CliRunner().invoke(app, ["eval", "--quick", *arguments])
    assert done.exit_code == 2, done.output
    assert message in done.output


@pytest.mark.parametrize("name", ["eval", "advise", "calibrate"])
def test_a_file_that_cannot_be_written_is_refused_before_a_model_is_loaded(
    name: str, no_model: None, tmp_path: Path
) -> None:
    for out, message in ((tmp_path, "a file, got the folder"), (tmp_path / "none" / "x", "a folder that exists, got")):
        done = CliRunner().invoke(app, [name, "--out", str(out)])
        assert done.exit_code == 2, done.output
        assert f"{message} '{out}'" in done.output


def test_advise_refuses_a_text_of_which_nothing_is_compressed(no_model: None) -> None:
    done = CliRunner().invoke(app, ["advise", "--tokens", "97"])
    assert done.exit_code == 2, done.output
    assert "--tokens: expected at least 98, half of them a prompt longer than the 48 tokens" in done.output
    assert "got 97" in done.output


DRAW, ADVISE = plot.plot, advise.advise
_ADVICE: dict[str, advise.Advice] = {}


def _advise_once(model: object, ids: torch.Tensor, sensitivity: object, bound: float, **options) -> advise.Advice:
    """Advice on the tiny model, searched for once per bound: what is printed of it differs from test to test."""
    tick = options.pop("tick")
    key = repr((ids.shape, sensitivity, bound, options))
    if key not in _ADVICE:
        _ADVICE[key] = ADVISE(model, ids, sensitivity, bound, tick=tick, **options)
    return _ADVICE[key]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """`kvstrata` with the tiny model in place of a real one, and a text of its letters."""

    def load(name: str | None, device: torch.device, dtype: torch.dtype | None = None) -> tuple[object, Letters]:
        return model().to(
            device=device, dtype=dtype or (torch.float32 if device.type == "cpu" else torch.float16)
        ), Letters()

    monkeypatch.setattr(models, "load", load)
    monkeypatch.setattr(plot, "plot", lambda quality, path: path)  # draws for half a second
    monkeypatch.setattr(advise, "advise", _advise_once)
    (tmp_path / "words.txt").write_text(texts.text("prose")[:6000])

    def run(*arguments: str):
        return CliRunner().invoke(app, [*arguments, "--text", str(tmp_path / "words.txt")])

    return run


def test_eval_measures_and_resumes(command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plot, "plot", DRAW)
    out = tmp_path / "q.json"
    arguments = ("eval", "--quick", "--tokens", "600", "--budget", "0.5", "--out", str(out))
    first = command(*arguments)
    assert first.exit_code == 0, first.output
    assert "kvstrata" in first.output
    assert "KIVI-style" in first.output
    assert out.with_suffix(".png").exists()
    kept = results.load(out)
    assert {row.kind for row in kept.rows} >= {"exact", "ours", "baseline"}
    assert kept.needles
    second = command(*arguments)
    assert second.exit_code == 0, second.output
    assert len(results.load(out).rows) == len(kept.rows)
    refused = CliRunner().invoke(app, ["eval", "--text", "no such file"])
    assert refused.exit_code == 2
    assert "text: expected" in refused.output


def test_the_command_prints_rows_as_json(command, tmp_path: Path) -> None:
    out = tmp_path / "q.json"
    short = ("--tokens", "300", "--budget", "0.5", "--no-needles", "--no-peers", "--chunk", "50")
    made = command("eval", *short, "--out", str(out), "--json")
    assert made.exit_code == 0, made.output
    found = json.loads(made.stdout)
    assert found == json.loads(out.read_text())
    assert [row["name"] for row in found["rows"]] == ["16 bit", "kvstrata"]
    assert "Saved:" in made.stderr


def test_the_command_has_the_options_of_a_cache(command, tmp_path: Path) -> None:
    out = tmp_path / "q.json"
    short = ("--tokens", "300", "--budget", "0.5", "--no-needles", "--no-peers", "--out", str(out))
    made = command("eval", *short, "--model", str(tmp_path / "Tiny.gguf"), "--settle-every", "16", "--chunk", "32")
    assert made.exit_code == 0, made.output
    made = command("eval", *short, "--model", str(tmp_path / "Tiny.gguf"), "--max-tokens", "900", "--chunk", "32")
    assert made.exit_code == 0, made.output
    found = results.load(out)
    assert found.model == "Tiny"  # no folder of this machine
    _, first, second = found.rows
    assert (first.name, first.options["settle_every"], first.options["recent_tokens"]) == ("kvstrata", 16, 28)
    assert (second.name, second.options["max_tokens"]) == ("kvstrata, max_tokens 900", 900)
    assert second.bytes > first.bytes  # longer tables


def test_advise_writes_the_smallest_budget_within_the_bound(command, tmp_path: Path) -> None:
    out = tmp_path / "advice.json"
    made = command("advise", "--tokens", "512", "--kl", "0.5", "--out", str(out))
    assert made.exit_code == 0, made.output
    assert 0 < json.loads(out.read_text())["budget"] <= 0.6
    none = command("advise", "--tokens", "512", "--kl", "1e-9", "--out", str(tmp_path / "none.json"))
    assert none.exit_code == 2
    assert "--kl: expected a positive number of nats, got -1" in command("advise", "--kl", "-1").output
    assert not (tmp_path / "none.json").exists()


def test_calibrate_writes_balance_centres_and_sensitivities(command, tmp_path: Path) -> None:
    out = tmp_path / "calibration.safetensors"
    made = command("calibrate", "--tokens", "100", "--sensitivity", "--out", str(out), "--json")
    assert made.exit_code == 0, made.output
    assert [layer["layer"] for layer in json.loads(made.stdout)["layers"]] == [0, 1]
    assert "Written:" in made.stderr
    calibration = Calibration.load(out)
    assert len(calibration.layers) == len(calibration.k_sensitivity) == len(calibration.v_sensitivity) == 2
    assert all(layer.balance is not None and layer.centre is not None for layer in calibration.layers)
    advice = tmp_path / "advice.json"
    made = command("advise", "--tokens", "512", "--kl", "0.5", "--calibration", str(out), "--out", str(advice))
    assert made.exit_code == 0, made.output
    assert json.loads(advice.read_text())["calibration"] == str(out)
    assert StrataCache.from_file(model().config, advice).calibration is not None
    wrong = command("advise", "--calibration", str(advice))
    assert wrong.exit_code == 2, wrong.output


def test_calibrate_keeps_sensitivities_of_layers_without_effect(
    command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    net, out = model(), tmp_path / "calibration.safetensors"
    with torch.no_grad():
        for layer in net.model.layers:
            layer.self_attn.o_proj.weight.zero_()
    monkeypatch.setattr(models, "load", lambda *_: (net, Letters()))
    made = command("calibrate", "--tokens", "100", "--sensitivity", "--device", "cpu", "--out", str(out))
    assert made.exit_code == 0, made.output
    calibration = Calibration.load(out)
    assert calibration.k_sensitivity == calibration.v_sensitivity
    assert max(calibration.k_sensitivity) < 1e-5
    assert len(calibration.k_sensitivity) == 2


def test_a_configuration_is_read_from_any_folder(command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert command("calibrate", "--tokens", "64", "--out", "c.safetensors").exit_code == 0
    made = command("advise", "--tokens", "128", "--kl", "9", "--calibration", "c.safetensors", "--out", "a.json")
    assert made.exit_code == 0, made.output
    monkeypatch.chdir(tmp_path.parent)
    assert StrataCache.from_file(model().config, tmp_path / "a.json").calibration is not None


@pytest.mark.parametrize("arguments", [("eval", "--quick"), ("eval", "--packed", "K4V4"), ("advise",)], ids=" ".join)
def test_a_calibration_of_another_model_is_refused(command, tmp_path: Path, arguments: tuple[str, ...]) -> None:
    file, out = tmp_path / "c.safetensors", tmp_path / "out.json"
    for layers, heads in ((1, 2), (2, 4)):
        Calibration([LayerCalibration(torch.ones(heads, 64))] * layers).save(file)
        done = command(*arguments, "--tokens", "128", "--calibration", str(file), "--out", str(out))
        assert done.exit_code == 2, done.output
        assert "calibration: expected 2 layers of 2 KV heads and head_dim 64, got one with" in done.output
        assert not out.exists()


def test_a_gguf_file_is_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvstrata.tools.eval import model

    file = tmp_path / "tiny.gguf"
    with pytest.raises(LookupError, match=r"--model: expected a .gguf file that exists"):
        model.load(str(file))
    file.write_bytes(b"")
    assert model._place(str(file)) == (str(tmp_path), {"gguf_file": "tiny.gguf"})
    assert model._place("owner/name") == ("owner/name", {})


def test_the_command_prints_advice_as_json(command, tmp_path: Path) -> None:
    out = tmp_path / "advice.json"
    made = command("advise", "--tokens", "512", "--kl", "0.5", "--out", str(out), "--json")
    assert made.exit_code == 0, made.output
    found = json.loads(made.stdout)
    assert found["configuration"] == json.loads(out.read_text())
    assert found["bound"] == 0.5
    assert len(found["sensitivity"]["k"]) == len(found["sensitivity"]["v"]) == 2  # layers
    assert found["sensitivity"]["family"] in advise.TIERS
    kept = [step["budget"] for step in found["steps"] if step["fits"]]
    assert found["configuration"]["budget"] == min(kept)
    assert "Written:" in made.stderr
    assert "━" not in made.stderr  # bars are for terminals

    def strict(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    none = command("advise", "--tokens", "512", "--kl", "1e-9", "--out", str(tmp_path / "none.json"), "--json")
    assert none.exit_code == 2
    assert json.loads(none.stdout, parse_constant=strict)["configuration"] is None
    assert "--kl: expected a bound that some budget keeps" in none.stderr


def test_the_command_compares_widths(command, tmp_path: Path) -> None:
    out = tmp_path / "bits.json"
    made = command("eval", "--bits", "2.5", "--tokens", "300", "--chunk", "50", "--out", str(out))
    assert made.exit_code == 0, made.output
    kept = results.load(out)
    names = ["16 bit", "tiers, 2.5 bits", "uniform K3V2, 2.5 bits", "simulated K3V2, 2.5 bits"]
    assert [row.name for row in kept.rows] == names
    assert not kept.needles
    packed, simulated = kept.rows[2:]
    assert simulated.fraction == pytest.approx(packed.fraction, rel=0.3)  # no tables, no pages that are not full
    assert 0.3 < simulated.mean_kl / packed.mean_kl < 3
    ((name, against, *_),) = render.packed(kept, {})[1]
    assert (name, against) == ("uniform K3V2, 2.5 bits", "simulated K3V2")
    bare = tmp_path / "bare.json"
    command("eval", "--bits", "2.5", "--tokens", "100", "--chunk", "50", "--out", str(bare), "--no-peers")
    assert [row.name for row in results.load(bare).rows] == names[:3]
    assert command("eval", "--bits", "5", "--out", str(out)).exit_code == 2


def mean_width(row: results.Row) -> float:
    """Mean code bits per value of the tokens that are not plain."""
    widths = {name: sum(map(int, re.findall(r"\d+", name))) / 2 for name in row.tiers if name != "K16V16"}
    return sum(row.tiers[name] * width for name, width in widths.items()) / sum(row.tiers[name] for name in widths)


def test_the_command_measures_a_calibration(command, tmp_path: Path) -> None:
    """With a calibration tiers stand beside themselves with it, at the same width, as budgets do."""
    out, file = tmp_path / "bits.json", tmp_path / "c.safetensors"
    assert command("calibrate", "--tokens", "64", "--sensitivity", "--out", str(file)).exit_code == 0
    given = ("--tokens", "300", "--chunk", "50", "--calibration", str(file), "--no-peers", "--no-needles")
    assert command("eval", "--bits", "2.5", *given, "--out", str(out)).exit_code == 0
    made = command("eval", "--budget", "0.4", *given, "--out", str(out))
    assert made.exit_code == 0, made.output
    _, plain, other, _, _, budget, calibrated = results.load(out).rows
    assert (plain.name, other.name) == ("tiers, 2.5 bits", "tiers, calibrated, 2.5 bits")
    assert (budget.name, calibrated.name) == ("kvstrata", "kvstrata, calibrated")
    for one, two in ((plain, other), (budget, calibrated)):
        assert "calibration" not in one.options
        assert two.options["calibration"] == "sensitivity"
        assert two.bytes == pytest.approx(one.bytes, rel=0.05)  # pages are not all full
        assert two.kl != one.kl
    assert mean_width(other) == pytest.approx(mean_width(plain), abs=0.02)


def test_the_command_compares_packed_pages_with_tiers(command, tmp_path: Path) -> None:
    """Tiers get as many bytes as packed pages with a tail, and the same calibration."""
    out, file = tmp_path / "packed.json", tmp_path / "c.safetensors"
    assert command("calibrate", "--tokens", "64", "--out", str(file)).exit_code == 0
    given = ("--packed", "K4V4", "--tokens", "512", "--chunk", "64", "--calibration", str(file))
    made = command("eval", *given, "--out", str(out))
    assert made.exit_code == 0, made.output
    _, packed, tiers = results.load(out).rows
    assert (packed.name, tiers.name) == ("packed K4V4, tail 64, calibrated", "tiers at the bytes of K4V4, calibrated")
    assert 0.9 * packed.fraction < tiers.fraction <= packed.fraction  # pages are paid whole
    assert packed.prompt == tiers.prompt == 0
    assert 0 < packed.mean_kl < 1


def test_the_command_takes_stretches_of_a_text(command, tmp_path: Path) -> None:
    """The first stretch is what one alone would be; all of them have narrower intervals and a row of their own."""
    out = tmp_path / "stretches.json"
    given = ("eval", "--no-peers", "--bits", "2", "--tokens", "200", "--chunk", "50", "--text", "inspect")
    for more in ((), ("--stretches", "3"), ("--stretches", "3")):  # the last finds all of it there
        made = command(*given, "--out", str(out), *more)
        assert made.exit_code == 0, made.output
    kept = results.load(out)
    assert [row.length for row in kept.rows] == ["200", "200", "3 x 200", "3 x 200"]
    one, many = kept.rows[1], kept.rows[3]
    assert [len(row) for row in many.nll] == [4] * 3 * len(kept.texts)
    for text in range(len(kept.texts)):
        assert many.nll[3 * text] == pytest.approx(one.nll[text], rel=1e-3)
        mean = sum(map(sum, many.nll[3 * text : 3 * text + 3])) / (3 * sum(many.count))
        assert many.perplexity(text) == pytest.approx(math.exp(mean))
    assert kept.exact(many) is kept.rows[2]
    assert "3 x 200" in render.table(kept, {"stretches": "3"}).document()
    assert "| 200 |" not in render.table(kept, {"stretches": "3"}).document()
    much = ("--tokens", "1000", "--stretches", "2000", "--out", str(tmp_path / "much.json"))
    assert "at least 2000000 tokens" in command(*given[:4], *much).output


def test_the_command_takes_a_dtype(command, tmp_path: Path) -> None:
    out = tmp_path / "half.json"
    given = ("eval", "--bits", "2", "--tokens", "100", "--chunk", "50", "--out", str(out))
    assert command(*given, "--dtype", "float16").exit_code == 0
    assert results.load(out).model.endswith(" in float16")
    mixed = command(*given)
    assert mixed.exit_code == 2
    assert " in float16 on " in mixed.output
    assert "--dtype: expected float32, float16 or bfloat16, got 'int8'" in command(*given, "--dtype", "int8").output
