"""Balance and centre of K for each row of a layer with a sliding window.

    packed row = K / balance - centre         score = Q * balance · packed row + Q * balance · centre

A row's balance is from its first prompt, its centre from the tokens present when its first ones are packed; both are
fixed then. With a calibration they are the same for all rows. Packed operators take one of each for all requests, so
both are applied in front of them. Captured steps read both tensors, so their addresses do not change.
"""

from __future__ import annotations

import copy
from typing import Any

import torch

from kvstrata.cache.policy.centre import CENTRE_TOKENS, HORIZON, centre_of
from kvstrata.quant.calibration import LayerCalibration

from .owned import Copied

LARGEST = torch.finfo(torch.float16).max
VALUES = 1 << 22  # maximum number of values of K whose centres are computed at a time, in a dozen float32 copies


def picked(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """``x[rows]``, in place if the number of rows stays the same."""
    if len(rows) == len(x):
        return x.copy_(x[rows])
    with torch.inference_mode(False), torch.no_grad():
        return x.index_select(0, rows)


def check_sizes(given: LayerCalibration, kv_heads: int, dim: int) -> None:
    """Raise ValueError if a calibration is one of other sizes."""
    if given.shape not in (None, (kv_heads, dim)):
        raise ValueError(
            f"calibration: expected {kv_heads} KV heads and head_dim {dim} in layers with a sliding window,"
            f" got {given.shape}"
        )


class RowCalibration(Copied):
    """Balance and centre, float32 ``[rows, kv_heads, D]``; 1 and 0 until they are known."""

    def __init__(self, rows: int, kv_heads: int, dim: int, device: torch.device | str) -> None:
        with torch.inference_mode(False):  # calls outside inference mode write to them
            self.balance = torch.ones(rows, kv_heads, dim, dtype=torch.float32, device=device)
            self.centre = torch.zeros_like(self.balance)
        self.rope: list[float] = []
        self.interleaved: bool | None = None  # how RoPE pairs channels, see `centre_of`
        self.centres = True  # rows get a centre; not with a softcap, which applies to complete scores

    def adopt(self, given: LayerCalibration) -> None:
        """Take both from a calibration of the same sizes."""
        own = given.to(self.balance.device)
        if own.balance is not None:
            self.balance.copy_(own.balance)
        if own.centre is not None and self.centres:
            self.centre.copy_(own.centre)
        self.centres = False

    def fix_centres(self, rows: list[int], key: torch.Tensor, counts: list[int]) -> None:
        """Fix the centres of some rows from their tokens, right-aligned in ``key [all rows, kv_heads, n, D]``."""
        if not self.centres or not rows:
            return
        key = key[:, :, -CENTRE_TOKENS:]
        most, least, each = key.shape[2], min(counts), max(VALUES // key[0].numel(), 1)
        given = (torch.tensor(x, device="cpu").to(key.device, non_blocking=True).split(each) for x in (rows, counts))
        for index, tokens in zip(*given, strict=True):
            k = key.index_select(0, index).float() / self.balance.index_select(0, index).unsqueeze(2)
            column = torch.arange(most, device=k.device)
            if least < most:  # the first token of each row first: centres are means over the positions from there on
                first = (most - tokens).clamp(min=0).view(-1, 1, 1, 1)
                k = k.gather(2, ((column.view(-1, 1) + first) % most).expand_as(k))
            present = (column < tokens.view(-1, 1, 1)).unsqueeze(-1) & (k.abs() <= LARGEST)
            k, ahead = torch.where(present, k, 0.0), torch.full_like(tokens, HORIZON)
            centre = centre_of(k, present, self.rope, ahead, self.interleaved)
            self.centre.index_copy_(0, index, centre)

    def slice(self, rows: slice) -> RowCalibration:
        """Balance and centre of some rows, sharing memory."""
        part = copy.copy(self)
        with torch.inference_mode(False):
            part.balance, part.centre = self.balance[rows], self.centre[rows]
        return part

    def packed(self, key: torch.Tensor) -> torch.Tensor:
        """K ``[rows, kv_heads, n, D]`` as it is packed, in its dtype."""
        k = key.float() / self.balance.unsqueeze(2) - self.centre.unsqueeze(2)
        return (k.clamp(-LARGEST, LARGEST) if key.dtype == torch.float16 else k).to(key.dtype)

    def restored(self, key: torch.Tensor) -> torch.Tensor:
        """The inverse of `packed`: float32 ``[rows, kv_heads, n, D]``."""
        return (key + self.centre.unsqueeze(2)) * self.balance.unsqueeze(2)

    def of_query(self, q: torch.Tensor) -> torch.Tensor:
        """Queries ``[rows, heads, D]`` for packed rows, in their dtype."""
        return self._balanced(q).to(q.dtype).view_as(q)

    def centre_scores(self, q: torch.Tensor) -> torch.Tensor:
        """Products of balanced queries ``[rows, heads, D]`` with the centre, float32 ``[rows, heads]``."""
        return (self._balanced(q) * self.centre.unsqueeze(2)).sum(-1).flatten(1)

    def _balanced(self, q: torch.Tensor) -> torch.Tensor:
        """``[rows, kv_heads, group, D]``, float32."""
        return q.unflatten(1, (self.balance.shape[1], -1)) * self.balance.unsqueeze(2)

    def pick(self, rows: torch.Tensor) -> None:
        self.balance, self.centre = picked(self.balance, rows), picked(self.centre, rows)

    def tensors(self) -> dict[str, torch.Tensor]:
        return {"balance": self.balance, "centre": self.centre}

    def numbers(self) -> dict[str, Any]:
        return {"rope": self.rope, "interleaved": self.interleaved, "centres": self.centres}

    def restore(self, numbers: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        """Restore from `numbers` and `tensors`; raises KeyError or ValueError for anything else."""
        for name, x in self.tensors().items():
            if tensors[name].shape != x.shape:
                raise ValueError(f"window: expected {name} {tuple(x.shape)}, got {tuple(tensors[name].shape)}")
        self.balance.copy_(tensors["balance"])
        self.centre.copy_(tensors["centre"])
        self.rope, self.centres = numbers["rope"], numbers["centres"]
        self.interleaved = numbers.get("interleaved")
