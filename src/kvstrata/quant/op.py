"""``quantize_pages``: rows of K and V become whole pages of codes, for all heads and both sides in one launch.

Every page lists the row of ``k`` and ``v`` for each of its slots, so pages can hold consecutive tokens of a prompt or
any tokens that a head has chosen.
"""

from __future__ import annotations

import functools
import struct
from pathlib import Path

import torch

from kvstrata import jit
from kvstrata.backends import BACKENDS, missing
from kvstrata.checks import fail
from kvstrata.layout import Format, fragments
from kvstrata.layout.format import MAX_TIERS, UNIT

from . import reference
from .job import Job

SOURCE = Path(__file__).with_name("quantize.cu")
CXX = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}
# struct Params: k, v, pool, pages, source of k and of v, heads, centre, centres, direction; strides of heads and of
# tokens in bytes; number of pages; per tier that codes come from: bits of K and V, offsets of V and of the scales.
PARAMS = struct.Struct(f"10Q2q3i{4 * MAX_TIERS}i4x")
# Fraction of the resident warps per round, by maximum head_dim: with less than one, K and V run concurrently, if the
# machine code of both fits the instruction cache.
ROUNDS = {64: 0.5, 128: 0.75, 256: 1.0}
SAME_HEAD = 32  # a warp's pages are a multiple of this apart, so that they belong to one head if heads alternate
ASKED = 4 * (17 * 8 + 2 * 4)  # bytes: the queue of struct Asked in quantize.cu
ROW_BYTES = 16  # alignment of rows: one access of a thread


def entry_of(format: Format, dtype: torch.dtype, by_address: bool = False) -> str:
    """Template instantiation for a format and the dtype of the rows; ``by_address``: see whole_pages.py."""
    widths = f"{format.k_bits}, {format.v_bits}, {format.page_tokens}"
    index = ", long long" if by_address else ""
    return f"quantize_pages<{CXX[dtype]}, {format.head_dim}, {widths}, {str(format.rotate).lower()}{index}>"


