"""Is an op correct here: the bench cases' own checks, random sweeps, then some of these under compute-sanitizer.

The sanitizer's tools run side by side, each in a process of its own on a few small trials; without the caching
allocator every tensor is its own allocation, so that memcheck sees one element past its end.
"""

from __future__ import annotations

import gc
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import torch

from kvstrata.bench import Case, cases
from kvstrata.bench.runner import verify

from . import sweeps
from .launch import build

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
TRIALS = (60, 12)  # of each backend: full, quick
SWEEP_SECONDS = (20.0, 6.0)  # for them; most of it is compiling, on a GPU
FEWEST = 4  # trials, however long they take
WATCHED = (6, 3)  # trials under a tool
SECONDS = 420  # for one tool
FLAGS = ("--target-processes", "all", "--report-api-errors", "no", "--error-exitcode", "86")


@dataclass(frozen=True)
class Step:
    """One part of a check. `errors` is empty where it passed; `skipped` says why it was not done."""

    name: str
    done: int = 0
    seconds: float = 0.0
    errors: list[str] = field(default_factory=list)
    skipped: str | None = None

    @property
    def verdict(self) -> str:
        return "FAILED" if self.errors else "skipped" if self.skipped else "passed"


def check_cases(op: str, device: torch.device) -> Step:
    """Every contender of ours in the quick cases of bench, checked on the inputs that bench would time."""
    began, done, errors = time.perf_counter(), 0, []
    for case in cases.find(op).cases(device, True):
        count, failed = _check_case(case, device)
        done += count
        errors += [f"{case.name}: {name}: {why}" for name, why in failed.items()]
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return Step("bench cases", done, time.perf_counter() - began, errors)


def _check_case(case: Case, device: torch.device) -> tuple[int, dict[str, str]]:
    try:
        bench = build(case, None, device)
    except Exception as error:
        return 0, {"could not be built": f"{type(error).__name__}: {error}"}
    ours = {name: call for name, call in bench.contenders.items() if name in {bench.ours, *bench.variants}}
    return len(ours), verify(bench, ours, case.sets)


def check_sweep(
    op: str, device: torch.device, backend: str, trials: int, first: int = 0, seconds: float = 60.0
) -> Step:
    """Random trials of one backend, as many as there is time for."""
    began, outcomes = time.perf_counter(), []
    for outcome in sweeps.run(op, device, backend, range(first, first + trials)):
        outcomes.append(outcome)
        if len(outcomes) >= FEWEST and time.perf_counter() > began + seconds:
            break
    errors = [f"seed {o.seed}: {o.error}" for o in outcomes if o.error]
    refused = [o.refused for o in outcomes if o.refused]
    if len(refused) == len(outcomes):
        return Step(f"sweep, {backend}", skipped=refused[0] if refused else "no trials were asked for")
    return Step(f"sweep, {backend}", len(outcomes) - len(refused), time.perf_counter() - began, errors)


def sanitizer_command(tool: str, op: str, backends: Sequence[str], trials: int, sanitizer: str) -> list[str]:
    asked = [part for backend in backends for part in ("--backend", backend)]
    child = [sys.executable, "-m", "kvstrata.lab.sweeps", op, "cuda", *asked, "--trials", str(trials)]
    return [sanitizer, "--tool", tool, *FLAGS, *child]


def check_sanitizer(tool: str, op: str, backends: Sequence[str], trials: int, sanitizer: str) -> Step:
    """Small trials under one tool of compute-sanitizer."""
    began, name = time.perf_counter(), f"compute-sanitizer, {tool}"
    command = sanitizer_command(tool, op, backends, trials, sanitizer)
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=SECONDS, check=False, env=environment
        )
    except subprocess.TimeoutExpired:
        return Step(name, 0, time.perf_counter() - began, [f"took more than {SECONDS} s and was ended"])
    made, errors = read_sanitizer(f"{done.stdout}\n{done.stderr}", done.returncode)
    return Step(name, made, time.perf_counter() - began, errors)


def read_sanitizer(text: str, code: int) -> tuple[int, list[str]]:
    """Trials that were made and what was found, from what the tool and the child said."""
    if "Device not supported" in text:
        return 0, ["compute-sanitizer does not support this device or virtual machine"]
    found = re.findall(r"(?:ERROR SUMMARY: (?=\d+ error)|RACECHECK SUMMARY: (?=\d+ hazard))(\d+)", text)
    trials = re.search(r"^(\d+) trials, (\d+) failed", text, re.MULTILINE)
    hazards = sum(map(int, found))
    made = int(trials.group(1)) if trials else 0
    if code == 0 and found and hazards == 0 and made:
        return made, []
    told = [line.removeprefix("=========").strip() for line in text.splitlines() if line.startswith("=========")]
    told = [line for line in told if line and "SUMMARY" not in line and "COMPUTE-SANITIZER" not in line]
    failed = re.findall(r"^\w+, seed \d+: .*", text, re.MULTILINE)
    if not found:
        tail = [line for line in text.splitlines() if line.strip()][-4:]
        return made, [f"the tool gave no summary, exit code {code}: " + " / ".join(tail)]
    if not trials:
        failed.append(f"the child ended early, exit code {code}")
    return made, [f"{hazards} error(s)", *told[:6], *failed[:6]] if hazards else failed or [f"exit code {code}"]


def run(
    op: str,
    device: torch.device,
    tools: Sequence[str] = TOOLS,
    quick: bool = False,
    seed: int = 0,
    tick: Callable[[str], object] = lambda name: None,
) -> list[Step]:
    """All steps of an op, in order."""
    trials, seconds, watched = TRIALS[quick], SWEEP_SECONDS[quick], WATCHED[quick]
    tick("bench cases")
    steps = [check_cases(op, device)]
    if op not in sweeps.names():
        return [*steps, Step("sweep", skipped=f"there is no sweep of {op}")]
    for backend, reason in sweeps.backends(op, device).items():
        tick(f"sweep, {backend}")
        if reason:
            steps.append(Step(f"sweep, {backend}", skipped=reason))
        else:
            steps.append(check_sweep(op, device, backend, trials, seed, seconds))
    tick("compute-sanitizer")
    return steps + sanitize(op, device, tools, watched)


def sanitize(op: str, device: torch.device, tools: Sequence[str], trials: int) -> list[Step]:
    """The tools side by side; skipped, with the reason, where they cannot run."""
    there = sweeps.backends(op, device)
    backends = [name for name in sweeps.find(op).SANITIZED if there.get(name) is None]
    sanitizer = shutil.which("compute-sanitizer")
    reason = None
    if device.type != "cuda":
        reason = "needs a GPU"
    elif sanitizer is None:
        reason = "compute-sanitizer is not on the PATH; it comes with the CUDA toolkit"
    elif not backends:
        reason = f"no CUDA C++ backend of {op} runs here"
    if reason or sanitizer is None:
        return [Step(f"compute-sanitizer, {tool}", skipped=reason) for tool in tools]
    if not tools:
        return []
    with ThreadPoolExecutor(len(tools)) as pool:
        return list(pool.map(lambda tool: check_sanitizer(tool, op, backends, trials, sanitizer), tools))
