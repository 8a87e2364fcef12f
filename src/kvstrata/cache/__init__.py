"""K/V rests: tiers of lower precision, buckets of pages under a budget."""

from .budget import BudgetExceeded, Memory
from .cache import TieredCache
from .quantize_reference import Packed, dequantize, quantize
from .views import BucketedCacheLayer

__all__ = ["BucketedCacheLayer", "BudgetExceeded", "Memory", "Packed", "TieredCache", "dequantize", "quantize"]
