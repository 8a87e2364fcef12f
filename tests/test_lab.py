"""The lab's commands and what they rest on: ncu's CSV, gates, sweeps that can fail, the regression gate, info."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import kvstrata as library
import toy
from kvstrata.bench import cases, results
from kvstrata.bench.stats import summary
from kvstrata.cli import app
from kvstrata.lab import check, child, git, launch, ncu, profile, profile_tables, regress, sweeps
from kvstrata.lab.sweeps.draw import Draw, Refused

CSV = (Path(__file__).parent / "data" / "ncu_raw.csv").read_text()
CPU = torch.device("cpu")
MACHINE = {"name": "NVIDIA H200", "slug": "nvidia-h200", "revision": "abc", "dirty": False, "date": "2026-01-01T00:00Z"}


def invoke(*arguments):
    return CliRunner().invoke(app, [str(a) for a in arguments])


# Nsight Compute


def test_the_raw_page_becomes_numbers():
    decode, combine, _ = ncu.parse(CSV)
    assert (decode.name, decode.grid, decode.block) == ("decode", "(1, 1056, 1)", "(256, 1, 1)")
    assert decode.values["us"] == pytest.approx(145.888)
    assert decode.values["dram_read"] == pytest.approx(575.668224)
    assert decode.values["conflicts"] == 1204352
    assert decode.values["registers"] == 126
    assert decode.values["shared"] == pytest.approx(99.328)
    assert "l1_hit" not in decode.values  # nan
    assert "issue" not in combine.values  # n/a
    assert list(decode.stalls) == ["wait", "short_scoreboard", "long_scoreboard"]
    assert sum(decode.stalls.values()) == pytest.approx(100)
    assert decode.stalls["wait"] == pytest.approx(50)


def test_other_units_mean_the_same():
    scaled = CSV.replace('"ns"', '"us"').replace('"145,888"', '"145.888"').replace('"5,472"', '"5.472"')
    scaled = scaled.replace('"byte","byte","%"', '"Mbyte","Kbyte","%"').replace('"575,668,224"', '"575.668224"')
    decode = ncu.parse(scaled)[0]
    assert decode.values["us"] == pytest.approx(145.888)
    assert decode.values["dram_read"] == pytest.approx(575.668224)
    assert decode.values["dram_write"] == pytest.approx(6332.416)  # 6,332,416 kB


def test_one_launch_of_each_kernel_is_kept():
    kept = profile.first_of_each(ncu.parse(CSV))
    assert [kernel.name for kernel in kept] == ["decode", "combine"]


@pytest.mark.parametrize(
    ("text", "means"),
    [
        ("==ERROR== ERR_NVGPUCTRPERM - The user does not have permission", "NVreg_RestrictProfilingToAdminUsers=0"),
        ("==ERROR== Failed to initialize the profiler: LibraryNotLoaded", "does not pass the counters on"),
        ("==WARNING== No kernels were profiled.", "no kernel of ours"),
        (
            "torch.OutOfMemoryError: no room\n==WARNING== No kernels were profiled.",
            "failed: torch.OutOfMemoryError: no",
        ),
        ("==PROF== Connected\nkvstrata: no case named 'x'", "ncu failed: kvstrata: no case named 'x'"),
    ],
)
def test_failures_are_explained(text, means):
    with pytest.raises(ncu.NcuError, match=re.escape(means)):
        ncu.parse(text)


def test_metrics_that_a_gpu_does_not_have_are_left_out():
    text = "==ERROR== Failed to find metric sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active"
    (unknown,) = ncu.unknown_metrics(text)
    assert unknown in ncu.ASKED
    asked = ncu.command("ncu", ["x"], Path("log"), [], 1, [unknown])
    assert unknown not in asked[asked.index("--metrics") + 1]
    assert asked[-1] == "x"


def test_our_kernels_are_found_in_the_sources():
    names = ncu.own_kernels()
    assert {"store_direct", "store_staged", "decode", "combine", "worklist", "quantize_pages", "repack", "copy_all",
            "append_one", "store_kernel", "decode_kernel"} <= set(names)  # fmt: skip
    assert {"prefill", "prefill_kernel", "specialized_kernel"} <= set(names)
    assert "empty" not in names
    chosen = ncu.command("ncu", [], Path("log"), names, 1)
    assert "|decode|" in chosen[chosen.index("--kernel-name") + 1]


FAKE = """#!{python}
import pathlib, sys, time
if "--version" in sys.argv:
    print("NVIDIA (R) Nsight Compute Command Line Profiler\\nVersion 2025.3.1.0 (build 1)")
