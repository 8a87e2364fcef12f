"""``store_kv``: writes K and V rows into the blocks of a paged cache.

A call is checked once per combination of shapes, strides, dtypes and devices; the outcome is a plan, cached per
thread. The layers of a model call with the same combination repeatedly, so the latest plan is tried first and one
comparison in C++ decides whether it fits. Under tracing (``torch.compile``, fake tensors, dispatch modes) the call
becomes the operator ``kvstrata::store_kv``, which mutates the two caches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kvstrata import jit
from kvstrata.backends import resolve
from kvstrata.call_cache import PerThread, guard_of, signature, traced

from . import reference
from .job import Task, Tensors
from .job import check as check_call

BACKENDS = ("auto", "reference", "triton", "cuda", "cuda_direct", "cuda_staged", "cuda_bulk")
OPTIONAL = ("v", "v_cache", "k_scale", "v_scale")
Run = Callable[[Tensors], None]
Launch = Callable[..., None]  # takes addresses in the order of the kernel's parameters


class StorePlan:
    """Launch of a checked combination, and the guard that recognises further calls of it."""

    def __init__(self, tensors: Tensors, layout: str, backend: str, overlap: bool, address_bits: int) -> None:
        k_cache, slot_mapping = tensors[2], tensors[4]
        task = check_call(tensors, layout)
        requested, backend = backend, resolve(backend, k_cache.device, BACKENDS)
        if overlap and not backend.startswith("cuda"):
            raise ValueError(f"overlap: expected a CUDA C++ backend, got {backend!r}")
        if overlap and (capability := torch.cuda.get_device_capability(k_cache.device)) < (9, 0):
            raise ValueError(f"overlap: expected compute capability (9, 0), {k_cache.device} has {capability}")
        self.address_bits = address_bits
        self.guard = guard_of([t for t in tensors if t is not None])
        self.options: tuple[Any, ...] | None = None  # options of calls that `launch` alone can repeat
        self.run: Run
        if task.elements == 0 or task.slots_in_cache == 0:
            self.run = lambda tensors: None
        elif backend == "reference":
            self.run = lambda tensors: reference.store_kv(tensors, layout)
        elif backend == "triton":
            self.run = _triton(task)
        else:
            self.launch = launch = _cuda(task, slot_mapping, backend, overlap, address_bits)
            self.run = lambda tensors: launch(*_addresses(tensors))
            self.options = (layout, requested, overlap, *(tensors[i] is None for i in (1, 3, 5, 6)))


def _triton(task: Task) -> Run:
    from . import triton as store_triton

    def run(tensors: Tensors) -> None:
        with torch.cuda.device_of(tensors[2]):
            store_triton.store_kv(task, tensors)

    return run


def _cuda(task: Task, slot_mapping: torch.Tensor, backend: str, overlap: bool, address_bits: int) -> Launch:
    from . import cuda as store_cuda

    device = slot_mapping.get_device()
    with torch.cuda.device(device):
        jit.bind_context(device)
        launch = store_cuda.plan(task, slot_mapping, address_bits, backend, overlap)
    write, params = store_cuda.POINTERS.pack_into, launch.params
    stream_of = torch._C._cuda_getCurrentRawStream
    current_device = torch._C._cuda_getDevice

    def run(*addresses: int) -> None:
        write(params, 0, *addresses)
        if current_device() == device:
            launch(stream_of(device))
        else:
            with torch.cuda.device(device):
                launch(stream_of(device))

    return run


class _Plans(PerThread[StorePlan]):
    """Plans of one thread; launches write their parameters in place, so threads cannot share them."""

    latest: StorePlan | None = None

    def find(self, tensors: Tensors, layout: str, backend: str, overlap: bool, address_bits: int) -> StorePlan:
        key = (*signature(tensors), layout, backend, overlap, address_bits)
        plan = self.known.get(key)
        if plan is None:
            plan = self.known[key] = StorePlan(tensors, layout, backend, overlap, address_bits)
        else:  # equal to a kernel, but not to the guard: grad or inference mode changed
            plan.guard = guard_of([t for t in tensors if t is not None])
        self.latest = plan
        return plan


_plans = _Plans()
_is_compiling = torch.compiler.is_compiling


def _addresses(tensors: Tensors | tuple[Any, ...]) -> tuple[int, ...]:
    """Addresses in the order of the kernel's parameters; 0 for None."""
    k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale = tensors
    return (
        k.data_ptr(),
        k_cache.data_ptr(),
        0 if k_scale is None else k_scale.data_ptr(),
        0 if v is None else v.data_ptr(),
        0 if v_cache is None else v_cache.data_ptr(),
        0 if v_scale is None else v_scale.data_ptr(),
        slot_mapping.data_ptr(),
    )


def _store(*arguments: Any) -> None:
    """Operator ``kvstrata::store_kv``: find or create the plan of a call, and run it."""
    tensors, (layout, backend, overlap) = Tensors(*arguments[:7]), arguments[7:]
    addresses = _addresses(tensors)
    # Low bits of the addresses of rows and caches, which limit the access width.
    address_bits = (addresses[0] | addresses[1] | addresses[3] | addresses[4]) & 15
    _plans.find(tensors, layout, backend, overlap, address_bits).run(tensors)


