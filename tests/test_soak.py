"""A cache in service for thousands of steps: requests join, leave, fork and are cropped; the budget holds after each.

Rows are made of their request's number and position, so any token can be checked at any time. Now and then memory runs
out at some allocation of an operation: the cache is as it was, and a second try succeeds.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

import kvstrata
from allocations import Allocations
from cache_model import limit
from kvstrata.cache import BudgetExceeded, TieredCache

LAYERS, HEADS, DIM, REQUESTS, TOKENS = 2, 2, 32, 6, 512
LIMIT = 1.0  # largest error of a quantised row relative to its norm: 2 bits, several times requantised
OPTIONS: dict[str, dict] = {
    "fraction": limit(0.3),
    "bytes": limit(200_000),
    "evict": limit(0.2) | dict(evict=True, per_head=False),
    "none": limit(None),
}
SHORT = 0.02  # of the operations find no memory
FIRST = 12  # at one of so many allocations


@dataclass
class Tokens:
    """Expected owner of each position of a request (forks share their past)."""

    source: list[int]


class Service:
    """Requests under continuous batching, drawn at random from a seed."""

    def __init__(self, device: torch.device, seed: int, **options) -> None:
        self.random, self.device = np.random.default_rng(seed), device
        self.cache = TieredCache(
            LAYERS, HEADS, DIM, tiers=("K8V4", "K4V3", "K2V2"), recent_tokens=20, sink_tokens=4, page_tokens=16,
            settle_every=8, dtype=torch.float16, device=device, max_requests=REQUESTS, max_tokens=TOKENS, **options,
        )  # fmt: skip
        self.model: dict[int, Tokens] = {}
        self.number, self.refused, self.settled, self.short = 0, 0, 0, 0
        self.seen: dict[str, int] = {}
        generator = torch.Generator().manual_seed(seed)
        self.by_position = torch.randn(2, TOKENS, HEADS, DIM, generator=generator).half()
        self.by_number = torch.randn(2, 64, HEADS, DIM, generator=generator).half()

    def rows(self, numbers: list[int], positions: list[int], layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of tokens ``[n, heads, D]``, on the CPU."""
        k, v = self.by_position[:, positions] + self.by_number[:, [(n + layer) % 64 for n in numbers]]
        return k, v

    def call(self, operation) -> None:
        """Run an operation of the cache; at times memory runs out in it, and it is run again."""
        if self.random.random() < SHORT:
            before = self.cache._lengths.copy()
            try:
                Allocations.of(operation, int(self.random.integers(FIRST)))
                return
            except torch.OutOfMemoryError:
                self.short += 1
                assert (self.cache._lengths == before).all(), "an operation that found no memory changed the cache"
                self.cache.check()
        operation()

    def append(self, request: int, tokens: int, number: int) -> None:
        begin = len(self.model[request].source)
        positions = list(range(begin, begin + tokens))
        for layer in range(LAYERS):
            k, v = (x.to(self.device) for x in self.rows([number] * tokens, positions, layer))
            mass = torch.rand(1, HEADS, begin + tokens, device=self.device) ** 4 if self.random.random() < 0.5 else None
            queries = None if mass is None else tokens
            self.call(lambda: self.cache.append(layer, k, v, [request], [tokens], mass=mass, queries=queries))  # noqa: B023
        self.model[request].source += [number] * tokens

    def attempt(self, operation) -> bool:
        """Run it; where the budget does not allow it, the lengths are as they were and the longest request leaves."""
        before = self.cache._lengths.copy()
        try:
            operation()
        except BudgetExceeded:
            self.refused += 1
            if not self.partly:
                assert (self.cache._lengths == before).all(), "a refused operation changed the cache"
            self.free(max(self.model, key=lambda request: len(self.model[request].source)))
            return False
        return True

    partly = False  # a prompt that some layers have already

    def join(self) -> None:
        if len(self.model) == REQUESTS:
            return
        request, self.number = self.cache.add_request(), self.number + 1
        self.model[request] = Tokens([])
        tokens = int(self.random.integers(1, 300 if self.random.random() < 0.3 else 40))
        self.partly = True
        try:
            fits = self.attempt(lambda: self.append(request, tokens, self.number))
        finally:
            self.partly = False
        if not fits and request in self.model:
            self.free(request)

    def free(self, request: int) -> None:
        self.call(lambda: self.cache.free_request(request))
        del self.model[request]

    def one(self) -> int:
        return int(self.random.choice(sorted(self.model)))

    def leave(self) -> None:
        if self.model:
            self.free(self.one())

    def fork(self) -> None:
        if self.model and len(self.model) < REQUESTS:
            request = self.one()
            self.call(lambda: self.cache.fork(request))
            [twin] = set(self.cache.requests) - set(self.model)
            self.model[twin] = Tokens(list(self.model[request].source))

    def crop(self) -> None:
        if self.model:
            request = self.one()
            length = int(self.random.integers(0, len(self.model[request].source) + 1))
            if self.attempt(lambda: self.call(lambda: self.cache.crop(request, length))):
                del self.model[request].source[length:]

    def reorder(self) -> None:
        given = sorted(self.model)
        if given:
            indices = self.random.integers(0, len(given), len(given)).tolist()
            self.call(lambda: self.cache.reorder(indices))
            before = {request: list(tokens.source) for request, tokens in self.model.items()}
            self.model = {r: Tokens(list(before[given[i]])) for r, i in zip(given, indices, strict=True)}

    def decode(self) -> None:
        """A step of all requests that are not full, with mass of one layer at times."""
        for request in [r for r, tokens in self.model.items() if len(tokens.source) >= TOKENS - 1]:
            self.free(request)
        if not self.model:
            return
        requests = sorted(self.model)
        plain = int(self.cache.buckets.host_count[..., 0].sum())
        if not self.attempt(lambda: self.call(lambda: self.cache.advance(requests))):
            return
        self.settled += int(self.cache.buckets.host_count[..., 0].sum()) < plain
        numbers = [self.number + r for r in requests]
        positions = [len(self.model[r].source) for r in requests]
        ids = torch.tensor(requests, dtype=torch.int32, device=self.device)
        for layer in range(LAYERS):
            k, v = (x.to(self.device) for x in self.rows(numbers, positions, layer))
            self.cache.write(layer, k, v, ids)
        for request, number in zip(requests, numbers, strict=True):
            self.model[request].source.append(number)
        if self.random.random() < 0.2:
            layer = int(self.random.integers(LAYERS))
            q = torch.randn(len(requests), 1, 2 * HEADS, DIM).half().to(self.device)
            result = kvstrata.decode_attention(q, self.cache, layer, return_mass=True)
            assert bool(result.out.isfinite().all())
            self.call(lambda: self.cache.update_importance(layer, result.mass))

    def step(self) -> None:
        """One operation besides decode at times; the budget holds and lengths are the model's after it."""
        names = ("decode", "join", "leave", "fork", "crop", "reorder")
        name = str(self.random.choice(names, p=(0.82, 0.08, 0.03, 0.03, 0.03, 0.01)))
        self.seen[name] = self.seen.get(name, 0) + 1
        getattr(self, name)()
        cache, memory = self.cache, self.cache.memory()
        limit = memory.total if memory.allowed is None else memory.allowed
        assert memory.total <= limit, f"{memory.total} bytes, allowed are {limit}"
        assert cache.requests == tuple(sorted(self.model))
        for request, tokens in self.model.items():
            assert (cache._lengths[request] == len(tokens.source)).all()

    def look(self) -> None:
        """Owners, counts and bytes agree, and tokens are what was written, up to their tier's rounding."""
        self.cache.check()
        for request, tokens in self.model.items():
            for layer in range(LAYERS if tokens.source else 0):
                k, v, position = (x.cpu() for x in self.cache.gather(layer, request))
                tier = self.cache.tier_map(layer, request).cpu()
                wanted = self.rows(tokens.source, list(range(len(tokens.source))), layer)
                for got, rows in zip((k, v), wanted, strict=True):
                    want = rows.transpose(0, 1)[torch.arange(HEADS).unsqueeze(1), position.clamp(min=0)]
                    assert torch.equal(got[tier == 0], want[tier == 0]), "a 16-bit row is another"
                    lossy = tier > 0
                    error = (got[lossy].float() - want[lossy].float()).norm(dim=-1) / want[lossy].float().norm(dim=-1)
                    assert not len(error) or float(error.max()) < LIMIT, "a row is another"
                if not self.cache.policy.evict:
                    assert torch.equal(position, torch.arange(len(tokens.source)).expand(HEADS, -1))

    def run(self, steps: int, every: int) -> None:
        for number in range(steps):
            self.step()
            if number % every == every - 1:
                self.look()
        for request in list(self.model):
            self.free(request)
        self.look()
        assert int(self.cache.buckets.host_count.sum()) == 0
        assert sum(self.cache.memory().tiers.values()) == 0, "pages leaked"


