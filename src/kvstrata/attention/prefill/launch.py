"""Cheap repeated launches of Triton kernels.

Triton inspects every argument of every launch to find the compiled kernel, and a tensor descriptor validates itself
when it is created. The outcome depends only on shapes, strides, dtypes and the alignment of addresses (`signature`):
the first launch keeps the compiled kernel, later ones call it directly, and descriptors are copies of the first ones
with another address. `Launch` is for a job with one `signature`, `launch` for a single kernel call.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from kvstrata.call_cache import Bounded

from .job import PrefillJob

ALIGNMENT = 16  # bytes: Triton compiles another kernel for addresses that are not a multiple of it


def signature(job: PrefillJob) -> tuple[Hashable, ...]:
    """Cache key of a job: everything but values and addresses, of which only the alignment matters."""
    q, k, v, cu_q, cu_k, *sizes, sinks, return_lse, out = job
    addresses = [x.data_ptr() % ALIGNMENT for x in (q, k, v, sinks, cu_q, cu_k, out) if x is not None]
    lengths = None if cu_q is None else cu_q.shape
    return (
        q.shape, q.stride(), k.shape, k.stride(), v.stride(), q.dtype, q.device, lengths, sinks is None, return_lse,
        None if out is None else out.stride(), *sizes, *addresses,
    )  # fmt: skip


def heads_first(x: torch.Tensor) -> tuple[list[int], list[int]]:
    """Shape and strides of a dense ``[B, S, H, D]`` as ``[B, H, S, D]``: a descriptor's block is tokens of one head."""
    heads = x.transpose(1, 2)
    return [*heads.shape], [*heads.stride()]


def empty(descriptor: Any) -> Any:
    """Drop a descriptor's tensor, so that it is not kept alive; `moved` gives it another."""
    descriptor.base = None
    return descriptor


def moved(descriptor: Any, to: torch.Tensor) -> Any:
    """Copy of a descriptor for another tensor with the same `signature`; skips the checks of the constructor."""
    copy = object.__new__(type(descriptor))
    copy.__dict__.update(descriptor.__dict__, base=to)
    return copy


class Launch:
    """Kernel bound to all its arguments but the leading tensors; ``constants`` and ``options`` are passed by name."""

    def __init__(
        self, kernel: Any, programs: int, numbers: tuple[float, ...], constants: dict[str, Any], options: dict[str, Any]
    ) -> None:
        self.kernel, self.grid, self.numbers, self.constants, self.options = (
            kernel, (programs, 1, 1), numbers, constants, options,
        )  # fmt: skip
        order = [name for name in kernel.arg_names if name in constants]
        self.rest = (*numbers, *(constants[name] for name in order))
        self.relaunch: Callable[..., object] | None = None

    def __call__(self, *tensors: Any) -> None:
        if self.relaunch is not None:
            self.relaunch(*tensors, *self.rest)
            return
        if _compiled is not None:
            named = {**self.constants, **self.options}
            _compiled.append(self.kernel.warmup(*tensors, *self.numbers, grid=self.grid, **named))
            return
        compiled = self.kernel[self.grid](*tensors, *self.numbers, **self.constants, **self.options)
        self.relaunch = None if compiled is None else compiled[self.grid]  # None under the interpreter


_compiled: list[Any] | None = None  # kernels collected by `compiling`


@contextmanager
def compiling() -> Iterator[list[Any]]:
    """Context in which a first `Launch` only compiles its kernel and appends it to the list; process-wide."""
    global _compiled
    _compiled = []
    try:
        yield _compiled
    finally:
        _compiled = None


_launched: Bounded[tuple[Any, tuple[Any, ...]]] = Bounded()  # the compiled kernel, its constants in order
# By id of a kernel, which lives as long as its module: arguments that Triton does not specialize on.
_free: dict[int, tuple[bool, ...]] = {}


def _key(
    kernel: Any, args: tuple[Any, ...], constants: dict[str, Any], options: dict[str, Any]
) -> tuple[Hashable, ...]:
    """Key of a launch in `_launched`: everything that Triton's choice of a compiled kernel depends on."""
    name = id(kernel)
    free = _free.get(name)
    if free is None:
        free = _free[name] = tuple(param.do_not_specialize for param in kernel.params)
    key: list[Hashable] = [name, torch.cuda.current_device(), *constants.values(), *options.values()]
    for arg, any_value in zip(args, free, strict=False):
        kind = type(arg)  # isinstance is slow for tensors
        if kind is int:
            key.append(arg > 0x7FFFFFFF if any_value else arg)
        elif hasattr(arg, "block_shape"):
            key += (*arg.block_shape, arg.base.dtype)
        elif kind is not float:
            key.append(arg.data_ptr() % ALIGNMENT)
            key.append(arg.dtype)
    return tuple(key)


def launch(
    kernel: Any, grid: tuple[int, int, int], args: tuple[Any, ...], constants: dict[str, Any], **options: Any
) -> None:
    """``kernel[grid](*args, **constants, **options)``; ``args``: all arguments that are not constants, in order."""
    if not hasattr(kernel, "params"):  # interpreted
        kernel[grid](*args, **constants, **options)
        return
    key = _key(kernel, args, constants, options)
    known = _launched.get(key)
    if known is None:
        in_order = tuple(constants[name] for name in kernel.arg_names if name in constants)
        _launched[key] = kernel[grid](*args, **constants, **options), in_order
    else:
        known[0][grid](*args, *known[1])


def launched(
    kernel: Any, grid: tuple[int, int, int], args: tuple[Any, ...], constants: dict[str, Any], **options: Any
) -> Callable[..., None] | None:
    """Function that repeats what `launch` launched with arguments of this form; None if there was no such launch.

    It takes the arguments that are not constants, with addresses instead of tensors, which is faster.
    """
    known = None if not hasattr(kernel, "params") else _launched.get(_key(kernel, args, constants, options))
    if known is None:
        return None
    relaunch, in_order = known[0][grid], known[1]
    return lambda *args: relaunch(*args, *in_order)
