"""The measuring core: what is refused a speed, what a run says of its machine and its probes."""

import json
import platform
import time
import types
from dataclasses import replace

import numpy as np
import pytest
import torch

import toy
from bench_queue import Queue
from kvstrata.tools import child
from kvstrata.tools.bench import Bench, Case, Timer, machine, probes, render, results, runner
from kvstrata.tools.bench.stats import summary

CPU = torch.device("cpu")


@pytest.fixture
def queue(monkeypatch):
    return Queue(monkeypatch)


def small_run(cases, **options):
    return runner.run(cases, CPU, True, timer=Timer("cpu", flush_bytes=1 << 12), **options)


@pytest.fixture(autouse=True)
def _small_copy(monkeypatch):
    monkeypatch.setattr(runner, "copy_bandwidth", lambda timer: probes.copy_bandwidth(timer, 1 << 16, rounds=5))


@pytest.fixture(scope="module")
def report():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "copy_bandwidth", lambda timer: probes.copy_bandwidth(timer, 1 << 16, rounds=5))
        return small_run(toy.cases(CPU, True))


def test_a_report_holds_every_contender(report):
    assert [case.name for case in report.cases] == ["fp32-64", "fp32-256"]
    case = report.cases[0]
    kinds = {row.name: row.kind for row in case.rows}
    assert kinds == {
        "ours": "ours",
        "ours-too": "variant",
        "naive": "baseline",
        "stack": "peer",
        "copy": "probe",
        "empty": "probe",
    }
    assert case.absent["unwilling"] == "needs a machine of another kind"
    assert "a_library_that_is_not_installed" in case.absent["elsewhere"]
    assert case.absent["broken"] == "RuntimeError: a kernel did not compile"
    assert case.seconds > 0
    assert not report.failures
    ours = case.rows[0]
    assert ours.us == summary(ours.samples)
    assert ours.tb_s == pytest.approx(1e-6 * case.bytes / ours.us.median)
    assert ours.tflop_s == pytest.approx(1e-6 * case.flops / ours.us.median)
    assert ours.of_peak == pytest.approx(ours.tb_s / report.peak["tb_s"])
    assert (ours.vs_baseline.name, ours.vs_peer.name, ours.vs_copy.name) == ("naive", "stack", "copy")
    assert ours.vs_baseline.lo <= ours.vs_baseline.ratio <= ours.vs_baseline.hi
    assert case.rows[2].vs_baseline is None
    assert case.host == {}  # on a CPU it would be the time itself


def test_a_wrong_contender_gets_no_speed():
    report = small_run(toy.cases(CPU, True, wrong=("ours", "naive")), only="*-64")
    ours, too, naive = report.cases[0].rows[:3]
    for row in (ours, naive):
        assert not row.correct
        assert row.us is row.tb_s is row.vs_copy is None
        assert row.samples == []
    assert too.correct
    assert too.vs_baseline is None
    assert len(report.failures) == 1
    text = render.verdict(report)
    assert text.startswith("Correctness: FAILED")
    assert "Speedup" not in text
    assert "WRONG" in render.table(report, {}).document()


def test_a_contender_that_turns_wrong_while_timed_gets_no_speed():
    out = torch.zeros(2)
    seen = []

    def tired(i):
        seen.append(i)
        return out.fill_(1 if len(seen) < 5 else 2)

    bench = Bench(
        {"ours": tired, "base": lambda i: out.fill_(1)},
        poison=lambda name, i: out.fill_(float("nan")),
        check=lambda name, i, got: torch.testing.assert_close(got, torch.ones(2)),
        ours="ours",
        baseline="base",
    )
    report = small_run([Case("tired", "one", {}, 8, lambda device: bench)])
    assert [row.correct for row in report.cases[0].rows] == [False, True, True, True]
    assert report.failures


def test_every_input_set_is_poisoned_and_checked_before_and_after():
    log = []
    bench = Bench(
        {"ours": lambda i: log.append(("run", i)), "base": lambda i: None},
        poison=lambda name, i: log.append(("poison", name, i)),
        check=lambda name, i, out: log.append(("check", name, i)),
        ours="ours",
        baseline="base",
    )
    small_run([Case("log", "one", {}, 8, lambda device: bench, sets=3)])
    triples = [e for i in range(3) for e in (("poison", "ours", i), ("run", i), ("check", "ours", i))]
    assert log[:9] == triples
    last = len(log) - 1 - log[::-1].index(("check", "ours", 2))
    assert log[last - 8 : last + 1] == triples


def test_a_case_that_cannot_be_built_does_not_end_the_run():
    def build(device):
        raise MemoryError("too large")

    seen = []
    cases = [Case("toy", "broken", {}, 8, build), *toy.cases(CPU, True)]
    report = small_run(cases, after_case=lambda report: seen.append(len(report.cases)))
    assert report.cases[0].error == "MemoryError: too large"
    assert report.cases[1].rows
    assert report.failures == ["broken: MemoryError: too large"]
    assert seen == [1, 2, 3]
    assert "broken did not run" in render.table(report, {}).document()


