"""What a launch in Triton costs the host, paid once for each look of a call.

Triton looks at every argument of every launch to find the kernel that was compiled for it, and a tensor descriptor
checks itself whenever one is made. Neither changes while shapes, strides, dtypes and the alignment of addresses stay
(`look`): the first launch keeps the kernel that Triton gives back, the next ones go to it, and descriptors are copies
of the first ones with another address. `Launch` is for a job that is looked at as a whole, `launch` for one kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from .op import PrefillJob

REMEMBERED = 4096
KIND = 16  # bytes: to what an address is a multiple of, or not


def look(job: PrefillJob) -> tuple[Hashable, ...]:
    """What decides how a job runs: everything but the values and the addresses."""
    q, k, v, cu_q, cu_k, *sizes, sinks, return_lse = job
    addresses = [x.data_ptr() % KIND for x in (q, k, v, sinks, cu_q, cu_k) if x is not None]
    lengths = None if cu_q is None else cu_q.shape
    return (
        q.shape, q.stride(), k.shape, k.stride(), v.stride(), q.dtype, q.device, lengths, sinks is None, return_lse,
        *sizes, *addresses,
    )  # fmt: skip


def heads_first(x: torch.Tensor) -> tuple[list[int], list[int]]:
    """Shape and strides of a dense tensor as ``[B, H, S, D]``: a descriptor's block is tokens of one head."""
    (batch, tokens, heads, dim), (by_batch, by_token, by_head, inner) = x.shape, x.stride()
    return [batch, heads, tokens, dim], [by_batch, by_head, by_token, inner]


def empty(descriptor: Any) -> Any:
    """Without its tensor, which would be kept alive: to be `moved`."""
    descriptor.base = None
    return descriptor


def moved(descriptor: Any, to: torch.Tensor) -> Any:
    """The same descriptor of another tensor that looks the same; what is checked when one is made holds for it too."""
    copy = object.__new__(type(descriptor))
    copy.__dict__.update(descriptor.__dict__, base=to)
    return copy


class Launch:
    """A kernel with all arguments but its first ones, the tensors; ``constants`` are named, as are ``options``."""

    def __init__(
        self, kernel: Any, programs: int, numbers: tuple[float, ...], constants: dict[str, Any], options: dict[str, Any]
    ) -> None:
        self.kernel, self.grid, self.numbers, self.constants, self.options = (
            kernel, (programs, 1, 1), numbers, constants, options,
        )  # fmt: skip
        order = [name for name in kernel.arg_names if name in constants]
        self.rest = (*numbers, *(constants[name] for name in order))
        self.again: Callable[..., object] | None = None

    def __call__(self, *tensors: Any) -> None:
        if self.again is not None:
            self.again(*tensors, *self.rest)
            return
        if _compiled is not None:
            named = {**self.constants, **self.options}
            _compiled.append(self.kernel.warmup(*tensors, *self.numbers, grid=self.grid, **named))
            return
        compiled = self.kernel[self.grid](*tensors, *self.numbers, **self.constants, **self.options)
        self.again = None if compiled is None else compiled[self.grid]  # of the interpreter there is none


_compiled: list[Any] | None = None  # by first launches, while they do no more than that


@contextmanager
def compiling() -> Iterator[list[Any]]:
    """First launches compile their kernel, put it into the list and go no further; in the whole process."""
    global _compiled
    _compiled = []
    try:
        yield _compiled
    finally:
        _compiled = None


Run = Callable[[PrefillJob, torch.Tensor, torch.Tensor | None], None]
_known: dict[tuple[Hashable, ...], Run] = {}


def remembered(key: tuple[Hashable, ...], make: Callable[[], Run]) -> Run:
    """What was made for the key before, or is made now."""
    run = _known.get(key)
    if run is None:
        if len(_known) >= REMEMBERED:
            _known.clear()
        run = _known[key] = make()
    return run


_launched: dict[tuple[Hashable, ...], tuple[Any, tuple[Any, ...]]] = {}  # the kernel, its constants in order
# By kernel, which live as long as their modules: which arguments have values that Triton does not look at.
_free: dict[int, tuple[bool, ...]] = {}


def launch(
    kernel: Any, grid: tuple[int, int, int], args: tuple[Any, ...], constants: dict[str, Any], **options: Any
) -> None:
    """``kernel[grid](*args, **constants, **options)``, with ``args`` all arguments that are no constants, in order."""
    if not hasattr(kernel, "params"):  # interpreted
        kernel[grid](*args, **constants, **options)
        return
    name = id(kernel)
    free = _free.get(name)
    if free is None:
        free = _free[name] = tuple(param.do_not_specialize for param in kernel.params)
    looks: list[Hashable] = [name, torch.cuda.current_device(), *constants.values(), *options.values()]
    for arg, any_value in zip(args, free, strict=False):
        kind = type(arg)  # an instance of Tensor takes long to be asked for
        if kind is int:
            looks.append(arg > 0x7FFFFFFF if any_value else arg)
        elif hasattr(arg, "block_shape"):
            looks += (*arg.block_shape, arg.base.dtype)
        elif kind is not float:
            looks.append(arg.data_ptr() % KIND)
            looks.append(arg.dtype)
    key = tuple(looks)
    known = _launched.get(key)
    if known is None:
        if len(_launched) >= REMEMBERED:
            _launched.clear()
        in_order = tuple(constants[name] for name in kernel.arg_names if name in constants)
        _launched[key] = kernel[grid](*args, **constants, **options), in_order
    else:
        known[0][grid](*args, *known[1])
