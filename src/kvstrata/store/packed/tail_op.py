"""``store_packed`` with a tail or sink rows: the operator ``kvstrata::store_packed_tail``.

Launches are cached per thread and per combination of arguments, like those of ``store_packed``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kvstrata import jit
from kvstrata.backends import choose, missing
from kvstrata.call_cache import PerThread, guard_of, signature, traced
from kvstrata.layout import Format
from kvstrata.layout.blocks import check_format

from . import tail_reference
from .arguments import check_optional
from .tail_job import TailJob, TailTensors, check_tail


def _missing(backend: str, job: TailJob) -> str | None:
    """Reason why ``backend`` cannot run this job, or None."""
    if reason := missing(backend, job.store.pages.device):
        return reason
    if backend == "cuda":
        from . import tail_cuda

        return tail_cuda.missing(job)
    return None


class _Plans(PerThread[Callable[[TailTensors], None]]):
    """Launches of one thread; they write their parameters in place, so threads cannot share them."""

    latest: tuple[Any, ...] | None = None  # options, guard, address bits, launch of the latest call on CUDA


_plans = _Plans()
_is_compiling = torch.compiler.is_compiling


def _options(tensors: TailTensors, format: Format, backend: str) -> tuple[Any, ...]:
    """Arguments that a guard does not cover: options, and which tensors are None."""
    return (format, backend, *(x is None for x in tensors[5:]))


def _address_bits(tensors: TailTensors) -> int:
    """Alignment of rows, which a guard does not cover either; only a tensor with strides has an address."""
    addresses = tensors.k.data_ptr() | tensors.v.data_ptr() | tensors.pages.data_ptr()
    for x in (tensors.tail_k, tensors.tail_v, tensors.sink_k, tensors.sink_v):
        addresses |= 0 if x is None else x.data_ptr()
    return addresses & 15


def _cuda(job: TailJob) -> Callable[[TailTensors], None]:
    from . import cuda as store_cuda
    from . import tail_cuda

    device = job.store.pages.get_device()
    with torch.cuda.device(device):
        jit.bind_context(device)
        launch = tail_cuda.plan(job)

    def run(tensors: TailTensors) -> None:
        tail_cuda.point(launch, tensors)
        store_cuda.launch_on(launch, device)

    return run


def _run(tensors: TailTensors, format: Format, backend: str) -> None:
    """Check a call and run it."""
    job = check_tail(tensors, format)
    chosen = choose(backend, job.store.pages.device, lambda name: _missing(name, job))
    if tensors.k.shape[0] == 0 or job.store.blocks.slots == 0:
        return
    if chosen == "reference":
        tail_reference.store(job)
    elif chosen == "triton":
        from . import tail_triton

        tail_triton.store(job)
    else:
        options, address_bits = _options(tensors, format, backend), _address_bits(tensors)
        key = (*signature(tensors), options, address_bits)
        run = _plans.known.get(key)
        if run is None:
            run = _plans.known[key] = _cuda(job)
        _plans.latest = (options, guard_of([x for x in tensors if x is not None]), address_bits, run)
        run(tensors)


_library = torch.library.Library("kvstrata", "FRAGMENT")
_library.define(
    "store_packed_tail(Tensor k, Tensor v, Tensor(a!) pages, Tensor slot_mapping, Tensor seq_lens,"
    " Tensor? cu_seqlens_q, Tensor? balance, Tensor? centre, Tensor(b!)? tail_k, Tensor(c!)? tail_v,"
    " Tensor? tail_slots, Tensor(d!)? sink_k, Tensor(e!)? sink_v, Tensor? sink_slots, str format, int head_dim,"
    " int page_tokens, bool rotate, str backend) -> ()"
)
TENSORS = len(TailTensors._fields)


def _operator(*arguments: Any) -> None:
    """Operator ``kvstrata::store_packed_tail``."""
    format, head_dim, page_tokens, rotate, backend = arguments[TENSORS:]
    _run(TailTensors(*arguments[:TENSORS]), Format.parse(format, head_dim, page_tokens, rotate=rotate), backend)


_library.impl("store_packed_tail", _operator, "CompositeExplicitAutograd")


@torch.library.register_fake("kvstrata::store_packed_tail", lib=_library)
def _fake(*arguments: Any) -> None:
    format, head_dim, page_tokens, rotate, _ = arguments[TENSORS:]
    fmt = Format.parse(format, head_dim, page_tokens, rotate=rotate)
    check_tail(TailTensors(*arguments[:TENSORS]), fmt, address=False)


def store_with_tail(tensors: TailTensors, fmt: Format, backend: str) -> None:
    """Store rows with a tail or sink rows, eagerly or through the operator."""
    plain = all(type(x) is torch.Tensor for x in tensors[:5])
    if plain and not _is_compiling() and not traced() and all(x is None or type(x) is torch.Tensor for x in tensors):
        if latest := _plans.latest:
            options, guard, address_bits, run = latest
            again = options == _options(tensors, fmt, backend) and guard(*[x for x in tensors if x is not None])
            if again and address_bits == _address_bits(tensors):
                run(tensors)
                return
        _run(tensors, fmt, backend)
        return
    check_format(fmt)
    for name, x in zip(TailTensors._fields[:5], tensors, strict=False):
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name}: expected a tensor, got {type(x).__name__}")
    check_optional(TailTensors._fields, tensors)
    given = (fmt.name, fmt.head_dim, fmt.page_tokens, fmt.rotate, backend)
    torch.ops.kvstrata.store_packed_tail(*tensors, *given)
