"""K's centre: from which tokens, what RoPE makes of it, that it stays, and what cannot shift it."""

from __future__ import annotations

import copy
import math

import pytest
import torch

from cache_model import by_head, make, rows
from kvstrata.cache.policy import centre as centre_module
from kvstrata.cache.policy import scopes


def test_centre_is_the_mean_of_the_first_tokens_and_stays() -> None:
    for tokens in (40, 300, 1024, 1100):
        cache = make(max_tokens=2048, recent_tokens=16)
        k, v = rows(tokens)
        k += 3
        if tokens == 40:
            cache.append(0, k[:20], v[:20])  # these are stored when the others come
            assert not cache.centre.any()
            cache.append(0, k[20:], v[20:])
        else:
            cache.append(0, k, v)
        centre = cache.centre[0, 0].clone()
        torch.testing.assert_close(centre, k[:1024].mean(0))
        cache.append(0, k[:300] + 50, v[:300])
        assert torch.equal(centre, cache.centre[0, 0])


def turned(x: torch.Tensor, angle: torch.Tensor, start: int, neighbours: bool) -> torch.Tensor:
    """Rows ``[n, heads, D]`` as RoPE turns them at the positions from ``start`` on."""
    n = len(angle)
    one, two = (slice(0, 2 * n, 2), slice(1, 2 * n, 2)) if neighbours else (slice(n), slice(n, 2 * n))
    by = (torch.arange(start, start + len(x)).double()[:, None] * angle).unsqueeze(1)
    out = x.clone()
    out[..., one] = (x[..., one] * by.cos() - x[..., two] * by.sin()).float()
    out[..., two] = (x[..., two] * by.cos() + x[..., one] * by.sin()).float()
    return out


@pytest.mark.parametrize("neighbours", [False, True])
@pytest.mark.parametrize(("tokens", "most", "horizon"), [(90, 4096, 2048), (90, 500, 500), (1100, 4096, 2200)])
def test_a_centre_anticipates_the_rotation_of_rope(neighbours: bool, tokens: int, most: int, horizon: int) -> None:
    """The mean of what all positions up to the horizon have in common, whatever the pairs, a shift of all positions,
    and channels that are not turned."""
    angle = 1e4 ** -(torch.arange(24).double() / 24)
    angle[-1] = 0.0
    common = 4 * torch.randn(1, 2, 64, generator=torch.Generator().manual_seed(3))
    k = turned(common.expand(horizon, -1, -1), angle, 7, neighbours)
    cache = make(max_tokens=most, recent_tokens=16, rope=angle)
    cache.append(0, k[:tokens], k[:tokens])
    torch.testing.assert_close(cache.centre[0, 0], k.mean(0), rtol=1e-3, atol=1e-3)
    # Of a few noisy rows of a long text it is nearer to the mean of all than their own mean is.
    k += torch.randn(k.shape, generator=torch.Generator().manual_seed(4))
    errors = []
    for rope in (angle.tolist(), None):
        cache = make(max_tokens=most, recent_tokens=16, rope=rope)
        cache.append(0, k[:tokens], k[:tokens])
        errors.append(float((cache.centre[0, 0] - k.mean(0)).norm()))
    assert errors[0] < (0.5 if tokens == 90 else 1.0) * errors[1]


def test_rows_that_rope_does_not_explain_have_their_mean() -> None:
    k, v = rows(300)
    k += 3  # not turned
    cache = make(recent_tokens=16, rope=1e4 ** -(torch.arange(32) / 32))
    cache.append(0, k, v)
    torch.testing.assert_close(cache.centre[0, 0], k.mean(0))


