"""Operations on whole requests of a cache: add, fork, reorder, crop, free, save and load."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from typing import Any

from kvstrata.checks import check_int, whole_numbers

from .ops.crop import crop_request
from .ops.fork import assign
from .state import CacheState


class RequestOperations(CacheState):
    """The part of `TieredCache` that adds, removes, copies and shares requests."""

    def add_request(self) -> int:
        """Put an unused request into use, empty, and return its number; RuntimeError if all are in use."""
        request = self._unused_request()
        self._use([request])
        return request

    def fork(self, request: int) -> int:
        """Copy a request to an unused one, sharing every page until either changes it (copy on write); return the copy.

        Raises ValueError for a request that is not in use, RuntimeError if all ``max_requests`` are in use.
        """
        self._check_request(request)
        copy = self._unused_request()
        assign(self, {copy: request}, [])
        return copy

    def reorder(self, indices: Sequence[int], requests: Sequence[int] | None = None) -> None:
        """Reorder beams: ``requests[i]`` becomes what ``requests[indices[i]]`` was; pages are shared, not copied.

        ``requests`` None is all in use, ascending. Raises ValueError or TypeError, naming the argument.
        """
        given = self._given(requests)
        chosen = whole_numbers("indices", indices)
        if len(chosen) != len(given):
            raise ValueError(f"indices: expected {len(given)}, one per request, got {len(chosen)}")
        for index in chosen:
            check_int("indices", index, 0, len(given) - 1)
        assign(self, {given[i]: given[index] for i, index in enumerate(chosen)}, [])

    def select(self, indices: Sequence[int]) -> None:
        """Make requests 0, 1, ... what requests ``indices[0]``, ``indices[1]``, ... were, and free all others.

        Raises ValueError or TypeError for an index that is not in use, or for more than ``max_requests`` of them.
        """
        chosen = whole_numbers("indices", indices)
        for request in chosen:
            self._check_request(request, "indices")
        if len(chosen) > self.max_requests:
            raise ValueError(f"indices: expected at most {self.max_requests}, got {len(chosen)}")
        assign(self, dict(enumerate(chosen)), [r for r in self.requests if r >= len(chosen)])

    def crop(self, request: int, length: int) -> None:
        """Drop all tokens at positions >= ``length``, in every layer and tier (speculative rollback).

        Quantised tokens stay quantised. The budget shrinks with the length, so this may settle or raise BudgetExceeded.
        Raises ValueError for a request that is not in use or a negative length.
        """
        self._check_request(request)
        check_int("length", length, 0)
        crop_request(self, request, length)

    def free_request(self, request: int) -> None:
        """Free a request and the pages that no fork shares. Raises ValueError if it is not in use."""
        self._check_request(request)
        assign(self, {}, [request])

    def save(self, path: str | PathLike[str], request: int = 0) -> None:
        """Save a request as safetensors: packed pages, tables, centres and the cache's parameters.

        Raises ValueError for a request that is not in use, FileNotFoundError for a folder that does not exist.
        """
        from .ops.files import save

        self._check_request(request)
        save(self, path, request)

    def load(self, path: str | PathLike[str]) -> int:
        """Load a request that a cache with the same parameters saved into an unused request; returns its number.

        Raises ValueError for any other file, BudgetExceeded or RuntimeError if there is no room for it.
        """
        from .ops.files import load

        return load(self, path)

    def __deepcopy__(self, memo: dict[int, Any]) -> RequestOperations:
        """Independent cache with the same requests. Pages that forks shared are duplicated, so under a budget in bytes
        they may not fit (BudgetExceeded), or be demoted or evicted."""
        from .ops.clone import clone

        memo[id(self)] = copy = clone(self)
        return copy

    def __reduce__(self) -> tuple[Any, ...]:
        """Arguments and contents, for pickle, torch.save and copy.copy (which makes an independent cache)."""
        from .ops.clone import parts, restored

        return restored, (type(self), self._arguments, parts(self), self.reports.steps)
