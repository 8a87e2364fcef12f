"""kvstrata: the KV-cache layer of LLM inference.

A token's K and V are written once and read at every later step. The stages of that way, as far as they exist: `store`
writes rows into pages, `layout` says what the bytes mean, `cache` keeps tiers of them under a budget, `attention` reads
them, `replay` feeds a step's metadata to a captured graph. Beside it: `jit` turns CUDA C++ into callables, `bench`
measures and proves.
"""

from .attention import DecodePlan, PagedCache, decode_attention, prefill_attention, prefill_attention_cached
from .cache import TieredCache, dequantize, quantize
from .replay import CopyPlan, GraphRunner, fused_copy_replay_data
from .store import store_kv

__version__ = "0.1.0"
__all__ = [
    "CopyPlan",
    "DecodePlan",
    "GraphRunner",
    "PagedCache",
    "TieredCache",
    "__version__",
    "decode_attention",
    "dequantize",
    "fused_copy_replay_data",
    "prefill_attention",
    "prefill_attention_cached",
    "quantize",
    "store_kv",
]