elif "sm__pipe_tensor_cycles_active" in " ".join(sys.argv):
    print("==ERROR== Failed to find metric sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active")
    sys.exit(1)
elif sys.argv[-1] == "odd" and "--metrics" in sys.argv:
    sys.exit("==ERROR== something that nobody has seen before")
elif sys.argv[-1] == "slow":
    print("==PROF== Connected", flush=True)
    time.sleep(60)
elif sys.argv[-1] == "wrong":
    log = sys.argv[sys.argv.index("--log-file") + 1]
    pathlib.Path(log).write_text(pathlib.Path({csv!r}).read_text())
    sys.exit("kvstrata: k_cache is wrong")
elif sys.argv[-1] == "bad":
    print("==ERROR== ERR_NVGPUCTRPERM")
    sys.exit(1)
else:
    log = sys.argv[sys.argv.index("--log-file") + 1]
    pathlib.Path(log).write_text(pathlib.Path({csv!r}).read_text())
"""


@pytest.fixture
def fake_ncu(tmp_path, monkeypatch):
    """An ncu that does not know one metric, lacks permission for a case named bad, and gives the sample otherwise."""
    tool = tmp_path / "bin" / "ncu"
    tool.parent.mkdir()
    sample = Path(__file__).parent / "data" / "ncu_raw.csv"
    tool.write_text(FAKE.format(python=sys.executable, csv=str(sample)))
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tool.parent), prepend=":")
    profile.version.cache_clear()
    return tool


def test_a_profile_is_taken_kept_and_read_again(fake_ncu, tmp_path):
    taken = profile.take("store", ["good", "bad", "wrong"], MACHINE, {"good": 1000, "bad": 1, "wrong": 1})
    assert taken.tool == "ncu 2025.3.1.0"
    assert taken.failed["wrong"] == "k_cache is wrong"  # figures of a wrong kernel are not kept
    assert "ERR_NVGPUCTRPERM" in taken.failed["bad"]
    (case,) = taken.cases
    assert case.main.name == "decode"
    path = profile.save(taken, tmp_path / "deep" / "profile_store.json")
    again = profile.load(path)
    assert profile.dumps(again) == path.read_text()
    text = profile_tables.summary(again)
    assert "| good | decode | 145.89 |" in text
    assert "bad was not profiled" in text
    assert "wait 50 %" in text


def test_a_failure_of_no_known_reason_is_tried_again_with_sections_alone(fake_ncu):
    found = profile.take("store", ["odd"], MACHINE, {"odd": 1})
    assert [case.case for case in found.cases] == ["odd"], found.failed


def test_time_ends_a_profile_and_what_is_there_is_kept(fake_ncu):
    names = ["good", "slow", "never"]
    began = time.monotonic()
    found = profile.take("store", names, MACHINE, dict.fromkeys(names, 1), seconds=4)
    assert time.monotonic() - began < 20
    assert [case.case for case in found.cases] == ["good"]
    assert re.fullmatch(
        r"ncu took more than \d s and was ended; it said last: ==PROF== Connected", found.failed["slow"]
    )
    assert found.failed["never"] == "the time was up"


EVENTS = [
    {"cat": "kernel", "name": "void combine<__half, 128, 4>(Params)", "ts": 20, "dur": 3.5,
     "args": {"grid": [8, 1, 1], "block": [128, 1, 1], "registers per thread": 53, "shared memory": 4128}},
    {"cat": "gpu_memset", "name": "Memset (Device)", "ts": 1, "dur": 57.0, "args": {}},
    {"cat": "kernel", "name": "void decode<bf16, false, Tiers<Tier<4, 4>>>(Params)", "ts": 10, "dur": 150.0,
     "args": {"grid": [396, 1, 1], "block": [128, 1, 1], "registers per thread": 150, "shared memory": 66000,
              "est. achieved occupancy %": 19}},
    {"cat": "kernel", "name": "void at::native::reduce_kernel<512>(int)", "ts": 30, "dur": 9.0, "args": {}},
]  # fmt: skip


def test_a_trace_becomes_launches():
    found = [ncu.Kernel(**kernel) for kernel in launch.launches(EVENTS)]
    assert [kernel.name for kernel in found] == ["decode", "combine", "reduce_kernel"]
    assert (found[0].grid, found[0].block) == ("(396, 1, 1)", "(128, 1, 1)")
    assert found[0].values == {"us": 150.0, "registers": 150.0, "shared": pytest.approx(66.0), "occupancy": 19.0}


def test_without_counters_there_are_times_and_registers(fake_ncu, tmp_path, monkeypatch):
    """ncu may not read the counters: said in a line, exit code 3, and what torch's profiler tells is written."""
    monkeypatch.chdir(tmp_path)
    asked = []

    def run(command, seconds):
        asked.append(command)
        if "--trace" not in command:
            return "==ERROR== ERR_NVGPUCTRPERM"
        return f"a warning\n{launch.TRACED}{json.dumps(launch.launches(EVENTS))}\n"

    monkeypatch.setattr(profile, "_run", run)
    monkeypatch.setattr(profile, "choose", lambda *arguments: ["one", "two"])
    monkeypatch.setattr("kvstrata.lab.cli.device_of", lambda device: torch.device("cuda"))
    monkeypatch.setattr("kvstrata.bench.machine.describe", lambda *arguments: MACHINE)
    few = [cases.find("store").cases(CPU, True)[0]]
    few = [type(few[0])(**{**few[0].__dict__, "name": name, "bytes": 300_000_000}) for name in ("one", "two")]
    monkeypatch.setattr(cases.find("store"), "cases", lambda *arguments: few)
    done = invoke("profile", "store", "--save")
    assert done.exit_code == 3, done.output
    assert "NVreg_RestrictProfilingToAdminUsers=0" in done.stderr
    assert sum("--trace" not in command for command in asked) == 1, "one case is enough to know"
    text = Path("docs/profiles/store.md").read_text()
    assert "| one | decode | 150.00 | 19.0 | 150 | 66.0 | 2.00 |" in text
    assert "reduce_kernel" not in text, "not ours"
    assert "without counters" in text
    assert "counters was not profiled: the driver keeps" in text
    assert profile.load(Path("results/nvidia-h200/profile_store.json")).cases[1].case == "two"


