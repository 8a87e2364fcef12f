"""The child that compute-sanitizer watches: some trials of an op, exit code 1 if one fails.

python -m kvstrata.lab.sweeps store cuda --backend cuda --trials 8
"""

from __future__ import annotations

import argparse
import sys

import torch

from . import names, run


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m kvstrata.lab.sweeps", description=__doc__)
    parser.add_argument("op", choices=names())
    parser.add_argument("device", choices=("cpu", "cuda"))
    parser.add_argument("--backend", action="append", required=True)
    parser.add_argument("--trials", type=int, default=8)
    given = parser.parse_args()
    # What torch.empty gives is poisoned, not left as it was: a kernel that loads whole pages may load slots that hold
    # no token, which is not what initcheck is asked about.
    torch.use_deterministic_algorithms(True, warn_only=True)
    made = failed = 0
    for backend in given.backend:
        for outcome in run(given.op, torch.device(given.device), backend, range(given.trials)):
            made += outcome.refused is None
            if outcome.error:
                failed += 1
                print(f"{backend}, seed {outcome.seed}: {outcome.error}")
        if given.device == "cuda":
            torch.cuda.synchronize()
    print(f"{made} trials, {failed} failed")
    return 1 if failed or not made else 0


if __name__ == "__main__":
    sys.exit(main())
