"""K/V rests: tiers of lower precision, buckets of pages under a budget."""

from .policy.budget import BudgetExceeded, Memory
from .storage.views import BucketedCacheLayer
from .tiered_cache import TieredCache

__all__ = ["BucketedCacheLayer", "BudgetExceeded", "Memory", "TieredCache"]
