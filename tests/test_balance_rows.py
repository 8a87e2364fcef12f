"""What a row's balance is estimated from: its tokens, unless they repeat one, from the first call that has any."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")

from transformers import AutoModelForCausalLM, Gemma3TextConfig, GlmConfig, LlamaConfig, MistralConfig
from transformers.models.llama.modeling_llama import LlamaAttention

from hf_model import SIZES
from kvstrata.hf import StrataCache, balance, columns, guard, weights, window
from kvstrata.hf.calibrate import calibrate
from kvstrata.hf.rope import layer_frequencies

pytestmark = [
    pytest.mark.filterwarnings("ignore::kvstrata.hf.guard.BudgetWarning"),
    pytest.mark.filterwarnings("ignore:recent_tokens"),
]
SMALL: dict[str, Any] = dict(budget=0.6, recent_tokens=16, page_tokens=16)
CONFIGS = {
    "tiers": lambda: GlmConfig(**SIZES, head_dim=32),
    "window": lambda: MistralConfig(**SIZES, head_dim=32, sliding_window=48),
}


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def where(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(autouse=True)
def short_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(window, "LEAST", 32)


@torch.no_grad()
def model_of(kind: str, where: str = "cpu") -> Any:
    """A model whose K has channels of unlike sizes, in a RoPE of slow and fast pairs."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[kind]()).eval()
    for layer in model.model.layers:
        size = torch.randn(2, 16, 1).mul(2).exp2()
        size = size.repeat_interleave(2, 1) if kind == "tiers" else size.repeat(1, 2, 1)
        layer.self_attn.k_proj.weight *= size.view(-1, 1)
    return model.to(where)


