"""The turns of a model's RoPE as `StrataCache` hands them on."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import transformers

from kvstrata.hf import StrataCache
from kvstrata.hf.rope import frequencies

SMALL = dict(hidden_size=128, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2)
SMALL |= dict(vocab_size=64, max_position_embeddings=8192)
YARN = dict(rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=2048)
LLAMA3 = dict(rope_type="llama3", rope_theta=5e5, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
LLAMA3 |= dict(original_max_position_embeddings=1024)
LONG = dict(rope_type="longrope", rope_theta=1e4, short_factor=[1.0 + i for i in range(32)], long_factor=[2.0] * 32)
LONG |= dict(original_max_position_embeddings=4096, factor=2.0)


def llama(**options: Any) -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL | options)).eval()


@pytest.mark.parametrize(
    "given",
    [
        dict(rope_type="default", rope_theta=1e5),
        dict(rope_type="linear", rope_theta=1e4, factor=2.0),
        dict(rope_type="dynamic", rope_theta=1e4, factor=2.0),
        YARN,
        LLAMA3,
        LONG,
    ],
    ids=lambda given: given["rope_type"],
)
def test_frequencies_equal_the_models(given: dict[str, Any]) -> None:
    net = llama(rope_parameters=given)
    radians = frequencies(net.config, 64)
    assert radians is not None
    torch.testing.assert_close(torch.tensor(radians), net.model.rotary_emb.inv_freq)


def test_frequencies_of_partial_rotation() -> None:
    rope = dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.25)
    config = transformers.GPTNeoXConfig(**{k: v for k, v in SMALL.items() if k != "num_key_value_heads"})
    config.rope_parameters = rope
    net = transformers.GPTNeoXForCausalLM(config)
    radians = frequencies(net.config, 64)
    assert radians is not None
    torch.testing.assert_close(torch.tensor(radians), net.gpt_neox.rotary_emb.inv_freq)
    assert len(radians) == 8


def test_frequencies_are_those_of_full_attention() -> None:
    config = transformers.Gemma3TextConfig(
        **SMALL | dict(num_hidden_layers=6, head_dim=64),
        rope_parameters={
            "full_attention": dict(rope_type="linear", rope_theta=1e6, factor=8.0),
            "sliding_attention": dict(rope_type="default", rope_theta=1e4),
        },
    )
    radians = frequencies(config, 64)
    assert radians is not None
    assert radians[0] == pytest.approx(1 / 8)
    assert radians[-1] == pytest.approx(1e6 ** -(62 / 64) / 8)


def test_models_without_known_rope() -> None:
    assert frequencies(transformers.GPT2Config(), 64) is None
    config = llama().config
    assert frequencies(config, 32) is not None
    config.rope_parameters = dict(rope_type="spiral", rope_theta=1e4)
    assert frequencies(config, 64) is None
    config.rope_parameters = dict(LLAMA3)
    assert frequencies(config, 32) is None  # of another head dim: more pairs than the head has


@torch.no_grad()
def test_a_strata_cache_uses_the_models_rope() -> None:
    """K that a model turns has a centre that is not its mean; nobody else may say how it is turned."""
    torch.manual_seed(0)
    net = llama(rope_parameters=dict(rope_type="default", rope_theta=1e4))
    for layer in net.model.layers:
        layer.self_attn.k_proj.weight.mul_(0.1)
        layer.self_attn.k_proj.bias = torch.nn.Parameter(torch.randn(128))
    ids = torch.randint(0, 64, (1, 200))
    cache = StrataCache(net.config, budget=0.25, recent_tokens=16, page_tokens=16)
    net(ids, past_key_values=cache, use_cache=True)
    exact = net(torch.randint(0, 64, (1, 2048)), use_cache=True).past_key_values.layers[0].keys[0]
    assert cache.tiered.rope == pytest.approx(net.model.rotary_emb.inv_freq.tolist())
    centre, far = cache.tiered.centre[0, 0], exact.mean(1)
    assert float((centre - far).norm()) < 0.3 * float((exact[:, :200].mean(1) - far).norm())
    with pytest.raises(TypeError, match="rope: expected to be left out, since the model determines it"):
        StrataCache(net.config, rope=[1.0])
