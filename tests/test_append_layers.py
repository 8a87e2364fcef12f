"""Prompts of several layers appended in one go, against one layer after the other."""

from __future__ import annotations

import pytest
import torch

from cache_model import fingerprint
from cache_model import same as alike
from kvstrata.cache import BudgetExceeded, TieredCache
from kvstrata.cache.ops.append_layers import LayersAppend, supports
from kvstrata.cache.policy.balance import divided
from test_settle_cuda import device, pair, same

__all__ = ["device"]  # a fixture


def by_layer(cache: TieredCache, layer: int, k, v, mass, requests: list[int], lengths: list[int]) -> None:
    """Append with mass ``[tokens, kv_heads]``, request by request."""
    parts = [x.to(cache.device).split(lengths) for x in (k, v, mass)]
    for request, count, k, v, own in zip(requests, lengths, *parts, strict=True):
        cache.append(layer, k, v, [request], mass=own.T.unsqueeze(0), queries=count)


def prompts(lengths: list[int], layers: int = 2, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator, tokens = torch.Generator().manual_seed(seed), sum(lengths)
    k, v = torch.randn(2, layers, tokens, 2, 32, generator=generator)
    return k, v, torch.rand(layers, tokens, 2, generator=generator) ** 4


OPTIONS = [dict(), *(pytest.param(x, marks=pytest.mark.slow) for x in (dict(importance="ema"), dict(balance=True)))]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_layers_appended_together_equal_layers_appended_one_by_one(device: str, options: dict) -> None:
    """One prompt, then two of different lengths; decode steps and settling go on from there."""
    ours, wanted = pair(device, **options)
    generator = torch.Generator().manual_seed(1)
    if options.get("balance"):
        by = torch.randint(-2, 3, (2, 2, 32), generator=generator).float().exp2()
        for cache in (ours, wanted):
            for layer in range(2):
                query = by[1 - layer].log2().to(cache.device)
                cache.set_balance(layer, by[layer].to(cache.device), [0, 1, 2], query=query)
    for requests, lengths in (([1], [300]), ([0, 2], [150, 200])):
        k, v, mass = prompts(lengths)
        assert supports(ours, [0, 1], requests, lengths)
        stored = torch.stack([divided(ours, i, k[i].to(device), requests, lengths) for i in range(2)])
        planned = LayersAppend(ours, [0, 1], stored, v.to(device), requests, lengths, mass.to(device))
        assert not ours.length(requests[0], 1)
        planned.finish()
        for layer in range(2):
            by_layer(wanted, layer, k[layer], v[layer], mass[layer], requests, lengths)
        assert not supports(ours, [0, 1], requests, lengths)
        same(ours, wanted)
        assert torch.equal(ours.reports.numbers.cpu(), wanted.reports.numbers)
        assert torch.equal(ours._device_lengths.cpu(), torch.from_numpy(wanted._lengths))
    for _ in range(3):
        k, v = torch.randn(2, 3, 2, 32, generator=generator)
        for cache in (ours, wanted):
            cache.advance()
            for layer in range(2):
                cache.write(layer, k.to(cache.device), v.to(cache.device))
    same(ours, wanted)


@pytest.mark.parametrize("options", [dict(), dict(importance="ema"), dict(balance=True)], ids=str)
def test_without_kernels_layers_appended_together_have_the_same_bytes(device: str, options: dict) -> None:
    """Bit for bit, in a request that comes after others and with lengths that differ."""
    ours, wanted = (pair(device, **options)[1] for _ in "12")
    generator = torch.Generator().manual_seed(1)
    for cache in (ours, wanted):
        k, v = torch.randn(2, 40, 2, 32, generator=generator.manual_seed(2))
        cache.append(0, k, v, [1])
        if options.get("balance"):
            for layer in range(2):
                cache.set_balance(layer, torch.full((2, 32), 2.0 ** (layer + 1)), [0, 2])
    lengths = [150, 233]
    k, v, mass = prompts(lengths)
    k[:, 170:200] *= 1000  # rows that the centre of request 2 leaves out
    stored = torch.stack([divided(ours, i, k[i], [0, 2], lengths) for i in range(2)])
    LayersAppend(ours, [0, 1], stored, v, [0, 2], lengths, mass).finish()
    for layer in range(2):
        by_layer(wanted, layer, k[layer], v[layer], mass[layer], [0, 2], lengths)
    for layer in range(2):
        for request in (0, 2):
            for got, expected in zip(ours.gather(layer, request), wanted.gather(layer, request), strict=True):
                assert torch.equal(got, expected)
            assert torch.equal(ours.importance(layer, request), wanted.importance(layer, request))
    assert torch.equal(ours.centre, wanted.centre)
    ours.check()


def test_without_kernels_an_exceeded_budget_changes_nothing(device: str) -> None:
    _, ours = pair(device, budget=0.1)
    k, v, mass = prompts([300])
    before, reports = fingerprint(ours, spare=False), ours.reports.numbers.clone()
    with pytest.raises(BudgetExceeded, match="layer 0"):
        LayersAppend(ours, [0, 1], k, v, [0], [300], mass).finish()
    assert alike(before, fingerprint(ours, spare=False))
    assert torch.equal(ours.reports.numbers, reports)
    ours.check()


def test_an_exceeded_budget_changes_nothing(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, _ = pair(device)
    k, v, mass = (x.to(device) for x in prompts([300]))
    before = fingerprint(ours, spare=False)
    planned = LayersAppend(ours, [0, 1], k, v, [0], [300], mass)
    with monkeypatch.context() as patched:
        patched.setattr(
            "kvstrata.cache.policy.settle_cuda.Outcome.values", property(lambda self: ([None, 10**9], [0, 0], None))
        )
        with pytest.raises(BudgetExceeded, match="layer 1"):
            planned.finish()
    assert alike(before, fingerprint(ours, spare=False))
    ours.check()


def test_only_settling_prompts_into_empty_layers_are_supported(device: str) -> None:
    ours, wanted = pair(device)
    assert supports(ours, [0, 1], [0, 2], [300, 200])
    assert not supports(ours, [0, 1], [0, 2], [300, 8]), "short ones are plain rows"
    assert supports(wanted, [0], [0], [300]), "without kernels, on a CPU"
    ours.append(1, *torch.randn(2, 4, 2, 32, device=device), [0])
    assert not supports(ours, [0, 1], [0], [300]), "tokens are there"
    assert supports(ours, [0], [0], [300])
