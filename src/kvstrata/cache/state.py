"""State of a cache, which its operations and policy read and modify; `TieredCache` creates it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch

from kvstrata.checks import check_int, whole_numbers
from kvstrata.layout import Format

from .policy.budget import Budget
from .policy.calibrated import Calibrated
from .policy.plan import Policy
from .policy.reports import Reports
from .storage.page import PageFormat
from .storage.page_table import Buckets
from .storage.pool import Pool
from .storage.request_list import Repeated
from .storage.tokens import Tokens
from .storage.transaction import Transaction


class Ahead(Protocol):
    """A plan that one `advance` made for the next; see policy/ahead.py."""

    valid: set[int]

    def forget(self, requests: Sequence[int]) -> None: ...

    def carry_out(self, change: Transaction, ids: np.ndarray, wanted: np.ndarray) -> np.ndarray: ...


class CacheState:
    """Sizes, pages, page tables and counters of a cache, with small accessors."""

    layers: int
    kv_heads: int
    head_dim: int
    recent_tokens: int
    sink_tokens: int
    max_requests: int
    max_tokens: int
    page_tokens: int
    dtype: torch.dtype
    device: torch.device
    decay: float
    debug: bool
    rope: tuple[float, ...]
    interleaved: bool | None  # how RoPE pairs channels, see `centre_of`
    position_dtype: torch.dtype
    page_formats: tuple[PageFormat, ...]
    formats: tuple[Format, ...]
    pool: Pool
    buckets: Buckets
    centre: torch.Tensor  # float32 [requests, layers, kv_heads, head_dim], in the space of the model's K
    direction: torch.Tensor | None  # int8, same shape, of quantised K: `quant.reference.aim`; None as ``balance``
    balance: torch.Tensor | None  # int8 exponents, same shape: stored K is divided by 2 ** balance
    budget: Budget
    policy: Policy
    _arguments: dict[str, Any]
    _lengths: np.ndarray  # [requests, layers]
    _device_lengths: torch.Tensor
    reports: Reports
    _centred: np.ndarray  # bool [requests, layers]
    _calibrated: Calibrated  # initial state of a request
    _active: frozenset[int]  # requests in use; the object changes only when they do
    _checked: tuple[list[int], frozenset[int]] = ([], frozenset())  # the last list of requests that was passed
    _everyone: tuple[list[int], frozenset[int]] = ([], frozenset())  # all requests in use, as last returned
    _repeated: Repeated | None = None  # the last append of one token per request
    _ahead_from: np.ndarray  # [requests]: length from which `settle_ahead` is tried
    _ahead: list[Ahead]  # plans for the next `advance`
    _due: tuple[np.ndarray, np.ndarray | None] | None  # requests of the last step, and what settles before the next
    _prompt: tuple[Any, Any] | None  # key and plan of the last prompt
    _last_prompt: Any = None  # last append of prompts without mass; see ops/append_prompt.py
    _decoded: Any = None  # last eager call; see attention/decode/repeat.py

    def _operation(self) -> Transaction:
        """Start a transaction, at the end of which the budget holds."""
        raise NotImplementedError

    @property
    def requests(self) -> tuple[int, ...]:
        """The requests in use, ascending."""
        return tuple(sorted(self._active))

    def length(self, request: int = 0, layer: int = 0) -> int:
        """Tokens of a request in a layer, including evicted ones; 0 if it is not in use. ValueError for a bad index."""
        self._check_layer(layer)
        check_int("request", request, 0, self.max_requests - 1)
        return int(self._lengths[request, layer])

    def _check_layer(self, layer: int) -> None:
        check_int("layer", layer, 0, self.layers - 1)

    def _check_request(self, request: int, name: str = "request") -> None:
        if isinstance(request, bool) or not isinstance(request, (int, np.integer)) or request not in self._active:
            raise ValueError(f"{name}: expected one of {self.requests}, got {request!r}")

    def _given(self, requests: Sequence[int] | None) -> list[int]:
        """Checked list of requests; None means all in use. Returns the same list object for equal lists."""
        if requests is None:
            everyone, distinct = self._everyone
            if distinct is not self._active:
                everyone = list(self.requests) if distinct != self._active else everyone
                self._everyone = (everyone, self._active)
            return everyone
        checked, distinct = self._checked
        if type(requests) is list and requests == checked and distinct <= self._active:  # same list as at the last step
            return checked
        given = whole_numbers("requests", requests)
        distinct = frozenset(given)
        if not distinct <= self._active:
            for request in given:
                self._check_request(request, "requests")
        if len(distinct) != len(given):
            raise ValueError(f"requests: expected each once, got {given}")
        self._checked = (given, distinct)
        return given

    def _unused_request(self) -> int:
        for request in range(self.max_requests):
            if request not in self._active:
                return request
        raise RuntimeError(f"max_requests: expected more than {self.max_requests}, all are in use")

    def _tokens(self, layer: int, request: int) -> Tokens:
        self._check_layer(layer)
        self._check_request(request)
        self.pool.note_stream()
        return self.buckets.snapshot(layer, [request])

    def _forget(self, requests: Sequence[int]) -> None:
        """Drop plans and pages made ahead for requests which an operation is about to change."""
        self._drop_plans(requests)
        self.buckets.ahead.give_back(requests)

    def _drop_plans(self, requests: Sequence[int]) -> None:
        """Drop the plans that were made ahead for requests.

        Under a budget in bytes a plan is for all requests, so any change drops it.
        """
        self._due = None
        if self.budget.shared and requests:
            self._ahead = []
        if self._ahead:
            for ahead in self._ahead:
                ahead.forget(requests)
            self._ahead = [ahead for ahead in self._ahead if ahead.valid]

    def _use(self, requests: Sequence[int]) -> None:
        """Put requests into use."""
        if not self._active.issuperset(requests):
            self._active = self._active.union(requests)

    def _activate(self, change: Transaction, requests: Sequence[int]) -> None:
        before = self._active
        change.undo(lambda: setattr(self, "_active", before))
        self._use(requests)

    def _set_length(self, change: Transaction, on_device: torch.Tensor, length: int) -> None:
        def run() -> None:
            on_device.fill_(length)

        change.launch(run)

    def _set_lengths(self, change: Transaction, requests: list[int], layer: int, lengths: np.ndarray) -> None:
        change.set(self._lengths, (requests, layer), lengths)
        if self.device.type == "cpu" or not requests:
            return
        if len(requests) == 1:  # no upload needed
            self._set_length(change, self._device_lengths[requests[0], layer], int(lengths[0]))
        else:
            where = self.pool.to_device(np.stack([np.array(requests), lengths]).astype(np.int64))
            index, values = where[0], where[1].to(self._device_lengths.dtype)
            of_layer = self._device_lengths[:, layer]
            change.launch(lambda: of_layer.__setitem__(index, values))
