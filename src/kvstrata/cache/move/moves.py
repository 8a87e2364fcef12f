"""Turns targets into moves: which token goes from which slot to which, as vector operations on the tokens' device.

A token that leaves a bucket makes a hole; the tokens past the bucket's new end fill the holes, the i-th the i-th, and
arrivals follow them. A bucket is one tier of a head cache, ``head_cache * tiers + tier``. To allocate and release pages
the host needs three numbers per bucket (`Change.to_host`), however many tokens there are.

A move may write where another one reads. Such moves form chains: each writes where the previous one has read, the
first where no move reads. There are no cycles, since a move goes to a later tier or, within its tier, to an earlier
slot; and no branches, since a slot has one token before and one after. Processing each chain in order, and different
chains in any order, has the same result as making all reads first.

This is the reference, and the path of the CPU and of Triton; CUDA C++ computes the same moves in moves.cu, by phases.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from kvstrata.cache.storage.tokens import DROP, Tokens

# Columns of packed moves (apply.pack): source, destination, row of the centres, next move of the chain, whether it is
# the first of a chain, position and importance. A source tier of -1 is a new row, whose slot is the row's index.
COLUMNS = ("source", "source_slot", "source_tier", "to", "slot", "tier", "centre", "after", "head", "position",
           "importance", "unused")  # fmt: skip


def _add(buckets: int, index: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Number of chosen tokens in each bucket; does not synchronise."""
    index = torch.where(chosen, index, buckets)
    return torch.zeros(buckets + 1, dtype=torch.int64, device=index.device).index_add_(0, index, chosen.long())[:-1]


def pick(chosen: torch.Tensor, n: int) -> torch.Tensor:
    """Indices of the ``n`` chosen, ascending; does not synchronise."""
    if chosen.device.type == "cpu":
        return chosen.nonzero().flatten()
    place = torch.where(chosen, chosen.cumsum(0) - 1, n)
    every = torch.arange(len(chosen), device=chosen.device)
    return torch.empty(n + 1, dtype=torch.int64, device=chosen.device).scatter_(0, place, every)[:n]


@dataclass(frozen=True)
class Change:
    """Per bucket ``[buckets]``, int64: tokens before, tokens that leave, tokens that arrive, holes that are filled."""

    tiers: int
    before: torch.Tensor
    left: torch.Tensor
    came: torch.Tensor
    holes: torch.Tensor
    is_hole: torch.Tensor = field(repr=False)  # [n], per token
    is_filler: torch.Tensor = field(repr=False)
    arrives: torch.Tensor = field(repr=False)

    @property
    def kept(self) -> torch.Tensor:
        return self.before - self.left

    @property
    def count(self) -> torch.Tensor:
        return self.kept + self.came

    def to_host(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """``left, came, holes`` on the host: the only synchronisation with the device."""
        left, came, holes = torch.stack([self.left, self.came, self.holes]).cpu().numpy()
        return left, came, holes


def change(tokens: Tokens, target: torch.Tensor, before: torch.Tensor, tiers: int) -> Change:
    """Tokens that leave and enter each bucket with these targets (`DROP` evicts); ``before`` are the current counts."""
    stored = tokens.tier >= 0
    bucket = torch.where(stored, tokens.head_cache * tiers + tokens.tier, 0)
    moves = tokens.tier != target
    arrives = moves & (target != DROP)
    leaves = stored & moves
    left = _add(len(before), bucket, leaves)
    past = tokens.slot >= (before - left)[bucket]
    is_hole = leaves & ~past
    came = _add(len(before), tokens.head_cache * tiers + target.clamp(min=0), arrives)
    return Change(
        tiers, before, left, came, _add(len(before), bucket, is_hole), is_hole, stored & ~moves & past, arrives
    )


@dataclass(frozen=True)
class Moves:
    """``n`` moves, arrivals by bucket and slot, then fillers; int64 unless noted."""

    token: torch.Tensor  # flat index of the token
    bucket: torch.Tensor  # destination bucket
    slot: torch.Tensor  # slot in the destination bucket
    after: torch.Tensor  # the move that writes where this one reads, or -1
    head: torch.Tensor  # bool: this move writes where none reads

    def __len__(self) -> int:
        return len(self.token)


def plan(change: Change, tokens: Tokens, target: torch.Tensor, arrivals: int, fillers: int) -> Moves:
    """The moves of a change, given their number.

    The stored tokens of a bucket must be contiguous, by slot, and complete.
    """
    tiers, device = change.tiers, tokens.head_cache.device
    coming = pick(change.arrives, arrivals)
    bucket = tokens.head_cache[coming] * tiers + target[coming]
    bucket, order = torch.sort(bucket, stable=True)
    coming = coming[order]
    first = change.came.cumsum(0) - change.came
    slot = change.kept[bucket] + torch.arange(arrivals, device=device) - first[bucket]
    filler, hole = pick(change.is_filler, fillers), pick(change.is_hole, fillers)
    token = torch.cat([coming, filler])
    bucket = torch.cat([bucket, tokens.head_cache[filler] * tiers + tokens.tier[filler]])
    slot = torch.cat([slot, tokens.slot[hole]])

    # The token in the destination slot, if that one moves too.
    n, buckets = len(tokens), len(change.before)
    stored = torch.where(tokens.tier >= 0, tokens.head_cache * tiers + tokens.tier, buckets)
    every = torch.arange(n, device=device)
    start = torch.full((buckets + 1,), n, device=device).scatter_reduce_(0, stored, every, "amin")
    number = torch.arange(len(token), device=device)
    move_of = torch.full((n + 1,), -1, device=device).scatter_(0, token, number)
    occupant = torch.where(slot < change.before[bucket], start[bucket] + slot, n)
    ahead = move_of[occupant]
    head = ahead < 0
    after = torch.full((len(token) + 1,), -1, device=device)
    after.scatter_(0, torch.where(head, len(token), ahead), number)
    return Moves(token, bucket, slot, after[:-1], head)
