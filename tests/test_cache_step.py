"""A step in two parts: `advance` makes room, `write` brings rows; together they are an append, and a graph can hold the
second."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import kvstrata
from cache_model import fingerprint, limit, make, rows, same
from conftest import HAS_GPU
from kvstrata.cache import BudgetExceeded
from kvstrata.cache.move import append as append_op

DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
BACKENDS = ["triton"] + (["cuda"] if HAS_GPU else ["reference"])


def ids(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=DEVICE)


def started(lengths: dict[int, int], layers: int = 2, **options):
    """A cache on `DEVICE` whose requests have so many tokens in every layer."""
    cache = make(layers, max_requests=4, device=DEVICE, **options)
    for layer in range(layers):
        for request, n in lengths.items():
            k, v = rows(n, dtype=cache.dtype, seed=10 * layer + request)
            cache.append(layer, k.to(DEVICE), v.to(DEVICE), [request], [n])
    return cache


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "options", [dict(), dict(max_tokens=40000), dict(policy="recency"), dict(importance="ema")], ids=str
)
def test_a_step_equals_an_append(
    backend: str, dtype: torch.dtype, options: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages are bit-identical across a page edge, from strided rows, with padding rows in the batch."""
    from kvstrata.cache.ops import step

    run = append_op.write_rows
    monkeypatch.setattr(step, "write_rows", lambda written: run(written, backend))
    lengths = {0: 14, 1: 1, 3: 40}
    one, other = (started(lengths, dtype=dtype, budget=None, **options) for _ in range(2))
    for cache in (one, other):
        cache.buckets.ahead.near = -1  # pages are taken when they are needed, in the same order
    for number in range(4):
        wide = torch.randn(2, 5, 2, 100, generator=torch.Generator().manual_seed(number)).to(dtype).to(DEVICE)
        k, v = wide[..., :64]
        one.advance([3, 0])
        for layer in range(2):
            one.write(layer, k, v, ids(-1, 0, 4, 3, -9))  # 4 is none
            other.append(layer, k[[1, 3]], v[[1, 3]], [0, 3], [1, 1])
    one.check()
    assert one.length(0, 1) == 18
    assert one.length(1, 1) == 1
    assert same(fingerprint(one), fingerprint(other))


@pytest.mark.parametrize("policy", ["importance", "recency", "uniform"])
@pytest.mark.parametrize("budget", [0.3, 400_000])
def test_steps_settle_within_the_budget(policy: str, budget: float | int) -> None:
    """The newest tokens come back as they were written, all others within their format; `check` adds up the bytes."""
    cache = started({0: 150, 2: 90}, **limit(budget), policy=policy, recent_tokens=16, settle_every=8)
    written: dict[tuple[int, int], list[torch.Tensor]] = {}
    for number in range(60):
        cache.advance()
        for layer in range(2):
            k, v = (x.to(DEVICE) for x in rows(2, seed=1000 + 2 * number + layer))
            cache.write(layer, k.unsqueeze(1), v.unsqueeze(1), ids(0, 2))
            for i, request in enumerate((0, 2)):
                written.setdefault((layer, request), []).append(k[i])
        memory = cache.memory()
        assert memory.total <= memory.allowed
    cache.check()
    assert cache.tier_map(0, 2).max() > 0
    for (layer, request), k in written.items():
        got, _, positions = cache.gather(layer, request)
        assert torch.equal(positions, torch.arange(positions.shape[1], device=DEVICE).expand_as(positions))
        recent = torch.stack(k[-16:]).transpose(0, 1)
        assert torch.equal(got[:, -16:], recent)
        every = torch.stack(k).transpose(0, 1)
        assert (got[:, -60:] - every).norm() < 0.4 * every.norm()


def fits(operation) -> bool:
    try:
        operation()
    except BudgetExceeded:
        return False
    return True


def test_a_step_fits_where_an_append_does() -> None:
    """Down to the last assignment that there is; one that does not fit changes nothing."""
    raised = 0
    for amount in (190_000, 214_000):
        one, other = (
            make(2, budget_bytes=amount, recent_tokens=8, sink_tokens=0, settle_every=1, max_requests=2)
            for _ in range(2)
        )
        k, v = rows(2)
        for _ in range(200):
            before = fingerprint(one)
            one._use((0, 1))
            done = fits(one.advance)
            appended = [fits(partial(other.append, layer, k, v, [0, 1], [1, 1])) for layer in range(2)]
            assert all(appended) == done
            if not done:
                assert same(before[1:], fingerprint(one)[1:])
                raised += 1
                break
            for layer in range(2):
                one.write(layer, k, v)
        one.check()
    assert raised == 2


def test_forks_that_share_their_pages_need_no_plan_to_fit() -> None:
    """A layer that fits as it is, since its pages are shared, together with one that does not."""
    options = dict(budget_bytes=240_000, recent_tokens=16, sink_tokens=0, settle_every=8, max_requests=3)
    one, other = (make(2, **options) for _ in range(2))
    k, v = rows(20)
    for cache in (one, other):
        cache.append(0, k, v)
        cache.fork(0)
        cache.fork(0)
        for request in range(3):
            cache.append(1, k[:16], v[:16], [request])
    for layer in range(2):
        other.append(layer, k[:1], v[:1], [0])
    one.advance([0])
    for layer in range(2):
        one.write(layer, k[:1], v[:1])
        assert torch.equal(one.gather(layer, 0)[0][:, -1], k[0])
    one.check()
    assert one.memory().total <= one.memory().allowed


