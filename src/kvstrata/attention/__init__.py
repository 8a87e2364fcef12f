"""K and V are read: decode attention over every tier of a cache, or over plain pages."""

from .op import decode_attention
from .paged import PagedCache

__all__ = ["PagedCache", "decode_attention"]
