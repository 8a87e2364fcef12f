"""Metadata of two attention backends copied into the buffers of a captured graph, in one launch.

``fused=False`` or ``KVSTRATA_FUSED_COPY=0`` issues one ``.copy_`` per buffer instead, for comparison. Both use a
``CopyPlan`` and differ only in its backend, so checks and errors are the same.
"""

from __future__ import annotations

import operator
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch

from .copies import Names, shape
from .plan import CopyPlan, check_buffers
from .switch import backend_of

REMEMBERED = 64
_plans: OrderedDict[tuple[int | str, ...], CopyPlan] = OrderedDict()


def _plan_of(dst: Sequence[torch.Tensor], names: Sequence[Names], backend: str) -> CopyPlan:
    """Plan for these tensor objects; it keeps them alive, so that their ids cannot be reused."""
    key: tuple[int | str, ...] = (backend, *map(id, dst))
    plan = _plans.get(key)
    if plan is None or any(
        buffer.data_ptr() != address for buffer, address in zip(plan.dst, plan.addresses, strict=True)
    ):
        check_buffers(dst, names)
        plan = _plans[key] = CopyPlan(dst, backend=backend)
        plan.names = list(names)
        if len(_plans) > REMEMBERED:
            _plans.popitem(last=False)
    return plan


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

    Args:
        src_input_ids, src_out_loc, src_positions, src_seq_lens: ``[at least batch_size]``; the first ``batch_size``
            elements are copied.
        src_cu_seqlens_k: ``[at least batch_size + 1]``; the first ``batch_size + 1`` elements are copied.
        src_page_table: ``[at least batch_size, at least max_seqlen_k]``; that corner is copied.
        dst_input_ids, dst_out_loc, dst_cu_seqlens_k, dst_positions, dst_seq_lens, dst_page_table: buffers of the
            dtype and device of their sources, at least as large as what is copied. Mutated; the rest keeps its values.
        batch_size: rows of the step.
        max_seqlen_k: columns of the page table to copy.
        fused: False issues six ``.copy_`` calls instead, with the same checks; None is True unless the environment has
            ``KVSTRATA_FUSED_COPY=0``.

    Safe under graph capture after one call with the same tensors: the first call compiles. A captured call reads the
    same source addresses at every replay. Plans are kept for up to 64 sets of buffers and keep them alive.

    Raises ValueError or TypeError, naming the argument, before anything is written: for shapes, dtypes or devices that
    do not fit, buffers that overlap, and counts that are negative or not ints.

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
    batch, columns = _count(batch_size, "batch_size"), _count(max_seqlen_k, "max_seqlen_k")
    src = [_rows(t, batch + (i == OFFSETS_AT), i) for i, t in enumerate(given)]
    if (width := src_page_table.shape[1]) != columns:
        if width < columns:
            raise ValueError(f"max_seqlen_k: expected at most {width} columns, got {columns}")
        src[TABLE_AT] = src[TABLE_AT][:, :columns]
    _plan_of(dst, FA_NAMES, backend_of(fused)).run(src)


NAMES = ("input_ids", "out_loc", "cu_seqlens_k", "positions", "seq_lens", "page_table")
FA_NAMES = [Names(f"src_{name}", f"dst_{name}") for name in NAMES]
OFFSETS_AT, TABLE_AT = NAMES.index("cu_seqlens_k"), NAMES.index("page_table")


def _count(value: int, name: str) -> int:
    try:
        count = operator.index(value)
    except TypeError:
        raise TypeError(f"{name}: expected an int, got {type(value).__name__}") from None
    if count < 0:
        raise ValueError(f"{name}: expected at least 0, got {count}")
    return count


