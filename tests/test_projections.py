"""Rows of Q and K in fused projections, against the K that a model computes and the Q that its attention receives."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
from transformers import AutoModelForCausalLM, GPT2Config, GPTNeoXConfig, LlamaConfig, Phi3Config
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvstrata.hf import balance, projections

SIZES = dict(vocab_size=32, hidden_size=64, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4)
CONFIGS = {
    "llama": LlamaConfig(**SIZES, num_key_value_heads=2, attention_bias=True),
    "gpt2": GPT2Config(vocab_size=32, n_embd=64, n_layer=1, n_head=4, n_positions=64, bos_token_id=0, eos_token_id=0),
    "gpt-neox": GPTNeoXConfig(**SIZES, rotary_pct=0.5),
    "phi3": Phi3Config(**SIZES, num_key_value_heads=2, pad_token_id=0, bos_token_id=0, eos_token_id=0),
}


@pytest.mark.parametrize("name", CONFIGS)
@torch.no_grad()
def test_rows_are_those_of_the_model(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(CONFIGS[name]), attn_implementation="sdpa").eval()
    for parameter in model.parameters():
        parameter.normal_(std=0.3)
    received: dict[str, Any] = {}
    attend = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def recording(module: Any, query: Any, key: Any, *args: Any, **kwargs: Any) -> Any:
        received.update(module=module, query=query, key=key)
        return attend(module, query, key, *args, **kwargs)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "recording", recording)
    model.config._attn_implementation = "recording"
    attention = next(x for x in model.modules() if type(x).__name__.endswith("Attention"))
    attention.register_forward_pre_hook(
        lambda module, args, kwargs: received.update(hidden=args[0] if args else kwargs["hidden_states"]),
        with_kwargs=True,
    )
    model(torch.arange(12).unsqueeze(0), use_cache=False)
    kv_heads, dim = received["key"].shape[1], received["key"].shape[3]
    own = projections.of_q_and_k(received["module"], kv_heads, dim)
    assert own is not None
    for (weight, bias), states in zip(own, (received["query"], received["key"]), strict=True):
        rows = torch.nn.functional.linear(received["hidden"], weight, bias).unflatten(-1, (-1, dim)).transpose(1, 2)
        torch.testing.assert_close(rows.norm(dim=-1), states.norm(dim=-1), rtol=1e-4, atol=1e-4)  # RoPE keeps norms
        torch.testing.assert_close(rows[:, :, 0], states[:, :, 0], rtol=1e-4, atol=1e-4)  # position 0 is not rotated
    rope, turned = ([], None) if name == "gpt2" else ([0.1] * (dim // 2), False)
    assert balance.from_weights(received["module"], kv_heads, dim, rope, turned) is not None
    centre = balance.centre_from_bias(received["module"], kv_heads, dim, rope, bool(turned))
    assert (centre is None) == (own[1].bias is None)


def test_wrapped_projections_are_unknown() -> None:
    model = AutoModelForCausalLM.from_config(CONFIGS["phi3"])
    attention = model.model.layers[0].self_attn
    attention.qkv_proj = torch.nn.Sequential(attention.qkv_proj)
    assert projections.of_q_and_k(attention, 2, 16) is None
    assert projections.of_q_and_k(model.model.layers[0].mlp, 2, 16) is None
