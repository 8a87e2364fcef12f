"""16-bit tail and sink tokens with packed pages: every backend over the life of requests, against the float32 model."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import emulator
from conftest import HAS_GPU
from kvstrata import Format, PlainRows, decode_packed, store_packed
from packed_engine import Engine
from packed_model import DEVICE, POISON, Calibration, calibration_of, each_backend, kernels  # noqa: F401


def test_an_example_request() -> None:
    """A page is packed when its last token comes; before that its tokens are in the tail and its bytes untouched."""
    fmt = Format.parse("K4V4", 64, 16)
    engine = Engine(fmt, 1, kv_heads=1, sinks=4)
    assert engine.tail is not None
    assert engine.sinks is not None
    page = engine.pages[int(engine.block_table[0, 0])]
    engine.step([15])
    assert (page == POISON).all()
    assert torch.equal(engine.tail.k[0, 0, :15].cpu(), engine.history[0, 0, :15, 0])
    assert torch.equal(engine.sinks.v[0, 0].cpu(), engine.history[1, 0, :4, 0])
    engine.step([1])
    assert (page != POISON).any()
    engine.check_bytes()
    engine.step([1])
    assert torch.equal(engine.tail.k[0, 0, 0].cpu(), engine.history[0, 0, 16, 0])
    assert torch.equal(engine.sinks.k[0, 0].cpu(), engine.history[0, 0, :4, 0])


@each_backend
@pytest.mark.parametrize(
    ("name", "dim", "page_tokens", "dtype", "options"),
    [
        ("K4V4", 64, 16, torch.bfloat16, {}),
        ("K8V4", 128, 64, torch.float16, dict(pages_per_block=2, strided=True, blocks=2)),
        ("K3V2", 80, 32, torch.float32, dict(tail=2)),
        ("K8V2", 64, 16, torch.bfloat16, dict(tail=0)),
    ],
)
def test_chunked_stores_equal_the_model(
    backend: str, name: str, dim: int, page_tokens: int, dtype: torch.dtype, options: dict
) -> None:
    """Chunks within a page, up to its end, over one and over many; drafts; padding; single tokens."""
    p = page_tokens
    if not HAS_GPU and backend in {80: ("cuda", "triton"), 128: ("triton",)}.get(dim, ()):
        pytest.skip("kernels of one or two formats are enough on the CPU")
    heads = 1 if backend == "triton" and not HAS_GPU else 2
    engine = Engine(
        Format.parse(name, dim, p), 4, sinks=5, slots=[2, 0, -1, 1], dtype=dtype, kv_heads=heads,
        calibration=calibration_of(heads, dim), backend=backend, **options,
    )  # fmt: skip
    for counts in ([3, p - 1, 5, 0], [p - 4, 1, 2, 2], [1, 1, 1, p - 2], [2, p + 3, p, p + 1], [p + p // 2, 0, 1, 1]):
        engine.step(counts, padding=3)
        engine.check_bytes()
        for row in range(4):
            check_rows(engine, row)


@pytest.mark.skipif(HAS_GPU or bool(emulator.missing()), reason="needs the emulator")
def test_blocks_in_another_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of the tail that a page is packed from are not written by others before that."""
    monkeypatch.setenv("EMULATE_BACKWARDS", "1")
    for tail in (1, 2):
        engine = Engine(Format.parse("K4V4", 64, 16), 2, kv_heads=1, tail=tail, backend="cuda")
        for counts in ([13, 5], [6, 30], [40, 1], [1, 60]):
            engine.step(counts)
            engine.check_bytes()
            check_rows(engine, 0)
            check_rows(engine, 1)


def check_rows(engine: Engine, row: int) -> None:
    """Rows that decode reads are those of the request."""
    sinks, packed = engine.split(row)
    for rows, first, end, slots in (
        (engine.sinks, 0, sinks, engine.sink_slots),
        (engine.tail, packed, engine.lengths[row], engine.tail_slots),
    ):
        if rows is None or end <= first:
            continue
        position = torch.arange(first, end)
        for x, y in zip((rows.k, rows.v), engine.history, strict=True):
            kept = x.cpu()[slots[row]][:, position % x.shape[2]].transpose(0, 1)
            assert torch.equal(kept, y[row, first:end]), f"request {row}, positions {first} to {end}"


