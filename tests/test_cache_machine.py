"""The cache against a plain list, under any order of operations.

The model knows every row that was appended and, from reading the cache after each step, the tiers a token went through.
It re-encodes the row along the same tiers with the arithmetic of the reference and expects the same bits. After each
step the books are checked (owners, counts, positions, budget), and freed pages are poison.
"""

from __future__ import annotations

import copy
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from hypothesis import assume, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from allocations import Allocations
from cache_model import fingerprint, limit, same
from kvstrata.cache import BudgetExceeded, TieredCache
from kvstrata.cache.ops.inspect import gather
from kvstrata.layout import rotate
from kvstrata.quant import reference as quant

LAYERS, HEADS, DIM, REQUESTS, TOKENS = 2, 2, 32, 4, 256
TIERS = [("K4V4", "K3V3", "K2V2"), ("K8V8", "K4V2"), ("K4V3", "K4V2", "K3V2", "K2V2"), ("K2V2",)]


@dataclass
class Layer:
    """Expected contents of one layer of a request: rows ``[kv_heads, n, D]``, rotated ones where quantised."""

    rows: list[torch.Tensor] = field(default_factory=lambda: [torch.zeros(HEADS, 0, DIM) for _ in range(2)])
    stored: list[torch.Tensor] = field(default_factory=lambda: [torch.zeros(HEADS, 0, DIM) for _ in range(2)])
    codes: list[torch.Tensor] = field(
        default_factory=lambda: [torch.zeros(HEADS, 0, DIM, dtype=torch.uint8) for _ in range(2)]
    )
    scale: list[torch.Tensor] = field(
        default_factory=lambda: [torch.zeros(HEADS, 0, dtype=torch.float16) for _ in range(2)]
    )
    tier: torch.Tensor = field(default_factory=lambda: torch.zeros(HEADS, 0, dtype=torch.int64))

    @property
    def length(self) -> int:
        return self.tier.shape[1]

    def append(self, k: torch.Tensor, v: torch.Tensor) -> None:
        self.rows = [torch.cat([old, new.transpose(0, 1)], 1) for old, new in zip(self.rows, (k, v), strict=True)]
        blank = torch.zeros(HEADS, len(k), DIM)
        self.stored = [torch.cat([old, blank], 1) for old in self.stored]
        self.codes = [torch.cat([old, blank.to(torch.uint8)], 1) for old in self.codes]
        self.scale = [torch.cat([old, blank[..., 0].half()], 1) for old in self.scale]
        self.tier = torch.cat([self.tier, torch.zeros(HEADS, len(k), dtype=torch.int64)], 1)

    def crop(self, length: int) -> None:
        self.rows = [x[:, :length] for x in self.rows]
        self.stored = [x[:, :length] for x in self.stored]
        self.codes = [x[:, :length] for x in self.codes]
        self.scale = [x[:, :length] for x in self.scale]
        self.tier = self.tier[:, :length]

    def follow(self, cache: TieredCache, tiers: torch.Tensor, centre: torch.Tensor) -> None:
        """Take the hops that the cache took since the last look."""
        assert (tiers >= self.tier)[tiers >= 0].all(), "a token was promoted"
        assert (tiers[self.tier < 0] < 0).all(), "an evicted token is back"
        for old in self.tier[tiers != self.tier].unique().tolist():
            for new in tiers[tiers != self.tier].unique().tolist():
                moved = (self.tier == old) & (tiers == new)
                if new <= 0 or not moved.any():
                    continue
                was, now = cache.formats[old], cache.formats[new]
                for side, bits, before in ((0, now.k_bits, was.k_bits), (1, now.v_bits, was.v_bits)):
                    gain = (quant.K_GAIN, quant.V_GAIN)[side][bits]
                    if old == 0:
                        shift = centre.unsqueeze(1).expand_as(self.rows[0])[moved] if side == 0 else None
                        codes, scale = quant.quantize_plain(self.rows[side][moved], shift, bits, True, gain)
                    elif bits == before:
                        continue
                    else:
                        given = self.codes[side][moved], self.scale[side][moved]
                        codes, scale = quant.quantize_coded(*given, before, bits, True, gain)
                    self.codes[side][moved], self.scale[side][moved] = codes, scale
                    self.stored[side][moved] = quant.decode(codes, scale, bits)
        self.tier = tiers.clone()

    def expected(self, dtype: torch.dtype, centre: torch.Tensor) -> list[torch.Tensor]:
        largest = min(torch.finfo(dtype).max, torch.finfo(torch.float32).max)
        back = [rotate(self.stored[0]) + centre.unsqueeze(1), rotate(self.stored[1])]
        lossy = (self.tier > 0).unsqueeze(2)
        cast = [x.clamp(-largest, largest).to(dtype) for x in back]
        return [torch.where(lossy, low, row) for low, row in zip(cast, self.rows, strict=True)]


