"""Search space of a decode step for `kvstrata tune`: the fields of `stages.Cut`, all chosen by the host.

More resident warps hide more latency with fewer registers each; more columns per warp read pages less often; more
chunks per warp even out errors of the cost model. Stage and slot sizes are fixed by the kernels.
"""

from __future__ import annotations

from pathlib import Path

import torch

from kvstrata import jit
from kvstrata.layout.format import Format

from .cuda import FOLDER
from .stages import Cut, combine_entry, decode_entry, features, shared_of, tuned_cut


def choices(columns: int) -> dict[str, tuple[int, ...]]:
    """Values of each field for a step with this many columns; up to 8 columns there is only one width."""
    return {
        "warps": (1, 2, 4, 8),
        "resident": (8, 12, 16),
        "width": (1,) if columns <= 8 else (1, 2),
        "waves": (1, 2, 3, 4),
        "combine": (0, 1, 4, 8, 16),
    }


def invalid(cut: Cut) -> str | None:
    """Reason why a configuration is invalid, or None."""
    if cut.resident % cut.warps:
        return f"{cut.resident} resident warps are no whole blocks of {cut.warps}"
    return None


def kernels(
    formats: tuple[Format, ...],
    dtype: torch.dtype,
    cut: Cut,
    arch: str,
    *,
    ordered: bool = False,
    balanced: bool = False,
) -> list[tuple[str, str, int, int]]:
    """(source, entry, threads, dynamic shared memory in bytes) of each kernel of a step."""
    head_dim = formats[0].head_dim
    fewest = max(4, -(-head_dim // 32))
    widths = {1, fewest, 16} if not cut.combine else {1} if cut.combine == 1 else {max(fewest, cut.combine)}
    decode = decode_entry(formats, dtype, cut.width, arch, balanced=balanced, ordered=ordered, cut=cut)
    return [
        (str(FOLDER / "decode.cu"), decode, 32 * cut.warps, shared_of(formats, cut)),
        (str(FOLDER / "worklist.cu"), "worklist", 1024, 0),
        *((str(FOLDER / "combine.cu"), combine_entry(dtype, head_dim, n), 32 * max(n, 4), 0) for n in sorted(widths)),
    ]


def kernels_needed(
    formats: tuple[Format, ...],
    dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    tokens: int,
    requests: int,
    *,
    q_len: int = 1,
    mass: bool = False,
    balanced: bool = False,
    arch: str,
    gpu: str,
    shared: int,
) -> list[jit.Named]:
    """Kernels of decode steps with up to ``requests`` requests; ``tokens``: capacity of the page table for each.

    ``mass``: include calls that return mass and steps that observe it. ``balanced``: for a cache with a balance.
    ``gpu`` names a tuned table, and ``shared`` is the shared memory of a multiprocessor in bytes.
    """
    columns, needed = q_len * heads // kv_heads, [(FOLDER / "rows.cu", "rows")]
    for batch in {*(2**i for i in range(requests.bit_length())), requests}:
        shape = features(formats, False, batch * kv_heads, tokens, columns)
        cut = tuned_cut(formats, columns, shape, gpu, arch, shared)
        for source, entry, _, _ in kernels(formats, dtype, cut, arch, ordered=q_len > 1, balanced=balanced):
            needed.append((Path(source), entry))
        for observe in (False, True) if mass else ():
            entry = decode_entry(
                formats, dtype, cut.width, arch, mass=True, observe=observe, balanced=balanced, cut=cut
            )
            needed.append((FOLDER / "decode.cu", entry))
    if mass:
        needed.append((FOLDER / "observe.cu", "observe"))
    return list(dict.fromkeys(needed))
