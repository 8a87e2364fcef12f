"""Observation: a few layers of every decode step add the mass of their tokens to importance, in place.

    update            advances a step counter on the device and sets weights for the layers that are observed
    decode_attention  a layer with weights runs a second pass over K and adds mass to the pages; others skip it

Layers are observed in rotation, so the queries of one step represent all queries since the layer was last observed:
a request whose length grew by w tokens gives each token its mass times the number of these w queries that could see
it, and w queries are reported. That preserves the rule by which importance is estimated
(cache/policy/importance.py): of the queries reported at length n, a token at position p was seen by min(queries, n
- p).

A page that several requests share gets mass from the first live row that has it, on behalf of all of them. So every
entry has one writer, and results do not depend on timing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvstrata.cache.policy.mass import observe_mass
from kvstrata.cache.policy.reports import MOST
from kvstrata.cache.tiered_cache import TieredCache
from kvstrata.checks import check_int


def check_live(live: torch.Tensor | None, rows: int, device: torch.device) -> None:
    """Check the rows of a step; ValueError or TypeError unless None or int32 ``[rows]`` on the device."""
    if live is None:
        return
    if not isinstance(live, torch.Tensor) or live.dtype != torch.int32:
        kind = live.dtype if isinstance(live, torch.Tensor) else type(live).__name__
        raise TypeError(f"requests: expected an int32 tensor or None, got {kind}")
    if live.shape != (rows,) or live.device != device or not live.is_contiguous():
        raise ValueError(
            f"requests: expected [{rows}], contiguous, on {device}, got {tuple(live.shape)} on {live.device}"
        )


class Observation:
    """Rotation of layers and weights of rows, on the device.

    ``weights`` int32 ``[layers, rows + 1]``: number of queries that each row represents in this step, 0 for a row
    without mass; the last entry is 1 if any row of the layer has mass.
    """

    def __init__(self, cache: TieredCache, requests: Sequence[int], heads: int, q_len: int, layers: int) -> None:
        if len(set(requests)) != len(requests):
            raise ValueError(f"requests: expected each once in a plan that observes, got {tuple(requests)}")
        self.cache, self.rows, self.q_len, self.layers = cache, len(requests), q_len, layers
        self.turns = -(-cache.layers // layers)
        self.most = self.turns * q_len  # limit for a request that was never observed
        with torch.inference_mode(False):
            self.requests = torch.tensor(list(requests), dtype=torch.int32, device=cache.device)
            self.weights = torch.zeros(cache.layers, self.rows + 1, dtype=torch.int32, device=cache.device)
            self.lse = torch.zeros(self.rows, q_len, heads, dtype=torch.float32, device=cache.device)
        self._host = self.weights.numpy() if self.weights.device.type == "cpu" else None
        self.live: torch.Tensor | None = None  # the rows of the step, kept alive for graphs that read them

    @property
    def nbytes(self) -> int:
        """Bytes of scratch on the device."""
        return self.requests.nbytes + self.weights.nbytes + self.lse.nbytes

    def set_live(self, live: torch.Tensor | None) -> None:
        """Set the rows of the coming step, which `check_live` has accepted."""
        self.live = live

    def begin(self) -> None:
        """Compute the weights of the next step in torch, without synchronising; observe.cu does the same."""
        reports, rows = self.cache.reports, self.requests.long()
        turn = reports.state[0] % self.turns
        due = torch.arange(self.cache.layers, device=rows.device) // self.layers == turn
        lengths, numbers = self.cache._device_lengths[rows], reports.numbers[rows]
        weight = (lengths - numbers[:, :, 1]).clamp(0, self.most) * due
        if self.live is not None:
            weight *= (self.live == self.requests).unsqueeze(1)
        self.weights[:, :-1] = weight.T
        self.weights[:, -1] = weight.any(0)
        queries = (numbers[:, :, 0] + weight).clamp(max=MOST)
        reports.numbers[rows] = torch.stack([queries, torch.where(weight > 0, lengths, numbers[:, :, 1])], 2)
        reports.state[0] += 1

    def due(self, layer: int) -> bool:
        """True if a row of the layer gives mass in this step; waits for the device."""
        if self._host is not None:
            return bool(self._host[layer, -1])
        return bool(self.weights[layer, -1])

    def add(self, layer: int, requests: Sequence[int], mass: torch.Tensor) -> None:
        """Add ``mass [rows, kv_heads, positions]`` of this step to the importance in the pages, in torch."""
        observe_mass(self.cache, layer, requests, mass, self.weights[layer, :-1], self.q_len)


def observation_of(
    cache: TieredCache, requests: Sequence[int], heads: int, q_len: int, layers: int
) -> Observation | None:
    """Observation of ``layers`` layers per step; None if there are none, or if the cache keeps no importance."""
    check_int("observe", layers, 0)
    if layers == 0 or cache.policy.name != "importance":
        return None
    return Observation(cache, requests, heads, q_len, min(layers, cache.layers))
