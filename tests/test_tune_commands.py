"""`kvstrata tune` and `warmup`."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

optuna = pytest.importorskip("optuna")


from conftest import Watch, invoke  # noqa: E402
from kvstrata import jit  # noqa: E402
from kvstrata.jit import tuned  # noqa: E402
from kvstrata.tools import publish  # noqa: E402
from kvstrata.tools.bench import clock  # noqa: E402
from kvstrata.tools.tune import experiment, problems, render, results, warmup  # noqa: E402
from kvstrata.tools.tune.space import show  # noqa: E402
from tune_toy import entry, put  # noqa: E402

CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("own_cache")
needs_nvrtc = pytest.mark.skipif(jit.missing() is not None, reason=str(jit.missing()))


@needs_nvrtc
def test_warmup_without_a_gpu(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = problems.find("store", "sm_90", CPU, "cuda")[0]
    monkeypatch.setattr(problems, "find", lambda *arguments: [one])
    monkeypatch.setattr(tuned, "SHIPPED", own_cache / "shipped")
    top = [{"kernel": "direct", "threads": threads, "per": 4} for threads in (64, 128)]
    put(own_cache / "tables", "nvidia-test", store=[{**entry(one.case, top[0], **one.shape), "top": top}])
    assert warmup.tables_for("sm_90", None) == ["nvidia-test"]
    assert warmup.tables_for("sm_80", None) == []
    done = invoke("warmup", "store", "--arch", "sm_90", "--jobs", 0, "--json")
    assert done.exit_code == 0, done.output
    said = json.loads(done.stdout)
    assert (said["kernels"], said["failed"], said["tables"]) == (3, {}, ["nvidia-test"])
    from kvstrata.jit import compiler

    monkeypatch.setattr(compiler, "_run_nvrtc", lambda *arguments, **options: pytest.fail("compiled again"))
    for choice in [*top, one.default]:
        for kernel in one.kernels(choice):
            assert jit.compile(kernel.source, kernel.entry, arch="sm_90").code


@needs_nvrtc
def test_warmup_of_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything that prompts, settling and steps of a cache of the given sizes launch; tuned or not, each once."""
    from kvstrata.tools.tune import compiler

    usage = jit.Usage(1, 0, 0, 0)
    built = []
    monkeypatch.setattr(
        compiler, "build", lambda source, entry, arch: built.append((Path(source).name, entry)) or usage
    )
    sizes = ("--head-dim", 32, "--heads", 4, "--kv-heads", 2, "--tiers", "K4V4,K2V2", "--max-tokens", 512)
    done = invoke("warmup", "cache", "--arch", "sm_90", *sizes, "--dtype", "float16", "--jobs", 0, "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["kernels"] == len(built) == len(set(built))
    names = {entry.split("<")[0] for _, entry in built}
    assert {"append_rows", "append_one", "write_last", "quantize_pages", "repack", "survey", "choose"} < names
    assert {"place", "copy_codes", "worklist", "rows", "decode", "combine"} < names
    assert sum(entry.startswith("decode<f16,true") for _, entry in built) >= 1  # mass
    assert {"quantize_pages<f16, 32, 4, 4, 64, true, long long>"} < {entry for _, entry in built}


def test_warmup_names_missing_requirements(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for arguments, message in (
        ((), "kvstrata warmup --arch sm_90"),
        (
            ("nope", "--arch", "sm_90"),
            "nothing to compile for 'nope'; there are: cache, decode, packed, prefill, replay, store",
        ),
        (("cache", "--arch", "sm_90", "--heads", 7), "--heads: expected a multiple of 8, got 7"),
        (("cache", "--arch", "sm_90", "--dtype", "int8"), "--dtype: expected float32"),
        (("cache", "--arch", "sm_90", "--tiers", "K9"), "tiers"),
        (("--arch", "90"), "--arch: expected a name such as sm_90, got '90'"),
    ):
        done = invoke("warmup", *arguments)
        assert done.exit_code == 2
        assert message in done.stderr


@pytest.fixture
def timed_store(watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference takes 1 us a token, give or take 1 %, however many at a time, on a clock of its own."""
    from kvstrata.store import reference

    watch.tick = 1e-7
    watch.drive(clock, experiment)
    store_kv, noise = reference.store_kv, np.random.default_rng(0)

    def timed(tensors, layout):
        watch.sleep(1e-6 * len(tensors.k) * noise.lognormal(0, 0.01))
        return store_kv(tensors, layout)

    monkeypatch.setattr(reference, "store_kv", timed)


@pytest.mark.usefixtures("timed_store")
def test_tune_on_a_cpu(own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    toy = ("tune", "store", "--backend", "reference", "--device", "cpu")
    done = invoke(*toy, "--trials", 2, "--save", "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["rows"][0]["measured"] == 2
    assert "rejected" in done.stderr
    (path,) = Path("results").glob("cpu-*/tune_store.json")
    saved = results.load(path)
    assert results.dumps(saved) == path.read_text() == done.stdout
    assert not (own_cache / "tables").exists(), "the reference is not what auto chooses from"
    done = invoke(*toy, "--trials", 4, "--resume")
    assert "4 of 4" in done.stdout
    (found,) = publish.load_all(Path("results"))
    text = "<!-- kvstrata:tune_store table=configurations -->\n<!-- /kvstrata:tune_store -->\n"
    assert "| 8x128-fp16-512-reference | chunk=64 |" in publish.render_document(text, [found])
    with pytest.raises(LookupError, match="run kvstrata tune decode --save"):
        publish.render_document(text.replace("store", "decode"), [found])


@pytest.mark.usefixtures("timed_store")
def test_experiments_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("kvstrata.tools.tune.cli.SIMULATED", 5)
    done = invoke("tune", "store", "--backend", "reference", "--device", "cpu", "--aa", 1, "--save")
    assert done.exit_code == 0, done.output
    (path,) = Path("results").glob("cpu-*/gate.json")
    gate = results.load(path)
    assert [row.factor for row in gate.rows] == [1.0, 1.05, 1.1] * 3
    assert [row.measured for row in gate.rows[:3]] == pytest.approx([1.0, 1.05, 1.1], abs=0.01), "delays are real"
    assert "| simulated, 5% noise | the same |" in render.table(gate, {}).document()
    assert "gate on" in render.table(gate, {}).document()


def test_experiments_end_with_the_time(watch: Watch) -> None:
    watch.drive(experiment)

    def draw(count: int) -> tuple:
        watch.sleep(0.25)
        return (100 + torch.rand(count).numpy(),) * 2

    assert experiment.rate("x", 1.0, draw, 1000, end=3.5).n == 7, "two draws each"
    assert experiment.rate("x", 1.0, draw, 2, end=0.0).n == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("nope", "--backend", "reference"),
            "nothing to tune in 'nope'; there are: decode, prefill, store",
        ),
        (("nope",), "nothing to tune in 'nope'; there are: decode, prefill, store"),
        (("store", "--only", "zzz", "--backend", "reference"), "no case matches 'zzz'"),
        (("decode", "--backend", "reference"), "--backend reference: expected store"),
        (("store", "--only", "8*", "--save", "--backend", "reference"), "--save with --only"),
        (("store", "--backend", "triton"), "--backend: expected cuda or reference, got 'triton'"),
        (("store", "--device", "cuda"), "--device cuda: torch sees no CUDA device"),
        (("store", "--device", "cpu"), "--backend reference --device cpu tunes a toy"),
    ],
)
def test_bad_requests_get_a_one_line_error(
    arguments: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    done = invoke("tune", *arguments)
    assert done.exit_code == 2
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_without_optuna_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    there = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "optuna" else there(name))
    done = invoke("tune", "store")
    assert done.exit_code == 2
    assert "pip install 'kvstrata[tune]'" in done.stderr


@pytest.mark.parametrize("command", ["tune", "warmup"])
def test_help_has_examples(command: str) -> None:
    assert f"Example: kvstrata {command}" in invoke(command, "--help").stdout


def test_choices_are_printed_readably() -> None:
    assert show({"kernel": "bulk", "rows": 2}) == "kernel=bulk rows=2"
    assert show(None) == "default"


# On a GPU


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("op", "case"), [("store", "8x128-fp16-256"), ("decode", "mixed-B32-1024"), ("prefill", "causal-B8-H16-S128-D64")]
)
def test_a_short_search_on_the_gpu(op: str, case: str, own_cache: Path, tmp_path: Path) -> None:
    done = invoke("tune", op, "--only", case, "--trials", 3, "--tables", tmp_path / "tables", "--json")
    assert done.exit_code == 0, done.output
    (row,) = json.loads(done.stdout)["rows"]
    assert "wrong" not in row["rejected"]
    assert "fails" not in row["rejected"]
    (path,) = (tmp_path / "tables").glob("*.json")
    assert tuned.read(path)[op][0]["case"] == case
