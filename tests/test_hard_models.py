"""Models whose K is hard to quantise: channels of very different size, and biases that RoPE turns."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache, Qwen2Config, Qwen2ForCausalLM

import eval_model
from hf_model import SIZES, scaled
from kvstrata.hf import StrataCache, rope
from kvstrata.hf.calibrate import calibrate
from kvstrata.quant.calibration import Calibration, LayerCalibration
from kvstrata.tools.eval.measure import Exact, decode
from kvstrata.tools.eval.sensitivity import measure_sensitivity

pytestmark = pytest.mark.filterwarnings("ignore::kvstrata.hf.guard.BudgetWarning")  # budgets are too small here

TOKENS, PROMPT = 224, 160
OPTIONS = dict(
    budget=0.45, tiers=["K3V8"], policy="uniform", recent_tokens=12, page_tokens=16, settle_every=16, max_tokens=512,
)  # fmt: skip


def biased(size: float, seed: int = 0) -> Qwen2ForCausalLM:
    """A tiny Qwen2 with a few large biases of K in its first layer."""
    torch.manual_seed(seed)
    sizes = SIZES | dict(vocab_size=96, pad_token_id=None, eos_token_id=2, hidden_size=256)
    config = Qwen2Config(**sizes, initializer_range=0.1)
    model = Qwen2ForCausalLM(config).eval()
    bias = model.model.layers[0].self_attn.k_proj.bias.data
    bias.zero_()
    bias[torch.randperm(len(bias))[: len(bias) // 8]] = size
    return model


def exact(model: torch.nn.Module, ids: torch.Tensor) -> Exact:
    found = decode(model, ids, DynamicCache(config=model.config), prompt=PROMPT, chunk=16, keep=True)[1]
    assert found is not None
    return found


def kl(model: torch.nn.Module, ids: torch.Tensor, truth: Exact, **options) -> float:
    cache = StrataCache(model.config, **OPTIONS | options)
    scores, _ = decode(model, ids, cache, prompt=PROMPT, chunk=16, exact=truth)
    assert cache.memory().tokens["K3V8"] > 0
    return sum(map(sum, scores.kl)) / sum(scores.count)


def test_pairs_of_other_sizes_cost_nothing():
    model, ids = eval_model.model(), eval_model.tokens(TOKENS, rows=2)
    hard, truth = scaled(model), exact(model, ids)
    torch.testing.assert_close(exact(hard, ids)[0].logprobs.float(), truth[0].logprobs.float(), rtol=0, atol=0.05)
    easy, balanced, without = kl(model, ids, truth), kl(hard, ids, truth), kl(hard, ids, truth, balance=False)
    assert without > 3 * easy, "the model is not hard"
    assert balanced < 1.4 * easy  # powers of two cost up to a sixth of K's noise


def test_biases_rotated_by_rope():
    model, ids = biased(30.0), eval_model.tokens(TOKENS)
    truth = exact(model, ids)
    balanced, without = kl(model, ids, truth), kl(model, ids, truth, balance=False)
    assert balanced < 0.7 * without


def test_the_first_example_needs_no_other_argument():
    """README's: tiers, pages and recent tokens as a cache chooses them."""
    model, ids = eval_model.model(), eval_model.tokens(TOKENS)
    hard, truth = scaled(model), exact(model, ids)

    def loss(net: torch.nn.Module, **options) -> float:
        cache = StrataCache(net.config, budget=0.25, **options)
        scores, _ = decode(net, ids, cache, prompt=PROMPT, chunk=16, exact=truth)
        tiered = cache.tiered
        assert cache.memory().tokens["K16V16"] < tiered.length(0) * tiered.layers * tiered.kv_heads
        return sum(map(sum, scores.kl)) / sum(scores.count)

    easy = loss(model)
    assert loss(hard, balance=False) > 2 * easy
    assert loss(hard) < 1.4 * easy


def test_a_calibration_does_as_well_as_the_prompt(tmp_path):
    hard = scaled(eval_model.model())
    ids = eval_model.tokens(TOKENS)
    truth = exact(hard, ids)
    other = torch.randint(0, 96, (2, 100), generator=torch.Generator().manual_seed(9))
    calibrate(hard, other, "hard").save(tmp_path / "c.safetensors")
    calibration = Calibration.load(tmp_path / "c.safetensors")
    assert calibration.model == "hard"
    by_prompt, by_file = kl(hard, ids, truth), kl(hard, ids, truth, calibration=tmp_path / "c.safetensors")
    assert by_file < 1.3 * by_prompt
    cache = StrataCache(hard.config, **OPTIONS, calibration=calibration)
    hard(ids[:, :40], past_key_values=cache)
    want = torch.stack([layer.balance for layer in calibration.layers])
    assert torch.equal(cache.tiered.balance[0].float().exp2(), want)
    assert cache.tiered._centred.all()
    with pytest.raises(ValueError, match="ids: expected"):
        calibrate(hard, other[:, :3])


def test_sensitivities_are_those_of_balanced_rows():
    """Layers are measured as a cache rounds them: pairs of other sizes do not make a layer sensitive."""
    model, ids = eval_model.model(), eval_model.tokens(96)
    hard = scaled(model)
    easy, balanced = (sum(measure_sensitivity(net, ids, bits=3).k) for net in (model, hard))
    none = Calibration([LayerCalibration()] * len(model.model.layers))
    assert sum(measure_sensitivity(hard, ids, none, bits=3).k) > 3 * easy
    assert balanced < 1.5 * easy


def balances(model: torch.nn.Module, ids: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    cache = StrataCache(model.config, **OPTIONS)
    with torch.no_grad():
        model(ids, attention_mask=mask, past_key_values=cache, use_cache=True)
    return cache.tiered.balance


def test_rows_do_not_depend_on_the_batch():
    model, ids = scaled(eval_model.model()), eval_model.tokens(60, rows=2)
    mask = torch.ones(2, 60, dtype=torch.long)
    mask[1, :25] = 0
    together = balances(model, ids, mask)
    assert torch.equal(together[0], balances(model, ids[:1])[0])
    assert torch.equal(together[1], balances(model, ids[1:, 25:])[0])
    assert not torch.equal(together[0], together[1])


@pytest.mark.filterwarnings("ignore:recent_tokens")
def test_short_prompts_use_the_weights():
    model = scaled(eval_model.model())
    long = balances(model, eval_model.tokens(200))[0].float()
    for tokens in (1, 3, 12):
        short = balances(model, eval_model.tokens(tokens))[0].float()
        assert (short - long).abs().mean() < 0.6, tokens
    model.model.layers[0].self_attn.q_norm = torch.nn.Identity()  # weights no longer tell
    assert not balances(model, eval_model.tokens(1))[0, 0].any()
    assert balances(model, eval_model.tokens(12))[0, 0].any()


def test_interleaved_pairs_are_recognised():
    from transformers.models.cohere import modeling_cohere
    from transformers.models.llama import modeling_llama

    def module(source: object) -> torch.nn.Module:
        return type("Attention", (torch.nn.Module,), {"__module__": source.__name__})()

    assert rope.interleaved(module(modeling_llama)) is False
    assert rope.interleaved(module(modeling_cohere)) is True
    assert rope.interleaved(torch.nn.Linear(1, 1)) is None


def test_no_balance_where_nothing_is_compressed():
    model, ids = eval_model.model(), eval_model.tokens(40)
    cache = StrataCache(model.config, budget=None)
    model(ids, past_key_values=cache)
    assert cache.tiered.balance is None
