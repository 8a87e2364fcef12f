"""K/V rests: tiers of lower precision, buckets of pages under a budget."""

from .quantize_reference import Packed, dequantize, quantize

__all__ = ["Packed", "dequantize", "quantize"]
