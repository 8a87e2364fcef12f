"""Stages of decode.cu (parts of a page that are loaded together): sizes that host and kernel must agree on."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvstrata.jit import tuned
from kvstrata.layout.format import Format
from kvstrata.layout.fragments import STEP_DIMS, TILE_TOKENS, code_bytes

NAMES = {torch.float16: "f16", torch.bfloat16: "bf16"}
SLOTS = 2  # stages in a warp's ring buffer
STAGE_LIMIT = 8704  # bytes of a stage, if the page can be split; as in decode.cu
PORTABLE_SHARED = 48 * 1024  # bytes that a block may use on every GPU


def resident_warps(head_dim: int, width: int) -> int:
    """Resident warps per multiprocessor that registers allow."""
    return 8 if head_dim * width > 128 else 12


def block_warps(formats: tuple[Format, ...], arch: str) -> int:
    """Warps of a block: four on Hopper, elsewhere as many as 48 KB of shared memory allow."""
    if arch >= "sm_90":
        return 4
    return 2 if 2 * SLOTS * slot_bytes(formats) <= PORTABLE_SHARED else 1


def _stage_bytes(format: Format, tiles: int) -> int:
    tokens = tiles * TILE_TOKENS
    if format.plain:
        return 4 * tokens * format.head_dim
    codes = (code_bytes(bits, format.head_dim, tokens) for bits in (format.k_bits, format.v_bits))
    return sum(codes) + 4 * tokens


def stage_tokens(format: Format) -> int:
    """Tokens of a stage: the page, or the part that decode.cu splits it into."""
    steps, tiles = format.head_dim // STEP_DIMS, format.page_tokens // TILE_TOKENS
    cuts = format.plain or all(bits != 3 and steps * bits % 16 == 0 for bits in (format.k_bits, format.v_bits))
    while cuts and tiles > 1 and _stage_bytes(format, tiles) > STAGE_LIMIT:
        tiles //= 2
    return tiles * TILE_TOKENS


def slot_bytes(formats: tuple[Format, ...]) -> int:
    """Bytes of a stage in shared memory: the largest of any tier, plus positions."""
    return max(_stage_bytes(f, stage_tokens(f) // TILE_TOKENS) for f in formats) + 4 * formats[0].page_tokens


# Cost of 64 tokens of a stage, relative to 4 bit at head_dim 128, measured one width at a time. Stages of one tier
# run on the same multiprocessors, so if the cost of a width is set too low, one multiprocessor finishes far too late.
COSTS = {16: 588, 8: 267, 4: 150, 3: 158, 2: 107}
BEGIN = 230  # same unit: loading the queries of a bucket as operands, and writing its partial


def cost(format: Format) -> int:
    """Cost of a stage; chunks of the work list have equal cost."""
    per_page = (COSTS[format.k_bits] + COSTS[format.v_bits]) / 2 * format.head_dim / 128
    return max(round(per_page * stage_tokens(format) / 64), 1)


def begin_cost(format: Format) -> int:
    """Fixed cost of the stages of a bucket."""
    return round(BEGIN * format.head_dim / 128)


# With few stages per warp, prologue and epilogue leave bandwidth unused and a stage costs its instructions: about the
# same number for 64 tokens of any width, plus a constant.
FEW = 8  # stages per warp
FEW_STAGE, FEW_TOKENS, FEW_BEGIN = 40, 110, 170


def few_cost(format: Format) -> int:
    return round((FEW_STAGE + FEW_TOKENS * stage_tokens(format) / 64) * format.head_dim / 128)


def few_begin(format: Format) -> int:
    return round(FEW_BEGIN * format.head_dim / 128)


def column_blocks(columns: int, head_dim: int) -> tuple[int, int]:
    """(blocks of 8 columns in one warp, number of times that pages are read)."""
    width = 2 if columns > 8 and head_dim <= 128 else 1
    return width, -(-columns // (8 * width))


@dataclass(frozen=True)
class Cut:
    """Launch configuration of a step."""

    warps: int  # per block
    resident: int  # warps per multiprocessor; bounds their registers
    width: int  # blocks of 8 columns in one warp
    waves: int = 1  # chunks of the work list per warp
    combine: int = 0  # warps of combine.cu per column; 0 chooses by the number of partials


def cut_of(formats: tuple[Format, ...], columns: int, arch: str) -> Cut:
    """Default configuration, for shapes that no tuned table covers."""
    width, _ = column_blocks(columns, formats[0].head_dim)
    return Cut(block_warps(formats, arch), resident_warps(formats[0].head_dim, width), width)


def decode_entry(
    formats: tuple[Format, ...],
    dtype: torch.dtype,
    width: int,
    arch: str,
    *,
    mass: bool = False,
    observe: bool = False,
    balanced: bool = False,
    rows: bool = False,
    ordered: bool = False,
    cut: Cut | None = None,
) -> str:
    """Template instance of decode.cu. ``mass``: the pass that computes weights; ``observe``: the one that adds them to
    importance; ``balanced``: for a cache with a balance; ``rows``: blocks as store_kv writes them; ``ordered``:
    visibility depends on positions."""
    tiers = ",".join(f"Tier<{f.k_bits},{f.v_bits}>" for f in formats)
    head_dim = formats[0].head_dim
    cut = cut or Cut(block_warps(formats, arch), resident_warps(head_dim, width), width)
    second = mass or observe
    flags = ",".join(str(flag).lower() for flag in (second, observe, balanced, rows, ordered or second))
    sizes = f"{head_dim},{formats[0].page_tokens},{cut.width},{cut.warps},{cut.resident}"
    return f"decode<{NAMES[dtype]},{flags},{sizes},Tiers<{tiers}>>"


def combine_entry(dtype: torch.dtype, head_dim: int, warps: int) -> str:
    if warps == 1:
        return f"combine_alone<{NAMES[dtype]},{head_dim}>"
    return f"combine<{NAMES[dtype]},{head_dim},{warps}>"


def features(
    formats: tuple[Format, ...], rows: bool, head_caches: int, tokens: int, columns: int
) -> dict[str, int | str]:
    """Key of a step in a tuned table: head caches, tokens that the page table can list for each, columns of the
    product, and bits of K plus V averaged over the tiers."""
    bits = sum(f.k_bits + f.v_bits for f in formats) // len(formats)
    sizes = {"head_caches": head_caches, "tokens": tokens, "columns": columns, "bits": bits}
    return {"pages": "rows" if rows else "tiers", "head_dim": str(formats[0].head_dim), **sizes}


def shared_of(formats: tuple[Format, ...], cut: Cut) -> int:
    """Dynamic shared memory of a block, in bytes."""
    return cut.warps * SLOTS * slot_bytes(formats)


def tuned_cut(
    formats: tuple[Format, ...], columns: int, shape: dict[str, int | str], gpu: str | None, arch: str, shared: int
) -> Cut:
    """Launch configuration from the tuned table of a GPU; the default without one, or if blocks exceed ``shared``."""
    choice = None if gpu is None else tuned.lookup("decode", gpu, shape)
    cut = Cut(**choice) if choice else None
    if cut is None or shared_of(formats, cut) + 1280 > shared:
        cut = cut_of(formats, columns, arch)
    return cut
