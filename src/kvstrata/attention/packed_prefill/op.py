"""``prefill_packed``: new rows of each request attend to its packed prefix and to each other, from the block table.

Serves chunked prefill, prefix hits and ragged batches. Under tracing the call becomes the operator
``kvstrata::prefill_packed``.
"""

from __future__ import annotations

from typing import Any

import torch

from kvstrata.attention.output import AttentionOutput
from kvstrata.attention.packed_operator import FORMAT, Operators
from kvstrata.attention.packed_repeat import KnownCall, Recent
from kvstrata.backends import choose, missing
from kvstrata.call_cache import dispatched
from kvstrata.layout import Format
from kvstrata.store.packed.arguments import Calibration, calibration_tensors
from kvstrata.store.packed.plain_rows import PlainRows, row_tensors

from . import reference
from .job import Job, Options, Result, Tensors, check

BACKENDS = ("auto", "reference", "triton")


def _missing(backend: str, job: Job) -> str | None:
    """Reason why ``backend`` cannot run this job, or None."""
    if reason := missing(backend, job.tensors.q.device):
        return reason
    if backend == "triton":
        from . import triton as packed_triton

        return packed_triton.missing(job)
    return None


def _prefill(
    tensors: Tensors, format: Format, options: Options, backend: str, out: torch.Tensor | None = None
) -> Result:
    """Check a call and run it."""
    job = check(tensors, format, options, out)
    device = tensors.q.device
    chosen = choose(backend, device, lambda name: _missing(name, job), BACKENDS)
    if tensors.q.shape[0] == 0 or tensors.seq_lens.shape[0] == 0 or chosen == "reference":
        return reference.run(job)
    from . import triton as packed_triton

    result = packed_triton.run(job, "auto" if device.type == "cuda" else "triton")
    if device.type == "cuda":
        _keep(job, (format, backend, *options))
    return result


ALL = set(range(len(Tensors._fields) + 1))  # must be aligned to 16 bytes, as Triton's kernels assume
_recent = Recent()


def _keep(job: Job, signature: tuple[Any, ...]) -> None:
    """Keep the launches of a call that has run, for later calls with the same signature."""
    from . import repeat

    tensors, device = job.tensors, job.tensors.q.get_device()
    odd = any(x is not None and x.data_ptr() % 16 for x in (*tensors, job.out))
    if odd or device != torch.cuda.current_device() or not repeat.keeps(job):
        return
    launches = repeat.Repeat(job)
    if launches.complete:
        _recent.remember(KnownCall(signature, (*tensors, job.out), ALL, launches.run, device))


_library = torch.library.Library("kvstrata", "FRAGMENT")
SCHEMA = (
    "(Tensor q, Tensor k_new, Tensor v_new, Tensor pages, Tensor block_table, Tensor seq_lens,"
    " Tensor cu_seqlens_q, Tensor? balance, Tensor? centre, Tensor? sinks, Tensor? tail_k, Tensor? tail_v,"
    " Tensor? tail_slots, Tensor? sink_k, Tensor? sink_v, Tensor? sink_slots, Tensor(a!)? workspace,"
    " Tensor? cu_seqlens_k,"
    f" {FORMAT}, float? scale, int? sliding_window, float? softcap, int? max_seqlen_q, int? max_seqlen_k,"
    " int? total_tokens, bool exact_lengths, bool return_lse, str backend"
)
_is_compiling = torch.compiler.is_compiling
OPERATORS = Operators(_library, "prefill_packed", Tensors, Options, required=7).register(SCHEMA, _prefill, check)


