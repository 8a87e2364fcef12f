"""kvstrata for transformers: `model.generate(..., past_key_values=StrataCache(model.config, budget=0.25))`."""

try:
    import transformers  # noqa: F401
except ImportError as error:
    raise ImportError("kvstrata.hf needs transformers 5.17 or newer: pip install 'kvstrata[hf]'") from error

from .cache import StrataCache

__all__ = ["StrataCache"]
