"""One attention layer over an engine's blocks of packed pages: what an adaptor calls.

    cache   [num_blocks, kv_heads, block_size, bytes per token]     the engine's view, any strides but of the last two
    pages   [num_blocks, kv_heads, pages_per_block * page_bytes]    the same memory, as the packed ops address it

An engine counts bytes per token; inside a block of one KV head the bytes belong to pages, not to tokens.
"""

from __future__ import annotations

import torch

from kvstrata.attention import decode_packed, prefill_attention, prefill_packed
from kvstrata.layout import Format
from kvstrata.quant.calibration import LayerCalibration
from kvstrata.store import store_packed

from .batch import Batch
from .options import MOST_GROUP, Options


class PackedLayer:
    """Store and attention of one layer.

    Args:
        options: what the user configured.
        heads, kv_heads, head_dim: sizes of the layer on this rank.
        scale: factor of the scores.
        sliding_window: positions that a query sees, its own included; None is all.
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
        self.options, self.head_dim = options, head_dim
        self.bytes_per_token = options.bytes_per_token(head_dim)
        self.scale, self.sliding_window, self.softcap, self.sinks = scale, sliding_window, softcap, sinks
        self.calibration: LayerCalibration | None = None
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

    def store(self, k: torch.Tensor, v: torch.Tensor, cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        """Write rows ``[T, kv_heads, head_dim]`` to their slots in ``cache``, which is mutated; -1 is padding.

        Rows behind the last slot are padding too. May be captured in a CUDA graph after one call of the same shapes.
        """
        pages, fmt = self.pages(cache)
        count = min(slot_mapping.shape[0], k.shape[0])
        store_packed(k[:count], v[:count], pages, slot_mapping[:count], fmt, calibration=self.calibration)

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cache: torch.Tensor, batch: Batch, out: torch.Tensor
    ) -> None:
        """Attention of a batch whose rows are stored already; rows of ``out [T, heads, head_dim]`` are written.

        Args:
            q: ``[T, heads, head_dim]``; rows behind the batch are padding.
            k, v: ``[T, kv_heads, head_dim]``, the new rows, which prefills read unquantised.
            cache: the engine's blocks.
            batch: the step.
            out: mutated, but for rows that are padding.

        A batch of decodes alone may be captured in a CUDA graph after one call of the same shapes.
        """
        pages, fmt = self.pages(cache)
        if (part := batch.decode) is not None:
            out[: part.tokens] = decode_packed(  # type: ignore[assignment]
                q[: part.tokens], pages, part.block_table, part.seq_lens, fmt, calibration=self.calibration,
                scale=self.scale, sliding_window=self.sliding_window, sinks=self.sinks, softcap=self.softcap,
                cu_seqlens_q=part.cu_seqlens_q, max_seqlen_q=part.max_seqlen_q,
            )  # fmt: skip
        if (chunk := batch.prefill) is not None:
            rows = slice(chunk.first, chunk.first + chunk.tokens)
            if not chunk.prefix:
                out[rows] = prefill_attention(  # type: ignore[assignment]
                    q[rows], k[rows], v[rows], scale=self.scale, cu_seqlens_q=chunk.cu_seqlens_q,
                    cu_seqlens_k=chunk.cu_seqlens_q, max_seqlen_q=chunk.max_seqlen_q, max_seqlen_k=chunk.max_seqlen_q,
                    sliding_window=self.sliding_window, sinks=self.sinks, softcap=self.softcap,
                )  # fmt: skip
                return
            out[rows] = prefill_packed(  # type: ignore[assignment]
                q[rows], k[rows], v[rows], pages, chunk.block_table, chunk.seq_lens, chunk.cu_seqlens_q, fmt,
                calibration=self.calibration, scale=self.scale, sliding_window=self.sliding_window, sinks=self.sinks,
                softcap=self.softcap, max_seqlen_q=chunk.max_seqlen_q, max_seqlen_k=chunk.max_seqlen_k,
                total_tokens=chunk.total_tokens,
            )  # fmt: skip
