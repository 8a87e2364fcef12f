"""``HostStage``: the host writes a step's metadata to pinned memory, and a node of the graph scatters it.

::

    host      write step k      write k+1       write k+2 (waits for k)
                 |                 |               |
    pinned    [slot 0]          [slot 1]        [slot 0]          a slot: step number, sizes, one area per buffer
                 |                 |
    graph     scatter k, ...    scatter k+1, ...                  reads the slot over the bus, writes the buffers

The scatter is one kernel that reads the slot in place, so only live data crosses the bus. It counts finished steps on
the device and in a word that the host reads: the host calls nothing but the replay, and reuses a slot only when its
step has been read.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvstrata.backends import resolve

from . import reference
from .copies import Bound, Fill, Signature, check_count, check_fill, check_list, check_source, move_of, names_of
from .memory import ALIGN, aligned
from .plan import _per_copy, check_buffers

if TYPE_CHECKING:
    from . import cuda as copy_cuda

STAGED_BLOCKS = 64  # maximum per buffer: all blocks must be resident, because they wait for the first
HEAD = 64  # words of a slot's header, cached on the device
PATIENCE = 0.001  # seconds of polling the word before synchronising


class HostStage:
    """Two slots of pinned memory from which a graph reads its inputs.

    Args:
        dst: buffers of up to three dimensions, ``[D0, D1, D2]``, on one device, as for `CopyPlan`. Mutated by the
            callable that ``node`` returns.
        fill: value for what a step does not cover, as for `CopyPlan`.

    ``write(src)`` copies a step's CPU tensors into the next slot. ``node()`` returns the copy to be captured: it
    moves the next step into the buffers, or does nothing if there is none. Replay once after every ``write``. To
    avoid the copy into the slot, fill ``views()`` and call ``commit``. ``write``, ``views`` and ``commit`` run on the
    host and are not part of a graph. On a CPU the same protocol runs in Python.

    Raises:
        ValueError, TypeError: ``dst`` or ``fill`` do not fit; the message names the argument.
        RuntimeError: on a GPU without the CUDA C++ backend, and from ``views`` and ``write`` when both slots hold steps
            that no replay has read.

    Example:
        >>> from kvstrata.replay import HostStage
        >>> ids = torch.zeros(4, dtype=torch.int32)
        >>> stage = HostStage([ids], fill=-1)
        >>> scatter = stage.node()  # captured, on a GPU
        >>> stage.write([torch.tensor([5, 6], dtype=torch.int32)])
        >>> scatter()
        >>> ids.tolist()
        [5, 6, -1, -1]
    """

    def __init__(self, dst: Sequence[torch.Tensor], *, fill: Fill | Sequence[Fill] = None) -> None:
        check_list(dst, "dst")
        self.dst = tuple(dst)
        self.names = names_of(len(self.dst))  # for errors of ``write``; `GraphRunner` sets its own
        check_buffers(self.dst, self.names)
        if not self.dst:
            raise ValueError("dst: expected at least one buffer, got none")
        self.fill = _per_copy(fill, len(self.dst), "fill")
        for i, buffer in enumerate(self.dst):
            check_fill(self.fill[i], buffer, f"fill[{i}]")
        self._shapes = [tuple(buffer.shape) for buffer in self.dst]
        self.device = self.dst[0].device
        self._cuda = self.device.type == "cuda"
        if self._cuda:
            resolve("cuda", self.device)  # raises if it is missing
        count = len(self.dst)
        header = aligned(8 + 8 * count)  # number of the step, then rows and columns of each source
        slot, offsets = header, []  # bytes
        for buffer in self.dst:
            offsets.append(slot)
            slot += aligned(buffer.numel() * buffer.itemsize)
        self._slot_bytes = slot
        self._pinned = torch.zeros(2 * slot + ALIGN, dtype=torch.uint8, pin_memory=self._cuda)
        # As in copy.cu: finished steps, blocks and launches, the launch whose header is cached; then the header.
        self._turn = torch.zeros(4 + HEAD, dtype=torch.int32, device=self.device)
        words = self._pinned.numpy()
        self._done = words[2 * slot : 2 * slot + 4].view(np.uint32)
        self._number = [words[s * slot : s * slot + 4].view(np.uint32) for s in (0, 1)]
        self._sizes = [words[s * slot + 8 : s * slot + 8 + 8 * count].view(np.int32).reshape(count, 2) for s in (0, 1)]
        self._views = [[self._area(s * slot + offset, buffer) for offset, buffer in zip(offsets, self.dst, strict=True)]
                       for s in (0, 1)]  # fmt: skip
        self._offsets = offsets
        self._written = 0

    def _area(self, offset: int, buffer: torch.Tensor) -> torch.Tensor:
        raw = self._pinned[offset : offset + buffer.numel() * buffer.itemsize]
        return raw.view(buffer.dtype).view(buffer.shape) if buffer.numel() else torch.empty_like(buffer, device="cpu")

    @property
    def nbytes(self) -> int:
        """Bytes of pinned memory."""
        return self._pinned.numel()

    def views(self) -> list[torch.Tensor]:
        """CPU tensors over the next slot, of the buffers' shapes ``[D0, D1, D2]``; waits until the GPU has read it.

        Raises RuntimeError when both slots hold steps that no replay has read.
        """
        if int(self._done[0]) + 2 <= self._written:
            self._wait()
        return self._views[self._written & 1]

    def commit(self, shapes: Sequence[Sequence[int] | None]) -> None:
        """Publish the slot that was filled through ``views``.

        Args:
            shapes: per buffer the shape of the filled corner, or None to leave that buffer as it is. Of three
                dimensions only the first may be smaller than the buffer's.

        Raises ValueError or TypeError for shapes that do not fit.
        """
        if not hasattr(shapes, "__len__"):
            raise TypeError(f"shapes: expected a list with a shape for each of dst, got {type(shapes).__name__}")
        if len(shapes) != len(self.dst):
            raise ValueError(f"shapes: expected {len(self.dst)}, one for each of dst, got {len(shapes)}")
        sizes = self._sizes[self._written & 1]
        for i, (given, most) in enumerate(zip(shapes, self._shapes, strict=True)):
            if given is None:
                sizes[i] = (-1, -1)
                continue
            try:
                live = tuple(map(operator.index, given))
            except TypeError:
                raise TypeError(
                    f"shapes[{i}]: expected a shape of at most {list(most)} or None, got {given!r}"
                ) from None
            if len(live) != len(most) or any(map(operator.gt, live, most)) or min(live, default=0) < 0:
                raise ValueError(f"shapes[{i}]: expected at most {list(most)}, got {list(live)}")
            if len(most) == 3 and live[1:] != most[1:]:
                raise ValueError(f"shapes[{i}]: expected [rows, {most[1]}, {most[2]}], got {list(live)}")
            sizes[i] = (live[0], live[-1]) if live else (1, 1)
        self._number[self._written & 1][0] = self._written + 1  # must be last: it publishes the step
        self._written += 1

    def write(self, src: Sequence[torch.Tensor | None]) -> None:
        """Copy a step's tensors into the next slot; waits until the GPU has read it.

        Args:
            src: per buffer a CPU tensor of its dtype and at most its shape ``[D0, D1, D2]``, or None to leave the
                buffer as it is.

        Raises ValueError or TypeError, naming the source, and RuntimeError when both slots hold steps that no replay
        has read.
        """
        check_count(src, len(self.dst))
        views = self.views()
        for i, (area, source) in enumerate(zip(views, src, strict=True)):
            if source is None:
                continue
            if not isinstance(source, torch.Tensor):
                raise TypeError(f"{self.names[i].source}: expected a tensor or None, got {type(source).__name__}")
            check_source(source, area, False, self.names[i])
            area[tuple(slice(0, n) for n in source.shape)].copy_(source)
        self.commit([None if t is None else t.shape for t in src])

    def _wait(self) -> None:
        """Wait until the step that used the next slot has been read."""
        limit = time.perf_counter() + PATIENCE
        while int(self._done[0]) + 2 <= self._written:
            if time.perf_counter() < limit and self._cuda:
                continue
            if self._cuda:
                torch.cuda.synchronize(self.device)  # raises errors of the GPU
            if int(self._done[0]) + 2 <= self._written:
                raise RuntimeError(
                    f"write: expected a replay after every write, got {self._written} writes and "
                    f"{int(self._done[0])} steps that a replay has read"
                )

    def node(self, dst: Sequence[torch.Tensor] | None = None) -> Scatter:
        """Create the copy of the next step, to be captured.

        Args:
            dst: the leading part of each buffer, such as ``buffer[:batch]`` of ``[D0, D1, D2]``; None is all of them.

        Compiles on a GPU, so call it before the capture. Raises ValueError or TypeError if ``dst`` are not such parts,
        and ValueError for more than 28 buffers on a GPU.
        """
        if dst is not None:
            check_list(dst, "dst")
        targets = self.dst if dst is None else tuple(dst)
        for i, (part, whole) in enumerate(zip(targets, self.dst, strict=True)):
            if part.data_ptr() != whole.data_ptr() or part.dtype != whole.dtype or part.stride() != whole.stride():
                raise ValueError(f"dst[{i}]: expected a part of the stage's buffer from its first element on")
        return Scatter(self, targets)


class Scatter:
    """Copy of a `HostStage`'s next step into buffers, in one launch; created by `HostStage.node`.

    Args:
        stage: the stage whose slots are read.
        dst: the leading part of each of its buffers, up to three dimensions ``[D0, D1, D2]``. Mutated by a call.

    A call does nothing if no new step was written. Calls are safe under graph capture; a captured call reads the next
    step at every replay. The constructor compiles on a GPU and cannot be captured.

    Raises ValueError for more than 28 buffers on a GPU.

    Example:
        >>> from kvstrata.replay import HostStage
        >>> buffer = torch.zeros(3)
        >>> stage = HostStage([buffer])
        >>> scatter = stage.node([buffer[:2]])
        >>> stage.write([torch.ones(2)])
        >>> scatter()
        >>> buffer.tolist()
        [1.0, 1.0, 0.0]
    """

    def __init__(self, stage: HostStage, dst: Sequence[torch.Tensor]) -> None:
        self._stage, self._dst = stage, tuple(dst)
        self._copies = self._launch() if stage._cuda else None

    def __call__(self) -> None:
        if self._copies is not None:
            self._copies.go()
        else:
            self._on_cpu()

    def _launch(self) -> copy_cuda.Copies:
        from . import cuda as copy_cuda

        stage = self._stage
        if len(self._dst) > copy_cuda.MOST:
            raise ValueError(f"dst: expected at most {copy_cuda.MOST} buffers on a GPU, got {len(self._dst)}")
        base = stage._pinned.data_ptr()
        done = base + 2 * stage._slot_bytes
        packed = copy_cuda.STAGE.pack(stage._turn.data_ptr(), done, base, stage._slot_bytes)
        copies = copy_cuda.Copies(len(self._dst), False, stage.device, packed)
        sizes = stage._pinned[8 : 8 + 8 * len(self._dst)].view(torch.int32)
        descriptors, blocks = [], []
        for i, target in enumerate(self._dst):
            area = stage._views[0][i]
            source = area[tuple(slice(0, n) for n in target.shape)]
            move = move_of(Signature.of(source), Signature.of(target), stage.fill[i], True)
            rows, columns = Bound(sizes[2 * i : 2 * i + 1]), Bound(sizes[2 * i + 1 : 2 * i + 2])
            if target.dim() < 2:
                bounds: tuple[Bound | None, int, Bound | None] = (rows, 0, None)
            else:
                bounds = (columns if target.dim() == 2 else None, 0, rows)
            descriptors.append(copy_cuda.pack(move, target.data_ptr(), *bounds, skips=True))
            blocks.append(min(copy_cuda.blocks_of(move), STAGED_BLOCKS))
        blocks[0] = max(blocks[0], 1)  # at least one block must count the step
        copies.load(*copies.tail(descriptors, blocks))
        copies.write(copies.params, 0, *(base + offset for offset in stage._offsets))
        return copies

    def _on_cpu(self) -> None:
        stage = self._stage
        slot = int(stage._turn[0]) & 1
        if int(stage._number[slot][0]) != int(stage._turn[0]) + 1:
            return
        for i, target in enumerate(self._dst):
            rows, columns = (int(n) for n in stage._sizes[slot][i])
            if rows < 0:
                continue
            area = stage._views[slot][i]
            live = [rows, *area.shape[1:]][: area.dim()]
            if area.dim() == 2:
                live[1] = columns
            live = [min(n, most) for n, most in zip(live, target.shape, strict=True)]
            reference.copy(target, area[tuple(slice(0, n) for n in live)], stage.fill[i])
        stage._turn[0] += 1
        stage._done[0] = int(stage._turn[0])