def test_a_late_program_is_ended_with_its_children(tmp_path):
    """The grandchild holds the pipe: without its end nothing comes back."""
    began, pid = time.monotonic(), tmp_path / "pid"
    with pytest.raises(child.Late, match="took more than 1 s and was ended; it said last: begun"):
        child.run(["sh", "-c", f"sleep 60 & echo $! > {pid}; echo begun; wait"], 1)
    assert time.monotonic() - began < 20
    state = Path(f"/proc/{pid.read_text().strip()}/stat")
    while state.exists() and state.read_text().split()[2] != "Z":  # a signal takes a moment
        assert time.monotonic() - began < 20, "the grandchild lives"
        time.sleep(0.05)
    assert child.run(["sh", "-c", "echo $MINE >&2; exit 3"], 30, {"MINE": "x"}) == ("x\n", 3)


def test_tools_are_found_where_the_toolkit_is(tmp_path, monkeypatch):
    tool = tmp_path / "bin" / "ncu"
    tool.parent.mkdir()
    tool.touch(0o755)
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(child, "TOOLKIT", str(tmp_path / "none"))
    monkeypatch.delenv("CUDA_PATH", raising=False)
    monkeypatch.delenv("CUDA_HOME", raising=False)
    assert child.find("ncu") is None
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert child.find("ncu") == str(tool)


def taken(**values):
    kernel = ncu.Kernel("k", "(1, 1, 1)", "(32, 1, 1)", {"us": 10.0, "l2_hit": 40.0, "dram": 80.0, **values})
    small = ncu.Kernel("other", "(1, 1, 1)", "(32, 1, 1)", {"us": 1.0, "l2_hit": 0.0})
    return profile.Profile("store", MACHINE, "ncu", [profile.CaseProfile("c", "ours", 1, [small, kernel])])


