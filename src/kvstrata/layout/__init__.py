"""Byte order of pages in Python, numba, Triton and CUDA C++: formats, codes, scales, rotation."""

from .format import Format
from .rotation import hadamard, rotate

__all__ = ["Format", "hadamard", "rotate"]