CASES: dict[str, tuple[tuple, dict, dict]] = {
    "one page of 16": (("K4V4", 64, 16), {}, {}),
    "D 128, pages of 64": (("K4V4", 128, 64), dict(pages_per_block=2, blocks=2), dict(group=4)),
    "sinks within a page": (("K8V8", 64, 32), dict(sinks=4), {}),
    "sinks beyond a page": (("K4V2", 64, 16), dict(sinks=21, tail=2), {}),
    "sinks without a tail": (("K4V4", 64, 16), dict(sinks=7, tail=0), {}),
    "calibrated": (("K4V4", 64, 16), dict(sinks=4, calibration=True), {}),
    "softcap": (("K4V4", 64, 16), dict(sinks=4, calibration=True), dict(softcap=4.0)),
    "window": (("K4V4", 64, 16), dict(sinks=4), dict(sliding_window=9)),
    "window, queries": (("K4V4", 64, 16), dict(sinks=4), dict(sliding_window=22, q_lens=[3, 1, 4, 2])),
    "queries": (("K4V4", 64, 16), dict(sinks=4), dict(q_lens=[3, 1, 4, 2], group=3)),
    "batch-invariant": (("K4V4", 64, 16), dict(sinks=20), dict(fixed_split=32)),
    "odd head_dim": (("K3V3", 80, 32), dict(sinks=3), {}),
}
ON_CPU = {  # kernels of a few formats: compiling and interpreting them takes its time
    "triton": ("sinks beyond a page", "calibrated", "window, queries"),
    "cuda": ("one page of 16", "D 128, pages of 64", "sinks without a tail", "softcap", "window, queries", "queries",
             "batch-invariant", "calibrated"),
}  # fmt: skip


@each_backend
@pytest.mark.parametrize("name", CASES)
def test_decode_with_a_tail_equals_the_model(name: str, backend: str) -> None:
    if not HAS_GPU and name not in ON_CPU.get(backend, CASES):
        pytest.skip("a few are enough on the CPU")
    (fmt, dim, tokens), options, call = CASES[name]
    options = dict(options, slots=[1, 3, -1, 0], backend=backend if HAS_GPU else "reference")
    if options.get("calibration"):
        options["calibration"] = calibration_of(2, dim)
    engine = Engine(Format.parse(fmt, dim, tokens), 4, **options)
    engine.step([tokens + 9, 5, 2 * tokens + 3, 2 * tokens])
    engine.decode(backend=backend, **call)
    engine.step([4, 1, 1, 1])
    engine.decode(backend=backend, **call)


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("options", [dict(sinks=4), dict(sinks=20, tail=2, calibration=True), dict(tail=0, sinks=5)])
def test_prefill_with_a_tail_equals_the_model(backend: str, options: dict) -> None:
    fmt = Format.parse("K8V8", 64, 16)
    options = dict(options, dtype=torch.float16, slots=[1, 2, -1, 0])
    if options.get("calibration"):
        options["calibration"] = calibration_of(2, 64)
    engine = Engine(fmt, 4, **options)
    engine.step([25, 5, 20, 16])
    for counts in ([3, 2, 9, 1], [30, 0, 1, 17]):
        engine.step(counts)
        engine.prefill(backend)
    engine.prefill(backend, sliding_window=12)


@each_backend
def test_a_first_row_without_a_slot(backend: str) -> None:
    """Nothing says where its page is: the page's older tokens are not packed, the other rows are stored as ever."""
    fmt = Format.parse("K4V4", 64, 16)
    engine = Engine(fmt, 1, kv_heads=1, backend=backend)
    assert engine.tail is not None
    engine.step([13])
    k, v = torch.randn(2, 10, 1, 64, generator=torch.Generator().manual_seed(1)).bfloat16().to(DEVICE)
    engine.history[:, 0, 14:23] = torch.stack([k, v])[:, 1:].cpu()
    slots = engine.slots_of(0, torch.arange(13, 23)).to(DEVICE)
    slots[0] = -1
    lens = torch.tensor([23], dtype=torch.int32, device=DEVICE)
    store_packed(k, v, engine.pages, slots, fmt, tail=engine.tail, seq_lens=lens, backend=backend)
    wanted = torch.full_like(engine.pages, POISON)
    store_packed(k[1:3], v[1:3], wanted, slots[1:3], fmt, backend=backend)
    assert torch.equal(engine.pages, wanted)
    position = torch.tensor([*range(7, 13), *range(14, 23)])
    for x, y in zip((engine.tail.k, engine.tail.v), engine.history, strict=True):
        assert torch.equal(x[0, 0].cpu()[position % 16], y[0, position, 0])


