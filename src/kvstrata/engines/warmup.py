"""Runs a few steps of a layer in separate memory, so that no request waits for a compiler.

Kernels differ by head counts, format and strides, and prefill kernels also by the length of a chunk. So a layer runs
the calls that an engine will make: first chunks and chunks after a prefix, ragged and dense, a step, and drafts.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from kvstrata import backends, jit
from kvstrata.attention.packed_warmup import kernels_needed

from .batch import ALONE, make_batch
from .options import MOST_QUERIES
from .packed import PackedLayer

Step = Sequence[tuple[int, int]]  # (new tokens, tokens) of each request
STEPS: tuple[Step, ...] = (
    [(20, 20), (40, 40)],  # first chunks
    [(ALONE, ALONE)],
    [(2 * ALONE, 2 * ALONE)],
    [(20, 84), (40, 40)],  # after a prefix
    [(ALONE, ALONE + 70)],
    [(2 * ALONE, 4 * ALONE)],
    [(1, 70), (1, 9)],
    [(3, 70), (MOST_QUERIES, 64)],
)


def warm_up(layer: PackedLayer, heads: int, block_size: int, dtype: torch.dtype, device: torch.device) -> None:
    """Compile and load the kernels of a layer with ``heads`` query heads over blocks of ``block_size`` tokens.

    Nothing of the layer is mutated; does nothing on other devices than CUDA. Not safe under CUDA-graph capture.
    """
    if device.type != "cuda":
        return
    fmt = layer.options.format_of(layer.head_dim, block_size)
    if backends.resolve("auto", device) == "cuda":
        balanced = layer.calibration is not None and layer.calibration.balance is not None
        wanted = kernels_needed(
            fmt, heads, layer.kv_heads, dtype, q_len=MOST_QUERIES, windowed=layer.sliding_window is not None,
            balanced=balanced, slot_dtype=torch.int64, arch=jit.arch_of(device),
        )  # fmt: skip
        jit.load_ahead(wanted, device, False)
    run_steps(layer, heads, block_size, dtype, device, STEPS)


def run_steps(
    layer: PackedLayer, heads: int, block_size: int, dtype: torch.dtype, device: torch.device, steps: Sequence[Step]
) -> None:
    """Store and attend random rows, strided like those of a fused projection, in a cache and a tail of this call."""
    tail = layer.tail
    try:
        for step in steps:
            new, lengths = ([pair[i] for pair in step] for i in (0, 1))
            blocks = -(-max(lengths) // block_size)
            shape = (len(step) * blocks, layer.kv_heads, block_size, layer.bytes_per_token)
            cache = torch.zeros(shape, dtype=torch.uint8, device=device)
            table = torch.arange(shape[0], dtype=torch.int32, device=device).view(len(step), blocks)
            starts = torch.tensor([0, *itertools.accumulate(new)], dtype=torch.int32)
            seq_lens = torch.tensor(lengths, dtype=torch.int32)
            rows = torch.randn(sum(new), heads + 2 * layer.kv_heads, layer.head_dim, device=device).to(dtype)
            q, k, v = rows.split([heads, layer.kv_heads, layer.kv_heads], 1)
            slots = torch.arange(shape[0] * block_size, device=device).view(len(step), -1)
            slots = torch.cat([slots[i, total - count : total] for i, (count, total) in enumerate(step)])
            tail_slots = None
            if tail is not None:
                k_tail, v_tail = (torch.zeros(len(step), *x.shape[1:], dtype=dtype, device=device) for x in tail)
                layer.tail = k_tail, v_tail
                tail_slots = torch.arange(len(step), dtype=torch.int32, device=device)
            batch = make_batch(
                starts.to(device), starts, seq_lens.to(device), table, tokens=sum(new), max_query_len=max(new),
                max_seq_len=max(lengths), threshold=1, seq_lens_cpu=seq_lens, short=MOST_QUERIES, tail_slots=tail_slots,
            )  # fmt: skip
            layer.store(k, v, cache, slots, batch.rows)
            out = torch.empty(q.shape, dtype=dtype, device=device)
            layer.attend(q, k, v, cache, batch, out)
    finally:
        layer.tail = tail
