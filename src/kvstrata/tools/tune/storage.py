"""Studies that survive a killed process and are shared by several: a journal file, or an SQL database by URL.

A trial records its owner. The next process requeues a trial whose process is gone or, on another host, that was
not finished in ten minutes. The journal is protected by a lock that the operating system releases when its process
dies, and a line that was cut off by a kill is removed before the next one is written.
"""

from __future__ import annotations

import datetime
import fcntl
import hashlib
import os
import platform
from pathlib import Path

import optuna
from optuna.storages import JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState

OWNER = "owner"
STALE = datetime.timedelta(minutes=10)  # age of an abandoned trial on another host; a trial takes seconds
READ_BYTES = 1 << 16


class Lock:
    """`flock` on a file next to the journal: released when the process that holds it ends, for whatever reason."""

    def __init__(self, journal: Path) -> None:
        self.journal, self.path = journal, journal.with_name(journal.name + ".lock")

    def acquire(self) -> bool:
        self.handle = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        fcntl.flock(self.handle, fcntl.LOCK_EX)
        if self.journal.exists():
            _drop_partial_line(self.journal)
        return True

    def release(self) -> None:
        os.close(self.handle)


def _drop_partial_line(path: Path) -> None:
    with path.open("rb+") as file:
        end = position = file.seek(0, os.SEEK_END)
        while position > 0:
            start = max(position - READ_BYTES, 0)
            file.seek(start)
            if (newline := file.read(position - start).rfind(b"\n")) >= 0:
                position = start + newline + 1
                break
            position = start
        if position < end:
            file.truncate(position)


def open_storage(where: str | Path) -> optuna.storages.BaseStorage:
    """Storage at a URL such as sqlite:///tune.db, or in a journal file."""
    if "://" in str(where):
        try:
            return RDBStorage(str(where))
        except ImportError as error:
            raise ValueError(f"storage: {where} needs a package that is not installed: {error}") from error
    path = Path(where)
    path.parent.mkdir(parents=True, exist_ok=True)
    return JournalStorage(JournalFileBackend(str(path), Lock(path)))  # type: ignore[arg-type]


def open_study(storage: optuna.storages.BaseStorage, name: str, resume: bool, seed: int | None = None) -> optuna.Study:
    """A new study with that name; with `resume` the newest existing one, which another process may be working on."""
    names = [summary.study_name for summary in optuna.get_all_study_summaries(storage, include_best_trial=False)]
    numbers = [int(n.rpartition("#")[2]) for n in names if n.rpartition("#")[0] == name]
    number = max(numbers, default=0 if not resume else 1) + (0 if resume else 1)
    return optuna.create_study(
        storage=storage,
        study_name=f"{name}#{number}",
        load_if_exists=True,
        sampler=optuna.samplers.TPESampler(seed=seed, n_startup_trials=8),
        pruner=optuna.pruners.MedianPruner(n_startup_trials=6, n_warmup_steps=10),
    )


def owner() -> str:
    """Owner of a trial: an anonymised host and a process id."""
    return f"{hashlib.sha256(platform.node().encode()).hexdigest()[:12]}:{os.getpid()}"


def _is_abandoned(trial: FrozenTrial) -> bool:
    """True if the owner of a running trial is gone."""
    host, _, pid = str(trial.user_attrs.get(OWNER, "")).rpartition(":")
    if host and host == owner().rpartition(":")[0]:
        return not _process_exists(int(pid))
    return trial.datetime_start is not None and datetime.datetime.now() - trial.datetime_start > STALE


def _process_exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def requeue_abandoned(study: optuna.Study) -> int:
    """Requeue the trials of dead processes; returns their number."""
    count = 0
    for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
        if not _is_abandoned(trial):
            continue
        try:
            study.tell(trial.number, state=TrialState.FAIL)
        except (ValueError, RuntimeError):  # another process has done so
            continue
        if trial.params:
            study.enqueue_trial(trial.params)
        count += 1
    return count
