"""Attention: decode over all tiers of a cache or over an engine's blocks, prefill over rows and tiers."""

from .cache_warmup import warmup
from .decode.op import decode_attention
from .decode.plan import DecodePlan
from .output import AttentionOutput
from .packed_decode.op import decode_packed
from .packed_prefill.op import prefill_packed
from .packed_warmup import warmup_packed
from .prefill.op import prefill_attention
from .prefill_cached.op import prefill_attention_cached

__all__ = [
    "AttentionOutput",
    "DecodePlan",
    "decode_attention",
    "decode_packed",
    "prefill_attention",
    "prefill_attention_cached",
    "prefill_packed",
    "warmup",
    "warmup_packed",
]
