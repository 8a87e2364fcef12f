"""Profiles of cases: taken with Nsight Compute, saved as JSON, compared, and checked against gates.

A gate is ``QUANTITY<=NUMBER`` or ``>=``. A signed number is a change against the other profile, in percentage
points for shares (l2_hit, dram, ..) and in percent for the rest (us, dram_read, ..); an unsigned one is the value
itself: ``l2_hit>=+8``, ``dram<=-10``, ``registers<=64``. Gates apply to the kernel that takes most of a case's time.
"""

from __future__ import annotations

import functools
import json
import math
import re
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch

from kvstrata.tools import child, results
from kvstrata.tools.bench import cases

from . import launch, ncu
from .ncu import QUANTITIES, Kernel, NcuError

LAUNCHES = 16  # maximum launches of our kernels that are profiled in one call
SECONDS = 180  # seconds per case
LAUNCH = (sys.executable, "-m", "kvstrata.tools.profile.launch")
# Cases profiled by default: few, each with a different bottleneck. CASE:CONTENDER selects a peer.
DEFAULT_CASES = {
    "store": ("8x128-fp16-256", "8x128-fp16-8192", "8x128-fp16-65536", "8x128-bf16-to-fp8-8192"),
    "prefill": (
        "ideas-full-B2-H8-S512-D64",
        "ideas-full-B2-H8-S512-D64:v2",
        "full-B4-H16-S2048-D128",
        "causal-B4-H16-S2048-D128",
    ),
    "replay": ("fa-1x16", "fa-64x4096", "fa-256x8192", "nsa-64x4096"),
    "decode": ("K8V8-B32-16384", "K4V4-B32-16384", "K2V2-B32-16384", "16bit-B32-16384"),
}
MAX_CASES = 4  # number of cases of an op that is not in CHOSEN


@dataclass(frozen=True)
class CaseProfile:
    case: str
    contender: str
    bytes: int  # bytes of the case
    kernels: list[Kernel]

    @property
    def main(self) -> Kernel:
        """The longest kernel."""
        return max(self.kernels, key=lambda kernel: kernel.values.get("us", 0.0))


@dataclass
class Profile:
    op: str
    machine: dict[str, Any]
    tool: str
    cases: list[CaseProfile] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)  # case: reason


@dataclass(frozen=True)
class Gate:
    text: str
    key: str
    at_least: bool
    bound: float
    relative: bool


@dataclass(frozen=True)
class Change:
    """One quantity of the main kernel of a case in two profiles."""

    case: str
    key: str
    before: float
    after: float

    @property
    def amount(self) -> float:
        """Change in percentage points or in percent, rounded to the precision of a gate."""
        if QUANTITIES[self.key].unit == "%":
            return round(self.after - self.before, 6)
        if not self.before:
            return 0.0 if self.after == self.before else math.inf
        return round(100 * (self.after / self.before - 1), 6)

    @property
    def shown(self) -> str:
        return f"{self.amount:+.1f} {'pp' if QUANTITIES[self.key].unit == '%' else '%'}"


def split(name: str) -> tuple[str, str | None]:
    """Case and contender of CASE or CASE:CONTENDER; None if no contender is named."""
    case, _, contender = name.partition(":")
    return case, contender or None


def choose(op: str, wanted: Sequence[str], device: torch.device) -> list[str]:
    """Names of cases: those that match the globs, or the most informative ones; ValueError if a glob matches none."""
    known = list(cases.by_name(op, device))
    if not wanted:
        return [name for name in DEFAULT_CASES.get(op, ()) if split(name)[0] in known] or known[:MAX_CASES]
    names = []
    for text in wanted:
        glob, contender = split(text)
        matched = [name + (f":{contender}" if contender else "") for name in known if fnmatch(name, glob)]
        if not matched:
            raise ValueError(f"no case matches {text!r}; there are: {', '.join(known)}")
        names += [name for name in matched if name not in names]
    return names


def take(
    op: str,
    names: Sequence[str],
    machine: dict[str, Any],
    sizes: dict[str, int],
    contender: str | None = None,
    tick: Callable[[str], object] = lambda name: None,
    seconds: float = math.inf,
    counters: bool = True,
) -> Profile:
    """Profile cases one by one, each in its own process, until the time is up.

    Without ``counters``: times, registers, shared memory and estimated occupancy, from torch's profiler.
    """
    end = time.monotonic() + seconds
    tool = version(ncu.find()) if counters else "torch's profiler, without counters (occupancy is an estimate)"
    profile = Profile(op, machine, tool)
    for name in names:
        tick(name)
        case, chosen = split(name)
        chosen = chosen or contender
        own = [] if chosen else ncu.own_kernels()  # a named contender may launch a library's kernels
        try:
            kernels = (_counted if counters else _traced)([op, case, *([chosen] if chosen else [])], own, end)
        except NcuError as error:
            profile.failed[name] = str(error)
            if counters and not profile.cases and "counters" in str(error):  # other cases will not do better
                break
        else:
            profile.cases.append(CaseProfile(name, chosen or "ours", sizes[case], kernels))
    return profile


def _counted(arguments: Sequence[str], own: Sequence[str], end: float) -> list[Kernel]:
    return first_of_each(run_ncu(ncu.find(), [*LAUNCH, *arguments], own, LAUNCHES, end))


