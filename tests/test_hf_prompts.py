"""First prompts that are planned in groups of layers and stored later, against layers stored one by one.

Kernels of the cache are emulated on a CPU, those of the mass run under Triton's interpreter. Without kernels a CPU
groups layers too.
"""

from __future__ import annotations

import copy
import itertools

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")

from hf_model import make, prompt
from kvstrata.cache.move import apply
from kvstrata.cache.ops.inspect import gather
from kvstrata.hf import StrataCache, balance, guard, prompts
from test_settle_cuda import device

__all__ = ["device"]  # a fixture

OPTIONS = dict(budget=0.3, recent_tokens=20, sink_tokens=4, page_tokens=16, settle_every=8, tiers=("K4V4", "K2V2"))


class OneByOne(StrataCache):
    """A cache that stores every layer at once."""

    def build(self, key: torch.Tensor) -> None:
        super().build(key)
        self.prompts.supports = lambda *given: False  # type: ignore[method-assign]


class Waiting(StrataCache):
    """A cache whose buckets settle by kernels, wherever they are."""

    def build(self, key: torch.Tensor) -> None:
        super().build(key)
        self.unfinished.buckets.backend = "cuda"


def fill(kind: type, ids: torch.Tensor, mask: torch.Tensor | None = None, **options) -> StrataCache:
    model = make("llama").to(ids.device)
    guard._seen.clear()
    cache = kind(model.config, **OPTIONS | options)
    with torch.no_grad():
        model(ids, attention_mask=mask, past_key_values=cache)
    return cache


def same(ours: StrataCache, wanted: StrataCache) -> None:
    for layer in range(2):
        for row in range(ours.rows):
            assert ours.tiered.length(row, layer) == wanted.tiered.length(row, layer)
            tiers = ours.tiered.tier_map(layer, row).cpu(), wanted.tiered.tier_map(layer, row).cpu()
            assert float((tiers[0] != tiers[1]).float().mean()) < 0.02
            importance = (cache.tiered.importance(layer, row).cpu() for cache in (ours, wanted))
            torch.testing.assert_close(*importance, atol=5e-3, rtol=5e-3)
    assert float((ours.tiered.balance.cpu() != wanted.tiered.balance.cpu()).float().mean()) < 0.02  # rounded alike
    assert torch.equal(ours.tiered.reports.numbers.cpu(), wanted.tiered.reports.numbers.cpu())
    ours.tiered.check()


