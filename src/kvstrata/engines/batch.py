"""An engine's batch as a few calls: decode for the first requests, then chunks of prompts.

    tokens     | decodes: `threshold` queries at most | short chunks | chunks, first chunks | long ones | padding |
    calls        decode_packed                          decode_packed  one ragged call        one each

Unpacking a whole prefix for the few queries of a short chunk would cost more than decoding it. Long chunks have a call
of their own, or one with others of the same lengths, since dense rows have faster kernels than ragged ones.

Built once per step for all layers. Only host copies are read, so the host never waits; device tensors are sliced.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch

ALONE = 1024  # from this many queries on, a chunk fills a GPU by itself


@dataclass(frozen=True)
class DecodePart:
    """Requests with a few queries each, over packed pages."""

    tokens: int  # rows of q, including padding
    block_table: torch.Tensor  # int32 [requests, max_blocks]
    seq_lens: torch.Tensor  # int32 [requests]
    cu_seqlens_q: torch.Tensor | None  # int32 [requests + 1], from 0; None: one query each
    max_seqlen_q: int | None  # None with cu_seqlens_q None
    first: int = 0  # row of q where the part begins
    tail_slots: torch.Tensor | None = None  # int32 [requests]; None: no tail


@dataclass(frozen=True)
class PrefillPart:
    """Requests with a chunk of new tokens each, over their packed prefix and the chunk itself."""

    first: int  # row of q where the part begins
    tokens: int  # rows of q
    block_table: torch.Tensor  # int32 [requests, max_blocks]
    seq_lens: torch.Tensor  # int32 [requests]
    cu_seqlens_q: torch.Tensor  # int32 [requests + 1], from 0
    cu_seqlens_k: torch.Tensor | None  # int32 [requests + 1], prefix sums of seq_lens; None without a prefix
    max_seqlen_q: int
    max_seqlen_k: int
    total_tokens: int  # sum of seq_lens
    exact: bool  # the three numbers are exact; False: upper bounds
    prefix: bool  # False: no request has tokens in pages, so all K and V are in the batch
    tail_slots: torch.Tensor | None = None

    @property
    def dense(self) -> bool:
        """True if all requests have equally many new tokens and equally long prefixes."""
        requests = self.seq_lens.shape[0]
        equal = requests * self.max_seqlen_q == self.tokens and requests * self.max_seqlen_k == self.total_tokens
        return self.exact and equal


@dataclass(frozen=True)
class Rows:
    """All new rows of a batch, for a store with a tail."""

    tokens: int
    seq_lens: torch.Tensor  # int32 [requests]
    cu_seqlens_q: torch.Tensor | None  # int32 [requests + 1]; None: equally many each
    tail_slots: torch.Tensor  # int32 [requests]


@dataclass(frozen=True)
class Batch:
    """One step of an engine, for every layer with the same block table."""

    decodes: tuple[DecodePart, ...] = ()
    prefills: tuple[PrefillPart, ...] = ()
    rows: Rows | None = None  # None: no tail


def split(query_start_loc: torch.Tensor, threshold: int) -> int:
    """Number of leading requests with at most ``threshold`` queries each; ``query_start_loc`` is on the host."""
    lengths = query_start_loc.diff()
    long = (lengths > threshold).nonzero()
    return int(long[0]) if long.numel() else lengths.shape[0]


def runs(
    queries: list[int], lengths: list[int] | None, short: int, most_tokens: int | None, max_seq_len: int = 0
) -> Iterator[range]:
    """Consecutive requests that go into one call.

    ``queries``, ``lengths``: new tokens and all tokens of each request (None: up to ``max_seq_len``). Requests of up to
    ``short`` queries share a call, and so do longer ones while their tokens are at most ``most_tokens``; those of ALONE
    or more only with equals.
    """
    first, total = 0, 0
    for i, count in enumerate(queries):
        length = max_seq_len if lengths is None else lengths[i]
        if i > first:
            before, equal = queries[i - 1], lengths is not None and lengths[i - 1] == length
            alone = max(before, count) >= ALONE and not (before == count and equal)
            full = count > short and most_tokens is not None and total + length > most_tokens
            if alone or full or (before <= short) != (count <= short):
                yield range(first, i)
                first, total = i, 0
        total += length
    if queries:
        yield range(first, len(queries))


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
    ahead: int = 0,
    short: int = 0,
    most_tokens: int | None = None,
    tail_slots: torch.Tensor | None = None,
) -> Batch:
    """Split a batch.

    Args:
        query_start_loc: int32 ``[requests + 1]`` on the device; padding requests have no queries.
        query_start_loc_cpu: its copy on the host. For decodes, the device's values may differ if the sum agrees.
        seq_lens: int32 ``[requests]`` on the device, including new tokens, 0 for padding.
        block_table: int32 ``[requests, max_blocks]``.
        tokens: rows of q that belong to the batch, including padding.
        max_query_len, max_seq_len: upper bounds over all requests.
        threshold: maximum queries of a request that counts as a decode; 1 without speculative decoding.
        seq_lens_cpu: upper bounds of seq_lens on the host, exact for prefills; None if unknown.
        ahead: tokens by which seq_lens may exceed these bounds; if not 0, they are exact for no request.
        short: maximum queries of a chunk that is decoded as well; 0: none.
        most_tokens: maximum tokens prefilled by one call, including prefixes; None: any number.
        tail_slots: int32 ``[requests]`` on the device, for an engine with tails; negative: none.

    Returns the parts. Nothing is modified. In a batch of decodes only, shapes depend only on ``tokens`` and the number
    of requests, so its calls may be captured in a CUDA graph and replayed with other contents.
    """
    requests = seq_lens.shape[0]
    decodes = requests if max_query_len <= threshold else split(query_start_loc_cpu[: requests + 1], threshold)
    whole = decodes == requests
    decode_parts, prefill_parts = [], []
    one_each = False
    if decodes:
        rows = tokens if whole else int(query_start_loc_cpu[decodes])
        one_each = threshold == 1 and rows == decodes
        decode_parts.append(DecodePart(
            rows,
            block_table[:decodes],
            seq_lens[:decodes],
            None if one_each else query_start_loc[: decodes + 1],
            None if one_each else threshold,
            tail_slots=None if tail_slots is None else tail_slots[:decodes],
        ))  # fmt: skip
    if not whole:
        starts = query_start_loc_cpu[decodes : requests + 1].tolist()
        queries = [end - begin for begin, end in pairwise(starts)]
        lengths = None if seq_lens_cpu is None else (seq_lens_cpu[decodes:requests] + ahead).tolist()
        for run in runs(queries, lengths, short, most_tokens, max_seq_len):
            part = slice(decodes + run.start, decodes + run.stop)
            first, last = starts[run.start], starts[run.stop]
            cu_seqlens_q = query_start_loc[part.start : part.stop + 1]
            cu_seqlens_q = cu_seqlens_q - first if first else cu_seqlens_q
            slots = None if tail_slots is None else tail_slots[part]
            longest = max(queries[run.start : run.stop])
            if longest <= short:
                most = 1 << (longest - 1).bit_length()  # rounded up, so that there are few kinds of launches
                decode_parts.append(
                    DecodePart(last - first, block_table[part], seq_lens[part], cu_seqlens_q, most, first, slots)
                )
                continue
            all_tokens = None if lengths is None else lengths[run.start : run.stop]
            total = len(run) * max_seq_len if all_tokens is None else sum(all_tokens)
            prefix = all_tokens is None or total != last - first
            prefill_parts.append(PrefillPart(
                first, last - first, block_table[part], seq_lens[part], cu_seqlens_q,
                prefix_sums(seq_lens[part]) if prefix else None, longest,
                max_seq_len if all_tokens is None else max(all_tokens), total,
                all_tokens is not None and not (ahead and prefix), prefix, slots,
            ))  # fmt: skip
    stored = None
    if tail_slots is not None:
        stored = Rows(tokens, seq_lens, None if whole and one_each else query_start_loc[: requests + 1], tail_slots)
    return Batch(tuple(decode_parts), tuple(prefill_parts), stored)


def prefix_sums(seq_lens: torch.Tensor) -> torch.Tensor:
    """Prefix sums of lengths with a leading 0, int32."""
    cu = torch.zeros(seq_lens.shape[0] + 1, dtype=torch.int32, device=seq_lens.device)
    torch.cumsum(seq_lens, 0, dtype=torch.int32, out=cu[1:])
    return cu
