"""``store_packed``: writes K and V rows of any tokens into packed pages that an engine owns.

Like ``store_kv``, a call is checked once per combination of shapes, strides, dtypes and devices; the outcome is a plan,
cached per thread. Under tracing the call becomes the operator ``kvstrata::store_packed``, which mutates ``pages``.
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

from . import reference
from .arguments import Calibration, calibration_tensors, check_optional, check_strided
from .job import Job, check
from .plain_rows import PlainRows, row_tensors
from .tail_job import TailTensors
from .tail_op import store_with_tail

Tensors = tuple[torch.Tensor | None, ...]  # as NAMES
REQUIRED = ("k", "v", "pages", "slot_mapping")
NAMES = (*REQUIRED, "calibration.balance", "calibration.centre")


def _missing(backend: str, job: Job) -> str | None:
    """Reason why ``backend`` cannot run this job, or None."""
    if reason := missing(backend, job.pages.device):
        return reason
    if backend == "cuda":
        from . import cuda as store_cuda

        return store_cuda.missing(job)
    return None


class PackedStorePlan:
    """Launch of a checked combination, and the guard that recognises further calls of it."""

    def __init__(self, tensors: Tensors, format: Format, backend: str, address_bits: int) -> None:
        k, v, pages, slot_mapping, balance, centre = tensors
        job = check(k, v, pages, slot_mapping, format, balance, centre)  # type: ignore[arg-type]
        self.options = (format, backend, balance is None, centre is None)
        self.address_bits = address_bits
        self.guard = guard_of([x for x in tensors if x is not None])
        self.launch: Callable[..., None] | None = None
        chosen = choose(backend, job.pages.device, lambda name: _missing(name, job))
        if job.k.shape[0] == 0 or job.blocks.slots == 0:
            self.run: Callable[[Tensors], None] = lambda tensors: None
        elif chosen == "cuda":
            self.launch = launch = _cuda(job)
            self.run = lambda tensors: launch(*_addresses(tensors))
        else:
            run = reference.store_packed if chosen == "reference" else _triton()
            blocks = job.blocks
            self.run = lambda tensors: run(Job(*tensors[:4], blocks, *tensors[4:]))  # type: ignore[arg-type,call-arg]


def _triton() -> Callable[[Job], None]:
    from . import triton as store_triton

    return store_triton.store_packed


def _cuda(job: Job) -> Callable[..., None]:
    from . import cuda as store_cuda

    device = job.pages.get_device()
    with torch.cuda.device(device):
        jit.bind_context(device)
        launch = store_cuda.plan(job)
    write, params = store_cuda.POINTERS.pack_into, launch.params

    def run(*addresses: int) -> None:
        write(params, 0, *addresses)
        store_cuda.launch_on(launch, device)

    return run


class _Plans(PerThread[PackedStorePlan]):
    """Plans of one thread; launches write their parameters in place, so threads cannot share them."""

    latest: PackedStorePlan | None = None

    def find(self, tensors: Tensors, format: Format, backend: str, address_bits: int) -> PackedStorePlan:
        key = (*signature(tensors), format, backend, address_bits)
        plan = self.known.get(key)
        if plan is None:
            plan = self.known[key] = PackedStorePlan(tensors, format, backend, address_bits)
        else:  # equal to a kernel, but not to the guard: grad or inference mode changed
            plan.guard = guard_of([x for x in tensors if x is not None])
        self.latest = plan
        return plan


_plans = _Plans()
_is_compiling = torch.compiler.is_compiling


def _addresses(tensors: Tensors) -> tuple[int, ...]:
    return tuple(0 if x is None else x.data_ptr() for x in tensors)


def _store(tensors: Tensors, format: Format, backend: str) -> None:
    """Find or create the plan of a call, and run it."""
    k, v, pages = tensors[:3]
    check_format(format)
    try:
        address_bits = (k.data_ptr() | v.data_ptr() | pages.data_ptr()) & 15  # type: ignore[union-attr]
        plan = _plans.find(tensors, format, backend, address_bits)
    except (AttributeError, RuntimeError):  # no tensor, or one without an address or strides
        for name, x in zip(NAMES, tensors, strict=True):
            if x is not None or name in REQUIRED:
                check_strided(name, x)  # type: ignore[arg-type]
        raise
    plan.run(tensors)


def _operator(
    k: torch.Tensor,
    v: torch.Tensor,
    pages: torch.Tensor,
    slot_mapping: torch.Tensor,
    balance: torch.Tensor | None,
    centre: torch.Tensor | None,
    format: str,
    head_dim: int,
    page_tokens: int,
    rotate: bool,
    backend: str,
) -> None:
    """Operator ``kvstrata::store_packed``."""
    fmt = Format.parse(format, head_dim, page_tokens, rotate=rotate)
    _store((k, v, pages, slot_mapping, balance, centre), fmt, backend)


_library = torch.library.Library("kvstrata", "FRAGMENT")
_library.define(
    "store_packed(Tensor k, Tensor v, Tensor(a!) pages, Tensor slot_mapping, Tensor? balance, Tensor? centre,"
    " str format, int head_dim, int page_tokens, bool rotate, str backend) -> ()"
)
_library.impl("store_packed", _operator, "CompositeExplicitAutograd")


@torch.library.register_fake("kvstrata::store_packed", lib=_library)
def _fake(k: Any, v: Any, pages: Any, slot_mapping: Any, balance: Any, centre: Any, format: str, head_dim: int,
          page_tokens: int, rotate: bool, backend: str) -> None:  # fmt: skip
    fmt = Format.parse(format, head_dim, page_tokens, rotate=rotate)
    check(k, v, pages, slot_mapping, fmt, balance, centre, address=False)


def store_packed(
    k: torch.Tensor,
    v: torch.Tensor,
    pages: torch.Tensor,
    slot_mapping: torch.Tensor,
    fmt: Format,
    *,
    calibration: Calibration | None = None,
    tail: PlainRows | None = None,
    sink_tokens: PlainRows | None = None,
    seq_lens: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    backend: str = "auto",
) -> None:
    """Rotate and quantise K and V rows and write them into packed pages that an engine owns, in one launch.

    Args:
        k: ``[T, kv_heads, head_dim]`` float32, float16 or bfloat16; any token and head stride, inner stride 1.
        v: as ``k``.
        pages: uint8 ``[num_blocks, kv_heads, pages_per_block * fmt.page_bytes]``, the engine's memory, also a strided
            view of a larger allocation; address and strides are multiples of 16 bytes. Mutated: only the bits of the
            tokens written.
        slot_mapping: ``[T]`` int32 or int64. Slot s is token ``s % block_size`` of block ``s // block_size``, where
            ``block_size = pages_per_block * fmt.page_tokens``. Rows whose slot is negative or past the end are padding.
            Slots of one call must differ; the codes of a slot that occurs twice are undefined.
        fmt: quantised format of the pages.
        calibration: per-layer balance and centre of K, float32 ``[kv_heads, head_dim]`` each or None. `decode_packed`
            and `prefill_packed` must be given the same.
        tail: 16-bit rows ``[max_requests, kv_heads, tokens, head_dim]`` for the newest, unfinished page of each
            request, which is packed when its last token is stored. Mutated: the last ``tokens`` positions of a request.
            Rows of a request must follow each other in k, in order of position.
        sink_tokens: 16-bit rows for the first tokens of each request, which are also packed. Mutated.
        seq_lens: int32 ``[B]``, tokens of each request, including the new ones; only with a tail or sink_tokens.
        cu_seqlens_q: int32 ``[B + 1]``: the rows of request i are ``cu[i] .. cu[i + 1]``. None: T / B each.
        backend: ``auto``, ``reference``, ``triton`` or ``cuda``.

    A token's codes and scales depend only on its own row, its slot in the page and the calibration: equal rows give
    equal bytes in any batch, chunking and order (on one backend).

    Raises:
        ValueError, TypeError: an argument has a wrong shape, stride, value, device or dtype; the error names it.
        RuntimeError: the backend is not available for this call.

    Nothing is written if an error is raised. Safe on any stream and under ``torch.compile(fullgraph=True)``. Safe under
    CUDA-graph capture on a GPU backend once a call of the same shapes has compiled the kernel; the host never waits.

    Example:
        >>> fmt = kvstrata.Format.parse("K4V4", head_dim=64, page_tokens=16)
        >>> pages = torch.zeros(8, 2, 2 * fmt.page_bytes, dtype=torch.uint8)  # 8 blocks of 32 tokens, 2 KV heads
        >>> k, v = torch.randn(2, 3, 2, 64)
        >>> kvstrata.store_packed(k, v, pages, torch.tensor([0, 33, -1]), fmt)
        >>> [bool(block.any()) for block in pages[:3]]
        [True, True, False]
    """
    balance, centre = calibration_tensors(calibration)
    if tail is not None or sink_tokens is not None:
        rows = row_tensors(tail, sink_tokens)
        given = TailTensors(k, v, pages, slot_mapping, seq_lens, cu_seqlens_q, balance, centre, *rows)  # type: ignore[arg-type]
        store_with_tail(given, fmt, backend)
        return
    tensors: Tensors = (k, v, pages, slot_mapping, balance, centre)
    if not _is_compiling():
        plan = _plans.latest
        if plan is not None and plan.launch is not None and plan.options == (
            fmt, backend, balance is None, centre is None,
        ):  # fmt: skip
            seen = tensors[:4] if balance is centre is None else [x for x in tensors if x is not None]
            if plan.guard(*seen):
                addresses = _addresses(tensors)
                if plan.address_bits == (addresses[0] | addresses[1] | addresses[2]) & 15:
                    plan.launch(*addresses)
                    return
        if not traced() and all(x is None or type(x) is torch.Tensor for x in tensors):
            _store(tensors, fmt, backend)
            return
        for name, x in (("k", k), ("v", v), ("pages", pages), ("slot_mapping", slot_mapping)):
            if not isinstance(x, torch.Tensor):
                raise TypeError(f"{name}: expected a tensor, got {type(x).__name__}")
    check_optional(("balance", "centre"), (balance, centre))
    check_format(fmt)
    torch.ops.kvstrata.store_packed(*tensors, fmt.name, fmt.head_dim, fmt.page_tokens, fmt.rotate, backend)
