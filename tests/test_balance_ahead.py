"""Expected squares of K and Q: what a prompt says about the channels at all positions to come."""

from __future__ import annotations

import pytest
import torch

from kvstrata.hf import balance, rope
from kvstrata.hf.moments import channels

PAIRS, REST, HEADS = 12, 8, 2  # turned pairs, channels that RoPE leaves alone, KV heads
DIM = 2 * PAIRS + REST
ROPE = [1e5 ** (-i / PAIRS) / 2 for i in range(PAIRS)]  # from half a radian a token to hardly any
ORDER = [i // 2 + PAIRS * (i % 2) for i in range(2 * PAIRS)] + list(range(2 * PAIRS, DIM))  # half-split to interleaved


def rows(tokens: int, seed: int, part: float = 5.0) -> torch.Tensor:
    """K of a model, ``[1, HEADS, tokens, DIM]``: pairs with unlike channels and a common ``part``, turned by RoPE."""
    shape = torch.Generator().manual_seed(3)
    spread = torch.rand(HEADS, 1, DIM, generator=shape, dtype=torch.float64).mul(2).exp()
    common = part * torch.randn(HEADS, 1, DIM, generator=shape, dtype=torch.float64)
    noise = torch.randn(HEADS, tokens, DIM, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    x = common + spread * noise
    turn = torch.arange(tokens, dtype=torch.float64).unsqueeze(1) * torch.tensor(ROPE)
    one, two = x[..., :PAIRS].clone(), x[..., PAIRS : 2 * PAIRS].clone()
    x[..., :PAIRS] = one * turn.cos() - two * turn.sin()
    x[..., PAIRS : 2 * PAIRS] = two * turn.cos() + one * turn.sin()
    return x.unsqueeze(0)


def squares(k: torch.Tensor, q: torch.Tensor, interleaved: bool | None = False, padding: int = 0):
    real = torch.ones(1, k.shape[2] + padding, dtype=torch.bool)
    real[:, :padding] = False
    k, q = (torch.nn.functional.pad(x, (0, 0, padding, 0), value=1e3) for x in (k, q))
    sums = balance.squares(q, k, real, ROPE, interleaved)
    return [sums.k.double(), sums.q.double()]


def test_expected_squares_equal_those_over_all_positions():
    """A prompt of 500 tokens, against all positions to come of another text."""
    found_k, found_q = squares(rows(500, 1), rows(500, 2, 0.0))
    want_k, want_q = rows(balance.AHEAD, 5).var(2, correction=0), rows(balance.AHEAD, 6, 0.0).square().mean(2)
    torch.testing.assert_close(found_k, want_k, rtol=0.35, atol=0)
    torch.testing.assert_close(found_q, want_q, rtol=0.35, atol=0)
    unlike = found_k[..., :PAIRS] / found_k[..., PAIRS : 2 * PAIRS]
    assert (unlike[..., :4].log2().abs() < 0.2).all(), "pairs that turn fast are alike"
    assert unlike[..., -2:].log2().abs().max() > 1.5, "the case is too easy to tell"


def test_pairs_of_either_kind_and_padding_give_the_same():
    k, q = rows(200, 1), rows(200, 2)
    want = squares(k, q)
    interleaved = squares(k[..., ORDER], q[..., ORDER], True)
    for got, expected in zip(interleaved, want, strict=True):
        torch.testing.assert_close(got, expected[..., ORDER], rtol=1e-4, atol=0)
    for got, expected in zip(squares(k, q, padding=37), want, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=0)


@pytest.mark.parametrize("interleaved", [False, True])
def test_a_common_part_without_rope_is_removed(interleaved: bool):
    """Layers may leave out RoPE although the configuration has one: the centre of theirs is the mean of the rows."""
    generator = torch.Generator().manual_seed(1)
    k = torch.randn(1, HEADS, 200, DIM, generator=generator, dtype=torch.float64)
    offset = 50 * torch.randn(HEADS, 1, DIM, generator=generator, dtype=torch.float64)
    found, want = (squares(x, rows(200, 2), interleaved)[0] for x in (k + offset, k - k.mean(2, keepdim=True)))
    (one, two), _ = channels(PAIRS, DIM, is_interleaved=interleaved)
    torch.testing.assert_close(found[..., one] + found[..., two], want[..., one] + want[..., two], rtol=0.05, atol=0)
    torch.testing.assert_close(found[..., 2 * PAIRS :], want[..., 2 * PAIRS :], rtol=0.05, atol=0)


@pytest.mark.parametrize(
    ("file", "name", "interleaved"),
    [
        ("llama", "LlamaAttention", False),
        ("cohere", "CohereAttention", True),
        ("glm4v", "Glm4vTextAttention", True),  # beside the vision model's, which pairs (i, i + n)
        ("glm_ocr", "GlmOcrTextAttention", True),
        ("ernie4_5_vl_moe", "Ernie4_5_VLMoeTextAttention", True),
        ("gpt2", "GPT2Attention", None),
    ],
)
def test_pairs_are_those_of_the_attention_that_calls(file: str, name: str, interleaved: bool | None):
    kind = getattr(pytest.importorskip(f"transformers.models.{file}.modeling_{file}"), name)
    assert rope.interleaved(kind.__new__(kind)) is interleaved


def test_few_tokens_leave_the_channels_of_a_pair_alike():
    """The channel of a slow pair that K does not use counts the less, the more tokens say so, and never nothing."""

    def unused(tokens: int) -> float:
        k = torch.zeros(1, 1, tokens, DIM)
        k[..., PAIRS - 1] = torch.randn(tokens, generator=torch.Generator().manual_seed(1))
        got, _ = squares(k, rows(tokens, 2)[:, :1])
        return float(got[0, 0, 2 * PAIRS - 1] / got[0, 0, PAIRS - 1])

    assert unused(16) > 0.3
    assert 0.3 > unused(80) > unused(400) > 0.01


def test_tokens_behind_the_first_512_do_not_count():
    """512 behind the attention sinks, also of a row with padding; the columns of no others are needed."""
    last = 10 + balance.SINKS + balance.MOST
    k, real = torch.nn.functional.pad(rows(590, 1), (0, 0, 10, 0)), torch.ones(1, 600, dtype=torch.bool)
    real[:, :10] = False
    ((want, _), count), other = balance.from_prompt(k, k, real, ROPE, False), k.clone()
    assert count.tolist() == [512]
    assert balance.columns_needed(real.numpy()) == last
    other[:, :, last:] = torch.nan
    assert torch.equal(balance.from_prompt(other, other, real, ROPE, False)[0].balance, want)
    other[:, :, last - 1, 0] = 1e6
    assert not torch.equal(balance.from_prompt(other, k, real, ROPE, False)[0].balance, want)


def test_channels_that_no_rule_pairs_are_those_of_the_prompt():
    k, q = rows(200, 1), rows(200, 2)
    found_k, found_q = squares(k, q, None)
    torch.testing.assert_close(found_k, k[:, :, balance.SINKS :].square().mean(2), rtol=1e-4, atol=0)
    torch.testing.assert_close(found_q, q[:, :, balance.SINKS :].square().mean(2), rtol=1e-4, atol=0)


@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf")])
def test_empty_and_broken_rows_stay_finite(value: float):
    k = torch.full((1, HEADS, 40, DIM), value)
    (own, query), count = balance.from_prompt(k, k, torch.ones(1, 40, dtype=torch.bool), ROPE, False)
    assert own.isfinite().all()
    assert query.isfinite().all()
    assert count.tolist() == [36]
    assert (own == 1).all()


def test_one_format_balances_only_heads_that_gain_much():
    """Tiers give tokens with attention wider codes; without them a small expected gain may be a loss."""
    torch.manual_seed(0)
    k, q = torch.randn(2, 1, 2, 200, DIM)
    k[:, 0, :, 0] *= 3.0  # a head with little to gain
    k[:, 1, :, 0] *= 100.0  # and one with much
    real = torch.ones(1, 200, dtype=torch.bool)
    (tiers, _), _ = balance.from_prompt(q, k, real, (), False)
    (single, _), _ = balance.from_prompt(q, k, real, (), False, has_tiers=False)
    assert tiers[0, 0, 0] > 1
    assert (single[0, 0] == 1).all()
    assert torch.equal(single[0, 1], tiers[0, 1])
    assert single[0, 1, 0] > 4


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("large", [0, 1])
def test_whole_squares_have_both_channels_of_a_pair_and_the_centre(interleaved: bool, large: int):
    """RoPE turns one into the other, so only their sum is told."""
    k, pairs = rows(200, 1), channels(PAIRS, DIM, is_interleaved=interleaved)[0]
    k[..., pairs[large]] += 1000.0
    whole = balance.squares(rows(200, 2), k, torch.ones(1, 200, dtype=torch.bool), ROPE, interleaved).k_whole
    expected = k[:, :, balance.SINKS :].square().mean(2).float()
    found, expected = ((*(x[..., pair] for pair in pairs), x[..., 2 * PAIRS :]) for x in (whole, expected))
    torch.testing.assert_close(found[0] + found[1], expected[0] + expected[1], rtol=1e-3, atol=0)
    torch.testing.assert_close(found[2], expected[2], rtol=1e-3, atol=0)


@pytest.mark.parametrize("tokens", [6, 10, 18, 19, 20, 30])
def test_prompts_of_few_tokens_use_the_weights(tokens: int):
    """16 behind the attention sinks are enough; without weights 4 are. Each row on its own."""
    transformers = pytest.importorskip("transformers")
    from transformers.models.llama.modeling_llama import LlamaAttention

    from kvstrata.hf import weights

    torch.manual_seed(0)
    config = transformers.LlamaConfig(hidden_size=64, num_attention_heads=HEADS, head_dim=DIM)
    module = LlamaAttention(config, 0)
    module.k_proj.weight.data *= torch.randn(HEADS * DIM, 1).mul(2).exp()
    by_weights = weights.balance_of(module, HEADS, DIM, ROPE, False)
    k, q = (rows(40, seed).repeat(2, 1, 1, 1).float() for seed in (1, 2))
    real = torch.ones(2, 40, dtype=torch.bool)
    real[1, tokens:] = False
    (by_prompt, query), _ = balance.from_prompt(q, k, real, ROPE, False)
    prompt = q, k, real.numpy(), real.numpy().sum(1), module, ROPE
    own, mean = balance.of_first_prompt(*prompt, has_tiers=True)
    assert torch.equal(own[0], by_prompt[0])
    assert torch.equal(own[1], by_weights if tokens < 20 else by_prompt[1])
    assert torch.equal(mean[0], query[0])
    assert torch.equal(mean[1], query[1] if tokens >= 20 else torch.zeros(HEADS, DIM))
    module.q_proj = module.k_proj = None
    assert torch.equal(balance.of_first_prompt(*prompt, has_tiers=True).balance, by_prompt)
    assert not any(torch.equal(by_prompt[1], x) for x in (by_weights, torch.ones(HEADS, DIM)))