@pytest.mark.parametrize(
    ("gate", "values", "holds"),
    [
        ("l2_hit>=+8", {"l2_hit": 48.0}, True),
        ("l2_hit>=+8", {"l2_hit": 47.9}, False),
        ("dram<=-10", {"dram": 70.0}, True),
        ("dram<=-10", {"dram": 71.0}, False),
        ("us<=-10", {"us": 9.0}, True),
        ("us<=+5", {"us": 10.6}, False),
        ("l2_hit >= 40", {}, True),
        ("registers<=64", {}, False),  # there is none: it cannot hold
    ],
)
def test_gates(gate, values, holds):
    before, after = taken(), taken(**values)
    found = profile.missed([profile.gate_of(gate)], after, profile.changes(before, after))
    assert (found == []) is holds


@pytest.mark.parametrize("text", ["l2_hit", "nothing>=3", "l2_hit=3", "l2_hit>=x"])
def test_a_bad_gate_is_refused(text):
    with pytest.raises(ValueError, match="expected QUANTITY<=NUMBER"):
        profile.gate_of(text)


def test_two_files_are_compared_without_a_gpu(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, hits in (("old", 40.0), ("new", 45.0)):
        profile.save(taken(l2_hit=hits), Path(f"{name}.json"))
    missing = invoke("profile", "store", "--compare", "old.json", "absent.json")
    assert missing.exit_code == 2
    assert "there is no file absent.json" in missing.stderr
    done = invoke("profile", "store", "--compare", "old.json", "new.json", "--gate", "l2_hit>=+5")
    assert done.exit_code == 0, done.output
    assert "+5.0 pp" in done.stdout
    assert Path("profile_summary.md").read_text().startswith("# Profile of store")
    assert profile.load(Path("profile_summary.json")).op == "store"
    done = invoke("profile", "store", "--compare", "old.json", "new.json", "--gate", "l2_hit>=+8", "--json")
    assert done.exit_code == 1
    assert json.loads(done.stdout)["missed"] == ["l2_hit>=+8: c has +5.0 pp"]
    assert invoke("profile", "store", "--compare", "old.json", "new.json", "--save").exit_code == 0
    assert Path("docs/profiles/store.md").exists()
    assert Path("results/nvidia-h200/profile_store.json").exists()


def test_without_ncu_it_says_so(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(child, "TOOLKIT", str(tmp_path))
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    done = invoke("profile", "store")
    assert done.exit_code == 3
    assert "ncu is not on the PATH" in done.stderr
    assert not list(tmp_path.iterdir())
    assert invoke("profile", "nothing").exit_code == 2


def test_profiled_cases_exist():
    class Gpu:
        type = "cuda"

    for op, names in profile.CHOSEN.items():
        module = cases.find(op)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "sets_for", lambda *a, **k: 2)
            known = {case.name for case in module.cases(Gpu(), False)}
        assert {profile.split(name)[0] for name in names} <= known


def test_prefill_is_profiled_beside_what_it_began_with(monkeypatch):
    """The kernel of the note's gate and the one before it, each by its name."""
    from kvstrata.bench.cases import prefill

    monkeypatch.setattr(prefill, "sets_for", lambda *a, **k: 1)
    names = profile.choose("prefill", [], torch.device("cuda"))
    assert names == list(profile.CHOSEN["prefill"])
    asked = profile.choose("prefill", ["ideas-*-B2-H8-*:v2", "full-B4-H16-S2048-D128"], torch.device("cuda"))
    assert asked == [f"ideas-{mask}-B2-H8-S512-D64:v2" for mask in ("full", "causal")] + ["full-B4-H16-S2048-D128"]
    with pytest.raises(ValueError, match="no case matches"):
        profile.choose("prefill", ["v2"], torch.device("cuda"))
    watched = []

    def case(tool, op, name, contender, end):
        watched.append((name, contender))
        return [ncu.Kernel("k", "", "", {"us": 1.0})]

    monkeypatch.setattr(ncu, "find", lambda: "ncu")
    monkeypatch.setattr(profile, "version", lambda tool: "ncu 1")
    monkeypatch.setattr(profile, "_case", case)
    sizes = {profile.split(name)[0]: 7 for name in names}
    taken = profile.take("prefill", names, MACHINE, sizes)
    assert [(c.case, c.contender, c.bytes) for c in taken.cases][:2] == [
        ("ideas-full-B2-H8-S512-D64", "ours", 7), ("ideas-full-B2-H8-S512-D64:v2", "v2", 7),
    ]  # fmt: skip
    assert watched[:2] == [("ideas-full-B2-H8-S512-D64", None), ("ideas-full-B2-H8-S512-D64", "v2")]


def test_the_child_leaves_peers_out_and_puts_them_back(monkeypatch):
    monkeypatch.setitem(sys.modules, f"{cases.__name__}.toy", toy)
    case = toy.cases(CPU, True)[0]
    assert "stack" not in launch.build(case, None, CPU).contenders
    assert "stack" in launch.build(case, "stack", CPU).contenders
    with pytest.raises(LookupError, match="no contender named 'nobody'"):
        launch.contender_of(case.build(CPU), "nobody")


# Check


@pytest.mark.parametrize("op", sweeps.names())
def test_every_sweep_passes_here(op):
    for backend, reason in sweeps.backends(op, CPU).items():
        if reason is None and backend != "triton":  # the interpreter has tests of its own
            outcomes = list(sweeps.run(op, CPU, backend, range(8)))
            assert [o.error for o in outcomes if o.error] == []
            assert any(o.refused is None for o in outcomes)


@pytest.mark.gpu
@pytest.mark.parametrize("op", sweeps.names())
def test_every_sweep_passes_on_the_gpu(op):
    device = torch.device("cuda", torch.cuda.current_device())
    for backend, reason in sweeps.backends(op, device).items():
        if reason is None:
            assert [o.error for o in sweeps.run(op, device, backend, range(8)) if o.error] == []


def test_every_op_of_bench_has_a_sweep():
    assert set(sweeps.names()) <= set(cases.names())
    assert {"store", "decode", "quantize", "settle", "replay"} <= set(sweeps.names())


def forgets_the_last_row(store_kv, k, v, k_cache, v_cache, slots, **options):
    last = slice(0, max(len(k) - 1, 0))
    store_kv(k[last], None if v is None else v[last], k_cache, v_cache, slots[last], **options)


def off_a_little(decode, q, cache, **options):
    out, *rest = decode(q, cache, **options)
    out[..., 0, 0] += 0.05
    return (out, *rest)


@pytest.mark.parametrize(
    ("op", "name", "wrong"), [("store", "store_kv", forgets_the_last_row), ("decode", "decode_attention", off_a_little)]
)
def test_a_sweep_finds_a_wrong_kernel(monkeypatch, op, name, wrong):
    monkeypatch.setattr(library, name, partial(wrong, getattr(library, name)))
    assert any(o.error for o in sweeps.run(op, CPU, "reference", range(12)))


def test_settle_finds_a_row_in_the_wrong_place(monkeypatch):
    gather = library.TieredCache.gather

    def swapped(self, layer, request=0):
        k, v, position = gather(self, layer, request)
        return (k.roll(1, 1) if k.shape[1] > 1 else k), v, position

    monkeypatch.setattr(library.TieredCache, "gather", swapped)
    assert any("off by" in (o.error or "") for o in sweeps.run("settle", CPU, "auto", range(4)))


def test_what_a_backend_refuses_is_no_failure(monkeypatch):
    def refuse(draw, backend):
        raise Refused("not such a call")

    monkeypatch.setattr(sweeps.find("replay"), "trial", refuse)
    step = check.check_sweep("replay", CPU, "reference", 3)
    assert (step.verdict, step.skipped) == ("skipped", "not such a call")


def test_draws_are_the_same_for_a_seed():
    first, again = Draw(5, CPU), Draw(5, CPU)
    assert [first.size(0, 100) for _ in range(5)] == [again.size(0, 100) for _ in range(5)]
    assert torch.equal(first.normal(3), again.normal(3))


def test_check_passes_on_the_cpu_and_says_what_it_skipped():
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
def test_check_refuses_in_one_line(arguments, monkeypatch):
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
        ("========= Error: Device not supported", 1,
         ["compute-sanitizer does not support this device or virtual machine"]),
    ],
)  # fmt: skip
def test_what_the_sanitizer_said(text, code, errors):
    assert check.read_sanitizer(text, code)[1] == errors


