"""Tiered KV cache: pages of several formats under a byte budget."""

from .policy.budget import BudgetExceeded, Memory
from .storage.views import BucketedCacheLayer
from .tiered_cache import TieredCache

__all__ = ["BucketedCacheLayer", "BudgetExceeded", "Memory", "TieredCache"]
