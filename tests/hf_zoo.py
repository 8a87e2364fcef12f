"""Every causal language model of the installed transformers, small and random, and what a `StrataCache` makes of it."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from transformers import AutoModelForCausalLM, DynamicCache
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CLASSES

from kvstrata.hf import StrataCache

MODEL_TYPES = sorted(CLASSES)
LAYERS, LARGEST = 2, 20_000_000  # layers, and parameters of a model that is small
SIZES: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "n_vocab", "dim_model_vocab"), 128),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim_model", "emb_dim", "embedding_size"), 128),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "ffn_hidden_size", "n_inner", "dff", "moe_intermediate_size"), 96),
    **dict.fromkeys(("shared_expert_intermediate_size", "prefix_dense_intermediate_size", "word_embed_proj_dim"), 128),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"), LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "swa_num_key_value_heads"), 2),
    **dict.fromkeys(("head_dim", "global_head_dim", "swa_head_dim", "v_head_dim", "attention_head_dim"), 32),
    **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "kv_lora_rank", "q_lora_rank"), 32),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "num_experts_per_token", "moe_topk", "top_k_experts"), 2),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace", "num_mem_blocks"), 1),
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "sep_token_id", "decoder_start_token_id"), 1),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), 512),
    "is_decoder": True,
    "vocab_size_per_layer_input": 128,
    "hidden_size_per_layer_input": 16,
    "mamba_n_heads": 4,
    "mamba_d_head": "auto",
    "index_topk": 8,
    "index_n_heads": 2,
    "index_head_dim": 32,
}
# What a class needs beyond small sizes.
MORE: dict[str, dict[str, Any]] = {
    "bamba": dict(attn_layer_indices=[1]),
    "dots1": dict(num_key_value_heads=2),
    "gpt_neo": dict(attention_types=[[["global", "local"], 1]]),
    "granitemoehybrid": dict(layer_types=["mamba", "attention"]),
    "jamba": dict(attn_layer_offset=1, attn_layer_period=2),
    "lfm2_moe": dict(layer_types=["conv", "full_attention"]),
    "mamba2": dict(num_heads=8),
    "zamba": dict(layers_block_type=["mamba", "hybrid"]),
    "zamba2": dict(layers_block_type=["mamba", "hybrid"]),
    "zaya": dict(num_experts_per_tok=1),
}


def tiny_config(model_type: str) -> Any:
    """The default configuration with small sizes, where the class takes them."""
    kind = CONFIG_MAPPING[model_type]
    return _shrink(kind, kind().to_dict(), MORE.get(model_type, {}))


def _shrink(kind: Any, default: dict[str, Any], more: dict[str, Any]) -> Any:
    sizes = {name: value for name, value in SIZES.items() if name in default}
    if "sliding_window" in default:
        sizes["sliding_window"] = 16 if default.get("layer_types") else None
    if "kv_lora_rank" in default:
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]
    for name, value in default.items():
        if name == "layer_types" and isinstance(value, list):
            sizes[name] = [*dict.fromkeys(value)][:LAYERS] * (LAYERS if len(set(value)) == 1 else 1)
        elif isinstance(value, list) and len(value) == default.get("num_hidden_layers"):
            sizes[name] = value[:LAYERS]
    for name, sub in getattr(kind, "sub_configs", {}).items():
        if isinstance(default.get(name), dict) and hasattr(sub, "model_type"):
            sizes[name] = _shrink(sub, sub().to_dict(), {}).to_dict()
    return kind(**sizes | more)


def tiny_model(model_type: str, attention: str) -> Any:
    """A random model whose attention is not nearly uniform; skips what has no small configuration here."""
    try:
        config = tiny_config(model_type)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation=attention)
        if sum(parameter.numel() for parameter in model.parameters()) > LARGEST:
            pytest.skip("no small configuration")
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()
    except Exception as error:  # each class has its own ways to refuse a size
        pytest.skip(f"no small configuration: {error}")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point() and parameter.dim() > 1:
                parameter.mul_(3.0)
    return model


@torch.no_grad()
def logits(model: Any, cache: Any) -> torch.Tensor:
    """Logits ``[tokens, vocabulary]`` of two rows, the second left-padded: a prompt, decode steps, a second turn."""
    ids = torch.randint(2, 100, (2, 60), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, :9] = 0
    out, begin = [], 0
    for end in (30, 31, 34, 60):
        options = dict(attention_mask=mask[:, :end], past_key_values=cache, use_cache=True)
        made = model(input_ids=ids[:, begin:end], **options).logits
        out.append(made[mask[:, begin:end].bool()])
        begin = end
    return torch.cat(out)


def verdict(model_type: str, attention: str) -> str:
    """Compare a StrataCache that rounds nothing with DynamicCache: "equal", with the layers that it leaves plain, or
    "refused", with the reason. Raises AssertionError where logits differ or the model is not what it was."""
    model = tiny_model(model_type, attention)
    config = model.config

    def dynamic() -> torch.Tensor:
        return logits(model, DynamicCache(config=config))

    try:
        before = dynamic()
    except Exception as error:  # whatever a model says that knows no DynamicCache, or only one row
        pytest.skip(f"DynamicCache: {type(error).__name__}: {error}")
    if not torch.equal(dynamic(), before):
        pytest.skip("DynamicCache gives other logits each time")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that no layer is compressed
        try:
            cache = StrataCache(config, budget=1.0)
        except ValueError as error:
            assert torch.equal(dynamic(), before), "a StrataCache that was refused has changed the model"
            return f"refused: {error}"
        try:
            given = logits(model, cache)
        except NotImplementedError as error:
            if "softcap" not in str(error):
                raise
            return f"refused at the first token: {error}"  # sdpa ignores softcaps in old versions
    torch.testing.assert_close(given, before, atol=1e-4, rtol=1e-3)
    assert config._attn_implementation == attention
    assert torch.equal(dynamic(), before), "the model is not what it was for DynamicCache"
    return f"equal, {len(cache.plain_layers)} of {len(cache.layers)} layers plain"
