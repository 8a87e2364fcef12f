"""K/V enters: rows into 16-bit or fp8 pages."""

from .op import store_kv

__all__ = ["store_kv"]
