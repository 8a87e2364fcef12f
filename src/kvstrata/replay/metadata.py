"""Metadata of two attention backends into the buffers of a captured graph, with one launch in place of six or eight.

``KVSTRATA_FUSED_COPY=0`` takes the plain ``.copy_`` calls instead, for comparison; it is read when the package is
imported.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch

from .plan import CopyPlan

FUSED = os.environ.get("KVSTRATA_FUSED_COPY", "1") != "0"
REMEMBERED = 64
_plans: OrderedDict[tuple[int, ...], CopyPlan] = OrderedDict()


def _plan_of(dst: Sequence[torch.Tensor]) -> CopyPlan:
    """The plan of these very tensors; it keeps them alive, so that their ids stay theirs."""
    key = tuple(map(id, dst))
    plan = _plans.get(key)
    if plan is None or any(a.data_ptr() != at for a, at in zip(plan.dst, plan.addresses, strict=True)):
        plan = _plans[key] = CopyPlan(dst)
        if len(_plans) > REMEMBERED:
            _plans.popitem(last=False)
    return plan


def _corner(dst: torch.Tensor, src: torch.Tensor) -> torch.Tensor:
    return dst[tuple(slice(0, n) for n in src.shape)]


def _copy(dst: Sequence[torch.Tensor], src: Sequence[torch.Tensor], fused: bool) -> None:
    if fused:
        _plan_of(dst).run(src)
    else:
        for a, b in zip(dst, src, strict=True):
            _corner(a, b).copy_(b)


def fused_copy_replay_data(
    *,
    src_input_ids: torch.Tensor,
    src_out_loc: torch.Tensor,
    src_cu_seqlens_k: torch.Tensor,
    src_positions: torch.Tensor,
    src_seq_lens: torch.Tensor,
    src_page_table: torch.Tensor,
    dst_input_ids: torch.Tensor,
    dst_out_loc: torch.Tensor,
    dst_cu_seqlens_k: torch.Tensor,
    dst_positions: torch.Tensor,
    dst_seq_lens: torch.Tensor,
    dst_page_table: torch.Tensor,
    batch_size: int,
    max_seqlen_k: int,
    fused: bool | None = None,
) -> None:
    """Copy a decode step's metadata into a captured graph's buffers, in one launch.

    Of the sources the first ``batch_size`` elements count (``batch_size + 1`` of ``src_cu_seqlens_k``) and of the page
    table the first ``max_seqlen_k`` columns; buffers may be larger and keep what is behind. Dtypes of a pair are equal.
    The ``dst`` tensors are mutated; a plan is kept for the very tensor objects. Raises ValueError or TypeError for what
    does not fit. Safe under graph capture. ``fused=False`` (or ``KVSTRATA_FUSED_COPY=0``) makes six ``.copy_`` calls.

    Example:
        >>> names = ["input_ids", "out_loc", "cu_seqlens_k", "positions", "seq_lens"]
        >>> src = {f"src_{name}": torch.arange(3, dtype=torch.int32) for name in names}
        >>> dst = {f"dst_{name}": torch.zeros(9, dtype=torch.int32) for name in names}
        >>> tables = dict(src_page_table=torch.ones(2, 5).int(), dst_page_table=torch.zeros(8, 16).int())
        >>> fused_copy_replay_data(**src, **dst, **tables, batch_size=2, max_seqlen_k=5)
        >>> dst["dst_cu_seqlens_k"][:4].tolist(), dst["dst_input_ids"][:4].tolist()
        ([0, 1, 2, 0], [0, 1, 0, 0])
    """
    dst = (dst_input_ids, dst_out_loc, dst_cu_seqlens_k, dst_positions, dst_seq_lens, dst_page_table)
    given = (src_input_ids, src_out_loc, src_cu_seqlens_k, src_positions, src_seq_lens, src_page_table)
    rows = (batch_size, batch_size, batch_size + 1, batch_size, batch_size, batch_size)
    src = [t if t.shape[0] == n else _rows(t, n, i) for i, (t, n) in enumerate(zip(given, rows, strict=True))]
    if src_page_table.shape[1] != max_seqlen_k:
        if src_page_table.shape[1] < max_seqlen_k:
            raise ValueError(f"max_seqlen_k: expected at most {src_page_table.shape[1]} columns, got {max_seqlen_k}")
        src[5] = src[5][:, :max_seqlen_k]
    _copy(dst, src, FUSED if fused is None else fused)


NAMES = ("input_ids", "out_loc", "cu_seqlens_k", "positions", "seq_lens", "page_table")


def _rows(tensor: torch.Tensor, rows: int, i: int) -> torch.Tensor:
    if tensor.shape[0] < rows or rows < 0:
        raise ValueError(f"src_{NAMES[i]}: expected at least {rows} rows for the batch, got shape {list(tensor.shape)}")
    return tensor[:rows]


@dataclass
class PrecomputedMetadata:
    """Metadata of sparse (NSA-style) decode attention: a step's, or the larger buffers of a captured graph.

    ``buffers.copy_from(step)`` takes the place of six to eight ``.copy_`` calls. Optional fields are None where a model
    or mode has none; a step may leave out what the buffers have (they keep it), but may not bring what they lack.
    """

    cache_seqlens: torch.Tensor  # [batch]
    cu_seqlens_k: torch.Tensor  # [batch + 1]; the leading 0 is not copied
    page_indices: torch.Tensor  # [batch, columns]
    nsa_cache_seqlens: torch.Tensor  # [batch]
    nsa_cu_seqlens_k: torch.Tensor  # [batch + 1]; the leading 0 is not copied
    seqlens_expanded: torch.Tensor | None = None  # [tokens]
    real_page_table: torch.Tensor | None = None  # [rows, columns]
    flashmla_metadata: torch.Tensor | None = None

    def copy_from(self, step: PrecomputedMetadata, fused: bool | None = None) -> None:
        """Copy a step's metadata into these buffers, in one launch; ``fused=False`` makes one ``.copy_`` a field.

        Raises ValueError or TypeError for what does not fit. Safe under graph capture, where the addresses of ``step``
        become part of the graph.
        """
        mine, theirs = [], []
        for field in fields(self):
            a, b = getattr(self, field.name), getattr(step, field.name)
            if b is None:
                continue
            if a is None:
                raise ValueError(
                    f"{field.name}: expected None as in the buffers, got a tensor of shape {list(b.shape)}"
                )
            if field.name in OFFSETS:
                a, b = self._past_zero(field.name, a), b[1:]
            mine.append(a)
            theirs.append(b)
        _copy(mine, theirs, FUSED if fused is None else fused)

    def _past_zero(self, name: str, buffer: torch.Tensor) -> torch.Tensor:
        """``buffer[1:]`` as one object, since plans are known by their tensors."""
        kept: dict[str, tuple[torch.Tensor, torch.Tensor]] = self.__dict__.setdefault("_offsets", {})
        if name not in kept or kept[name][0] is not buffer:
            kept[name] = (buffer, buffer[1:])
        return kept[name][1]


OFFSETS = ("cu_seqlens_k", "nsa_cu_seqlens_k")
