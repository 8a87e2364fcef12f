"""``copy_pages``: copies blocks of packed pages between pools in device and host memory, in one launch."""

from __future__ import annotations

import functools
import struct
from pathlib import Path

import torch

from kvstrata import jit
from kvstrata.backends import choose, missing
from kvstrata.call_cache import PerThread, dispatched, signature
from kvstrata.checks import check_tensor, fail
from kvstrata.layout.blocks import ALIGNMENT, check_apart

from .arguments import check_address, check_strided
from .cuda import launch_on

SOURCE = Path(__file__).with_name("copy_pages.cu")
PARAMS = struct.Struct("4Q6q2i")
POINTERS = struct.Struct("4Q")
THREADS, PER = 256, 4  # threads per block, 16-byte vectors in flight per thread


def _check(src: torch.Tensor, dst: torch.Tensor, src_blocks: torch.Tensor, dst_blocks: torch.Tensor) -> None:
    named = {"src": src, "dst": dst, "src_blocks": src_blocks, "dst_blocks": dst_blocks}
    for name, x in named.items():
        check_strided(name, x)
    for name, x in (("src", src), ("dst", dst)):
        if x.device.type not in ("cpu", "cuda"):
            fail(name, "a tensor on a CUDA device or in host memory", f"one on {x.device}")
        if x.dtype != torch.uint8:
            fail(name, "torch.uint8", x.dtype, TypeError)
        if x.dim() != 3 or x.shape[2] % ALIGNMENT:
            fail(name, f"[num_blocks, kv_heads, a multiple of {ALIGNMENT}]", f"shape {tuple(x.shape)}")
        if x.stride(2) != 1 or any(n % ALIGNMENT for n in x.stride()[:2]):
            fail(name, f"strides of multiples of {ALIGNMENT} bytes and 1", x.stride())
    check_apart(dst, "dst")
    if dst.shape[1:] != src.shape[1:]:
        fail("dst", f"blocks of {tuple(src.shape[1:])} as src", tuple(dst.shape[1:]))
    for name, x in (("src_blocks", src_blocks), ("dst_blocks", dst_blocks)):
        if x.dtype not in (torch.int32, torch.int64):
            fail(name, "int32 or int64", x.dtype, TypeError)
        if x.dim() != 1 or not x.is_contiguous():
            fail(name, "one contiguous dimension", f"shape {tuple(x.shape)} and strides {x.stride()}")
    if dst_blocks.shape != src_blocks.shape or dst_blocks.dtype != src_blocks.dtype:
        fail("dst_blocks", f"{src_blocks.dtype} {tuple(src_blocks.shape)} as src_blocks",
              f"{dst_blocks.dtype} {tuple(dst_blocks.shape)}")  # fmt: skip
    gpus = {x.device for x in (src, dst) if x.device.type == "cuda"}
    where = next(iter(gpus), torch.device("cpu"))
    if len(gpus) > 1:
        fail("dst", f"a tensor on {src.device} or in host memory", dst.device)
    for name, x in (("src_blocks", src_blocks), ("dst_blocks", dst_blocks)):
        if x.device != where:
            fail(name, f"a tensor on {where}", x.device)


def _missing(backend: str, src: torch.Tensor, dst: torch.Tensor, device: torch.device) -> str | None:
    if backend == "reference":
        return None
    if reason := missing(backend, device):
        return reason
    for name, x in (("src", src), ("dst", dst)):
        if device.type == "cuda" and x.device.type == "cpu" and not x.is_pinned():
            return f"{backend}: expected {name} in pinned host memory, got pageable memory"
    return None


def _reference(src: torch.Tensor, dst: torch.Tensor, src_blocks: torch.Tensor, dst_blocks: torch.Tensor) -> None:
    live = (src_blocks >= 0) & (dst_blocks >= 0) & (src_blocks < len(src)) & (dst_blocks < len(dst))
    blocks = src[src_blocks[live].long().to(src.device)]
    dst[dst_blocks[live].long().to(dst.device)] = blocks.to(dst.device)


@functools.lru_cache(maxsize=16)
def _kernel(entry: str, device: int) -> jit.Kernel:
    return jit.load(SOURCE, entry, jit.arch_of(device))


_launches: PerThread[jit.Launch] = PerThread()