def prompt(rows: int, tokens: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(3, 128, (rows, tokens), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def run(model: Any, ids: torch.Tensor, mask: torch.Tensor | None, ends: list[int], **options: Any) -> torch.Tensor:
    """Exponents of the balance of each row and layer, after prompts that end at ``ends``."""
    cache, begin = StrataCache(model.config, **SMALL | options), 0
    for end in ends:
        more = {}
        if mask is not None:
            number = (mask[:, :end].cumsum(1) - 1).clamp(min=0)[:, begin:]
            more = dict(attention_mask=mask[:, :end].to(model.device), position_ids=number.to(model.device))
        model(ids[:, begin:end].to(model.device), past_key_values=cache, use_cache=True, **more)
        begin = end
    if any(isinstance(layer, window.WindowLayer) for layer in cache.layers):
        cache.window_prompts.finish()
        return torch.stack([layer.calibration.balance.log2() for layer in cache.layers], 1).cpu()
    return cache.tiered.balance.float().cpu()


def by_weights(model: Any) -> torch.Tensor:
    kind = "sliding_attention" if getattr(model.config, "sliding_window", None) else "full_attention"
    own = []
    for layer in model.model.layers:
        module = layer.self_attn
        rope = layer_frequencies(module, model.config, module.head_dim, kind)
        turned = balance.rope_of.interleaved(module)
        own.append(weights.balance_of(module, 2, module.head_dim, rope, turned).log2().cpu())
    return torch.stack(own)


V = torch.randn(1, 2, 12, 32, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("kinds", "useful"),
    [
        ([0] * 60, 0),
        ([0] * 59 + [1], 1),
        ([1, 2, 3, 4] + [0] * 56, 0),  # sinks do not count, whatever they are
        ([0] * 50 + [1] * 10, 1),
        ([0] * 20 + [1, 2, 3] + [0] * 37, 4),
        ([0] * 40 + [1, 2] * 10, 60),
        ([0, 1] * 30, 60),
        ([0] * 512 + [1, 2, 3, 4] * 40, 4),  # tokens behind the first 516 are not used
        ([0] * 480 + [1, 2, 3, 4] * 40, 15),
        ([0] * 350 + [1, 2, 3, 4] * 60, 590),
        ([5], 1),
        ([5, 6, 7], 3),
    ],
)
def test_tokens_that_repeat_the_one_before_do_not_count(kinds: list[int], useful: int) -> None:
    v = V[:, :, kinds]
    new = np.ones((1, len(kinds)), bool)
    assert balance.useful_tokens(v, new).tolist() == [useful]
    assert balance.useful_tokens(1e-3 * v.half(), new).tolist() == [useful]
    noise = torch.randn(v.shape, generator=torch.Generator().manual_seed(1))
    assert balance.useful_tokens((v + 1e-3 * noise).bfloat16(), new).tolist() == [useful]  # rows of a matrix product
    padded, mask = torch.nn.functional.pad(v, (0, 0, 7, 2), value=torch.nan), np.zeros((1, len(kinds) + 9), bool)
    mask[:, 7:-2] = True
    assert balance.useful_tokens(padded, mask).tolist() == [useful]


def test_each_row_counts_its_own_tokens() -> None:
    v = torch.cat([V[:, :, torch.arange(60) % 12], V[:, :, [0] * 60], V[:, :, [3] * 60]])
    new = np.ones((3, 60), bool)
    new[2, :50] = False
    assert balance.useful_tokens(v, new).tolist() == [60, 0, 0]
    assert balance.useful_tokens(v[:, :, :0], new[:, :0]).tolist() == [0, 0, 0]


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("others", [0, 1, 3])
def test_a_repeated_token_leaves_the_balance_to_the_weights(kind: str, others: int, where: str) -> None:
    """One row repeats a token, the other is text: as if each were alone."""
    model, ids = model_of(kind, where), prompt(2, 60)
    ids[1, : 60 - others] = 7
    found, expected = run(model, ids, None, [60]), by_weights(model)
    assert torch.equal(found[1], expected)
    assert torch.equal(found[0], run(model, ids[:1], None, [60])[0])
    assert not torch.equal(found[0], expected)
    for name in ("q_proj", "k_proj"):
        setattr(model.model.layers[0].self_attn, name, Opaque(getattr(model.model.layers[0].self_attn, name)))
    found = run(model, ids[1:], None, [60])
    assert not found[0, 0].any(), "as without a balance, if weights tell nothing"
    assert torch.equal(found[0, 1], expected[1])


class Opaque(torch.nn.Module):
    """A projection that refuses inputs other than those of a model: here, batches whose first token is 0."""

    def __init__(self, linear: torch.nn.Module) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert bool(x[0, 0].any())
        return self.linear(x)


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("ends", [[40, 90], [40, 64, 90], [30, 40, 90]])
def test_rows_of_padding_are_balanced_by_their_first_tokens(
    kind: str, known: bool, ends: list[int], where: str
) -> None:
    """Row 1 has only padding in the first calls, and others beside it have text."""
    model, ids, mask = model_of(kind, where), prompt(3, 90), torch.ones(3, 90, dtype=torch.long)
    mask[1, :40], ids[1, :40] = 0, 0
    mask[2, :20] = 0
    if not known:
        for layer in model.model.layers:
            for name in ("q_proj", "k_proj"):
                setattr(layer.self_attn, name, Opaque(getattr(layer.self_attn, name)))
    found = run(model, ids, mask, ends)
    alone = [end - 40 for end in ends if end > 40]
    assert torch.equal(found[1], run(model, ids[1:2, 40:], None, alone)[0])
    assert torch.equal(found[0], run(model, ids[:1], None, ends)[0])
    assert found[1].any()


def test_rows_of_padding_are_balanced_by_a_few_tokens_without_padding() -> None:
    """Stored before they attend; 9 tokens are too few where the weights are known, but not where they are not."""
    model, ids, mask = model_of("tiers"), prompt(2, 49), torch.ones(2, 49, dtype=torch.long)
    mask[1, :40] = 0
    expected = by_weights(model)
    assert torch.equal(run(model, ids, mask, [40, 49])[1], expected)
    for layer in model.model.layers:
        for name in ("q_proj", "k_proj"):
            setattr(layer.self_attn, name, Opaque(getattr(layer.self_attn, name)))
    found = run(model, ids, mask, [40, 49])[1]
    assert torch.equal(found, run(model, ids[1:, 40:], None, [9])[0])
    assert found.any()
    assert not torch.equal(found, expected)


@pytest.mark.parametrize("kind", CONFIGS)
def test_projections_are_probed_when_a_row_begins(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in every call for a row that is still padding."""
    model, ids, mask = model_of(kind), prompt(2, 90), torch.ones(2, 90, dtype=torch.long)
    mask[1, :70] = 0
    called: list[int] = []
    balance_of = weights.balance_of
    monkeypatch.setattr(weights, "balance_of", lambda *args: called.append(1) or balance_of(*args))
    run(model, ids, mask, [30])
    first = len(called)
    run(model, ids, mask, [30, 40, 41, 42, 65])
    assert len(called) == 2 * first, "as often as in the first call alone"
    run(model, ids, mask, [30, 40, 41, 42, 85])
    assert len(called) == 4 * first, "15 tokens are too few for an estimate"


BOTH = dict(
    SIZES, num_hidden_layers=3, head_dim=32, sliding_window=48,
    layer_types=["sliding_attention", "full_attention", "sliding_attention"],
)  # fmt: skip


def test_tokens_count_as_the_first_layer_has_them(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """Deeper layers mix the first tokens into those that repeat; tiers and windows use the same count."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(Gemma3TextConfig(**BOTH)).eval().to(where)
    ids, seen, given = torch.full((2, 60), 7), [], []
    ids[:, 0], ids[1] = 3, prompt(1, 60)[0]
    count, of_prompt = columns.useful_tokens, balance.of_first_prompt

    def spy(query: Any, key: Any, new: Any, useful: np.ndarray, *args: Any, **kwargs: Any) -> torch.Tensor:
        given.append(useful.tolist())
        return of_prompt(query, key, new, useful, *args, **kwargs)

    monkeypatch.setattr(columns, "useful_tokens", lambda *args: seen.append(1) or count(*args))
    monkeypatch.setattr(balance, "of_first_prompt", spy)
    for _ in range(2):
        with torch.no_grad():
            model(ids.to(where), past_key_values=StrataCache(model.config, **SMALL))
    assert given == [[0, 60]] * 6
    assert len(seen) == 2
    cache = StrataCache(model.config, **SMALL)
    with torch.no_grad():
        for text in (ids, prompt(2, 60, 5)):  # of the same size
            cache.reset()
            model(text.to(where), past_key_values=cache)
    assert given[6:9] == [[0, 60]] * 3
    assert {x for useful in given[9:] for x in useful} == {60}


class Narrow(LlamaAttention):
    """Attention whose head_dim a cache does not compress."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        config = copy.deepcopy(config)
        config.head_dim = 16
        super().__init__(config, layer_idx)

    def forward(self, hidden_states: torch.Tensor, position_embeddings: Any, *args: Any, **kwargs: Any) -> Any:
        return super().forward(hidden_states, [x[..., :16] for x in position_embeddings], *args, **kwargs)


@pytest.mark.filterwarnings("default::kvstrata.hf.guard.BudgetWarning")
@pytest.mark.filterwarnings("default:StrataCache leaves")
@pytest.mark.parametrize("tokens", [8, 90])
def test_a_first_layer_that_is_left_plain(tokens: int) -> None:
    """What the first layer of a forward does for all is done by the first one that is compressed."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES | dict(num_hidden_layers=3), head_dim=32)).eval()
    model.model.layers[0].self_attn = Narrow(model.config, 0).eval()
    cache, ids = StrataCache(model.config, **SMALL), prompt(2, tokens)
    with torch.no_grad():
        model(ids, past_key_values=cache)
    assert list(cache.plain_layers) == [0]
    assert cache.tiered.interleaved is False
    checked = [type(x) for x in guard._seen if x is model.model.layers[1].self_attn]
    assert len(checked) == (tokens >= guard.FEWEST)


def test_calibrate_refuses_a_repeated_token() -> None:
    model, ids = model_of("tiers"), prompt(2, 60)
    ids[1, 3:] = 9
    with pytest.raises(ValueError, match=r"ids: expected text, got a row of which 0 of the 56 tokens used differ"):
        calibrate(model, ids)
    ids[1, 3:20] = ids[0, 3:20]
    calibrate(model, ids)
    long = torch.cat([ids[:1].repeat(1, 10), torch.full((1, 900), 9)], 1)
    calibrate(model, long)  # only the first 516 are used
    with pytest.raises(ValueError, match="0 of the 512 tokens used"):
        calibrate(model, long.flip(1))
    with pytest.raises(ValueError, match=r"ids: expected \[at least one row, .* got shape \(0, 60\)"):
        calibrate(model, ids[:0])
