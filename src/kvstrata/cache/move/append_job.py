"""Arguments of ``append_rows`` and ``write_rows``, common to all backends."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from kvstrata.cache.storage.page_table import Buckets


@dataclass(frozen=True)
class Job:
    """New rows of one layer; their pages are in the page table and have no other owner."""

    buckets: Buckets
    layer: int
    requests: np.ndarray  # int64 [R]
    lengths: np.ndarray  # int64 [R], new tokens of each
    position: np.ndarray  # int64 [R], position of the first new token
    count: np.ndarray  # int64 [R, H], plain tokens before the append
    k: torch.Tensor  # [T, H, D], inner stride 1
    v: torch.Tensor
    importance: np.ndarray  # float32 [R], for all new tokens of a request
    by_token: torch.Tensor | None  # float32 [T, H] contiguous, replaces `importance`
    device_length: torch.Tensor  # int32 [requests, layers]
    balance: torch.Tensor | None = None  # int8 exponents [requests, layers, H, D]: K is divided by 2 ** balance

    def rows(self) -> tuple[np.ndarray, np.ndarray]:
        """For every row: index of its request, and its index among that request's new rows."""
        index = np.repeat(np.arange(len(self.lengths)), self.lengths)
        first = np.cumsum(self.lengths) - self.lengths
        return index, np.arange(len(index)) - first[index]


@dataclass(frozen=True)
class Written:
    """Rows of one layer, each the last token of its request."""

    buckets: Buckets
    layer: int
    k: torch.Tensor  # [R, H, D], inner stride 1
    v: torch.Tensor
    requests: torch.Tensor | None  # int32 [R] on the device, negative for none; None: 0, 1, ..
    device_length: torch.Tensor  # int32 [requests, layers]
    reciprocal: bool  # importance starts as 1 / length, else as 0
    balance: torch.Tensor | None = None  # as in Job


def metadata(job: Job) -> np.ndarray:
    """int32, flat: [R, 8] request, position, first row, tokens, bits of importance; [R, H] counts; [T] index in R."""
    table = np.zeros((len(job.requests), 8), np.int32)
    table[:, 0], table[:, 1] = job.requests, job.position
    table[:, 2], table[:, 3] = np.cumsum(job.lengths) - job.lengths, job.lengths
    table[:, 4] = job.importance.astype(np.float32).view(np.int32)
    index = np.repeat(np.arange(len(job.lengths), dtype=np.int32), job.lengths)
    return np.concatenate([table.reshape(-1), job.count.reshape(-1).astype(np.int32), index])
