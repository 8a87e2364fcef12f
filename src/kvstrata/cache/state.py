"""State of a cache, which its operations and policy read and change; `TieredCache` creates it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from kvstrata.checks import check_int, whole_numbers
from kvstrata.layout import Format

from .policy.budget import Budget
from .policy.calibrated import Calibrated
from .policy.plan import Policy
from .storage.page import PageFormat
from .storage.page_table import Buckets
from .storage.pool import Pool
from .storage.tokens import Tokens
from .storage.transaction import Transaction


class CacheState:
    """Sizes, pages, page tables and counters of a cache, with small queries about them."""

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
    position_dtype: torch.dtype
    page_formats: tuple[PageFormat, ...]
    formats: tuple[Format, ...]
    pool: Pool
    buckets: Buckets
    centre: torch.Tensor  # float32 [requests, layers, kv_heads, head_dim], of the model's K
    balance: torch.Tensor | None  # int8, the same shape: K is stored divided by 2 to the power
    budget: Budget
    policy: Policy
    _arguments: dict[str, Any]
    _lengths: np.ndarray  # [requests, layers]
    _device_lengths: torch.Tensor
    _queries: np.ndarray  # [requests, layers]: queries whose mass was reported
    _reported: np.ndarray  # [requests, layers]: length at the last report
    _centred: np.ndarray  # bool [requests, layers]
    _calibrated: Calibrated  # what requests begin with
    _active: set[int]
    _ahead_from: np.ndarray  # [requests]: the length from which `settle_ahead` is tried

    def _operation(self) -> Transaction:
        """A transaction after which the budget holds."""
        raise NotImplementedError

    @property
    def requests(self) -> tuple[int, ...]:
        """The requests in use, ascending."""
        return tuple(sorted(self._active))

    def length(self, request: int = 0, layer: int = 0) -> int:
        """Tokens of a request in a layer, evicted ones included; 0 if it is not in use. ValueError for a bad index."""
        self._check_layer(layer)
        check_int("request", request, 0, self.max_requests - 1)
        return int(self._lengths[request, layer])

    def _check_layer(self, layer: int) -> None:
        check_int("layer", layer, 0, self.layers - 1)

    def _check_request(self, request: int, name: str = "request") -> None:
        if not isinstance(request, (int, np.integer)) or request not in self._active:
            raise ValueError(f"{name}: expected one of {self.requests}, got {request!r}")

    def _given(self, requests: Sequence[int] | None) -> list[int]:
        if requests is None:
            return list(self.requests)
        given = whole_numbers("requests", requests)
        for request in given:
            self._check_request(request, "requests")
        if len(set(given)) != len(given):
            raise ValueError(f"requests: expected each once, got {given}")
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

    def _activate(self, change: Transaction, requests: Sequence[int]) -> None:
        before = self._active
        change.undo(lambda: setattr(self, "_active", before))
        self._active = before | set(requests)

    def _set_lengths(self, change: Transaction, requests: list[int], layer: int, lengths: np.ndarray) -> None:
        change.set(self._lengths, (requests, layer), lengths)
        if self.device.type != "cpu" and requests:
            where = self.pool.to_device(np.stack([np.array(requests), lengths]).astype(np.int64))
            index, values = where[0], where[1].to(self._device_lengths.dtype)
            of_layer = self._device_lengths[:, layer]
            change.launch(lambda: of_layer.__setitem__(index, values))
