"""A short chunk over a long prefix: parts of the keys are attended to as a batch, and `merge_kernel` merges them.

    keys    part 0 | part 1 | .. | the rest, with the new tokens
    tiles   heads x queries, for all parts at once: a batch      heads x queries, with the causal mask

64 queries of 32 heads are 32 tiles of 128 queries, each over all keys; a GPU has several times as many multiprocessors.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from kvstrata.attention.output import AttentionOutput
from kvstrata.attention.prefill.launch import launch
from kvstrata.attention.prefill.op import prefill_attention

from .job import Job

TILE = 128  # queries per tile
SHORTEST = 512  # minimum keys per part
ALIGNED = 128  # parts begin at multiples of this many keys
EAGER = 32768  # minimum keys to split outside a graph, where the host is the bottleneck


class Parts(NamedTuple):
    """Equal parts of the keys before a chunk."""

    number: int
    keys: int  # keys of each part


def parts_of(job: Job, new: int, total: int, heads: int, processors: int) -> Parts | None:
    """Parts of one request of ``total`` keys such that tiles fill the GPU; None if that is not needed.

    All queries see all keys before the chunk, unless there is a window.
    """
    if job.tensors.seq_lens.shape[0] != 1 or job.options.sliding_window is not None or new == 0:
        return None
    captured = job.tensors.seq_lens.is_cuda and torch.cuda.is_current_stream_capturing()
    if total < EAGER and not captured:
        return None
    count = processors // (heads * -(-new // TILE))
    count = min(count, (total - new) // SHORTEST)
    return Parts(count, (total - new) // count // ALIGNED * ALIGNED) if count > 1 else None


@triton.jit
def merge_kernel(
    parts_ptr, parts_lse_ptr, own_ptr, own_lse_ptr, out_ptr, lse_ptr, rows, stride_token, stride_head,
    PARTS: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
    LSE: tl.constexpr,
):  # fmt: skip
    """Weighted sum of ``parts [PARTS, rows, DIM]`` and ``own [rows, DIM]``, by the log-sum-exp of each.

    A row is a token and a head; those of ``out`` have strides.
    """
    row, dim = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, WIDE)
    live = row < rows
    mask = live[:, None] & (dim < DIM)[None, :]
    offs = row.to(tl.int64)[:, None] * DIM + dim[None, :]
    own = tl.load(own_lse_ptr + row, mask=live, other=0.0)
    top = own
    for part in range(PARTS):
        top = tl.maximum(top, tl.load(parts_lse_ptr + part * rows + row, mask=live, other=0.0))
    total = tl.exp(own - top)
    acc = total[:, None] * tl.load(own_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    for part in range(PARTS):
        weight = tl.exp(tl.load(parts_lse_ptr + part * rows + row, mask=live, other=0.0) - top)
        x = tl.load(parts_ptr + (part * rows).to(tl.int64) * DIM + offs, mask=mask, other=0.0).to(tl.float32)
        acc += weight[:, None] * x
        total += weight
    out_row = (row // HEADS).to(tl.int64) * stride_token + row % HEADS * stride_head
    out = out_ptr + out_row[:, None] + dim[None, :]
    tl.store(out, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=mask)
    if LSE:
        tl.store(lse_ptr + row, top + tl.log(total), mask=live)


def attend_in_parts(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, parts: Parts, out: torch.Tensor, return_lse: bool,
    scoring: dict[str, Any],
) -> torch.Tensor | None:  # fmt: skip
    """Causal attention of ``q [new, heads, D]``, the last of the keys ``k, v [total, KV heads, D]``, part by part.

    Writes to ``out`` in q's shape, with an inner stride of 1, and returns the lse ``[new, heads]`` if requested.
    ``scoring``: further arguments of `prefill_attention`; sinks count once, with the last keys.
    """
    (new, heads, dim), (count, length) = q.shape, parts
    first = [x[: count * length].unflatten(0, (count, length)) for x in (k, v)]
    queries = q.expand(count, -1, -1, -1).contiguous()
    far = prefill_attention(queries, *first, causal=False, return_lse=True, **scoring | dict(sinks=None))
    rest = [x[count * length :].unsqueeze(0) for x in (k, v)]
    near = prefill_attention(q.unsqueeze(0), *rest, return_lse=True, **scoring)
    assert isinstance(far, AttentionOutput)
    assert isinstance(near, AttentionOutput)
    lse = torch.empty((new, heads), dtype=torch.float32, device=q.device) if return_lse else None
    rows, block = new * heads, 4
    constants = dict(PARTS=count, HEADS=heads, DIM=dim, WIDE=triton.next_power_of_2(dim), BLOCK=block, LSE=return_lse)
    tensors = (far.out, far.lse, near.out, near.lse, out, out if lse is None else lse)
    with torch.cuda.device_of(q):
        launch(merge_kernel, (-(-rows // block), 1, 1), (*tensors, rows, *out.stride()[:2]), constants, num_warps=4)
    return lse
