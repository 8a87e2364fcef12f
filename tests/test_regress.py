"""The regression gate, and `kvstrata info`."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

import toy
from conftest import invoke
from kvstrata.tools import git
from kvstrata.tools.bench import cases, regress, results
from kvstrata.tools.bench.stats import summary
from kvstrata.tools.check import sweeps

MACHINE = {"name": "NVIDIA H200", "slug": "nvidia-h200", "revision": "abc", "dirty": False, "date": "2026-01-01T00:00Z"}


# The regression gate


def report(factor=1.0, seed=1, slug="nvidia-h200"):
    samples = factor * np.random.default_rng(seed).normal(10, 0.2, 100)
    row = results.Row("ours", "ours", us=summary(samples), samples=list(samples))
    case = results.CaseResult("c", {}, 1 << 20, 0, 1, False, rows=[row])
    machine = {**MACHINE, "slug": slug, "versions": {"torch": "2"}}
    method = {"quick": False}
    return results.Report("toy", machine, method, {"tb_s": 4.0}, {"us": 3.0, "kernel": "empty.cu"}, [case])


@pytest.mark.parametrize(("factor", "verdict"), [(1.0, "same"), (1.01, "same"), (1.1, "slower"), (0.9, "faster")])
def test_slower_faster_or_noise(factor, verdict):
    (found,) = regress.outcomes(report(), report(factor, seed=2))
    assert found.verdict == verdict


def test_what_cannot_be_compared():
    with pytest.raises(ValueError, match="cannot compare"):
        regress.outcomes(report(), report(slug="cpu-x86-64"))
    other = report()
    other.cases[0].name = "d"
    with pytest.raises(ValueError, match="in common"):
        regress.outcomes(report(), other)


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A git checkout with two committed results: the second is a tenth slower."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("GIT_DIR", raising=False)
    run = partial(subprocess.run, check=True, capture_output=True)
    run(["git", "init", "-q", "."])
    for name, value in (("user.name", "t"), ("user.email", "t@t"), ("commit.gpgsign", "false")):
        run(["git", "config", name, value])
    for i, factor in enumerate((1.0, 1.1)):
        results.save(report(factor, seed=i), tmp_path / "results")
        run(["git", "add", "results"])
        run(["git", "commit", "-qm", f"{i}"])
    monkeypatch.setattr(cases, "names", lambda: ["toy"])
    monkeypatch.setitem(sys.modules, f"{cases.__name__}.toy", toy)
    return tmp_path


def test_bench_against_a_revision_or_a_file(checkout):
    now = "results/nvidia-h200/toy.json"
    done = invoke("bench", "toy", "--from", now, "--against", "HEAD~1")
    assert done.exit_code == 1, done.output
    assert "Slower than before:\nc: ours" in done.stdout
    assert invoke("bench", "toy", "--from", now, "--against", "HEAD").exit_code == 0
    Path("old.json").write_text(git.read_at(Path(now), "HEAD~1"))
    assert invoke("bench", "toy", "--from", now, "--against", "old.json").exit_code == 1
    done = invoke("bench", "toy", "--from", "old.json", "--against", now)
    assert done.exit_code == 0
    assert "1 faster" in done.stdout
    for reference, message in (("v9", "neither a file nor a revision"), ("gone.json", "no file gone.json")):
        done = invoke("bench", "toy", "--from", now, "--against", reference)
        assert done.exit_code == 2
        assert message in done.stderr


def test_versions_of_a_file(checkout):
    path = checkout / "results" / "nvidia-h200" / "toy.json"
    first, second = git.versions(path)
    assert first.text == git.read_at(path, "HEAD~1")
    assert second.text == path.read_text()
    assert git.versions(checkout / "nothing.json") == []


# Info


def test_info_lists_tables_and_caches(tmp_path, monkeypatch):
    monkeypatch.setenv("KVSTRATA_CACHE", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    slug = json.loads(invoke("info", "--json").stdout)["slug"]
    (tmp_path / "cubin").mkdir()
    (tmp_path / "cubin" / "x").write_bytes(bytes(100))
    (tmp_path / "tables").mkdir()
    (tmp_path / "tables" / f"{slug}.json").write_text('{"schema": 2, "ops": {"store": []}}')
    (tmp_path / "tables" / "broken.json").write_text("{}")
    facts = json.loads(invoke("info", "--json").stdout)
    assert facts["caches"]["cubin"]["bytes"] == 100
    mine, other = sorted((t for t in facts["tables"] if str(tmp_path) in t["path"]), key=lambda t: not t["used"])
    assert (mine["used"], mine["ops"]) == (True, {"store": 0})
    assert "not a tuned table" in other["error"]
    assert set(facts["backends"]) == set(sweeps.names())
    for op in ("decode", "prefill"):
        assert facts["backends"][op]["reference"] is None
        assert facts["backends"][op]["cuda"] == "cuda needs CUDA tensors, got some on cpu"
    text = invoke("info").stdout
    assert "cubin" in text
    assert "prefill reference available" in text
    assert "prefill cuda: cuda needs CUDA tensors, got some on cpu" in text
    assert "in use" in text
