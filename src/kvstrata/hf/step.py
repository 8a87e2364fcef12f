"""One decode step of a Llama-style transformers model over a `TieredCache`, to be captured as an engine's graph."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from kvstrata.attention import DecodePlan, decode_attention

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

    from kvstrata.cache import TieredCache


@torch.no_grad()
def decode_step(
    model: LlamaForCausalLM,
    cache: TieredCache,
    plan: DecodePlan,
    ids: torch.Tensor,
    positions: torch.Tensor,
    requests: torch.Tensor,
) -> torch.Tensor:
    """Write one token per row into the cache, attend, and return the most likely next tokens, int32 ``[rows]``.

    Args:
        model: a transformers Llama; its weights are used, its cache and attention are not.
        cache: already advanced by one token for every live row (`TieredCache.advance`). Mutated.
        plan: a `DecodePlan` for the cache and the model's query heads, with as many rows as ``ids``. One that observes
            adds attention mass to the importance of tokens.
        ids, positions: int32 ``[rows]``, tokens and their positions.
        requests: int32 ``[rows]``, the request of each row in the cache; negative for padding, which writes nothing.

    Safe under graph capture; `examples/engine.py` captures it with a `GraphRunner`.
    """
    plan.update(requests)
    inner, dim = model.model, cache.head_dim
    x = inner.embed_tokens(ids)
    cos, sin = inner.rotary_emb(x, positions.unsqueeze(1))
    for number, layer in enumerate(inner.layers):
        own, h = layer.self_attn, layer.input_layernorm(x)
        q, k, v = (p(h).unflatten(-1, (-1, 1, dim)) for p in (own.q_proj, own.k_proj, own.v_proj))
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        cache.write(number, k.squeeze(2), v.squeeze(2), requests)
        out = decode_attention(q.squeeze(2).unsqueeze(1), cache, number, plan=plan)
        assert isinstance(out, torch.Tensor)
        x = x + own.o_proj(out.flatten(1))
        x = x + layer.mlp(layer.post_attention_layernorm(x))
    return model.lm_head(inner.norm(x)).argmax(-1).int()
