"""The child that a profiler watches: one call of one contender of one case, between cudaProfilerStart and Stop.

python -m kvstrata.lab.launch store 8x128-fp16-8192 [cuda_direct]
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from kvstrata.bench import Bench, Case, cases, peers
from kvstrata.bench.clock import Call

WARM = 2  # calls before the one that is watched: compilation, lazy loading, plans


def case_of(op: str, name: str, device: torch.device) -> Case:
    """The case of that name, whether or not it is among the quick ones; LookupError lists what there is."""
    module = cases.find(op)
    known = {case.name: case for quick in (True, False) for case in module.cases(device, quick)}
    if name not in known:
        raise LookupError(f"no case named {name!r} of {op}; there are: {', '.join(known)}")
    return known[name]


def contender_of(bench: Bench, name: str | None) -> tuple[str, Call]:
    """The contender named, or ours; LookupError says why it is not there."""
    name = name or bench.ours
    if name not in bench.contenders:
        why = bench.absent.get(name, f"there are: {', '.join(bench.contenders)}")
        raise LookupError(f"no contender named {name!r}: {why}")
    return name, bench.contenders[name]


@contextmanager
def without_peers(op: str) -> Iterator[None]:
    """Other libraries stay out of what is built here: they take seconds to load."""
    importlib.import_module(f"{cases.__name__}.{op}")  # which registers them
    kept = peers.PEERS.pop(op, {})
    try:
        yield
    finally:
        peers.PEERS[op] = kept


def build(case: Case, contender: str | None, device: torch.device) -> Bench:
    """The case made ready, with other libraries only if one of them is what is watched."""
    if contender in peers.PEERS.get(case.op, {}):
        return case.build(device)
    with without_peers(case.op):
        return case.build(device)


def main(op: str, name: str, contender: str | None = None) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    case = case_of(op, name, device)
    bench = build(case, contender, device)
    chosen, call = contender_of(bench, contender)
    runtime: Any = torch.cuda.cudart()
    for turn in range(WARM + 1):
        bench.poison(chosen, 0)
        torch.cuda.synchronize()
        if turn == WARM:
            runtime.cudaProfilerStart()
        out = call(0)
        torch.cuda.synchronize()
    runtime.cudaProfilerStop()
    bench.check(chosen, 0, out)


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except (LookupError, AssertionError) as error:  # what was watched is not there, or is wrong
        sys.exit(f"kvstrata: {error}")
