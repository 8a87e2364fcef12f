"""`kvstrata check`: sweeps that can fail, what the sanitizer said."""

from __future__ import annotations

import json
import math
import sys
import threading
from functools import partial
from pathlib import Path

import pytest
import torch

import emulator
import kvstrata as library
import packed_model
import toy
from conftest import HAS_GPU, invoke
from kvstrata.store.packed import cuda as store_cuda
from kvstrata.tools import child, publish
from kvstrata.tools.bench import cases
from kvstrata.tools.check import check, sweeps
from kvstrata.tools.check import results as check_results
from kvstrata.tools.check.sweeps.draw import Draw, Unsupported
from prefill_model import DEVICE
from test_prefill_cuda import cuda  # noqa: F401

CPU = torch.device("cpu")


@pytest.mark.parametrize("op", sweeps.names())
def test_every_sweep_passes_here(op):
    for backend, reason in sweeps.backends(op, CPU).items():
        if reason is None and backend != "triton":  # the interpreter has tests of its own
            outcomes = list(sweeps.run(op, CPU, backend, range(8)))
            assert [o.error for o in outcomes if o.error] == []
            assert any(o.unsupported is None for o in outcomes)


@pytest.mark.gpu
@pytest.mark.parametrize("op", sweeps.names())
def test_every_sweep_passes_on_the_gpu(op):
    device = torch.device("cuda", torch.cuda.current_device())
    for backend, reason in sweeps.backends(op, device).items():
        if reason is None:
            assert [o.error for o in sweeps.run(op, device, backend, range(8)) if o.error] == []


def test_every_op_of_bench_has_a_sweep():
    assert sweeps.names() == sorted(
        set(cases.names()) - {"hf", "serve", "step", "vllm"}
    )  # many ops, each with a sweep of its own


@pytest.mark.usefixtures("cuda")
def test_prefill_takes_what_the_sanitizer_watches():
    """On the GPU, or emulated: the first trials are all supported."""
    outcomes = list(sweeps.run("prefill", DEVICE, "cuda", range(check.SANITIZER_TRIALS[True])))
    assert [(o.error, o.unsupported) for o in outcomes] == [(None, None)] * len(outcomes)


@pytest.mark.skipif(HAS_GPU, reason="all sources are looked for on the GPU, below")
@pytest.mark.skipif(emulator.missing() is not None, reason=str(emulator.missing()))
def test_the_sanitizer_sees_every_kernel_of_a_packed_store(monkeypatch):
    """Decode steps, tails or sink tokens, and long prompts are all among the trials that it watches with --quick."""
    packed_model.without_cuda(monkeypatch)
    seen, load = set(), store_cuda.jit.load
    monkeypatch.setattr(store_cuda.jit, "load", lambda source, *more: seen.add(source.name) or load(source, *more))
    outcomes = list(sweeps.run("packed", CPU, "cuda", range(check.SANITIZER_TRIALS[True])))
    assert [(o.error, o.unsupported) for o in outcomes] == [(None, None)] * len(outcomes)
    assert {"quantize_tokens.cu", "quantize_tail.cu", "quantize_prompt.cu"} <= seen


def forgets_the_last_row(store_kv, k, v, k_cache, v_cache, slot_mapping, **options):
    last = slice(0, max(len(k) - 1, 0))
    store_kv(k[last], None if v is None else v[last], k_cache, v_cache, slot_mapping[last], **options)


def off_a_little(decode, q, cache, **options):
    out, *rest = decode(q, cache, **options)
    out[..., 0, 0] += 0.05
    return (out, *rest)


def off_by_a_row(attention, *arguments, **options):
    return attention(*arguments, **options).roll(1, 0)


def copies_one_block_less(copy_pages, src, dst, src_blocks, dst_blocks, **options):
    copy_pages(src, dst, src_blocks[:-2], dst_blocks[:-2], **options)


def keeps_no_tail(store_packed, *arguments, tail=None, sink_tokens=None, **options):
    store_packed(*arguments, sink_tokens=sink_tokens, **(options if sink_tokens else dict(backend=options["backend"])))


def reads_sink_tokens_from_pages(decode_packed, *arguments, sink_tokens=None, **options):
    return decode_packed(*arguments, **options)


