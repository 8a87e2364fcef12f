"""One attention layer over an engine's blocks of packed pages, called by an adaptor.

    cache   [num_blocks, kv_heads, block_size, bytes per token]     the engine's view, any strides but of the last two
    pages   [num_blocks, kv_heads, pages_per_block * page_bytes]    the same memory, as the packed ops address it

An engine counts bytes per token; within a block of one KV head, bytes belong to pages rather than to single tokens.
"""

from __future__ import annotations

from typing import Any

import torch

from kvstrata.attention import decode_packed, prefill_attention, prefill_packed
from kvstrata.attention.packed_prefill.job import STAGED, padded_dim
from kvstrata.layout import Format
from kvstrata.quant.calibration import LayerCalibration
from kvstrata.store import PlainRows, store_packed

from .batch import Batch, DecodePart, Rows
from .options import MOST_GROUP, Options
from .workspace import workspace


class PackedLayer:
    """Store and attention of one layer.

    Args:
        options: the user's options.
        heads, kv_heads, head_dim: sizes of the layer on this rank.
        scale: factor of the scores.
        sliding_window: number of positions that a query sees, including its own; None is all.
        softcap: cap of the scores; None is no cap.
        sinks: ``[heads]`` attention-sink logits, or None.

    Raises ValueError for sizes that the packed ops do not support.
    """

    def __init__(
        self,
        options: Options,
        heads: int,
        kv_heads: int,
        head_dim: int,
        scale: float,
        sliding_window: int | None = None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> None:
        if heads % kv_heads or heads // kv_heads > MOST_GROUP:
            raise ValueError(f"heads: expected 1 to {MOST_GROUP} query heads per KV head, got {heads} for {kv_heads}")
        self.options, self.kv_heads, self.head_dim = options, kv_heads, head_dim
        self.bytes_per_token = options.bytes_per_token(head_dim)
        self.scale, self.sliding_window, self.softcap, self.sinks = scale, sliding_window, softcap, sinks
        self.calibration: LayerCalibration | None = None
        self.tail: tuple[torch.Tensor, torch.Tensor] | None = None  # K and V [requests, kv_heads, tokens, head_dim]
        self._formats: dict[int, Format] = {}

    def pages(self, cache: torch.Tensor) -> tuple[torch.Tensor, Format]:
        """The engine's ``cache`` as pages, without a copy, and their format.

        Raises ValueError if the bytes of a block of one KV head are not contiguous or not as many as expected.
        """
        if cache.dtype != torch.uint8:
            cache = cache.view(torch.uint8)
        _, _, block_size, token_bytes = cache.shape
        if token_bytes != self.bytes_per_token:
            expected = f"{self.bytes_per_token} bytes per token of {self.options.format}"
            raise ValueError(f"cache: expected {expected}, got shape {tuple(cache.shape)}")
        if cache.stride(3) != 1 or cache.stride(2) != token_bytes:
            raise ValueError(f"cache: expected contiguous bytes per block and KV head, got strides {cache.stride()}")
        fmt = self._formats.get(block_size)
        if fmt is None:
            fmt = self._formats[block_size] = self.options.format_of(self.head_dim, block_size)
        return cache.flatten(2), fmt

    def tail_of(self, slots: torch.Tensor | None) -> PlainRows | None:
        """Tail rows of requests with these slots; None if the layer has no tail.

        Raises ValueError if the layer has one and the batch has no slots.
        """
        if self.tail is None:
            return None
        if slots is None:
            raise ValueError("batch: expected tail_slots, since the layer has a tail, got None")
        return PlainRows(*self.tail, slots)

    def store(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        rows: Rows | None = None,
    ) -> None:
        """Write rows ``[T, kv_heads, head_dim]`` to their slots in ``cache``, which is mutated; -1 is padding.

        Rows after the last slot are padding too. ``rows``: those of the batch, for a layer with a tail, which is also
        mutated. May be captured in a CUDA graph after one call of the same shapes.
        """
        pages, fmt = self.pages(cache)
        count = min(slot_mapping.shape[0], k.shape[0])
        options: dict[str, Any] = {}
        if self.tail is not None:
            if rows is None:
                raise ValueError("rows: expected those of the batch, since the layer has a tail, got None")
            count = rows.tokens
            options = dict(
                tail=self.tail_of(rows.tail_slots), seq_lens=rows.seq_lens, cu_seqlens_q=rows.cu_seqlens_q
            )  # fmt: skip
        store_packed(k[:count], v[:count], pages, slot_mapping[:count], fmt, calibration=self.calibration, **options)

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cache: torch.Tensor, batch: Batch, out: torch.Tensor
    ) -> None:
        """Attention of a batch whose rows are already stored; writes rows of ``out [T, heads, head_dim]``.

        Args:
            q: ``[T, heads, head_dim]``; rows after the batch are padding.
            k, v: ``[T, kv_heads, head_dim]``, the new rows, which prefills read unquantised.
            cache: the engine's blocks.
            batch: the step.
            out: contiguous; mutated, except for padding rows.

        A batch of decodes only is two launches, decode and combine, which write to ``out`` directly. It may be
        captured in a CUDA graph after one call of the same shapes.
        """
        pages, fmt = self.pages(cache)
        scoring: dict[str, Any] = dict(
            scale=self.scale, sliding_window=self.sliding_window, sinks=self.sinks, softcap=self.softcap
        )
        packed: dict[str, Any] = dict(calibration=self.calibration, **scoring)
        for part in batch.decodes:
            rows = slice(part.first, part.first + part.tokens)
            decode_packed(
                q[rows], pages, part.block_table, part.seq_lens, fmt, tail=self.tail_of(part.tail_slots),
                cu_seqlens_q=part.cu_seqlens_q, max_seqlen_q=part.max_seqlen_q, out=out[rows],
                workspace=self._decode_workspace(q, fmt, part), **packed,
            )  # fmt: skip
        for chunk in batch.prefills:
            rows = slice(chunk.first, chunk.first + chunk.tokens)
            if chunk.prefix:
                prefill_packed(
                    q[rows], k[rows], v[rows], pages, chunk.block_table, chunk.seq_lens, chunk.cu_seqlens_q, fmt,
                    tail=self.tail_of(chunk.tail_slots), cu_seqlens_k=chunk.cu_seqlens_k,
                    max_seqlen_q=chunk.max_seqlen_q, max_seqlen_k=chunk.max_seqlen_k, total_tokens=chunk.total_tokens,
                    exact_lengths=chunk.exact, out=out[rows],
                    workspace=workspace(q.device, self.staged_bytes(chunk.total_tokens, q.element_size())), **packed,
                )  # fmt: skip
            elif chunk.dense:  # kernels that do not support ragged rows
                tensors = (x[rows].unflatten(0, (-1, chunk.max_seqlen_q)) for x in (q, k, v, out))
                dense_q, dense_k, dense_v, dense_out = tensors
                prefill_attention(dense_q, dense_k, dense_v, out=dense_out, **scoring)
            else:
                prefill_attention(
                    q[rows], k[rows], v[rows], cu_seqlens_q=chunk.cu_seqlens_q, cu_seqlens_k=chunk.cu_seqlens_q,
                    max_seqlen_q=chunk.max_seqlen_q, max_seqlen_k=chunk.max_seqlen_q, out=out[rows], **scoring,
                )  # fmt: skip

    def staged_bytes(self, tokens: int, itemsize: int = 2) -> int:
        """Bytes of the unpacked rows of ``tokens`` tokens, for the KV heads that `prefill_packed` does at a time."""
        one_head = 2 * max(tokens, 1) * padded_dim(self.head_dim) * itemsize
        return one_head * max(1, min(self.kv_heads, STAGED // one_head))

    def decode_bytes(self, fmt: Format, heads: int, requests: int, queries: int, device: torch.device) -> int:
        """Bytes of scratch memory to decode ``requests`` requests with up to ``queries`` queries each, for 16-bit rows.

        0 if its kernels allocate their own.
        """
        if device.type != "cuda":
            return 0
        from kvstrata import jit
        from kvstrata.attention.packed_decode import cuda

        if jit.missing():
            return 0
        index = torch.cuda.current_device() if device.index is None else device.index
        group = heads // self.kv_heads
        return cuda.workspace_bytes(fmt, requests, self.kv_heads, group, queries, index, self.tail is not None)

    def _decode_workspace(self, q: torch.Tensor, fmt: Format, part: DecodePart) -> torch.Tensor | None:
        if q.element_size() != 2:
            return None
        requests, queries = part.seq_lens.shape[0], part.max_seqlen_q or 1
        return workspace(q.device, self.decode_bytes(fmt, q.shape[1], requests, queries, q.device))
