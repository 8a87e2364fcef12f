"""kvstrata: the KV-cache layer of LLM inference.

A token's K and V are written once and read at every later step. The stages of that way, as far as they exist: `store`
writes rows into pages, `layout` says what the bytes mean, `cache` keeps tiers of them under a budget, `attention` reads
them. Beside it: `jit` turns CUDA C++ into callables, `bench` measures and proves.
"""

from .attention import DecodePlan, PagedCache, decode_attention
from .cache import TieredCache, dequantize, quantize
from .store import store_kv

__version__ = "0.1.0"
__all__ = [
    "DecodePlan",
    "PagedCache",
    "TieredCache",
    "__version__",
    "decode_attention",
    "dequantize",
    "quantize",
    "store_kv",
]
