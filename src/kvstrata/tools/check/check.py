"""Checks an op on this machine: the bench cases' own checks, random sweeps, then some of these under compute-sanitizer.

On a GPU the backends' sweeps and the sanitizer's tools run in parallel, each in its own process, while the cases
are checked: most of their time is compiling. Under the sanitizer, without the caching allocator, every tensor is its
own allocation, so that memcheck detects an access one element past its end.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from kvstrata.tools import child
from kvstrata.tools.bench import Case, cases
from kvstrata.tools.bench.machine import release
from kvstrata.tools.bench.runner import verify
from kvstrata.tools.profile.launch import build

from . import sweeps
from .results import SANITIZER, TOOLS, Step

TRIALS = (60, 12)  # trials per backend: full, quick
SWEEP_SECONDS = (20.0, 6.0)  # seconds per backend; on a GPU mostly compiling
SANITIZER_TRIALS = (6, 3)  # trials under a tool
SECONDS = 420  # seconds per process
FLAGS = ("--target-processes", "all", "--report-api-errors", "no", "--error-exitcode", "86")
# Triton passes values to warps of warp_specialize between barriers that racecheck does not know.
TOOL_FLAGS = {"racecheck": ("--kernel-regex-exclude", "kns=specialized")}
# A launch of packed decode has more barriers than synccheck keeps track of by default. Each takes memory of the device.
OP_FLAGS = {("synccheck", "packed"): ("--num-cuda-barriers", str(1 << 18))}


def check_cases(op: str, device: torch.device) -> Step:
    """Check our contenders in the quick bench cases, on the inputs that bench would time."""
    began, done, errors = time.perf_counter(), 0, []
    for case in cases.find(op).cases(device, True):
        count, failed = _check_case(case, device)
        done += count
        errors += [f"{case.name}: {name}: {why}" for name, why in failed.items()]
        release(device)
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
    """Run up to ``trials`` random trials of one backend within ``seconds``, in this process."""
    began = time.perf_counter()
    outcomes = list(sweeps.run(op, device, backend, range(first, first + trials), seconds))
    errors = [f"seed {o.seed}: {o.error}" for o in outcomes if o.error]
    unsupported = [o.unsupported for o in outcomes if o.unsupported]
    if len(unsupported) == len(outcomes):
        return Step(f"sweep, {backend}", skipped=unsupported[0] if unsupported else "no trials were requested")
    return Step(f"sweep, {backend}", len(outcomes) - len(unsupported), time.perf_counter() - began, errors)


def run_sweep_process(op: str, backend: str, trials: int, first: int, seconds: float, limit: float) -> Step:
    """Run a sweep on a GPU in a child process, which is killed after ``limit`` seconds."""
    began, name = time.perf_counter(), f"sweep, {backend}"
    command = _sweep_command(op, [backend], trials, "--first", str(first), "--seconds", str(seconds))
    try:
        output, code = child.run(command, limit)
    except child.Timeout as error:
        return Step(name, 0, time.perf_counter() - began, [str(error)])
    trials_run, errors, unsupported = read_sweep(output, code)
    if unsupported and not trials_run and not errors:
        return Step(name, skipped=unsupported)
    return Step(name, trials_run, time.perf_counter() - began, errors)


def read_sweep(text: str, code: int) -> tuple[int, list[str], str | None]:
    """Number of trials, failures, and why trials are unsupported, from the child's output."""
    trials = re.search(r"^(\d+) trials, (\d+) failed", text, re.MULTILINE)
    unsupported = re.search(r"^\w+ unsupported: (.*)", text, re.MULTILINE)
    failed = re.findall(r"^\w+, (seed \d+: .*)", text, re.MULTILINE)
    if trials is None:
        tail = [line for line in text.splitlines() if line.strip()][-4:]
        failed.append(f"the child ended early, exit code {code}: " + " / ".join(tail))
    return int(trials.group(1)) if trials else 0, failed, unsupported.group(1) if unsupported else None


def _sweep_command(op: str, backends: Sequence[str], trials: int, *more: str) -> list[str]:
    chosen = [part for backend in backends for part in ("--backend", backend)]
    return [sys.executable, "-m", "kvstrata.tools.check.sweeps", op, "cuda", *chosen, "--trials", str(trials), *more]


