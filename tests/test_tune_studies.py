"""Studies that are killed, resumed and shared."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from subprocess import PIPE
from types import SimpleNamespace

import pytest
import torch

optuna = pytest.importorskip("optuna")

from optuna.trial import TrialState  # noqa: E402

import tune_toy  # noqa: E402
from kvstrata.tools.tune import cli, search, session, storage  # noqa: E402
from tune_toy import Speed  # noqa: E402

pytestmark = pytest.mark.usefixtures("own_cache")


def study(tmp_path: Path, name: str = "x") -> optuna.Study:
    return tune_toy.study_of(tmp_path / f"{name}.journal")


def worker(journal: Path, trials: int, hold: int) -> subprocess.Popen:
    command = [sys.executable, tune_toy.__file__, str(journal), str(trials), str(hold)]
    return subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdin=PIPE, stdout=PIPE, text=True)


def wait_until_held(*workers: subprocess.Popen) -> None:
    assert [one.stdout.readline() for one in workers] == ["held\n"] * len(workers)


def trials_in(journal: Path, *states: TrialState) -> list:
    return tune_toy.study_of(journal).get_trials(deepcopy=False, states=states or None) if journal.exists() else []


def test_a_killed_study_resumes(tmp_path: Path) -> None:
    journal = tmp_path / "x.journal"
    killed = worker(journal, 20, hold=5)
    try:
        wait_until_held(killed)
    finally:
        killed.send_signal(signal.SIGKILL)
        killed.wait()
    (left,) = trials_in(journal, TrialState.RUNNING)
    before = {t.number: t.value for t in trials_in(journal, TrialState.COMPLETE)}
    with journal.open("ab") as file:
        file.write(b'{"op_code": 4, "wor')  # what a host that went down may leave
    row = tune_toy.run(tune_toy.problem(lambda x: Speed(100 + x)), tune_toy.study_of(journal), trials=20)
    after = {t.number: t for t in trials_in(journal)}
    assert {number: after[number].value for number in before} == before
    assert after[left.number].state is TrialState.FAIL
    again = [t for t in after.values() if t.params == left.params and t.state is not TrialState.FAIL]
    assert again, "the trial that was killed ran again"
    assert row.trials["complete"] + row.trials["pruned"] == 20
    assert row.trials["put back"] == 1


def test_two_processes_share_a_study(tmp_path: Path) -> None:
    journal = tmp_path / "x.journal"
    both = [worker(journal, 22, hold=2) for _ in range(2)]
    wait_until_held(*both)  # each has a trial
    for one in both:
        one.communicate("go\n")
    assert [one.returncode for one in both] == [0, 0]
    taken = [t for t in trials_in(journal) if storage.OWNER in t.user_attrs]
    every = [t for t in taken if t.user_attrs.get(search.REJECTED) != search.DUPLICATE]
    assert all(t.state in search.DONE for t in every)
    assert 22 <= len(every) <= 23  # both may begin the last one
    assert len({t.params["x"] for t in every}) == len(every), "nothing was done twice"
    assert len({t.user_attrs[storage.OWNER] for t in every}) == 2, "both took part"
    # one may have queued what the other left no room for: that waits for whoever resumes
    left = [t for t in trials_in(journal) if storage.OWNER not in t.user_attrs]
    assert {t.state for t in left} <= {TrialState.WAITING}
    row = tune_toy.run(tune_toy.problem(lambda x: Speed(100 + x)), tune_toy.study_of(journal), trials=24)
    assert row.trials["complete"] + row.trials["pruned"] == len(tune_toy.VALUES) == 24


def test_studies_in_a_database_and_numbers_of_studies(tmp_path: Path) -> None:
    pytest.importorskip("sqlalchemy")
    url = f"sqlite:///{tmp_path / 'tune.db'}"
    row = tune_toy.run(tune_toy.problem(lambda x: Speed(100 - x), values=(1, 9)), tune_toy.study_of(url))
    assert row.choice == {"x": 9}
    assert [tune_toy.study_of(url, resume).study_name for resume in (True, False, True)] == ["toy#1", "toy#2", "toy#2"]
    assert len(storage.open_study(storage.open_storage(url), "other", True).trials) == 0


def test_abandoned_trials_of_other_hosts_are_requeued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = study(tmp_path)
    trial = one.ask()
    trial.set_user_attr(storage.OWNER, "elsewhere:1")
    trial.suggest_categorical("x", tune_toy.VALUES)
    assert storage.requeue_abandoned(one) == 0
    monkeypatch.setattr(storage, "STALE", storage.STALE * 0)
    assert storage.requeue_abandoned(one) == 1
    assert one.ask().suggest_categorical("x", tune_toy.VALUES) == trial.params["x"]


def test_time_left_goes_to_cases_whose_kernels_were_compiled_late(tmp_path, monkeypatch):
    """The first case has one kernel at first, the second all of its two: only the first is searched again."""
    runs: list[str] = []
    available = {"early": [1, 3, 3], "late": [2]}

    class Fake:
        def __init__(self, problem, *rest):
            self.case = problem.case

        def run(self):
            measured = available[self.case].pop(0)
            runs.append(self.case)
            return SimpleNamespace(
                case=self.case, measured=measured, valid=4 if self.case == "early" else 2, seconds=1.0
            )

        def near_misses(self, most):
            return []

    monkeypatch.setattr(session, "Search", Fake)
    monkeypatch.setattr(session, "Timer", lambda *arguments: None)
    problem = tune_toy.problem(lambda x: Speed(100), values=(1, 2, 3, 4))
    one = session.Session(
        op="toy", problems=[replace(problem, case="early"), replace(problem, case="late")], device=torch.device("cpu"),
        arch="sm_90", backend="cuda", gates="hardware", settings=search.Settings(trials=4, seconds=600.0),
        machine={"slug": "x"}, storage=tmp_path / "x.journal",
    )  # fmt: skip
    with cli._progress() as progress:
        tuning = one.run(time.monotonic(), progress, lambda tuning: None)
    assert runs == ["early", "late", "early", "early"], "until nothing new can be measured"
    assert [(row.case, row.measured, row.seconds) for row in tuning.rows] == [("early", 3, 3.0), ("late", 2, 1.0)]
