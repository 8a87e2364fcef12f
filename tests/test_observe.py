"""Importance on the captured path: layers take turns to add mass to the pages, in every backend as `update_importance`
would have done it."""

from __future__ import annotations

import pytest
import torch

from conftest import HAS_GPU
from decode_model import DEVICE, filled
from emulator import CUDA, EMULATED, on
from kvstrata import DecodePlan, TieredCache, decode_attention

every_backend = on("reference", "triton", EMULATED, CUDA)
HALF = torch.bfloat16


def ids(numbers: list[int]) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=DEVICE)


class Pair:
    """A cache whose decode calls observe, and one that is told the mass: by the rule, request by request."""

    def __init__(self, lengths: list[int], *, group: int = 3, q_len: int = 1, observe: int = 2, **options) -> None:
        self.ours, self.told = (filled(lengths, dtype=HALF, **options) for _ in range(2))
        self.heads, self.q_len, self.observe = group * self.ours.kv_heads, q_len, observe
        self.random = torch.Generator().manual_seed(1)
        self.turns, self.steps = -(-self.ours.layers // observe), 0
        self.plan = self.new_plan()

    def new_plan(self, **options) -> DecodePlan:
        return DecodePlan(self.ours, self.heads, q_len=self.q_len, observe=self.observe, **options)

    def grow(self, requests: list[int]) -> None:
        """The tokens of a step of these requests, in both caches alike."""
        for layer in range(self.ours.layers):
            rows = (2, self.q_len * len(requests), self.ours.kv_heads, self.ours.head_dim)
            k, v = torch.randn(rows, generator=self.random).to(HALF).to(DEVICE)
            for cache in (self.ours, self.told):
                cache.append(layer, k, v, requests, [self.q_len] * len(requests))

    def step(self, backend: str, live: list[int] | None = None, **options) -> list[torch.Tensor]:
        """One step of all layers; rows that are not live are padding. Returns the outputs."""
        rows = self.plan.requests
        live = [r for r in rows if self.ours.length(r)] if live is None else live
        q = torch.randn(len(rows), self.q_len, self.heads, self.ours.head_dim, generator=self.random).to(HALF)
        q = q.to(DEVICE)
        self.plan.update(ids([r if r in live else -1 for r in rows]))
        outputs = []
        for layer in range(self.ours.layers):
            result = decode_attention(q, self.ours, layer, requests=rows, plan=self.plan, backend=backend, **options)
            outputs.append(result)
            if layer // self.observe == self.steps % self.turns:
                self.tell(layer, q, live, **options)
        self.steps += 1
        return outputs

    def tell(self, layer: int, q: torch.Tensor, live: list[int], **options) -> None:
        for row, request in enumerate(self.plan.requests):
            length, reported = self.told.length(request, layer), int(self.told.reports.numbers[request, layer, 1])
            weight = min(length - reported, self.turns * self.q_len)
            if request not in live or weight <= 0:
                continue
            one = q[row : row + 1]
            mass = decode_attention(
                one, self.told, layer, requests=[request], return_mass=True, backend="reference", **options
            ).mass
            seen = length - torch.arange(length, device=DEVICE)
            mass = mass * seen.clamp(max=weight) / seen.clamp(max=self.q_len)
            self.told.update_importance(layer, mass, [request], queries=weight)

    def same(self) -> None:
        assert torch.equal(self.ours.reports.numbers, self.told.reports.numbers)
        for layer in range(self.ours.layers):
            for request in self.ours.requests:
                got, want = (cache.buckets.snapshot(layer, [request]) for cache in (self.ours, self.told))
                assert torch.equal(got.position, want.position)
                torch.testing.assert_close(got.importance, want.importance, rtol=3e-2, atol=2e-4)
        self.ours.check()


@every_backend
@pytest.mark.parametrize("importance", ["mean", "ema"])
def test_rotation_over_a_ragged_batch(backend: str, importance: str) -> None:
    """An empty request, one that pauses, layers that do not divide evenly; more steps than turns."""
    pair = Pair([70, 33, 0, 21], layers=3, tiers=("K4V4", "K2V2"), importance=importance)
    for step in range(3):
        live = [0, 1, 3] if step != 1 else [0, 3]
        pair.grow(live)
        pair.step(backend, live)
        pair.same()
    assert pair.ours.reports.numbers[0].tolist() == [[4, 73], [4, 73], [2, 72]]
    sums = pair.ours.buckets.snapshot(0, [0]).importance.sum()
    if importance == "mean":  # twice two queries of every head, the newest token seen by one of them
        assert 0.85 * 4 * pair.heads < float(sums) < 4 * pair.heads


@every_backend
@pytest.mark.parametrize("importance", ["mean", "ema"])
def test_several_column_blocks_observe_like_the_reference(backend: str, importance: str) -> None:
    """More columns than one pass takes: several queries, each of which sees fewer tokens than the last."""
    pair = Pair(
        [64, 20], group=16, q_len=3, observe=1, tiers=("K8V4", "K3V3"), dim=80, kv_heads=1, importance=importance
    )
    for _ in range(2):
        pair.grow([0, 1])
        pair.step(backend)
        pair.same()


@every_backend
@pytest.mark.parametrize("importance", ["mean", "ema"])
def test_hidden_tokens_get_no_mass(backend: str, importance: str) -> None:
    """A window that hides whole pages: they get no mass, and a moving average of it falls."""
    pair = Pair([128], observe=1, page_tokens=64, recent=0, plain=False, tiers=("K4V4",), importance=importance)
    options = dict(sliding_window=30, softcap=5.0, sinks=torch.linspace(-1, 2, pair.heads, device=DEVICE))
    pair.grow([0])
    pair.step(backend, **options)
    pair.same()


@every_backend
def test_the_first_live_owner_reports_for_a_shared_page(backend: str) -> None:
    pair = Pair([70, 0, 0], observe=1, tiers=("K4V4", "K2V2"))
    for cache in (pair.ours, pair.told):
        for request in (1, 2):
            cache.free_request(request)
            assert cache.fork(0) == request
    pair.plan = pair.new_plan(requests=[2, 0, 1])
    pair.grow([0, 1, 2])  # each has a plain page of its own now
    before = [pair.ours.buckets.snapshot(0, [r]) for r in range(3)]
    pair.step(backend, live=[0, 1])
    after = [pair.ours.buckets.snapshot(0, [r]) for r in range(3)]
    shared = torch.from_numpy(
        pair.ours.pool.owners(pair.ours.buckets.snapshot_with_handles(0, [0])[1].cpu().numpy()) > 1
    ).to(DEVICE)
    assert 0 < int(shared.sum()) < len(shared)
    for request in (1, 2):  # request 0 spoke for the pages they share
        assert torch.equal(after[request].importance[shared], after[0].importance[shared])
    assert torch.equal(after[2].importance[~shared], before[2].importance[~shared]), "padding gives nothing"
    assert not torch.equal(after[1].importance[~shared], before[1].importance[~shared])
    assert pair.ours.reports.numbers[:, 0].tolist() == [[1, 71], [1, 71], [0, 0]]
    # Request 0 gave all of its mass: to its own pages and to those it shares.
    assert float((after[0].importance - before[0].importance).sum()) == pytest.approx(pair.heads, rel=2e-2)
    pair.ours.check()


@every_backend
def test_a_step_without_a_new_token_changes_nothing(backend: str) -> None:
    """A warm-up step, or one with padding rows only."""
    pair = Pair([40, 17], observe=1, tiers=("K4V4", "K2V2"))
    pair.grow([0, 1])
    pair.step(backend, live=[])
    assert not pair.ours.reports.numbers.any()
    pair.step(backend)
    pair.same()
    once = pair.ours.buckets.snapshot(0, [0]).importance.clone()
    pair.step(backend)
    assert torch.equal(pair.ours.buckets.snapshot(0, [0]).importance, once)


@on("reference", "triton", EMULATED)
def test_a_plan_for_float32_has_no_lists(backend: str) -> None:
    """The CUDA kernels do not take float32: the step is observed by the other backends, on a GPU as well."""
    cache = filled([40, 17], dtype=torch.float32, tiers=("K4V4", "K2V2"))
    plan = DecodePlan(cache, 4, observe=1)
    plan.update()
    q = torch.randn(2, 1, 4, 64, device=DEVICE)
    decode_attention(q, cache, plan=plan, backend="reference" if backend == "cuda" else backend)
    assert cache.reports.numbers[:, 0].tolist() == [[1, 40], [1, 17]]
    assert float(cache.importance(0, 0).sum()) > 0
    assert plan._cuda is None


@every_backend
def test_outputs_do_not_change(backend: str) -> None:
    """With and without observing; lse and mass can be asked for as well."""
    pair = Pair([50, 9], observe=1, tiers=("K4V4", "K2V2"))
    silent, q = DecodePlan(pair.ours, pair.heads), torch.randn(2, 1, pair.heads, 64).to(HALF).to(DEVICE)
    silent.update()
    want = decode_attention(q, pair.ours, plan=silent, backend=backend, return_lse=True, return_mass=True)
    assert not pair.ours.reports.numbers.any()
    for options in (dict(), dict(return_lse=True, return_mass=True)):
        pair.grow([0, 1])
        pair.ours.crop(0, 50)
        pair.ours.crop(1, 9)
        pair.ours.reports.numbers.zero_()
        pair.plan.update()
        got = decode_attention(q, pair.ours, plan=pair.plan, backend=backend, **options)
        assert torch.equal(got.out if options else got, want.out)
        assert pair.ours.reports.numbers[:, 0].tolist() == [[1, 50], [1, 9]]
    torch.testing.assert_close(got.lse, want.lse)
    torch.testing.assert_close(got.mass, want.mass)


def test_importance_of_steps_that_settle() -> None:
    """Decode itself raises importance, without `update_importance`, and tokens keep it when they change tier."""
    cache = TieredCache(
        2, 1, 64, budget=0.25, tiers=("K8V8", "K2V2"), dtype=torch.float32, page_tokens=16, recent_tokens=16,
        sink_tokens=0, max_tokens=1024, settle_every=16,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    for layer in range(2):
        cache.append(layer, *torch.randn(2, 300, 1, 64, generator=generator))
    plan, favourites = DecodePlan(cache, 4, observe=1), torch.arange(304, 380, 4)
    for position in range(300, 420):
        cache.advance()
        for layer in range(2):
            k, v = torch.randn(2, 1, 1, 64, generator=generator)
            cache.write(layer, k + (position in favourites), v)
        plan.update()
        for layer in range(2):
            decode_attention(torch.full((1, 1, 4, 64), 0.4), cache, layer, plan=plan)
    cache.check()
    for layer in range(2):
        assert {1, 2} <= set(cache.tier_map(layer)[0, 300:400].tolist())
        importance = cache.importance(layer)[0]
        others = importance[300:400].median()
        assert (importance[favourites] > 3 * others).all()
        assert int(cache.reports.numbers[0, layer, 0]) in (120, 121)


def test_counters_follow_requests() -> None:
    pair = Pair([40, 17, 0], observe=1, tiers=("K4V4",))
    cache = pair.ours
    pair.grow([0, 1])
    pair.step("reference", live=[0, 1])
    cache.free_request(2)
    assert cache.fork(0) == 2
    assert cache.reports.numbers[2].tolist() == [[1, 41]]
    cache.crop(0, 12)
    assert cache.reports.numbers[0].tolist() == [[1, 12]]
    cache.crop(0, 0)
    assert not cache.reports.numbers[0].any()
    assert int(cache.reports.state[0]) == 1


def test_scratch_is_counted_and_small() -> None:
    cache = filled([40, 17], layers=3, dtype=HALF, tiers=("K4V4",))
    before = cache.memory().scratch
    plan = DecodePlan(cache, 6, observe=2)
    assert cache.memory().scratch - before == plan.nbytes == 4 * (2 + 3 * 3 + 2 * 6)


def test_plans_share_the_rotation_of_their_cache() -> None:
    """An engine with a graph for each batch size goes round once, not once per graph."""
    cache = filled([40, 17], layers=4, dtype=HALF, tiers=("K4V4",))
    plans = [DecodePlan(cache, 6, requests=rows, observe=1) for rows in ([0, 1], [0])]
    for step in range(5):
        plan = plans[step % 2]
        if not HAS_GPU:
            plan.update()
            assert plan.observation.weights[:, 0].nonzero().flatten().tolist() == ([step] if step < 4 else [])


def test_invalid_observe_arguments_raise() -> None:
    cache = filled([40, 17], dtype=HALF, tiers=("K4V4",))
    with pytest.raises(ValueError, match="observe: expected"):
        DecodePlan(cache, 6, observe=-1)
    with pytest.raises(ValueError, match="requests: expected each once"):
        DecodePlan(cache, 6, requests=[0, 0], observe=1)
    plan = DecodePlan(cache, 6, observe=9)
    assert plan.observation.layers == 1
    for made in (plan, DecodePlan(cache, 6)):
        with pytest.raises(TypeError, match=r"requests: expected an int32 tensor or None, got torch\.int64"):
            made.update(torch.zeros(2, dtype=torch.int64, device=DEVICE))
        with pytest.raises(ValueError, match=r"requests: expected \[2\]"):
            made.update(ids([0]))
    other = TieredCache(1, 2, 64, budget=None, policy="recency", dtype=HALF, device=DEVICE)
    assert DecodePlan(other, 4, observe=2).observation is None


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["cuda", "triton"])
def test_a_replayed_graph_rotates_over_layers(backend: str) -> None:
    """One graph, replayed over growing requests with padding in between, against eager steps of another cache."""
    lengths = [200, 90, 0]
    captured, eager = (filled(lengths, layers=4, dtype=HALF, tiers=("K4V4", "K2V2")) for _ in range(2))
    q = torch.randn(3, 1, 6, 64, device=DEVICE).to(HALF)
    live, plans = ids([-1, -1, -1]), [DecodePlan(cache, 6, observe=2) for cache in (captured, eager)]

    def step(cache: TieredCache, plan: DecodePlan) -> None:
        plan.update(live)
        for layer in range(4):
            decode_attention(q, cache, layer, plan=plan, backend=backend)

    for cache, plan in zip((captured, eager), plans, strict=True):
        step(cache, plan)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(captured, plans[0])
    for number in range(6):
        k, v = torch.randn(2, 2, 2, 64, device=DEVICE).to(HALF)
        for cache in (captured, eager):
            for layer in range(4):
                cache.append(layer, k, v, [0, 1], [1, 1])
        live.copy_(ids([0, -1 if number == 2 else 1, -1]))
        graph.replay()
        step(eager, plans[1])
        q.normal_()
    assert torch.equal(captured.reports.numbers, eager.reports.numbers)
    for layer in range(4):
        for request in (0, 1):
            one, other = (cache.buckets.snapshot(layer, [request]).importance for cache in (captured, eager))
            assert other.any()
            if backend == "cuda":
                assert torch.equal(one, other)
            else:  # splits follow the lengths at the capture
                torch.testing.assert_close(one, other)


@on(EMULATED, CUDA)
@pytest.mark.parametrize("seed", range(2))
def test_kernels_follow_the_reference_as_requests_come_and_go(backend: str, seed: int) -> None:
    """Forks, pauses, crops, ends and new prompts between steps: the same counters and importance after each."""
    random = torch.Generator().manual_seed(seed)

    def draw(n: int) -> int:
        return int(torch.randint(0, n, (1,), generator=random))

    caches = [
        filled([60, 30, 0, 0], layers=2, dtype=HALF, tiers=("K4V4", "K2V2"), importance=("mean", "ema")[seed])
        for _ in range(2)
    ]
    plans = [DecodePlan(cache, 4, observe=1) for cache in caches]
    for _ in range(8):
        lengths = [caches[0].length(request) for request in range(4)]
        operation, request, other = draw(4), draw(4), draw(4)
        for cache in caches:
            if operation == 0 and lengths[request] and request != other:
                cache.free_request(other)
                assert cache.fork(request) == other
            elif operation == 1 and lengths[request] > 20:
                cache.crop(request, lengths[request] - 3)
            elif operation == 2:
                cache.crop(request, 0)
        lengths = [caches[0].length(request) for request in range(4)]
        live = [r for r in range(4) if lengths[r] and draw(4)] or [draw(4)]
        for layer in range(2):
            k, v = torch.randn(2, len(live), 2, 64, generator=random).to(HALF).to(DEVICE)
            for cache in caches:
                cache.append(layer, k, v, live, [1] * len(live))
        q = torch.randn(4, 1, 4, 64, generator=random).to(HALF).to(DEVICE)
        rows = ids([r if r in live else -1 for r in range(4)])
        for cache, plan, its in zip(caches, plans, (backend, "reference"), strict=True):
            if its == "reference":
                plan.observation.set_live(rows)
                plan.observation.begin()
            else:
                plan.update(rows)
            for layer in range(2):
                decode_attention(q, cache, layer, requests=[0, 1, 2, 3], plan=plan, backend=its)
            cache.check()
        assert torch.equal(caches[0].reports.numbers, caches[1].reports.numbers)
        assert torch.equal(plans[0].observation.weights, plans[1].observation.weights)
        for layer in range(2):
            got, want = (cache.buckets.snapshot(layer, [0, 1, 2, 3]) for cache in caches)
            assert torch.equal(got.position, want.position)
            torch.testing.assert_close(got.importance, want.importance, rtol=3e-2, atol=2e-4)
