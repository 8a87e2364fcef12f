"""Writing K and V: rows into 16-bit or fp8 blocks, or quantised into packed pages."""

from .op import store_kv
from .packed.copy import copy_pages
from .packed.op import store_packed
from .packed.plain_rows import PlainRows
from .paged_cache import PagedCache

__all__ = ["PagedCache", "PlainRows", "copy_pages", "store_kv", "store_packed"]