@pytest.mark.parametrize(
    ("op", "name", "wrong"),
    [
        ("store", "store_kv", forgets_the_last_row),
        ("decode", "decode_attention", off_a_little),
        ("settle", "decode_attention", off_by_a_row),
        ("packed", "decode_packed", off_by_a_row),
        ("packed", "prefill_packed", off_by_a_row),
        ("packed", "copy_pages", copies_one_block_less),
        ("packed", "store_packed", keeps_no_tail),
        ("packed", "decode_packed", reads_sink_tokens_from_pages),
    ],
)
def test_a_sweep_finds_a_wrong_kernel(monkeypatch, op, name, wrong):
    monkeypatch.setattr(library, name, partial(wrong, getattr(library, name)))
    backend = "auto" if op == "settle" else "reference"
    assert any(o.error for o in sweeps.run(op, CPU, backend, range(6)))


def test_settle_finds_a_step_that_writes_to_another_request(monkeypatch):
    write = library.TieredCache.write
    monkeypatch.setattr(library.TieredCache, "write", lambda self, layer, k, v: write(self, layer, k.roll(1, 0), v))
    assert any("off by" in (o.error or "") for o in sweeps.run("settle", CPU, "auto", range(4)))


RECORDER = """
import sys, torch
from pathlib import Path
from kvstrata.jit import kernel
from kvstrata.tools.check import check, sweeps
make = kernel.Kernel.__init__
def record(self, source, entry, arch):
    make(self, source, entry, arch)
    print("loaded", Path(source).name)
kernel.Kernel.__init__ = record
for backend in sweeps.find(sys.argv[1]).SANITIZED:
    for outcome in sweeps.run(sys.argv[1], torch.device("cuda", 0), backend, range(check.SANITIZER_TRIALS[True])):
        assert not outcome.error, outcome
"""


@pytest.mark.gpu
def test_the_sanitizer_sees_every_cuda_source():
    """The few trials that it watches with ``--quick`` launch kernels of every source."""
    seen = set()
    for op in sweeps.names():
        said, code = child.run([sys.executable, "-c", RECORDER, op], 300)
        assert code == 0, said[-2000:]
        seen |= {line.split()[1] for line in said.splitlines() if line.startswith("loaded ")}
    folder = Path(library.__file__).parent
    assert {path.name for path in folder.rglob("*.cu") if "baselines" not in path.parts} - seen == set()


IGNORED = {
    "causal": lambda given: dict(causal=False, sliding_window=None),
    "window": lambda given: dict(sliding_window=None),
    "softcap": lambda given: dict(softcap=None),
    "sinks": lambda given: dict(sinks=None),
    "lengths of k": lambda given: dict(cu_seqlens_k=given.get("cu_seqlens_q")),
}


@pytest.mark.parametrize("name", IGNORED)
def test_prefill_finds_an_option_that_is_ignored(monkeypatch, name):
    right = library.prefill_attention
    monkeypatch.setattr(
        library, "prefill_attention", lambda q, k, v, **given: right(q, k, v, **given | IGNORED[name](given))
    )
    found = [o.error for o in sweeps.run("prefill", CPU, "reference", range(12)) if o.error]
    assert any("is off by" in error or "where nothing is seen" in error for error in found), found


def test_settle_finds_a_row_in_the_wrong_place(monkeypatch):
    gather = library.TieredCache.gather

    def swapped(self, layer, request=0):
        k, v, position = gather(self, layer, request)
        return (k.roll(1, 1) if k.shape[1] > 1 else k), v, position

    monkeypatch.setattr(library.TieredCache, "gather", swapped)
    assert any("off by" in (o.error or "") for o in sweeps.run("settle", CPU, "auto", range(4)))


def test_an_unsupported_call_is_not_a_failure(monkeypatch):
    def unsupported(draw, backend):
        raise Unsupported("not such a call")

    monkeypatch.setattr(sweeps.find("replay"), "trial", unsupported)
    step = check.check_sweep("replay", CPU, "reference", 3)
    assert (step.verdict, step.skipped) == ("skipped", "not such a call")


def test_draws_are_the_same_for_a_seed():
    first, again = Draw(5, CPU), Draw(5, CPU)
    assert [first.size(0, 100) for _ in range(5)] == [again.size(0, 100) for _ in range(5)]
    assert torch.equal(first.normal(3), again.normal(3))


