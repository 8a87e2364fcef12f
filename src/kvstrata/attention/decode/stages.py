"""How decode.cu cuts pages into stages, and what it needs for them: the sizes that host and kernel must agree on."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvstrata.layout.format import Format
from kvstrata.layout.fragments import STEP_DIMS, TILE_TOKENS, code_bytes

NAMES = {torch.float16: "f16", torch.bfloat16: "bf16"}
SLOTS = 2  # of a warp's ring
STAGE_LIMIT = 8704  # bytes of a stage where a page can be cut; as in decode.cu
PORTABLE_SHARED = 48 * 1024  # bytes that a block may have on every GPU


def resident_warps(head_dim: int, width: int) -> int:
    """On a multiprocessor; what their registers allow."""
    return 8 if head_dim * width > 128 else 12


def block_warps(formats: tuple[Format, ...], arch: str) -> int:
    """Of a block: four on Hopper, elsewhere as many as 48 KB of shared memory serve."""
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
    """Tokens that come in together: the page, or the part of it that decode.cu cuts it into."""
    steps, tiles = format.head_dim // STEP_DIMS, format.page_tokens // TILE_TOKENS
    cuts = format.plain or all(bits != 3 and steps * bits % 16 == 0 for bits in (format.k_bits, format.v_bits))
    while cuts and tiles > 1 and _stage_bytes(format, tiles) > STAGE_LIMIT:
        tiles //= 2
    return tiles * TILE_TOKENS


def slot_bytes(formats: tuple[Format, ...]) -> int:
    """Of a stage in shared memory: the largest of any tier, and positions."""
    return max(_stage_bytes(f, stage_tokens(f) // TILE_TOKENS) for f in formats) + 4 * formats[0].page_tokens


# What 64 tokens of a stage take, relative to 4 bit at head_dim 128: measured one width at a time. Stages of one tier
# are neighbours on a multiprocessor, so a width that is given too little makes one multiprocessor the last by far.
COSTS = {16: 588, 8: 267, 4: 150, 3: 158, 2: 107}
BEGIN = 230  # in the same unit: queries of a group as operands, and its partial result


def cost(format: Format) -> int:
    """What a stage takes; chunks of the work list are equal in it."""
    per_page = (COSTS[format.k_bits] + COSTS[format.v_bits]) / 2 * format.head_dim / 128
    return max(round(per_page * stage_tokens(format) / 64), 1)


def begin_cost(format: Format) -> int:
    """What a group of stages takes beside them."""
    return round(BEGIN * format.head_dim / 128)


# Where warps get few stages, beginnings and ends leave bandwidth to spare, and what a stage takes is its instructions:
# about as many for 64 tokens of one width as of another, and some whatever its tokens.
FEW = 8  # stages for a warp
FEW_STAGE, FEW_TOKENS, FEW_BEGIN = 40, 110, 170


def few_cost(format: Format) -> int:
    return round((FEW_STAGE + FEW_TOKENS * stage_tokens(format) / 64) * format.head_dim / 128)


def few_begin(format: Format) -> int:
    return round(FEW_BEGIN * format.head_dim / 128)


def column_blocks(columns: int, head_dim: int) -> tuple[int, int]:
    """(blocks of 8 columns in one warp, how often pages are read)."""
    width = 2 if columns > 8 and head_dim <= 128 else 1
    return width, -(-columns // (8 * width))


@dataclass(frozen=True)
class Cut:
    """How a step is launched: warps of a block, and resident on a multiprocessor (which bounds their registers);
    blocks of 8 columns in one warp; chunks of the work list for a warp; warps of combine.cu for a column (0: by how
    many partial results there are)."""

    warps: int
    resident: int
    width: int
    waves: int = 1
    combine: int = 0


def cut_of(formats: tuple[Format, ...], columns: int, arch: str) -> Cut:
    """The one for what is not in a tuned table."""
    width, _ = column_blocks(columns, formats[0].head_dim)
    return Cut(block_warps(formats, arch), resident_warps(formats[0].head_dim, width), width)


def decode_entry(
    formats: tuple[Format, ...],
    dtype: torch.dtype,
    width: int,
    arch: str,
    *,
    mass: bool = False,
    rows: bool = False,
    ordered: bool = False,
    cut: Cut | None = None,
) -> str:
    """``mass``: the pass that gives weights; ``rows``: pages as store_kv writes them; ``ordered``: positions decide
    what is seen."""
    tiers = ",".join(f"Tier<{f.k_bits},{f.v_bits}>" for f in formats)
    head_dim = formats[0].head_dim
    cut = cut or Cut(block_warps(formats, arch), resident_warps(head_dim, width), width)
    flags = ",".join(str(flag).lower() for flag in (mass, rows, ordered or mass))
    sizes = f"{head_dim},{formats[0].page_tokens},{cut.width},{cut.warps},{cut.resident}"
    return f"decode<{NAMES[dtype]},{flags},{sizes},Tiers<{tiers}>>"


def combine_entry(dtype: torch.dtype, head_dim: int, warps: int) -> str:
    if warps == 1:
        return f"combine_alone<{NAMES[dtype]},{head_dim}>"
    return f"combine<{NAMES[dtype]},{head_dim},{warps}>"
