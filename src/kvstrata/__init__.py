"""kvstrata: the KV-cache layer of LLM inference.

K and V of a token are written once and read at every later step. `store` writes rows into blocks, `layout` defines the
bytes of a page, `quant` converts rows to codes and back, `cache` keeps tokens in tiers under a byte budget, `attention`
reads them, and `replay` feeds a step's metadata to a captured graph. `jit` compiles CUDA C++, `hf` connects to
transformers, and `tools` holds the commands (bench, tune, check, profile, eval).

Names are imported at first use, because importing torch takes seconds and `kvstrata --help` does not need it. A program
that only uses `torch.ops.kvstrata` imports `kvstrata.store` and `kvstrata.attention`, which register the ops.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .attention import (
        AttentionOutput,
        DecodePlan,
        decode_attention,
        decode_packed,
        prefill_attention,
        prefill_attention_cached,
        prefill_packed,
        warmup,
        warmup_packed,
    )
    from .cache import BudgetExceeded, TieredCache
    from .layout import Format
    from .quant import dequantize, quantize
    from .replay import CopyPlan, GraphRunner
    from .store import PagedCache, PlainRows, copy_pages, store_kv, store_packed

__version__ = "0.1.0"
__all__ = [
    "AttentionOutput",
    "BudgetExceeded",
    "CopyPlan",
    "DecodePlan",
    "Format",
    "GraphRunner",
    "PagedCache",
    "PlainRows",
    "TieredCache",
    "__version__",
    "copy_pages",
    "decode_attention",
    "decode_packed",
    "dequantize",
    "prefill_attention",
    "prefill_attention_cached",
    "prefill_packed",
    "quantize",
    "store_kv",
    "store_packed",
    "warmup",
    "warmup_packed",
]

_STAGES = {
    "attention": (
        "AttentionOutput",
        "DecodePlan",
        "decode_attention",
        "decode_packed",
        "prefill_attention",
        "prefill_attention_cached",
        "prefill_packed",
        "warmup",
        "warmup_packed",
    ),
    "cache": ("BudgetExceeded", "TieredCache"),
    "jit": (),
    "layout": ("Format",),
    "quant": ("dequantize", "quantize"),
    "replay": ("CopyPlan", "GraphRunner"),
    "store": ("PagedCache", "PlainRows", "copy_pages", "store_kv", "store_packed"),
}
_STAGE_OF = {name: stage for stage, names in _STAGES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Import a public name or a subpackage at first use."""
    if name in _STAGES:
        return importlib.import_module(f".{name}", __name__)
    if name not in _STAGE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_STAGE_OF[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_STAGES})