@pytest.mark.parametrize("name", OPTIONS)
def test_short_service_survives_all_operations(device: torch.device, name: str) -> None:
    service = Service(device, 1, **OPTIONS[name])
    service.run(250, 25)
    assert {"decode", "join", "leave", "fork", "crop"} <= service.seen.keys()
    assert service.settled >= 5 or name == "none"
    assert service.refused > 0 or name != "bytes"
    assert service.short >= 1


@pytest.mark.slow
@pytest.mark.parametrize(("name", "steps"), [("fraction", 20_000), ("bytes", 5_000), ("evict", 5_000), ("none", 5_000)])
def test_long_service_survives_all_operations(device: torch.device, name: str, steps: int) -> None:
    service = Service(device, 2, **OPTIONS[name])
    service.run(steps, 200)
    assert service.settled >= steps // 50 or name == "none"
    assert service.short >= steps // 200


def test_the_soak_detects_errors(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row written to another request, and a page that is never freed."""
    service = Service(device, 1, **OPTIONS["fraction"])
    write = TieredCache.write

    def swapped(self, layer, k, v, requests) -> None:
        write(self, layer, k.flip(0), v, requests)

    with monkeypatch.context() as patch:
        patch.setattr(TieredCache, "write", swapped)
        with pytest.raises(AssertionError, match="is another"):
            service.run(60, 5)
    service = Service(device, 1, **OPTIONS["fraction"])
    service.join()
    service.cache.pool.allocate(0, 1)
    with pytest.raises(AssertionError, match="pages"):
        service.look()
