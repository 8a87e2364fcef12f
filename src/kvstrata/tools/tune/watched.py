"""The child process of Nsight Compute: one call of each configuration, preceded by an empty kernel.

python -m kvstrata.tools.tune.watched OP FILE, where FILE holds JSON: [[case, [choice, ..]], ..]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from kvstrata import jit
from kvstrata.tools.bench.probes import EMPTY

from . import problems

WARMUP_CALLS = 2  # calls before the profiled one


def main(op: str, file: str) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    known = {problem.case: problem for problem in problems.find(op, jit.arch_of(device), device, "cuda")}
    runtime: Any = torch.cuda.cudart()
    mark = jit.load(EMPTY, "empty")
    for case, choices in json.loads(Path(file).read_text(encoding="utf-8")):
        ready = known[case].build(device)
        for choice in choices:
            call = ready.call(choice)
            for _ in range(WARMUP_CALLS):
                call(0)
            ready.poison(0)
            torch.cuda.synchronize()
            runtime.cudaProfilerStart()
            mark.launch(grid=1, block=32)
            out = call(0)
            torch.cuda.synchronize()
            runtime.cudaProfilerStop()
            ready.check(0, out)
        del ready
        torch.cuda.empty_cache()


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except (LookupError, AssertionError) as error:
        sys.exit(f"kvstrata: {error}")