def test_non_finite_values_do_not_shift_a_rotated_centre() -> None:
    """A token of them, and a channel of them: other channels have the centre that they would have."""
    angle = 1e4 ** -(torch.arange(32).double() / 32)
    common = 4 * torch.randn(1, 2, 64, generator=torch.Generator().manual_seed(3))
    k = turned(common.expand(300, -1, -1), angle, 0, False) + rows(300)[0]
    centres = []
    for spoilt in (False, True):
        if spoilt:
            k[3, 0, 5], k[4, 1], k[:, :, 50] = math.nan, math.inf, math.nan
        cache = make(recent_tokens=16, rope=angle)
        cache.append(0, k, rows(300)[1])
        centres.append(cache.centre[0, 0])
    assert centres[1].isfinite().all()
    assert not centres[1][:, 50].any()
    others = [i for i in range(64) if i not in (18, 50)]  # 18 is the other one of its pair
    torch.testing.assert_close(centres[1][:, others], centres[0][:, others], rtol=0.05, atol=0.1)


def test_the_heads_of_a_layer_use_one_pairing() -> None:
    """Heads share one RoPE pairing: a head of pure noise gets no mean of fast channels either."""
    angle = 1e4 ** -(torch.arange(32).double() / 32)
    common = torch.stack([torch.full((64,), 5.0), torch.zeros(64)]).unsqueeze(0)
    k = turned(common.expand(40, -1, -1), angle, 0, False) + rows(40)[0]
    cache = make(recent_tokens=16, rope=angle)
    cache.append(0, k, rows(40)[1])
    fast = [*range(8), *range(32, 40)]
    assert k.mean(0)[1, fast].norm() > 0.3
    assert cache.centre[0, 0, 1, fast].norm() < 0.05


