"""``GraphRunner``: captures a step once per batch size and replays it with padding.

::

    call(ids=[5], table=[5, 9])  ->  the next size, 8  ->  rows 5..7 filled  ->  replay of graph 8  ->  outputs[:5]

The step reads its inputs from buffers at fixed addresses. ``staging`` is how a call's tensors get there: ``copy``, one
launch before the replay; ``graph``, the same launch as the first node of the graph, from staging buffers that the
caller fills on the device; ``host``, a node that reads pinned memory, which the caller fills.
On a CPU the step runs eagerly on the same buffers with the same padding.
"""

from __future__ import annotations

import bisect
import gc
import operator
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch

from .copies import Bound, Fill, Names, check_list, check_source, shape
from .memory import aligned
from .plan import CopyPlan
from .staging import HostStage
from .switch import backend_of, is_fused

STAGINGS = ("copy", "graph", "host")
Step = Callable[..., Any]
Input = torch.Tensor | tuple[Sequence[int], torch.dtype]


def allocate_together(
    specs: Mapping[str, tuple[Sequence[int], torch.dtype]], device: torch.device
) -> dict[str, torch.Tensor]:
    """Zeroed buffers in one allocation of torch's stream-ordered allocator, each aligned to 256 bytes."""
    sizes = {name: torch.Size(shape).numel() * dtype.itemsize for name, (shape, dtype) in specs.items()}
    offsets, total = {}, 0
    for name, size in sizes.items():
        offsets[name], total = total, total + aligned(size)
    pool = torch.zeros(total, dtype=torch.uint8, device=device)
    return {
        name: pool[offsets[name] : offsets[name] + sizes[name]].view(dtype).view(tuple(shape))
        for name, (shape, dtype) in specs.items()
    }


class Captured:
    """The graph of one batch size, with its slices of the buffers, the copy that fills them, and the step's outputs."""

    def __init__(self, size: int, inputs: dict[str, torch.Tensor], fill: Callable[..., None] | None) -> None:
        self.size, self.inputs, self.fill = size, inputs, fill
        self.graph: torch.cuda.CUDAGraph | None = None
        self.outputs: Any = None
        self.memory = 0