@each_backend
@pytest.mark.parametrize("seed", range(3))
def test_rows_without_a_slot_anywhere(backend: str, seed: int) -> None:
    """Such rows are nowhere; the page of the first row is finished by it, or its older tokens stay in the tail."""
    generator = torch.Generator().manual_seed(seed)
    fmt, counts = Format.parse("K4V4", 64, 16), [21, 5, 18]
    engine = Engine(fmt, 3, kv_heads=1, tail=1 + seed % 2, backend=backend, seed=seed)
    assert engine.tail is not None
    tokens = engine.tail.k.shape[2]
    engine.step([13, 27, 16])
    pages, tails = engine.pages.clone(), [x.clone() for x in engine.tail[:2]]
    new = torch.randn(2, sum(counts), 1, 64, generator=generator).bfloat16()
    holes = torch.rand(sum(counts), generator=generator) < 0.3
    holes[[0, 21, 26]] = torch.tensor([seed == 0, seed == 1, False])
    mapping, first = [], 0
    for row, count in enumerate(counts):
        begin, part = engine.lengths[row], slice(first, first + count)
        position = torch.arange(begin, begin + count)
        slots, live = engine.slots_of(row, position), ~holes[part]
        mapping.append(torch.where(live, slots, -1))
        finished = live & (position < (begin + count) // 16 * 16)
        packed = [(new[:, part][:, finished], slots[finished])]
        if live[0] and begin % 16 and begin // 16 < (begin + count) // 16:
            older = torch.arange(begin // 16 * 16, begin)
            packed.append((engine.history[:, row, older], engine.slots_of(row, older)))
        for rows, where in packed:
            k, v = rows.to(DEVICE)
            store_packed(k, v, pages, where.to(DEVICE), fmt, backend=backend)
        kept = live & (position >= begin + count - tokens)
        for tail, rows in zip(tails, new[:, part, 0].to(DEVICE), strict=True):
            tail[row, 0, position[kept] % tokens] = rows[kept]
        first += count
    lens, cu = (torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in ([34, 32, 34], [0, 21, 26, 44]))
    given = dict(tail=engine.tail, seq_lens=lens, cu_seqlens_q=cu, backend=backend)
    store_packed(*new.to(DEVICE), engine.pages, torch.cat(mapping).to(DEVICE), fmt, **given)
    assert torch.equal(engine.pages, pages)
    for tail, wanted in zip(engine.tail[:2], tails, strict=True):
        assert torch.equal(tail.view(torch.int16), wanted.view(torch.int16))


@each_backend
def test_lengths_below_zero_are_none(backend: str) -> None:
    engine = Engine(Format.parse("K4V4", 64, 16), 2, kv_heads=1, sinks=4)
    engine.step([20, 20])
    q, lens = engine.queries([1, 1], 2), torch.tensor([-5, 20], dtype=torch.int32, device=DEVICE)
    result = decode_packed(
        q, engine.pages, engine.block_table, lens, engine.fmt, return_lse=True, backend=backend, **engine.given
    )
    assert (result.out[0] == 0).all()
    assert (result.lse[0] == -torch.inf).all()
    assert result.lse[1].isfinite().all()


@each_backend
def test_shared_prefix_shares_every_byte(backend: str) -> None:
    """A request that begins with another's blocks has an empty tail and no sink rows, and shares every byte."""
    fmt = Format.parse("K4V4", 64, 16)
    engine = Engine(fmt, 2, kv_heads=1, sinks=4, backend=backend)
    engine.step([41, 0])
    engine.share(1, 0, 2)
    before = engine.pages.clone()
    engine.step([1, 5])
    assert torch.equal(engine.pages, before), "both tails are unfinished"
    engine.decode()
    engine.step([7, 11])
    engine.check_bytes()
    engine.decode()


@each_backend
def test_any_sequence_of_stores_and_reads(backend: str) -> None:
    """Random chunks, rollbacks of drafts over page edges and prefix hits; free blocks and rows to come are poison."""
    few = backend == "cuda" and not HAS_GPU  # kernels to compile

    @settings(max_examples=40 if HAS_GPU else dict(reference=15, cuda=5, triton=2)[backend])
    @given(
        name=st.sampled_from(["K4V4"] if few else ["K4V4", "K8V8", "K3V2"]),
        pages_per_block=st.sampled_from([1, 2, 3]),
        tail=st.sampled_from([0, 1, 2, 3]),
        sinks=st.sampled_from([0, 4, 16, 19]),
        slots=st.permutations([0, 1, -1]),
        steps=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 19), st.integers(0, 3)), min_size=1, max_size=4),
        drafts=st.integers(0, 17),
        window=st.sampled_from([None, 7, 30]),
        softcap=st.sampled_from([None, 4.0]),
        learned=st.sampled_from([None, [0.5, -1.0]]),
        seed=st.integers(0, 99),
    )
    def run(name, pages_per_block, tail, sinks, slots, steps, drafts, window, softcap, learned, seed) -> None:
        logits = None if learned is None else torch.tensor(learned, device=DEVICE)
        scoring = dict(sliding_window=window, softcap=softcap, sinks=logits)
        fmt = Format.parse(name, 64, 16)
        slots = [*slots, 2]
        engine = Engine(
            fmt, 4, kv_heads=1, pages_per_block=pages_per_block, blocks=9, tail=tail, sinks=sinks, slots=slots,
            backend=backend, seed=seed,
        )  # fmt: skip
        for counts in steps:
            engine.step([*counts, 0], padding=seed % 3)
        engine.check_bytes()
        if engine.lengths[0] >= engine.block_size:
            engine.share(3, 0, engine.lengths[0] // engine.block_size)
        accepted = 1 + seed % (drafts + 1)
        engine.step([1 + drafts] * 4, ragged=bool(seed % 2))
        for row, length in enumerate(list(engine.lengths)):
            engine.roll_back(row, 1 + drafts - accepted)
            lost = 16 * tail < 15 + drafts and engine.lengths[row] // 16 < length // 16
            if engine.tail is not None and lost:  # rows of its page may be: write through from now on
                engine.tail_slots[row] = -1
                engine.tail.slots[row] = -1
        engine.decode([min(accepted, 16)] * 4, **scoring)
        engine.step([2, 1, 17, 3])
        engine.check_bytes()
        engine.decode(**scoring)
        for row in range(4):
            check_rows(engine, row)

    run()


def test_invalid_tail_arguments_are_named() -> None:
    fmt = Format.parse("K4V4", 64, 16)
    engine = Engine(fmt, 2, sinks=4)
    assert engine.tail is not None
    (k, v), slots = torch.randn(2, 4, 2, 64).bfloat16().to(DEVICE), torch.arange(4, device=DEVICE)
    lens = torch.tensor([2, 2], dtype=torch.int32, device=DEVICE)
    tail = engine.tail

    def rows(**change: torch.Tensor) -> PlainRows:
        return tail._replace(**change)

    wrong: dict[str, dict] = {
        "tail: expected PlainRows": dict(tail=(tail.k, tail.v)),
        "tail.k: expected .max_requests, 2, tokens, 64": dict(tail=rows(k=tail.k[:, :1])),
        "tail.k: expected requests and heads that do not overlap": dict(tail=rows(k=tail.k[:1].expand_as(tail.k))),
        "tail.k: expected a multiple of 16 tokens": dict(tail=rows(k=tail.k[:, :, :9], v=tail.v[:, :, :9])),
        "tail.v: expected torch.bfloat16": dict(tail=rows(v=tail.v.half())),
        "tail.v: expected shape": dict(tail=rows(v=tail.v[:2])),
        "tail.k: expected contiguous rows": dict(tail=rows(k=tail.k.transpose(1, 2).contiguous().transpose(1, 2))),
        "tail.slots: expected torch.int32": dict(tail=rows(slots=tail.slots.long())),
        "sink_tokens.slots: expected contiguous .2.": dict(tail=None, sink_tokens=rows(slots=tail.slots[:1])),
        "tail.k: expected a tensor, got NoneType": dict(tail=PlainRows(None, None, None)),
        "tail.slots: expected a tensor, got list": dict(tail=rows(slots=[0, 1])),
        "sink_tokens.v: expected a tensor, got int": dict(sink_tokens=rows(v=0)),
        "cu_seqlens_q: expected a tensor, got list": dict(cu_seqlens_q=[0, 2, 4]),
        "calibration.balance: expected a tensor, got float": dict(calibration=Calibration(balance=2.0)),
        "seq_lens: expected a tensor": dict(seq_lens=None),
        "seq_lens: expected torch.int32": dict(seq_lens=lens.long()),
        "cu_seqlens_q: expected contiguous .3.": dict(cu_seqlens_q=lens),
        "k: expected as many tokens for each of 3": dict(
            seq_lens=torch.cat([lens, lens[:1]]), tail=rows(slots=torch.cat([tail.slots, tail.slots[:1]]))
        ),
    }
    for message, change in wrong.items():
        with pytest.raises((ValueError, TypeError), match=message):
            store_packed(k, v, engine.pages, slots, fmt, **dict(tail=tail, seq_lens=lens) | change)
    q = torch.randn(2, 4, 64).to(DEVICE)
    with pytest.raises(TypeError, match=r"tail.k: expected torch.float32"):
        decode_packed(q, engine.pages, engine.block_table, lens, fmt, tail=tail)
    assert (engine.pages == POISON).all()
    assert tail.k.isnan().all()


@each_backend
def test_sparse_rows_are_named(backend: str) -> None:
    """Also where a call repeats the one before."""
    fmt = Format.parse("K4V4", 64, 16)
    engine = Engine(fmt, 2, kv_heads=1)
    (k, v), slots = torch.randn(2, 2, 1, 64).bfloat16().to(DEVICE), torch.tensor([0, 16], device=DEVICE)
    given = dict(tail=engine.tail, seq_lens=torch.ones(2, dtype=torch.int32, device=DEVICE), backend=backend)
    store_packed(k, v, engine.pages, slots, fmt, **given)
    with pytest.raises(TypeError, match=r"k: expected a strided tensor, got torch.sparse_coo"):
        store_packed(k.to_sparse(), v, engine.pages, slots, fmt, **given)
    assert engine.tail is not None
    for side in ("k", "v"):
        sparse = engine.tail._replace(**{side: getattr(engine.tail, side).to_sparse()})
        with pytest.raises(TypeError, match=rf"tail\.{side}: expected a strided tensor, got torch.sparse_coo"):
            store_packed(k, v, engine.pages, slots, fmt, **given | dict(tail=sparse))


def test_rows_beyond_k_are_refused_on_a_cpu() -> None:
    engine = Engine(Format.parse("K4V4", 64, 16), 2, kv_heads=1)
    (k, v), slots = torch.randn(2, 2, 1, 64).bfloat16().to(DEVICE), torch.tensor([0, 16], device=DEVICE)
    lens, cu = (torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in ([1, 1], [0, 1, 3]))
    given = dict(tail=engine.tail, seq_lens=lens, cu_seqlens_q=cu, backend="reference")
    with pytest.raises(ValueError, match="cu_seqlens_q: expected numbers from 0 to 2, the rows of k, got 3"):
        store_packed(k, v, engine.pages, slots, engine.fmt, **given)
    assert (engine.pages == POISON).all()


def test_store_packed_tail_passes_opcheck() -> None:
    fmt = Format.parse("K4V4", 64, 16)
    engine = Engine(fmt, 2, kv_heads=1, sinks=4)
    assert engine.tail is not None
    assert engine.sinks is not None
    engine.step([20, 5])
    engine.tail.k.nan_to_num_(), engine.tail.v.nan_to_num_()  # opcheck compares
    k, v = torch.randn(2, 30, 1, 64).bfloat16().to(DEVICE)
    slots = torch.cat([engine.slots_of(0, torch.arange(20, 35)), engine.slots_of(1, torch.arange(5, 20))]).to(DEVICE)
    lens = torch.tensor([35, 20], dtype=torch.int32, device=DEVICE)
    tensors = (k, v, engine.pages, slots, lens, None, None, None, *engine.tail, *engine.sinks)
    torch.library.opcheck(torch.ops.kvstrata.store_packed_tail.default, (*tensors, "K4V4", 64, 16, True, "reference"))
    wanted = Engine(fmt, 2, kv_heads=1, sinks=4)
    assert wanted.tail is not None
    wanted.pages.copy_(engine.pages), wanted.tail.k.copy_(engine.tail.k), wanted.tail.v.copy_(engine.tail.v)

    def call(k: torch.Tensor, v: torch.Tensor, pages: torch.Tensor, tail: PlainRows) -> torch.Tensor:
        store_packed(k, v, pages, slots, fmt, tail=tail, seq_lens=lens, backend="reference")
        q = torch.ones(2, 2, 64, dtype=torch.bfloat16, device=DEVICE)
        return decode_packed(q, pages, engine.block_table, lens, fmt, tail=tail, backend="reference")

    eager = call(k, v, wanted.pages, wanted.tail)
    compiled = torch.compile(call, fullgraph=True, backend="eager")(k, v, engine.pages, engine.tail)
    assert torch.equal(compiled, eager)
    assert torch.equal(engine.pages, wanted.pages)
