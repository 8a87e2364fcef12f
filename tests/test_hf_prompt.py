"""Prompts of a `StrataCache`: the memory that they take, and masks and positions that it does not know."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from hf_model import EXACT, SIZES, SMALL, make, prompt
from kvstrata.hf import StrataCache, prefill, turns
from kvstrata.hf.layer import StrataLayer


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that an operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **kwargs or {})
        if not any(returned.alias_info for returned in func._schema.returns):
            self.elements = max(self.elements, *(x.numel() for x in tree_leaves(out) if isinstance(x, torch.Tensor)), 0)
        return out


@pytest.mark.parametrize("case", ["plain", "padded", "second turn", "eager", "many cores"])
def test_prompts_take_linear_memory(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory of a cache layer alone; the mask of padded rows and later turns is transformers' own."""
    tokens = 4096
    torch.manual_seed(0)
    one = dict(num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1, max_position_embeddings=2 * tokens)
    model = LlamaForCausalLM(LlamaConfig(**SIZES | one, head_dim=32)).eval()
    if case == "eager":
        model.set_attn_implementation("eager")
    if case == "many cores":
        monkeypatch.setattr(torch, "get_num_threads", lambda: 64)
    cache, attend, largest = StrataCache(model.config, **SMALL), StrataLayer.attend, Largest()

    def watched(*args: Any) -> torch.Tensor:
        with largest:
            return attend(*args)

    monkeypatch.setattr(StrataLayer, "attend", watched)
    mask = torch.ones(1, tokens, dtype=torch.long)
    if case == "padded":
        mask[:, :100] = 0
    first = tokens // 2 if case == "second turn" else tokens
    with torch.no_grad():
        for part in prompt(1, tokens).split(first, 1):
            largest.elements = 0
            model(part, attention_mask=mask[:, : cache.get_seq_length() + first], past_key_values=cache)
    assert tokens * 32 <= largest.elements <= tokens * 600  # 512 sampled queries and K; all queries would be 4,096


# Masks


def causal(queries: int, columns: int) -> torch.Tensor:
    return torch.ones(queries, columns, dtype=torch.bool).tril(columns - queries)[None, None]


def test_a_causal_mask_equals_no_mask() -> None:
    """Given as a tensor, bool or added, it says no more than padding does."""
    model, ids = make("llama"), prompt(2, 30)
    mask = causal(30, 30).repeat(2, 1, 1, 1)
    mask[1, :, :, :7] = False
    added = torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)
    added[1, :, 5, :4] = 0  # padding may see padding
    padding = torch.ones(2, 30, dtype=torch.long)
    padding[1, :7] = 0
    given = []
    with torch.no_grad():
        for some in (padding, mask, added):
            cache = StrataCache(model.config, **EXACT)
            given.append(model(ids, attention_mask=some, past_key_values=cache).logits[padding.bool()])
            assert [cache.tiered.length(row) for row in range(2)] == [30, 23]
    torch.testing.assert_close(given[1], given[0])
    torch.testing.assert_close(given[2], given[0])


def packed(mask: torch.Tensor) -> None:
    mask[..., 12:, :12] = False


def both_ways(mask: torch.Tensor) -> None:
    mask[..., 3:9, 3:9] = True


def sparse(mask: torch.Tensor) -> None:
    mask[..., 17, 4] = False


def hidden_later(mask: torch.Tensor) -> None:
    mask[..., 15:, 7] = False


@pytest.mark.parametrize("change", [packed, both_ways, sparse, hidden_later])
def test_masks_of_another_kind_are_refused(change: Any) -> None:
    model, ids = make("llama"), prompt(1, 20)
    mask = causal(20, 20)
    change(mask)
    bias = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    cache = StrataCache(model.config, **SMALL)
    with torch.no_grad():
        for given in (mask, bias):
            with pytest.raises(NotImplementedError, match="attention_mask: expected causal order"):
                model(ids, attention_mask=given, past_key_values=cache)
        assert cache.get_seq_length() == 0
        model(ids, past_key_values=cache)
    assert cache.tiered.length() == 20


