"""Rows of a batch over packed pages: their lengths, padding and slots, in device tensors at fixed addresses.

    row of the batch   blocks ``row * blocks .. (row + 1) * blocks`` of every layer's pages: the block table is constant
    column             a token or padding; only tokens are stored, so every row has its own length

The host has no copy, so a forward made of operators advances the cache without it, compiled or captured by anyone.
"""

from __future__ import annotations

import torch

from . import mask as masks
from .owned import Copied


class PackedRows(Copied):
    """Lengths and padding of ``rows`` with room for ``blocks`` of ``block_size`` tokens each, on ``device``."""

    def __init__(self, rows: int, blocks: int, block_size: int, device: torch.device) -> None:
        self.tokens = blocks * block_size  # capacity of a row
        self.all_begun = False  # the host knows that every row has a token
        with torch.inference_mode(False):
            self.columns = torch.zeros((), dtype=torch.int64, device=device)
            self.seq_lens = torch.zeros(rows, dtype=torch.int32, device=device)
            self.real = torch.ones(rows, self.tokens, dtype=torch.bool, device=device)  # False for padding
            self.first = torch.arange(rows, dtype=torch.int32, device=device) * self.tokens  # slot of a row's token 0
            self.slot = torch.full_like(self.seq_lens, -1)  # slot of the newest column, -1 for padding
            self.block_table = torch.arange(rows * blocks, dtype=torch.int32, device=device).view(rows, blocks)
        self.fix()

    def fix(self) -> None:
        """Mark these tensors as static addresses for torch.compile, so that CUDA graphs may mutate them."""
        for x in vars(self).values():
            if isinstance(x, torch.Tensor):
                torch._dynamo.mark_static_address(x, guard=False)

    def __len__(self) -> int:
        return len(self.seq_lens)

    def advance(self, mask: torch.Tensor | None, queries: int) -> None:
        """Count new columns: tokens if they see themselves in ``mask [rows or 1, heads or 1, queries, columns]``.

        Operators only. If there is no room, an assertion fails, on a GPU a device-side one.
        """
        torch._assert_async(self.columns + queries <= self.tokens, "max_tokens: expected more, all tokens are in use")
        if mask is None:
            self.seq_lens.add_(queries)
            self.slot.copy_(self.first + self.seq_lens - 1)
        else:
            new = self._new_tokens(mask, queries)
            self.real.index_copy_(1, self.columns + torch.arange(queries, device=new.device), new)
            self.seq_lens.add_(new.sum(1, dtype=torch.int32))
            self.slot.copy_(torch.where(new[:, -1], self.first + self.seq_lens - 1, -1))
        self.columns.add_(queries)

    def _new_tokens(self, mask: torch.Tensor, queries: int) -> torch.Tensor:
        """Token mask of the new columns, bool ``[rows, queries]``, before they are counted."""
        query = torch.arange(queries, device=mask.device)
        own = mask[:, 0, query, self.columns + query]
        return (own if own.dtype == torch.bool else own == 0).expand(len(self), -1)

    def check(self, mask: torch.Tensor | None, positions: torch.Tensor | None, rows: int, queries: int) -> int:
        """Check the arguments of a forward on the host, before its columns are counted.

        Returns the number of columns so far. Raises ValueError for a different number of rows and for columns without
        room, and NotImplementedError for a mask other than causal order with the padding of earlier calls.
        """
        if rows != len(self):
            raise ValueError(f"past_key_values: expected {len(self)} rows as before, got {rows}")
        start = int(self.columns)
        end = start + queries
        if end > self.tokens:
            raise ValueError(f"max_tokens: expected at least {end}, which the batch has now, got {self.tokens}")
        new = None
        if mask is not None:
            if mask.dim() != 4 or mask.shape[2] != queries or mask.shape[3] not in (end, self.tokens):
                raise NotImplementedError(
                    f"attention_mask: expected {queries} queries and {end} or {self.tokens} columns with a StrataCache,"
                    f" got {tuple(mask.shape)}"
                )
            new = self._new_tokens(mask, queries)
            masks.check_causal(mask[..., :end], torch.cat([self.real[:, :start], new], 1), queries)
        if queries > 1 and positions is not None and positions.dim() == 2:
            masks.check_positions(positions.to(self.real.device), new)
        return start

    def note_tokens(self, mask: torch.Tensor | None, queries: int) -> None:
        """Update `all_begun` for the columns of a forward whose arguments `check` has accepted."""
        if self.all_begun:
            return
        self.all_begun = mask is None
        if mask is not None:
            self.all_begun = bool(((self.seq_lens > 0) | self._new_tokens(mask, queries).any(1)).all())

    def matches(self, mask: torch.Tensor) -> bool:
        """True if a 2-D or 4-D mask is the padding of earlier calls followed by one token in every row."""
        end = int(self.columns) + 1
        if end > self.tokens or mask.dim() not in (2, 4) or mask.shape[-1] not in (end, self.tokens):
            return False
        seen = mask if mask.dim() == 2 else mask[:, 0, -1]
        if seen.dtype.is_floating_point:
            seen = seen == 0
        return bool(((seen[:, :end] != 0) == self.real[:, :end]).all() & (seen[:, end - 1] != 0).all())

    def crop(self, columns: int) -> None:
        """Remove the last ``columns`` columns; the host reads the current number."""
        end = int(self.columns)
        start = max(end - columns, 0)
        self.seq_lens.sub_(self.real[:, start:end].sum(1, dtype=torch.int32))
        self.real[:, start:] = True
        self.columns.fill_(start)
        self.all_begun = self.all_begun and bool((self.seq_lens > 0).all())

    def select(self, rows: torch.Tensor) -> PackedRows:
        """Lengths and padding of the given rows, int64 ``[n]`` on the device; in place if their number is unchanged."""
        blocks = self.block_table.shape[1]
        chosen = self
        if len(rows) != len(self):
            chosen = PackedRows(len(rows), blocks, self.tokens // blocks, self.real.device)
            chosen.columns.copy_(self.columns)
            chosen.all_begun = self.all_begun
        seq_lens, real = self.seq_lens[rows], self.real[rows]
        chosen.seq_lens.copy_(seq_lens)
        chosen.real.copy_(real)
        return chosen
