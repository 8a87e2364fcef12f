"""Bench cases: a case states the bytes and operations, its bench holds the inputs, the contenders and the check.

The runner runs `poison -> contender -> check` on every input set with the callables it times, so every time belongs to
an output that was checked.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from .clock import Call
from .machine import cache_bytes
from .timer import BURST


class Absent(Exception):
    """Raised by the factory of a peer that is not available; the message is the reason shown in reports."""


@dataclass
class Bench:
    """The prepared inputs of a case on a device.

    `contenders[name](i)` runs on input set i. `poison(name, i)` overwrites what that call will write; `check(name, i,
    out)` gets what it returned and raises AssertionError if anything is wrong. `variants` are other implementations of
    ours: not peers, but they must be correct. `host` are the calls whose host time is measured. `before(i)` runs
    between the flush and each sample, outside the measured time: what an engine does just before, such as writing the
    rows that are then stored. With a `burst` of 1 it also runs before each call of `host`.
    """

    contenders: dict[str, Call]
    poison: Callable[[str, int], None]
    check: Callable[[str, int, Any], None]
    ours: str
    baseline: str
    variants: set[str] = field(default_factory=set)
    absent: dict[str, str] = field(default_factory=dict)
    host: dict[str, Call] = field(default_factory=dict)
    burst: int = BURST  # calls per host measurement; they must fit the launch queue
    bursts: int = 20
    before: Call | None = None


def not_built(device: torch.device) -> Bench:
    """`build` of cases whose module has its own `run`."""
    raise RuntimeError("the contenders of this benchmark are not calls in this process")


@dataclass(frozen=True)
class Case:
    """One line of a benchmark: `bytes` read plus written, `flops`, rotating input `sets`, and how it is built.

    With `graph=True` contenders are captured first, and replays are checked and timed. With `wall=True` a sample is
    wall-clock time until the device has finished the call, including the host. Sampling ends after `seconds`, or after
    `rounds` samples of each contender; None is the run's default. Host times take at most as long again.
    """

    op: str
    name: str
    params: dict[str, Any]
    bytes: int
    build: Callable[[torch.device], Bench] = not_built
    flops: int = 0
    sets: int = 1
    graph: bool = False
    wall: bool = False
    seconds: float = 20.0
    rounds: int | None = None


def sets_for(nbytes: int, device: torch.device, memory: int = 4 << 30) -> int:
    """Input sets of `nbytes` that together exceed four times the cache: 2 to `most`, or 1 for lack of memory."""
    wanted = -(-4 * cache_bytes(device) // max(nbytes, 1))
    return max(1, min(max(2, wanted), 8, memory // max(nbytes, 1)))