class GraphRunner:
    """Run a step of any batch size by replaying the graph of the next larger captured size.

    Args:
        step: called as ``step(**inputs)`` with the buffers sliced to a size; returns tensors whose dimension 0 is the
            batch, alone or in a tuple, list or dict, or None. It may write other tensors that it holds, such as a KV
            cache.
        inputs: buffers by name, or ``(shape, dtype)`` for the runner to allocate. Mutated by every call. Shape
            ``[largest, ...]``, where ``largest`` is the largest of ``sizes``, or ``[largest + 1, ...]`` for offsets
            such as ``cu_seqlens``, which have batch + 1 entries at every size. For a longer buffer pass
            ``buffer[:largest]``.
        sizes: the batch sizes to capture, ints of at least 1.
        fill: value by name for padding rows and for columns that a call does not provide: a number, ``"last"`` (1-D
            only), or None to leave them as they were; 0 for names that are not given.
        staging: ``copy``, ``graph`` or ``host``.
        fused: False copies and fills the inputs one by one instead of in one launch, for comparison; None is True
            unless the environment has ``KVSTRATA_FUSED_COPY=0``. ``staging="host"`` always uses one kernel: False is an
            error, and the environment is ignored.
        watch: further tensors that the step reads or writes. Their addresses, and those of the buffers, are checked
            before each replay, because a graph does not notice when a tensor has moved.
        device: device of the buffers that the runner allocates; None is that of the given ones.
        warmup: eager runs before each capture, in which kernels are compiled and allocators warm up.
        pool: a graph memory pool to share with other runners.
        progress: show a bar while capturing; None shows it on a terminal.

    ``runner(**tensors)`` pads, fills and replays, and returns the outputs of the live rows: views of memory that the
    next call overwrites. With ``staging="graph"`` write ``runner.staged[name]`` on the device and call
    ``runner.replay(batch)``; with ``"host"`` the tensors of a call are on the CPU.

    A call's tensors must have the dtype of their buffers; none is converted. Calls launch on the current stream and do
    not synchronise, except with ``staging="host"``, where a call may wait until the GPU has read the step before last.
    Not thread-safe.

    Raises:
        ValueError, TypeError: an argument, or a tensor of a call, that does not fit; the message names it.
        RuntimeError: nothing was captured yet, the step cannot be captured, or a tensor has moved since.

    Example:
        >>> buffers = {"x": ((4, 2), torch.float32)}
        >>> runner = GraphRunner(lambda x: x * 2, buffers, sizes=[2, 4], device="cpu").capture()
        >>> runner(x=torch.ones(3, 2)).shape
        torch.Size([3, 2])
    """

    def __init__(
        self,
        step: Step,
        inputs: Mapping[str, Input],
        sizes: Iterable[int],
        *,
        fill: Mapping[str, Fill] | None = None,
        staging: str = "copy",
        fused: bool | None = None,
        watch: Sequence[torch.Tensor] = (),
        device: torch.device | str | None = None,
        warmup: int = 2,
        pool: Any = None,
        progress: bool | None = None,
    ) -> None:
        if staging not in STAGINGS:
            raise ValueError(f"staging: expected one of {STAGINGS}, got {staging!r}")
        if staging == "host" and fused is not None and not fused:
            raise ValueError('fused: expected None or True with staging="host", which has one kernel only, got False')
        check_list(watch, "watch")
        self.fused = staging == "host" or is_fused(fused)
        self.sizes = _sizes(sizes)
        self.step, self.staging, self.warmup, self.pool, self.progress = step, staging, warmup, pool, progress
        self.buffers = _buffers(inputs, device)
        self.device = next(iter(self.buffers.values())).device
        if unknown := set(fill or {}) - set(self.buffers):
            raise ValueError(f"fill: expected names of inputs {sorted(self.buffers)}, got {sorted(unknown)}")
        self.fill: dict[str, Fill] = {name: (fill or {}).get(name, 0) for name in self.buffers}
        self._extra: dict[str, int] = {}
        largest = self.sizes[-1]
        for name, buffer in self.buffers.items():
            if buffer.dim() == 0 or buffer.shape[0] not in (largest, largest + 1):
                raise ValueError(
                    f"{name}: expected {largest} rows, the largest of sizes, or {largest + 1} for offsets (batch + 1 "
                    f"entries), got shape {shape(buffer)}"
                )
            if buffer.device != self.device:
                raise ValueError(f"{name}: expected a buffer on {self.device}, got one on {buffer.device}")
            self._extra[name] = buffer.shape[0] - largest
        memory = "staging memory" if staging == "host" else "buffer"
        self._names = [Names(name, f"{name}'s {memory}") for name in self.buffers]
        self._by_size: dict[int, Captured] = {}
        self._watched = [*self.buffers.values(), *watch]
        self._addresses: tuple[int, ...] = ()
        self.staged: dict[str, torch.Tensor] = {}
        self._live: torch.Tensor | None = None
        self._live_batch = 0
        self._stage: HostStage | None = None
        self._prepare_staging()

    def _prepare_staging(self) -> None:
        fills = [self.fill[name] for name in self.buffers]
        if self.staging == "graph":
            self.staged = {name: torch.zeros_like(buffer) for name, buffer in self.buffers.items()}
            self._live = torch.zeros(1, dtype=torch.int32, device=self.device)
        elif self.staging == "host":
            self._stage = HostStage(list(self.buffers.values()), fill=fills)
            self._stage.names = self._names

    @property
    def memory(self) -> dict[int, int]:
        """Device memory in bytes that each captured size added; sizes share a pool, so the largest comes first."""
        return {size: self._by_size[size].memory for size in sorted(self._by_size)}

    def capture(self) -> GraphRunner:
        """Capture every size, the largest first so that smaller ones reuse its memory; returns the runner.

        Raises RuntimeError if the step cannot be captured. On a CPU nothing is captured: calls run the step eagerly.
        """
        if self.device.type == "cuda" and self.pool is None:
            self.pool = torch.cuda.graph_pool_handle()
        for size in _progress(self.sizes[::-1], self.progress):
            self._by_size[size] = self._capture(size)
        self._addresses = tuple(t.data_ptr() for t in self._watched)
        return self

    def _capture(self, size: int) -> Captured:
        parts = {name: buffer[: size + self._extra[name]] for name, buffer in self.buffers.items()}
        captured = Captured(size, parts, self._filler(parts))
        if self.device.type != "cuda":
            return captured
        with torch.cuda.device(self.device), torch.cuda.stream(torch.cuda.current_stream(self.device)):
            self._warm_up(captured)
            before = torch.cuda.mem_get_info()[0]
            captured.graph = torch.cuda.CUDAGraph()
            try:
                with gc_disabled(), torch.cuda.graph(captured.graph, pool=self.pool, capture_error_mode="thread_local"):
                    captured.outputs = self._body(captured)
            except Exception as error:
                _reset_capture_state(self.device)
                raise RuntimeError(
                    f"step: size {size} cannot be captured. Under capture a step may not wait for the GPU (.item(), "
                    f".cpu(), printing, a branch on a tensor), copy from memory that is not pinned, or allocate "
                    f"other than through torch; the error was: {error}"
                ) from error
            captured.memory = max(before - torch.cuda.mem_get_info()[0], 0)
        return captured

    def _warm_up(self, captured: Captured) -> None:
        """Run the step on padding rows only, so that it does not write live memory."""
        for name, part in captured.inputs.items():
            value = self.fill[name]
            if value is not None:
                part.fill_(0 if isinstance(value, str) else value)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(self.warmup):
                self._body(captured)
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()

    def _filler(self, parts: dict[str, torch.Tensor]) -> Callable[..., None]:
        """Copy of a step's tensors into the slices of the buffers, before the graph or as its first node."""
        fills = [self.fill[name] for name in parts]
        if self._stage is not None:
            return self._stage.node(list(parts.values()))
        if self._live is None:
            plan = CopyPlan(list(parts.values()), fill=fills, backend=backend_of(self.fused))
            plan.names = self._names
            return plan.run
        sources = [self.staged[name][: part.shape[0]] for name, part in parts.items()]
        rows = [Bound(self._live, extra=self._extra[name]) for name in parts]
        return CopyPlan(list(parts.values()), sources, fill=fills, rows=rows, backend=backend_of(self.fused)).run

    def _body(self, captured: Captured) -> Any:
        """Body of a graph: the copy of the inputs if it is a node, then the step."""
        if self.staging != "copy" and captured.fill is not None:
            captured.fill()
        return self.step(**captured.inputs)

    def __call__(self, **tensors: torch.Tensor) -> Any:
        batch = self._batch(tensors)
        captured = self._captured_for(batch)
        given = [tensors[name] for name in self.buffers]
        if self.staging == "copy":
            if captured.fill is not None:
                captured.fill(given)
        elif self._stage is not None:
            self._check_staged(given)
            self._stage.write(given)
        else:
            for names, tensor in zip(self._names, given, strict=True):
                check_source(tensor, self.staged[names.source], False, names)
            for name, tensor in tensors.items():
                staged, value = self.staged[name], self.fill[name]
                # Fill columns that this step does not provide; "last" applies only to 1-D inputs, which have none.
                if isinstance(value, (int, float)) and tensor.shape[1:] != staged.shape[1:]:
                    staged[: tensor.shape[0]].fill_(value)
                staged[tuple(slice(0, n) for n in tensor.shape)].copy_(tensor)
        return self.replay(batch)

    def replay(self, batch: int) -> Any:
        """Replay the step on the staged inputs and return the outputs of the first ``batch`` rows.

        Raises ValueError if ``batch`` is larger than the largest size, and RuntimeError if nothing was captured or a
        tensor has moved.
        """
        captured = self._captured_for(batch)
        if self._live is not None and self._live_batch != batch:
            self._live.fill_(batch)
            self._live_batch = batch
        self._check_moved()
        if captured.graph is None:
            captured.outputs = self._body(captured)
        else:
            captured.graph.replay()
        return _live_rows(captured.outputs, captured.size, batch)

    def _batch(self, tensors: Mapping[str, torch.Tensor]) -> int:
        if tensors.keys() != self.buffers.keys():
            missing, unknown = sorted(set(self.buffers) - set(tensors)), sorted(set(tensors) - set(self.buffers))
            got = f"got {unknown} " if unknown else ""
            got += f"{'and ' * bool(unknown)}{missing} not given" if missing else "too"
            raise ValueError(f"inputs: expected {sorted(self.buffers)}, {got}")
        batches = {}
        for name, tensor in tensors.items():
            if not isinstance(tensor, torch.Tensor):
                raise TypeError(f"{name}: expected a tensor, got {type(tensor).__name__}")
            if not tensor.dim():
                raise ValueError(f"{name}: expected {self.buffers[name].dim()} dimensions, got {shape(tensor)}")
            batches[name] = tensor.shape[0] - self._extra[name]
        batch = next(iter(batches.values()))
        if any(n != batch for n in batches.values()):
            raise ValueError(f"inputs: expected one batch, got {batches}")
        return batch

    def _check_staged(self, given: Sequence[torch.Tensor]) -> None:
        """Raise ValueError for 3-D tensors with smaller inner dimensions, which staging memory does not support."""
        for (name, _, _), tensor in zip(self._names, given, strict=True):
            buffer = self.buffers[name]
            if tensor.dim() == buffer.dim() == 3 and tensor.shape[1:] != buffer.shape[1:]:
                _, rows, columns = buffer.shape
                raise ValueError(f"{name}: expected shape [batch, {rows}, {columns}], got {shape(tensor)}")

    def _captured_for(self, batch: int) -> Captured:
        if not self._by_size:
            raise RuntimeError("runner: expected capture() before the first call")
        if not 0 <= batch <= self.sizes[-1]:
            raise ValueError(f"batch: expected 0 to {self.sizes[-1]}, the largest size that was captured, got {batch}")
        return self._by_size[self.sizes[bisect.bisect_left(self.sizes, batch)]]

    def _check_moved(self) -> None:
        if tuple(map(torch.Tensor.data_ptr, self._watched)) == self._addresses:
            return
        for i, (tensor, was) in enumerate(zip(self._watched, self._addresses, strict=True)):
            if tensor.data_ptr() != was:
                names = list(self.buffers)
                name = names[i] if i < len(names) else f"watch[{i - len(names)}]"
                raise RuntimeError(
                    f"{name}: expected address {was:#x} as when it was captured, got {tensor.data_ptr():#x}; "
                    f"capture() again after replacing a tensor"
                )