@pytest.mark.parametrize("rope", [None, (1.0, 0.1)])
def test_centres_of_many_requests_in_parts(rope: tuple[float, ...] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit what each has alone, whatever fits into one sum."""
    k, v = rows(5 * 90)
    whole, parts = (make(max_requests=5, recent_tokens=16, rope=rope) for _ in range(2))
    whole.append(0, k, v, seq_lens=[90] * 5)
    monkeypatch.setattr(centre_module, "TABLE", 2 * whole.kv_heads * centre_module.CENTRE_TOKENS * whole.head_dim)
    parts.append(0, k, v, seq_lens=[90] * 5)
    assert torch.equal(whole.centre, parts.centre)
    for request in range(5):
        alone, mine = make(max_requests=5, recent_tokens=16, rope=rope), slice(90 * request, 90 * (request + 1))
        alone.append(0, k[mine], v[mine])
        assert torch.equal(alone.centre[0], whole.centre[request])


def test_centres_of_several_layers() -> None:
    """Each is the mean of its own tokens; one that is there stays."""
    cache = make(layers=3, max_requests=2, budget=None)
    given = {}
    for layer in range(3):
        for request in range(2):
            given[request, layer] = rows(50 + 10 * request, seed=10 * layer + request)[0] + layer - 5 * request
            cache.append(layer, given[request, layer], given[request, layer], [request], [50 + 10 * request])
    every = [(layer, [request]) for layer in range(3) for request in range(2)]
    for places in (every[2:3], every):
        tokens = cache.buckets.snapshots(*scopes.pairs(places))
        with cache._operation() as change:
            scopes.move_tokens(cache, change, places, tokens, torch.where(tokens.position < 40, 1, 0))
        if places != every:
            first = cache.centre.clone()
            assert first[0, 1].all()
            assert int(first.any(-1).sum()) == cache.kv_heads
    assert torch.equal(cache.centre[0, 1], first[0, 1])
    for (request, layer), k in given.items():
        torch.testing.assert_close(cache.centre[request, layer], k.mean(0))


def test_centres_are_computed_only_where_missing() -> None:
    """A request that has one settles together with one that has none, stored and new tokens in both."""
    cache = make(max_requests=3, recent_tokens=16)
    k, v = rows(900)
    cache.append(0, k[:300], v[:300], [1])
    cache.append(0, k[300:320], v[300:320], [2])
    before = cache.centre.clone()
    assert before[1].any()
    assert not before[[0, 2]].any()
    cache.append(0, k[320:] + 2, v[320:], [2, 1, 0], [200, 300, 80])
    assert torch.equal(cache.centre[1], before[1])
    torch.testing.assert_close(cache.centre[2, 0], torch.cat([k[300:320], k[320:520] + 2]).mean(0))
    torch.testing.assert_close(cache.centre[0, 0], k[820:].mean(0) + 2)
    cache.check()


def test_nan_among_the_first_tokens_leaves_the_centre_finite() -> None:
    k, v = rows(400)
    k[3, 0, 5], k[4, 1] = math.nan, math.inf
    cache = make(sink_tokens=0)
    cache.append(0, k, v)
    assert cache.centre.isfinite().all()
    others = torch.tensor([i not in (3, 4) for i in range(400)])
    got = cache.gather(0)[0][:, others]
    assert (got - by_head(k)[:, others]).square().mean() < 0.3


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("rope", [None, 1e4 ** -(torch.arange(32) / 32)], ids=["plain", "rope"])
def test_a_row_far_above_the_others_does_not_shift_the_centre(
    rope: torch.Tensor | None, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is left out as if it were no number, in its head only; the error of the others stays that of their format."""
    if not compiled:
        monkeypatch.setattr(centre_module, "_numba", lambda device: None)
    k, v = rows(500)
    caches = []
    for value in (math.nan, 1000.0):
        k[7, 0] = value
        caches.append(make(recent_tokens=16, sink_tokens=0, tiers=["K4V4"], budget=0.3, rope=rope))
        caches[-1].append(0, k, v)
    assert caches[1].centre.any()
    assert torch.equal(caches[0].centre, caches[1].centre)
    got, _, positions = caches[1].gather(0)
    want = by_head(k)
    error = got.float() - want.gather(1, positions.long().unsqueeze(-1).expand_as(got))
    error[0, positions[0] == 7] = 0.0
    assert error.square().mean() < 0.12**2


@pytest.mark.parametrize("compiled", [False, True])
def test_rows_within_the_range_of_the_others_take_part(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sinks of some tens of times the others, and rows among many zeros."""
    if not compiled:
        monkeypatch.setattr(centre_module, "_numba", lambda device: None)
    k, v = rows(300)
    sinks, zeros = k.clone(), k.clone()
    sinks[:4] *= 25 * k.abs().amax(-1).median() / k[:4].abs().amax(-1, keepdim=True)
    zeros[:200] = 0.0
    for given in (sinks, zeros):
        cache = make(recent_tokens=16)
        cache.append(0, given, v)
        torch.testing.assert_close(cache.centre[0, 0], given.mean(0))


@pytest.mark.parametrize("rope", [(), (1.0, 0.1, 0.01)])
def test_a_mask_per_token_gives_the_centre_of_a_mask_per_value(rope: tuple[float, ...]) -> None:
    """Bit for bit, where all values take part; where one does not, only its channels and their pairs differ."""
    k = torch.randn(60, 8, generator=torch.Generator().manual_seed(0)) + 2
    there = torch.zeros(60, dtype=torch.int64), torch.arange(60)
    positions = torch.tensor([2048])

    def centre(k: torch.Tensor, wide: bool) -> torch.Tensor:
        table, takes_part = (x.unsqueeze(0) for x in centre_module._table(k, there, 1))
        assert takes_part.shape[-1] == (1 if k.isfinite().all() else 8)
        return centre_module.centre_of(table, takes_part.expand_as(table) if wide else takes_part, rope, positions)

    assert torch.equal(centre(k, False), centre(k, True))
    broken = k.clone()
    broken[7, 7] = torch.inf
    same = centre(broken, True)[..., 6] == centre(k, True)[..., 6]
    assert same.all()


@pytest.mark.skipif(centre_module._numba("cpu") is None, reason="numba is not there")
@pytest.mark.parametrize(("dim", "pairs", "rows_given"), [(64, 32, 700), (64, 24, 3), (32, 16, 3 * 1024), (48, 1, 33)])
@pytest.mark.parametrize("broken", [False, True])
@pytest.mark.parametrize("far", [False, True])
@pytest.mark.parametrize("interleaved", [None, False, True])
def test_compiled_loops_give_the_centre_of_torch(
    dim: int,
    pairs: int,
    rows_given: int,
    broken: bool,
    far: bool,
    interleaved: bool | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """To the last bit, whatever positions are missing and with values that take no part."""
    generator = torch.Generator().manual_seed(dim + pairs)
    k = 3 * torch.randn(rows_given, dim, generator=generator) + 1
    if far:
        k[torch.rand(rows_given, generator=generator) < 0.1] *= 100.0
    if broken:
        k[torch.rand(k.shape, generator=generator) < 0.05] = math.nan
        k[0, 0], k[1, 1], k[2, :2] = math.inf, -1e30, -math.inf
    place = torch.randperm(3 * centre_module.CENTRE_TOKENS, generator=generator)[:rows_given]
    slots = place // centre_module.CENTRE_TOKENS, place % centre_module.CENTRE_TOKENS
    rope = [1e4 ** -(i / pairs) for i in range(pairs)]
    arguments = (k, slots, (1, 3), (rope, interleaved), torch.tensor([2048]))
    found = centre_module._of_rows(*arguments)
    monkeypatch.setattr(centre_module, "_numba", lambda device: None)
    want = centre_module._of_rows(*arguments)
    assert want.any()
    assert torch.equal(found, want)


@pytest.mark.parametrize("interleaved", [False, True])
def test_a_known_pairing_does_not_mix_channels_of_other_sizes(interleaved: bool) -> None:
    """Pairs of K without a common part, of sizes from 1/30 to 30: the other pairing has longer means by chance."""
    rope = [1e4 ** -(i / 16) for i in range(16)]
    largest = dict.fromkeys((None, interleaved), 0.0)
    for seed in range(40):
        generator = torch.Generator().manual_seed(seed)
        size = 30.0 ** (torch.rand(16, generator=generator) * 2 - 1)
        size = size.repeat_interleave(2) if interleaved else size.repeat(2)
        k = size * torch.randn(40, 1, 32, generator=generator)
        for known in largest:
            cache = make(heads=1, dim=32, rope=rope, interleaved=known, recent_tokens=4)
            cache.append(0, k, k)
            centre = cache.centre[0, 0] / size
            largest[known] = max(largest[known], float(centre.square().mean().sqrt()))
    assert largest[interleaved] < 0.5
    assert largest[None] > 2


def test_the_other_pairing_is_never_taken() -> None:
    """Even where it has the longer means; a copy and an argument say the same."""
    rope, generator = [1e4 ** -(i / 16) for i in range(16)], torch.Generator().manual_seed(0)
    k = 0.1 * torch.randn(40, 2, 32, generator=generator)
    turn = torch.arange(40.0)[:, None, None] * torch.tensor(rope)
    k[..., ::2] += turn.cos()  # a common part, in pairs of neighbours
    k[..., 1::2] += turn.sin()
    halves, neighbours, unknown = (
        make(dim=32, rope=rope, interleaved=known, recent_tokens=16) for known in (False, True, None)
    )
    later = make(dim=32, rope=rope, recent_tokens=16)
    later.set_interleaved(True)
    later = copy.deepcopy(later)
    for cache in (halves, neighbours, unknown, later):
        cache.append(0, k, k)
    assert not torch.equal(halves.centre, neighbours.centre)
    assert torch.equal(later.centre, neighbours.centre)
    assert torch.equal(unknown.centre, neighbours.centre)
    for given in ("no", 1, 0.0, torch.tensor(True)):
        with pytest.raises(ValueError, match="interleaved: expected True, False or None, got "):
            make(interleaved=given)
