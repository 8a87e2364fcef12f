"""Attention mass of prompt queries on the CPU: products by torch, scores to weights in compiled loops.

A row of scores stays in a core's cache throughout, and columns after a query are skipped. Torch's softmax over all
heads would pass through memory four times.
"""

from __future__ import annotations

import math
import threading
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvstrata.attention.softmax_numba import exponentials, greatest, hide, soften
from kvstrata.loops import fast
from kvstrata.threads import share_out

if TYPE_CHECKING:
    from .logits import Logits

SCORES = 1 << 18  # scores of a chunk of queries of one KV head, per thread: 1 MiB, the size of an L2 cache
KEPT = 1 << 22  # numbers of scratch memory that a thread keeps, at most: 16 MiB


def add_mass(
    query: torch.Tensor,
    key: torch.Tensor,
    columns: torch.Tensor,
    query_position: torch.Tensor,
    column_position: torch.Tensor,
    weight: torch.Tensor,
    logits: Logits,
    mass: torch.Tensor,
) -> None:
    """Add the mass that the queries of one KV head give to its columns.

    Args:
        query: ``[queries, D]``, of all heads of the group: head 0, 1, ..., and again from 0; the newest first.
        key: ``[columns, D]``.
        columns: int64 ``[queries]``, the column of each query; neither it nor later queries in the list see more.
        query_position: int64 ``[queries]``; a query sees the positions up to its own.
        column_position: int64 ``[columns]``, -1 for a column without a token; empty if queries see all columns up to
            their own.
        weight: float32 ``[queries]``, number of queries that each represents.
        logits: how scores become logits; sinks ``[group]``.
        mass: float32 ``[columns]``. Mutated.
    """
    queries = len(query)
    # Transpose K once: a product with few queries would transpose it each time.
    threads = torch.get_num_threads()
    most = min(SCORES * threads, queries * len(key))  # many cores share few scores
    channels, space = _scratch(key.numel(), max(most, len(key)))
    channels = channels.view(key.shape[::-1]).copy_(key.T)
    q = query.float().mul(logits.scale)
    by = torch.empty(queries, dtype=torch.float32, device="cpu")
    own, place, positions, weights, factors = (
        x.numpy() for x in (columns, query_position, column_position, weight, by)
    )
    sinks = np.empty(0, np.float32) if logits.sinks is None else logits.sinks.detach().float().contiguous().numpy()
    softcap, begin = np.float32(logits.softcap or 0.0), 0
    while begin < queries:
        end = int(own[begin]) + 1
        part = slice(begin, min(begin + max(SCORES * threads // end, 1), queries))
        count = part.stop - part.start
        scores = space[: count * end].view(-1, end)
        torch.mm(q[part], channels[:, :end], out=scores)
        arguments = (scores.numpy(), own[part], place[part], positions, weights[part], softcap, sinks, begin)
        share_out(_weigh, (*arguments, factors[part]), count, threads)
        mass[:end].addmv_(scores.T, by[part])
        begin = part.stop


class _Scratch(threading.local):
    """Memory of the previous call of a thread. New memory would cost a page fault per 4 KiB, in every layer."""

    kept: torch.Tensor | None = None


_own = _Scratch()


def _scratch(*sizes: int) -> tuple[torch.Tensor, ...]:
    """Float32 tensors of these sizes, valid until the next call by this thread; kept up to `KEPT` numbers in all."""
    kept, total = _own.kept, sum(sizes)
    if kept is None or len(kept) < total:
        with torch.inference_mode(False):  # a later call may be outside of it
            kept = torch.empty(total, dtype=torch.float32, device="cpu")
        _own.kept = kept if total <= KEPT else None
    return kept[:total].split(list(sizes))


@fast
def _weigh(scores, columns, query_position, column_position, weight, softcap, sinks, offset, by, first, last):
    """Convert rows ``first`` to ``last`` of scores to weights up to a factor, which goes into ``by``.

    Row 0 is query ``offset`` of the list.
    """
    for row in range(first, last):
        end = scores.shape[1] if len(column_position) else columns[row] + 1
        own = scores[row, :end]
        scores[row, end:] = 0
        if weight[row] == 0:
            own[:] = 0
            by[row] = 0
            continue
        if softcap > 0:
            soften(own, softcap)
        if len(column_position):
            hide(own, column_position, query_position[row], -1)
        sink = sinks[(offset + row) % len(sinks)] if len(sinks) else np.float32(-np.inf)
        top = max(greatest(own), sink)
        total = exponentials(own, top)
        if len(sinks):
            total += np.float32(math.exp(sink - top))
        by[row] = weight[row] / total if total != 0 else np.float32(0)