def prepare(
    kernel: jit.Kernel, format: Format, dtype: torch.dtype, pages: int, params: bytes, directed: bool
) -> jit.Launch:
    """Launch that writes ``pages`` pages; ``directed``: with a direction.

    A warp writes one side of 16 tokens, page by page: K in one round of warps, V in several, each with half as many
    pages as the previous one. If tiles share words, a block is a page.
    """
    steps, tiles = format.head_dim // fragments.STEP_DIMS, format.page_tokens // fragments.TILE_TOKENS
    planes = [width for bits in (format.k_bits, format.v_bits) for width, _ in fragments.planes(bits)]
    centre = 4 * format.head_dim  # bytes
    if any(steps * width % 4 for width in planes):
        shared = format.k_bytes + format.v_bytes + tiles * (2 + directed) * centre
        return jit.Launch(kernel, pages, 64 * tiles, params, shared=shared)
    rows = fragments.TILE_TOKENS * format.head_dim * dtype.itemsize
    shared = 2 * (rows + centre) + ASKED + 2 * centre  # two tiles, and the centre after the butterflies, twice
    if directed:
        shared += centre + 2 * format.head_dim  # weights as lanes need them, and as given for two tiles
    share = next(share for most, share in ROUNDS.items() if format.head_dim <= most)
    warps = max(1, min(pages, int(kernel.resident(32, shared) * share) // tiles))
    warps = warps // SAME_HEAD * SAME_HEAD or warps
    rounds = (-(-pages // warps)).bit_length()
    return jit.Launch(kernel, (warps * tiles, 1 + rounds), 32, params, shared=shared)


def _check(job: Job) -> None:
    k, v, pool, pages, source, heads, format, centre, centres, direction = job
    if format.plain:
        fail("format", "a quantised format", format.name)
    if k.dim() != 3 or k.shape[2] != format.head_dim:
        fail("k", f"[tokens, heads, {format.head_dim}]", f"shape {tuple(k.shape)}")
    if v.shape != k.shape:
        fail("v", f"shape {tuple(k.shape)} as k", tuple(v.shape))
    if k.dtype not in CXX:
        fail("k", "float32, float16 or bfloat16", k.dtype, TypeError)
    if v.dtype != k.dtype:
        fail("v", f"{k.dtype} as k", v.dtype, TypeError)
    for name, x in (("k", k), ("v", v)):
        if x.stride(2) != 1:
            fail(name, "an inner stride of 1", x.stride(2))
    if pool.dtype != torch.uint8:
        fail("pool", "torch.uint8", pool.dtype, TypeError)
    if pool.dim() != 1 or not pool.is_contiguous() or pool.numel() % UNIT:
        fail("pool", f"a contiguous run of bytes, a multiple of {UNIT}", f"shape {tuple(pool.shape)}")
    if pages.dim() != 1:
        fail("pages", "[n]", f"shape {tuple(pages.shape)}")
    n = pages.shape[0]
    shapes = {"source": (source, (n, format.page_tokens)), "heads": (heads, (n,))}
    if centres is not None:
        if centre is None and direction is None:
            fail("centres", "None without centre and direction", "a tensor")
        shapes["centres"] = (centres, (n,))
    elif centre is not None or direction is not None:
        fail("centres", "rows of centre and direction where one of them is given", None)
    if centre is not None:
        if not format.centre:
            fail("centre", f"None for {format.name} with centre=False", "a tensor")
        if centre.dtype != torch.float32 or centre.dim() != 2 or centre.shape[1] != format.head_dim:
            fail("centre", f"float32 [rows, {format.head_dim}]", f"{centre.dtype} of shape {tuple(centre.shape)}")
    if direction is not None:
        rows = direction.shape[:1] if centre is None else centre.shape[:1]
        if direction.dtype != torch.int8 or direction.shape != (*rows, format.head_dim):
            expected = f"int8 [{'rows' if centre is None else rows[0]}, {format.head_dim}]"
            fail("direction", expected, f"{direction.dtype} of shape {tuple(direction.shape)}")
        if not direction.is_contiguous():
            fail("direction", "a contiguous tensor", f"strides {tuple(direction.stride())}")
    for name, (tensor, shape) in shapes.items():
        if tuple(tensor.shape) != shape:
            fail(name, f"shape {shape}", tuple(tensor.shape))
    for name, tensor in [("pages", pages), *((name, tensor) for name, (tensor, _) in shapes.items())]:
        if tensor.dtype != torch.int32:
            fail(name, "torch.int32", tensor.dtype, TypeError)
        if not tensor.is_contiguous():
            fail(name, "a contiguous tensor", f"strides {tuple(tensor.stride())}")
    others = {"k": k, "v": v, "pages": pages, "source": source, "heads": heads, "centre": centre, "centres": centres}
    others["direction"] = direction
    for name, given in others.items():
        if given is not None and given.device != pool.device:
            fail(name, f"a tensor on {pool.device}, where pool is", given.device)


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
    direction: torch.Tensor | None = None,
    backend: str = "auto",
) -> None:
    """Quantise rows of K and V into pages of a pool, in one launch.

    Args:
        k: ``[T, H, D]`` float32, float16 or bfloat16, any token and head stride; ``v`` likewise.
        pool: uint8, contiguous. Mutated: all bytes of the given pages.
        pages: int32 ``[n]``, start of each page, in units of 64 bytes; no two overlap.
        source: int32 ``[n, page_tokens]``: the row of ``k`` and ``v`` for each slot. A negative value is an empty slot,
            which gets a scale of zero.
        heads: int32 ``[n]``, the head of each page.
        format: a quantised format, which determines page size, widths and rotation.
        centre: float32 ``[m, D]``, subtracted from K before the rotation; page i uses row ``centres[i]``.
        centres: int32 ``[n]``, with ``centre`` or ``direction``.
        direction: int8 ``[m, D]``, from `reference.direction_of`: K of 2, 3 or 4 bits is rounded so that its error has
            the least component along it, see `reference.aim`; page i uses row ``centres[i]``.
        backend: ``auto``, ``reference``, ``triton`` or ``cuda``.

    Raises ValueError or TypeError, naming the argument, and RuntimeError for a backend that cannot run.
    Rows, pages and heads are not checked against their bounds on a GPU. Safe under graph capture.

    Example:
        >>> k, v = torch.randn(2, 64, 1, 64)
        >>> format = Format(4, 4, 64)
        >>> pool = torch.zeros(format.page_bytes, dtype=torch.uint8)
        >>> zero = torch.zeros(1, dtype=torch.int32)
        >>> quantize_pages(k, v, pool, zero, torch.arange(64, dtype=torch.int32).view(1, 64), zero, format)
    """
    if backend not in BACKENDS:
        fail("backend", f"one of {BACKENDS}", repr(backend))
    job = Job(k, v, pool, pages, source, heads, format, centre, centres, direction)
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
        from . import triton as quantize_triton

        quantize_triton.quantize_pages(job)
    else:
        if not _aligned(k, v, pool):
            expected = f"rows and pool aligned to {ROW_BYTES} bytes, strides below 2 GiB, for cuda"
            fail("backend", expected, "others; use backend='triton'")
        _cuda(job)


def _aligned(k: torch.Tensor, v: torch.Tensor, pool: torch.Tensor) -> bool:
    """True if rows and pool allow the kernel's accesses."""
    strides = [n * k.element_size() for x in (k, v) for n in x.stride()[:2]]
    return max(strides) < 1 << 31 and all(
        n % ROW_BYTES == 0 for n in (*strides, k.data_ptr(), v.data_ptr(), pool.data_ptr())
    )


def _best(k: torch.Tensor, v: torch.Tensor, pool: torch.Tensor) -> str:
    if pool.device.type != "cuda":
        return "reference"
    return "cuda" if missing("cuda", pool.device) is None and _aligned(k, v, pool) else "triton"


def _reference(job: Job) -> None:
    k, v, pool, pages, source, heads, format, centre, centres, direction = job
    empty = (source < 0).unsqueeze(-1)
    row, head = source.clamp(min=0).long(), heads.long().unsqueeze(1)
    k_rows, v_rows = (x[row, head].float().masked_fill(empty, 0.0) for x in (k, v))
    of_rows = along = None
    if centre is not None and centres is not None:
        of_rows = centre[centres.long()].unsqueeze(1).masked_fill(empty, 0.0)
    if direction is not None and centres is not None:
        along = direction[centres.long()].unsqueeze(1)
    offsets = pages.long().unsqueeze(1) * UNIT + torch.arange(format.page_bytes, device=pool.device)
    pool[offsets] = reference.quantize_page(k_rows, v_rows, format, of_rows, along)


@functools.lru_cache(maxsize=256)
def _kernel(format: Format, dtype: torch.dtype, device: int) -> jit.Kernel:
    return jit.load(SOURCE, entry_of(format, dtype), jit.arch_of(device))


def centre_rows(centre: torch.Tensor) -> torch.Tensor:
    """Centres or directions as a contiguous tensor that is aligned for the kernel."""
    rows = centre.contiguous()
    return rows if rows.data_ptr() % ROW_BYTES == 0 else rows.clone()


def _cuda(job: Job) -> None:
    k, v, pool, pages, source, heads, format, centre, centres, direction = job
    size, device = k.element_size(), pool.get_device()
    centre, direction = (None if x is None else centre_rows(x) for x in (centre, direction))
    addresses = [0 if x is None else x.data_ptr() for x in (centre, centres, direction)]
    params = PARAMS.pack(
        *(x.data_ptr() for x in (k, v, pool, pages, source, source, heads)),
        *addresses,
        *(x.stride(dim) * size for dim in (1, 0) for x in (k, v)),
        pages.shape[0],
        *[0] * (4 * MAX_TIERS),
    )
    with torch.cuda.device(device):
        jit.bind_context(device)
        kernel = _kernel(format, k.dtype, device)
        launch = prepare(kernel, format, k.dtype, pages.shape[0], params, direction is not None)
        launch(jit.current_stream(device))