def test_the_sanitizer_watches_a_child(monkeypatch, tmp_path):
    """A stand-in that runs what it is given and adds a summary."""
    tool = tmp_path / "compute-sanitizer"
    rest = "sys.argv[sys.argv.index('--error-exitcode') + 2 :]"
    tool.write_text(
        f"#!{sys.executable}\nimport subprocess, sys\n"
        f"subprocess.run([x if x != 'cuda' else 'cpu' for x in {rest}])\n"
        "print('========= ERROR SUMMARY: 0 errors')\n"
    )
    tool.chmod(0o755)
    step = check.check_sanitizer("memcheck", "replay", ["reference"], 3, str(tool))
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
def test_a_sweep_in_a_process_of_its_own():
    step = check.watch_sweep("replay", "reference", 6, 3, 60.0, 120.0)
    assert (step.name, step.verdict, step.done) == ("sweep, reference", "passed", 6), step.errors
    step = check.watch_sweep("replay", "reference", 6, 3, 0.0, 120.0)
    assert step.done == sweeps.FEWEST
    step = check.watch_sweep("replay", "nothing", 2, 0, 60.0, 120.0)
    assert step.verdict == "FAILED"
    assert all(error.startswith("seed ") for error in step.errors)
    (late,) = check.watch_sweep("replay", "reference", 6, 3, 60.0, 0.1).errors
    assert "was ended" in late


