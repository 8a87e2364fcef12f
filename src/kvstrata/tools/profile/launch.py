"""The child process of a profiler: one call of one contender of one case, between cudaProfilerStart and Stop.

python -m kvstrata.tools.profile.launch store 8x128-fp16-8192 [cuda_direct]

With ``--trace`` it profiles itself with torch's profiler and prints the launches: no counters, so no permission needed.
"""

from __future__ import annotations

import importlib
import json
import re
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from kvstrata.tools.bench import Bench, Case, cases, peers
from kvstrata.tools.bench.clock import Call
from kvstrata.tools.bench.machine import cache_bytes

WARMUP_CALLS = 2  # calls before the profiled one: compilation, lazy loading, plans


def case_of(op: str, name: str, device: torch.device) -> Case:
    """The case with that name, quick or not; LookupError lists the known ones."""
    known = cases.by_name(op, device)
    if name not in known:
        raise LookupError(f"no case named {name!r} of {op}; there are: {', '.join(known)}")
    return known[name]


def contender_of(bench: Bench, name: str | None) -> tuple[str, Call]:
    """The named contender, or ours; LookupError says why it is absent."""
    name = name or bench.ours
    if name not in bench.contenders:
        why = bench.absent.get(name, f"there are: {', '.join(bench.contenders)}")
        raise LookupError(f"no contender named {name!r}: {why}")
    return name, bench.contenders[name]


@contextmanager
def without_peers(op: str) -> Iterator[None]:
    """Context in which cases are built without other libraries, which take seconds to load."""
    importlib.import_module(f"{cases.__name__}.{op}")  # registers them
    kept = peers.PEERS.pop(op, {})
    try:
        yield
    finally:
        peers.PEERS[op] = kept


def build(case: Case, contender: str | None, device: torch.device) -> Bench:
    """Build a case, with other libraries only if one of them is profiled."""
    if contender in peers.PEERS.get(case.op, {}):
        return case.build(device)
    with without_peers(case.op):
        return case.build(device)


def build_contender(op: str, name: str, contender: str | None) -> tuple[Bench, str, Call]:
    """Bench of a case on the current GPU, with the name and the call of a contender."""
    device = torch.device("cuda", torch.cuda.current_device())
    bench = build(case_of(op, name, device), contender, device)
    return bench, *contender_of(bench, contender)


def main(op: str, name: str, contender: str | None = None) -> None:
    bench, chosen, call = build_contender(op, name, contender)
    runtime: Any = torch.cuda.cudart()
    for turn in range(WARMUP_CALLS + 1):
        bench.poison(chosen, 0)
        torch.cuda.synchronize()
        if turn == WARMUP_CALLS:
            runtime.cudaProfilerStart()
        out = call(0)
        torch.cuda.synchronize()
    runtime.cudaProfilerStop()
    bench.check(chosen, 0, out)


TRACED = "traced: "  # prefix of the JSON that `trace` prints
# Quantity of ncu.py: field of a launch in torch's trace, and the factor that converts its unit.
DETAILS = {"registers": ("registers per thread", 1.0), "shared": ("shared memory", 1e-3),
        "occupancy": ("est. achieved occupancy %", 1.0)}  # fmt: skip


def trace(op: str, name: str, contender: str | None = None) -> None:
    bench, chosen, call = build_contender(op, name, contender)
    flush_bytes = max(2 * cache_bytes(torch.device("cuda")), 256 << 20)
    flush = torch.zeros(flush_bytes // 4, dtype=torch.int32, device="cuda")
    for _ in range(WARMUP_CALLS):
        bench.poison(chosen, 0)
        call(0)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as watched:
        flush.zero_()
        out = call(0)
        torch.cuda.synchronize()
    bench.check(chosen, 0, out)
    with tempfile.TemporaryDirectory() as folder:
        watched.export_chrome_trace(str(path := Path(folder) / "trace.json"))
        print(TRACED + json.dumps(launches(json.loads(path.read_text())["traceEvents"])))


def launches(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Kernels of a trace in order, as the fields of `ncu.Kernel`."""
    records = []
    for event in sorted((e for e in events if e.get("cat") == "kernel"), key=lambda e: float(e["ts"])):
        details = event.get("args", {})
        values = {"us": float(event["dur"])}
        values |= {key: scale * float(details[field]) for key, (field, scale) in DETAILS.items() if field in details}
        base = re.search(r"(\w+)\s*(?:<|\(|$)", str(event["name"]).removeprefix("void "))
        grid, block = (str(tuple(details.get(name, ()))) for name in ("grid", "block"))
        records.append({"name": base.group(1) if base else "?", "grid": grid, "block": block, "values": values})
    return records


if __name__ == "__main__":
    try:
        if sys.argv[1] == "--trace":
            trace(*sys.argv[2:])
        else:
            main(*sys.argv[1:])
    except (LookupError, AssertionError) as error:  # the contender is absent or wrong
        sys.exit(f"kvstrata: {error}")
