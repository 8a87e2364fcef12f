"""`kvstrata generate` on a tiny random model in a folder."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from typer.testing import CliRunner

from hf_model import SIZES, make
from kvstrata.tools.cli import app


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose words are w0 to w125, a text of 200 of them, and settings that compress it."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    path = tmp_path_factory.mktemp("model")
    words = {f"w{i}": i for i in range(126)} | {"<unk>": 126, "<pad>": 127}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", pad_token="<pad>").save_pretrained(path)
    make("llama").save_pretrained(path)
    (path / "before.txt").write_text(" ".join(f"w{i % 120}" for i in range(200)))
    (path / "settings.json").write_text(json.dumps(dict(budget=0.5, recent_tokens=16, page_tokens=16)))
    return path


def generate(folder: Path, *arguments: str, new: int = 12) -> Any:
    return CliRunner().invoke(app, ["generate", *arguments, "--model", str(folder), "--max-new-tokens", str(new)])


def after_a_text(folder: Path) -> list[str]:
    return ["w3", "--context", str(folder / "before.txt"), "--settings", str(folder / "settings.json"), "--compare"]


def test_compare_prints_a_table(folder: Path) -> None:
    done = generate(folder, "w3 w4 w5", "--compare", "--budget", "1")
    assert done.exit_code == 0, done.output
    assert "3 + 12" in done.output
    assert "the same text" in done.output
    assert "A short text" not in done.output
    done = generate(folder, *after_a_text(folder))
    assert done.exit_code == 0, done.output
    assert "201 + 12" in done.output
    assert "K4V4" in done.output
    assert "first difference" in done.output
    done = generate(folder, "w3 w4 w5")
    assert "A short text: the budget of 0.25 holds from" in " ".join(done.output.split())


def test_json_output_has_text_speed_bytes_and_tiers(folder: Path) -> None:
    done = generate(folder, *after_a_text(folder), "--json")
    found = json.loads(done.stdout)
    assert (found["budget"], found["prompt_tokens"], found["new_tokens"]) == (0.5, 201, 12)
    assert len(found["text"].split()) == 12
    assert found["tokens_per_s"] > 0
    assert found["cache_bytes"] / found["full_bytes"] == pytest.approx(found["fraction"])
    assert found["tiers"]["K4V4"] > 0
    assert sum(found["tiers"].values()) == pytest.approx(1)
    ours, theirs = found["text"].split(), found["compare"]["text"].split()
    differ = [i for i, (a, b) in enumerate(zip(ours, theirs, strict=True), 1) if a != b]
    assert found["compare"]["first_difference"] == (differ[0] if differ else None)
    assert "prompt + new tokens" in done.stderr
    found = json.loads(generate(folder, "w3", "--json", new=1).stdout)
    assert (found["compare"], found["tokens_per_s"]) == (None, None)
    assert found["note"].startswith("A short text")


def test_bad_arguments_are_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = folder / "broken.json"
    broken.write_text("{budget")
    for wrong, said in (
        (["--budget", "2"], "budget: expected"),
        (["--device", "tpu"], "Invalid value for '--device'"),
        (["--settings", str(broken)], "broken.json"),
    ):
        done = generate(folder, "w3", *wrong)
        assert done.exit_code == 2, done.output
        assert said in done.output
    done = generate(folder / "nowhere", "w3")
    assert done.exit_code == 2, done.output
    assert "no such folder" in done.output
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    done = generate(folder, "w3", "--device", "cuda")
    assert (done.exit_code, done.stderr) == (2, "kvstrata: --device cuda: torch sees no CUDA device\n")


def test_a_context_that_is_no_text_is_refused_in_one_line(folder: Path) -> None:
    binary = folder / "binary"
    binary.write_bytes(b"\x00\xff\xfe")
    done = generate(folder, "w3", "--context", str(binary))
    assert done.exit_code == 2, done.output
    assert done.stderr.startswith("kvstrata: --context: expected a text file in UTF-8, got ")
    assert len(done.stderr.splitlines()) == 1


def one_line(done: Any) -> str:
    """The line of a refused request."""
    assert done.exit_code == 2, done.output
    assert len(done.stderr.splitlines()) == 1, done.stderr
    return done.stderr.removeprefix("kvstrata: ").strip()


def test_requests_without_an_answer_are_refused_in_one_line(folder: Path, tmp_path: Path) -> None:
    for empty in ("", "  "):
        assert one_line(generate(folder, empty)) == "prompt: expected at least one token, got none"
    long = "--max-new-tokens: expected fewer than the 1024 tokens of this model, got 1024"
    assert one_line(generate(folder, "w3", new=1024)) == long
    arguments = ["generate", "-", "--model", str(folder)]
    done = CliRunner().invoke(app, arguments, input=b"w3 \xff")
    assert one_line(done).startswith("prompt: expected text in UTF-8 on standard input, got ")
    settings = tmp_path / "settings.json"
    settings.write_text(json.dumps(dict(format="K4V4")))
    said = one_line(generate(folder, "w3", "--settings", str(settings)))
    assert said.startswith("--settings: expected the arguments of a budget, got a format in ")
    settings.write_bytes(b"\xff\xfe")
    said = one_line(generate(folder, "w3", "--settings", str(settings)))
    assert said.startswith(f"path: expected a JSON object of arguments in {settings}, got ")


@pytest.mark.parametrize("command", ["generate", "advise", "eval"])
def test_models_that_cannot_be_compressed_are_refused_in_one_line(
    folder: Path, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Heads of 24 values, an encoder-decoder model, a model without a tokenizer, and an empty folder."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, T5Config, T5ForConditionalGeneration

    monkeypatch.chdir(tmp_path)
    arguments = ["w3"] if command == "generate" else ["--text", str(folder / "before.txt"), "--tokens", "100"]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    small = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES, head_dim=24))
    t5 = T5ForConditionalGeneration(T5Config(vocab_size=128, d_model=32, d_kv=16, d_ff=32, num_layers=1, num_heads=2))
    for name, model, said in (
        ("small", small, "LlamaForCausalLM: config: expected layers to compress, got head_dim 24, not a multiple of"),
        ("t5", t5, "--model: expected a causal language model, got 't5' with a T5Config"),
        ("bare", small, "Couldn't instantiate the backend tokenizer from one of: (1) a `tokenizers` library"),
    ):
        model.save_pretrained(tmp_path / name)
        if name != "bare":
            tokenizer.save_pretrained(tmp_path / name)
        assert said in one_line(CliRunner().invoke(app, [command, *arguments, "--model", name]))
    (tmp_path / "empty").mkdir()
    done = CliRunner().invoke(app, [command, *arguments, "--model", "empty"])
    assert one_line(done) == "--model: expected a folder with a config.json, got 'empty'"


@pytest.mark.parametrize("command", ["advise", "eval"])
def test_a_text_that_is_none_is_refused_in_one_line(folder: Path, command: str) -> None:
    binary = folder / "binary"
    binary.write_bytes(b"w3 \xff" * 1000)
    done = CliRunner().invoke(app, [command, "--text", str(binary), "--tokens", "100", "--model", str(folder)])
    assert one_line(done).startswith(f"text: expected a text file in UTF-8, got '{binary}' (invalid start byte at")


@pytest.mark.parametrize("command", ["generate", "advise"])
def test_a_model_with_its_own_attention_is_refused_in_one_line(
    folder: Path, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoTokenizer, FalconConfig, FalconForCausalLM

    monkeypatch.chdir(tmp_path)
    config = FalconConfig(vocab_size=128, hidden_size=64, num_hidden_layers=1, num_attention_heads=2)
    FalconForCausalLM(config).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(folder).save_pretrained(tmp_path)
    arguments = ["w3"] if command == "generate" else ["--text", str(folder / "before.txt"), "--tokens", "100"]
    done = CliRunner().invoke(app, [command, *arguments, "--model", str(tmp_path)])
    assert done.exit_code == 2, done.output
    assert "FalconForCausalLM" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_both_texts_alternate(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some tokens of one, some of the other, after a short text over each; as if each had been written alone."""
    from transformers import AutoModelForCausalLM

    from kvstrata.hf import StrataCache

    calls = []
    run = AutoModelForCausalLM.from_pretrained(folder).__class__.generate
    monkeypatch.setattr(
        "transformers.LlamaForCausalLM.generate",
        lambda self, ids, **given: (
            calls.append((type(given["past_key_values"]), given["max_new_tokens"])),
            run(self, ids, **given),
        )[1],
    )
    found = json.loads(generate(folder, *after_a_text(folder), "--json", "--dtype", "float32").stdout)
    assert [new for _, new in calls] == [2, 2, 8, 8, 4, 4]
    assert [kind is StrataCache for kind, _ in calls] == [True, False] * 3
    assert found["new_tokens"] == found["compare"]["new_tokens"] == 12
    alone = json.loads(generate(folder, *after_a_text(folder)[:-1], "--json").stdout)
    assert alone["text"] == found["text"]


