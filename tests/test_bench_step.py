"""The step benchmark at toy size: a whole decode step, with its metadata brought in every way."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvstrata.tools.bench import runner
from kvstrata.tools.bench.cases import serve, step
from kvstrata.tools.bench.clock import WallClock
from kvstrata.tools.bench.render import table
from kvstrata.tools.bench.results import CaseResult, Report, Row
from kvstrata.tools.bench.runner import _rate
from kvstrata.tools.bench.stats import summary

pytest.importorskip("transformers")
DEVICE = torch.device("cpu")
SMALL = step.TOY


@pytest.fixture(autouse=True)
def forget() -> None:
    step._built.clear()


@pytest.mark.parametrize("budget", [None, 0.25])
def test_all_methods_give_the_same_tokens(budget: float | None) -> None:
    shape = replace(SMALL, budget=budget, context=40 if budget is None else 300)
    for case in step.cases_of(shape):
        bench = case.build(DEVICE)
        assert {"fused", "unfused", "in graph", "host-staged"} <= bench.contenders.keys()
        assert runner.verify(bench, bench.contenders, case.sets) == {}
    decoder = step.decoder_of(shape, DEVICE)
    grown = [decoder.cache.length(request) for request in decoder.requests]
    assert grown == [n + 1 + len(step.STAGINGS) for n in shape.lengths]
    assert decoder.host[1].tolist() == [n - 1 for n in grown]  # the position of the newest token
    decoder.cache.check()


def test_serve_steps_equal_unfused_steps_and_grow_contexts() -> None:
    """Tokens are those of the same state in the other way; contexts grow only by steps."""
    [case] = serve.cases(DEVICE, False)
    assert case.rounds >= 2 * serve.SETTLE_EVERY
    bench = case.build(DEVICE)
    (decoder,) = step._built.values()
    before = decoder.cache.length(0)
    assert runner.verify(bench, bench.contenders, 1) == {}
    assert decoder.cache.length(0) == before + 1
    bench.contenders["no advance"](0)
    assert decoder.cache.length(0) == before + 1


def test_metadata_that_does_not_arrive_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    run = step.Decoder.run
    monkeypatch.setattr(
        step.Decoder, "run", lambda self, way: self.runners[way].replay(3) if way == "fused" else run(self, way)
    )
    for case in step.cases_of(SMALL):
        bench = case.build(DEVICE)
        errors = runner.verify(bench, {name: bench.contenders[name] for name in ("fused", "in graph")}, case.sets)
        assert set(errors) == {"fused"}
        assert "tokens are others" in errors["fused"]


def test_shapes_of_the_benchmark() -> None:
    """Weights of Llama-3.1-8B without its embedding, and at most 34.4 GB of K and V in addition."""
    assert step.Model().weights == 7_504_658_432
    names = [case.name for case in step.cases(torch.device("cuda"), False)]
    assert names[:2] == ["step-B1-4096-16bit-gpu", "step-B1-4096-16bit"]
    assert len(names) == 12
    names = [case.name for case in serve.cases(torch.device("cuda"), False)]
    assert names[:3] == ["serve-B32-16384-16bit", "serve-B32-16384-0.25", "serve-B64-4096-16bit"]
    quick = [case.name for case in serve.cases(torch.device("cuda"), True)]
    assert quick == ["serve-B64-4096-16bit", "serve-B64-4096-0.25"]
    assert max(shape.bytes - 2 * shape.model.weights for shape in step.SHAPES) < 34.4e9
    assert step.Shape(32, 4096, 0.25).name == "step-B32-4096-0.25"


def test_rates_and_shares_are_columns() -> None:
    """100 samples of 1,000 us alone and of 1,250 with metadata: 800 steps of two tokens a second, a fifth beyond."""
    case = CaseResult("step-B2-8-16bit-gpu", {"B": 2}, 1, 0, 1, False)
    for name, kind, us in (("fused", "ours", 1250.0), ("replay", "baseline", 1000.0), ("empty", "probe", 1.0)):
        case.rows.append(Row(name, kind, us=summary([us] * 9), samples=[us] * 9))
    case.rows.append(replace(case.rows[-1], name="copy"))
    _rate(case, step.cases_of(SMALL)[0], 1.0)
    machine = {"name": "x", "versions": {"torch": "1"}, "date": "2026-01-01", "slug": "x"}
    report = Report("step", machine, {"quick": False}, {"tb_s": 1.0}, {"us": 1.0, "kernel": "empty.cu"}, [case])
    shown = {"columns": "contender,us,share,rate,tokens_s", "contenders": "fused,replay"}
    text = table(report, shown).document()
    assert "| fused | 1250.00 | 20.00 % [20.00, 20.00] | 800 | 1,600 |" in text
    assert "| replay | 1000.00 |  | 1,000 | 2,000 |" in text


def test_wall_clock_time_includes_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time from idle device to idle device; the flush and earlier work are excluded."""
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])

    def wait(device: torch.device) -> None:
        now[0] += 3e-6

    def call(i: int) -> None:
        now[0] += 5e-6

    monkeypatch.setattr(torch.cuda, "synchronize", wait)
    clock = WallClock(torch.device("cuda"), torch.zeros(4))
    assert clock.us(clock.time("x", call, 0, before=call)) == pytest.approx(8.0)
    assert clock.host_bound == set()
