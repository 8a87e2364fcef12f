"""Reports of attention mass: the number of queries that reported, and the length of the request at that time.

    numbers   int32 [requests, layers, 2]   queries whose mass was reported, length at the last report
    state     int32 [2]                     decode steps observed so far; 1 once any page had two owners

Both are device tensors at fixed addresses without a copy on the host, because a captured decode step reports too
(`attention/decode/observe.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from kvstrata.cache.storage.transaction import Transaction

MOST = 2**30  # the count of queries saturates here


class Reports:
    """Counters of a cache, one pair for each request and layer."""

    def __init__(self, requests: int, layers: int, device: torch.device) -> None:
        self.numbers = torch.zeros(requests, layers, 2, dtype=torch.int32, device=device)
        self.state = torch.zeros(2, dtype=torch.int32, device=device)

    @property
    def nbytes(self) -> int:
        return self.numbers.nbytes + self.state.nbytes

    @property
    def steps(self) -> int:
        """Decode steps observed so far, which determine the layers that are observed next; waits for the device."""
        return int(self.state[0])

    def set_steps(self, steps: int) -> None:
        """Continue the rotation of a copied cache after ``steps`` observed steps."""
        self.state[0] = steps

    def at(self, requests: Sequence[int] | np.ndarray, layers: Sequence[int] | np.ndarray) -> np.ndarray:
        """Queries and lengths of pairs (request, layer): int64 ``[2, n]`` on the host; waits for the device."""
        return self.numbers.cpu().numpy()[list(requests), list(layers)].T.astype(np.int64)

    def add(self, change: Transaction, requests: Sequence[int], layer: int, queries: int, ends: Sequence[int]) -> None:
        """Count ``queries`` more for each request at these lengths, immediately; undone if the transaction fails."""
        of_layer = self.numbers[:, layer]
        if len(requests) == 1:  # a prompt: no upload
            self._add_one(change, of_layer[requests[0]], min(queries, MOST), ends[0])
            return
        rows, lengths = change.pool.to_device(np.array([list(requests), list(ends)], np.int64))
        before = of_layer[rows]
        counted = (before[:, 0].long() + min(queries, MOST)).clamp(max=MOST)
        change.undo(lambda: of_layer.__setitem__(rows, before))
        of_layer[rows] = torch.stack([counted, lengths], 1).int()

    def _add_one(self, change: Transaction, pair: torch.Tensor, queries: int, end: int) -> None:
        before = pair.clone()

        def restore() -> None:
            pair.copy_(before)

        change.undo(restore)
        pair[:1].clamp_(max=MOST - queries).add_(queries)
        pair[1:].fill_(end)
