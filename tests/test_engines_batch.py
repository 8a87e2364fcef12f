"""A batch of an engine: its decodes, its prefills and the calls that they need."""

from __future__ import annotations

import pytest
import torch

from conftest import HAS_GPU
from kvstrata import Format, prefill_packed, store_packed
from kvstrata.engines.batch import make_batch, runs, split

DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
FORMATS = ("K8V8", "K8V4", "K4V4", "K4V2", "K3V3", "K2V2")


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


def batch_of(queries, lengths, *, threshold=1, tokens=None, bounds=True, **options):
    """A batch as an engine gives it; the block table says in row r, column c: 100 r + c."""
    starts = torch.tensor([0, *queries]).cumsum(0).int()
    table = 100 * torch.arange(len(queries))[:, None] + torch.arange(4)
    return make_batch(
        starts,
        starts,
        ints(*lengths),
        table.int(),
        tokens=sum(queries) if tokens is None else tokens,
        max_query_len=max(queries),
        max_seq_len=200,
        threshold=threshold,
        seq_lens_cpu=ints(*lengths) if bounds else None,
        **options,
    )


def test_split_counts_the_short_requests_in_front():
    assert split(ints(0, 1, 2, 7, 8), 1) == 2  # the last one is behind a longer one
    assert split(ints(0, 5), 1) == 0
    assert split(ints(0, 1, 2), 1) == 2
    assert split(ints(0, 3, 3, 4), 3) == 3


def test_a_batch_of_decodes_only():
    batch = batch_of([1, 1, 1], [5, 9, 70])
    assert batch.prefills == ()
    (decode,) = batch.decodes
    assert (decode.tokens, decode.cu_seqlens_q, decode.max_seqlen_q) == (3, None, None)


def test_padded_decodes_keep_the_captured_shapes():
    """A graph of 4 requests replays a step of 3: the last row has no query and no token."""
    starts = ints(0, 1, 2, 3, 3)
    batch = make_batch(starts, starts, ints(5, 9, 70, 0), torch.zeros(4, 2, dtype=torch.int32), tokens=4,
                       max_query_len=1, max_seq_len=70, threshold=1)  # fmt: skip
    (decode,) = batch.decodes
    assert (decode.tokens, decode.cu_seqlens_q, decode.seq_lens.tolist()) == (4, None, [5, 9, 70, 0])


def test_drafts_are_decodes_with_ragged_queries():
    batch = batch_of([4, 2, 4], [50, 20, 7], threshold=4)
    assert batch.prefills == ()
    (decode,) = batch.decodes
    assert (decode.tokens, decode.cu_seqlens_q.tolist(), decode.max_seqlen_q) == (10, [0, 4, 6, 10], 4)


def test_padding_tokens_without_requests_need_the_ragged_call():
    (decode,) = batch_of([1, 1, 1], [5, 9, 70], tokens=8).decodes
    assert (decode.tokens, decode.cu_seqlens_q.tolist()) == (8, [0, 1, 2, 3])


def test_mixed_batch_is_split_into_decodes_and_prefills():
    batch = batch_of([1, 1, 40, 7], [5, 9, 100, 7], tokens=64)
    (decode,), (part,) = batch.decodes, batch.prefills
    assert (decode.tokens, decode.seq_lens.tolist()) == (2, [5, 9])
    assert decode.block_table[:, 0].tolist() == [0, 100]
    assert (part.first, part.tokens, part.cu_seqlens_q.tolist()) == (2, 47, [0, 40, 47])
    assert part.block_table[:, 0].tolist() == [200, 300]
    assert (part.max_seqlen_q, part.max_seqlen_k, part.total_tokens, part.prefix) == (40, 100, 107, True)
    assert part.cu_seqlens_k.tolist() == [0, 100, 107]


def test_first_chunks_need_no_pages():
    assert not batch_of([40, 7], [40, 7]).prefills[0].prefix
    assert not batch_of([1, 40, 7], [9, 40, 7]).prefills[0].prefix
    assert batch_of([40, 7], [40, 8]).prefills[0].prefix
    (unknown,) = batch_of([40, 7], [40, 7], bounds=False).prefills
    assert unknown.prefix
    assert (unknown.max_seqlen_k, unknown.total_tokens, unknown.exact) == (200, 400, False)
    parts = batch_of([40, 17, 30], [40, 17, 30], bounds=False, most_tokens=399).prefills  # scratch for no more
    assert [(part.first, part.total_tokens) for part in parts] == [(0, 200), (40, 200), (57, 200)]


