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
from kvstrata.attention.prefill.job import PrefillJob
from kvstrata.attention.prefill.launch import launch, launched
from kvstrata.attention.prefill.op import prefill_attention, prepare

from .job import Job

TILE = 128  # queries per tile
SHORTEST = 1024  # minimum keys per part
ALIGNED = 128  # parts begin at multiples of this many keys
BLOCK = 4  # rows that a program of merge_kernel merges


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


class Merge(NamedTuple):
    """A launch of `merge_kernel`: its grid, tensors, numbers and constants."""

    grid: tuple[int, int, int]
    tensors: tuple[torch.Tensor, ...]
    numbers: tuple[int, ...]
    constants: dict[str, Any]


def _merge_of(
    parts: tuple[torch.Tensor, torch.Tensor], own: tuple[torch.Tensor, torch.Tensor], out: torch.Tensor,
    lse: torch.Tensor | None,
) -> Merge:  # fmt: skip
    """Launch that merges the outputs and lse of the parts with those of the rest."""
    new, heads, dim = out.shape
    wide = triton.next_power_of_2(dim)
    constants = dict(PARTS=len(parts[0]), HEADS=heads, DIM=dim, WIDE=wide, BLOCK=BLOCK, LSE=lse is not None)
    tensors = (*parts, *own, out, out if lse is None else lse)
    return Merge((-(-new * heads // BLOCK), 1, 1), tensors, (new * heads, *out.stride()[:2]), constants)


def _cut(x: torch.Tensor, parts: Parts) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of the parts as a batch, and the rest as a batch of one."""
    count, length = parts
    return x[: count * length].unflatten(0, (count, length)), x[count * length :].unsqueeze(0)


def attend_in_parts(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, parts: Parts, out: torch.Tensor, return_lse: bool,
    scoring: dict[str, Any],
) -> torch.Tensor | None:  # fmt: skip
    """Causal attention of ``q [new, heads, D]``, the last of the keys ``k, v [total, KV heads, D]``, part by part.

    Writes to ``out`` in q's shape, with an inner stride of 1, and returns the lse ``[new, heads]`` if requested.
    ``scoring``: further arguments of `prefill_attention`; sinks count once, with the last keys.
    """
    (first_k, rest_k), (first_v, rest_v) = _cut(k, parts), _cut(v, parts)
    queries = q.expand(parts.number, -1, -1, -1).contiguous()
    far = prefill_attention(queries, first_k, first_v, causal=False, return_lse=True, **scoring | dict(sinks=None))
    near = prefill_attention(q.unsqueeze(0), rest_k, rest_v, return_lse=True, **scoring)
    assert isinstance(far, AttentionOutput)
    assert isinstance(near, AttentionOutput)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device) if return_lse else None
    merge = _merge_of((far.out, far.lse), (near.out, near.lse), out, lse)  # type: ignore[arg-type]
    with torch.cuda.device_of(q):
        launch(merge_kernel, merge.grid, (*merge.tensors, *merge.numbers), merge.constants, num_warps=4)
    return lse


class KeptParts:
    """Launches of `attend_in_parts` for calls with one signature; ``complete`` is True if all were found."""

    def __init__(
        self, parts: Parts, scale: float, softcap: float | None, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
        sinks: torch.Tensor | None, out: torch.Tensor, lse: torch.Tensor | None,
    ) -> None:  # fmt: skip
        self.parts, self.scale, self.softcap = parts, scale, softcap
        far, near, merge = self._calls(q, k, v, sinks, out, lse)
        self.far, self.near, self.numbers = prepare(*far), prepare(*near), merge.numbers
        arguments = (*merge.tensors, *merge.numbers)
        self.merge = launched(merge_kernel, merge.grid, arguments, merge.constants, num_warps=4)
        self.complete = None not in (self.far, self.near, self.merge)

    def _attention(self, q: Any, k: Any, v: Any, causal: bool, sinks: torch.Tensor | None) -> tuple[Any, ...]:
        """Job of an attention, memory of its output and of its lse."""
        job = PrefillJob(
            q, k, v, None, None, q.shape[1], k.shape[1], causal, self.scale, None, self.softcap, sinks, True
        )
        return job, *job.outputs()

    def _calls(self, q: Any, k: Any, v: Any, sinks: Any, out: Any, lse: Any) -> tuple[Any, Any, Merge]:
        """Attention to the parts and to the rest, and their merge."""
        (first_k, rest_k), (first_v, rest_v) = _cut(k, self.parts), _cut(v, self.parts)
        queries = q.expand(self.parts.number, -1, -1, -1).contiguous()
        far = self._attention(queries, first_k, first_v, False, None)
        near = self._attention(q.unsqueeze(0), rest_k, rest_v, True, sinks)
        return far, near, _merge_of(far[1:], near[1:], out, lse)

    def run(self, q: Any, k: Any, v: Any, sinks: Any, out: Any, lse: Any) -> None:
        """Run a call with the same signature."""
        far, near, merge = self._calls(q, k, v, sinks, out, lse)
        self.far(*far)  # type: ignore[misc]
        self.near(*near)  # type: ignore[misc]
        self.merge(*[x.data_ptr() for x in merge.tensors], *self.numbers)  # type: ignore[misc]
