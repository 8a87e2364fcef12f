"""Rows of a `StrataCache` that outgrow its tables or their limit, and caches that are copied to go on from a prefix."""

from __future__ import annotations

import copy

import pytest
import torch

pytest.importorskip("transformers")

from transformers import AutoModelForCausalLM, LlamaConfig

from hf_model import SIZES, SMALL, greedy, make, prompt
from kvstrata.cache.policy import centre
from kvstrata.cache.policy.budget import Budget
from kvstrata.hf import StrataCache


def long_model(context: int):
    torch.manual_seed(0)
    config = LlamaConfig(**SIZES | dict(head_dim=32, max_position_embeddings=context))
    return AutoModelForCausalLM.from_config(config).eval()


def test_tables_grow_with_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Past the context length, by chunks and by steps, as with room for all from the start."""
    monkeypatch.setattr(centre, "HORIZON", 1)  # K's centre looks ahead no further than small tables reach
    monkeypatch.setattr(Budget, "floor_extra", 0.0)  # nor does the floor, which ends with tables below 2,048 tokens
    model, ids = long_model(100), prompt(2, 150)
    mask = torch.ones_like(ids)
    mask[1, :60] = 0
    runs = []
    for room in (dict(), dict(max_tokens=240)):
        cache = StrataCache(model.config, **SMALL, tiers=["K4V4", "K2V2"], **room)
        options = dict(attention_mask=mask, prefill_chunk_size=40, new=60)
        runs.append(greedy(model, ids, cache, **options))
        cache.tiered.check()
        assert [cache.tiered.length(row) for row in range(2)] == [209, 149]
    assert torch.equal(*runs)
    assert cache.tiered.max_tokens == 240, "the other one grew to this size, too: tables are part of the budget"


def test_a_row_that_is_too_long_leaves_the_columns_unchanged() -> None:
    model, ids = long_model(1000), prompt(1, 80)
    cache = StrataCache(model.config, **SMALL, max_tokens=100)
    with pytest.raises(ValueError, match=r"max_tokens: expected at least 101, which a row .* got 100"):
        greedy(model, ids, cache, new=40)
    assert cache.get_seq_length() == 100
    cache.crop(-30)
    assert cache.get_seq_length() == cache.tiered.length() == 70


@pytest.mark.filterwarnings("ignore:recent_tokens")
@pytest.mark.parametrize("side", ["left", "right"])
def test_short_rows_of_a_batch_have_the_balance_of_single_runs(side: str) -> None:
    """A row with too few tokens for an estimate takes that of the weights, however long the others are."""
    model, lengths = make("llama"), [90, 1, 6, 19, 20, 40]
    ids, mask = prompt(len(lengths), 90), torch.zeros(len(lengths), 90, dtype=torch.long)
    rows = [slice(90 - n, 90) if side == "left" else slice(n) for n in lengths]
    for row, columns in enumerate(rows):
        mask[row, columns] = 1
    with torch.no_grad():
        together = StrataCache(model.config, **SMALL)
        model(ids, attention_mask=mask, past_key_values=together)
        for row, columns in enumerate(rows):
            alone = StrataCache(model.config, **SMALL)
            model(ids[row : row + 1, columns], past_key_values=alone)
            assert torch.equal(together.tiered.balance[row], alone.tiered.balance[0]), lengths[row]


def test_a_copied_cache_is_independent() -> None:
    """What transformers' users do to reuse a prefix."""
    model, ids = make("llama"), prompt(1, 200)
    cache = StrataCache(model.config, **SMALL)
    with torch.inference_mode():
        model(ids[:, :150], past_key_values=cache)
    twin = copy.deepcopy(cache)
    assert torch.equal(greedy(model, ids, cache), greedy(model, ids, twin))
    assert twin.layers[0].owner is twin
    twin.crop(-60)
    twin.tiered.check()
    assert (twin.get_seq_length(), cache.get_seq_length()) == (163, 223)


def test_recent_tokens_beyond_the_prompt_warn() -> None:
    model = make("llama")
    with pytest.warns(
        UserWarning, match="recent_tokens: expected fewer than the 40 tokens of the first forward, got 64; nothing is"
    ):
        greedy(model, prompt(1, 40), StrataCache(model.config, budget=0.5, recent_tokens=64), new=2)
    greedy(model, prompt(1, 40), StrataCache(model.config, budget=0.5), new=2)  # the default is no request


def test_beams_free_the_copies_of_the_prompt() -> None:
    """Each beam begins with the prompt in pages of its own; the first reordering leaves one copy in use."""
    model, ids = make("llama"), prompt(1, 200)
    cache = StrataCache(model.config, **SMALL)
    greedy(model, ids, cache, num_beams=4, new=8)
    pool = cache.tiered.pool
    assert pool.slab_count <= 2 * int((pool.tier >= 0).sum())
    assert cache.memory().slab_slack < 0.5 * cache.memory().kinds["slabs"]
    cache.tiered.check()


@pytest.mark.parametrize("options", [{}, dict(page_tokens=16, recent_tokens=28, settle_every=16)])
def test_the_default_budget_holds_for_short_heads(options: dict) -> None:
    """Heads of 32 values: positions, importance and scales are a larger part of a token than with longer ones."""
    model = make("llama")
    cache = StrataCache(model.config, **options)
    with torch.inference_mode():
        model(prompt(1, 300), past_key_values=cache)
    assert cache.memory().total <= cache.memory().allowed
    assert cache.tiered.budget.overtakes < float("inf")