_library = torch.library.Library("kvstrata", "FRAGMENT")
_library.define(
    "store_kv(Tensor k, Tensor? v, Tensor(a!) k_cache, Tensor(b!)? v_cache, Tensor slot_mapping, Tensor? k_scale,"
    " Tensor? v_scale, str layout, str backend, bool overlap) -> ()"
)
_library.impl("store_kv", _store, "CompositeExplicitAutograd")


@torch.library.register_fake("kvstrata::store_kv", lib=_library)
def _store_fake(*arguments: Any) -> None:
    check_call(Tensors(*arguments[:7]), arguments[7])


def _check_slots(slot_mapping: torch.Tensor, slots_in_cache: int) -> None:
    """Raise IndexError for the first slot past the end of the cache; reads the slots back to the host."""
    if _is_compiling() or (slot_mapping.is_cuda and torch.cuda.is_current_stream_capturing()):
        raise RuntimeError("check: expected False under graph capture and torch.compile (it reads slots), got True")
    past = (slot_mapping >= slots_in_cache).nonzero()
    if past.numel():
        row = int(past[0])
        slot = int(slot_mapping[row])
        raise IndexError(f"slot_mapping[{row}]: expected at most {slots_in_cache - 1}, the last slot, got {slot}")


def store_kv(
    k: torch.Tensor,
    v: torch.Tensor | None,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor | None,
    slot_mapping: torch.Tensor,
    *,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    layout: str = "NHD",
    check: bool = False,
    overlap: bool = False,
    backend: str = "auto",
) -> None:
    """Write K and V rows into their cache slots, in one launch.

    Args:
        k: ``[T, H, Dk]`` float32, float16, bfloat16 or float8; any token and head stride, inner stride 1.
        v: ``[T, H, Dv]`` of the same dtype, or None together with ``v_cache`` (latent caches).
        k_cache: ``[slots, H, Dk]``, ``[num_blocks, block_size, H, Dk]`` (``layout="NHD"``) or
            ``[num_blocks, H, block_size, Dk]`` (``layout="HND"``), also a strided view of a larger pool. Mutated.
        v_cache: as ``k_cache``, with Dv. Mutated.
        slot_mapping: ``[T]`` int32 or int64. A slot is row ``slot % block_size`` of block ``slot // block_size``. Rows
            whose slot is negative or past the end are not written. If slots are equal, any of their rows may remain.
        k_scale: for a float8 cache fed from a wider dtype: float32, one value or ``[H]``; stores
            ``k * (1 / k_scale)``, rounded to nearest even and saturated. None is 1.
        v_scale: scale of V; ``[H]`` if ``k_scale`` is, else one value.
        layout: ``NHD`` or ``HND``, of a cache in blocks.
        check: raise IndexError for a slot past the end, before anything is written. Synchronises with the GPU.
        overlap: launch with programmatic stream serialization (sm_90): the kernel may start before the previous one in
            the stream ends; it waits for that one's writes before it reads.
        backend: ``auto``, ``reference``, ``triton``, ``cuda``, or one of its kernels: ``cuda_direct``,
            ``cuda_staged``, ``cuda_bulk``.

    Raises:
        ValueError, TypeError: an argument has a wrong shape, stride, value, device or dtype; the error names it.
        IndexError: with ``check``, a slot is past the end.
        RuntimeError: the backend is not available; or ``check`` under graph capture or ``torch.compile``.

    Nothing is written if an error is raised. Safe on any stream and under ``torch.compile(fullgraph=True)``. Safe under
    CUDA-graph capture on a GPU backend, without ``check``, once a call of the same shapes has compiled the kernel.

    Example:
        >>> k, v = torch.randn(2, 3, 8, 64, dtype=torch.float16)
        >>> k_cache, v_cache = torch.zeros(2, 4, 16, 8, 64, dtype=torch.float16)  # 4 blocks of 16 slots
        >>> kvstrata.store_kv(k, v, k_cache, v_cache, torch.tensor([0, 17, -1]))
        >>> bool((k_cache[1, 1] == k[1]).all())
        True
    """
    if check:
        task = check_call(Tensors(k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale), layout)
        _check_slots(slot_mapping, task.slots_in_cache)
    if _is_compiling():
        torch.ops.kvstrata.store_kv(k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale, layout, backend, overlap)
        return
    # The path of almost every call, inlined: its host time is half that of the launch. The guard fails for
    # other shapes, strides or dtypes, for subclasses and under dispatch modes.
    plan = _plans.latest
    if plan is not None and plan.options == (
        layout, backend, overlap, v is None, v_cache is None, k_scale is None, v_scale is None,
    ):  # fmt: skip
        given = (k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale)
        plain = v is not None and k_scale is v_scale is None
        if plan.guard(*given[:5]) if plain else plan.guard(*[t for t in given if t is not None]):
            addresses = _addresses(given)
            if plan.address_bits == (addresses[0] | addresses[1] | addresses[3] | addresses[4]) & 15:
                plan.launch(*addresses)
                return
    tensors = Tensors(k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale)
    for name, argument in zip(Tensors._fields, tensors, strict=True):
        if not (isinstance(argument, torch.Tensor) or (argument is None and name in OPTIONAL)):
            raise TypeError(f"{name}: expected a tensor, got {type(argument).__name__}")
    subclass = any(x is not None and type(x) is not torch.Tensor for x in tensors)
    store = torch.ops.kvstrata.store_kv if subclass or traced() else _store
    store(*tensors, layout, backend, overlap)
