"""Rows and columns of a batch over a `StrataCache`: which columns are tokens, the new column of a decode step, and
operations that reorder or remove rows and columns.

A decode step has a host part, which makes room for a token of every row (`advance`), and layers that fill it. The
column is counted once all layers have the token, so an error half way leaves the length unchanged (`_undo_step`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from transformers.cache_utils import Cache

from kvstrata.cache import TieredCache

from . import mask as masks
from .balance import useful_tokens
from .forward import columns_of
from .guard import Guard, WindowGuard
from .hybrid import HybridLayer
from .layer import StrataLayer
from .owned import adopt
from .prompts import Prompts
from .steps import Steps
from .support import rows_of
from .window import WindowLayer
from .window_prompts import WindowPrompts


class Columns(Cache):
    """The part of a `StrataCache` that counts columns of tokens and of padding, and moves rows."""

    steps: Steps
    _tokens: np.ndarray  # `_real`, a view of _room
    _room: np.ndarray
    _checked: masks.LastMask
    _unfinished: TieredCache | None
    prompts: Prompts
    guard: Guard | None
    window_guard: WindowGuard | None
    window_prompts: WindowPrompts
    interrupted = False  # a forward failed after some layers had stored their tokens
    _useful: tuple[np.ndarray, np.ndarray] | None = None  # new columns of the running forward, and `useful_tokens`
    _uploaded: tuple[np.ndarray, torch.Tensor] | None = None  # padding of the last prompt, and its copy on the device

    @property
    def tiered(self) -> TieredCache:
        raise NotImplementedError

    @property
    def _tiered(self) -> TieredCache | None:
        """The TieredCache with all tokens stored, None before the first one."""
        self.prompts.finish()
        return self._unfinished

    @_tiered.setter
    def _tiered(self, tiered: TieredCache | None) -> None:
        self._unfinished = tiered

    @property
    def unfinished(self) -> TieredCache:
        """`tiered`, whose last prompt may not be stored yet; for callers that do not read tokens."""
        if self._unfinished is None:
            raise RuntimeError("tiered: expected a cache with tokens, got one without any")
        return self._unfinished

    def _reserve(self, tokens: int) -> None:
        raise NotImplementedError

    def __getstate__(self) -> dict[str, Any]:
        self._undo_step()  # copies and pickles do not contain an unfinished step
        self.prompts.finish()
        self.window_prompts.finish()
        return {name: x for name, x in vars(self).items() if name != "_uploaded"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        adopt(self, state)

    @property
    def _real(self) -> np.ndarray:
        """Token mask, bool ``[rows, columns]``, False for padding."""
        return self._tokens

    @_real.setter
    def _real(self, real: np.ndarray) -> None:
        self._tokens, self.steps.mask = real, None

    @property
    def rows(self) -> int:
        """Rows of the batch, 0 before the first token."""
        return len(self._real) or max((layer.rows for layer in self._windows()), default=0)

    def _tokens_among(
        self, start: int, mask: torch.Tensor | None, positions: torch.Tensor | None, rows: int, queries: int
    ) -> torch.Tensor | None:
        """Tokens among the columns from ``start`` on, bool ``[rows, queries]``; None without padding.

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
        tokens = self._on_device(self._real[:, start:end])
        if first and queries > 1 and positions is not None and positions.dim() == 2:
            masks.check_positions(positions.to(self.unfinished.device), tokens)
        return tokens

    def _useful_tokens(self, value: torch.Tensor, new: np.ndarray) -> np.ndarray:
        """`balance.useful_tokens` of a forward's first compressed layer; deeper ones mix the tokens."""
        if self._useful is None or not np.array_equal(self._useful[0], new):
            self._useful = new.copy(), useful_tokens(value, new)
        return self._useful[1]

    def _on_device(self, real: np.ndarray) -> torch.Tensor | None:
        """Copy of ``real [rows, n]`` on the device, shared by all layers of a forward; None without padding."""
        if real.all():
            return None
        if self._uploaded is None or not np.array_equal(self._uploaded[0], real):
            with torch.inference_mode(False):  # a later call may be outside of it
                self._uploaded = real.copy(), torch.from_numpy(real).to(self.unfinished.device)
        return self._uploaded[1]

    def _add_columns(self, start: int, new: np.ndarray | bool) -> None:
        """Append columns after the first ``start``: bool ``[rows, n]``, or one value for a column of all rows."""
        end = start + (1 if isinstance(new, bool) else new.shape[1])
        if self._real.base is not self._room or self._room.shape[1] < end:  # amortised growth, as in a list
            self._room = np.ones((len(self._real), 2 * end), bool)
            self._room[:, :start] = self._real[:, :start]
        self._room[:, start:end] = new
        self._tokens = self._room[:, :end]
        if new is not True:
            self.steps.mask = None

    def _forget(self, start: int) -> None:
        """Drop the columns from ``start`` on, which the first layer failed to store."""
        if all(layer.columns <= start for layer in self._strata()):
            self._real = self._real[:, :start]

    def begin_step(self, layer: int, mask: torch.Tensor | None, positions: torch.Tensor | None, rows: int) -> bool:
        """In the first layer of a forward with one new column, do the host part of a step; True in all its layers.

        ``layer`` counts compressed ones; ``mask`` is ``[rows, columns]``. False if the column is padding in some row,
        and if a layer turned out to be none that can be compressed, or none that the model uses. Raises what
        `TieredCache.advance` and checks of the mask raise.
        """
        if layer:
            if self.steps.is_open:
                self._tokens_among(self._real.shape[1] - 1, mask, positions, rows, 1)
            return self.steps.is_open
        self._undo_step()
        layers = self._strata()
        if len(layers) < self.tiered.layers or len({layer.columns for layer in layers}) > 1:
            return False
        start = layers[0].columns
        try:
            if self._tokens_among(start, mask, positions, rows, 1) is not None:
                return False
            self._make_room()
        except Exception:
            self._forget(start)
            raise
        return True

    def advance(self) -> None:
        """Host part of a decode step whose forward contains operators only: room for one token of every row.

        Mutates the cache; `end_step` counts the column when all layers have been written. This cannot be captured, the
        forward after it can. Raises what `TieredCache.advance` and `WindowLayer.begin_step` raise, leaving the cache
        unchanged.
        """
        self._undo_step()
        windows, has_tiers = self._windows(), bool(self._strata())
        for layer in windows:
            layer.begin_step()
        if has_tiers:
            self._make_room()
        if windows:
            self.steps.begin_windows(windows, alone=not has_tiers)

    def _make_room(self) -> None:
        """Make room for one token of every row in the layers of the TieredCache."""
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
        """Count the column of a step, once all layers have its tokens."""
        self.steps.is_open = False
        for layer in self._strata():
            layer.columns = self._real.shape[1]
        for window in self.steps.windows:
            window.end_step()
        self.steps.windows = []

    def end_forward(self) -> None:
        """A forward that was no step has returned; its layers have counted their columns."""
        self.window_prompts.finish()
        self._useful = None
        self._finish_estimates()  # also if the last layer of the config was cut off

    def _finish_estimates(self) -> None:
        """Warn if layers of a prompt have a large error."""
        guards, self.guard, self.window_guard = (self.guard, self.window_guard), None, None
        for guard in guards:
            if guard is not None:
                guard.finish()

    def stored(self) -> list[Any]:
        """Columns of each layer, to see whether a forward that failed stored any."""
        return columns_of(self.layers)

    @property
    def is_even(self) -> bool:
        """True if all compressed layers have the same columns; False for a model with fewer layers than its config."""
        return len({layer.columns for layers in (self._strata(), self._windows()) for layer in layers}) < 2

    def _undo_step(self) -> None:
        """Drop the tokens of a step whose forward raised an error before all layers had them."""
        if not self.steps.is_open:
            return
        self.steps.is_open, self.steps.windows = False, []
        self._real = self._real[:, : self._strata()[0].columns]
        tiered = self.tiered
        nothing = torch.zeros(self.rows, tiered.kv_heads, tiered.head_dim, dtype=tiered.dtype, device=tiered.device)
        for layer in range(tiered.layers):
            tiered.write(layer, nothing, nothing)  # crop reads positions, which unwritten slots do not have
        for request, length in enumerate(self._real.sum(1).tolist()):
            self.tiered.crop(request, length)

    def matches(self, mask: torch.Tensor) -> bool:
        """True if ``mask [rows, columns]`` is the padding of earlier calls followed by one token in every row.

        Raises nothing: any other mask is left to an ordinary forward.
        """
        self._undo_step()
        if not self._strata():
            return self._windows()[0].matches(mask)
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

    def _windows(self) -> list[WindowLayer]:
        self.window_prompts.finish()
        return [layer for layer in self.layers if isinstance(layer, WindowLayer)]

    def _flush(self) -> None:
        self._undo_step()
        for layer in self._strata():
            layer.flush()

    def _plain(self) -> list[Any]:
        """Layers that move all or part of their rows themselves."""
        self.window_prompts.finish()
        return [layer for layer in self.layers if isinstance(layer, HybridLayer) or not isinstance(layer, StrataLayer)]

    # Interface of transformers' Cache; `StrataCache` has the rest.

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last ``-tokens_to_remove`` columns; tokens that were demoted in the meantime stay demoted.

        Raises ValueError for a positive number, and BudgetExceeded if the rest does not fit the smaller budget.
        """
        if tokens_to_remove > 0:
            raise ValueError(
                f"tokens_to_remove: expected 0 or less, got {tokens_to_remove}; crop(-n) removes n columns"
            )
        windows = self._windows()  # first, because they may refuse
        for layer in (*windows, *(layer for layer in self._plain() if layer not in windows)):
            layer.crop(tokens_to_remove)
        if tokens_to_remove == 0 or self._tiered is None:
            return
        self._flush()
        self._real = self._real[:, :tokens_to_remove]
        for request, length in enumerate(self._real.sum(1).tolist()):
            self.tiered.crop(request, length)
        for layer in self._strata():
            layer.columns = min(layer.columns, self._real.shape[1])

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Make row i a copy of row ``beam_idx[i]``, int64 ``[rows]``, for beam search; pages are shared, not copied.

        Raises IndexError for a row that does not exist, and ValueError for more than ``max_batch`` rows.
        """
        rows = rows_of("beam_idx", beam_idx, self.rows)
        self._check_room(len(rows))
        for layer in self._plain():
            layer.reorder_cache(beam_idx)
        self._pick(rows)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row ``repeats`` times; ValueError for more than ``max_batch`` rows. Pages are shared."""
        rows = self.rows
        self._check_room(rows * repeats)
        for layer in self._plain():
            layer.batch_repeat_interleave(repeats)
        self._pick([row for row in range(rows) for _ in range(repeats)])

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the rows ``indices``, int64 ``[n]`` or a bool mask ``[rows]``.

        Raises IndexError for unknown rows, and ValueError for more than ``max_batch`` rows.
        """
        rows = rows_of("indices", indices, self.rows)
        self._check_room(len(rows))
        for layer in self._plain():
            layer.batch_select_indices(indices)
        self._pick(rows)

    def _check_room(self, rows: int) -> None:
        if self._tiered is not None and rows > self.tiered.max_requests:
            raise ValueError(
                f"max_batch: expected at least {rows} rows, got {self.tiered.max_requests};"
                f" StrataCache(..., max_batch={rows})"
            )

    def _pick(self, rows: list[int]) -> None:
        if self._tiered is None or rows == list(range(self.rows)):
            return
        self._flush()
        self.tiered.select(rows)
        self._real = self._real[rows]
