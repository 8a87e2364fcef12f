"""Tuning problems by op: a module `problems/<op>.py` defines `problems(arch, device) -> list[Problem]`.

A problem is one case of the op's benchmark. Its kernels can be compiled without a device; `build` creates inputs on
one, with the benchmark's own check.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from kvstrata.jit.tuned import Choice, Value
from kvstrata.tools.bench.clock import Call
from kvstrata.tools.tune.gates import Needs
from kvstrata.tools.tune.space import Space


@dataclass(frozen=True)
class Ready:
    """Inputs on a device: ``call(choice)`` is a contender as in `bench.Bench`, ``check`` raises AssertionError."""

    call: Callable[[Choice], Call]
    poison: Callable[[int], None]
    check: Callable[[int, Any], None]
    before: Call | None = None


@dataclass(frozen=True)
class Problem:
    """A case to be tuned. `invalid(choice)` is the reason why a choice is invalid for this shape, or None."""

    op: str
    case: str
    shape: dict[str, Value]
    space: Space
    default: Choice
    build: Callable[[torch.device], Ready]
    sets: int = 1
    graph: bool = False
    invalid: Callable[[Choice], str | None] = lambda choice: None
    kernels: Callable[[Choice], list[Needs]] = lambda choice: []


def names() -> list[str]:
    """The ops that can be tuned."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def check(op: str) -> None:
    """Raise LookupError, listing the ops with problems, for an op without any."""
    if op not in names():
        raise LookupError(f"nothing to tune in {op!r}; there are: {', '.join(names())}")


def find(op: str, arch: str, device: torch.device, backend: str) -> list[Problem]:
    """Problems of an op, or the toy problem with the backend ``reference``."""
    check(op)
    module = importlib.import_module(f"{__name__}.{op}")
    if backend != "reference":
        return list(module.problems(arch, device))
    if op != "store":
        raise ValueError(f"--backend reference: expected store, the only op with a toy problem, got {op!r}")
    return [module.toy(device)]
