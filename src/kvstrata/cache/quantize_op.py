"""``quantize_pages``: rows of K and V become whole pages of codes, for all heads and both sides in one launch.

Every page says which row of ``k`` and ``v`` each of its slots takes, so pages can be made of consecutive tokens of a
prompt or of any tokens that a head has chosen.
"""

from __future__ import annotations

import functools
import struct
from pathlib import Path
from typing import NamedTuple

import torch

from .. import jit
from ..backends import BACKENDS, missing
from ..layout import Format, fragments, rotate
from ..layout.rotation import block_of
from . import quantize_reference as reference

SOURCE = Path(__file__).with_name("quantize.cu")
UNIT = 64  # bytes that a page handle counts in
CXX = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}
# struct Params: k, v, pool, pages, source of k and of v, heads, centre, rotated centre, centres; four strides in bytes.
PARAMS = struct.Struct("10Q4q")


def entry_of(format: Format, dtype: torch.dtype, by_address: bool = False) -> str:
    """The template instantiation for a format and the dtype of the rows; ``by_address``: see whole_pages.py."""
    widths = f"{format.k_bits}, {format.v_bits}, {format.page_tokens}"
    index = ", long long" if by_address else ""
    return f"quantize_pages<{CXX[dtype]}, {format.head_dim}, {widths}, {str(format.rotate).lower()}{index}>"


def grid_of(format: Format, pages: int) -> tuple[int, int]:
    """Blocks and threads: a warp is one side of 16 tokens; a block is a page only where its tiles share words."""
    steps, tiles = format.head_dim // fragments.STEP_DIMS, format.page_tokens // fragments.TILE_TOKENS
    planes = [width for bits in (format.k_bits, format.v_bits) for width, _ in fragments.planes(bits)]
    if any(steps * width % 4 for width in planes):
        return pages, 64 * tiles
    return pages * 2 * tiles, 32


def _fail(argument: str, expected: str, given: object, error: type[Exception] = ValueError) -> None:
    raise error(f"{argument}: expected {expected}, got {given}")


class Job(NamedTuple):
    """The arguments of one call."""

    k: torch.Tensor
    v: torch.Tensor
    pool: torch.Tensor
    pages: torch.Tensor
    source: torch.Tensor
    heads: torch.Tensor
    format: Format
    centre: torch.Tensor | None
    centres: torch.Tensor | None


def _check(job: Job) -> None:
    k, v, pool, pages, source, heads, format, centre, centres = job
    if format.plain:
        _fail("format", "a quantised format", format.name)
    if k.dim() != 3 or k.shape[2] != format.head_dim:
        _fail("k", f"[tokens, heads, {format.head_dim}]", f"shape {tuple(k.shape)}")
    if v.shape != k.shape:
        _fail("v", f"shape {tuple(k.shape)} as k", tuple(v.shape))
    if k.dtype not in CXX:
        _fail("k", "float32, float16 or bfloat16", k.dtype, TypeError)
    if v.dtype != k.dtype:
        _fail("v", f"{k.dtype} as k", v.dtype, TypeError)
    for name, x in (("k", k), ("v", v)):
        if x.stride(2) != 1:
            _fail(name, "an inner stride of 1", x.stride(2))
    if pool.dtype != torch.uint8:
        _fail("pool", "torch.uint8", pool.dtype, TypeError)
    if pool.dim() != 1 or not pool.is_contiguous() or pool.numel() % UNIT:
        _fail("pool", f"a contiguous run of bytes, a multiple of {UNIT}", f"shape {tuple(pool.shape)}")
    if pages.dim() != 1:
        _fail("pages", "[n]", f"shape {tuple(pages.shape)}")
    n = pages.shape[0]
    shapes = {"source": (source, (n, format.page_tokens)), "heads": (heads, (n,))}
    if (centre is None) != (centres is None):
        _fail("centres", "centre and centres given together, or neither", None)
    if centre is not None and centres is not None:
        if not format.centre:
            _fail("centre", f"None for {format.name} with centre=False", "a tensor")
        if centre.dtype != torch.float32 or centre.dim() != 2 or centre.shape[1] != format.head_dim:
            _fail("centre", f"float32 [rows, {format.head_dim}]", f"{centre.dtype} of shape {tuple(centre.shape)}")
        shapes["centres"] = (centres, (n,))
    for name, (tensor, shape) in shapes.items():
        if tuple(tensor.shape) != shape:
            _fail(name, f"shape {shape}", tuple(tensor.shape))
    for name, tensor in [("pages", pages), *((name, tensor) for name, (tensor, _) in shapes.items())]:
        if tensor.dtype != torch.int32:
            _fail(name, "torch.int32", tensor.dtype, TypeError)
        if not tensor.is_contiguous():
            _fail(name, "a contiguous tensor", f"strides {tuple(tensor.stride())}")
    others = {"k": k, "v": v, "pages": pages, "source": source, "heads": heads, "centre": centre, "centres": centres}
    for name, given in others.items():
        if given is not None and given.device != pool.device:
            _fail(name, f"a tensor on {pool.device}, where pool is", given.device)