def test_other_masks_are_refused() -> None:
    model, ids = make("llama"), prompt(1, 20)
    bias = torch.zeros(1, 1, 20, 20).masked_fill(~causal(20, 20), -torch.inf)
    bias[..., 5, 3] = -2.0
    with torch.no_grad():
        with pytest.raises(NotImplementedError, match="attention_mask: expected causal order"):
            model(ids, attention_mask=bias, past_key_values=StrataCache(model.config))
        cache = StrataCache(model.config)
        model(ids, past_key_values=cache)
        hidden = torch.ones(1, 21, dtype=torch.long)
        hidden[:, 4] = 0  # a token that is stored
        with pytest.raises(NotImplementedError, match=r"attention_mask: .* the padding of earlier calls"):
            model(ids[:, :1], attention_mask=hidden, past_key_values=cache)
        with pytest.raises(NotImplementedError, match=r"expected 1 queries and 21 columns .* got \(1, 1, 1, 20\)"):
            model(ids[:, :1], attention_mask=causal(1, 20), past_key_values=cache)


def test_each_layer_s_mask_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sparse attention gives each layer a mask of its own."""
    model, ids = make("llama"), prompt(1, 20)
    layer = model.model.layers[1].self_attn
    forward = layer.forward

    def selecting(*args: Any, attention_mask: torch.Tensor, **options: Any) -> Any:
        mask = causal(20, 20)
        mask[..., 18, 2] = False
        return forward(*args, attention_mask=mask, **options)

    monkeypatch.setattr(layer, "forward", selecting)
    with torch.no_grad(), pytest.raises(NotImplementedError, match="attention_mask: expected causal order"):
        model(ids, attention_mask=causal(20, 20), past_key_values=StrataCache(model.config))


def test_eager_without_a_mask_is_refused() -> None:
    """It would attend both ways."""
    model, ids = make("llama"), prompt(1, 20)
    model.set_attn_implementation("eager")
    layer = model.model.layers[0].self_attn
    forward = layer.forward
    layer.forward = lambda *args, **given: forward(*args, **given | {"attention_mask": None})
    with torch.no_grad(), pytest.raises(NotImplementedError, match="is_causal: expected causal attention"):
        model(ids, past_key_values=StrataCache(model.config))


# Positions


def test_packed_positions_are_refused() -> None:
    model, ids = make("llama"), prompt(2, 20)
    positions = torch.arange(20).repeat(2, 1)
    positions[1, 12:] -= 12
    with torch.no_grad():
        for given in (positions, positions[1:]):
            cache = StrataCache(model.config, **SMALL)
            with pytest.raises(NotImplementedError, match="position_ids: expected positions that grow"):
                model(ids, position_ids=given, past_key_values=cache)
            assert cache.get_seq_length() == 0


def test_positions_of_padding_do_not_matter() -> None:
    """generate counts 1 for padding on the left, others count on."""
    model, ids = make("llama"), prompt(2, 20)
    mask = torch.ones_like(ids)
    mask[0, :5], mask[1, 15:] = 0, 0
    positions = (mask.cumsum(1) - 1).masked_fill(mask == 0, 3)
    logits = []
    with torch.no_grad():
        for cache in (DynamicCache(config=model.config), StrataCache(model.config, budget=1.0)):
            out = model(ids, attention_mask=mask, position_ids=positions, past_key_values=cache)
            logits.append(out.logits[mask.bool()])
    torch.testing.assert_close(logits[1], logits[0], atol=1e-5, rtol=1e-4)


def test_a_later_prompt_without_a_mask_equals_one_with_a_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """`prefill_attention` of later chunks, as on a GPU without `turns`; rows of different lengths keep the mask."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES | dict(head_dim=64))).eval()
    calls = []
    attend = prefill.attend
    monkeypatch.setattr(turns, "supports", lambda query, cache: False)
    monkeypatch.setattr(prefill, "attend", lambda *given: (calls.append(len(given)), attend(*given))[1])
    for padding, expected in ((0, 4), (7, 0)):
        mask = torch.ones(2, 150, dtype=torch.long)
        mask[1, :padding] = 0
        logits = []
        for fast in (False, True):
            monkeypatch.setattr(prefill, "supports", lambda query, fast=fast: fast)
            cache = StrataCache(model.config, **EXACT)
            with torch.no_grad():
                for start, end in ((0, 60), (60, 130), (130, 150)):
                    out = model(prompt(2, 150)[:, start:end], attention_mask=mask[:, :end], past_key_values=cache)
            logits.append(out.logits)
        assert len(calls) == expected
        calls.clear()
        torch.testing.assert_close(*logits, rtol=2e-4, atol=2e-4)