def test_cases_past_the_time_limit_are_skipped_and_reported():
    saved = []
    cases = toy.cases(CPU, False)
    report = small_run(cases, seconds=-1, after_case=lambda report: saved.append(len(report.cases)))
    assert saved == [1, 2, 3]
    assert {case.error for case in report.cases} == {"left out: the -1 s of this run were over"}
    assert len(report.failures) == 3


def test_a_case_that_breaks_the_device_is_named_and_the_last():
    """Kernels fail later than the call that launched them, and then everything that waits for the device fails."""
    error = RuntimeError("CUDA error: an illegal memory access was encountered")
    launched, saved, timer = [], [], Timer("cpu", flush_bytes=1 << 12)

    def synchronize():
        if launched:
            raise error

    timer.clock.synchronize = synchronize
    build = toy.cases(CPU, True)[0].build

    def bad(device):
        bench = build(device)
        name, good = next(iter(bench.contenders.items()))

        def call(i):
            launched.append(i)
            return good(i)

        return replace(bench, contenders=bench.contenders | {name: call})

    cases = [Case("toy", name, {}, 8, bad if name == "b" else build) for name in "abcd"]
    report = runner.run(cases, CPU, True, timer=timer, after_case=lambda report: saved.append(len(report.cases)))
    assert saved == [1, 2, 3, 4]
    assert report.cases[0].error is None
    assert report.cases[1].error == f"RuntimeError: {report.cases[0].rows[0].name}: RuntimeError: {error}"
    assert [case.error for case in report.cases[2:]] == ["left out: the device failed in b"] * 2


def test_an_error_of_a_kernel_is_the_contenders_own():
    waits = iter([None, RuntimeError("unspecified launch failure"), None])

    def wait():
        if (error := next(waits)) is not None:
            raise error

    bench = Bench({}, lambda name, i: None, lambda name, i, out: None, "a", "a")
    errors = runner.verify(bench, dict.fromkeys("abc", lambda i: None), 1, wait)
    assert errors == {"b": "RuntimeError: unspecified launch failure"}


def test_wrong_names_are_reported():
    bench = Bench({"copy": lambda i: None}, lambda name, i: None, lambda name, i, out: None, "copy", "copy")
    assert "reserved for probes" in small_run([Case("x", "x", {}, 8, lambda device: bench)]).cases[0].error
    bench.contenders = {"a": lambda i: None}
    assert "not among the contenders" in small_run([Case("x", "x", {}, 8, lambda device: bench)]).cases[0].error
    with pytest.raises(ValueError, match=r"no case matches 'none\*'; there are: fp32-64, fp32-256"):
        small_run(toy.cases(CPU, True), only="none*")


def test_on_a_gpu_calls_are_captured_and_the_host_is_measured(queue, monkeypatch):
    """The runner's CUDA branches, on the simulated queue."""
    queue.timer.device = torch.device("cuda", 0)
    queue.timer.capture = lambda call, sets: lambda i: ("replayed", call(i))
    monkeypatch.setattr(runner, "copy_call", lambda moved, sets, device: queue.kernel(8))
    monkeypatch.setattr(runner, "empty_call", lambda device: (queue.kernel(3), "fake"))
    got = []
    bench = Bench(
        {"ours": queue.kernel(10), "base": queue.kernel(20), "peer": queue.kernel(15)},
        poison=lambda name, i: None,
        check=lambda name, i, out: got.append(out),
        ours="ours",
        baseline="base",
        host={"ours": lambda i: None, "bare launch": lambda i: None},
    )
    case = runner.measure(Case("x", "x", {}, 40_000_000, lambda device: bench, graph=True), queue.timer, 16, peak=5.0)
    assert case.error is None
    assert set(got) == {("replayed", None)}
    rows = {row.name: row for row in case.rows}
    assert rows["ours"].tb_s == pytest.approx(4.0)
    assert rows["ours"].of_peak == pytest.approx(0.8)
    assert rows["ours"].less_floor == pytest.approx(0.8 * 10 / 7)
    assert rows["ours"].over_floor == pytest.approx(10 / 3)
    assert rows["ours"].vs_copy.ratio == pytest.approx(0.8)
    assert rows["ours"].vs_baseline.ratio == pytest.approx(2.0)
    assert rows["ours"].vs_peer.ratio == pytest.approx(1.5)
    assert set(case.host) == {"ours", "bare launch"}
    report = results.Report("x", {"slug": "nvidia-h200"}, {}, {}, {"kernel": "empty.cu"}, [case])
    assert [note.split(":")[0] for note in render.notes(report)] == ["host cost in x"]
    report.floor["kernel"] = "something else"
    assert render.notes(report)[0] == "floor of something else"