def test_a_step_is_undone_by_crop() -> None:
    cache = started({0: 16, 1: 3}, budget=None)
    before = [cache.gather(1, request) for request in range(2)]
    cache.advance()
    k, v = (x.to(DEVICE) for x in rows(2))
    for layer in range(2):
        cache.write(layer, k, v)
    for request, length in enumerate((16, 3)):
        cache.crop(request, length)
    cache.check()
    for request in range(2):
        assert all(torch.equal(a, b) for a, b in zip(before[request], cache.gather(1, request), strict=True))


def test_shared_pages_are_copied_before_a_fork_is_written() -> None:
    cache = started({0: 20}, budget=None)
    twin = cache.fork(0)
    k, v = (x.to(DEVICE) for x in rows(1))
    cache.advance([twin])
    for layer in range(2):
        cache.write(layer, k, v, ids(twin))
    cache.check()
    assert cache.length(0) == 20
    assert cache.length(twin) == 21
    assert torch.equal(cache.gather(1, twin)[0][:, -1], k[0])
    assert torch.equal(cache.gather(1, twin)[0][:, :20], cache.gather(1, 0)[0])


def test_rows_of_requests_without_tokens_are_not_written() -> None:
    cache = started({1: 5}, budget=None)
    before = fingerprint(cache)
    k, v = (x.to(DEVICE) for x in rows(4))
    cache.write(0, k[:1], v[:1])
    cache.write(0, k, v, ids(0, -1, 3, 99))
    cache.advance([])
    assert same(before, fingerprint(cache))
    fresh = cache.add_request()
    cache.advance([fresh])
    cache.write(0, k[:1], v[:1], ids(fresh))
    cache.write(1, k[:1], v[:1], ids(fresh))
    assert torch.equal(cache.gather(0, fresh)[1][:, 0], v[0])
    cache.check()


def test_bad_input_is_named_in_the_error() -> None:
    cache = started({0: 5, 1: 16}, budget=None, max_tokens=16)
    k, v = (x.to(DEVICE) for x in rows(2))
    before = fingerprint(cache)
    for call, message in [
        (lambda: cache.advance([2]), r"requests: expected one of \(0, 1\), got 2"),
        (lambda: cache.advance([0, 0]), "requests: expected each once"),
        (lambda: cache.advance(), "max_tokens: expected at least 17, for one more token, got 16"),
        (lambda: cache.write(2, k, v), "layer: expected"),
        (lambda: cache.write(0, k[:, :1], v), "k: expected"),
        (lambda: cache.write(0, k, v[:1]), "v: expected shape"),
        (lambda: cache.write(0, k[None], v[None]), "k: expected one token of each request, got"),
        (lambda: cache.write(0, *2 * [torch.cat([k] * 3)]), r"k: expected at most 4 rows \(max_requests\), got 6"),
        (lambda: cache.write(0, k, v, ids(0)), r"requests: expected \[2\], one for each row of k, got \(1,\)"),
        (lambda: cache.write(0, k, v, ids(0, 1).long()), "requests: expected int32 on .*, got torch.int64"),
        (lambda: cache.write(0, k, v, [0, 1]), "requests: expected a tensor, got list"),
        (lambda: cache.write(0, k.half(), v.half()), "k: expected torch.float32, got torch.float16"),
    ]:  # fmt: skip
        with pytest.raises((ValueError, TypeError), match=message):
            call()
    assert same(before, fingerprint(cache))


@pytest.mark.gpu
def test_a_captured_step_follows_the_cache() -> None:
    """One graph for all steps: pages fill, layers settle, a request waits, another comes."""
    options = dict(dtype=torch.bfloat16, budget=0.3, recent_tokens=16, settle_every=8)
    cache, eager = (started({0: 150, 2: 90}, **options) for _ in range(2))
    assert [both.add_request() for both in (cache, eager) for _ in range(2)] == [1, 3, 1, 3]
    everyone = range(4)
    plan = kvstrata.DecodePlan(cache, heads=4)
    q = torch.zeros(2, 4, 1, 4, 64, dtype=torch.bfloat16, device=DEVICE)
    k, v = torch.zeros(2, 2, 4, 2, 64, dtype=torch.bfloat16, device=DEVICE)
    rows_of = ids(0, 1, 2, 3)

    def step() -> list[torch.Tensor]:
        plan.update()
        out = []
        for layer in range(2):
            cache.write(layer, k[layer], v[layer], rows_of)
            out.append(kvstrata.decode_attention(q[layer], cache, layer, plan=plan))
        return out

    cache.advance([0, 2])
    rows_of.copy_(ids(0, -1, 2, -1))
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    eager.advance([0, 2])
    for number in range(50):
        active = [0, 2]
        if number:
            active = [r for r in range(3) if (r != 1 or number > 20) and (r != 2 or number % 3)]
            cache.advance(active)
            eager.advance(active)
        fresh = torch.randn(4, 2, 4, 2, 64, generator=torch.Generator().manual_seed(number)).bfloat16().to(DEVICE)
        q.copy_(fresh.view(2, 2, 2, 4, 2, 64)[:, 0].permute(0, 2, 1, 3, 4).reshape(2, 4, 1, 4, 64))
        k.copy_(fresh[2])
        v.copy_(fresh[3])
        rows_of.copy_(ids(*(r if r in active else -1 for r in everyone)))
        graph.replay()
        for layer in range(2):
            eager.write(layer, k[layer], v[layer], rows_of)
            want = kvstrata.decode_attention(q[layer], eager, layer, backend="reference")
            torch.testing.assert_close(out[layer], want, rtol=2e-2, atol=2e-2)
            assert out[layer].isfinite().all()
    cache.check()
    for request in cache.requests:
        assert all(torch.equal(a, b) for a, b in zip(cache.gather(1, request), eager.gather(1, request), strict=True))
    assert cache.tier_map(0, 0).max() > 0