def _rows(tensor: torch.Tensor, rows: int, i: int) -> torch.Tensor:
    """The first ``rows`` rows of source ``i``."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"src_{NAMES[i]}: expected a tensor, got {type(tensor).__name__}")
    size, dims = tensor.shape, 2 if i == TABLE_AT else 1
    if len(size) != dims:
        wanted = "2 dimensions [batch, columns]" if dims == 2 else "1 dimension"
        raise ValueError(f"src_{NAMES[i]}: expected {wanted}, got shape {shape(tensor)}")
    if size[0] < rows:
        raise ValueError(f"src_{NAMES[i]}: expected at least {rows} rows for the batch, got shape {shape(tensor)}")
    return tensor if size[0] == rows else tensor[:rows]


@dataclass
class PrecomputedMetadata:
    """Metadata of sparse (NSA-style) decode attention: a step's, or the larger buffers of a captured graph.

    ``cache_seqlens`` and ``nsa_cache_seqlens`` are ``[batch]``, their offsets ``cu_seqlens_k`` and ``nsa_cu_seqlens_k``
    ``[batch + 1]``, ``page_indices`` is ``[batch, columns]``. ``seqlens_expanded`` ``[tokens]``, ``real_page_table``
    ``[rows, columns]`` and ``flashmla_metadata`` (up to three dimensions) are None if a model or mode has none.
    ``buffers.copy_from(step)`` replaces five to eight ``.copy_`` calls. A field that is None in the step leaves its
    buffer as it is; a field that is None in the buffers must be None in the step.

    Example:
        >>> from kvstrata.replay import PrecomputedMetadata
        >>> def metadata(rows, value):
        ...     lens, offsets = torch.full((rows,), value), torch.full((rows + 1,), value)
        ...     return PrecomputedMetadata(lens, offsets, torch.full((rows, 3), value), lens.clone(), offsets.clone())
        >>> buffers = metadata(rows=4, value=0)
        >>> buffers.copy_from(metadata(rows=2, value=7))
        >>> buffers.cache_seqlens.tolist(), buffers.cu_seqlens_k.tolist()
        ([7, 7, 0, 0], [0, 7, 7, 0, 0])
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
        """Copy a step's metadata into these buffers, in place, in one launch.

        Args:
            step: fields of at most the buffers' shapes, in their dtypes.
            fused: False issues one ``.copy_`` per field instead; None is True unless the environment has
                ``KVSTRATA_FUSED_COPY=0``.

        Safe under graph capture after one call with the same tensors: the first call compiles. A captured call reads
        the addresses of ``step`` at every replay. Raises ValueError or TypeError, naming the field, before anything is
        written.
        """
        if not isinstance(step, PrecomputedMetadata):
            raise TypeError(f"step: expected a PrecomputedMetadata, got {type(step).__name__}")
        names, targets, sources = [], [], []
        for field in fields(self):
            name, target, source = field.name, getattr(self, field.name), getattr(step, field.name)
            if source is None:
                continue
            if not isinstance(source, torch.Tensor):
                raise TypeError(f"{name}: expected a tensor or None, got {type(source).__name__}")
            if target is None:
                raise ValueError(f"{name}: expected None as in the buffers, got a tensor of shape {shape(source)}")
            if name in OFFSETS:
                target, source = self._without_zero(name, target), _offsets(source, NSA_NAMES[name].source)[1:]
            names.append(NSA_NAMES[name])
            targets.append(target)
            sources.append(source)
        _plan_of(targets, names, backend_of(fused)).run(sources)

    def _without_zero(self, name: str, buffer: torch.Tensor) -> torch.Tensor:
        """``buffer[1:]`` as one object, since plans are keyed by their tensor objects."""
        kept: dict[str, tuple[torch.Tensor, torch.Tensor]] = self.__dict__.setdefault("_offsets", {})
        if name not in kept or kept[name][0] is not buffer:
            kept[name] = (buffer, _offsets(buffer, NSA_NAMES[name].target)[1:])
        return kept[name][1]


def _offsets(tensor: torch.Tensor, name: str) -> torch.Tensor:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name}: expected a tensor, got {type(tensor).__name__}")
    if tensor.dim() != 1:
        raise ValueError(f"{name}: expected 1 dimension [batch + 1], got shape {shape(tensor)}")
    return tensor


OFFSETS = ("cu_seqlens_k", "nsa_cu_seqlens_k")
NSA_NAMES = {field.name: Names(field.name, f"{field.name} of the buffers") for field in fields(PrecomputedMetadata)}
