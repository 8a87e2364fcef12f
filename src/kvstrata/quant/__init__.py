"""Quantisation of K and V rows to codes and back: reference, Triton and CUDA."""

from .reference import Packed, dequantize, quantize

__all__ = ["Packed", "dequantize", "quantize"]