def test_without_numba_a_hint_says_so_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "numba" else find(name, *rest))
    done = generate(folder, "w3", "--device", "cpu")
    assert done.stderr.count("pip install 'kvstrata[cpu]'") == 1


def test_a_model_with_windows_only(tmp_path: Path, folder: Path) -> None:
    from transformers import AutoModelForCausalLM, MistralConfig

    torch.manual_seed(0)
    net = AutoModelForCausalLM.from_config(MistralConfig(**SIZES, head_dim=32, sliding_window=256))
    shutil.copytree(folder, tmp_path / "window", ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    net.save_pretrained(tmp_path / "window")
    done = generate(tmp_path / "window", "w3", "--context", str(folder / "before.txt"), "--budget", "0.5", "--compare")
    assert done.exit_code == 0, done.output
    assert "201 + 12" in done.output


def test_float32_rows_count_as_16_bit(folder: Path) -> None:
    """Also those that a budget of 1 keeps as they are."""
    found = []
    for budget in ("1", "0.5"):
        done = generate(folder, "w3", "--context", str(folder / "before.txt"), "--budget", budget, "--json", new=1)
        assert done.exit_code == 0, done.output
        found.append(json.loads(done.stdout)["full_bytes"])
    assert found == [201 * 2 * 2 * 2 * 32 * 2] * 2


def test_a_budget_in_bytes_that_is_too_small_is_refused_in_one_line(folder: Path, tmp_path: Path) -> None:
    settings = tmp_path / "settings.json"
    settings.write_text(json.dumps(dict(budget_bytes=60_000, max_tokens=512)))
    done = generate(folder, "w3", "--context", str(folder / "before.txt"), "--settings", str(settings))
    assert "budget: expected at least" in one_line(done)


def test_weights_that_are_missing_or_damaged_are_refused_in_one_line(folder: Path, tmp_path: Path) -> None:
    """Transformers would initialise missing ones at random."""
    more, cut = tmp_path / "more", tmp_path / "cut"
    for path in (more, cut):
        shutil.copytree(folder, path)
    config = json.loads((more / "config.json").read_text())
    config["num_hidden_layers"] += 1
    config.pop("layer_types", None)
    (more / "config.json").write_text(json.dumps(config))
    said = one_line(generate(more, "w3"))
    assert f"--model: expected all weights in '{more}', it lacks 9 of them: model.layers.2.input_layernorm" in said
    weights = (cut / "model.safetensors").read_bytes()
    (cut / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    assert f"--model: expected a causal language model, got '{cut}' with SafetensorError" in one_line(
        generate(cut, "w3")
    )
