"""The hf benchmark on a CPU: every contender runs, figures of the whole call are kept, a wrong one has no time."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")

from kvstrata.tools.bench.cases import hf as bench
from kvstrata.tools.bench.render import table, verdict
from kvstrata.tools.bench.results import dumps, loads

CPU = torch.device("cpu")


@pytest.fixture
def probes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "copy_bandwidth", lambda timer: {"tb_s": 4.0})
    monkeypatch.setattr(bench, "floor", lambda timer: {"us": 1.0, "kernel": "none"})
    monkeypatch.setattr(bench, "Timer", lambda device: None)


def test_a_toy_is_measured(probes: None) -> None:
    saved = []
    report = bench.run(bench.cases(CPU, True), CPU, True, after_case=lambda r: saved.append(len(r.cases)))
    [case] = report.cases
    assert saved == [1]
    assert report.failures == []
    assert {row.name: row.kind for row in case.rows} == {name: bench.KINDS[name] for name in bench.contenders(CPU)}
    assert all(len(row.samples) == 20 and min(row.samples) > 0 for row in case.rows)
    assert case.params["cache_bytes"][bench.OURS] < case.params["cache_bytes"][bench.PLAIN]
    assert all(seconds > 0 for seconds in case.params["first_s"].values())
    assert case.row("ours").vs_baseline.name == bench.BASELINE
    again = loads(dumps(report), "hf.json")
    grid = table(again, bench.TABLE)
    assert {"first token s", "cache GB", "slowest"} <= set(grid.header)
    assert len(grid.rows) == 3
    assert getattr(bench, "summary", verdict)(again), "a benchmark's summary takes its report"


def test_other_tokens_have_no_time(probes: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(name: str, model: object, shape: object, ids: torch.Tensor, new: int) -> bench.Measured:
        if name == bench.PLAIN:
            raise RuntimeError("out of memory")
        return bench.Measured([1.0, 2.0], 1.0, 10, [[int(name == bench.OURS)]] * 2)

    monkeypatch.setattr(bench, "measure", measure)
    [case] = bench.run(bench.cases(CPU, True), CPU).cases
    errors = {row.name: row.error for row in case.rows}
    assert errors == {
        bench.BASELINE: None,
        bench.PLAIN: "out of memory",
        bench.OURS: "0 of 2 first tokens are as before",
    }
    assert case.row("ours") is None


def test_shapes() -> None:
    assert [shape.name for shape in bench.SHAPES[:2]] == ["B1-8192", "B8-16384"]
    assert len({shape.name for shape in bench.SHAPES}) == len(bench.SHAPES)
    assert bench.SHAPES[1].row_bytes == 2 * 2 * 32 * 8 * 128
    assert [case.name for case in bench.cases(CPU, False)] == ["B1-2048-smollm2", "B1-4096-smollm2"]
    assert bench.shape_of(bench.cases(CPU, False)[0]).row_bytes == 2 * 4 * 30 * 3 * 64
    assert bench.PEER not in bench.contenders(CPU)
    assert bench.PEER in bench.contenders(torch.device("cuda"))
