"""Prompts with mass, layer after layer: the launches of the first layer plan for the others, each with its own mass."""

from __future__ import annotations

import pytest
import torch

from allocations import Allocations
from cache_model import fingerprint
from cache_model import same as alike
from kvstrata.cache import BudgetExceeded, TieredCache
from kvstrata.cache.ops import append_prompt
from kvstrata.cache.policy import settle_cuda
from kvstrata.cache.policy.prompt_mass_cuda import PreparedPlan
from test_settle_cuda import device, pair, same

__all__ = ["device"]  # a fixture


@pytest.fixture
def layers(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The layers that are appended to by what another one prepared."""
    seen: list[int] = []
    prepare = PreparedPlan.prepare

    def counted(self, cache, change, layer, *arguments):
        seen.append(layer)
        prepare(self, cache, change, layer, *arguments)

    monkeypatch.setattr(PreparedPlan, "prepare", counted)
    return seen


def rows_and_mass(
    generator: torch.Generator, lengths: list[int], skew: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    k, v = torch.randn(2, sum(lengths), 2, 32, generator=generator)
    return k, v, torch.rand(len(lengths), 2, max(lengths), generator=generator) ** skew


RARELY = [dict(importance="ema"), dict(per_head=False), dict(balance=True)]


@pytest.mark.parametrize("options", [dict(), *(pytest.param(x, marks=pytest.mark.slow) for x in RARELY)], ids=str)
def test_layers_with_mass_reuse_the_launches_of_the_first(device: str, layers: list[int], options: dict) -> None:
    """Other rows and another spread of mass in each layer, one request and two, pages that others gave back."""
    ours, wanted = pair(device, **options)
    generator = torch.Generator().manual_seed(0)
    if options.get("balance"):
        by = torch.randint(-2, 3, (2, 2, 32), generator=generator).float().exp2()
        for cache in (ours, wanted):
            for layer in range(2):
                query = by[1 - layer].log2().to(cache.device)
                cache.set_balance(layer, by[layer].to(cache.device), [0, 1, 2], query=query)

    def prompts(requests: list[int], lengths: list[int], seen: list[int], queries: int) -> None:
        layers.clear()
        for layer in range(2):
            k, v, mass = rows_and_mass(generator, lengths, 1.0 if layer else 8.0)
            for cache in (ours, wanted):
                given = (x.to(cache.device) for x in (k, v))
                cache.append(layer, *given, requests, lengths, mass=mass.to(cache.device), queries=queries)
        assert layers == seen
        same(ours, wanted)

    prompts([1], [300], [1], 300)
    prompts([0, 2], [150, 200], [1], 40)
    for cache in (ours, wanted):
        cache.free_request(0)
        cache.free_request(2)
    prompts([0, 2], [150, 200], [0, 1], 40)


def test_prompts_with_and_without_mass_are_not_confused(device: str, layers: list[int]) -> None:
    ours, wanted = pair(device)
    generator = torch.Generator().manual_seed(0)
    for request, with_mass in enumerate(([True, False], [False, True])):
        for layer in range(2):
            k, v, mass = rows_and_mass(generator, [300], 4.0)
            for cache in (ours, wanted):
                extra = dict(mass=mass.to(cache.device), queries=300) if with_mass[layer] else {}
                cache.append(layer, k.to(cache.device), v.to(cache.device), [request], **extra)
    assert layers == []
    same(ours, wanted)


def test_errors_of_another_layer_are_those_of_the_first(device: str, layers: list[int]) -> None:
    """Mass of a wrong shape, and a budget that does not suffice; nothing has changed then."""
    ours, _ = pair(device)
    k, v, mass = (x.to(device) for x in rows_and_mass(torch.Generator().manual_seed(0), [300], 4.0))
    ours.append(0, k, v, [0], mass=mass, queries=300)
    before = fingerprint(ours, spare=False)
    with pytest.raises(ValueError, match="mass: expected"):
        ours.append(1, k, v, [0], mass=mass[:, :1], queries=300)
    with pytest.raises(ValueError, match="queries: expected"):
        ours.append(1, k, v, [0], mass=mass, queries=0)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("kvstrata.cache.policy.settle_cuda.Outcome.values", property(lambda self: ([10**9], [0], None)))
        with pytest.raises(BudgetExceeded):
            ours.append(1, k, v, [0], mass=mass, queries=300)
    assert layers == [1]
    assert alike(before, fingerprint(ours, spare=False))
    ours.check()
    ours.append(1, k, v, [0], mass=mass, queries=300)
    assert layers == [1, 1]
    for a, b in zip(ours.gather(0, 0), ours.gather(1, 0), strict=True):
        assert torch.equal(a, b)


def test_out_of_memory_in_another_layer_changes_nothing(
    device: str, layers: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(append_prompt, "guard_of", lambda given: lambda *rows: True)  # which see the mode that counts
    k, v, mass = (x.to(device) for x in rows_and_mass(torch.Generator().manual_seed(0), [300], 4.0))

    def first() -> TieredCache:
        cache = pair(device)[0]
        cache.append(0, k, v, [1], mass=mass, queries=300)
        return cache

    def second(cache: TieredCache) -> None:
        cache.append(1, v, k, [1], mass=mass.flip(2), queries=300)

    cache, undisturbed = first(), first()
    lines = Allocations.of(lambda: second(undisturbed)).lines
    assert len(lines) > 2
    before = fingerprint(cache, spare=False)
    for number in range(0, len(lines), 3):
        with pytest.raises(torch.OutOfMemoryError, match="as asked for"):
            Allocations.of(lambda: second(cache), number)
        assert alike(before, fingerprint(cache, spare=False)), lines[number]
        cache.check()
    second(cache)
    assert set(layers) == {1}
    for a, b in zip(cache.gather(1, 1), undisturbed.gather(1, 1), strict=True):
        assert torch.equal(a, b)
    cache.check()


def test_a_layer_with_other_centres_takes_the_normal_path(
    device: str, layers: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests that get codes where those of the first layer got none: centres are computed for these."""
    ours, wanted = pair(device)
    coded = settle_cuda.coded
    monkeypatch.setattr(
        settle_cuda,
        "coded",
        lambda cache, planned, numbers=None: ~coded(cache, planned) if numbers is None else coded(cache, planned),
    )
    generator = torch.Generator().manual_seed(0)
    for layer in range(2):
        k, v, mass = rows_and_mass(generator, [300], 4.0)
        for cache in (ours, wanted):
            cache.append(layer, k.to(cache.device), v.to(cache.device), [0], mass=mass.to(cache.device), queries=300)
    assert layers == [1]
    same(ours, wanted)