def _sizes(sizes: Iterable[int]) -> list[int]:
    """Sorted sizes without duplicates; TypeError or ValueError for anything but ints of at least 1."""
    try:
        given = list(sizes)
        whole = sorted({operator.index(size) for size in given})
    except TypeError:
        raise TypeError(f"sizes: expected a list of ints such as [1, 2, 4], got {sizes!r}") from None
    if any(isinstance(size, bool) for size in given):
        raise TypeError(f"sizes: expected a list of ints such as [1, 2, 4], got {sizes!r}")
    if not whole or whole[0] < 1:
        raise ValueError(f"sizes: expected at least one size of at least 1, got {whole}")
    return whole


def _buffers(inputs: Mapping[str, Input], device: torch.device | str | None) -> dict[str, torch.Tensor]:
    if not inputs:
        raise ValueError("inputs: expected at least one buffer, got none")
    specs = {name: given for name, given in inputs.items() if not isinstance(given, torch.Tensor)}
    given = {name: buffer for name, buffer in inputs.items() if isinstance(buffer, torch.Tensor)}
    if device is None:
        if not given:
            raise ValueError("device: expected one, since no input is a tensor, got None")
        device = next(iter(given.values())).device
    allocated = allocate_together(specs, torch.device(device)) if specs else {}
    return {name: given[name] if name in given else allocated[name] for name in inputs}