def prefill_packed(
    q: torch.Tensor,
    k_new: torch.Tensor,
    v_new: torch.Tensor,
    pages: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    fmt: Format,
    *,
    calibration: Calibration | None = None,
    tail: PlainRows | None = None,
    sink_tokens: PlainRows | None = None,
    scale: float | None = None,
    sliding_window: int | None = None,
    sinks: torch.Tensor | None = None,
    softcap: float | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    total_tokens: int | None = None,
    exact_lengths: bool = False,
    return_lse: bool = False,
    out: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
    backend: str = "auto",
) -> torch.Tensor | AttentionOutput:
    """Causal attention of new tokens over their packed prefix and the new rows themselves, unquantised.

    Args:
        q: ``[T, heads, head_dim]`` float32, float16 or bfloat16, the new tokens of all requests end to end.
        k_new, v_new: ``[T, kv_heads, head_dim]`` in q's dtype, rows of the same tokens; inner stride 1. `store_packed`
            may write them before or after this call; with a tail or sink_tokens it must be before.
        pages: uint8 ``[num_blocks, kv_heads, pages_per_block * fmt.page_bytes]``, which hold the prefix.
        block_table: int32 ``[B, max_blocks]``, as in `decode_packed`.
        seq_lens: int32 ``[B]``, tokens of each request, including the new ones: the prefix is everything before them,
            cut where block_table ends.
        cu_seqlens_q: int32 ``[B + 1]``: the new tokens of request i are rows ``cu[i] .. cu[i + 1]``.
        fmt: format of the pages.
        calibration: the calibration that the prefix was stored with.
        tail, sink_tokens: 16-bit rows in addition to the pages, as in `decode_packed`.
        scale, sliding_window, sinks, softcap: as in `decode_packed`.
        cu_seqlens_k: int32 ``[B + 1]``, 0 and the prefix sums of ``seq_lens``; None computes them, in one launch.
        max_seqlen_q, max_seqlen_k, total_tokens: upper bounds of a request's new tokens, of ``seq_lens`` and of their
            sum. If one is None, it is read from the device, and the host waits.
        exact_lengths: the three bounds are exact values, not only bounds. If all requests also have equally many new
            tokens and equally long prefixes, as a single request does, faster kernels are used. Lengths read from the
            device are exact.
        return_lse: also return the log-sum-exp of the scores, including sinks.
        out: contiguous memory of q's shape and dtype for the output, apart from that of the other tensors; None
            allocates it.
        workspace: contiguous uint8 memory for unpacked rows, overwritten. As many KV heads as fit are processed at a
            time; if not even one fits, the error names the bytes needed. None allocates up to 512 MB.
        backend: ``auto``, ``reference`` or ``triton``.

    Only ``out`` and ``workspace`` are mutated. Safe under ``torch.compile(fullgraph=True)``. On ``triton`` also safe
    under CUDA-graph capture with all three bounds given, once the same call has run outside it.

    Returns:
        out in q's shape and dtype. With ``return_lse`` an `AttentionOutput` with a float32 lse ``[T, heads]``.

    Raises:
        ValueError, TypeError: an argument does not fit; the message names it. Of contents, only ``reference`` checks
            cu_seqlens_q, max_seqlen_q and the entries of block_table that it reads.
        RuntimeError: the backend cannot run here.

    Example:
        >>> fmt = kvstrata.Format.parse("K4V4", head_dim=64, page_tokens=16)
        >>> pages = torch.zeros(8, 2, fmt.page_bytes, dtype=torch.uint8)
        >>> kvstrata.store_packed(*torch.randn(2, 32, 2, 64), pages, torch.arange(32), fmt)  # a prefix of 32 tokens
        >>> q, (k, v) = torch.randn(10, 8, 64), torch.randn(2, 10, 2, 64)  # and 10 new ones
        >>> table, lengths, cu = (torch.tensor(x, dtype=torch.int32) for x in ([[0, 1, 2]], [42], [0, 10]))
        >>> kvstrata.prefill_packed(q, k, v, pages, table, lengths, cu, fmt).shape
        torch.Size([10, 8, 64])
    """
    balance, centre = calibration_tensors(calibration)
    rows = row_tensors(tail, sink_tokens)
    tensors = Tensors(q, k_new, v_new, pages, block_table, seq_lens, cu_seqlens_q, balance, centre, sinks, *rows,
                      workspace, cu_seqlens_k)  # fmt: skip
    bounds = (max_seqlen_q, max_seqlen_k, total_tokens, exact_lengths)
    options = Options(scale, sliding_window, softcap, *bounds, return_lse)
    result = None if _is_compiling() else _recent.repeat((fmt, backend, *options), (*tensors, out))
    if result is None:
        run = OPERATORS.call if dispatched((*tensors, out)) else _prefill
        result = run(tensors, fmt, options, backend, out)
    return AttentionOutput(*result) if return_lse else result[0]
