"""Short contexts: what an old token may take before the fraction overtakes the floor."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cache_model import make, rows
from kvstrata.cache import TieredCache

SMALL = dict(budget=0.25, page_tokens=16, recent_tokens=28, settle_every=16, tiers=None, dtype=torch.float16)


def budget_of(**options):
    return TieredCache(24, 2, 64, **SMALL | options).budget


@pytest.mark.parametrize(("fraction", "max_tokens"), [(0.25, 1024), (0.25, 4096), (0.3, 4096), (0.35, 1024)])
def test_old_tokens_have_the_same_bytes_until_the_floor_ends(fraction: float, max_tokens: int) -> None:
    budget = budget_of(budget=fraction, max_tokens=max_tokens)
    lengths = np.arange(max_tokens + 1)
    granted = budget.granted_by_length[: max_tokens + 1]
    need = np.array([budget.need(n) for n in lengths])
    share = (fraction * 2 * budget.token_bytes * lengths).astype(np.int64)
    assert granted.tolist() == [budget.granted(n) for n in lengths]
    assert (np.diff(granted) >= 0).all()
    assert budget.floor_tokens == budget.early <= 2048
    assert (granted[budget.early :] == share[budget.early :]).all()  # the fraction holds from there on
    extra = 2 * budget.floor_extra * np.maximum(lengths - budget.kept, 0)
    assert granted[: budget.early] == pytest.approx(np.maximum(share, need + extra)[: budget.early], abs=1)
    assert budget.floor_extra > 1
    assert granted[budget.early] - granted[budget.early - 1] < 3 * budget.page_price[-1]  # no jump where it ends


def test_lists_without_floor_extra() -> None:
    assert budget_of(budget=0.6).floor_extra == 0  # K8V8 comes first
    assert budget_of(budget=0.12).floor_extra == 0  # never overtakes its need
    assert budget_of(budget=0.18, max_tokens=512).floor_extra == 0  # nor within so few tokens
    assert budget_of(budget=None, budget_bytes=1 << 22).floor_extra == 0
    wide = budget_of(tiers=["K3V2", "K2V2"], budget=0.4)
    assert wide.floor_extra <= (wide.page_price[1] - wide.page_price[-1]) / 16


def test_a_prompt_is_not_rounded_to_the_lowest_tier() -> None:
    """512 tokens, then 512 steps: what the prompt keeps is what a text of 1,024 tokens can pay for."""
    cache = make(**SMALL, max_tokens=1024)
    assert cache.formats[-1].name == "K2V2"
    k, v = rows(1024, dtype=torch.float16)
    cache.append(0, k[:512], v[:512])
    cache.check()
    tokens = cache.memory().tokens
    assert tokens["K2V2"] < 0.85 * 2 * (512 - 32)  # all of these without the extra
    for start in range(512, 1024, 16):
        cache.append(0, k[start : start + 16], v[start : start + 16])
        assert cache.memory().total <= cache.memory().allowed
    cache.check()
    assert cache.memory().total <= 0.25 * cache.memory().full