def _prepare(src: torch.Tensor, dst: torch.Tensor, src_blocks: torch.Tensor) -> jit.Launch:
    """Launch of copies with the same signature, complete except for the addresses."""
    device, (heads, size) = src_blocks.get_device(), src.shape[1:]
    sizes = (*src.stride()[:2], *dst.stride()[:2], src.shape[0], dst.shape[0], heads, size // ALIGNMENT)
    index = "int" if src_blocks.dtype == torch.int32 else "long long"
    grid = (len(src_blocks), -(-heads * (size // ALIGNMENT) // (THREADS * PER)))
    with torch.cuda.device(device):
        jit.bind_context(device)
        kernel = _kernel(f"copy_pages<{index}, {PER}>", device)
        return jit.Launch(kernel, grid, THREADS, PARAMS.pack(0, 0, 0, 0, *sizes))


def _cuda(*tensors: torch.Tensor) -> None:
    key = signature(tensors)
    launch = _launches.known.get(key)
    if launch is None:
        launch = _launches.known[key] = _prepare(*tensors[:3])
    POINTERS.pack_into(launch.params, 0, *(x.data_ptr() for x in tensors))
    launch_on(launch, tensors[2].get_device())


_library = torch.library.Library("kvstrata", "FRAGMENT")
_library.define("copy_pages(Tensor src, Tensor(a!) dst, Tensor src_blocks, Tensor dst_blocks, str backend) -> ()")


def _copy(
    src: torch.Tensor, dst: torch.Tensor, src_blocks: torch.Tensor, dst_blocks: torch.Tensor, backend: str
) -> None:
    """Operator ``kvstrata::copy_pages``."""
    _check(src, dst, src_blocks, dst_blocks)
    check_address("src", src)
    check_address("dst", dst)
    device = src_blocks.device
    backend = choose(backend, device, lambda name: _missing(name, src, dst, device))
    if len(src_blocks) == 0 or src.shape[1] * src.shape[2] == 0:
        return
    if backend == "reference":
        _reference(src, dst, src_blocks, dst_blocks)
    elif backend == "cuda":
        _cuda(src, dst, src_blocks, dst_blocks)
    else:
        from . import copy_triton

        copy_triton.copy_pages(src, dst, src_blocks, dst_blocks)


_library.impl("copy_pages", _copy, "CompositeExplicitAutograd")


@torch.library.register_fake("kvstrata::copy_pages", lib=_library)
def _fake(
    src: torch.Tensor, dst: torch.Tensor, src_blocks: torch.Tensor, dst_blocks: torch.Tensor, backend: str
) -> None:
    _check(src, dst, src_blocks, dst_blocks)


def copy_pages(
    src: torch.Tensor,
    dst: torch.Tensor,
    src_blocks: torch.Tensor,
    dst_blocks: torch.Tensor,
    *,
    backend: str = "auto",
) -> None:
    """Copy whole blocks of packed pages, byte for byte: offload to host memory and back, copy-on-write, beams.

    Args:
        src: uint8 ``[num_blocks, kv_heads, block bytes]`` on a device or in pinned host memory; strides are multiples
            of 16 bytes, the last one 1.
        dst: as ``src``, with blocks of the same size; may be the same memory. Mutated: the given blocks.
        src_blocks: int32 or int64 ``[n]``, on the device if either pool is. Block ``src_blocks[i]`` of src goes to
            block ``dst_blocks[i]`` of dst; a negative number or one past the end is padding.
        dst_blocks: as ``src_blocks``; no block twice, and none that this call also reads.
        backend: ``auto``, ``reference``, ``triton`` or ``cuda``. Pageable host memory is left to ``reference``, which
            waits for the device.

    Raises:
        ValueError, TypeError: an argument has a wrong shape, stride, device or dtype; the error names it.
        RuntimeError: the backend is not available for this call.

    One launch on a GPU backend. Safe on any stream, under ``torch.compile`` and, on a GPU backend, under CUDA-graph
    capture: block numbers are read at replay.

    Example:
        >>> fmt = kvstrata.Format.parse("K4V4", head_dim=64, page_tokens=16)
        >>> pool = torch.randint(0, 256, (4, 2, fmt.page_bytes), dtype=torch.uint8)
        >>> kvstrata.copy_pages(pool, pool, torch.tensor([0, 1]), torch.tensor([2, 3]))
        >>> bool((pool[2:] == pool[:2]).all())
        True
    """
    tensors = (src, dst, src_blocks, dst_blocks)
    if not dispatched(tensors):
        _copy(*tensors, backend)
        return
    for name, x in zip(("src", "dst", "src_blocks", "dst_blocks"), tensors, strict=True):
        check_tensor(name, x)
    torch.ops.kvstrata.copy_pages(*tensors, backend)
