"""`kvstrata profile`: ncu's CSV, traces, gates, summaries."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import toy
from conftest import invoke
from kvstrata.tools import child
from kvstrata.tools.bench import cases
from kvstrata.tools.profile import launch, ncu, profile
from kvstrata.tools.profile import tables as profile_tables

CSV = (Path(__file__).parent / "data" / "ncu_raw.csv").read_text()
CPU = torch.device("cpu")
MACHINE = {"name": "NVIDIA H200", "slug": "nvidia-h200", "revision": "abc", "dirty": False, "date": "2026-01-01T00:00Z"}


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
        ("==ERROR== Failed to initialize the profiler: LibraryNotLoaded", "does not expose the counters"),
        ("==WARNING== No kernels were profiled.", "none of our kernels"),
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
import pathlib, sys
if "--version" in sys.argv:
    print("NVIDIA (R) Nsight Compute Command Line Profiler\\nVersion 2025.3.1.0 (build 1)")
elif "sm__pipe_tensor_cycles_active" in " ".join(sys.argv):
    print("==ERROR== Failed to find metric sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active")
    sys.exit(1)
elif sys.argv[-1] == "odd" and "--metrics" in sys.argv:
    sys.exit("==ERROR== something that nobody has seen before")
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


def test_an_unknown_failure_is_retried_with_sections_only(fake_ncu):
    found = profile.take("store", ["odd"], MACHINE, {"odd": 1})
    assert [case.case for case in found.cases] == ["odd"], found.failed


def test_a_profile_that_runs_out_of_time_keeps_its_results(fake_ncu, watch, monkeypatch):
    """A program takes a second on this clock, but for one that takes more than there is."""
    run = child.run

    def timed(command, seconds):
        if command[-1] != "slow":
            watch.sleep(1)
            return run(command, 600)
        watch.sleep(seconds)
        raise child.Timeout(f"took more than {seconds:.0f} s and was killed")

    watch.drive(profile)
    monkeypatch.setattr(child, "run", timed)
    names = ["good", "slow", "never"]
    found = profile.take("store", names, MACHINE, dict.fromkeys(names, 1), seconds=4)
    assert [case.case for case in found.cases] == ["good"]
    assert found.failed == {"slow": "ncu took more than 2 s and was killed", "never": "the time limit was reached"}


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
    monkeypatch.setattr("kvstrata.tools.terminal.device_of", lambda device: torch.device("cuda"))
    monkeypatch.setattr("kvstrata.tools.bench.machine.describe", lambda *arguments: MACHINE)
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
    assert "counters was not profiled: this user may not read" in text
    assert profile.load(Path("results/nvidia-h200/profile_store.json")).cases[1].case == "two"


def test_a_late_program_is_killed_with_its_children(tmp_path, monkeypatch):
    """The grandchild holds the pipe: without its end nothing comes back. The time is up once it has begun."""
    begun, survived = tmp_path / "begun", tmp_path / "survived"

    class Late(subprocess.Popen):
        def communicate(self, timeout=None):
            while timeout and not begun.exists():
                time.sleep(0.01)
            return super().communicate(timeout=0 if timeout else None)

    monkeypatch.setattr(child.subprocess, "Popen", Late)
    with pytest.raises(child.Timeout, match="took more than 1 s and was killed; its last lines: begun"):
        child.run(["sh", "-c", f"(sleep 60; touch {survived}) & echo begun; touch {begun}; wait"], 1)
    assert not survived.exists()
    monkeypatch.undo()
    assert child.run(["sh", "-c", "echo $MINE >&2; exit 3"], 30, {"MINE": "x"}) == ("x\n", 3)


def test_tools_are_found_where_the_toolkit_is(tmp_path, monkeypatch):
    tool = tmp_path / "bin" / "ncu"
    tool.parent.mkdir()
    tool.touch(0o755)
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(child, "TOOLKIT", str(tmp_path / "none"))
    monkeypatch.delenv("CUDA_PATH", raising=False)
    monkeypatch.delenv("CUDA_HOME", raising=False)
    assert child.find_tool("ncu") is None
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert child.find_tool("ncu") == str(tool)


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
def test_gates_hold_or_are_missed_by_value_and_change(gate, values, holds):
    before, after = taken(), taken(**values)
    found = profile.missed_gates([profile.gate_of(gate)], after, profile.changes(before, after))
    assert (found == []) is holds


@pytest.mark.parametrize("text", ["l2_hit", "nothing>=3", "l2_hit=3", "l2_hit>=x"])
def test_invalid_gate_raises(text):
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


def test_without_ncu_the_error_says_so(tmp_path, monkeypatch):
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

    for op, names in profile.DEFAULT_CASES.items():
        module = cases.find(op)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "sets_for", lambda *a, **k: 2)
            known = {case.name for case in module.cases(Gpu(), False)}
        assert {profile.split(name)[0] for name in names} <= known


def test_prefill_is_profiled_with_its_baseline(monkeypatch):
    """The kernel of the note's gate and the one before it, each by its name."""
    from kvstrata.tools.bench.cases import prefill

    monkeypatch.setattr(prefill, "sets_for", lambda *a, **k: 1)
    names = profile.choose("prefill", [], torch.device("cuda"))
    assert names == list(profile.DEFAULT_CASES["prefill"])
    asked = profile.choose("prefill", ["ideas-*-B2-H8-*:v2", "full-B4-H16-S2048-D128"], torch.device("cuda"))
    assert asked == [f"ideas-{mask}-B2-H8-S512-D64:v2" for mask in ("full", "causal")] + ["full-B4-H16-S2048-D128"]
    with pytest.raises(ValueError, match="no case matches"):
        profile.choose("prefill", ["v2"], torch.device("cuda"))
    watched = []

    def counted(arguments, own, end):
        watched.append(arguments)
        return [ncu.Kernel("k", "", "", {"us": 1.0})]

    monkeypatch.setattr(ncu, "find", lambda: "ncu")
    monkeypatch.setattr(profile, "version", lambda tool: "ncu 1")
    monkeypatch.setattr(profile, "_counted", counted)
    sizes = {profile.split(name)[0]: 7 for name in names}
    taken = profile.take("prefill", names, MACHINE, sizes)
    assert [(c.case, c.contender, c.bytes) for c in taken.cases][:2] == [
        ("ideas-full-B2-H8-S512-D64", "ours", 7), ("ideas-full-B2-H8-S512-D64:v2", "v2", 7),
    ]  # fmt: skip
    assert watched[:2] == [["prefill", "ideas-full-B2-H8-S512-D64"], ["prefill", "ideas-full-B2-H8-S512-D64", "v2"]]


def test_the_child_leaves_peers_out_and_puts_them_back(monkeypatch):
    monkeypatch.setitem(sys.modules, f"{cases.__name__}.toy", toy)
    case = toy.cases(CPU, True)[0]
    assert "stack" not in launch.build(case, None, CPU).contenders
    assert "stack" in launch.build(case, "stack", CPU).contenders
    with pytest.raises(LookupError, match="no contender named 'nobody'"):
        launch.contender_of(case.build(CPU), "nobody")
