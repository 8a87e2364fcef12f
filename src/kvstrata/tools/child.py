"""Runs other programs (a profiler, a sanitizer) and kills them with all their children when their time is up."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress

TOOLKIT = "/usr/local/cuda"


def find_tool(tool: str) -> str | None:
    """Path of a CUDA toolkit program, from PATH or the toolkit's folder; None if there is none."""
    roots = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), TOOLKIT]
    candidates = [tool, *(f"{home}/bin/{tool}" for home in roots if home)]
    return next((path for candidate in candidates if (path := shutil.which(candidate))), None)


def output(*command: str) -> str | None:
    """Standard output of a short command; None if it cannot run, fails or takes longer than a minute."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


class Timeout(Exception):
    """A process exceeded its time limit and was killed; ``output`` is what it had printed."""

    def __init__(self, message: str, output: str = "") -> None:
        super().__init__(message)
        self.output = output


def run(command: Sequence[str], seconds: float, environment: Mapping[str, str] | None = None) -> tuple[str, int]:
    """Run a command; returns stdout and stderr together, and the exit code. `environment` extends ours.

    Its children are killed too: a survivor would hold the pipe that is read here.
    """
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, text=True,
        errors="replace", env={**os.environ, **(environment or {})}, start_new_session=True,
    )  # fmt: skip
    try:
        printed, _ = process.communicate(timeout=max(seconds, 0.0))
    except BaseException as error:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        printed, _ = process.communicate()
        if isinstance(error, subprocess.TimeoutExpired):
            tail = " / ".join(line for line in printed.splitlines()[-3:] if line.strip())
            last = f"; its last lines: {tail}" if tail else ""
            raise Timeout(f"took more than {seconds:.0f} s and was killed{last}", printed) from error
        raise
    return printed, process.returncode
