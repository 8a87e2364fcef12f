"""The hf benchmark on a CPU: every contender runs, figures of the whole call are kept, a wrong one has no time."""

from __future__ import annotations

import gc
import signal
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("transformers")

from kvstrata.tools.bench import runner
from kvstrata.tools.bench.cases import hf as bench
from kvstrata.tools.bench.render import table, verdict
from kvstrata.tools.bench.results import dumps, loads

CPU = torch.device("cpu")


@pytest.fixture
def probes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "CONTENDERS", tuple(name for name in bench.CONTENDERS if name not in bench.COMPILE))
    monkeypatch.setattr(runner, "copy_bandwidth", lambda timer: {"tb_s": 4.0})
    monkeypatch.setattr(runner, "floor", lambda timer: {"us": 1.0, "kernel": "none"})


@pytest.fixture(autouse=True)
def frozen(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How deep the collector is frozen; what conftest froze stays so, or later collections look at it every time."""
    depth = [0]

    def add(number: int) -> None:
        depth[0] += number

    stand_in = SimpleNamespace(collect=gc.collect, freeze=lambda: add(1), unfreeze=lambda: add(-1))
    monkeypatch.setattr(bench, "gc", stand_in)
    return depth


def test_toy_model_run_reports_every_contender(probes: None, frozen: list[int]) -> None:
    saved = []
    report = bench.run(bench.cases(CPU, True), CPU, True, after_case=lambda r: saved.append(len(r.cases)))
    [case] = report.cases
    assert saved == [1] * len(case.rows) * bench.CPU_ROUNDS, "saved after each contender"
    assert report.failures == []
    assert frozen == [0], "the collector goes on"
    there = [name for name in bench.CONTENDERS if name != bench.QUANTIZED]
    assert {row.name: row.kind for row in case.rows} == {name: bench.KINDS[name] for name in there}
    assert all(len(row.samples) == 20 * bench.CPU_ROUNDS and min(row.samples) > 0 for row in case.rows)
    assert case.params["cache_bytes"][bench.OURS] < case.params["cache_bytes"][bench.PLAIN]
    assert all(seconds > 0 for seconds in case.params["first_s"].values())
    assert case.row("ours").vs_baseline.name == bench.BASELINE
    again = loads(dumps(report), "hf.json")
    grid = table(again, bench.TABLE)
    assert {"first token s", "cache GB", "slowest"} <= set(grid.header)
    assert len(grid.rows) == 4
    assert getattr(bench, "summary", verdict)(again), "a benchmark's summary takes its report"


def test_contenders_with_other_tokens_get_no_time(probes: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(name: str, model: object, shape: object, ids: torch.Tensor, new: int, warm: bool) -> bench.Measured:
        if name == bench.PLAIN:
            raise RuntimeError("out of memory")
        return bench.Measured([1.0, 2.0], 1.0, 10, [[int(name == bench.OURS)]] * 2)

    monkeypatch.setattr(bench, "measure", measure)
    [case] = bench.run(bench.cases(CPU, True), CPU).cases
    errors = {row.name: row.error for row in case.rows}
    assert errors == {
        bench.BASELINE: None,
        bench.OURS: "0 of 2 first tokens are as before",
        bench.PLAIN: "out of memory",
        bench.PACKED: None,
    }
    assert case.row("ours") is None


def test_contenders_on_a_cpu_take_turns(probes: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that gets slower slows all of them; one that fails once gets no time, and does not run again."""
    calls: list[tuple[str, bool]] = []

    def measure(name: str, model: object, shape: object, ids: torch.Tensor, new: int, warm: bool) -> bench.Measured:
        calls.append((name, warm))
        if name == bench.PLAIN and warm:
            raise RuntimeError("out of memory")
        number = 10.0 ** sum(one == name for one, _ in calls)
        return bench.Measured([number, number], number, 10, [[0]] * 2)

    monkeypatch.setattr(bench, "measure", measure)
    [case] = bench.run(bench.cases(CPU, True), CPU).cases
    names = [bench.BASELINE, bench.OURS, bench.PLAIN, bench.PACKED]
    once = [(name, True) for name in names if name != bench.PLAIN]
    assert calls == [*((name, False) for name in names), *((name, True) for name in names), *once]
    rows = {row.name: row for row in case.rows}
    assert list(rows) == names
    assert rows[bench.OURS].samples == [10.0, 10.0, 100.0, 100.0, 1000.0, 1000.0]
    assert case.params["first_s"][bench.OURS] == 100.0
    assert (rows[bench.PLAIN].error, rows[bench.PLAIN].us) == ("out of memory", None)


@pytest.mark.parametrize(("rows", "tokens", "lengths"), [(1, 30, [30]), (4, 30, [16])])
def test_long_prompts_are_warmed_up_by_short_ones(
    rows: int, tokens: int, lengths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []

    def generate(model: object, ids: torch.Tensor, *others: object) -> tuple[float, None]:
        seen.append(ids.shape[1])
        return 1.0, None

    monkeypatch.setattr(bench, "WARMED", 64)
    monkeypatch.setattr(bench, "_generate", generate)
    monkeypatch.setattr(bench, "cache_of", lambda *arguments: (None, {}))
    assert bench.first_times(bench.OURS, None, torch.zeros(rows, tokens, dtype=torch.int64), 100) == []
    assert seen == lengths
    assert bench.first_times(bench.PEER, None, torch.zeros(rows, tokens, dtype=torch.int64), 100) == []
    assert seen == lengths, "one that compiles for each shape is not"


def test_shape_names_are_unique_and_row_bytes_are_right() -> None:
    assert [shape.name for shape in bench.SHAPES[:2]] == ["B1-8192", "B8-16384"]
    assert len({shape.name for shape in bench.SHAPES}) == len(bench.SHAPES)
    assert bench.SHAPES[1].row_bytes == 2 * 2 * 32 * 8 * 128


def test_a_contender_that_hangs_is_stopped_and_late_ones_are_left_out(
    probes: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A peer that fails or takes too long costs its own row; none begins after the time is up."""

    def measure(name: str, model: object, shape: object, ids: torch.Tensor, new: int, warm: bool) -> bench.Measured:
        assert 0 < signal.getitimer(signal.ITIMER_REAL)[0] <= 1200, "an alarm is set"
        if name == bench.OURS:
            signal.raise_signal(signal.SIGALRM)
            raise AssertionError("not stopped")
        if name == bench.PLAIN:
            monkeypatch.setattr(bench, "TOTAL", -1.0)
        return bench.Measured([1.0, 2.0], 1.0, 10, [[0]] * 2)

    monkeypatch.setattr(bench, "measure", measure)
    [case] = bench.run(bench.cases(CPU, True), CPU).cases
    assert {row.name: row.error for row in case.rows} == {
        bench.BASELINE: None,
        bench.OURS: "took longer than 1200 s",
        bench.PLAIN: None,
    }
    assert list(case.params["left_out"]) == [bench.PACKED]


def test_jobs_are_in_order_of_models_and_compile_last() -> None:
    jobs = bench.contenders_in_order(bench.SHAPES, True)
    families = [shape.family for shape, _ in jobs]
    assert families == sorted(families, key=families.index), "each model is made once"
    llama = [name for shape, name in jobs if shape.family == "llama"]
    first = llama.index(bench.COMPILED)
    assert llama[first:] == [bench.COMPILED] + [bench.PEER] * 4
    assert [shape.name for shape, name in jobs if name == bench.PEER] == [
        *("B1-8192", "B8-16384", "B1-2048", "B32-16384"),
        *("B1-8192-gemma3", "B8-16384-gemma3"),
    ]
    assert all((shape, name) in jobs for shape in bench.SHAPES for name in (bench.BASELINE, bench.OURS))


def test_an_mlp_in_chunks_gives_the_same_output() -> None:
    model = bench.load(bench.Shape(2, 100, model=bench.TOY), CPU)
    mlp, x = model.model.layers[0].mlp, torch.randn(3, 50, 64)
    with torch.no_grad(), pytest.MonkeyPatch.context() as patched:
        whole = mlp(x)
        patched.setattr(bench, "CHUNK", 64)
        torch.testing.assert_close(mlp(x), whole)


def test_a_cpu_runs_a_small_model() -> None:
    small = bench.cases(CPU, False)
    assert [case.name for case in small] == ["B1-2048-smollm2", "B1-4096-smollm2"]
    shape = bench.shape_of(small[0])
    assert shape.row_bytes == 2 * 4 * 30 * 3 * 64
    assert [name for _, name in bench.contenders_in_order([shape], False)] == [bench.BASELINE, bench.OURS, bench.PLAIN]
