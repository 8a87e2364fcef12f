"""K and V are read: decode attention over every tier of a cache or over plain pages, prefill over rows and tiers."""

from .decode.op import decode_attention
from .decode.plan import DecodePlan
from .output import AttentionOutput
from .prefill.op import prefill_attention
from .prefill_cached.op import prefill_attention_cached

__all__ = [
    "AttentionOutput",
    "DecodePlan",
    "decode_attention",
    "prefill_attention",
    "prefill_attention_cached",
]
