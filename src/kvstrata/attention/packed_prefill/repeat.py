"""Kept launches of `prefill_packed`, for calls with the same signature: nothing is checked or chosen again.

The call of a layer has the shapes and lengths of the previous layer. Only memory for rows and output remains, and two
launches (unpacking, attention), or three if requests differ in length. A split prefix takes five.
"""

from __future__ import annotations

from typing import Any

import torch

from kvstrata.attention.prefill.configs import processors_of
from kvstrata.attention.prefill.job import PrefillJob
from kvstrata.attention.prefill.launch import launched
from kvstrata.attention.prefill.op import prepare
from kvstrata.attention.prefill_cached.staging_triton import stage_warps

from .job import Job, Result, Tensors, padded_dim
from .split_triton import KeptParts, parts_of
from .triton import Bounds, bounds_of, heads_at_once, sums_kernel, unpack_kernel, unpack_of

WORKSPACE = Tensors._fields.index("workspace")
# Tensors of a call, in the order in which unpack_kernel takes them: before and after the matrix of the rotation.
BEFORE = [Tensors._fields.index(x) for x in ("k_new", "v_new", "balance", "centre")]
BEHIND = [i for i, x in enumerate(Tensors._fields) if x.startswith(("tail_", "sink_"))]


def _address(x: torch.Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


def keeps(job: Job) -> bool:
    """True if launches can be kept: bounds from the host, all KV heads at once, unpadded rows."""
    options, t, dim = job.options, job.tensors, job.format.head_dim
    if None in (options.max_seqlen_q, options.max_seqlen_k, options.total_tokens):
        return False
    bounds = bounds_of(job)
    if not bounds.max_q or not bounds.total or padded_dim(dim) != dim:
        return False
    if t.sinks is not None and t.sinks.dtype != torch.float32:
        return False
    return heads_at_once(job, bounds.total) >= job.blocks.kv_heads


class Repeat:
    """Launches of calls with the signature of a job that `keeps` accepts; ``complete`` is True if all were found."""

    def __init__(self, job: Job) -> None:
        t, options, bounds, kv_heads = job.tensors, job.options, bounds_of(job), job.blocks.kv_heads
        dim, requests, self.dense = job.format.head_dim, t.seq_lens.shape[0], bounds.dense(job)
        self.requests, self.return_lse = requests, options.return_lse
        scale = dim**-0.5 if options.scale is None else float(options.scale)
        self.scoring = (bounds.max_q, bounds.max_k, True, scale, options.sliding_window, options.softcap)
        self.shape = (requests, bounds.max_k, kv_heads, dim) if self.dense else (bounds.total, kv_heads, dim)
        self.q_shape = (requests, bounds.max_q, *t.q.shape[1:])
        self.nbytes = 2 * bounds.total * kv_heads * dim * t.q.element_size()
        given = (*t, job.out)
        k, v, out, lse = self._memory(given)
        cu_k = t.seq_lens if job.cu_seqlens_k is None else job.cu_seqlens_k  # has the form of the sums
        self._find_sums(job, bounds)
        one = unpack_of(job, bounds, None if self.dense else cu_k, k, v, 0, kv_heads)
        self.numbers, self.signs = one.numbers, one.tensors[11]
        arguments = (*one.tensors, *one.numbers)
        self.unpack = launched(unpack_kernel, one.grid, arguments, one.constants, num_warps=stage_warps(dim))
        multiprocessors, heads = processors_of(t.q.device)[0], t.q.shape[1]
        parts = parts_of(job, bounds.max_q, bounds.max_k, heads, multiprocessors) if self.dense else None
        self.in_parts: KeptParts | None = None
        if parts is None:
            self.attend = prepare(*self._attention(given, k, v, out, lse, cu_k))
            found = self.attend is not None
        else:
            self.in_parts = KeptParts(parts, scale, options.softcap, t.q, k[0], v[0], t.sinks, out, lse)
            found = self.in_parts.complete
        found = found and self.unpack is not None
        self.complete = found and (self.sums is not None or not self.own_sums)

    def _find_sums(self, job: Job, bounds: Bounds) -> None:
        t, self.sums = job.tensors, None
        self.sums_numbers = (self.requests, job.max_tokens, bounds.total)
        self.own_sums = not self.dense and job.cu_seqlens_k is None
        if self.own_sums:
            arguments = (t.seq_lens, t.cu_seqlens_q, t.seq_lens, *self.sums_numbers)
            self.sums = launched(sums_kernel, (1, 1, 1), arguments, dict(BLOCK=128), num_warps=4)

    def _memory(self, given: tuple[Any, ...]) -> tuple[Any, ...]:
        """Rows of K and V, output and lse of a call."""
        q, workspace, out = given[0], given[WORKSPACE], given[-1]
        if workspace is None:
            k, v = (torch.empty(self.shape, dtype=q.dtype, device=q.device) for _ in range(2))
        else:
            k, v = workspace[: self.nbytes].view(q.dtype).view(2, *self.shape).unbind()
        if out is None:
            out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device) if self.return_lse else None
        return k, v, out, lse

    def _attention(self, given: tuple[Any, ...], k: Any, v: Any, out: Any, lse: Any, cu_k: Any) -> tuple[Any, ...]:
        """Job, output and lse of the attention."""
        q, cu_q, sinks = given[0], given[6], given[9]
        if self.dense:
            q, out, cu_q, cu_k = q.view(self.q_shape), out.view(self.q_shape), None, None
            lse = None if lse is None else lse.view(self.q_shape[:3])
        return PrefillJob(q, k, v, cu_q, cu_k, *self.scoring, sinks, self.return_lse, out), out, lse

    def run(self, given: tuple[Any, ...]) -> Result:
        """Run a call: its `Tensors`, and the output or None."""
        k, v, out, lse = self._memory(given)
        pages, table, lengths, cu_q = (x.data_ptr() for x in given[3:7])
        cu_k = given[17]
        if self.sums is not None:
            cu_k = torch.empty(self.requests + 1, dtype=torch.int32, device=k.device)
            self.sums(lengths, cu_q, cu_k.data_ptr(), *self.sums_numbers)
        self.unpack(  # type: ignore[misc]
            k.data_ptr(), v.data_ptr(), pages, table, lengths, cu_q, lengths if self.dense else cu_k.data_ptr(),
            *[_address(given[i]) for i in BEFORE], self.signs.data_ptr(), *[_address(given[i]) for i in BEHIND],
            *self.numbers,
        )  # fmt: skip
        if self.in_parts is None:
            self.attend(*self._attention(given, k, v, out, lse, cu_k))  # type: ignore[misc]
        else:
            self.in_parts.run(given[0], k[0], v[0], given[9], out, lse)
        return out, lse