@pytest.mark.parametrize(
    ("queries", "lengths", "options", "calls"),
    [
        ([7, 40, 900, 1024, 8000], [7, 50, 900, 1024, 9000], {}, [range(3), range(3, 4), range(4, 5)]),
        ([1024, 1024, 1024], [2000, 2000, 2001], {}, [range(2), range(2, 3)]),  # equals go together
        ([1024, 1024], None, {}, [range(1), range(1, 2)]),
        ([3, 16, 17, 18], [90, 16, 90, 18], dict(short=16), [range(2), range(2, 4)]),
        ([20, 30, 40], [100, 100, 100], dict(most_tokens=250), [range(2), range(2, 3)]),
        ([20], [300], dict(most_tokens=250), [range(1)]),
        ([20, 30, 40], None, dict(most_tokens=250, max_seq_len=100), [range(2), range(2, 3)]),  # unknown: the longest
        ([2, 3], [300, 300], dict(short=4, most_tokens=250), [range(2)]),  # nothing is unpacked for them
        ([], [], {}, []),
    ],
)
def test_requests_of_one_call(queries, lengths, options, calls):
    assert list(runs(queries, lengths, **(dict(short=0, most_tokens=None) | options))) == calls


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize(
    "chunks", [[(41, 41)], [(31, 95)], [(21, 21), (41, 41)], [(21, 85), (41, 41)]], ids=lambda x: str(len(x))
)
def test_chunks_of_a_draft_model_attend_to_all_their_tokens(chunks, backend):
    """Its batch has a token more per request than the lengths on the host: these are bounds only with ``ahead``."""
    fmt = Format.parse("K8V8", 64)
    pages = torch.zeros(16, 1, fmt.page_bytes, dtype=torch.uint8, device=DEVICE)
    table = torch.arange(2 * len(chunks), dtype=torch.int32, device=DEVICE).view(len(chunks), 2)
    queries, lengths = ([chunk[i] for chunk in chunks] for i in (0, 1))
    for i, (new, length) in enumerate(chunks):
        k, v = torch.randn(2, length - new, 1, 64, device=DEVICE)
        store_packed(k, v, pages, 128 * i + torch.arange(length - new, device=DEVICE), fmt)
    starts = torch.tensor([0, *queries]).cumsum(0).int()
    batch = make_batch(
        starts.to(DEVICE), starts, ints(*lengths).to(DEVICE), table, tokens=sum(queries), max_query_len=max(queries),
        max_seq_len=128, threshold=4, seq_lens_cpu=ints(*lengths) - 1, ahead=1, short=16,
    )  # fmt: skip
    q, k, v = (torch.randn(sum(queries), heads, 64, device=DEVICE) for heads in (2, 1, 1))
    for part in batch.prefills:
        rows = slice(part.first, part.first + part.tokens)
        given = q[rows], k[rows], v[rows], pages, part.block_table, part.seq_lens, part.cu_seqlens_q, fmt
        bounds = dict(max_seqlen_q=part.max_seqlen_q, max_seqlen_k=part.max_seqlen_k, total_tokens=part.total_tokens)
        stale = torch.full((1 << 20,), 0xFF, dtype=torch.uint8, device=DEVICE)
        out = prefill_packed(
            *given, **bounds, cu_seqlens_k=part.cu_seqlens_k, exact_lengths=part.exact, workspace=stale, backend=backend
        )
        torch.testing.assert_close(out, prefill_packed(*given, backend="reference"), atol=0.02, rtol=0.02)
    assert sum(part.tokens for part in batch.prefills) == sum(queries)


def test_short_chunks_are_decoded():
    batch = batch_of([1, 3, 5, 40], [9, 70, 5, 99], short=16)
    one, short = batch.decodes
    assert (one.first, one.tokens) == (0, 1)
    assert (short.first, short.tokens, short.cu_seqlens_q.tolist(), short.max_seqlen_q) == (1, 8, [0, 3, 8], 8)
    assert short.block_table[:, 0].tolist() == [100, 200]
    assert [part.first for part in batch.prefills] == [9]


def test_slots_of_tails_follow_their_requests():
    batch = batch_of([1, 3, 40, 2000], [9, 70, 99, 2000], short=16, tail_slots=ints(5, 2, 7, 0))
    assert [part.tail_slots.tolist() for part in batch.decodes] == [[5], [2]]
    assert [part.tail_slots.tolist() for part in batch.prefills] == [[7], [0]]
    rows = batch.rows
    assert (rows.tokens, rows.cu_seqlens_q.tolist(), rows.tail_slots.tolist()) == (
        2044,
        [0, 1, 4, 44, 2044],
        [5, 2, 7, 0],
    )
    assert batch_of([1, 1], [9, 70], tail_slots=ints(1, 0)).rows.cu_seqlens_q is None
