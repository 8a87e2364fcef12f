"""K and V are read: decode attention over every tier of a cache, or over plain pages."""

from .op import decode_attention
from .paged import PagedCache
from .plan import DecodePlan

__all__ = ["DecodePlan", "PagedCache", "decode_attention"]
