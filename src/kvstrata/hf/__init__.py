"""kvstrata for transformers: `model.generate(..., past_key_values=StrataCache(model.config, budget=0.25))`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .cache import StrataCache

__all__ = ["StrataCache"]


def __getattr__(name: str) -> Any:
    """Import `StrataCache` lazily: transformers takes seconds to import, and is optional."""
    if name != "StrataCache":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from .cache import StrataCache
    except ImportError as error:
        raise ImportError("kvstrata.hf needs transformers 5.17 or newer: pip install 'kvstrata[hf]'") from error
    return StrataCache