def check_sanitizer(tool: str, op: str, backends: Sequence[str], trials: int, sanitizer: str, limit: float) -> Step:
    """Run small trials under one tool of compute-sanitizer, in a child process with a time limit."""
    began, name = time.perf_counter(), SANITIZER + tool
    flags = (*TOOL_FLAGS.get(tool, ()), *OP_FLAGS.get((tool, op), ()), *FLAGS)
    command = [sanitizer, "--tool", tool, *flags, *_sweep_command(op, backends, trials, "--fill")]
    try:
        output, code = child.run(command, limit, {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"})
    except child.Timeout as error:
        return Step(name, 0, time.perf_counter() - began, [str(error)])
    trials_run, errors = read_sanitizer(output, code)
    return Step(name, trials_run, time.perf_counter() - began, errors)


def read_sanitizer(text: str, code: int) -> tuple[int, list[str]]:
    """Number of trials and findings, from the output of the tool and the child."""
    if "Device not supported" in text:
        return 0, ["compute-sanitizer does not support this device or virtual machine"]
    summaries = re.findall(r"(?:ERROR SUMMARY: (?=\d+ error)|RACECHECK SUMMARY: (?=\d+ hazard))(\d+)", text)
    trials = re.search(r"^(\d+) trials, (\d+) failed", text, re.MULTILINE)
    hazards = sum(map(int, summaries))
    trials_run = int(trials.group(1)) if trials else 0
    if code == 0 and summaries and hazards == 0 and trials_run:
        return trials_run, []
    lines = [line.removeprefix("=========").strip() for line in text.splitlines() if line.startswith("=========")]
    lines = [line for line in lines if line and "SUMMARY" not in line and "COMPUTE-SANITIZER" not in line]
    failed = re.findall(r"^\w+, seed \d+: .*", text, re.MULTILINE)
    if not summaries:
        tail = [line for line in text.splitlines() if line.strip()][-4:]
        return trials_run, [f"the tool gave no summary, exit code {code}: " + " / ".join(tail)]
    if not trials:
        errors = re.findall(r"^.*(?:error|exception).*", text, re.MULTILINE | re.IGNORECASE)
        said = [line.strip() for line in errors if not line.startswith("=")]
        failed.append(f"the child ended early, exit code {code}" + "".join(f": {line}" for line in said[:1]))
    return trials_run, [f"{hazards} error(s)", *lines[:6], *failed[:6]] if hazards else failed or [f"exit code {code}"]


def run(
    op: str,
    device: torch.device,
    tools: Sequence[str] = TOOLS,
    quick: bool = False,
    seed: int = 0,
    tick: Callable[[str], object] = lambda name: None,
    limit: float = SECONDS,
) -> list[Step]:
    """Run all steps of an op, in order; `limit` kills a process that takes longer."""
    trials, seconds, sanitizer_trials = TRIALS[quick], SWEEP_SECONDS[quick], SANITIZER_TRIALS[quick]
    available = sweeps.backends(op, device) if op in sweeps.names() else {}
    parallel = device.type == "cuda"
    with ThreadPoolExecutor(len(available) + len(tools) + 1) as pool:
        running = {}
        if parallel:  # each thread waits for a child process
            for backend in (name for name, reason in available.items() if reason is None):
                running[backend] = pool.submit(run_sweep_process, op, backend, trials, seed, seconds, limit)
        sanitized = sanitize(op, device, tools, sanitizer_trials, limit, pool) if available else []
        tick("bench cases")
        steps = [check_cases(op, device)]
        if not available:
            return [*steps, Step("sweep", skipped=f"there is no sweep of {op}")]
        for backend, reason in available.items():
            tick(f"sweep, {backend}")
            if reason:
                steps.append(Step(f"sweep, {backend}", skipped=reason))
            elif parallel:
                steps.append(running[backend].result())
            else:
                steps.append(check_sweep(op, device, backend, trials, seed, seconds))
        tick("compute-sanitizer")
        return steps + [step if isinstance(step, Step) else step.result() for step in sanitized]


def sanitize(
    op: str, device: torch.device, tools: Sequence[str], trials: int, limit: float, pool: ThreadPoolExecutor
) -> list[Step | Future[Step]]:
    """Run the tools in parallel; a tool that cannot run is skipped with the reason."""
    available = sweeps.backends(op, device)
    backends = [name for name in sweeps.find(op).SANITIZED if available.get(name) is None]
    sanitizer = child.find_tool("compute-sanitizer")
    reason = None
    if device.type != "cuda":
        reason = "needs a GPU"
    elif sanitizer is None:
        reason = "compute-sanitizer is not on the PATH; it comes with the CUDA toolkit"
    elif not backends:
        reason = f"no CUDA C++ backend of {op} runs here"
    if reason or sanitizer is None:
        return [Step(SANITIZER + tool, skipped=reason) for tool in tools]
    return [pool.submit(check_sanitizer, tool, op, backends, trials, sanitizer, limit) for tool in tools]
