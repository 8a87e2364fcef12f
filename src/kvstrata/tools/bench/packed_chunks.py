"""Cases of `bench packed`: a chunk of new tokens of one request over its prefix in packed pages.

The peers unpack everything that `prefill_packed` reads with the same kernel and attend with cuDNN or flash. Calls are
captured; the operations are the two products, for the chunk's own part the half that is visible.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

import kvstrata
from kvstrata.attention.packed_prefill import triton as packed_triton
from kvstrata.attention.packed_prefill.job import Options, Tensors, check
from kvstrata.attention.packed_prefill.reference import prefix_rows
from kvstrata.layout import Format

from .attention import assert_close, chunk_bench, chunk_cost
from .case import Bench, Case

BLOCK_SIZE = 64
CHECKED = 16  # number of last queries, in one KV head, compared with float32
SECONDS = 2.0  # maximum seconds of sampling


def build_chunk(
    name: str, prefix: int, new: int, heads: int, kv_heads: int, head_dim: int, device: torch.device
) -> Bench:
    generator = torch.Generator(device).manual_seed(0)
    fmt, total = Format.parse(name, head_dim), prefix + new
    blocks, per_block = -(-total // BLOCK_SIZE), BLOCK_SIZE // fmt.page_tokens
    pages = torch.zeros(blocks, kv_heads, per_block * fmt.page_bytes, dtype=torch.uint8, device=device)
    order = torch.randperm(blocks, device=device, generator=generator)
    k, v = torch.randn(2, total, kv_heads, head_dim, device=device, generator=generator).bfloat16()
    position = torch.arange(prefix, device=device)
    slots = order[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
    kvstrata.store_packed(k[:prefix], v[:prefix], pages, slots, fmt)
    q = torch.randn(new, heads, head_dim, device=device, generator=generator).bfloat16()
    seq_lens, cu = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([total], [0, new]))
    tensors = Tensors(q, k[prefix:], v[prefix:], pages, order.int()[None], seq_lens, cu)
    bounds = dict(max_seqlen_q=new, max_seqlen_k=total, total_tokens=total, exact_lengths=True)
    job = check(tensors, fmt, Options(**bounds))  # type: ignore[arg-type]

    group = heads // kv_heads
    past_k, past_v = prefix_rows(job, 0, prefix, total)
    keys, values = (
        torch.cat([x[:, 0], y[:, 0].float()]) for x, y in ((past_k, tensors.k_new), (past_v, tensors.v_new))
    )
    few = min(CHECKED, new)
    scores = q[-few:, :group].float() @ keys.T * head_dim**-0.5
    own = torch.arange(total - few, total, device=device)
    scores.masked_fill_(torch.arange(total, device=device) > own[:, None, None], -torch.inf)
    expected = scores.softmax(-1) @ values

    exact = packed_triton.bounds_of(job)

    def rows() -> tuple[torch.Tensor, torch.Tensor]:
        cu_k, staged, count = packed_triton.staging(job, exact)
        assert count == kv_heads
        k, v = packed_triton.unpack(job, exact, cu_k, staged, 0, count)
        return k[None].transpose(1, 2), v[None].transpose(1, 2)

    def checked(out: torch.Tensor) -> None:
        assert_close(out[-few:, :group], expected, 1e-2)
        assert not bool(out.isnan().any()), "an output is NaN"

    def prefill(i: int, **options: Any) -> torch.Tensor:
        return kvstrata.prefill_packed(*tensors[:7], fmt, **options)  # type: ignore[return-value]

    bench = chunk_bench(q, partial(prefill, **bounds), rows, partial(prefill, backend="reference"), checked)
    bench.host = {"kvstrata": bench.contenders["kvstrata"]}
    return bench


def chunk_case(name: str, prefix: int, new: int, device: torch.device) -> Case:
    heads, kv_heads, head_dim = (32, 8, 128) if device.type == "cuda" else (2, 1, 64)
    moved, flops = chunk_cost(Format.parse(name, head_dim), prefix, new, heads, kv_heads)
    make = partial(build_chunk, name, prefix, new, heads, kv_heads, head_dim)
    params = {"kind": f"chunk {name}", "new": new, "T": prefix + new}
    graph, case = device.type == "cuda", f"chunk-{name}-{prefix}+{new}"
    return Case("packed", case, params, moved, make, flops=flops, graph=graph, seconds=SECONDS)