class Machine(RuleBasedStateMachine):
    ids = Bundle("ids")
    refuses_memory = True

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.model: dict[int, list[Layer]] = {}
        self.saved: list[tuple[Path, list[Layer]]] = []
        self.refused: int | None = None  # which allocation of the next operation

    def teardown(self) -> None:
        self.folder.cleanup()

    @initialize(
        budget=st.sampled_from([0.2, 0.3, 0.5, 0.8, None, 200_000, 150_000, 0.05]),
        tiers=st.sampled_from(TIERS),
        recent_tokens=st.sampled_from([1, 8, 16, 21]),
        sink_tokens=st.sampled_from([0, 2, 4]),
        page_tokens=st.sampled_from([16, 16, 32]),
        policy=st.sampled_from(["importance", "importance", "recency", "uniform"]),
        mode=st.sampled_from(["mean", "ema"]),
        per_head=st.booleans(),
        evict=st.booleans(),
        settle_every=st.sampled_from([1, 8, 64]),
        dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
        slab_pages=st.sampled_from([1, 2, 5]),
        seed=st.integers(0, 1000),
    )
    def start(self, budget, tiers, mode, dtype, seed, slab_pages, page_tokens, **rest) -> None:
        self.random = torch.Generator().manual_seed(seed)
        self.dtype = dtype
        try:
            self.cache = TieredCache(
                LAYERS,
                HEADS,
                DIM,
                **limit(budget),
                tiers=tiers,
                importance=mode,
                dtype=dtype,
                max_requests=REQUESTS,
                max_tokens=TOKENS,
                page_tokens=page_tokens,
                slab_bytes=slab_pages * page_tokens * (DIM * 8 + 8),
                debug=True,
                **rest,
            )
        except ValueError as error:  # bytes that do not even hold the tables and one slab of each tier
            assume("expected at least" not in str(error))
            raise

    def make(self, tokens: int, kind: str = "normal") -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(2, tokens, HEADS, DIM, generator=self.random) + 2
        if kind == "zero":
            x[:] = 0
        elif kind == "huge":
            x *= 6e4
        elif kind == "nan":
            x[:, ::2, :, 3] = torch.nan
            x[:, 1::2, :, 5] = torch.inf
        k, v = x.to(self.dtype)
        return k, v

    def attempt(self, operation) -> bool:
        """Run it; when it does not fit, or memory runs out, nothing may have changed."""
        if self.refused is not None:
            before, number, self.refused = fingerprint(self.cache, spare=False), self.refused, None
            try:
                Allocations.of(operation, number)
            except torch.OutOfMemoryError:
                self.cache.check()
            except BudgetExceeded:
                pass
            else:
                return True
            assert same(before, fingerprint(self.cache, spare=False))
        before = fingerprint(self.cache)
        try:
            operation()
        except BudgetExceeded as error:
            short = error.needed - error.allowed
        else:
            return True
        assert self.cache.budget.amount is not None
        assert short > 0
        assert same(before, fingerprint(self.cache))
        return False

    @rule(allocation=st.integers(0, 300))
    def run_out_of_memory(self, allocation: int) -> None:
        self.refused = allocation if self.refuses_memory else None

    @rule(target=ids)
    def add(self):
        if len(self.model) == REQUESTS:
            with pytest.raises(RuntimeError, match="max_requests"):
                self.cache.add_request()
            return multiple()
        request = self.cache.add_request()
        assert request not in self.model
        self.model[request] = [Layer() for _ in range(LAYERS)]
        return request

    def push(self, layers: list[int], requests: list[int], lengths: list[int], kind: str) -> None:
        for layer in layers:
            k, v = self.make(sum(lengths), kind)
            if self.attempt(lambda k=k, v=v, layer=layer: self.cache.append(layer, k, v, requests, lengths)):
                at = 0
                for request, n in zip(requests, lengths, strict=True):
                    self.model[request][layer].append(k[at : at + n], v[at : at + n])
                    at += n

    @rule(
        request=ids,
        tokens=st.one_of(st.integers(1, 3), st.integers(0, 90)),
        layers=st.sampled_from([[0], [1], [0, 1], [0, 1]]),
        kind=st.sampled_from(["normal", "normal", "normal", "zero", "huge", "nan"]),
    )
    def append(self, request: int, tokens: int, layers: list[int], kind: str) -> None:
        room = TOKENS - max(self.model[request][layer].length for layer in layers)
        self.push(layers, [request], [min(tokens, room)], kind)

    @rule(data=st.data())
    def append_ragged(self, data) -> None:
        requests = data.draw(st.permutations(sorted(self.model)))
        requests = requests[: data.draw(st.integers(0, len(requests)))]
        lengths = [
            min(data.draw(st.integers(0, 40)), TOKENS - max(layer.length for layer in self.model[r])) for r in requests
        ]
        if requests:
            self.push([0, 1], requests, lengths, "normal")

    @rule(request=ids, steps=st.integers(1, 6))
    def decode(self, request: int, steps: int) -> None:
        for _ in range(min(steps, TOKENS - max(layer.length for layer in self.model[request]))):
            self.push([0, 1], [request], [1], "normal")
            self.look()

    @rule(data=st.data(), steps=st.integers(1, 4))
    def step(self, data, steps: int) -> None:
        """Room first and rows later, as a captured step has it, a row of padding among them."""
        requests = data.draw(st.permutations(sorted(self.model)))
        requests = requests[: data.draw(st.integers(0, len(requests)))]
        for _ in range(steps):
            full = any(layer.length == TOKENS for r in requests for layer in self.model[r])
            if full or not self.attempt(lambda: self.cache.advance(requests)):
                return
            for layer in range(LAYERS):
                k, v = self.make(len(requests) + 1)
                self.cache.write(layer, k, v, torch.tensor([*requests, -1], dtype=torch.int32))
                for i, request in enumerate(requests):
                    self.model[request][layer].append(k[i : i + 1], v[i : i + 1])
            self.look()

    @rule(layer=st.sampled_from([None, 0, 1]))
    def settle(self, layer) -> None:
        self.attempt(lambda: self.cache.settle(layer))

    @rule(layer=st.integers(0, LAYERS - 1), queries=st.integers(1, 4), bad=st.booleans())
    def update_importance(self, layer: int, queries: int, bad: bool) -> None:
        mass = torch.rand(len(self.model), HEADS, TOKENS, generator=self.random) ** 8
        if bad:
            mass[..., ::3] = torch.nan
        self.attempt(lambda: self.cache.update_importance(layer, mass, queries=queries))

    @rule(target=ids, request=ids)
    def fork(self, request: int):
        if len(self.model) == REQUESTS:
            with pytest.raises(RuntimeError, match="max_requests"):
                self.cache.fork(request)
            return multiple()
        twin = self.cache.fork(request)
        assert twin not in self.model
        self.model[twin] = copy.deepcopy(self.model[request])
        return twin

    @rule(request=consumes(ids))
    def free(self, request: int) -> None:
        self.attempt(lambda: self.cache.free_request(request))
        del self.model[request]

    @rule(request=ids, length=st.integers(0, TOKENS))
    def crop(self, request: int, length: int) -> None:
        if self.attempt(lambda: self.cache.crop(request, length)):
            for layer in self.model[request]:
                layer.crop(length)

    @rule(data=st.data())
    def reorder(self, data) -> None:
        given = sorted(self.model)
        if given:
            indices = [data.draw(st.integers(0, len(given) - 1)) for _ in given]
            self.attempt(lambda: self.cache.reorder(indices))
            self.model = {r: copy.deepcopy(self.model[given[i]]) for r, i in zip(given, indices, strict=True)}

    @rule()
    def compact(self) -> None:
        self.attempt(self.cache.compact)

    @rule(request=ids)
    def save(self, request: int) -> None:
        path = Path(self.folder.name) / f"{len(self.saved)}.safetensors"
        self.cache.save(path, request)
        self.saved.append((path, copy.deepcopy(self.model[request])))

    @rule(target=ids, data=st.data())
    def load(self, data):
        if not self.saved or len(self.model) == REQUESTS:
            return multiple()
        path, layers = self.saved[data.draw(st.integers(0, len(self.saved) - 1))]
        try:
            request = self.cache.load(path)
        except BudgetExceeded:
            return multiple()
        self.model[request] = copy.deepcopy(layers)
        return request

    @invariant()
    def look(self) -> None:
        if not hasattr(self, "cache"):
            return
        cache = self.cache
        cache.check()
        assert cache.requests == tuple(sorted(self.model))
        for request, layers in self.model.items():
            for index, layer in enumerate(layers):
                self.compare(request, index, layer)
        self.compare_together()

    def compare_together(self) -> None:
        """All requests read at once, in another order, are what each is alone; -1 and zeros where one is shorter."""
        requests = sorted(self.model, reverse=True)
        for index in range(LAYERS if requests else 0):
            together = gather(self.cache, index, requests)
            for i, request in enumerate(requests):
                for some, alone in zip(together, self.cache.gather(index, request), strict=True):
                    n = alone.shape[1]
                    torch.testing.assert_close(some[i][:, :n], alone, rtol=0, atol=0, equal_nan=True)
                    assert (some[i][:, n:] == (0 if some.is_floating_point() else -1)).all()

    def compare(self, request: int, index: int, layer: Layer) -> None:
        cache = self.cache
        assert cache.length(request, index) == layer.length
        k, v, positions = cache.gather(index, request)
        there = positions >= 0
        if not cache.policy.evict:
            assert torch.equal(positions, torch.arange(layer.length).expand(HEADS, -1))
        heads = torch.arange(HEADS).unsqueeze(1).expand_as(positions)[there]
        tiers = torch.full((HEADS, layer.length), -1)
        tiers[heads, positions[there]] = cache.tier_map(index, request)[there]
        kept = torch.arange(layer.length)
        kept = (kept < cache.sink_tokens) | (kept >= layer.length - cache.recent_tokens)
        plain = kept & (layer.tier == 0)  # after a crop recent tokens may be quantised
        assert (tiers[plain] == 0).all(), "a sink or a recent token was moved"
        if not cache.policy.per_head:
            assert (tiers == tiers[:1]).all()
        centre = cache.centre[request, index]
        assert centre.isfinite().all()
        layer.follow(cache, tiers, centre)
        for got, want in zip((k, v), layer.expected(self.dtype, centre), strict=True):
            want = want.to(self.dtype)[heads, positions[there]]
            torch.testing.assert_close(got[there], want, rtol=0, atol=0, equal_nan=True)
            lossy = tiers[heads, positions[there]] > 0
            assert got[there][lossy].isfinite().all(), "poison or NaN came out of a quantised tier"


Machine.TestCase.settings = settings(max_examples=40, stateful_step_count=20)
TestMachine = Machine.TestCase


@pytest.mark.slow
def test_long_random_runs_keep_the_invariants() -> None:
    from hypothesis.stateful import run_state_machine_as_test

    run_state_machine_as_test(Machine, settings=settings(max_examples=150, stateful_step_count=50))
