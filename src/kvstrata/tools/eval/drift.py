"""A long decode with shifting attention: does the error of a tiered cache grow, since tokens are never promoted?

Tokens belong to subjects on a ring. Each KV head has a direction for every subject: K of a token lies along that of
its subject, at its own distance, plus noise; V has a mean for every subject. Queries attend to a few neighbouring
subjects, which move around the ring `turns` times, so that all of a text is attended to again after it was demoted:

    step 0                                    a turn later
    subjects  [#][#][#][ ][ ][ ][ ][ ]   ->   [ ][ ][#][#][#][ ][ ][ ]   ->  ...  ->  [#][#][#][ ][ ] ...

Every step appends a token, attends to all, and reports its mass; the output is compared with exact attention, and the
bytes with the budget. Quarters of the run contain whole turns, so their queries attend to the same subjects.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from kvstrata.attention import decode_attention
from kvstrata.cache import TieredCache
from kvstrata.tools import results
from kvstrata.tools.render import Grid

OP = "drift"
OPTIONS = {"on"}  # options of a block in a document
COMMANDS = {OP: "drift --save"}
QUARTERS = 4
CHOICES = {
    "mean": dict(policy="importance", importance="mean"),
    "ema": dict(policy="importance", importance="ema"),
    "recency": dict(policy="recency"),
    "uniform": dict(policy="uniform"),
}
DEFAULT = ("mean", "ema", "uniform")


@dataclass(frozen=True)
class Setting:
    """Settings of a run; every ``report_every``-th step reports mass and measures the error."""

    steps: int = 10_000
    prompt: int = 512
    budget: float = 0.3
    policy: str = "importance"
    importance: str = "mean"
    kv_heads: int = 2
    group: int = 2  # query heads per KV head
    head_dim: int = 64
    subjects: int = 16
    asked: int = 3  # subjects attended to at a time
    turns: int = 8
    report_every: int = 4
    seed: int = 0

    def __post_init__(self) -> None:
        if self.steps < 10 * QUARTERS * self.report_every:
            raise ValueError(f"steps: expected at least {10 * QUARTERS * self.report_every}, got {self.steps}")
        if self.turns % QUARTERS:
            raise ValueError(f"turns: expected a multiple of {QUARTERS}, got {self.turns}")


def choice(name: str) -> dict[str, Any]:
    """Arguments of `Setting` for a policy name."""
    if name not in CHOICES:
        raise ValueError(f"policy: expected one of {', '.join(CHOICES)}, got {name!r}")
    return CHOICES[name]


@dataclass
class Row:
    """One run. Lists have an entry for each quarter; ``tiers`` are shares of tokens at its end."""

    setting: dict[str, Any]
    error: list[float]  # mean relative error of the output
    highest: list[float]  # 95th percentile
    fraction: list[float]  # bytes at the end, as a fraction of 16 bit
    tiers: list[dict[str, float]]
    within: bool  # True if the budget held at every step

    @property
    def name(self) -> str:
        policy, mode = self.setting["policy"], self.setting["importance"]
        return f"{policy}, {mode}" if policy == "importance" else policy


class Text:
    """Tokens and queries of a run, which are the same for every cache."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.random = torch.Generator().manual_seed(setting.seed)
        heads, dim, subjects = setting.kv_heads, setting.head_dim, setting.subjects
        self.direction = torch.nn.functional.normalize(self._normal(heads, subjects, dim), dim=-1)
        self.mean = self._normal(heads, subjects, dim)
        tokens = setting.prompt + setting.steps
        subject = torch.tensor([self._subject(i) for i in range(tokens)])
        along = 3 * (0.25 * self._normal(tokens, heads, 1)).exp()
        self.k = (along * self.direction[:, subject].transpose(0, 1) + self._normal(tokens, heads, dim)).half()
        self.v = (self.mean[:, subject].transpose(0, 1) + self._normal(tokens, heads, dim)).half()

    def _normal(self, *size: int) -> torch.Tensor:
        return torch.randn(size, generator=self.random)

    def _pick(self, below: int) -> int:
        return int(torch.randint(below, (), generator=self.random))

    def _asked(self, step: int) -> int:
        """A random subject among those attended to at this step."""
        s = self.setting
        return (step * s.turns * s.subjects // s.steps + self._pick(s.asked)) % s.subjects

    def _subject(self, token: int) -> int:
        """Subject of a token; every second token is about one that is attended to."""
        step = token - self.setting.prompt
        return self._asked(step) if step >= 0 and token % 2 else self._pick(self.setting.subjects)

    def query(self, step: int) -> torch.Tensor:
        """Query ``[1, 1, query heads, D]`` of a step."""
        s = self.setting
        wanted = self.direction[:, self._asked(step)].unsqueeze(1)
        q = 1.5 * math.sqrt(s.head_dim) * wanted + 0.5 * self._normal(s.kv_heads, s.group, s.head_dim)
        return q.reshape(1, 1, s.kv_heads * s.group, s.head_dim).half()

    def exact(self, q: torch.Tensor, tokens: int) -> torch.Tensor:
        s = self.setting
        rows = q.float().view(s.kv_heads, s.group, s.head_dim)
        k, v = (x[:tokens].float().transpose(0, 1) for x in (self.k, self.v))
        weights = (rows @ k.mT / math.sqrt(s.head_dim)).softmax(-1)
        return (weights @ v).view(1, 1, s.kv_heads * s.group, s.head_dim)


def make_cache(setting: Setting) -> TieredCache:
    """Cache with small pages and few recent tokens, so that a fraction overtakes its floor early."""
    page_tokens, tokens = 16, setting.prompt + setting.steps
    return TieredCache(
        1,
        setting.kv_heads,
        setting.head_dim,
        budget=setting.budget,
        recent_tokens=16,
        sink_tokens=4,
        page_tokens=page_tokens,
        settle_every=28,  # three pages together with sink and recent tokens
        max_tokens=tokens,
        policy=setting.policy,
        importance=setting.importance,
        decay=0.99,
        dtype=torch.float16,
    )


def steps(setting: Setting) -> Iterator[tuple[TieredCache, int, float | None]]:
    """The cache after each step, with the relative error of the output if it was measured."""
    text, cache = Text(setting), make_cache(setting)
    cache.append(0, text.k[: setting.prompt], text.v[: setting.prompt])
    for step in range(setting.steps):
        tokens = setting.prompt + step + 1
        cache.append(0, text.k[tokens - 1 : tokens], text.v[tokens - 1 : tokens])
        error = None
        if step % setting.report_every == 0:
            q = text.query(step)
            out, _, mass = decode_attention(q, cache, 0, return_mass=True)
            assert mass is not None
            cache.update_importance(0, mass)
            exact = text.exact(q, tokens)
            error = float((out.float() - exact).norm() / exact.norm())
        yield cache, tokens, error


def run(setting: Setting, tick: Callable[[int], None] = lambda step: None) -> Row:
    """Run all steps; ``tick`` is called after each."""
    errors: list[list[float]] = [[] for _ in range(QUARTERS)]
    row = Row(asdict(setting), [], [], [], [], True)
    for step, (cache, tokens, error) in enumerate(steps(setting)):
        quarter = step * QUARTERS // setting.steps
        if error is not None:
            errors[quarter].append(error)
        memory = cache.memory()
        fits = memory.total <= setting.budget * memory.full or tokens < cache.budget.floor_tokens
        row.within &= fits and memory.total <= (memory.allowed or 0)
        if (step + 1) * QUARTERS // setting.steps > quarter:
            total = sum(memory.tokens.values())
            row.error.append(sum(errors[quarter]) / len(errors[quarter]))
            row.highest.append(sorted(errors[quarter])[int(0.95 * len(errors[quarter]))])
            row.fraction.append(memory.fraction)
            row.tiers.append({name: count / total for name, count in memory.tokens.items()})
        tick(step)
    return row


@dataclass
class Drift:
    machine: dict[str, Any]
    rows: list[Row] = field(default_factory=list)
    op: str = OP


def dumps(drift: Drift) -> str:
    return results.dumps({"op": OP, "machine": drift.machine, "rows": [asdict(row) for row in drift.rows]})


def save(drift: Drift, path: Path) -> Path:
    return results.write(path, dumps(drift))


def load(path: Path) -> Drift:
    """Read a file that ``save`` wrote; ValueError for anything else."""
    return results.load(Drift, path, "a result of kvstrata drift", op=OP)


def table(drift: Drift, options: dict[str, str] | None = None) -> Grid:
    """One line per run and quarter."""
    header = ["policy", "quarter", "error", "95th percentile", "of 16 bit", "tokens in each tier"]
    lines = []
    for row in drift.rows:
        for quarter in range(QUARTERS):
            shares = ", ".join(f"{name} {100 * share:.0f} %" for name, share in row.tiers[quarter].items())
            cells = [f"{100 * x[quarter]:.1f} %" for x in (row.error, row.highest)]
            lines.append([row.name, f"{quarter + 1}", *cells, f"{row.fraction[quarter]:.3f}", shares])
    return Grid(caption(drift), header, lines)


def caption(drift: Drift) -> str:
    machine, setting = drift.machine, drift.rows[0].setting
    run = f"{setting['steps']} steps after {setting['prompt']} tokens, budget {setting['budget']:g}"
    return f"drift, {run}, on {machine['name']}, {results.provenance(machine)}"
