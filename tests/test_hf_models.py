"""Models that a `StrataCache` compresses, models that it refuses, and what it leaves of transformers to others."""

from __future__ import annotations

import copy
import gc

import pytest
import torch

pytest.importorskip("transformers")

import transformers
from transformers import AttentionInterface, ContinuousBatchingConfig, DynamicCache, GenerationConfig, StaticCache
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_model import SMALL, greedy, make, prompt
from hf_zoo import MODEL_TYPES, logits, tiny_config, tiny_model, verdict
from kvstrata.hf import StrataCache, attention, support

KINDS = [("llama", "sdpa"), ("gpt2", "eager"), ("gpt_neox", "sdpa"), ("gemma2", "eager"), ("qwen3_next", "sdpa")]
# By other means than the attention interface, or with K and V that are no longer what the cache returned.
REFUSED = ["falcon", "gptj", "gpt_neo", "bloom", "mpt", "codegen", "xglm", "doge", "diffllama", "jetmoe"]
SPARSE = ["deepseek_v32", "glm_moe_dsa", "hy_v4", "axk2", "minimax_m3_vl_text", "glm5_next_text", "mistral_large4_text"]
ENCODER_DECODER = ["t5", "bart", "whisper"]


@pytest.mark.parametrize(("model_type", "implementation"), KINDS)
def test_logits_equal_those_of_dynamic_cache(model_type: str, implementation: str) -> None:
    assert verdict(model_type, implementation).startswith("equal")


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_every_model_is_equal_or_refused(model_type: str, implementation: str) -> None:
    verdict(model_type, implementation)


# Refused


@pytest.mark.parametrize("model_type", REFUSED + SPARSE + ENCODER_DECODER)
def test_models_are_refused_at_construction(model_type: str) -> None:
    if model_type not in transformers.CONFIG_MAPPING:
        pytest.skip("not in this transformers")
    config = transformers.CONFIG_MAPPING[model_type]()
    config._attn_implementation = "eager"
    reason = "encoder-decoder" if model_type in ENCODER_DECODER else r"\w+\.forward \w+"
    with pytest.raises(ValueError, match=f"config: expected .* compress, got '{model_type}': .*{reason}.*DynamicCache"):
        StrataCache(config)


@pytest.mark.parametrize("model_type", ["falcon", "diffllama"])
def test_a_model_that_reads_k_and_v_says_so(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model's source does not tell in advance."""
    monkeypatch.setattr(support, "_source", lambda name: None)
    model = tiny_model(model_type, "sdpa")
    cache = StrataCache(model.config, budget=1.0)
    with pytest.raises(RuntimeError, match=r"past_key_values: expected a model that .* reads them itself"):
        logits(model, cache)


@pytest.mark.parametrize("model_type", ["falcon", "deepseek_v32"])
def test_a_refused_model_is_unchanged(model_type: str) -> None:
    """Falcon's logits moved, and sparse attention became dense, when the config named another attention."""
    assert verdict(model_type, "sdpa").startswith("refused")


FORWARD = """
class Attention:
    def forward(self, hidden_states, attention_mask, past_key_values, **kwargs):
        query, key, value = self.qkv(hidden_states)
        {before}
        key, value = past_key_values.update(key, value, self.layer_idx)
        {after}
        attend: Callable = {lookup}
        return attend(self, query, {key}, value, attention_mask, scaling=self.scaling, {options}**kwargs)
"""
PLAIN = dict(before="", after="", key="key", options="", lookup="ALL_ATTENTION_FUNCTIONS.get_interface(name, eager)")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (dict(), None),
        (dict(before="key = self.norm(key)"), None),
        (dict(before="if cross:\n            attention_mask = encoder_mask"), None),
        (dict(lookup="eager if name == 'eager' else ALL_ATTENTION_FUNCTIONS[name]"), None),
        (dict(lookup="SomeOther.get(name)"), "does not use transformers' attention interface"),
        (dict(after="key = self.norm(key)"), "computes key again after the cache"),
        (dict(after="columns = key.shape[2]"), "reads key.shape after the cache"),
        (dict(key="key.mT"), "computes other tensors from the K and V of the cache"),
        (dict(options="alibi=alibi, "), "gives its attention function alibi"),
        (dict(after="attention_mask = attention_mask & selected"), "makes its own mask in each layer"),
    ],
)
def test_reasons_come_from_the_source(change: dict[str, str], reason: str | None) -> None:
    refusal = support._refusal(FORWARD.format(**PLAIN | change), "sdpa")
    assert refusal == (f"Attention.forward {reason}" if reason else None)