def _traced(arguments: Sequence[str], own: Sequence[str], end: float) -> list[Kernel]:
    output = _run([*LAUNCH, "--trace", *arguments], min(end - time.monotonic(), SECONDS))
    match = re.search(rf"^{launch.TRACED}(.*)", output, re.MULTILINE)
    if match is None:
        raise NcuError(ncu.explain(output).replace("ncu failed", "the child failed"))
    traced = [Kernel(**kernel) for kernel in json.loads(match.group(1))]
    if kernels := first_of_each([kernel for kernel in traced if not own or kernel.name in own]):
        return kernels
    raise NcuError("none of our kernels was launched")


def run_ncu(
    tool: str,
    watched: Sequence[str],
    kernels: Sequence[str],
    launches: int,
    end: float = math.inf,
    sections: Sequence[str] = ncu.SECTIONS,
) -> list[Kernel]:
    """Launches of a command under ncu, in order; metrics that this GPU lacks are left out."""
    without: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "ncu.csv"
        while True:
            if (left := min(end - time.monotonic(), SECONDS)) <= 0:
                raise NcuError("the time limit was reached")
            output = _run(ncu.command(tool, watched, log, kernels, launches, without, sections), left)
            text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
            if '"ID",' in text or not (unknown := _metrics_to_drop(f"{text}\n{output}", without)):
                break
            without += unknown
            log.unlink(missing_ok=True)
    if match := re.search(r"^kvstrata: (.*)", output, re.MULTILINE):
        raise NcuError(match.group(1))
    if '"ID",' not in text:
        raise NcuError(ncu.explain(f"{text}\n{output}"))
    return ncu.parse(text)


def _metrics_to_drop(text: str, without: Sequence[str]) -> list[str]:
    """Metrics to leave out after a failure: those reported as unknown or, if the reason is unknown, all, once."""
    named = [m for m in ncu.unknown_metrics(text) if m in ncu.ASKED and m not in without]
    if named or not ncu.explain(text).startswith("ncu failed"):
        return named
    return [m for m in ncu.ASKED if m not in without]


def first_of_each(kernels: Sequence[Kernel]) -> list[Kernel]:
    """One launch of each kernel: a call that covers many layers launches the same ones repeatedly."""
    distinct: dict[tuple[str, str], Kernel] = {}
    for kernel in kernels:
        distinct.setdefault((kernel.name, kernel.block), kernel)
    return list(distinct.values())


def _run(command: Sequence[str], seconds: float) -> str:
    """Combined stdout and stderr of a command, which is killed after ``seconds``."""
    try:
        return child.run(command, seconds)[0]
    except child.Timeout as error:
        raise NcuError(f"ncu {error}") from error


@functools.cache
def version(tool: str) -> str:
    match = re.search(r"Version (\S+)", child.output(tool, "--version") or "")
    return f"ncu {match.group(1)}" if match else "ncu"


def gate_of(text: str) -> Gate:
    """Parse a gate; ValueError shows the expected form."""
    match = re.fullmatch(r"\s*(\w+)\s*(<=|>=)\s*([+-]?)(\d+(?:\.\d+)?)\s*", text)
    if not match or match.group(1) not in QUANTITIES:
        raise ValueError(
            f"--gate: expected QUANTITY<=NUMBER or >=, such as l2_hit>=+8, with one of {', '.join(QUANTITIES)}; "
            f"got {text!r}"
        )
    key, side, sign, number = match.groups()
    return Gate(text, key, side == ">=", float(f"{sign}{number}"), bool(sign))


def changes(before: Profile, after: Profile) -> list[Change]:
    """Every quantity that both have, case by case; ValueError if nothing can be compared."""
    if before.op != after.op:
        raise ValueError(f"cannot compare a profile of {before.op} with one of {after.op}")
    old = {case.case: case.main for case in before.cases}
    pairs = [(case.case, old[case.case], case.main) for case in after.cases if case.case in old]
    if not pairs:
        raise ValueError(
            f"the two profiles have no case in common: {', '.join(old) or 'none'} against "
            f"{', '.join(case.case for case in after.cases) or 'none'}"
        )
    return [
        Change(name, key, a.values[key], b.values[key])
        for name, a, b in pairs
        for key in QUANTITIES
        if key in a.values and key in b.values
    ]


def missed_gates(gates: Sequence[Gate], after: Profile, changes_seen: Sequence[Change]) -> list[str]:
    """Gates that were missed, one line each; a quantity that was not measured misses its gate."""
    lines = []
    for gate in gates:
        if gate.relative and not changes_seen:
            lines.append(f"{gate.text}: nothing to compare with; give --against or --compare")
            continue
        for case in after.cases:
            change = next((c for c in changes_seen if (c.case, c.key) == (case.case, gate.key)), None)
            value = change.amount if change and gate.relative else case.main.values.get(gate.key)
            if gate.relative and change is None:
                value = None
            if value is None:
                lines.append(f"{gate.text}: {case.case} has no {gate.key}")
            elif not (value >= gate.bound if gate.at_least else value <= gate.bound):
                shown = change.shown if change and gate.relative else f"{value:g}"
                lines.append(f"{gate.text}: {case.case} has {shown}")
    return lines


def dumps(profile: Profile) -> str:
    fields = {"schema": results.SCHEMA, "kind": "profile", **results.trim(asdict(profile))}
    return json.dumps(fields, indent=1) + "\n"


def loads(text: str, name: str) -> Profile:
    """Parse the text of file ``name``; ValueError if it is not a profile."""
    return results.loads(Profile, text, name, "a profile of kvstrata", kind="profile")


def load(path: Path) -> Profile:
    return loads(path.read_text(encoding="utf-8"), str(path))


def save(profile: Profile, path: Path) -> Path:
    return results.write(path, dumps(profile))
