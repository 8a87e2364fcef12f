"""Complete operations of a cache as users call them, for the settle benchmark: prompts, settling steps, eager calls.

    prompt-B1-16384    `append` of the prompts of B requests to every layer, into an empty cache
    advance-B32-16384  `advance`, step by step, so that about every 60th settles, which shows in `mean` and `slowest`;
                       rows of the step are written outside the measured time
    eager-B32-16384    `append` and `decode_attention`, layer by layer

Times are wall-clock until the device is done; host time is measured separately, for the same calls. Contexts are random
rows. ``16 bit`` is the same call on a cache that never settles; for ``advance`` and ``eager`` it holds only one page
per request, since its time hardly depends on contexts and memory may not suffice for more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

import kvstrata
from kvstrata.cache import TieredCache

from .case import Bench, Case
from .clock import Call
from .machine import release

LAYERS = 32  # layers of the model; a shape that does not fit the memory has fewer, as its name says
GROWTH = 1024  # tokens that requests may grow by
FILLED = 16  # requests whose contexts are appended at once
PERIODS = 3  # settlings that the samples of `advance` contain
LIMIT = 0.6  # largest mean relative error of K in a cache: that of 2 bits


@dataclass(frozen=True)
class Shape:
    """Requests with contexts of ``tokens`` tokens each, and the model's sizes."""

    requests: int
    tokens: int
    layers: int = LAYERS
    kv_heads: int = 8
    head_dim: int = 128
    heads: int = 32
    budget: float = 0.25
    page_tokens: int = 64
    settle_every: int = 64
    dtype: torch.dtype = torch.bfloat16

    @property
    def name(self) -> str:
        return f"B{self.requests}-{self.tokens}" + (f"-{self.layers}layers" if self.layers < LAYERS else "")

    @property
    def lengths(self) -> list[int]:
        """Tokens of each request: at different fill levels of their pages."""
        return [self.tokens - 7 * i % self.page_tokens for i in range(self.requests)]

    @property
    def row_bytes(self) -> int:
        """Bytes of one token in all layers, K and V."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.dtype.itemsize

    def rows(self, n: int, device: torch.device, seed: int = 0) -> torch.Tensor:
        """K and V of ``n`` tokens in a layer, ``[2, n, kv_heads, head_dim]``."""
        generator = torch.Generator(device).manual_seed(seed)
        return torch.randn(2, n, self.kv_heads, self.head_dim, generator=generator, device=device, dtype=self.dtype)

    def cache(self, device: torch.device, budget: float | None, tokens: int) -> TieredCache:
        return TieredCache(
            self.layers, self.kv_heads, self.head_dim, budget=budget, dtype=self.dtype, device=device,
            max_requests=self.requests, max_tokens=tokens, page_tokens=self.page_tokens, settle_every=self.settle_every,
        )  # fmt: skip


class Prompts:
    """An empty cache, and prompts to append to it."""

    def __init__(self, shape: Shape, device: torch.device, budget: float | None) -> None:
        self.shape, self.lengths = shape, [shape.tokens] * shape.requests
        self.k, self.v = shape.rows(sum(self.lengths), device)
        self.mass = torch.rand(shape.requests, shape.kv_heads, shape.tokens, device=device) ** 4
        self.cache = shape.cache(device, budget, shape.tokens)
        kvstrata.warmup(self.cache, progress=False)

    def clear(self) -> None:
        for request in self.cache.requests:
            self.cache.free_request(request)

    def append(self, mass: bool = False) -> None:
        if self.cache.requests:  # the previous call was not cleared
            self.clear()
        given: dict[str, Any] = dict(mass=self.mass, queries=self.shape.tokens) if mass else {}
        for layer in range(self.shape.layers):
            self.cache.append(layer, self.k, self.v, range(self.shape.requests), self.lengths, **given)

    def assert_stored(self) -> None:
        cache, request, layer = self.cache, self.shape.requests - 1, self.shape.layers - 1
        assert {cache.length(r, n) for r in cache.requests for n in (0, layer)} == {self.shape.tokens}, "wrong lengths"
        assert len(cache.requests) == self.shape.requests, "requests are missing"
        memory = cache.memory()
        assert memory.allowed is None or memory.total <= memory.allowed, "the budget does not hold"
        k, _, position = cache.gather(layer, request)
        assert torch.equal(position, torch.arange(self.shape.tokens, device=k.device).expand_as(position)), "tokens"
        rows = self.k[-self.shape.tokens :].transpose(0, 1).float()
        error = float((k.float() - rows).norm() / rows.norm())
        assert error < LIMIT, f"K is off by {error:.2f} of its size"


def build_prompt(shape: Shape, device: torch.device) -> Bench:
    """``append`` and, with the mass of its queries, ``with mass`` share a cache; ``16 bit`` has its own."""
    ours, plain = Prompts(shape, device, shape.budget), Prompts(shape, device, None)
    of = {"append": ours, "with mass": ours, "16 bit": plain}
    contenders: dict[str, Call] = {
        "append": lambda i: ours.append(),
        "with mass": lambda i: ours.append(mass=True),
        "16 bit": lambda i: plain.append(),
    }

    def clear(i: int) -> None:
        ours.clear()
        plain.clear()

    return Bench(
        contenders=contenders,
        poison=lambda name, i: of[name].clear(),
        check=lambda name, i, out: of[name].assert_stored(),
        ours="append",
        baseline="16 bit",
        variants={"with mass"},
        host=dict(contenders),
        burst=1,
        before=clear,
    )


class Steps:
    """Requests with contexts that grow by one token per step."""

    def __init__(self, shape: Shape, device: torch.device, budget: float | None, lengths: list[int]) -> None:
        self.shape, self.unwritten, self.layer = shape, False, 0
        self.cache = shape.cache(device, budget, max(lengths) + GROWTH)
        kvstrata.warmup(self.cache, shape.heads, progress=False)
        for first in range(0, len(lengths), FILLED):
            requests = range(first, min(first + FILLED, len(lengths)))
            k, v = shape.rows(sum(lengths[r] for r in requests), device)
            for layer in range(shape.layers):
                self.cache.append(layer, k, v, requests, [lengths[r] for r in requests])
        self.k, self.v = shape.rows(shape.requests, device, seed=1)
        size = (shape.requests, 1, shape.heads, shape.head_dim)
        self.q = torch.randn(size, dtype=shape.dtype, device=device)

    def advance(self) -> None:
        self.write()
        self.cache.advance()
        self.unwritten = True

    def write(self) -> None:
        """Write the rows of the last `advance`."""
        if self.unwritten:
            for layer in range(self.shape.layers):
                self.cache.write(layer, self.k, self.v)
        self.unwritten = False

    def append(self) -> None:
        self.write()
        self.layer = (self.layer + 1) % self.shape.layers
        self.cache.append(self.layer, self.k.unsqueeze(1), self.v.unsqueeze(1))

    def eager(self) -> torch.Tensor:
        self.append()
        out = kvstrata.decode_attention(self.q, self.cache, self.layer)
        assert isinstance(out, torch.Tensor)
        return out

    def assert_grown(self, before: int, layers: range) -> None:
        self.write()
        cache = self.cache
        held = cache.buckets.count[:, layers.start : layers.stop].sum(-1).cpu()  # [requests, layers, heads]
        lengths = torch.from_numpy(cache._lengths[:, layers.start : layers.stop]).unsqueeze(-1)
        assert bool((held == lengths).all()), "counts and lengths differ"
        assert int(cache._lengths[0, layers.start]) == before + 1, "no token was added"
        memory = cache.memory()
        assert memory.allowed is None or memory.total <= memory.allowed, "the budget does not hold"

    def assert_read(self, out: torch.Tensor) -> None:
        checked = [0, self.shape.requests - 1][: self.shape.requests]
        want = kvstrata.decode_attention(self.q[checked], self.cache, self.layer, requests=checked, backend="reference")
        assert isinstance(want, torch.Tensor)
        torch.testing.assert_close(out[checked].float(), want.float(), atol=2e-2, rtol=2e-2)


_built: dict[tuple[Shape, torch.device], tuple[Steps, Steps]] = {}


def steps_of(shape: Shape, device: torch.device) -> tuple[Steps, Steps]:
    """The caches of a shape, kept until another is requested; the second one is 16 bit."""
    if (shape, device) not in _built:
        free_caches(device)
        short = [n % shape.page_tokens + 1 for n in shape.lengths]
        _built[shape, device] = (Steps(shape, device, shape.budget, shape.lengths), Steps(shape, device, None, short))
    return _built[shape, device]


def free_caches(device: torch.device) -> None:
    """Free the caches, which may take most of the memory."""
    _built.clear()
    release(device)


def build_steps(calls: Mapping[str, Callable[[Steps], Any]], whole: bool, shape: Shape, device: torch.device) -> Bench:
    """Bench of calls that grow contexts in all layers (``whole``) or in the next one; the first call is ours."""
    ours, plain = steps_of(shape, device)
    of = {name: plain if name == "16 bit" else ours for name in calls}
    lengths: dict[str, int] = {}
    contenders: dict[str, Call] = {name: lambda i, name=name: calls[name](of[name]) for name in calls}  # type: ignore[misc]

    def poison(name: str, i: int) -> None:
        of[name].write()
        lengths[name] = of[name].cache.length(0, 0 if whole else (of[name].layer + 1) % shape.layers)

    def check(name: str, i: int, out: torch.Tensor | None) -> None:
        layer = of[name].layer
        of[name].assert_grown(lengths[name], range(shape.layers) if whole else range(layer, layer + 1))
        if out is not None:
            of[name].assert_read(out)

    def write(i: int) -> None:
        ours.write()
        plain.write()

    bench = Bench(contenders, poison, check, next(iter(calls)), "16 bit", host=dict(contenders), burst=1)
    bench.variants = calls.keys() - {bench.ours, bench.baseline}
    if whole:
        bench.before, bench.bursts = write, shape.settle_every
    return bench


ADVANCE = dict.fromkeys(("advance", "16 bit"), Steps.advance)
EAGER_CALLS = {"append + decode": Steps.eager, "append": Steps.append, "16 bit": Steps.eager}
build_advance, build_eager = partial(build_steps, ADVANCE, True), partial(build_steps, EAGER_CALLS, False)


def _case(kind: str, shape: Shape, moved: int, build: Any, seconds: float, rounds: int | None) -> Case:
    params = {"what": kind, "B": shape.requests, "T": shape.tokens, "layers": shape.layers, "budget": shape.budget}
    case = partial(Case, "settle", f"{kind}-{shape.name}", params, moved, partial(build, shape))
    return case(wall=True, seconds=seconds, rounds=rounds)


# At a quarter of 16 bit 64 x 32,768 tokens are 69 GB in 32 layers, and so are 256 x 32,768 in 8.
PROMPTS = [Shape(1, 4096), Shape(1, 16384), Shape(1, 32768), Shape(32, 4096)]
STEPS = [Shape(requests, tokens) for requests in (1, 32, 64) for tokens in (4096, 16384, 32768)]
STEPS += [Shape(256, 4096), Shape(256, 16384, 8), Shape(256, 32768, 8)]
EAGER = {Shape(1, 4096), Shape(32, 4096), Shape(32, 16384), Shape(64, 4096), Shape(256, 4096)}
QUICK = {Shape(1, 16384), Shape(32, 4096)}
TOY = Shape(3, 300, 2, 2, 64, 4, 0.3, 16, 16, torch.float32)


def cases(device: torch.device, quick: bool) -> list[Case]:
    """Cases of complete operations; those of a shape with the same caches are consecutive."""
    if device.type != "cuda":
        prompts, steps, eager = [TOY], [TOY], {TOY}
    else:
        prompts = [shape for shape in PROMPTS if not quick or shape in QUICK]
        steps = [shape for shape in STEPS if not quick or shape in QUICK]
        eager = EAGER.intersection(steps)
    listed = []
    for shape in prompts:
        moved = int(shape.requests * shape.tokens * shape.row_bytes * (1 + shape.budget))
        listed.append(_case("prompt", shape, moved, build_prompt, 1.5, None))
    for shape in steps:
        step = shape.requests * shape.row_bytes
        listed.append(_case("advance", shape, step, build_advance, 3.0, PERIODS * shape.settle_every))
        if shape in eager:
            listed.append(_case("eager", shape, 2 * step // shape.layers, build_eager, 1.0, None))
    return listed
