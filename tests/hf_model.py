"""Tiny random models of the families that `kvstrata.hf` knows, and decode attention the plain way."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
)

from kvstrata import AttentionOutput

SIZES = dict(
    vocab_size=128,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=1024,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=None,
)
FAMILIES = {
    "llama": lambda: LlamaConfig(**SIZES, head_dim=32),
    "llama-mha": lambda: LlamaConfig(**SIZES | dict(num_key_value_heads=4), head_dim=32),
    "llama-mqa": lambda: LlamaConfig(**SIZES | dict(num_key_value_heads=1), head_dim=48),
    "mistral": lambda: MistralConfig(**SIZES, head_dim=32, sliding_window=None),
    "qwen2": lambda: Qwen2Config(**SIZES | dict(hidden_size=128)),
    "qwen2-mixed": lambda: Qwen2Config(
        **SIZES | dict(hidden_size=128), use_sliding_window=True, sliding_window=16, max_window_layers=1
    ),
    "qwen3": lambda: Qwen3Config(**SIZES, head_dim=32),
    "gemma2": lambda: Gemma2Config(
        **SIZES, head_dim=32, sliding_window=16, query_pre_attn_scalar=24, attn_logit_softcapping=2.0
    ),
    "gemma3": lambda: Gemma3TextConfig(
        **SIZES,
        head_dim=32,
        sliding_window=16,
        query_pre_attn_scalar=24,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "phi3": lambda: Phi3Config(**SIZES | dict(hidden_size=128)),
    "gpt-oss": lambda: GptOssConfig(
        **SIZES,
        head_dim=32,
        num_local_experts=2,
        num_experts_per_tok=1,
        sliding_window=16,
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters=dict(rope_type="default", rope_theta=10000.0),
    ),
}
SMALL = dict(budget=0.5, page_tokens=16, recent_tokens=16, sink_tokens=2)  # settles within a hundred tokens
EXACT = dict(SMALL, dtype=torch.float32)


def sharpen(model: Any) -> Any:
    """Scale the weights of a new model, so that its attention is not nearly uniform."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4.0 if parameter.dim() > 1 else 1.0)
            if parameter.dim() == 1 and not parameter.any():
                parameter.normal_()
    return model


def scaled(model: torch.nn.Module, largest: float = 30.0) -> torch.nn.Module:
    """Scale each RoPE pair of K by s and of Q by 1 / s, s from 1 / largest to largest: the function is unchanged."""
    other = copy.deepcopy(model)
    config = other.config
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    generator = torch.Generator().manual_seed(4)
    for layer in other.model.layers:
        power = torch.rand(kv_heads, dim // 2, generator=generator) * 2 - 1
        s = torch.tensor(largest).pow(power).repeat(1, 2)
        by_q = s.repeat_interleave(heads // kv_heads, 0).flatten()
        for linear, by in ((layer.self_attn.k_proj, s.flatten()), (layer.self_attn.q_proj, 1 / by_q)):
            linear.weight.data *= by.unsqueeze(1)
            if linear.bias is not None:
                linear.bias.data *= by
    return other


def make(name: str, seed: int = 0):
    torch.manual_seed(seed)
    config = FAMILIES[name]()
    eager = name in ("gemma2", "gpt-oss")  # softcap and sinks
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager" if eager else "sdpa").eval()
    return sharpen(model)


def prompt(rows: int, columns: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(2, 128, (rows, columns), generator=torch.Generator().manual_seed(seed))


def greedy(model, ids: torch.Tensor, cache=None, new: int = 24, **options) -> torch.Tensor:
    return model.generate(ids, past_key_values=cache, max_new_tokens=new, do_sample=False, **options)


def dequantising(q, cache, layer=0, *, scale, softcap=None, sinks=None, return_mass=False, plan=None):
    """`decode_attention` the plain way: everything read back, then an ordinary softmax."""
    rows, queries, heads, _ = q.shape
    group = heads // cache.kv_heads
    out = torch.empty_like(q)
    mass = torch.zeros(rows, cache.kv_heads, max(cache.length(r, layer) for r in range(rows)))
    for row in range(rows):
        k, v, position = cache.gather(layer, row)
        own = q[row].float().unflatten(1, (cache.kv_heads, group))
        scores = torch.einsum("qhgd,hnd->hgqn", own, k.float()) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        last = cache.length(row, layer) - queries + torch.arange(queries)
        hidden = (position[:, None, None] > last[:, None]) | (position[:, None, None] < 0)
        scores = scores.masked_fill(hidden, -torch.inf)
        if sinks is not None:
            sink = sinks.detach().float().view(cache.kv_heads, group, 1, 1).expand(-1, -1, queries, 1)
            scores = torch.cat([scores, sink], -1)
        weights = scores.softmax(-1)[..., : k.shape[1]]
        out[row] = torch.einsum("hgqn,hnd->qhgd", weights, v.float()).flatten(1, 2).to(q.dtype)
        mass[row].scatter_add_(1, position.clamp(min=0), weights.sum((1, 2)))
    if plan is not None and plan.observation is not None and plan.observation.due(layer):
        plan.observation.add(layer, range(rows), mass)
    return AttentionOutput(out, mass=mass) if return_mass else out
