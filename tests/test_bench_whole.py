"""Whole operations of a cache in the settle benchmark, at toy size: what they check, and what their tables show."""

from __future__ import annotations

import pytest
import torch

from conftest import Watch
from kvstrata.cache import TieredCache
from kvstrata.tools.bench import Timer, runner, timer, whole
from kvstrata.tools.bench.cases import settle
from kvstrata.tools.bench.render import table
from kvstrata.tools.bench.results import CaseResult, Report, Row
from kvstrata.tools.bench.stats import summary

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def forget() -> None:
    whole.free_caches(CPU)


def test_every_operation_passes_its_check() -> None:
    for case in whole.cases(CPU, False):
        bench = case.build(CPU)
        for _ in range(2):
            assert runner.verify(bench, bench.contenders, case.sets) == {}
            if bench.before:
                bench.before(0)
    for steps in whole.steps_of(whole.TOY, CPU):
        steps.cache.check()


def test_samples_of_steps_contain_settlings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests settle in some of the steps, not in each; nothing is written during the time of a step."""
    (case,) = (case for case in whole.cases(CPU, False) if case.name.startswith("advance"))
    bench = case.build(CPU)
    ours, _ = whole.steps_of(whole.TOY, CPU)
    settled = []
    for _ in range(case.rounds or 0):
        bench.before(0)
        before = ours.cache.buckets.count[..., 0].clone()
        monkeypatch.setattr(TieredCache, "write", lambda *given: pytest.fail("it is outside the time"))
        bench.contenders["advance"](0)
        monkeypatch.undo()
        settled.append(bool((ours.cache.buckets.count[..., 0] < before).any()))
    assert 2 <= sum(settled) <= len(settled) // 2


def test_wrong_results_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    prompt, advance, eager = (case.build(CPU) for case in whole.cases(CPU, False))
    append, decode = TieredCache.append, whole.kvstrata.decode_attention

    def other_rows(self, layer, k, v, *given, **options) -> None:
        append(self, layer, k + layer, v, *given, **options)

    with monkeypatch.context() as patch:
        patch.setattr(TieredCache, "append", other_rows)
        errors = runner.verify(prompt, prompt.contenders, 1)
        assert set(errors) == {"append", "with mass", "16 bit"}
        assert "K is off by" in errors["16 bit"]
    with monkeypatch.context() as patch:
        patch.setattr(TieredCache, "advance", lambda self: None)
        assert set(runner.verify(advance, advance.contenders, 1)) == {"advance", "16 bit"}
    with monkeypatch.context() as patch:
        patch.setattr(
            whole.kvstrata,
            "decode_attention",
            lambda *given, **options: decode(*given, **options) * (1 + ("backend" in options)),
        )
        assert set(runner.verify(eager, eager.contenders, 1)) == {"append + decode", "16 bit"}


def test_cases_on_a_gpu() -> None:
    listed = {case.name: case for case in whole.cases(torch.device("cuda"), False)}
    for name in ("prompt-B1-16384", "prompt-B32-4096", "advance-B256-4096", "advance-B64-32768", "eager-B32-16384"):
        assert name in listed
    assert listed["advance-B32-16384"].rounds == 192
    few = listed["advance-B256-32768-8layers"]  # all 32 do not fit
    assert few.params["layers"] == 8
    assert {(case.params["B"], case.params["T"]) for name, case in listed.items() if name.startswith("advance")} == {
        (requests, tokens) for requests in (1, 32, 64, 256) for tokens in (4096, 16384, 32768)
    }
    assert listed["prompt-B1-16384"].bytes == int(16384 * 131072 * 1.25)
    names = list(listed)
    assert names.index("eager-B32-4096") == names.index("advance-B32-4096") + 1  # on the same caches
    quick = [case.name for case in whole.cases(torch.device("cuda"), True)]
    assert {name.split("-")[0] for name in quick} == {"prompt", "advance", "eager"}
    assert set(quick) < set(names)


def test_mean_and_slowest_are_columns_and_targets() -> None:
    """Nine steps of 100 us and one of 1,100: 200 on average."""
    case = CaseResult("advance-B1-9", {"B": 1}, 1, 0, 1, False)
    samples = [100.0] * 9 + [1100.0]
    case.rows.append(Row("advance", "ours", us=summary(samples), samples=samples))
    case.host["advance"] = summary([50.0] * 3)
    machine = {"name": "x", "versions": {"torch": "1"}, "date": "2026-01-01", "slug": "x"}
    report = Report("settle", machine, {"quick": False}, {"tb_s": 1.0}, {"us": 1.0, "kernel": "empty.cu"}, [case])
    text = table(report, {"columns": "contender,us,mean,slowest,host"}).document()
    assert "| advance | 100.00 | 200.00 | 1100.00 | 50.00 |" in text
    assert (
        settle.summary(report).splitlines()[-1]
        == "advance-B1-9: median 0.10 ms, mean 0.20 ms, slowest 1.10 ms, host 50 us, p95 50 us"
    )
    aims = "advance-B1-9: host advance / 1 us <= 60; advance-B1-9: mean advance / gpu advance <= 1.5"
    aims += "; advance-B1-9: slowest advance / 2000 us <= 1"
    lines = table(report, {"targets": aims}).rows
    assert [line[-1] for line in lines] == ["met", "missed", "met"]
    with pytest.raises(ValueError, match="has no such row"):
        table(report, {"targets": "advance-B1-9: mean other / 1 us <= 1"})


def test_host_time_excludes_the_setup_call(watch: Watch) -> None:
    watch.drive(timer)
    clock = Timer(CPU, flush_bytes=1 << 12)
    us = clock.host({"x": lambda i: watch.sleep(3e-6)}, bursts=4, burst=1, before=lambda i: watch.sleep(1.0))
    assert us["x"] == pytest.approx([3.0] * 4)
