"""Results of a search and of the gate experiment: results/<machine>/tune_<op>.json and gate.json."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from kvstrata.jit.tuned import Choice, Value
from kvstrata.tools import results
from kvstrata.tools.bench.stats import Summary

GATE = "gate"
PREFIX = "tune_"


@dataclass
class Row:
    """One case: the winner against the default on fresh samples. `choice` is None if the default stays.

    `valid`: number of choices that are valid for the shape and within the limits, `measured`: how many of them were
    timed (None in results of earlier versions). `outside`: why the limits do not allow the default. `values`: the
    fastest time with each value of each parameter, relative to the default's. `metrics`: Nsight Compute on default and
    winner.
    """

    case: str
    shape: dict[str, Value]
    default_choice: Choice
    choice: Choice | None
    default: Summary
    tuned: Summary | None
    ratio: float
    lo: float
    hi: float
    g: float | None
    p: float
    note: str
    space: int
    trials: dict[str, int]
    rejected: dict[str, int]
    top: list[Choice]
    seconds: float
    valid: int | None = None
    measured: int | None = None
    outside: str = ""
    values: dict[str, dict[str, float]] = field(default_factory=dict)
    metrics: dict[str, dict[str, float]] = field(default_factory=dict)


@dataclass
class Tuning:
    """Result of the search of one op."""

    op: str
    machine: dict[str, Any]
    method: dict[str, Any]
    rows: list[Row] = field(default_factory=list)


@dataclass
class Rate:
    """Pass rates of the gate for a candidate that is `factor` times as fast: at each stage, and at both."""

    samples: str
    factor: float
    measured: float | None
    n: int
    quick: int
    confirm: int
    promoted: int


@dataclass
class Gate:
    """Pass rates of the gate, measured and simulated."""

    op: str
    machine: dict[str, Any]
    method: dict[str, Any]
    rows: list[Rate] = field(default_factory=list)


def dumps(result: Tuning | Gate) -> str:
    return results.dumps(asdict(result))


def save(result: Tuning | Gate, root: Path) -> Path:
    return results.write(root / result.machine["slug"] / f"{result.op}.json", dumps(result))


def load(path: Path) -> Tuning | Gate:
    """Read a file that ``save`` wrote; ValueError for anything else."""
    kind: type[Tuning | Gate] = Gate if path.stem == GATE else Tuning
    return results.load(kind, path, "a result of kvstrata tune")