def test_check_passes_on_the_cpu_and_reports_what_it_skipped():
    done = invoke("check", "replay", "--device", "cpu", "--quick")
    assert done.exit_code == 0, done.output
    assert "Correctness: PASSED" in done.stdout
    assert "compute-sanitizer, racecheck skipped: needs a GPU" in done.stdout
    done = invoke("check", "replay", "--device", "cpu", "--quick", "--json", "--tools", "none")
    found = json.loads(done.stdout)
    assert found["passed"]
    assert [step["verdict"] for step in found["steps"]][:2] == ["passed", "passed"]
    assert not any("sanitizer" in step["name"] for step in found["steps"])


def test_check_of_a_wrong_kernel_exits_1(monkeypatch):
    monkeypatch.setattr(cases, "names", lambda: ["toy"])
    monkeypatch.setitem(sys.modules, f"{cases.__name__}.toy", toy)
    monkeypatch.setattr(toy, "cases", partial(toy.cases, wrong=("ours-too",)))
    done = invoke("check", "toy", "--device", "cpu")
    assert done.exit_code == 1
    assert "bench cases: fp32-64: ours-too:" in done.stdout
    assert "Correctness: FAILED" in done.stdout


@pytest.mark.parametrize("arguments", [["nothing"], ["store", "--tools", "memchek"], ["store", "--device", "cuda"]])
def test_check_reports_usage_errors_in_one_line(arguments, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    done = invoke("check", *arguments)
    assert done.exit_code == 2
    assert len(done.stderr.splitlines()) == 1


CLEAN = "========= COMPUTE-SANITIZER\n8 trials, 0 failed\n========= ERROR SUMMARY: 0 errors\n"
RACES = "========= RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)\n"


@pytest.mark.parametrize(
    ("text", "code", "errors"),
    [
        (CLEAN, 0, []),
        ("8 trials, 0 failed\n========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n", 0, []),
        ("8 trials, 0 failed\n========= Error: Race reported\n" + RACES, 86, ["2 error(s)", "Error: Race reported"]),
        ("cuda, seed 3: k differs\n8 trials, 1 failed\n========= ERROR SUMMARY: 0 errors", 1,
         ["cuda, seed 3: k differs"]),
        ("========= ERROR SUMMARY: 0 errors", 0, ["the child ended early, exit code 0"]),
        ("terminate called\n  what():  CUDA error: misaligned address\nException\n========= ERROR SUMMARY: 0 errors",
         6, ["the child ended early, exit code 6: what():  CUDA error: misaligned address"]),
        ("========= Error: Device not supported", 1,
         ["compute-sanitizer does not support this device or virtual machine"]),
    ],
)  # fmt: skip
def test_sanitizer_output_is_parsed(text, code, errors):
    assert check.read_sanitizer(text, code)[1] == errors


def test_the_sanitizer_runs_a_child_process(monkeypatch, tmp_path):
    """A stand-in that runs what it is given and adds a summary."""
    tool = tmp_path / "compute-sanitizer"
    rest = "sys.argv[sys.argv.index('--error-exitcode') + 2 :]"
    tool.write_text(
        f"#!{sys.executable}\nimport subprocess, sys\n"
        f"subprocess.run([x if x != 'cuda' else 'cpu' for x in {rest}])\n"
        "print('========= ERROR SUMMARY: 0 errors')\n"
    )
    tool.chmod(0o755)
    step = check.check_sanitizer("memcheck", "replay", ["reference"], 3, str(tool), 600.0)
    assert (step.verdict, step.done) == ("passed", 3), step.errors


@pytest.fixture
def pretended_cuda(tmp_path, monkeypatch):
    """Children that are told to run on cuda run on the CPU."""
    python = tmp_path / "python"
    swapped = "[x if x != 'cuda' else 'cpu' for x in sys.argv[1:]]"
    python.write_text(
        f"#!{sys.executable}\nimport os, sys\nos.execv({sys.executable!r}, [{sys.executable!r}, *{swapped}])\n"
    )
    python.chmod(0o755)
    monkeypatch.setattr(check.sys, "executable", str(python))


@pytest.mark.usefixtures("pretended_cuda")
def test_a_sweep_runs_in_a_separate_process():
    step = check.run_sweep_process("replay", "reference", 6, 3, math.inf, 600.0)
    assert (step.name, step.verdict, step.done) == ("sweep, reference", "passed", 6), step.errors
    step = check.run_sweep_process("replay", "reference", 6, 3, 0.0, 600.0)
    assert step.done == sweeps.MIN_TRIALS
    step = check.run_sweep_process("replay", "nothing", 2, 0, math.inf, 600.0)
    assert step.verdict == "FAILED"
    assert all(error.startswith("seed ") for error in step.errors)
    (late,) = check.run_sweep_process("replay", "reference", 6, 3, math.inf, 0.0).errors
    assert "was killed" in late


@pytest.mark.parametrize(
    ("text", "code", "found"),
    [
        ("4 trials, 0 failed", 0, (4, [], None)),
        ("cuda, seed 3: k differs\n4 trials, 1 failed", 1, (4, ["seed 3: k differs"], None)),
        ("cuda unsupported: no\n0 trials, 0 failed", 1, (0, [], "no")),
        ("Segmentation fault", -11, (0, ["the child ended early, exit code -11: Segmentation fault"], None)),
    ],
)
def test_sweep_output_is_parsed(text, code, found):
    assert check.read_sweep(text, code) == found


def test_on_a_gpu_sweeps_tools_and_cases_run_in_parallel(monkeypatch):
    """Five of them meet at a barrier; one after the other they would not."""
    meet = threading.Barrier(5, timeout=600)

    def met(name):
        def run(*arguments):
            meet.wait()
            return check.Step(name(*arguments), done=1)

        return run

    monkeypatch.setattr(sweeps, "backends", lambda op, device: {"cuda": None, "triton": "not here", "reference": None})
    monkeypatch.setattr(child, "find_tool", lambda tool: tool)
    monkeypatch.setattr(check, "check_cases", met(lambda op, device: "cases"))
    monkeypatch.setattr(check, "run_sweep_process", met(lambda op, backend, *rest: backend))
    monkeypatch.setattr(check, "check_sanitizer", met(lambda tool, *rest: tool))
    steps = check.run("store", torch.device("cuda"), ("memcheck", "racecheck"), limit=60.0)
    assert [step.name for step in steps] == ["cases", "cuda", "sweep, triton", "reference", "memcheck", "racecheck"]
    assert steps[2].skipped == "not here"


def test_outcomes_are_saved_and_rendered(monkeypatch, tmp_path):
    """An op takes the place of its earlier entry; a failure is kept as one."""
    monkeypatch.chdir(tmp_path)
    tools = [check.Step(check_results.SANITIZER + tool, 3, 1.0) for tool in check_results.TOOLS]
    steps = [check.Step("bench cases", 4, 1.0), check.Step("sweep, cuda", 12, 1.0), check.Step("sweep, triton", 5, 1.0)]
    raced = [*steps, check.Step(tools[0].name, 3), check.Step(tools[1].name, 3, 1.0, ["2 error(s)"])]
    asked = ("--device", "cpu", "--quick", "--save", "--revision", "abc123")
    for op, outcome in (("store", steps + tools), ("decode", raced), ("replay", steps), ("decode", raced)):
        monkeypatch.setattr(check, "run", lambda *arguments, outcome=outcome: outcome)
        done = invoke("check", op, *asked)
        assert done.exit_code == (1 if op == "decode" else 0), done.output
        assert "check.json" in done.stdout
    (path,) = tmp_path.glob("results/cpu-*/check.json")
    kept = check_results.load(path)
    assert [row.op for row in kept.rows] == ["decode", "replay", "store"]
    assert [row.passed for row in kept.rows] == [False, True, True]
    assert all(row.quick and row.machine["revision"] and row.tools == list(check_results.TOOLS) for row in kept.rows)
    text = publish.render_document(
        "<!-- kvstrata:check -->\n<!-- /kvstrata:check -->\n", publish.load_all(path.parents[1])
    )
    lines = [line.split(" | ") for line in text.splitlines() if line.startswith("| ")]
    assert lines[-1][3:] == ["4", "17", "3", "3", "3", "3", "passed |"]
    assert lines[2][3:] == ["4", "17", "3", "FAILED", "", "", "FAILED |"]
    assert "- decode, compute-sanitizer, racecheck: 2 error(s)" in text
    path.write_text("{}")
    assert invoke("check", "store", *asked).exit_code == 2, "what is no such file is not overwritten"
