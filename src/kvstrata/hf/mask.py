"""Masks: which columns are tokens, and what a query sees.

A compressed layer supports causal order and padding. Everything is computed from positions, a chunk of queries at a
time, because the whole mask of a prompt is quadratic in its length.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch

QUERIES = 256  # queries of a prompt that share a mask
GPU_VALUES = 1 << 24  # on a GPU, maximum number of values of a mask that are checked at a time


class LastMask:
    """The mask that was checked last, held weakly, and what was found; copies and pickles drop both."""

    def __init__(self) -> None:
        self._mask: weakref.ref[torch.Tensor] | None = None
        self.found: Any = None

    def __reduce__(self) -> tuple[Any, ...]:
        return LastMask, ()

    def holds(self, mask: torch.Tensor) -> bool:
        return self._mask is not None and self._mask() is mask

    def set(self, mask: torch.Tensor, found: Any = None) -> None:
        self._mask, self.found = weakref.ref(mask), found


def check_shape(mask: torch.Tensor, queries: int, columns: int) -> None:
    """Raise NotImplementedError unless a mask has a value for each query and column."""
    if mask.dim() != 4 or mask.shape[2:] != (queries, columns):
        raise NotImplementedError(
            f"attention_mask: expected {queries} queries and {columns} columns with a StrataCache, got"
            f" {tuple(mask.shape)}"
        )


def new_tokens(mask: torch.Tensor, queries: int) -> torch.Tensor:
    """Token mask of the new columns, bool ``[rows or 1, queries]``: a token sees itself, padding does not."""
    own = mask[:, 0, -queries:, -queries:].diagonal(dim1=1, dim2=2)
    return own if own.dtype == torch.bool else own == 0


def check_causal(mask: torch.Tensor, real: torch.Tensor, queries: int, sliding_window: int | None = None) -> None:
    """Raise NotImplementedError unless a mask is causal order, padding and, if given, a sliding window.

    Args:
        mask: ``[rows or 1, heads or 1, queries, columns]``, True or 0 where a query sees a column.
        real: bool ``[rows, columns]``, False for padding. Rows of padding queries are not checked.
        queries: number of queries, which are the last columns.
    """
    columns = real.shape[1]
    column = torch.arange(columns, device=mask.device)
    wrong = torch.zeros((), dtype=torch.bool, device=mask.device)
    each = QUERIES if mask.device.type == "cpu" else max(QUERIES, GPU_VALUES // max(real.numel(), 1))
    for new in chunks(queries, each):
        part, own = mask[:, :, new], column[columns - queries :][new]
        expected = (real[:, None] & (column <= own[:, None])).unsqueeze(1)
        if sliding_window is not None:
            expected = expected & (column > own[:, None] - sliding_window)
        differs = part != expected if part.dtype == torch.bool else (part == 0) != expected
        if part.dtype != torch.bool:
            differs |= (part != 0) & (part > torch.finfo(part.dtype).min / 2)  # an additive bias
        wrong |= (differs & real[:, own, None].unsqueeze(1)).any()
    if bool(wrong):
        raise NotImplementedError(
            "attention_mask: expected causal order and the padding of earlier calls with a StrataCache, got a mask of"
            " another kind; without a mask, `generate` hides every pad token, also those that ended a row in an earlier"
            " turn: pass attention_mask=torch.ones_like(input_ids), with 0 for the padding of the first prompt"
        )


def check_positions(positions: torch.Tensor, real: torch.Tensor | None) -> None:
    """Raise NotImplementedError if the positions of a row's tokens go back, as those of packed sequences do.

    Args:
        positions: ``[rows or 1, queries]``.
        real: bool ``[rows, queries]``, None without padding.
    """
    if real is None:
        back = positions < positions.cummax(1).values
    else:
        tokens = positions.expand(len(real), -1).masked_fill(~real, torch.iinfo(positions.dtype).min)
        back = (tokens < tokens.cummax(1).values) & real
    if bool(back.any()):
        raise NotImplementedError(
            "position_ids: expected positions that grow with a StrataCache, got packed sequences; one row for each"
        )


def visible(query_position: torch.Tensor, column_position: torch.Tensor) -> torch.Tensor:
    """Bool ``[rows, heads, queries, columns]`` from ``[rows, queries]`` and ``[rows, heads, columns]``, -1 for none."""
    column = column_position.unsqueeze(2)
    return (column >= 0) & (column <= query_position[:, None, :, None])


def of_positions(
    query_position: torch.Tensor, column_position: torch.Tensor, heads: int, dtype: torch.dtype
) -> torch.Tensor:
    """`visible` as a mask for the model's attention: for ``heads`` or 1, bool or an additive bias."""
    seen = visible(query_position, column_position)
    if seen.shape[1] > 1:
        seen = seen.repeat_interleave(heads // seen.shape[1], 1)
    if dtype == torch.bool:
        return seen
    return torch.zeros_like(seen, dtype=dtype).masked_fill_(~seen, torch.finfo(dtype).min)


def chunks(queries: int, each: int = QUERIES) -> Iterator[slice]:
    """Slices of up to ``each`` queries."""
    for begin in range(0, queries, each):
        yield slice(begin, min(begin + each, queries))
