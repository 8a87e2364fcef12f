"""``decode_packed``: a few queries of each request over packed pages in blocks that an engine owns.

Stateless: ``block_table`` and ``seq_lens``, which are read on the device, locate the tokens. Under tracing the call
becomes the operator ``kvstrata::decode_packed``.
"""

from __future__ import annotations

import torch

from kvstrata import jit
from kvstrata.attention.output import AttentionOutput
from kvstrata.attention.packed_operator import FORMAT, Operators
from kvstrata.attention.packed_repeat import KnownCall, Recent
from kvstrata.backends import choose, missing
from kvstrata.call_cache import dispatched, signature
from kvstrata.layout import Format
from kvstrata.store.packed.arguments import Calibration, calibration_tensors
from kvstrata.store.packed.plain_rows import PlainRows, RowTensors, row_tensors

from . import reference
from .job import Job, Options, Result, Tensors, check


def _missing(backend: str, job: Job) -> str | None:
    """Reason why ``backend`` cannot run this job, or None."""
    if reason := missing(backend, job.pages.device):
        return reason
    if backend == "cuda":
        from . import cuda as packed_cuda

        return packed_cuda.missing(job)
    return None


# Tensors of a call that kernels access in 16-byte words: pages, workspace, tail, sink rows and, last, the output.
WIDE = {"pages", "workspace", "tail_k", "tail_v", "sink_k", "sink_v"}
ALIGNED = {i for i, name in enumerate(Tensors._fields) if name in WIDE} | {len(Tensors._fields)}
_plans = Recent()


def _run_cuda(job: Job, tensors: Tensors, format: Format, options: Options, backend: str) -> Result:
    from . import cuda as packed_cuda

    q = packed_cuda._aligned(job.q)
    device = job.pages.get_device()
    given = (q, job.pages, job.block_table, job.cu_seqlens_q, job.balance, job.centre, job.sinks, *job.rows)
    key = (*signature(given), format, options)
    with torch.cuda.device(device):
        plan = _plans.known.get(key)
        if plan is None:
            jit.bind_context(device)
            plan = _plans.known[key] = packed_cuda.PackedDecodePlan(job, device)
        if q is job.q and (tensors.sinks is None or tensors.sinks.data_ptr() == job.sinks.data_ptr()):  # type: ignore[union-attr]
            _plans.remember(KnownCall((format, backend, *options), (*tensors, job.out), ALIGNED, plan.run, device))
        return plan.run((*tensors._replace(q=q, sinks=job.sinks), job.out))


def _decode(
    tensors: Tensors, format: Format, options: Options, backend: str, out: torch.Tensor | None = None
) -> Result:
    """Check a call and run it."""
    job = check(tensors, format, options, out)
    chosen = choose(backend, job.pages.device, lambda name: _missing(name, job))
    if job.q.shape[0] == 0 or job.requests == 0:
        out = torch.zeros(job.q.shape, dtype=job.q.dtype, device=job.q.device) if out is None else out.zero_()
        lse = torch.full(job.q.shape[:2], -torch.inf, dtype=torch.float32, device=job.q.device)
        return out, lse if options.return_lse else None
    if chosen == "cuda":
        return _run_cuda(job, tensors, format, options, backend)
    if chosen == "reference":
        return reference.decode(job)
    from . import triton as packed_triton

    return packed_triton.decode(job)


_library = torch.library.Library("kvstrata", "FRAGMENT")
SCHEMA = (
    "(Tensor q, Tensor pages, Tensor block_table, Tensor seq_lens, Tensor? cu_seqlens_q, Tensor? balance,"
    " Tensor? centre, Tensor? sinks, Tensor(a!)? workspace, Tensor? tail_k, Tensor? tail_v, Tensor? tail_slots,"
    " Tensor? sink_k, Tensor? sink_v, Tensor? sink_slots,"
    f" {FORMAT}, float? scale, int? sliding_window, float? softcap, int? max_seqlen_q, int? fixed_split,"
    " bool return_lse, str backend"
)
_is_compiling = torch.compiler.is_compiling
NO_ROWS = RowTensors()
OPERATORS = Operators(_library, "decode_packed", Tensors, Options, required=4).register(SCHEMA, _decode, check)


