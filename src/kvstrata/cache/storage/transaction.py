"""One operation on a cache: all of its changes or, when memory runs out or the budget does not suffice, none.

    plan, allocate      host tables change, and how to restore them is recorded; new pages are allocated and filled
    ------------------- nothing below allocates device memory -------------------
    launch              pages that hold tokens and tables on the device are written, in the order of `launch`
    release, finish     old pages are freed, then slabs that the budget does not allow

A page that an operation releases is freed only at its end: until the launches are queued its tokens are needed, by the
launches or for a rollback. So an operation holds its old and new pages at the same time.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch

    from .pool import Pool

Step = Callable[[], object]


def is_out_of_memory(error: BaseException) -> bool:
    """True for the errors of Python and torch when memory of the device, the host or pinned memory runs out."""
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and "memory" in str(error))


class Transaction:
    """Changes of one operation: undone if the block raises, completed if it does not.

    ``finish`` runs last and is given a workspace for `Pool.compact`. Steps given to `launch` and `undo` must not
    allocate device memory; tensors they need are allocated before.
    """

    def __init__(self, pool: Pool, finish: Callable[[torch.Tensor], None] | None = None) -> None:
        self.pool = pool
        self._finish = finish
        self._undo: list[Step] = []
        self._launches: list[Step] = []
        self._taken: list[np.ndarray] = []
        self._released: list[np.ndarray] = []

    def allocate(self, tier: int, n: int) -> np.ndarray:
        """Allocate pages for this operation; they are freed if it fails."""
        return self.allocate_all({tier: n})[tier]

    def allocate_all(self, pages: dict[int, int]) -> dict[int, np.ndarray]:
        """Allocate pages of each tier for this operation, all or none."""
        handles = self.pool.allocate_all(pages)
        self._taken += handles.values()
        return handles

    def release(self, handles: np.ndarray) -> None:
        """Drop one owner of each page when the launches are queued."""
        self._released.append(handles)

    def set(self, array: np.ndarray, index: Any, values: Any) -> None:
        """Assign ``array[index] = values`` on the host."""
        before = array[index].copy()

        def restore() -> None:
            array[index] = before

        self._undo.append(restore)
        array[index] = values

    def undo(self, step: Step) -> None:
        """Call ``step`` if the operation fails; steps run in reverse order."""
        self._undo.append(step)

    @property
    def has_launches(self) -> bool:
        """True if steps are waiting for the operation to complete."""
        return bool(self._launches)

    def launch(self, step: Step) -> None:
        """Call ``step`` once nothing can fail any more."""
        self._launches.append(step)

    def __enter__(self) -> Transaction:
        self._workspace = self.pool.workspace() if self._finish else None
        self.pool.note_stream()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._complete()
        else:
            self._roll_back()

    def _complete(self) -> None:
        for step in self._launches:
            step()
        for handles in self._released:
            self.pool.release(handles)
        if self._finish and self._workspace is not None:
            self._finish(self._workspace)

    def _roll_back(self) -> None:
        for step in reversed(self._undo):
            step()
        if self._taken:
            for handles in self._taken:
                self.pool.release(handles)
            self.pool.trim()