def test_a_lookup_that_eager_does_not_reach() -> None:
    """Models with remote code look up "sdpa" by index only."""
    source = FORWARD.format(**PLAIN | dict(lookup="eager if name == 'eager' else ALL_ATTENTION_FUNCTIONS[name]"))
    assert support._refusal(source, "sdpa") is None
    refusal = support._refusal(source, "eager")
    assert refusal is not None
    assert 'set_attn_implementation("sdpa")' in refusal


# Everyone else


def test_config_and_registries_are_unchanged() -> None:
    model = make("llama")
    config, attentions = copy.deepcopy(model.config), dict(AttentionInterface._global_mapping)
    masks = dict(AttentionMaskInterface._global_mapping)
    cache = StrataCache(model.config, **SMALL)
    tokens = greedy(model, prompt(1, 40), cache)
    assert model.config.to_dict() == config.to_dict()
    assert model.config._attn_implementation == "sdpa"
    assert AttentionInterface._global_mapping == attentions
    assert AttentionMaskInterface._global_mapping == masks
    model.set_attn_implementation("eager")  # a cache goes along
    greedy(model, tokens, cache)


def test_a_copied_config_works() -> None:
    model, ids = make("llama"), prompt(1, 40)
    cache = StrataCache(copy.deepcopy(model.config), budget=1.0)
    assert torch.equal(greedy(model, ids, cache), greedy(model, ids))


def test_lookups_are_transformers_own_when_no_cache_is_left() -> None:
    gc.collect()
    if list(attention._users):
        pytest.skip("a cache of another test is alive")
    own = AttentionInterface._global_mapping["sdpa"]
    assert ALL_ATTENTION_FUNCTIONS.get_interface("sdpa", None) is ALL_ATTENTION_FUNCTIONS["sdpa"] is own
    caches = [StrataCache(make("llama").config) for _ in range(2)]
    caches.append(copy.deepcopy(caches[0]))
    assert ALL_ATTENTION_FUNCTIONS.get_interface("sdpa", None) is not own
    assert "sdpa" in ALL_ATTENTION_FUNCTIONS
    with pytest.raises(KeyError):
        ALL_ATTENTION_FUNCTIONS["nothing"]
    with pytest.raises(KeyError):
        ALL_ATTENTION_FUNCTIONS.get_interface("nothing", None)
    del caches[:2]
    gc.collect()
    model = make("llama")
    copied = caches.pop()
    assert torch.isfinite(logits(model, copied)).all(), "a copy connects itself"
    del copied
    gc.collect()
    assert ALL_ATTENTION_FUNCTIONS.get_interface("sdpa", None) is ALL_ATTENTION_FUNCTIONS["sdpa"] is own


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_other_caches_compile_to_one_graph(implementation: str) -> None:
    model, ids = make("llama"), prompt(1, 24)
    model.set_attn_implementation(implementation)
    with torch.no_grad():
        expected = model(ids).logits
        strata = StrataCache(model.config, **SMALL)
        model(ids, past_key_values=strata)
        other = DynamicCache(config=model.config)
        if implementation == "sdpa":
            other = StaticCache(config=model.config, max_cache_len=32)
        torch._dynamo.reset()
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(ids, past_key_values=other).logits, expected, atol=1e-5, rtol=1e-4)
    torch._dynamo.reset()


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_continuous_batching_still_works(implementation: str) -> None:
    model = make("llama")
    model.set_attn_implementation(implementation)
    cache = StrataCache(model.config, **SMALL)
    greedy(model, prompt(1, 20), cache, new=2)
    options = GenerationConfig(max_new_tokens=3, do_sample=False, eos_token_id=-1, pad_token_id=0)
    small = ContinuousBatchingConfig(num_blocks=8, max_batch_tokens=32)
    ids = prompt(2, 9)
    out = model.generate_batch(ids.tolist(), generation_config=options, continuous_batching_config=small)
    given = [request.generated_tokens for request in out.values()]
    assert given == greedy(model, ids, new=3)[:, 9:].tolist()


def test_attention_that_changed_after_construction() -> None:
    model = make("llama")
    cache = StrataCache(model.config, **SMALL)
    model.config._attn_implementation_internal = "flash_attention_2"
    with (
        torch.no_grad(),
        pytest.raises(NotImplementedError, match="a StrataCache, got 'flash_attention_2'"),
    ):
        model(prompt(1, 20), past_key_values=cache)


def test_full_attention_without_rope() -> None:
    """BEAM turns K only where the window slides."""
    if "beam" not in transformers.CONFIG_MAPPING:
        pytest.skip("not in this transformers")
    assert tiny_config("beam").rope_parameters["full_attention"] is None
    assert verdict("beam", "sdpa").startswith("equal")
