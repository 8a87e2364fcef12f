"""The attention function that transformers calls, and the mask beside it.

A model looks its attention up by a name in its config. `install` puts our name there, with the name it had before as
its ending ("kvstrata_sdpa"): what is not ours, that is plain tensors of any other cache or of a layer that is not
compressed, goes on to that function with the mask it expects, so the model is what it was for everyone else.

    update(k, v) ──▶ Pending ──▶ attend ──▶ the layer: prompt or decode step
                      tensors ──────┴─────▶ sdpa / eager, as before
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from transformers import AttentionInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface, causal_mask_function

from .mass import Logits

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from .layer import StrataLayer

PREFIX = "kvstrata_"
BASES = ("sdpa", "eager")  # the mask is a tensor [rows, 1, queries, columns]
REFUSED = ("position_bias", "cu_seq_lens_q", "cu_seq_lens_k", "block_table")
Attend = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]
# query, key, value, mask -> output: the model's own attention, everything else bound
Under = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]


class Pending:
    """New rows of K or V on their way from `update` to `attend`: not a tensor, and says so when it is taken for one."""

    __slots__ = ("layer", "rows")

    def __init__(self, layer: StrataLayer, rows: torch.Tensor) -> None:
        self.layer, self.rows = layer, rows

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(
            "past_key_values: expected a model whose attention is kvstrata's, got one that reads K and V as tensors"
            f" (.{name}); make the cache with the model's own config, StrataCache(model.config), after"
            " set_attn_implementation"
        )


def install(config: PreTrainedConfig) -> str:
    """Make a text model's config name our attention; returns the name of the attention under it."""
    name = config._attn_implementation or "eager"
    base = name.removeprefix(PREFIX)
    if base not in BASES:
        raise ValueError(
            f'config: expected a model with attention "sdpa" or "eager", got {base!r};'
            ' model.set_attn_implementation("sdpa") changes it'
        )
    # Only this config: those of a vision tower, say, have no cache.
    config._attn_implementation_internal = PREFIX + base
    return base


def base_attention(base: str, module: torch.nn.Module) -> Attend:
    """What the model calls without us."""
    if base == "eager":
        return getattr(sys.modules[type(module).__module__], "eager_attention_forward")  # noqa: B009
    return AttentionInterface._global_mapping[base]


def _check(base: str, mask: torch.Tensor | None, options: dict[str, Any]) -> None:
    """What a compressed layer cannot do is an error, not a wrong answer."""
    if mask is not None and not hasattr(mask, "kvstrata_causal"):
        raise NotImplementedError("attention_mask: expected padding, [rows, columns], got a mask of another kind")
    for name in REFUSED:
        if options.get(name) is not None:
            raise NotImplementedError(f"{name}: expected None with a StrataCache, got {type(options[name])}")
    if options.get("is_causal") is False or options.get("sliding_window") is not None:
        raise NotImplementedError("is_causal, sliding_window: expected causal attention to all tokens")
    if options.get("dropout") or options.get("output_attentions"):
        raise NotImplementedError(
            "dropout, output_attentions: expected neither with a StrataCache; model.eval() turns dropout off, and the"
            " weights of packed tokens are not returned"
        )
    if base == "sdpa" and (options.get("softcap") is not None or options.get("s_aux") is not None):
        raise NotImplementedError(
            'softcap, s_aux: expected None with sdpa, which ignores them; model.set_attn_implementation("eager")'
        )


def _attend_over(base: str) -> Attend:
    @torch.compiler.disable
    def attend(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor | Pending,
        value: torch.Tensor | Pending,
        attention_mask: torch.Tensor | None,
        **options: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        own = base_attention(base, module)
        if not isinstance(key, Pending):
            return own(module, query, key, value, attention_mask, **options)
        assert isinstance(value, Pending)
        _check(base, attention_mask, options)

        def under(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
            return own(module, q, k, v, mask, **options)[0]

        scale = options.get("scaling") or query.shape[-1] ** -0.5
        logits = Logits(scale, options.get("softcap"), options.get("s_aux"))
        return key.layer.attend(query, key.rows, value.rows, attention_mask, under, logits), None

    return attend


def _mask_over(base: str) -> Callable[..., torch.Tensor | None]:
    @torch.compiler.disable
    def mask(*args: Any, **options: Any) -> torch.Tensor | None:
        made = ALL_MASK_ATTENTION_FUNCTIONS[base](*args, **options)
        if made is not None and options.get("mask_function", causal_mask_function) is causal_mask_function:
            made.kvstrata_causal = True  # nothing but causal order and padding
        return made

    return mask


for _base in BASES:
    AttentionInterface.register(PREFIX + _base, _attend_over(_base))
    AttentionMaskInterface.register(PREFIX + _base, _mask_over(_base))