def test_a_contender_that_cannot_be_captured_is_reported(queue, monkeypatch):
    def refuse(call, sets):
        raise RuntimeError("operation not permitted when stream is capturing")

    queue.timer.device = torch.device("cuda", 0)
    queue.timer.capture = refuse
    calls, errors = runner._captured({"peer": lambda i: None}, queue.timer, 1)
    assert calls == {}
    assert errors["peer"].startswith("cannot be captured: RuntimeError: operation not permitted")


def test_machine_names_no_host(report):
    facts = machine.describe(CPU)
    assert facts["slug"].startswith("cpu-")
    assert facts["versions"]["torch"] == torch.__version__
    assert platform.node() not in json.dumps(facts)
    assert machine.slug("NVIDIA H200") == "nvidia-h200"


SMI = "GPU-aaaa, 580.1, 345, 1980, 2619, 3201, 700.00\nGPU-bbbb, 580.1, 1980, 1980, 3201, 3201, [N/A]\n"


@pytest.mark.parametrize(
    ("output", "sm_mhz"), [(SMI, 1980), (SMI.splitlines()[0], 345), ("", None), ("no devices were found", None)]
)
def test_machine_reads_the_clocks_of_its_own_gpu(monkeypatch, output, sm_mhz):
    properties = types.SimpleNamespace(
        name="NVIDIA H200",
        major=9,
        minor=0,
        multi_processor_count=132,
        L2_cache_size=60 << 20,
        total_memory=1 << 37,
        uuid="bbbb",
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    real = child.output
    monkeypatch.setattr(child, "output", lambda *c: output if c[0] == "nvidia-smi" else real(*c))
    facts = machine.describe(torch.device("cuda", 0))
    assert (facts["slug"], facts["sms"], facts["cache_bytes"]) == ("nvidia-h200", 132, 60 << 20)
    assert facts["clocks"].get("sm_mhz") == sm_mhz
    assert facts["driver"] == ("580.1" if sm_mhz else None)
    if sm_mhz == 1980:
        assert facts["clocks"]["power_limit_w"] is None


def test_revision_is_that_of_the_package_or_the_one_given(monkeypatch):
    answers = {"ls-files": "__init__.py\n", "status": " M bench/x.py\n", "rev-parse": "abc123\n"}
    monkeypatch.setattr(child, "output", lambda *command: answers.get(command[3], ""))
    assert machine._revision("given") == {"revision": "abc123", "dirty": True}
    answers["ls-files"] = ""
    assert machine._revision("given") == {"revision": "given", "dirty": None}


def test_the_empty_kernel_compiles():
    pytest.importorskip("cuda.core")
    from kvstrata import jit

    assert jit.compile(probes.EMPTY, "empty", arch="sm_90").code.startswith(b"\x7fELF")


def test_the_floor_says_which_kernel_it_is(monkeypatch):
    from kvstrata import jit

    launched = []
    kernel = types.SimpleNamespace(launch=lambda **shape: launched.append(shape))
    monkeypatch.setattr(jit, "load", lambda path, name: kernel)
    call, what = probes.empty_call.__wrapped__(torch.device("cuda", 0))
    call(0)
    assert what == "empty.cu"
    assert launched == [{"grid": 1, "block": 32}] * 2

    def missing(path, name):
        raise ImportError("No module named 'cuda'")

    monkeypatch.setattr(jit, "load", missing)
    call, what = probes.empty_call.__wrapped__(torch.device("cuda", 0))
    assert what == "torch.cuda._sleep(0), since No module named 'cuda'"


def test_a_copy_moves_the_bytes_it_counts():
    call = probes.copy_call(2000, 3, CPU)
    assert [call(i).numel() for i in range(3)] == [1000] * 3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestOnGpu:
    device = torch.device("cuda", 0)

    def test_device_time_is_that_of_the_kernel(self):
        """A slow host does not change it; a synchronisation is noticed; a replay takes no longer."""
        x = torch.empty(64 << 20, device=self.device)
        timer = Timer(self.device)

        def slow(i):
            time.sleep(3e-4)
            x.fill_(1)

        def waits(i):
            x.fill_(1)
            torch.cuda.synchronize()

        fill = lambda i: x.fill_(1)  # noqa: E731
        calls = {"fill": fill, "slow": slow, "waits": waits, "replay": timer.capture(fill)}
        us = {name: float(np.median(t)) for name, t in timer.sample(calls, rounds=50).items()}
        assert timer.host_bound == {"waits"}
        assert us["slow"] == pytest.approx(us["fill"], rel=0.1)
        assert us["replay"] == pytest.approx(us["fill"], rel=0.15)

    def test_a_complete_run(self):
        report = runner.run(toy.cases(self.device, True), self.device, quick=True)
        assert not report.failures
        assert report.floor["kernel"] == "empty.cu"
        assert 0.5 < report.floor["us"] < 20
        assert report.machine["sms"] > 0
        assert report.cases[0].host["ours"].median > 0
        assert not any(row.host_bound for case in report.cases for row in case.rows)
