"""What the bytes mean: formats, the order of codes in a page, scales, rotation."""

from .format import Format
from .rotation import hadamard, rotate

__all__ = ["Format", "hadamard", "rotate"]
