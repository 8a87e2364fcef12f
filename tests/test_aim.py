"""The direction of K's error in a cache: set with the balance, kept with the request, and estimated from prompts."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from conftest import HAS_GPU
from hf_model import FAMILIES
from kvstrata.cache import TieredCache
from kvstrata.hf import StrataCache, balance
from kvstrata.hf.calibrate import calibrate
from kvstrata.quant.calibration import Calibration, LayerCalibration
from kvstrata.quant.reference import direction_of
from test_model_rows import ROWS, balance_of
from test_settle_cuda import device, pair, same  # noqa: F401

DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
HEADS, DIM = 2, 64
ONES = torch.ones(HEADS, DIM, device=DEVICE)
QUERY = torch.randn(HEADS, DIM, generator=torch.Generator().manual_seed(1)).to(DEVICE)


def build(**options: Any) -> TieredCache:
    options = dict(
        budget=0.3, recent_tokens=16, page_tokens=16, max_requests=3, max_tokens=1024, settle_every=16,
        dtype=torch.bfloat16, device=DEVICE, balance=True, debug=True,
    ) | options  # fmt: skip
    return TieredCache(2, HEADS, DIM, **options)


def rows(tokens: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(2, tokens, HEADS, DIM, generator=torch.Generator().manual_seed(seed)).bfloat16().to(DEVICE)


def along(cache: TieredCache, k: torch.Tensor, query: torch.Tensor = QUERY) -> tuple[float, float]:
    """Mean square of the error of K in layer 1 along a unit query, and of all of it."""
    stored, _, position = cache.gather(1, 0)
    error = stored.float() - k.float().transpose(0, 1)
    error = torch.stack([head[at >= 4][:-16] for head, at in zip(error, position, strict=True)])
    unit = query / query.norm(dim=-1, keepdim=True)
    return float(torch.einsum("hnd,hd->hn", error, unit).square().mean()), float(error.square().sum(-1).mean())


def filled(query: torch.Tensor | None, by: torch.Tensor = ONES, **options: Any) -> tuple[TieredCache, torch.Tensor]:
    cache = build(**options)
    cache.set_balance(1, by, [0], query=query)
    k, v = rows(400, 0)
    for layer in (0, 1):
        cache.append(layer, k, v, requests=[0], seq_lens=[400])
    return cache, k


@pytest.mark.parametrize("tiers", [["K4V4"], ["K3V2"], ["K2V2"], ["K4V3", "K3V2", "K2V2"]])
def test_the_error_has_hardly_a_component_along_the_query(tiers: list[str]) -> None:
    cache, k = filled(QUERY, tiers=tiers)
    without, _ = filled(None, tiers=tiers)
    (aimed, whole), (plain, whole_plain) = along(cache, k), along(without, k)
    assert aimed < 0.15 * plain
    assert whole < 1.04 * whole_plain
    assert torch.equal(cache.gather(1, 0)[1], without.gather(1, 0)[1]), "V has no direction"
    cache.check()


def test_the_query_is_in_the_space_of_the_model() -> None:
    """K is divided by the balance, and queries are multiplied by it."""
    by = torch.randint(-3, 4, (HEADS, DIM), generator=torch.Generator().manual_seed(2)).float().exp2().to(DEVICE)
    cache, k = filled(QUERY, by)
    without, _ = filled(None, by)
    assert along(cache, k)[0] < 0.15 * along(without, k)[0]


def test_a_query_of_zeros_changes_no_byte() -> None:
    cache, without = filled(torch.zeros_like(QUERY))[0], filled(None)[0]
    for one, other in zip(cache.gather(1, 0), without.gather(1, 0), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("moved", ["fork", "file", "clone"])
def test_the_direction_moves_with_its_request(moved: str, tmp_path) -> None:
    cache, _ = filled(QUERY)
    want = cache.direction[0].clone()
    assert want[1].any()
    assert not want[0].any()
    if moved == "fork":
        request = cache.fork(0)
    elif moved == "file":
        cache.save(tmp_path / "request", 0)
        cache = build()
        request = cache.load(tmp_path / "request")
    else:
        cache, request = copy.deepcopy(cache), 0
    assert torch.equal(cache.direction[request], want)
    cache.check()
    cache.crop(request, 0)
    assert not cache.direction[request].any()


@pytest.mark.parametrize("size", [1e-43, 1e-38, 1.0, 1e38])
def test_a_direction_does_not_depend_on_the_length_of_the_query(size: float) -> None:
    want = direction_of(QUERY, True)
    got = direction_of((QUERY.double() * size).float(), True)
    assert (got.int() - want.int()).abs().max() <= (31 if size < 1e-40 else 1)  # few bits are left of the smallest
    assert got.abs().amax(-1).eq(31).all()


def test_8_bit_k_takes_the_nearest_codes_and_the_balance_of_all_energies(monkeypatch: pytest.MonkeyPatch) -> None:
    cache, without = (
        filled(QUERY, tiers=["K8V8", "K8V4"], budget=0.6)[0],
        filled(None, tiers=["K8V8", "K8V4"], budget=0.6)[0],
    )
    assert not cache.direction.any()
    for one, other in zip(cache.gather(1, 0), without.gather(1, 0), strict=True):
        assert torch.equal(one, other)
    given = Calibration([LayerCalibration(ONES.cpu(), None, QUERY.cpu(), 2 * ONES.cpu())] * 2)
    cache = build(calibration=given, tiers=["K8V8"], budget=0.7)
    assert not cache.direction.any()
    assert not cache.balance.any(), "exponents of the balance for the nearest codes"
    model, from_prompt, seen = model_of("qwen2"), balance.from_prompt, []

    def spy(*given: Any, aims: bool = False) -> Any:
        seen.append(given[6] if len(given) > 6 else aims)
        return from_prompt(*given, aims=aims) if len(given) < 7 else from_prompt(*given)

    monkeypatch.setattr(balance, "from_prompt", spy)
    ids = torch.randint(3, 128, (1, 80), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    for tiers in (["K8V8"], ["K4V4"]):
        options = dict(page_tokens=16, recent_tokens=12, settle_every=16, max_tokens=256, tiers=tiers)
        own = StrataCache(model.config, budget=0.7, **options)
        with torch.no_grad():
            model(ids, past_key_values=own, use_cache=True)
        assert own.tiered.direction.any() == (tiers == ["K4V4"])
    assert seen
    assert seen == sorted(seen), "K8V8 first"
    assert not seen[0]
    assert seen[-1]


def test_bytes_of_directions_count() -> None:
    with_balance, without = build(balance=True).memory(), build(balance=False).memory()
    assert with_balance.kinds["direction"] == 3 * 2 * HEADS * DIM
    assert without.kinds["direction"] == 0


@pytest.mark.parametrize(
    ("query", "error", "says"),
    [
        (QUERY[0], ValueError, "query: expected shape"),
        (QUERY.double(), TypeError, "query: expected a float32"),
        ([1.0], TypeError, "query: expected a float32"),
    ],
)
def test_a_wrong_query_is_named(query: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        build().set_balance(1, ONES, [0], query=query)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_query_that_is_not_finite_has_no_direction(bad: float) -> None:
    query = QUERY.clone()
    query[0, 3] = bad
    cache, _ = filled(query)
    assert not cache.direction[0, 1, 0].any()
    assert cache.direction[0, 1, 1].any()


@pytest.mark.parametrize("with_mass", [False, True])
def test_kernels_settle_along_the_direction(device: str, with_mass: bool) -> None:  # noqa: F811
    """Prompts of ragged requests and steps after them, each request and layer with a direction of its own."""
    ours, wanted = pair(device, tiers=["K8V4", "K4V3", "K3V2", "K2V2"], balance=True)
    generator, lengths = torch.Generator().manual_seed(3), [150, 40, 90]
    queries, steps = torch.randn(2, 3, 2, 32, generator=generator), torch.randn(2, 20, 2, 3, 2, 32, generator=generator)
    mass = torch.rand(3, 2, 150, generator=generator) ** 4
    for layer in (0, 1):
        k, v = torch.randn(2, sum(lengths), 2, 32, generator=generator)
        for cache in (ours, wanted):
            query, here = queries[layer].to(cache.device), [x.to(cache.device) for x in (k, v, mass)]
            cache.set_balance(layer, torch.ones_like(query), [0, 1, 2], query=query)
            given = dict(mass=here[2], queries=150) if with_mass else {}
            cache.append(layer, *here[:2], [0, 1, 2], lengths, **given)
            for one, other in steps[layer].to(cache.device):
                cache.append(layer, one, other, [0, 1, 2], [1, 1, 1])
    same(ours, wanted)
    for layer in (0, 1):
        for request in range(3):
            (k, _, _), (other, _, _) = ours.gather(layer, request), wanted.gather(layer, request)
            torch.testing.assert_close(k.cpu(), other, rtol=0, atol=1e-5)


def test_a_calibration_gives_every_request_its_direction() -> None:
    own = LayerCalibration(ONES.cpu(), None, QUERY.cpu(), 2 * ONES.cpu())
    cache = build(calibration=Calibration([own, LayerCalibration()]))
    assert torch.equal(cache.direction[2, 0], direction_of(2 * QUERY, True))
    assert not cache.direction[:, 1].any()
    assert (cache.balance[:, 0] == 1).all(), "tiers take the balance of rows that are aimed"


def test_calibrations_keep_queries_in_their_file(tmp_path) -> None:
    own = LayerCalibration(ONES.cpu(), None, QUERY.cpu(), 2 * ONES.cpu())
    given = Calibration([own, LayerCalibration()])
    given.save(tmp_path / "file")
    read = Calibration.load(tmp_path / "file")
    assert read.fingerprint == given.fingerprint
    assert torch.equal(read.layers[0].query, QUERY.cpu())
    assert read.layers[1].query is None
    with pytest.raises(ValueError, match="query: expected shape"):
        LayerCalibration(ONES.cpu(), None, QUERY[:1].cpu())
    with pytest.raises(ValueError, match="query: expected finite"):
        LayerCalibration(ONES.cpu(), None, torch.full((HEADS, DIM), torch.nan))


def model_of(name: str) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(FAMILIES[name]()).eval().to(DEVICE)


def test_prompts_and_calibrations_have_directions() -> None:
    model = model_of("qwen2")
    ids = torch.randint(3, 128, (2, 60), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    mask = torch.ones_like(ids)
    mask[1, :25] = 0
    position = (mask.cumsum(1) - 1).clamp(min=0)
    cache = StrataCache(model.config, budget=0.3, page_tokens=16, recent_tokens=12, max_tokens=256)
    with torch.no_grad():
        model(ids, attention_mask=mask, position_ids=position, past_key_values=cache, use_cache=True)
    direction = cache.tiered.direction
    assert direction.flatten(2).any(-1).all(), "in every row and layer"
    assert not torch.equal(direction[0], direction[1])
    alone = StrataCache(model.config, budget=0.3, page_tokens=16, recent_tokens=12, max_tokens=256)
    with torch.no_grad():
        model(ids[1:, 25:], past_key_values=alone, use_cache=True)
    assert (alone.tiered.direction[0] - direction[1]).abs().max() <= 1, "as without the padding"
    calibration = calibrate(model, ids[:1])
    assert all(layer.query is not None and layer.aimed is not None for layer in calibration.layers)


def test_short_prompts_have_none() -> None:
    model = model_of("llama")
    cache = StrataCache(model.config, budget=0.3, max_tokens=256)
    with torch.no_grad():
        model(torch.tensor([[5, 6, 7]], device=DEVICE), past_key_values=cache, use_cache=True)
    assert not cache.tiered.direction.any()


@pytest.mark.parametrize("interleaved", [False, True])
def test_the_mean_query_is_that_of_the_next_positions(interleaved: bool) -> None:
    """Queries with a common part that RoPE rotates: the mean of those at the positions after the prompt."""
    chance, dim, n = torch.Generator().manual_seed(0), 16, 200
    rope = [0.5, 0.01, 1e-3, 1e-5, 1e-6, 1e-7]
    common = torch.randn(dim, generator=chance)

    def turned(x: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        angle = position.double().unsqueeze(1) * torch.tensor(rope, dtype=torch.float64)
        cos, sin, x = angle.cos().float(), angle.sin().float(), x.clone()
        one, two = (slice(0, 12, 2), slice(1, 12, 2)) if interleaved else (slice(6), slice(6, 12))
        a, b = x[..., one].clone(), x[..., two].clone()
        x[..., one], x[..., two] = a * cos - b * sin, b * cos + a * sin
        return x

    q = turned(common + 0.01 * torch.randn(1, 4, n, dim, generator=chance), torch.arange(n))
    k = turned(torch.randn(1, 2, n, dim, generator=chance), torch.arange(n))
    real = torch.ones(1, n, dtype=torch.bool)
    sums = balance.squares(q, k, real, rope, interleaved)
    want = turned(common.expand(balance.NEXT, -1), torch.arange(n, n + balance.NEXT)).mean(0)
    torch.testing.assert_close(sums.query, want.expand(1, 2, dim), rtol=0, atol=0.02)
    first = turned(common.expand(balance.AHEAD, -1), torch.arange(balance.AHEAD)).mean(0)
    sums = balance.squares(q, k, real, rope, interleaved, follows=False)
    torch.testing.assert_close(sums.query, first.expand(1, 2, dim), rtol=0, atol=0.02)
    assert (sums.q_rest <= sums.q * 1.01).all()
    slow = slice(8, 12) if interleaved else [4, 5, 10, 11]
    rest, whole = (x[..., slow].sum(-1) for x in (sums.q_rest, sums.q))
    assert (rest < 0.05 * whole).all(), "what queries have in common is left out"


@pytest.mark.parametrize("layer", [0, 8, 12])
@pytest.mark.parametrize("name", ["K4V4", "K3V2", "K2V2"])
def test_scores_of_a_real_model_have_less_noise(layer: int, name: str) -> None:
    """Qwen2.5-Coder-0.5B: half of the queries give the direction, the scores are those of the others."""
    q, k, v = (ROWS[f"layer{layer}.{x}"] for x in "qkv")
    by = balance_of(q, k)
    noise = []
    for mean in (None, q[:, ::2].float().mean((0, 1)).unsqueeze(0)):
        cache = TieredCache(
            1, 1, 64, budget=0.45, tiers=[name], policy="uniform", recent_tokens=12, sink_tokens=4, page_tokens=16,
            settle_every=16, dtype=torch.float16, rope=ROWS["inv_freq"].tolist(), balance=True, max_tokens=448,
        )  # fmt: skip
        cache.set_balance(0, by, [0], query=mean)
        cache.append(0, k.transpose(0, 1), v.transpose(0, 1))
        stored = cache.gather(0)[0][0].float() - k[0].float()
        scores = q[:, 1::2].float() @ stored[4:-12].T
        noise.append(float((scores - scores.mean(-1, keepdim=True)).square().mean()))
    assert noise[1] < {0: 1.0, 8: 0.75, 12: 0.6}[layer] * noise[0]


def test_sensitivities_alone_leave_estimates_to_prompts(tmp_path) -> None:
    """The balance, centres and directions of a cache without a calibration, other bytes per layer."""
    model = model_of("llama")
    ids = torch.randint(3, 128, (1, 90), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    measured = calibrate(model, ids)
    both = Calibration(measured.layers, [1.0, 8.0], [1.0, 8.0], 2, kinds=measured.kinds)
    assert both.has_rows
    alone = both.only_sensitivity()
    alone.save(tmp_path / "layers")
    alone = Calibration.load(tmp_path / "layers")
    assert not alone.has_rows
    assert alone.sensitivity == both.sensitivity
    options = dict(budget=0.33, page_tokens=16, recent_tokens=12, settle_every=16, max_tokens=1024)
    options |= dict(tiers=["K4V4", "K2V2"])
    caches = [StrataCache(model.config, calibration=given, **options) for given in (None, alone, both)]
    with torch.no_grad():
        for cache in caches:
            model(ids.repeat(1, 10), past_key_values=cache, use_cache=True)
    plain, shared, fixed = (cache.tiered for cache in caches)
    for name in ("balance", "centre", "direction"):
        assert torch.equal(getattr(shared, name), getattr(plain, name))
    assert not torch.equal(fixed.direction, plain.direction)
    wide = [int((shared.tier_map(layer) == 1).sum()) for layer in (0, 1)]
    assert wide[0] < wide[1]
    for given in (alone, Calibration([LayerCalibration(query=layer.query) for layer in measured.layers])):
        with pytest.raises(ValueError, match="calibration: expected balance or centre"):
            StrataCache(model.config, format="K4V4", calibration=given)
    with pytest.raises(ValueError, match="calibration: expected one with sensitivities"):
        measured.only_sensitivity()