def decode_packed(
    q: torch.Tensor,
    pages: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    fmt: Format,
    *,
    calibration: Calibration | None = None,
    tail: PlainRows | None = None,
    sink_tokens: PlainRows | None = None,
    scale: float | None = None,
    sliding_window: int | None = None,
    sinks: torch.Tensor | None = None,
    softcap: float | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    fixed_split: int | None = None,
    return_lse: bool = False,
    out: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
    backend: str = "auto",
) -> torch.Tensor | AttentionOutput:
    """Attention of the newest queries of each request over its tokens in packed pages that an engine owns.

    Args:
        q: ``[T, heads, head_dim]`` float32, float16 or bfloat16, the queries of all requests end to end; heads is a
            multiple of the KV heads, the inner stride is 1.
        pages: uint8 ``[num_blocks, kv_heads, pages_per_block * fmt.page_bytes]``, as `store_packed` writes it. K and V
            of the queries' own tokens are already stored.
        block_table: int32 ``[B, max_blocks]``. Token i of a request is in block ``block_table[request, i //
            block_size]``; entries past the length may hold anything.
        seq_lens: int32 ``[B]``, tokens of each request, including the queries' own; 0 for a padding row.
            A length beyond what block_table lists is cut there.
        fmt: format of the pages.
        calibration: the calibration that the tokens were stored with.
        tail: 16-bit rows of each request's unfinished page, ``[max_requests, kv_heads, tokens, head_dim]`` in q's
            dtype, as `store_packed` writes them: positions from ``seq_len // page_tokens * page_tokens`` on are
            read there.
        sink_tokens: 16-bit rows of each request's first tokens, as `store_packed` writes them.
        scale: factor of the scores; None is ``head_dim ** -0.5``.
        sliding_window: number of positions that a query sees, including its own; None is all. Other pages are not read.
        sinks: ``[heads]``, attention-sink logit per head, added to the softmax denominator.
        softcap: cap c of the scores, which become ``c * tanh(score / c)``; None is no cap.
        cu_seqlens_q: int32 ``[B + 1]``: the queries of request i are rows ``cu[i] .. cu[i + 1]`` of q. None: T / B.
        max_seqlen_q: upper bound of the queries per request, with cu_seqlens_q; None is 16.
        fixed_split: tokens per partial, independent of the rest of the batch: the output of a request is then
            batch-invariant, bit for bit. None balances the work over the device.
        return_lse: also return the log-sum-exp of the scores, including the sink.
        out: contiguous memory of q's shape and dtype for the output, apart from that of the other tensors; None
            allocates it.
        workspace: contiguous uint8 memory for partials, overwritten; if it is too small, ``cuda`` raises an error that
            names the bytes needed, and ``triton`` allocates its own. None allocates it.
        backend: ``auto``, ``reference``, ``triton`` or ``cuda``.

    Query i of n is at position ``seq_len - n + i`` and sees no later one. A query that sees no token yields zeros and
    an lse of -inf (with a sink: its logit). Only ``out`` and ``workspace`` are mutated. Safe under
    ``torch.compile(fullgraph=True)``, and under CUDA-graph capture on a GPU backend once a call of the same shapes has
    compiled the kernels: lengths, blocks and queries are read at replay. Only ``reference`` synchronises with the host.

    Returns:
        out in q's shape and dtype. With ``return_lse`` an `AttentionOutput` with a float32 lse ``[T, heads]``.

    Raises:
        ValueError, TypeError: an argument does not fit; the message names it. Of contents, only ``reference`` checks
            cu_seqlens_q, max_seqlen_q and the entries of block_table that it reads.
        RuntimeError: the backend cannot run here.

    Example:
        >>> fmt = kvstrata.Format.parse("K4V4", head_dim=64, page_tokens=16)
        >>> pages = torch.zeros(8, 2, fmt.page_bytes, dtype=torch.uint8)  # 8 blocks of 16 tokens, 2 KV heads
        >>> kvstrata.store_packed(*torch.randn(2, 20, 2, 64), pages, torch.arange(48, 68), fmt)  # blocks 3 and 4
        >>> block_table = torch.tensor([[3, 4]], dtype=torch.int32)
        >>> seq_lens = torch.tensor([20], dtype=torch.int32)
        >>> kvstrata.decode_packed(torch.randn(1, 8, 64), pages, block_table, seq_lens, fmt).shape
        torch.Size([1, 8, 64])
    """
    balance, centre = (None, None) if calibration is None else calibration_tensors(calibration)
    rows = NO_ROWS if tail is sink_tokens is None else row_tensors(tail, sink_tokens)
    memory = (q, pages, block_table, seq_lens, cu_seqlens_q, balance, centre, sinks, workspace, *rows, out)
    call_signature = (fmt, backend, scale, sliding_window, softcap, max_seqlen_q, fixed_split, return_lse)
    result = None if _is_compiling() else _plans.repeat(call_signature, memory)
    if result is None:
        tensors, options = Tensors(*memory[:-1]), Options(*call_signature[2:])
        run = OPERATORS.call if dispatched(memory) else _decode
        result = run(tensors, fmt, options, backend, out)
    return AttentionOutput(*result) if return_lse else result[0]
