"""K/V enters: rows into 16-bit or fp8 pages."""

from .op import store_kv
from .paged_cache import PagedCache

__all__ = ["PagedCache", "store_kv"]
