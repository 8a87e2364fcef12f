"""K and V are read: decode attention over every tier of a cache or over plain pages, prefill over rows and tiers."""

from .cached import prefill_attention_cached
from .op import decode_attention
from .paged import PagedCache
from .plan import DecodePlan
from .prefill import prefill_attention

__all__ = ["DecodePlan", "PagedCache", "decode_attention", "prefill_attention", "prefill_attention_cached"]
