"""Winners and near misses of a search under Nsight Compute; here a program that answers in its place."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

optuna = pytest.importorskip("optuna")

import tune_toy  # noqa: E402
from kvstrata.tools import child  # noqa: E402
from kvstrata.tools.profile import ncu, profile  # noqa: E402
from kvstrata.tools.tune import cli, decide, profiles, search, session  # noqa: E402
from kvstrata.tools.tune.space import key  # noqa: E402
from tune_toy import Drawn, Speed  # noqa: E402

CSV = Path(__file__).parent / "data" / "ncu_raw.csv"
CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("own_cache")

# Writes a table with the sample's first launch for every choice that it is asked about, a mark before each; hits in L2
# are those of the choice.
FAKE = """#!{python}
import csv, json, pathlib, sys
if "--version" in sys.argv:
    sys.exit(print("NVIDIA (R) Nsight Compute Command Line Profiler\\nVersion 2025.3.1.0 (build 1)"))
if {denied}:
    sys.exit("==ERROR== ERR_NVGPUCTRPERM - The user does not have permission")
rows = list(csv.reader(pathlib.Path({csv!r}).read_text().splitlines()[-5:]))
header, units, decode = rows[:3]
name, hits = header.index("Kernel Name"), header.index("lts__t_sector_hit_rate.pct")
with open(sys.argv[sys.argv.index("--log-file") + 1], "w") as log:
    out = csv.writer(log, quoting=csv.QUOTE_ALL)
    out.writerows([header, units])
    for case, choices in json.loads(pathlib.Path(sys.argv[-1]).read_text()):
        for choice in choices:
            out.writerow([cell if i != name else "empty" for i, cell in enumerate(decode)])
            out.writerow([cell if i != hits else str({hits}[choice["x"]]) for i, cell in enumerate(decode)])
"""


@pytest.fixture
def fake_ncu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def make(hits: dict[int, float], denied: bool = False) -> None:
        tool = tmp_path / "bin" / "ncu"
        tool.parent.mkdir()
        tool.write_text(FAKE.format(python=sys.executable, csv=str(CSV), hits=hits, denied=denied))
        tool.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tool.parent}{os.pathsep}{os.environ['PATH']}")
        profile.version.cache_clear()

    return make


def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, speeds: dict[int, float]):
    problem = tune_toy.problem(lambda x: Speed(speeds[x]), values=tuple(speeds))
    monkeypatch.setattr(session, "Timer", lambda *arguments: Drawn())
    one = session.Session(
        op="toy", problems=[problem], device=CPU, arch="sm_90", backend="cuda", gates="hardware",
        settings=search.Settings(), machine={"slug": "x"}, storage=tmp_path / "x.journal", profile=True,
    )  # fmt: skip
    with cli._progress() as progress:
        return one.run(0.0, progress, lambda tuning: None)


def test_metrics_are_better_by_a_margin() -> None:
    base = {"l2_hit": 40.0, "dram": 60.0, "occupancy": 20.0, "us": 10.0}
    for change, better in (
        ({}, False),
        ({"l2_hit": 48.0}, True),
        ({"l2_hit": 47.9}, False),
        ({"dram": 50.0}, True),
        ({"dram": 70.0, "l2_hit": 60.0}, False),
        ({"occupancy": 28.0}, True),
        ({"occupancy": 12.0, "dram": 40.0}, False),
        ({"us": 1.0}, False),
    ):
        assert decide.better_metrics({**base, **change}, base) is better, change
    assert not decide.better_metrics({}, base), "nothing was measured"


def test_launches_are_separated_by_markers() -> None:
    mark, other = ncu.Kernel(profiles.MARK, "", "", {}), ncu.Kernel("decode", "", "", {"us": 1.0})
    assert [len(part) for part in profiles.split([other, mark, other, other, mark, mark, other])] == [2, 0, 1]


@pytest.mark.parametrize("better", [True, False], ids=["better metrics", "same metrics"])
def test_an_equally_fast_trial_wins_only_by_measured_metrics(
    better: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fake_ncu
) -> None:
    """2 % are less than the quick gate asks for; 100 samples confirm them where the profile speaks for it."""
    fake_ncu({1: 40.0, 2: 55.0 if better else 41.0})
    tuning = run(tmp_path, monkeypatch, {1: 100.0, 2: 98.0})
    (row,) = tuning.rows
    assert tuning.method["profile"] == "ncu 2025.3.1.0"
    assert row.choice == ({"x": 2} if better else None)
    assert row.metrics["default"]["l2_hit"] == 40.0
    assert row.metrics["default"]["us"] == pytest.approx(145.888)
    assert ("tuned" in row.metrics) is better
    assert f"1 no slower were profiled, {int(better)} with better metrics" in row.note
    assert row.measured == 2, "nobody is counted twice"


def test_a_winner_is_profiled_beside_the_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fake_ncu) -> None:
    fake_ncu({1: 40.0, 2: 30.0})
    (row,) = run(tmp_path, monkeypatch, {1: 100.0, 2: 80.0}).rows
    assert row.choice == {"x": 2}, "faster by far: fewer hits in L2 do not matter"
    assert (row.metrics["default"]["l2_hit"], row.metrics["tuned"]["l2_hit"]) == (40.0, 30.0)


def test_without_counters_the_search_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fake_ncu) -> None:
    fake_ncu({}, denied=True)
    tuning = run(tmp_path, monkeypatch, {1: 100.0, 2: 80.0})
    assert tuning.rows[0].choice == {"x": 2}
    assert "ERR_NVGPUCTRPERM" in tuning.method["profile"]


def test_occupancy_by_registers_alone_does_not_promote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decide, "better_profile", lambda *profiles: True)
    speeds = {1: 100.0, 2: 98.0}
    problem = tune_toy.problem(lambda x: Speed(speeds[x]), values=(1, 2))
    for measured, choice in ((False, {"x": 2}), (True, None)):
        study = tune_toy.study_of(tmp_path / f"{measured}.journal")
        assert tune_toy.run(problem, study, measured_profiles=measured).choice == choice


def test_profiles_are_requested_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstrata.tools.child.find_tool", lambda tool: None)
    assert not cli._use_ncu(None, True, "cuda")
    with pytest.raises(ValueError, match="--profile: ncu is not on the PATH"):
        cli._use_ncu(True, False, "cuda")
    monkeypatch.setattr("kvstrata.tools.child.find_tool", lambda tool: "/bin/ncu")
    assert cli._use_ncu(None, True, "cuda")
    assert cli._use_ncu(True, False, "cuda")
    assert not cli._use_ncu(None, False, "cuda")
    assert not cli._use_ncu(False, True, "cuda")
    assert not cli._use_ncu(True, True, "reference")


@pytest.mark.gpu
@pytest.mark.skipif(child.find_tool("ncu") is None, reason="ncu is not on the PATH")
def test_ncu_profiles_each_configuration() -> None:
    """Two configurations of a case, each with the metrics that the rule looks at."""
    choices = [{"kernel": "direct", "threads": 128, "per": n, "vector": 16} for n in (1, 2)]
    found = profiles.take("store", [("8x128-fp16-256", choices)])
    assert list(found) == [("8x128-fp16-256", key(choice)) for choice in choices]
    assert all(decide.METRICS.keys() <= values.keys() for values in found.values())
