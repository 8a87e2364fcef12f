"""Results of a quality measurement: rows as JSON, one line each, under results/<machine>/quality.json.

A row is one contender at one length: bytes after the text, perplexity and loss relative to 16 bit per text, KL and
top-1 agreement. Sums per chunk are kept for intervals over chunks: both caches read the same chunks, and the difference
of their log-likelihoods is resampled.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kvstrata.tools import results

if TYPE_CHECKING:
    from .contenders import Contender

OP = "quality"
RENAMED = {"window": "recent_tokens", "sinks": "sink_tokens"}  # options of rows in older files


@dataclass
class Row:
    name: str
    kind: str
    tokens: int
    prompt: int
    chunk: int
    budget: float | None
    options: dict[str, Any]
    bytes: int
    full: int
    nll: list[list[float]]  # sums [stretch][chunk]; the stretches of a text are consecutive
    kl: list[list[float]]
    agree: list[list[int]]
    count: list[int]
    tiers: dict[str, int] = field(default_factory=dict)
    stretches: int = 1  # stretches of each text
    measured: str = ""  # revision and date
    calibration: str = ""  # digest of the file, of rows with one

    @property
    def setting(self) -> tuple[int, int, int, int]:
        """Settings that comparable rows share."""
        return self.tokens, self.prompt, self.chunk, self.stretches

    @property
    def length(self) -> str:
        """Tokens, prompt and stretches of a row as text."""
        stretch = f"{self.tokens - self.prompt} after {self.prompt}" if self.prompt else f"{self.tokens}"
        return stretch if self.stretches == 1 else f"{self.stretches} x {stretch}"

    @property
    def fraction(self) -> float:
        return self.bytes / self.full

    def perplexity(self, text: int) -> float:
        return math.exp(sum(map(sum, self.nll[self._stretches_of(text)])) / (self.stretches * sum(self.count)))

    def _stretches_of(self, text: int) -> slice:
        return slice(text * self.stretches, (text + 1) * self.stretches)

    @property
    def mean_kl(self) -> float:
        return sum(map(sum, self.kl)) / (len(self.kl) * sum(self.count)) if self.kl[0] else 0.0

    @property
    def agreement(self) -> float:
        return sum(map(sum, self.agree)) / (len(self.agree) * sum(self.count)) if self.agree[0] else 1.0

    def loss(self, exact: Row) -> tuple[float, float, float]:
        """Relative increase of perplexity over all texts, and its 95 % interval over chunks."""
        mean, low, high = self.difference(exact, "nll")
        return math.expm1(mean), math.expm1(low), math.expm1(high)

    def difference(self, other: Row, what: str, text: int | None = None) -> tuple[float, float, float]:
        """Mean difference of ``nll`` or ``kl`` per token, of one text or all, and its 95 % interval over chunks (seeded
        bootstrap); both rows must have read the same chunks."""
        rows = slice(None) if text is None else self._stretches_of(text)
        sums = np.asarray(getattr(self, what)[rows]) - np.asarray(getattr(other, what)[rows])  # [stretch, chunk]
        counts = np.broadcast_to(np.asarray(self.count, float), sums.shape)
        flat, weight = sums.ravel(), counts.ravel()
        picks = np.random.default_rng(0).integers(flat.size, size=(2000, flat.size))
        means = flat[picks].sum(1) / weight[picks].sum(1)
        low, high = np.percentile(means, [2.5, 97.5])
        return float(flat.sum() / weight.sum()), float(low), float(high)


@dataclass
class Needle:
    name: str
    kind: str
    budget: float | None
    tokens: int
    depth: float
    found: int
    asked: int
    logprob: float  # mean log-probability of the answer
    measured: str = ""  # revision and date
    options: dict[str, Any] = field(default_factory=dict)
    calibration: str = ""  # digest of the file, of caches with one


@dataclass
class Quality:
    machine: dict[str, Any]
    model: str
    texts: list[str]
    absent: dict[str, str] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    needles: list[Needle] = field(default_factory=list)
    digests: dict[str, str] = field(default_factory=dict)  # of the model's weights and of each text
    op: str = OP  # name of the file: `quality`, or `quality_` and a suffix for other texts on the same machine

    @property
    def provenance(self) -> str:
        """Revision and date of this run."""
        return results.provenance(self.machine) if self.machine else ""

    def is_current(self, result: Row | Needle, calibration: str = "") -> bool:
        """True if the result is of this run's revision and calibration: a stopped run keeps it, others measure it
        again."""
        same = result.measured.partition(",")[0] == self.provenance.partition(",")[0]
        return same and result.calibration == calibration

    def keep(self, row: Row) -> None:
        """Add a row, in place of an older one of the same cache and setting."""
        key = (row.name, row.setting, row.budget, row.options)
        for i, old in enumerate(self.rows):
            if (old.name, old.setting, old.budget, old.options) == key:
                self.rows[i] = row
                return
        self.rows.append(row)

    def note_absent(self, why: dict[str, str]) -> None:
        """Record peers that cannot run now, unless they have rows from an earlier run."""
        there = [f"{row.name} " for row in self.rows]
        self.absent |= {n: reason for n, reason in why.items() if not any(row.startswith(f"{n} ") for row in there)}

    def exact(self, like: Row) -> Row:
        """16-bit row that a row is compared with; LookupError if there is none."""
        for row in self.rows:
            if row.kind == "exact" and row.setting == like.setting:
                return row
        raise LookupError(f"no 16-bit row of {like.length} tokens in chunks of {like.chunk}")

    def row(self, contender: Contender, setting: tuple[int, int, int, int]) -> Row | None:
        wanted = (contender.name, setting, contender.budget, plain(contender.options))
        for row in self.rows:
            if (row.name, row.setting, row.budget, row.options) == wanted:
                return row
        return None


def plain(value: Any) -> Any:
    """Convert a value to what JSON would return."""
    return json.loads(json.dumps(value))


def dumps(quality: Quality) -> str:
    return results.dumps({"op": OP, **asdict(quality)} | {"op": OP}, lists=("rows", "needles"))


def save(quality: Quality, path: Path) -> None:
    results.write(path, dumps(quality))


def load(path: Path) -> Quality:
    """Read a file that ``save`` wrote; ValueError for anything else."""
    quality = results.load(Quality, path, "a result of kvstrata eval", op=OP)
    for row in quality.rows:
        row.options = {RENAMED.get(name, name): value for name, value in row.options.items()}
    quality.op = path.stem
    return quality