def quantize_pages(
    k: torch.Tensor,
    v: torch.Tensor,
    pool: torch.Tensor,
    pages: torch.Tensor,
    source: torch.Tensor,
    heads: torch.Tensor,
    format: Format,
    *,
    centre: torch.Tensor | None = None,
    centres: torch.Tensor | None = None,
    backend: str = "auto",
) -> None:
    """Quantise rows of K and V into pages of a pool, in one launch.

    Args:
        k: ``[T, H, D]`` float32, float16 or bfloat16, any token and head stride; ``v`` likewise.
        pool: uint8, one run of bytes. Mutated: the bytes of the pages named, all of them.
        pages: int32 ``[n]``, where each page begins, in units of 64 bytes; no two overlap.
        source: int32 ``[n, page_tokens]``: the row of ``k`` and ``v`` that a slot takes. A negative one is an empty
            slot: it gets a scale of zero.
        heads: int32 ``[n]``, the head whose rows a page takes.
        format: a quantised format; it says page size, widths and rotation.
        centre: float32 ``[m, D]``, subtracted from K before the rotation; page i takes row ``centres[i]``.
        backend: ``auto``, ``reference``, ``triton`` or ``cuda``.

    Raises ValueError or TypeError, naming the argument. Rows, pages and heads are not checked against their bounds on
    a GPU. Safe under graph capture.
    """
    if backend not in BACKENDS:
        _fail("backend", f"one of {BACKENDS}", repr(backend))
    job = Job(k, v, pool, pages, source, heads, format, centre, centres)
    _check(job)
    if backend == "auto":
        backend = _best(k, v, pool)
    elif reason := missing(backend, pool.device):
        raise RuntimeError(f"backend: {reason}")
    if pages.shape[0] == 0:
        return
    if backend == "reference":
        _reference(job)
    elif backend == "triton":
        from . import quantize_triton

        quantize_triton.quantize_pages(job)
    else:
        if not _aligned(k, v, pool):
            _fail("backend", "rows aligned to 8 bytes (float32: 16) for cuda", "others; use backend='triton'")
        _cuda(job)


def _aligned(k: torch.Tensor, v: torch.Tensor, pool: torch.Tensor) -> bool:
    """Whether a thread's four values of a row are one access, and a page's chunks too."""
    size, access = k.element_size(), 4 * k.element_size()
    strides = [n * size for x in (k, v) for n in x.stride()[:2]]
    return all(n % access == 0 for n in (*strides, k.data_ptr(), v.data_ptr())) and pool.data_ptr() % 16 == 0


def _best(k: torch.Tensor, v: torch.Tensor, pool: torch.Tensor) -> str:
    if pool.device.type != "cuda":
        return "reference"
    return "cuda" if missing("cuda", pool.device) is None and _aligned(k, v, pool) else "triton"


def _reference(job: Job) -> None:
    k, v, pool, pages, source, heads, format, centre, centres = job
    empty = (source < 0).unsqueeze(-1)
    row, head = source.clamp(min=0).long(), heads.long().unsqueeze(1)
    k_rows, v_rows = (x[row, head].float().masked_fill(empty, 0.0) for x in (k, v))
    if centre is not None and centres is not None:
        by_page = centre[centres.long()].unsqueeze(1)
        k_rows = reference.clean(k_rows, by_page).masked_fill(empty, 0.0)
    at = pages.long().unsqueeze(1) * UNIT + torch.arange(format.page_bytes, device=pool.device)
    pool[at] = reference.quantize_page(k_rows, v_rows, format)


@functools.lru_cache(maxsize=256)
def _kernel(format: Format, dtype: torch.dtype, device: int) -> jit.Kernel:
    return jit.load(SOURCE, entry_of(format, dtype), jit.arch_of(device))


def rotated_centre(centre: torch.Tensor, format: Format) -> torch.Tensor:
    """Centres as the kernel's rows are when it subtracts them: rotated, without the rotation's factor."""
    return rotate(centre) * block_of(format.head_dim) ** 0.5 if format.rotate else centre


def _cuda(job: Job) -> None:
    k, v, pool, pages, source, heads, format, centre, centres = job
    size, device = k.element_size(), pool.get_device()
    addresses = [0, 0, 0]
    if centre is not None and centres is not None:
        centre = centre.contiguous()
        rotated = rotated_centre(centre, format)
        addresses = [centre.data_ptr(), rotated.data_ptr(), centres.data_ptr()]
    params = PARAMS.pack(
        *(x.data_ptr() for x in (k, v, pool, pages, source, source, heads)),
        *addresses,
        *(n * size for x in (k, v) for n in x.stride()[:2]),
    )
    with torch.cuda.device(device):
        jit.bind_context(device)
        grid, block = grid_of(format, pages.shape[0])
        launch = jit.Launch(_kernel(format, k.dtype, device), grid, block, params)
        launch(jit.current_stream(device))
