"""A list of requests that is passed at every step, and values derived from it once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch

ONE = np.ones((), np.int32)  # avoids a conversion by numpy
FEW = 4  # lists with fewer than 1 / FEW of all requests are indexed, longer ones are added as a mask


class RequestList:
    """Requests as an array, and the fastest way to increment their rows."""

    def __init__(self, requests: Sequence[int], max_requests: int) -> None:
        self.ids = np.array(requests, np.int64)
        n, first = len(self.ids), int(self.ids.min(initial=max_requests))
        self.launch: Callable[[], None] | None = None  # increments on the device
        ascending = n > 0 and bool((np.diff(self.ids) == 1).all())
        self.where = slice(first, first + n) if ascending else self.ids  # index of the rows, in the order of the list
        self._run = slice(first, first + n) if int(self.ids.max(initial=-1)) - first + 1 == n else None
        self._ones = np.zeros(max_requests, np.int32)
        self._ones[self.ids] = 1
        self._few = n * FEW < max_requests

    def rows(self, x: np.ndarray) -> np.ndarray | None:
        """View of these rows, in any order, if they are contiguous; else None."""
        return None if self._run is None else x[self._run]

    def add_one(self, x: np.ndarray) -> None:
        """Add one to all elements of these rows."""
        if self._run is not None:
            rows = x[self._run]
            np.add(rows, ONE, rows)
        elif self._few:
            x[self.ids] += 1
        else:
            np.add(x, self._ones.reshape(-1, *[1] * (x.ndim - 1)), out=x)


class AppendLaunch(Protocol):
    """A launch that appends a token of each request to a layer; False if the addresses do not allow it."""

    def fits(self, k: torch.Tensor, v: torch.Tensor) -> bool: ...

    def __call__(self, layer: int, k: torch.Tensor, v: torch.Tensor, stream: int | None = None) -> bool: ...


@dataclass
class Room:
    """Number of tokens that a layer takes before its pages or lengths have to be checked again.

    Invalid at another version of the buckets, or after requests were added or freed.
    """

    version: int
    active: frozenset[int]
    tokens: int
    counts: np.ndarray | None  # views of the layer's counts of plain tokens and lengths, if requests are contiguous
    lengths: np.ndarray | None


@dataclass(frozen=True)
class Repeated:
    """Arguments of an append of one token per request, and values derived from them."""

    requests: list[int] | None
    seq_lens: list[int] | None
    distinct: frozenset[int]
    listed: RequestList
    guard: Callable[..., bool]  # True for k and v of the same type, shape and strides
    launch: AppendLaunch | None  # None: not in CUDA C++
    rooms: dict[int, Room] = field(default_factory=dict)  # by layer
