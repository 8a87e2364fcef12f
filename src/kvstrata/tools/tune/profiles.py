"""Profiles configurations with Nsight Compute: all that a search requests, in one process."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from kvstrata.jit.tuned import Choice
from kvstrata.tools.profile import ncu, profile
from kvstrata.tools.profile.ncu import Kernel, NcuError

from .space import key

MARK = "empty"  # kernel launched before each configuration
SECTIONS = ("LaunchStats", "Occupancy")  # in addition to metrics requested by name; each section takes more passes
Metrics = dict[str, float]


def take(
    op: str, wanted: Sequence[tuple[str, Sequence[Choice]]], seconds: float = profile.SECONDS
) -> dict[tuple[str, str], Metrics]:
    """Metrics of the longest kernel of each (case, key of a choice); NcuError if they cannot be measured."""
    names = [(case, key(choice)) for case, choices in wanted for choice in choices]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "wanted.json"
        file.write_text(json.dumps(wanted), encoding="utf-8")
        watched = [sys.executable, "-m", "kvstrata.tools.tune.watched", op, str(file)]
        kernels = profile.run_ncu(
            ncu.find(),
            watched,
            [*ncu.own_kernels(), MARK],
            (profile.LAUNCHES + 1) * len(names),
            time.monotonic() + seconds,
            SECTIONS,
        )
    by_configuration = split(kernels)
    if len(by_configuration) != len(names):
        raise NcuError(f"ncu saw {len(by_configuration)} configurations, expected {len(names)}")
    return dict(zip(names, (_longest(launches) for launches in by_configuration), strict=True))


def split(kernels: Sequence[Kernel]) -> list[list[Kernel]]:
    """The launches between markers."""
    groups: list[list[Kernel]] = []
    for kernel in kernels:
        if kernel.name == MARK:
            groups.append([])
        elif groups:
            groups[-1].append(kernel)
    return groups


def _longest(kernels: Sequence[Kernel]) -> Metrics:
    if not kernels:
        raise NcuError("a configuration launched none of our kernels")
    return dict(max(kernels, key=lambda kernel: kernel.values.get("us", 0.0)).values)