def _live_rows(outputs: Any, size: int, batch: int) -> Any:
    """Outputs sliced to the live rows, if dimension 0 is the padded batch."""
    if isinstance(outputs, torch.Tensor):
        return outputs[:batch] if outputs.dim() and outputs.shape[0] == size and batch != size else outputs
    if isinstance(outputs, dict):
        return {name: _live_rows(value, size, batch) for name, value in outputs.items()}
    if isinstance(outputs, tuple) and hasattr(outputs, "_fields"):
        return type(outputs)(*(_live_rows(value, size, batch) for value in outputs))
    if isinstance(outputs, (tuple, list)):
        return type(outputs)(_live_rows(value, size, batch) for value in outputs)
    return outputs


@contextmanager
def gc_disabled() -> Iterator[None]:
    """Disable garbage collection: finalizers may free device memory, which ends a capture, and take time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _reset_capture_state(device: torch.device) -> None:
    """Run an empty capture: after a failed one torch still treats its generator as captured."""
    nothing = torch.zeros((), device=device)
    with suppress(RuntimeError), torch.cuda.graph(torch.cuda.CUDAGraph()):
        nothing.zero_()


def _progress(sizes: Sequence[int], show: bool | None) -> Iterable[int]:
    from rich.console import Console
    from rich.progress import track

    show = sys.stderr.isatty() if show is None else show
    return track(sizes, "capture", console=Console(stderr=True), transient=True, disable=not show)
