"""``warmup_packed``: compiles what an engine needs to store into packed pages and attend to them, ahead of time."""

from __future__ import annotations

import torch

from kvstrata import backends, jit
from kvstrata.checks import check_int
from kvstrata.layout import Format
from kvstrata.layout.blocks import check_format
from kvstrata.store import store_packed
from kvstrata.store.packed import cuda as store_cuda
from kvstrata.store.packed.arguments import DTYPES, Calibration

from .packed_decode import cuda as decode_cuda
from .packed_decode.op import decode_packed
from .packed_prefill.op import prefill_packed

TRIAL_TOKENS = 24  # tokens of the prefix, and of the chunk after it


def kernels_needed(
    fmt: Format,
    heads: int,
    kv_heads: int,
    dtype: torch.dtype,
    *,
    q_len: int = 1,
    windowed: bool = False,
    balanced: bool = False,
    slot_dtype: torch.dtype = torch.int32,
    arch: str,
) -> list[jit.Named]:
    """CUDA C++ kernels of `store_packed` and of `decode_packed` with up to ``q_len`` queries of each request."""
    steps = decode_cuda.kernels_needed(fmt, dtype, heads // kv_heads, q_len, windowed=windowed, arch=arch)
    return [*store_cuda.kernels_needed(fmt, dtype, balanced, slot_dtype), *steps]


def _trial_run(
    fmt: Format, heads: int, kv_heads: int, dtype: torch.dtype, device: torch.device, calibration: Calibration | None
) -> None:
    """Store, decode and prefill a few tokens, which loads what torch and Triton compile at first use."""
    tokens = 2 * TRIAL_TOKENS
    blocks = -(-tokens // fmt.page_tokens)
    pages = torch.zeros(blocks, kv_heads, fmt.page_bytes, dtype=torch.uint8, device=device)
    row = torch.linspace(-1, 1, fmt.head_dim, device=device).to(dtype)
    k, q = row.expand(tokens, kv_heads, -1).contiguous(), row.expand(TRIAL_TOKENS, heads, -1).contiguous()
    slots = torch.arange(tokens, dtype=torch.int32, device=device)
    store_packed(k, k, pages, slots, fmt, calibration=calibration)
    table = torch.arange(blocks, dtype=torch.int32, device=device)[None]
    lengths, cu = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([tokens], [0, TRIAL_TOKENS]))
    decode_packed(q[:1], pages, table, lengths, fmt, calibration=calibration)
    new = k[TRIAL_TOKENS:]
    prefill_packed(q, new, new, pages, table, lengths, cu, fmt, calibration=calibration)


def warmup_packed(
    fmt: Format,
    heads: int,
    kv_heads: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cuda",
    q_len: int = 1,
    sliding_window: bool = False,
    calibration: Calibration | None = None,
    slot_dtype: torch.dtype = torch.int32,
    progress: bool | None = None,
) -> list[jit.Named]:
    """Compile and load what `store_packed`, `decode_packed` and `prefill_packed` need for a layer of these sizes.

    CUDA C++ kernels that are not in the disk cache are compiled in parallel. Then a few tokens are stored and read, in
    memory allocated by this call, which loads what Triton compiles at first use. `kvstrata warmup packed` fills the
    disk cache in advance, on a host without a GPU if needed.

    Args:
        fmt: format of the pages.
        heads, kv_heads: query heads and KV heads of a layer.
        dtype: dtype of its rows and queries: float32, float16 or bfloat16.
        device: device of the pages.
        q_len: maximum number of queries of a request in a decode step.
        sliding_window: True if some layer has one.
        calibration: calibration of any layer; kernels depend on whether there is a balance.
        slot_dtype: dtype of ``slot_mapping``, int32 or int64.
        progress: write a line to stderr while kernels are compiled; None does so on a terminal.

    Returns the kernels that were compiled in this call, as (source, entry).

    Raises ValueError or TypeError, naming the argument, and CompileError for a kernel that does not compile. No
    argument is mutated. Not safe under CUDA-graph capture.

    Example:
        >>> fmt = kvstrata.Format.parse("K4V4", head_dim=64, page_tokens=16)
        >>> kvstrata.warmup_packed(fmt, heads=8, kv_heads=2, dtype=torch.float32, device="cpu")
        []
    """
    check_format(fmt)
    check_int("kv_heads", kv_heads, 1)
    check_int("q_len", q_len, 1)
    if type(heads) is not int or heads < 1 or heads % kv_heads:
        raise ValueError(f"heads: expected a multiple of {kv_heads}, got {heads!r}")
    if dtype not in DTYPES:
        raise ValueError(f"dtype: expected float32, float16 or bfloat16, got {dtype}")
    if slot_dtype not in (torch.int32, torch.int64):
        raise ValueError(f"slot_dtype: expected torch.int32 or torch.int64, got {slot_dtype}")
    where = torch.device(device)
    compiled: list[jit.Named] = []
    if backends.resolve("auto", where) == "cuda":
        balanced = calibration is not None and calibration.balance is not None
        arch = jit.arch_of(where)
        wanted = kernels_needed(
            fmt, heads, kv_heads, dtype, q_len=q_len, windowed=sliding_window, balanced=balanced, slot_dtype=slot_dtype,
            arch=arch,
        )  # fmt: skip
        compiled = jit.load_ahead(wanted, where, progress)
    _trial_run(fmt, heads, kv_heads, dtype, where, calibration)
    return compiled
