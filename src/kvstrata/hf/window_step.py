"""One decode step of a layer with a sliding window: a new token in every row, operators only.

    roll     the new row of K and V goes to the 16-bit tail; the oldest one there is balanced and centred
    store    that row goes to its slot in the packed pages
    decode   attention over the packed pages, with its log-sum-exp
    merge    attention over the tail, combined with that of the pages and the attention sinks

All that changes from step to step is in `StepSlots`, which the host fills before the first layer. Compiled and captured
forwards contain the operator ``kvstrata::strata_window``, which looks up its layer like ``strata_decode`` (steps.py).
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from kvstrata.attention import decode_packed
from kvstrata.backends import missing
from kvstrata.layout import Format
from kvstrata.store import store_packed

from .logits import Logits
from .steps import TAGS, Steps, running
from .window_counts import LEAVING_SLOT, LENGTH, PACKED_LEN, PAGE_SLOT, StepSlots
from .window_rows import LARGEST, RowCalibration


class WindowStorage(Protocol):
    """The part of a window layer that a step uses."""

    format: Format
    pages: torch.Tensor  # uint8 [rows * ring_blocks, kv_heads, page_bytes]
    table: torch.Tensor  # int32 [rows, 2 * ring_blocks]
    tail_k: torch.Tensor  # [rows, kv_heads, tail + 1, D], position p at p % (tail + 1)
    tail_v: torch.Tensor
    calibration: RowCalibration


@torch.no_grad()
def store(
    layer: WindowStorage, slots: StepSlots, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> torch.Tensor:
    """Store a token of every row; returns its queries for packed rows, ``[rows, heads, D]``.

    Shapes as in `strata_window`; ``layer`` is mutated.
    """
    q, old_k, old_v = _backend(query.device).roll(layer, slots.device[: LEAVING_SLOT + 1], query, key, value)
    store_packed(old_k, old_v, layer.pages, slots.device[PAGE_SLOT], layer.format)
    return q


@torch.no_grad()
def read(
    layer: WindowStorage, slots: StepSlots, query: torch.Tensor, packed_query: torch.Tensor, logits: Logits
) -> torch.Tensor:
    """Attention output ``[rows, 1, heads, D]`` after `store`; ``packed_query``: what it returned."""
    packed = decode_packed(
        packed_query, layer.pages, layer.table, slots.device[PACKED_LEN], layer.format, scale=logits.scale,
        sliding_window=slots.geometry.window - slots.geometry.tail, softcap=logits.softcap, return_lse=True,
    )  # fmt: skip
    assert not isinstance(packed, torch.Tensor)
    assert packed.lse is not None
    merge = _backend(query.device).merge
    return merge(layer, slots.device[LENGTH], query, packed.out, packed.lse, logits)


def _backend(device: torch.device) -> Any:
    """Triton kernels on a GPU, torch elsewhere."""
    if device.type != "cuda" or missing("triton", device):
        return _Reference
    from . import window_triton

    return window_triton


class _Reference:
    """`roll` and `merge` in torch, float32."""

    @staticmethod
    def roll(
        layer: WindowStorage, slots: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries for packed rows ``[rows, heads, D]``, and K and V ``[rows, kv_heads, D]`` that leave the tail."""
        dtype = layer.tail_k.dtype
        index, leaving = (x.long().view(-1, 1, 1, 1).expand_as(layer.tail_k[:, :, :1]) for x in slots)
        old_k, old_v = (x.gather(2, leaving) for x in (layer.tail_k, layer.tail_v))
        for tail, x in ((layer.tail_k, key), (layer.tail_v, value)):
            tail.scatter_(2, index, in_dtype(x, dtype))
        q = layer.calibration.of_query(query[:, :, 0].to(dtype))
        return q, layer.calibration.packed(old_k)[:, :, 0], old_v[:, :, 0]

    @staticmethod
    def merge(
        layer: WindowStorage, length: torch.Tensor, query: torch.Tensor, packed: torch.Tensor, lse: torch.Tensor,
        logits: Logits,
    ) -> torch.Tensor:  # fmt: skip
        """Output ``[rows, 1, heads, D]`` of tail, pages and sinks."""
        rows, kv_heads, slots, dim = layer.tail_k.shape
        q = query[:, :, 0].to(layer.tail_k.dtype).float()
        scores = q.view(rows, kv_heads, -1, dim) @ layer.tail_k.float().transpose(-1, -2) * logits.scale
        if logits.softcap is not None:
            scores = (scores / logits.softcap).tanh() * logits.softcap
        length = length.view(-1, 1, 1, 1)
        age = (length - 1 - torch.arange(slots, device=q.device)) % slots
        hidden = age >= length.clamp(max=slots - 1)
        scores = scores.masked_fill(hidden, -torch.inf)
        own = scores.logsumexp(-1, keepdim=True)
        out = ((scores - own).exp() @ layer.tail_v.float()).reshape(rows, -1, dim)
        parts = [out, packed.float()]
        tops = [own.reshape(rows, -1), lse + layer.calibration.centre_scores(q) * logits.scale]
        if logits.sinks is not None:
            parts.append(torch.zeros_like(out))
            tops.append(logits.sinks.detach().float().expand_as(lse))
        weights = torch.stack(tops).softmax(0).unsqueeze(-1)
        return (weights * torch.stack(parts)).sum(0).unsqueeze(1).to(query.dtype)


def in_dtype(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``x [rows, kv_heads, n, D]`` in the dtype of a tail, where values that overflow float16 become the largest."""
    if dtype == torch.float16 != x.dtype:
        x = x.clamp(-LARGEST, LARGEST)
    return x.to(dtype)


_library = torch.library.Library("kvstrata", "FRAGMENT")
_library.define(
    "strata_window(Tensor query, Tensor key, Tensor value, Tensor(a!) state, int layer, float scale, float? softcap,"
    " Tensor? sinks) -> Tensor",
    tags=TAGS,
)


def _operator(query: Any, key: Any, value: Any, state: Any, layer: int, scale: float, softcap: Any,
              sinks: Any) -> torch.Tensor:  # fmt: skip
    return running("strata_window").windows[layer].decode(query, key, value, Logits(scale, softcap, sinks))


_library.impl("strata_window", _operator, "CompositeExplicitAutograd")


@torch.library.register_fake("kvstrata::strata_window", lib=_library)
def _fake(query: Any, key: Any, value: Any, state: Any, layer: int, scale: float, softcap: Any,
          sinks: Any) -> torch.Tensor:  # fmt: skip
    rows, heads, queries, dim = query.shape
    return query.new_empty(rows, queries, heads, dim)


def strata_window(
    steps: Steps, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, logits: Logits
) -> torch.Tensor:
    """`strata_decode` of a layer with a sliding window, the ``layer``-th of them: ``[rows, 1, heads, D]``."""
    return torch.ops.kvstrata.strata_window(
        query, key, value, steps.state, layer, logits.scale, logits.softcap, logits.sinks
    )
