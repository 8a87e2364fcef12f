"""Small random trials of every op through its public functions, each against plain torch that shares no code with it.

A module ``sweeps/<op>.py`` has ``trial(draw, backend) -> str``, which raises AssertionError or describes what it tried;
``BACKENDS`` that it supports; and ``SANITIZED``, those that run under compute-sanitizer. A trial is determined by its
seed, so a failure can be repeated. Shapes are small and odd: ragged, empty, strided, padded.
"""

from __future__ import annotations

import importlib
import math
import pkgutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from types import ModuleType

import torch

from .draw import Draw, Unsupported

COMMON = ("draw", "oracle", "__main__")
MIN_TRIALS = 4  # minimum number of trials, however long they take


@dataclass(frozen=True)
class Outcome:
    """`error` is None for a trial that passed; `unsupported` is the reason why one was not run."""

    backend: str
    seed: int
    what: str = ""
    error: str | None = None
    unsupported: str | None = None


def names() -> list[str]:
    """The ops that have a sweep."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__) if module.name not in COMMON)


def find(op: str) -> ModuleType:
    """Sweep module of an op; LookupError lists the ops."""
    if op not in names():
        raise LookupError(f"no sweep named {op!r}; there are: {', '.join(names())}")
    return importlib.import_module(f"{__name__}.{op}")


def backends(op: str, device: torch.device) -> dict[str, str | None]:
    """Reason why each backend of an op cannot run on a device; None for those that can."""
    from kvstrata.backends import missing

    def reason(name: str) -> str | None:
        if name == "auto":
            return None
        if name == "numba":
            if device.type != "cpu":
                return "numba needs tensors on the CPU"
            return None if find_spec("numba") else "numba is not installed"
        return missing(name, device)

    return {name: reason(name) for name in find(op).BACKENDS}


def run(op: str, device: torch.device, backend: str, seeds: range, seconds: float = math.inf) -> Iterator[Outcome]:
    """One trial per seed, until the time is up; exceptions of a trial become its outcome."""
    trial, end = find(op).trial, time.monotonic() + seconds
    for number, seed in enumerate(seeds):
        if number >= MIN_TRIALS and time.monotonic() > end:
            return
        try:
            yield Outcome(backend, seed, trial(Draw(seed, device), backend))
        except Unsupported as reason:
            yield Outcome(backend, seed, unsupported=str(reason))
        except Exception as error:
            text = " ".join(str(error).split()) or "an assertion without a message"
            known = isinstance(error, AssertionError)
            yield Outcome(backend, seed, error=text if known else f"{type(error).__name__}: {text}")