@pytest.mark.parametrize(
    ("text", "code", "found"),
    [
        ("4 trials, 0 failed", 0, (4, [], None)),
        ("cuda, seed 3: k differs\n4 trials, 1 failed", 1, (4, ["seed 3: k differs"], None)),
        ("cuda refused: no\n0 trials, 0 failed", 1, (0, [], "no")),
        ("Segmentation fault", -11, (0, ["the child ended early, exit code -11: Segmentation fault"], None)),
    ],
)
def test_what_a_sweep_said(text, code, found):
    assert check.read_sweep(text, code) == found


def test_on_a_gpu_sweeps_tools_and_cases_run_side_by_side(monkeypatch):
    """Five of them meet at a barrier; one after the other they would not."""
    meet = threading.Barrier(5, timeout=30)

    def met(name):
        def run(*arguments):
            meet.wait()
            return check.Step(name(*arguments), done=1)

        return run

    monkeypatch.setattr(sweeps, "backends", lambda op, device: {"cuda": None, "triton": "not here", "reference": None})
    monkeypatch.setattr(child, "find", lambda tool: tool)
    monkeypatch.setattr(check, "check_cases", met(lambda op, device: "cases"))
    monkeypatch.setattr(check, "watch_sweep", met(lambda op, backend, *rest: backend))
    monkeypatch.setattr(check, "check_sanitizer", met(lambda tool, *rest: tool))
    steps = check.run("store", torch.device("cuda"), ("memcheck", "racecheck"), limit=60.0)
    assert [step.name for step in steps] == ["cases", "cuda", "sweep, triton", "reference", "memcheck", "racecheck"]
    assert steps[2].skipped == "not here"


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
    Path("old.json").write_text(git.at(Path(now), "HEAD~1"))
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
    assert first.text == git.at(path, "HEAD~1")
    assert second.text == path.read_text()
    assert git.versions(checkout / "nothing.json") == []


# Info


def test_info_tells_tables_and_caches(tmp_path, monkeypatch):
    monkeypatch.setenv("KVSTRATA_CACHE", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    slug = json.loads(invoke("info", "--json").stdout)["slug"]
    (tmp_path / "cubin").mkdir()
    (tmp_path / "cubin" / "x").write_bytes(bytes(100))
    (tmp_path / "tables").mkdir()
    (tmp_path / "tables" / f"{slug}.json").write_text('{"schema": 1, "ops": {"store": []}}')
    (tmp_path / "tables" / "broken.json").write_text("{}")
    facts = json.loads(invoke("info", "--json").stdout)
    assert facts["caches"]["cubin"]["bytes"] == 100
    mine, other = sorted((t for t in facts["tables"] if str(tmp_path) in t["path"]), key=lambda t: not t["used"])
    assert (mine["used"], mine["ops"]) == (True, {"store": 0})
    assert "not a tuned table" in other["error"]
    assert facts["backends"]["decode"]["reference"] is None
    text = invoke("info").stdout
    assert "cubin" in text
    assert "in use" in text
