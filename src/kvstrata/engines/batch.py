"""An engine's batch as at most two calls: decode for the requests in front, prefill for those behind.

    tokens     | decodes: up to `threshold` queries each | prefills                | padding |
    requests   0                                 decodes                  requests

Made once per step for all layers. Only host copies are read, so the host never waits; device tensors are sliced.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class DecodePart:
    """Requests with a few queries each, over packed pages."""

    tokens: int  # rows of q, padding included
    block_table: torch.Tensor  # int32 [requests, max_blocks]
    seq_lens: torch.Tensor  # int32 [requests]
    cu_seqlens_q: torch.Tensor | None  # int32 [requests + 1]; None: one query each
    max_seqlen_q: int | None  # None with cu_seqlens_q None


@dataclass(frozen=True)
class PrefillPart:
    """Requests with a chunk of new tokens each, over their packed prefix and themselves."""

    first: int  # row of q where the part begins
    tokens: int  # rows of q
    block_table: torch.Tensor  # int32 [requests, max_blocks]
    seq_lens: torch.Tensor  # int32 [requests]
    cu_seqlens_q: torch.Tensor  # int32 [requests + 1], from 0
    max_seqlen_q: int
    max_seqlen_k: int
    total_tokens: int  # upper bound of the sum of seq_lens
    prefix: bool  # False: no request has tokens in pages, so K and V are all in the batch


@dataclass(frozen=True)
class Batch:
    """One step of an engine, for every layer with the same block table."""

    decode: DecodePart | None
    prefill: PrefillPart | None


def split(query_start_loc: torch.Tensor, threshold: int) -> int:
    """Number of requests in front with at most ``threshold`` queries each; ``query_start_loc`` is on the host."""
    lengths = query_start_loc.diff()
    long = (lengths > threshold).nonzero()
    return int(long[0]) if long.numel() else lengths.shape[0]


def make_batch(
    query_start_loc: torch.Tensor,
    query_start_loc_cpu: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    *,
    tokens: int,
    max_query_len: int,
    max_seq_len: int,
    threshold: int,
    seq_lens_cpu: torch.Tensor | None = None,
) -> Batch:
    """Split a batch.

    Args:
        query_start_loc: int32 ``[requests + 1]`` on the device; requests that are padding have no queries.
        query_start_loc_cpu: the same on the host. Among decodes the device's may differ, if their sum agrees.
        seq_lens: int32 ``[requests]`` on the device, new tokens included, 0 for padding.
        block_table: int32 ``[requests, max_blocks]``.
        tokens: rows of q that belong to the batch, padding included.
        max_query_len, max_seq_len: upper bounds over all requests.
        threshold: most queries of a request that is a decode; 1 without speculative decoding.
        seq_lens_cpu: upper bounds of seq_lens on the host, exact for prefills; None if unknown.

    Returns the parts. Nothing is modified. In a batch of decodes alone, shapes depend on ``tokens`` and the number of
    requests only, so its calls may be captured in a CUDA graph and replayed with other contents.
    """
    requests = seq_lens.shape[0]
    decodes = requests if max_query_len <= threshold else split(query_start_loc_cpu[: requests + 1], threshold)
    whole = decodes == requests
    decode = prefill = None
    if decodes:
        rows = tokens if whole else int(query_start_loc_cpu[decodes])
        one_each = threshold == 1 and rows == decodes
        decode = DecodePart(
            rows,
            block_table[:decodes],
            seq_lens[:decodes],
            None if one_each else query_start_loc[: decodes + 1],
            None if one_each else threshold,
        )
    if not whole:
        starts = query_start_loc_cpu[decodes : requests + 1]
        first, last = int(starts[0]), int(starts[-1])
        count = requests - decodes
        lengths = None if seq_lens_cpu is None else seq_lens_cpu[decodes:requests]
        total = count * max_seq_len if lengths is None else int(lengths.sum())
        cu_seqlens_q = query_start_loc[decodes : requests + 1]
        prefill = PrefillPart(
            first,
            last - first,
            block_table[decodes:],
            seq_lens[decodes:],
            cu_seqlens_q - first if first else cu_seqlens_q,
            int(starts.diff().max()),
            max_seq_len if lengths is None else int(lengths.max()),
            total,
            lengths is None or total != last - first,
        )
    return Batch(decode, prefill)
