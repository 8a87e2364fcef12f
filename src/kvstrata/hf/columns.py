"""Columns of a batch over the rows of a `StrataCache`: which are tokens, and one more of them at a decode step.

A step has a part of the host, which makes room for a token of every row (`advance`), and layers that fill it. Columns
are counted when all layers have the token, so an error half way leaves the length as it was (`_undo_step`).
"""

from __future__ import annotations

import numpy as np
import torch
from transformers.cache_utils import Cache

from kvstrata.cache import TieredCache

from . import mask as masks
from .layer import StrataLayer
from .steps import Steps


class Columns(Cache):
    """The part of a `StrataCache` that counts columns, of tokens and of padding."""

    steps: Steps
    _tokens: np.ndarray  # `_real`, a view of _room
    _room: np.ndarray
    _checked: masks.LastMask

    @property
    def tiered(self) -> TieredCache:
        raise NotImplementedError

    def _reserve(self, tokens: int) -> None:
        raise NotImplementedError

    @property
    def _real(self) -> np.ndarray:
        """Tokens and padding, bool ``[rows, columns]``, False for padding."""
        return self._tokens

    @_real.setter
    def _real(self, real: np.ndarray) -> None:
        self._tokens, self.steps.mask = real, None

    @property
    def rows(self) -> int:
        """Rows of the batch, 0 before the first token."""
        return len(self._real)

    def _tokens_among(
        self, start: int, mask: torch.Tensor | None, positions: torch.Tensor | None, rows: int, queries: int
    ) -> torch.Tensor | None:
        """Mask of the tokens among the columns from ``start`` on, bool ``[rows, queries]``; None without padding.

        Only the first layer of a forward reads mask and positions; the others check a mask only if it is a new object.
        """
        if rows != self.rows:
            raise ValueError(f"past_key_values: expected {self.rows} rows as before, got {rows}")
        end = start + queries
        first = self._real.shape[1] < end
        if mask is not None:
            masks.check_shape(mask, queries, end)
        if first:
            new = np.ones((rows, queries), bool)
            if mask is not None:
                new = masks.new_tokens(mask, queries).expand(rows, -1).cpu().numpy()
            self._add_columns(start, new)
        if mask is not None and (first or not self._checked.holds(mask)):
            masks.check_causal(mask, torch.from_numpy(self._real[:, :end]).to(mask.device), queries)
            self._checked.set(mask)
        real = self._real[:, start:end]
        tokens = None if real.all() else torch.from_numpy(real).to(self.tiered.device)
        if first and queries > 1 and positions is not None and positions.dim() == 2:
            masks.check_positions(positions.to(self.tiered.device), tokens)
        return tokens

    def _add_columns(self, start: int, new: np.ndarray | bool) -> None:
        """Put columns behind the first ``start``: bool ``[rows, n]``, or a value for one of all rows."""
        end = start + (1 if isinstance(new, bool) else new.shape[1])
        if self._real.base is not self._room or self._room.shape[1] < end:  # amortised, as lists grow
            self._room = np.ones((len(self._real), 2 * end), bool)
            self._room[:, :start] = self._real[:, :start]
        self._room[:, start:end] = new
        self._tokens = self._room[:, :end]
        if new is not True:
            self.steps.mask = None

    def _forget(self, start: int) -> None:
        """Drop the columns from ``start`` on, which the first layer could not store."""
        if all(layer.columns <= start for layer in self._strata()):
            self._real = self._real[:, :start]

    def begin_step(self, layer: int, mask: torch.Tensor | None, positions: torch.Tensor | None, rows: int) -> bool:
        """In the first layer of a forward with one new column, do the host's part of a step; True in all layers of it.

        ``layer`` counts compressed ones; ``mask`` is ``[rows, columns]``. False if the column is padding in some row.
        Raises what `TieredCache.advance` and checks of the mask raise.
        """
        if layer:
            if self.steps.is_open:
                self._tokens_among(self._real.shape[1] - 1, mask, positions, rows, 1)
            return self.steps.is_open
        self._undo_step()
        start = self._strata()[0].columns
        try:
            if self._tokens_among(start, mask, positions, rows, 1) is not None:
                return False
            self.advance()
        except Exception:
            self._forget(start)
            raise
        return True

    def advance(self) -> None:
        """Host's part of a decode step: room for one token of every row in all layers.

        Mutates the cache; `end_step` counts the column when the layers have been written. This cannot be captured, the
        forward after it can. Raises what `TieredCache.advance` raises, and leaves the cache as it was.
        """
        self._undo_step()
        layers = self._strata()
        start = layers[0].columns
        if start >= self.tiered.max_tokens:
            self._reserve(max(layers[0].lengths()) + 1)
        for layer in layers:
            layer.flush()
        self.steps.begin(self.tiered)
        self._add_columns(start, True)

    def end_step(self) -> None:
        """Count the column of a step; all layers have its tokens."""
        self.steps.is_open = False
        for layer in self._strata():
            layer.columns = self._real.shape[1]

    def _undo_step(self) -> None:
        """Drop the tokens of a step whose forward raised an error before all layers had them."""
        if not self.steps.is_open:
            return
        self.steps.is_open = False
        self._real = self._real[:, : self._strata()[0].columns]
        tiered = self.tiered
        nothing = torch.zeros(self.rows, tiered.kv_heads, tiered.head_dim, dtype=tiered.dtype, device=tiered.device)
        for layer in range(tiered.layers):
            tiered.write(layer, nothing, nothing)  # slots that nobody wrote have no position to be cropped by
        for request, length in enumerate(self._real.sum(1).tolist()):
            self.tiered.crop(request, length)

    def matches(self, mask: torch.Tensor) -> bool:
        """True if ``mask [rows, columns]`` is the padding of earlier calls and one token more of every row.

        Raises nothing: other masks are an ordinary forward's.
        """
        self._undo_step()
        rows, columns = self._real.shape
        if mask.dim() != 2 or mask.shape != (rows, columns + 1):
            return False
        known = self.steps.mask
        if known is None or known.shape[1] <= columns:
            room = np.ones((rows, 2 * columns + 2), bool)
            room[:, :columns] = self._real
            known = self.steps.mask = torch.from_numpy(room).to(self.tiered.device)
        return torch.equal(mask.to(known.device) != 0, known[:, : columns + 1])

    def _strata(self) -> list[StrataLayer]:
        return [layer for layer in self.layers if isinstance(layer, StrataLayer)]

    def _flush(self) -> None:
        self._undo_step()
        for layer in self._strata():
            layer.flush()
