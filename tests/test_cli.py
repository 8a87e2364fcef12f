"""The command line, end to end on the CPU with the toy op."""

import itertools
import json
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
import typer
from rich.text import Text
from typer import rich_utils
from typer.testing import CliRunner

import toy
from kvstrata.tools.bench import Timer, cases, probes, render, results, runner
from kvstrata.tools.cli import app


@pytest.fixture
def kvstrata(monkeypatch, tmp_path):
    """Run the command in an empty folder, with the toy op among the benchmarks and small buffers."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cases, "names", lambda: ["toy"])
    monkeypatch.setitem(sys.modules, f"{cases.__name__}.toy", toy)
    monkeypatch.setattr(runner, "Timer", partial(Timer, flush_bytes=1 << 12))
    monkeypatch.setattr(runner, "copy_bandwidth", lambda timer: probes.copy_bandwidth(timer, 1 << 16, rounds=5))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return lambda *arguments: CliRunner().invoke(app, [str(a) for a in arguments])


def test_bench_prints_table_and_summary(kvstrata):
    done = kvstrata("bench", "toy", "--quick")
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith("No GPU here: this times the CPU path")
    for text in ("fp32-64", "ours-too", "stack", "copy", "unwilling absent: needs a machine of another kind"):
        assert text in done.stdout
    lines = done.stdout.splitlines()
    start = lines.index("Correctness: PASSED")
    assert [line.split(":")[0] for line in lines[start : start + 4]] == [
        "Correctness",
        "Baseline performance",
        "Optimized performance",
        "Speedup",
    ]
    assert not list(Path().iterdir())


def test_bench_of_a_wrong_kernel_exits_1_without_a_speed(kvstrata, monkeypatch):
    monkeypatch.setattr(toy, "cases", partial(toy.cases, wrong=("ours",)))
    done = kvstrata("bench", "toy", "--quick", "--device", "cpu", "--only", "*-64")
    assert done.exit_code == 1
    assert "Correctness: FAILED" in done.stdout
    assert "Speedup" not in done.stdout
    assert "No GPU" not in done.stdout


def test_bench_summary_of_the_module_wins(kvstrata, monkeypatch):
    monkeypatch.setattr(toy, "summary", lambda report: f"toy says [{len(report.cases)}]", raising=False)
    assert "toy says [1]" in kvstrata("bench", "toy", "--quick", "--only", "*-64").stdout


def scaled(path, factor):
    """The saved result as if every time had been `factor` times as long."""
    data = json.loads(path.read_text())
    for row in (row for case in data["cases"] for row in case["rows"]):
        row["samples"] = [factor * x for x in row["samples"]]
        row["us"] = {key: x if key == "n" else factor * x for key, x in row["us"].items()}
    other = Path(f"scaled-{factor}.json")
    other.write_text(json.dumps(data))
    return other


def test_bench_saves_and_compares(kvstrata):
    assert kvstrata("bench", "toy", "--quick", "--save").exit_code == 0
    (path,) = Path("results").glob("cpu-*/toy.json")
    assert results.load(path).op == "toy"
    done = kvstrata("bench", "toy", "--quick", "--against", scaled(path, 0.001))
    assert done.exit_code == 1
    assert "Slower than before:" in done.stdout
    done = kvstrata("bench", "toy", "--quick", "--against", scaled(path, 1000))
    assert done.exit_code == 0
    assert "No case got slower." in done.stdout


def test_bench_replaces_cases_of_a_saved_result(kvstrata):
    assert kvstrata("bench", "toy", "--quick", "--save").exit_code == 0
    (path,) = Path("results").glob("cpu-*/toy.json")
    before = results.load(scaled(path, 1000))
    results.save(before, "results")
    before = results.load(path)  # rounded as files are
    done = kvstrata("bench", "toy", "--quick", "--save", "--only", "*-64", "--revision", "abc")
    assert done.exit_code == 0, done.output
    after = results.load(path)
    assert (after.machine, after.method) == (before.machine, before.method)
    assert [case.name for case in after.cases] == [case.name for case in before.cases]
    for old, new in zip(before.cases, after.cases, strict=True):
        if new.name.endswith("-64"):
            assert new.measured
            assert new.row("ours").us.median < old.row("ours").us.median / 10
        else:
            assert new == old
    replaced = next(case for case in after.cases if case.measured)
    assert replaced.measured in render.caption(after)


@pytest.mark.parametrize("change", [{"name": "another"}, {"versions": {"torch": "0.1"}}])
def test_bench_replaces_no_cases_of_another_machine(kvstrata, change):
    assert kvstrata("bench", "toy", "--quick", "--save").exit_code == 0
    (path,) = Path("results").glob("cpu-*/toy.json")
    data = json.loads(path.read_text())
    data["machine"] |= change
    path.write_text(json.dumps(data))
    done = kvstrata("bench", "toy", "--quick", "--save", "--only", "*-64")
    assert done.exit_code == 2
    assert "--only: expected the machine of the saved result" in done.stderr
    assert json.loads(path.read_text()) == data


def test_bench_json_is_json(kvstrata):
    done = kvstrata("bench", "toy", "--quick", "--json", "--only", "*-64")
    assert [case["name"] for case in json.loads(done.stdout)["cases"]] == ["fp32-64"]
    assert "Correctness: PASSED" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nope"], "no benchmark named 'nope'; there are: toy"),
        (["toy", "--only", "zzz"], "no case matches 'zzz'"),
        (["toy", "--device", "cuda"], "torch sees no CUDA device"),
        (["toy", "--only", "*-64", "--save"], "--save with --only"),
        (["toy", "--against", "missing.json"], "missing.json"),
    ],
)
def test_bad_requests_get_a_one_line_error(kvstrata, arguments, message):
    done = kvstrata("bench", *arguments)
    assert done.exit_code == 2
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_report_fills_documents_and_draws(kvstrata):
    kvstrata("bench", "toy", "--quick", "--save")
    readme = Path("README.md")
    readme.write_text("# x\n<!-- kvstrata:toy pivot=us contenders=ours,naive -->\n<!-- /kvstrata:toy -->\nend\n")
    assert kvstrata("report", "--check").exit_code == 1
    done = kvstrata("report")
    assert done.exit_code == 0, done.output
    assert "| case (us) | ours | naive |" in readme.read_text()
    assert readme.read_text().endswith("<!-- /kvstrata:toy -->\nend\n")
    assert [p.suffix for p in Path("docs/figures").iterdir()] == [".svg"]
    assert kvstrata("report", "--check").exit_code == 0
    assert kvstrata("report", "--check").stdout == "Nothing to bring up to date.\n"


def test_report_names_missing_results(kvstrata):
    Path("x.md").write_text("<!-- kvstrata:other -->\n<!-- /kvstrata:other -->\n")
    done = kvstrata("report", "x.md")
    assert done.exit_code == 2
    assert "x.md: no result of 'other': run kvstrata bench other --save" in done.stderr


def test_info_lists_backends_and_benchmarks(kvstrata):
    facts = json.loads(kvstrata("info", "--json").stdout)
    assert facts["backends"]["store"]["reference"] is None
    assert "CUDA" in facts["backends"]["store"]["cuda"]
    assert facts["benchmarks"] == ["toy"]
    assert "store reference available" in kvstrata("info").stdout


COMMANDS = sorted(typer.main.get_command(app).commands)


def help_of(kvstrata, monkeypatch, command, width):
    """Its lines on a terminal so wide. typer reads TERMINAL_WIDTH once, when rich_utils is first imported."""
    monkeypatch.setattr(rich_utils, "MAX_WIDTH", None)
    monkeypatch.setenv("COLUMNS", str(width))
    done = kvstrata(command, "--help")
    assert done.exit_code == 0
    return [line.strip() for line in Text.from_ansi(done.stdout).plain.splitlines()]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_json_and_an_example(kvstrata, monkeypatch, command):
    lines = help_of(kvstrata, monkeypatch, command, 100)
    assert any(line.startswith(f"Example: kvstrata {command}") for line in lines)
    assert any(re.match(r"\W*--json\b.*Print JSON", line) for line in lines)


def lines_of(paragraph, lines):
    """Files that repeat the paragraph word for word."""
    for begin, first in enumerate(lines):
        for end in range(begin + 1, len(lines) + 1 if first and paragraph.startswith(first) else begin):
            if " ".join(lines[begin:end]) == paragraph:
                return lines[begin:end]
    raise AssertionError(f"not shown: {paragraph}")


@pytest.mark.parametrize("command", COMMANDS)
def test_help_fills_its_lines(kvstrata, monkeypatch, command):
    """Lines of a paragraph end where the terminal does, not where those of the docstring did."""
    paragraphs = [" ".join(x.split()) for x in typer.main.get_command(app).commands[command].help.split("\n\n")]
    for width in (60, 100):
        lines = help_of(kvstrata, monkeypatch, command, width)
        for paragraph in paragraphs:
            for line, after in itertools.pairwise(lines_of(paragraph, lines)):
                assert len(line) + 1 + len(after.split()[0]) > width - 4, "there was room for another word"


def test_benchmarks_are_discovered_by_module(monkeypatch, tmp_path):
    (tmp_path / "found.py").write_text("def cases(device, quick): return []\n")
    monkeypatch.setattr(cases, "__path__", [*cases.__path__, str(tmp_path)])
    assert "found" in cases.names()
    assert cases.find("found").cases(None, True) == []
    sys.modules.pop(f"{cases.__name__}.found")


@pytest.mark.parametrize(
    ("module", "absent"),
    [("kvstrata", ("torch", "typer", "rich")), ("kvstrata.cache", ("scipy", "matplotlib", "typer", "rich"))],
)
def test_imports_are_lazy(module, absent):
    code = f"import sys, {module}; print([m for m in {absent} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_help_imports_nothing_heavy():
    """`kvstrata --help`, and that of every command, without torch: it takes seconds to import."""
    heavy = ("torch", "triton", "transformers", "numba", "numpy", "scipy", "matplotlib", "optuna", "rich.progress")
    code = f"""
import sys
from typer.testing import CliRunner
from kvstrata.tools.cli import app
for command in ([], *([name] for name in {COMMANDS})):
    assert CliRunner().invoke(app, [*command, "--help"]).exit_code == 0, command
print([m for m in {heavy} if m in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_public_names_are_importable():
    import kvstrata

    assert set(kvstrata.__all__) <= set(dir(kvstrata))
    assert all(getattr(kvstrata, name) is not None for name in kvstrata.__all__)
    assert kvstrata.cache.TieredCache is kvstrata.TieredCache
    assert kvstrata.cache.BudgetExceeded is kvstrata.BudgetExceeded
    assert kvstrata.layout.Format is kvstrata.Format
    assert "fused_copy_replay_data" in kvstrata.replay.__all__
    assert not hasattr(kvstrata, "fused_copy_replay_data")
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        kvstrata.nothing  # noqa: B018
