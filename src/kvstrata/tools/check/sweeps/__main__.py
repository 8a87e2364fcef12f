"""The child process of a sweep or of compute-sanitizer: some trials of an op, exit code 1 if one fails.

python -m kvstrata.tools.check.sweeps store cuda --backend cuda --trials 8
"""

from __future__ import annotations

import argparse
import math
import sys

import torch

from . import names, run


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m kvstrata.tools.check.sweeps", description=__doc__)
    parser.add_argument("op", choices=names())
    parser.add_argument("device", choices=("cpu", "cuda"))
    parser.add_argument("--backend", action="append", required=True)
    parser.add_argument("--trials", type=int, default=8)
    parser.add_argument("--first", type=int, default=0, help="seed of the first trial")
    parser.add_argument("--seconds", type=float, default=math.inf, help="of a backend; a few trials are made anyway")
    parser.add_argument("--fill", action="store_true", help="leave nothing as torch.empty found it")
    given = parser.parse_args()
    if given.fill:  # a kernel that loads whole pages may load slots without a token, which initcheck must not report
        torch.use_deterministic_algorithms(True, warn_only=True)
    completed = failed = 0
    seeds = range(given.first, given.first + given.trials)
    for backend in given.backend:
        for outcome in run(given.op, torch.device(given.device), backend, seeds, given.seconds):
            completed += outcome.unsupported is None
            if outcome.error:
                failed += 1
                print(f"{backend}, seed {outcome.seed}: {outcome.error}")
            if outcome.unsupported:
                print(f"{backend} unsupported: {outcome.unsupported}")
        if given.device == "cuda":
            torch.cuda.synchronize()
    print(f"{completed} trials, {failed} failed")
    return 1 if failed or not completed else 0


if __name__ == "__main__":
    sys.exit(main())
