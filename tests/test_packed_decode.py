"""decode_packed: every backend against the float32 model, over blocks with holes, poison, padding and shared blocks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import emulator
from conftest import HAS_GPU
from kvstrata import Format, decode_packed
from packed_model import DEVICE, Batch, Calibration, calibration_of, each_backend, kernels  # noqa: F401


def sinks(heads: int) -> torch.Tensor:
    return torch.tensor([0.5, -1.0, -torch.inf, 2.0, 0.0, 1.0])[:heads].to(DEVICE)


CASES: dict[str, tuple[tuple, list[int], dict, dict]] = {
    "one query": (("K4V4", 64, 16), [150, 1, 0, 97], {}, {}),
    "D 128, blocks of two pages": (("K4V2", 128, 64), [300, 64, 129], dict(pages_per_block=2, strided=True), {}),
    "8 bit in parts of pages": (("K8V8", 128, 64), [200, 70], dict(shared=True), dict(group=1)),
    "ragged queries": (("K4V4", 64, 16), [70, 33, 5], {}, dict(q_lens=[3, 1, 5], group=4)),
    "a request without queries": (("K2V2", 64, 32), [70, 33, 50], {}, dict(q_lens=[2, 0, 1])),
    "more queries than tokens": (("K4V4", 64, 16), [2, 40, 1], {}, dict(q_lens=[4, 4, 4], group=2)),
    "window": (("K4V4", 64, 16), [150, 20, 3], dict(pages_per_block=4), dict(sliding_window=33)),
    "window, queries": (("K3V3", 64, 16), [90, 40], {}, dict(q_lens=[4, 4], sliding_window=17, group=2)),
    "sinks and softcap": (("K4V4", 64, 16), [60, 0], {}, dict(sinks=sinks(6), softcap=3.0, loud=4.0)),
    "centre and balance": (("K4V4", 64, 16), [60, 25], dict(calibration=True), dict(sinks=sinks(6))),
    "centre under softcap": (("K4V4", 64, 16), [40], dict(calibration=True), dict(softcap=5.0, scale=0.2)),
    "sixteen queries of sixteen heads": (("K4V4", 64, 16), [60], dict(kv_heads=1), dict(q_lens=[16], group=16)),
    "D 256": (("K4V2", 256, 16), [50, 17], dict(dtype=torch.float16), dict(group=2)),
    "odd head_dim": (("K3V2", 80, 32), [70, 21], {}, dict(sliding_window=40)),
    "more requests than lanes": (
        ("K4V4", 64, 16),
        [i * 7 % 41 * (i % 5 > 0) for i in range(70)],
        dict(kv_heads=1),
        dict(group=1),
    ),
    "loud": (("K8V4", 64, 16), [130], {}, dict(loud=30.0)),
}


INTERPRETED = (
    "one query",
    "ragged queries",
    "more queries than tokens",
    "window",
    "centre and balance",
    "odd head_dim",
    "sinks and softcap",
)


def case(name: str, backend: str) -> None:
    if backend == "triton" and not HAS_GPU and name not in INTERPRETED:
        pytest.skip("a few are enough under the interpreter")
    (fmt, dim, tokens), lengths, batch, call = CASES[name]
    batch, call = dict(batch), dict(call)
    if batch.get("calibration"):
        batch["calibration"] = calibration_of(2, dim)
    Batch(Format.parse(fmt, dim, tokens), lengths, **batch).check(backend, **call)


@each_backend
@pytest.mark.parametrize("name", CASES)
def test_decode_equals_the_model(name: str, backend: str) -> None:
    case(name, backend)


@each_backend
def test_random_batches_equal_the_model(backend: str) -> None:
    """Random formats, lengths, blocks and queries; entries of the table past the end and free blocks are poison."""

    few = backend == "cuda" and not HAS_GPU  # kernels to compile

    @settings(max_examples=(40 if HAS_GPU else 6) * (3 if backend == "reference" else 1))
    @given(
        name=st.sampled_from(["K4V4"] if few else ["K4V4", "K8V8", "K4V2", "K2V2"]),
        page_tokens=st.sampled_from([16] if few else [16, 32]),
        pages_per_block=st.sampled_from([1, 2, 3]),
        lengths=st.lists(st.integers(0, 90), min_size=1, max_size=5),
        q_len=st.integers(1, 4),
        ragged=st.booleans(),
        window=st.sampled_from([None, 5, 40]),
        seed=st.integers(0, 99),
    )
    def run(name, page_tokens, pages_per_block, lengths, q_len, ragged, window, seed) -> None:
        fmt = Format.parse(name, 64, page_tokens)
        batch = Batch(fmt, lengths, kv_heads=1, pages_per_block=pages_per_block, seed=seed, capacity=3)
        q_lens = [(seed + i) % (q_len + 1) if ragged else q_len for i in range(len(lengths))]
        if sum(q_lens) == 0:
            return
        batch.check(backend, q_lens=q_lens, ragged=ragged, group=2, sliding_window=window)

    run()


@each_backend
def test_fixed_split_is_batch_invariant(backend: str) -> None:
    fmt = Format.parse("K4V4", 64, 16)
    batch = Batch(fmt, [300, 20, 150])
    q = batch.queries([1, 1, 1], 3)
    arguments = dict(fixed_split=64, return_lse=True, backend=backend)
    out, lse, _ = decode_packed(q, batch.pages, batch.block_table, batch.seq_lens, fmt, **arguments)
    for i in range(3):
        rows = slice(i, i + 1)
        table = batch.block_table[rows, : -(-batch.lengths[i] // 16)].contiguous()
        one = decode_packed(q[rows], batch.pages, table, batch.seq_lens[rows], fmt, **arguments)
        assert torch.equal(one.out, out[rows])
        assert torch.equal(one.lse, lse[rows])


@each_backend
def test_lengths_grow_between_calls(backend: str) -> None:
    """One shape of call, other contents: lengths and blocks are read by the kernels."""
    fmt = Format.parse("K4V4", 64, 16)
    batch = Batch(fmt, [90, 40], capacity=8)
    full = batch.lengths
    workspace = torch.full((1 << (26 if HAS_GPU else 20),), 0xFF, dtype=torch.uint8, device=DEVICE)
    for lengths in ([1, 0], [17, 40], [90, 3]):
        batch.lengths = lengths
        batch.slots = [batch.slots_of(row, torch.arange(n)) for row, n in enumerate(lengths)]
        batch.seq_lens.copy_(torch.tensor(lengths))
        batch.check(backend, workspace=workspace)
    assert full == [90, 40]


def test_invalid_decode_arguments_are_named() -> None:
    fmt = Format.parse("K4V4", 64, 16)
    batch = Batch(fmt, [30, 20])
    q, table, lens = batch.queries([1, 1], 3), batch.block_table, batch.seq_lens
    wrong = {
        "q: expected .tokens, a multiple of 2, 64": (q[:, :5], batch.pages, table, lens, fmt),
        "q: expected as many tokens": (torch.cat([q, q[:1]]), batch.pages, table, lens, fmt),
        "block_table: expected torch.int32": (q, batch.pages, table.long(), lens, fmt),
        r"block_table: expected \[1, max_blocks\], one row per length, got shape \(2, \d\)": (
            q,
            batch.pages,
            table,
            lens[:1],
            fmt,
        ),
        "pages: expected blocks and heads that do not overlap": (
            q,
            batch.pages[:1].expand(4, -1, -1),
            table,
            lens,
            fmt,
        ),
        "fmt: expected a Format": (q, batch.pages, table, lens, "K4V4"),
        "pages: expected .num_blocks": (q, batch.pages, table, lens, Format.parse("K8V8", 64, 16)),
    }
    for message, arguments in wrong.items():
        with pytest.raises((ValueError, TypeError), match=message):
            decode_packed(*arguments)
    cu = torch.tensor([0, 1], dtype=torch.int32, device=DEVICE)
    with pytest.raises(
        ValueError, match=r"cu_seqlens_q: expected contiguous \[3\], one more than seq_lens, got shape \(2,\)"
    ):
        decode_packed(q, batch.pages, table, lens, fmt, cu_seqlens_q=cu)
    with pytest.raises(ValueError, match="sliding_window: expected an int"):
        decode_packed(q, batch.pages, table, lens, fmt, sliding_window=0)
    scratch = torch.empty(1 << 20, dtype=torch.uint8, device=DEVICE)
    for message, change in {
        r"workspace: expected one dimension, got shape \(2, 524288\)": dict(workspace=scratch.view(2, -1)),
        "workspace: expected an address that is a multiple of 16": dict(workspace=scratch[1:]),
        "sinks: expected a tensor, got list": dict(sinks=[0.0] * 6),
        "out: expected a tensor, got list": dict(out=[]),
        "calibration.centre: expected a tensor, got list": dict(calibration=Calibration(centre=[0.0])),
    }.items():
        for backend in ("reference", "triton"):
            with pytest.raises((ValueError, TypeError), match=message):
                decode_packed(q, batch.pages, table, lens, fmt, backend=backend, **change)
    small = torch.empty(16, dtype=torch.uint8, device=DEVICE)
    if HAS_GPU or not emulator.missing():
        with pytest.raises(ValueError, match=r"workspace: expected \d+ bytes"):
            decode_packed(q, batch.pages, table, lens, fmt, workspace=small, backend="cuda")


def test_contents_are_checked_on_a_cpu() -> None:
    """Rows and blocks that are not there; entries that no query reads may be anything."""
    fmt = Format.parse("K4V4", 64, 16)
    batch = Batch(fmt, [60, 20])
    q, lens, table = batch.queries([2, 1], 3), batch.seq_lens, batch.block_table

    def call(cu: list[int], table: torch.Tensor = table, q: torch.Tensor = q, **options) -> torch.Tensor:
        starts = torch.tensor(cu, dtype=torch.int32, device=DEVICE)
        return decode_packed(q, batch.pages, table, lens, fmt, cu_seqlens_q=starts, backend="reference", **options)

    for cu in ([0, 2, 4], [0, 4, 3], [-1, 2, 3]):
        with pytest.raises(ValueError, match=r"cu_seqlens_q: expected numbers from 0 to 3, the rows of q, got (4|-1)"):
            call(cu)
    with pytest.raises(ValueError, match=r"max_seqlen_q: expected at least 2, .*, got 1"):
        call([0, 2, 3], max_seqlen_q=1)
    many = batch.queries([17, 1], 3)
    with pytest.raises(ValueError, match=r"max_seqlen_q: expected at least 17, .*, got 16"):
        call([0, 17, 18], q=many)
    call([0, 17, 18], q=many, max_seqlen_q=17)
    for entry in (-1, len(batch.pages)):
        wrong = table.clone()
        wrong[0, 1] = entry
        last = len(batch.pages) - 1
        with pytest.raises(ValueError, match=f"block_table: expected blocks from 0 to {last} .*, got {entry}"):
            call([0, 2, 3], wrong)
        options = dict(sliding_window=16)
        assert torch.equal(call([0, 2, 3], wrong, **options), call([0, 2, 3], **options))


@each_backend
def test_a_pool_without_blocks(backend: str) -> None:
    """Refused if the table has entries; otherwise no request has a token."""
    fmt = Format.parse("K4V4", 64, 16)
    batch = Batch(fmt, [20])
    q, empty = batch.queries([1], 3), batch.pages[:0]
    with pytest.raises(ValueError, match="pages: expected at least one block, as block_table has entries, got 0"):
        decode_packed(q, empty, batch.block_table, batch.seq_lens, fmt, backend=backend)
    if backend == "reference":
        out = decode_packed(q, empty, batch.block_table[:, :0], batch.seq_lens, fmt, backend=backend)
        assert (out == 0).all()


@each_backend
def test_output_of_the_caller(backend: str) -> None:
    fmt = Format.parse("K4V4", 64, 16)
    batch = Batch(fmt, [30, 0, 20])
    q = batch.queries([1, 1, 1], 3)
    arguments = (q, batch.pages, batch.block_table, batch.seq_lens, fmt)
    want = decode_packed(*arguments, backend=backend)
    for _ in range(2):  # the second call takes the way of repeated ones
        out = torch.full_like(q, float("nan"))
        assert decode_packed(*arguments, out=out, backend=backend) is out
        assert torch.equal(out, want)
    again = decode_packed(*arguments, backend=backend)
    assert again is not out
    for message, wrong in {
        r"out: expected shape \(3, 6, 64\)": out[:2],
        "out: expected torch.bfloat16": out.float(),
        "out: expected memory that does not overlap q": q,
        "out: expected a contiguous tensor": out.transpose(0, 1).contiguous().transpose(0, 1),
        "out: expected an address": torch.empty(out.numel() + 1, dtype=out.dtype, device=DEVICE)[1:].view(out.shape),
    }.items():
        with pytest.raises((ValueError, TypeError), match=message):
            decode_packed(*arguments, out=wrong, backend=backend)


def test_decode_packed_passes_opcheck() -> None:
    fmt = Format.parse("K4V4", 64, 16)
    batch = Batch(fmt, [30, 20])
    q = batch.queries([2, 2], 3)
    fields = (fmt.name, 64, 16, True, None, None, None, None, None, True, "reference")
    arguments = (q, batch.pages, batch.block_table, batch.seq_lens, *[None] * 11, *fields)
    torch.library.opcheck(torch.ops.kvstrata.decode_packed.default, arguments)
    torch.library.opcheck(torch.ops.kvstrata.decode_packed_into.default, (*arguments, torch.empty_like(q)))

    def into(q: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        return decode_packed(q, batch.pages, batch.block_table, batch.seq_lens, fmt, out=out, backend="reference")

    out = torch.full_like(q, float("nan"))
    torch.compile(into, fullgraph=True, backend="eager")(q, out)

    def call(q: torch.Tensor) -> torch.Tensor:
        return decode_packed(q, batch.pages, batch.block_table, batch.seq_lens, fmt, backend="reference")

    assert torch.equal(torch.compile(call, fullgraph=True, backend="eager")(q), call(q))
    assert torch.equal(out, call(q))