@pytest.mark.parametrize("padding", [0, 30])
@pytest.mark.parametrize("together", [True, False])
def test_a_deferred_prompt_is_stored_like_an_immediate_one(
    device: str, padding: int, together: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All layers together and each for itself; the guard of a first prompt has every layer alone."""
    ids = prompt(2, 100).to(device)
    mask = None
    if padding:
        mask = torch.ones_like(ids)
        mask[1, :padding] = 0
    if not together:
        monkeypatch.setattr(prompts, "ALL_LAYERS_BYTES", 0)
        monkeypatch.setattr(prompts, "GROUP_BYTES", 0)
    monkeypatch.setattr(guard.Guard, "begin", lambda *given: None)
    sizes: list[int] = []
    plan = prompts.LayersAppend.__init__

    def counted(self, cache, layers, *given):
        sizes.append(len(layers))
        plan(self, cache, layers, *given)

    monkeypatch.setattr(prompts.LayersAppend, "__init__", counted)
    models: list[torch.Tensor] = []
    add = prompts.Prompts.add
    monkeypatch.setattr(prompts.Prompts, "add", lambda self, *given: (models.extend(given[3:5]), add(self, *given))[1])
    ours = fill(Waiting, ids, mask)
    for rows in models:
        rows.fill_(torch.nan)  # a model that is compiled with CUDA graphs writes to its memory again
    assert sizes == ([2] if together else [1, 1])
    assert not ours.unfinished.length(0, 1), "stored before it is needed"
    wanted = fill(OneByOne, ids.cpu(), None if mask is None else mask.cpu())
    same(ours, wanted)
    same(copy.deepcopy(ours), wanted)


def everything(cache: StrataCache) -> list[torch.Tensor]:
    """Rows, positions, tiers and importance of all tokens, balance, centres and the queries of reports."""
    tiered, rows = cache.tiered, range(cache.rows)
    parts = [x for layer in range(2) for x in gather(tiered, layer, rows)]
    for layer, row in itertools.product(range(2), rows):
        parts += [tiered.tier_map(layer, row), tiered.importance(layer, row)]
    return [*parts, tiered.balance, tiered.centre, tiered.reports.numbers]


@pytest.mark.parametrize("padding", [0, 30])
@pytest.mark.parametrize(
    "options", [{}, {"policy": "recency"}, {"balance": False}, {"importance_queries": 70}], ids=str
)
def test_layers_grouped_on_a_cpu_are_stored_as_one_by_one(
    padding: int, options: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit, and nothing is left to do after the forward."""
    monkeypatch.setattr(guard.Guard, "begin", lambda *given: None)
    ids = prompt(2, 200)
    mask = torch.ones_like(ids)
    mask[1, :padding] = 0
    sizes: list[int] = []
    plan = prompts.LayersAppend.__init__
    monkeypatch.setattr(
        prompts.LayersAppend, "__init__", lambda self, *given: (sizes.append(len(given[1])), plan(self, *given))[1]
    )
    ours = fill(StrataCache, ids, mask, **options)
    assert sizes == [2]
    assert ours.unfinished.length(0, 1) == 200
    sizes.clear()
    wanted = fill(OneByOne, ids, mask, **options)
    assert not sizes
    for ours_part, wanted_part in zip(everything(ours), everything(wanted), strict=True):
        assert (ours_part is None) == (wanted_part is None)
        assert wanted_part is None or torch.equal(ours_part, wanted_part)
    ours.tiered.check()


def test_a_prompt_that_cannot_be_stored_on_a_cpu_fails_in_its_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = make("llama"), prompt(1, 200)
    cache = StrataCache(model.config, **OPTIONS)
    with monkeypatch.context() as patched, torch.no_grad():
        patched.setattr(apply, "move", lambda *given: (_ for _ in ()).throw(MemoryError("as asked for")))
        with pytest.raises(MemoryError):
            model(ids, past_key_values=cache)
    cache.reset()
    with torch.no_grad():
        model(ids, past_key_values=cache)
    assert cache.tiered.length(0, 1) == 200


def test_copies_rows_and_columns_see_a_deferred_prompt(device: str) -> None:
    """Whatever is done with a cache after its prompt, all tokens are there."""
    ids = prompt(2, 100).to(device)
    uses = (
        lambda cache: copy.deepcopy(cache),
        lambda cache: cache.crop(-3) or cache,
        lambda cache: cache.reorder_cache(torch.tensor([1, 0])) or cache,
        lambda cache: cache.memory() and cache,
    )
    for use, columns in zip(uses, (100, 97, 100, 100), strict=True):
        cache = use(fill(Waiting, ids))
        assert cache.unfinished.length(0, 1) == columns
        cache.tiered.check()


def test_a_prompt_that_cannot_be_stored_is_reported_until_reset(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = fill(Waiting, prompt(1, 100).to(device))

    def fails(self) -> None:
        raise torch.OutOfMemoryError("as asked for")

    with monkeypatch.context() as patched:
        patched.setattr(prompts.LayersAppend, "finish", fails)
        with pytest.raises(torch.OutOfMemoryError):
            cache.memory()
    with pytest.raises(RuntimeError, match=r"whose prompt could not be stored \(as asked for\)"):
        _ = cache.tiered
    cache.reset()
    assert cache.rows == 0


def test_layers_per_group_shrink_with_prompt_size() -> None:
    assert prompts.group_of(32, 8 << 20) == 32
    assert prompts.group_of(32, (8 << 20) + 1) == 15
    assert prompts.group_of(32, 1 << 30) == 1
    assert prompts.group_of(32, 1 << 20, on_cpu=True) == 16
    assert prompts.group_of(8, 1 << 20, on_cpu=True) == 8
    assert prompts.group_of(32, 1 << 30, on_cpu=True) == 1


def test_columns_used_for_the_balance() -> None:
    most = balance.SINKS + balance.MOST
    real = np.ones((2, 2 * most), bool)
    assert balance.columns_needed(real) == most
    assert balance.columns_needed(real[:, :3]) == 3
    real[1, :30] = False
    assert balance.columns_needed(real) == most + 30
