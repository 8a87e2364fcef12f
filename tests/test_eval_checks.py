"""What `kvstrata eval` and `advise` refuse, leave out or measure again, instead of a figure that is not true."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from transformers import DynamicCache
from typer.testing import CliRunner

from eval_model import Letters, model, tokens
from kvstrata.hf import StrataCache
from kvstrata.tools.cli import app
from kvstrata.tools.eval import contenders, measure, needle, plot, quality, results, texts
from kvstrata.tools.eval import model as models

SHORT = ("--tokens", "300", "--budget", "0.5", "--chunk", "50", "--no-peers")


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """`kvstrata` with the tiny model in place of a real one, over its words in a file; ``seed`` chooses the model."""
    (tmp_path / "words.txt").write_text(texts.text("prose")[:6000])
    monkeypatch.setattr(plot, "plot", lambda quality, path: path)

    def run(*arguments: str, seed: int = 0, context: int = 4096, scale: float = 1.0, text: str = "words.txt") -> Any:
        net = model(seed)
        net.config.max_position_embeddings = context
        with torch.no_grad():
            net.lm_head.weight.mul_(scale)
        monkeypatch.setattr(models, "load", lambda name, device, dtype=None: (net.to(device), Letters()))
        return CliRunner().invoke(app, [*arguments, "--text", str(tmp_path / text)])

    return run


def refused(done: Any) -> str:
    assert done.exit_code == 2, done.output
    return " ".join(done.output.splitlines()[-1:])


def test_another_calibration_is_measured_again(command, tmp_path: Path) -> None:
    files = [str(tmp_path / name) for name in ("one.safetensors", "two.safetensors")]
    for file, length in zip(files, ("64", "200"), strict=True):
        assert command("calibrate", "--tokens", length, "--out", file).exit_code == 0
    found = []
    for file in (*files, files[1]):
        done = command("eval", *SHORT, "--no-needles", "--out", str(tmp_path / "q.json"), "--calibration", file)
        assert done.exit_code == 0, done.output
        _, plain, row = results.load(tmp_path / "q.json").rows
        assert (row.name, plain.calibration) == ("kvstrata, calibrated", "")
        found.append((row.calibration, row.nll))
    assert found[0][0] != found[1][0]
    assert found[0][1] != found[1][1]
    assert found[1] == found[2]


def test_results_of_another_text_or_model_are_not_continued(command, tmp_path: Path) -> None:
    again = ("eval", *SHORT, "--no-needles", "--out", str(tmp_path / "q.json"))
    assert command(*again).exit_code == 0
    before = (tmp_path / "q.json").read_text()
    assert "--out: expected a new file, or results of the same model" in refused(command(*again, seed=1))
    (tmp_path / "words.txt").write_text(texts.text("prose")[1000:7000])
    assert "results of the same text words" in refused(command(*again))
    assert (tmp_path / "q.json").read_text() == before
    (tmp_path / "bytes.json").write_bytes(b"\xc9\xff")
    assert "bytes.json: not a result of kvstrata eval" in refused(command(*again[:-1], str(tmp_path / "bytes.json")))


def test_needles_have_the_options_of_the_caches(command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def ask(net: object, task: object, cache: Any) -> tuple[bool, float]:
        if isinstance(cache, StrataCache):
            seen.append((cache.options.get("tiers"), cache.options.get("policy"), cache.calibration is not None))
        return True, 0.0

    monkeypatch.setattr(needle, "ask", ask)
    file = str(tmp_path / "c.safetensors")
    assert command("calibrate", "--tokens", "64", "--out", file).exit_code == 0
    given = ("eval", "--quick", *SHORT, "--policy", "recency", "--tiers", "K4V4,K2V2", "--calibration", file)
    again = (*given, "--out", str(tmp_path / "q.json"))
    assert command(*again).exit_code == 0
    assert seen == [(["K4V4", "K2V2"], "recency", False)] * 2 + [(["K4V4", "K2V2"], "recency", True)] * 2
    assert command(*again).exit_code == 0
    assert len(seen) == 4
    assert command(*again, "--settle-every", "8").exit_code == 0  # other options: asked again
    assert len(seen) == 8
    assert len(results.load(tmp_path / "q.json").needles) == 3


def test_texts_longer_than_the_context(command, tmp_path: Path) -> None:
    """Refused if asked for; a default length becomes the context."""
    out = ("--out", str(tmp_path / "q.json"))
    for name in ("eval", "advise", "calibrate"):
        said = refused(command(name, *out, "--tokens", "300", context=256))
        assert "--tokens: expected at most 256, the context of this model, got 300" in said
    done = command("eval", *SHORT[2:], "--no-needles", *out, context=256)
    assert done.exit_code == 0, done.output
    assert "Texts of 256 tokens: this model's context is 256." in done.output
    assert {row.tokens for row in results.load(tmp_path / "q.json").rows} == {256}
    assert command("calibrate", *out, context=256).exit_code == 0


def test_budgets_below_the_narrowest_tier(command, tmp_path: Path) -> None:
    """Refused if asked for, before anything is measured; a default one is left out."""
    out = tmp_path / "q.json"
    said = refused(command("eval", "--tokens", "300", "--no-needles", "--budget", "0.1", "--out", str(out)))
    assert "--budget 0.1: budget: expected more than" in said
    assert not out.exists()
    said = refused(command("eval", *SHORT, "--max-tokens", "64", "--out", str(out)))
    assert "--max-tokens: expected at least the 300 of --tokens, got 64" in said
    done = command(
        "eval", "--quick", "--tokens", "300", "--no-needles", "--no-peers", "--tiers", "K4V4", "--out", str(out)
    )
    assert done.exit_code == 0, done.output
    assert "Without a budget of 0.25: budget: expected more than" in " ".join(done.output.split())
    assert [row.budget for row in results.load(out).rows] == [None, 0.5]


def test_a_model_without_finite_logits_is_refused(command, tmp_path: Path) -> None:
    for name in ("eval", "advise", "calibrate"):
        said = refused(command(name, "--tokens", "300", "--out", str(tmp_path / "x.json"), scale=float("nan")))
        assert "expected finite logits, got NaN in float32; another --dtype may help" in said
    net = model()
    net.model.embed_tokens.weight.data[95] = torch.nan
    ids = tokens(80).clamp(max=94)
    ids[0, 60] = 95
    with pytest.raises(ValueError, match="model: expected finite logits, got NaN by token 80"):
        measure.decode(net, ids, DynamicCache(config=net.config), chunk=40, keep=True)


def test_nearly_equal_first_choices_agree_with_themselves() -> None:
    """Their log-probabilities are the same in fp16; a first chunk of one token predicts nothing."""
    net, ids = model(), tokens(120)
    with torch.no_grad():
        net.lm_head.weight.mul_(1e-4)
    for chunk in (40, 1):
        _, exact = measure.decode(net, ids, DynamicCache(config=net.config), chunk=chunk, keep=True)
        scores, _ = measure.decode(net, ids, DynamicCache(config=net.config), chunk=chunk, exact=exact)
        assert min(scores.count) > 0
        assert sum(scores.agree[0]) == sum(scores.count) == 119
        assert abs(sum(scores.kl[0])) < 1e-3


def test_float32_rows_count_as_16_bit() -> None:
    net, ids = model(), tokens(400)
    for budget in (0.5, 1.0):
        cache = StrataCache(net.config, budget=budget)
        net(ids, past_key_values=cache)
        full = 400 * 2 * 2 * 2 * 64 * 2  # layers, K and V, heads, D, bytes
        assert contenders.full_bytes(cache) == full
        assert contenders.reported_bytes(cache) < full * (1.3 if budget == 1.0 else 1.0)


def test_advice_is_of_budgets_that_hold(command, tmp_path: Path) -> None:
    """A text below the floor shows the KL of the floor at every budget, however small."""
    out = tmp_path / "advice.json"
    done = command("advise", "--tokens", "400", "--kl", "100", "--out", str(out), "--json")
    assert done.exit_code == 0, done.output
    steps = json.loads(done.stdout)["steps"]
    kept = [step for step in steps if step["fits"]]
    short = [step for step in steps if step["holds_from"]]
    assert kept
    assert short
    assert all(step["fraction"] <= step["budget"] for step in kept)
    assert all(step["fraction"] > step["budget"] and step["holds_from"] > 400 for step in short)
    assert json.loads(out.read_text())["budget"] == min(step["budget"] for step in kept)
    assert "not kept: the text is too short, the budget holds from" in " ".join(done.stderr.split())


def test_rows_without_a_calibration_do_not_depend_on_one() -> None:
    state = results.Quality({}, "tiny", ["words"])
    net, ids = model(), tokens(200)
    wanted = [contenders.strata(0.5, **contenders.small_pages())]
    for digest in ("", "a"):
        quality.run(net, ids, wanted, state, prompt=100, chunk=50, calibration=digest)
    assert [row.calibration for row in state.rows] == ["", ""]
