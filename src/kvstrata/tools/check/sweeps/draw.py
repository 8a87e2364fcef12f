"""Random source of the sweeps: choices and tensors from one seed, and the tolerances."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch

T = TypeVar("T")

POISON = 0xFF
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
DIMS = (32, 48, 64, 80, 128)
# Relative error that a complete output may have: products in the dtype, K and V rounded to it when they are gathered.
CLOSE = {torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: 1e-2}
# Relative error that a Gaussian row of at least 32 values may have by bits; typical errors are half as large.
WORST = {16: 0.0, 32: 0.0, 8: 0.02, 4: 0.3, 3: 0.5, 2: 0.75}
AGAIN = 1.5  # factor for a row that was quantised before, to more bits


class Unsupported(Exception):
    """The backend does not support such a call; this is not a failure."""


@contextmanager
def unsupported_errors(kind: type[Exception], *words: str) -> Iterator[None]:
    """Turn an error of this kind whose message contains one of these words into `Refused`."""
    try:
        yield
    except kind as error:
        if any(word in str(error) for word in words):
            raise Unsupported(str(error).removeprefix("backend: ")) from error
        raise


class Draw:
    """Random choices and tensors of one seed; tensors are created on the CPU, so that they are the same everywhere."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self.random = random.Random(str(seed))  # a string is hashed: small numbers would give similar first choices
        self.generator = torch.Generator().manual_seed(seed)
        self.device = device

    def one(self, *options: T) -> T:
        return self.random.choice(options)

    def size(self, low: int, high: int) -> int:
        """Random integer from `low` to `high`, both included."""
        return self.random.randint(low, high)

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator)

    def order(self, n: int) -> torch.Tensor:
        return torch.randperm(n, generator=self.generator)

    def integers(self, high: int, *shape: int) -> torch.Tensor:
        """Random integers in [0, `high`)."""
        return torch.randint(0, high, shape, generator=self.generator)
