"""prefill_packed: new rows over a packed prefix, against the float32 model of decode over what is stored."""

from __future__ import annotations

from itertools import accumulate
from types import SimpleNamespace

import pytest
import torch

from conftest import HAS_GPU
from kvstrata import Format, prefill_packed
from kvstrata.attention.packed_prefill import job as packed_job
from kvstrata.attention.packed_prefill import repeat
from kvstrata.attention.packed_prefill import split_triton as split
from kvstrata.attention.packed_prefill import triton as packed_triton
from packed_model import DEVICE, Batch, calibration_of

each_backend = pytest.mark.parametrize("backend", ["reference", "triton"])


class Chunk(Batch):
    """A batch whose last tokens are new: their rows are not those in the pages."""

    def __init__(self, fmt: Format, lengths: list[int], new: list[int], **options: object) -> None:
        super().__init__(fmt, lengths, **options)  # type: ignore[arg-type]
        generator = torch.Generator().manual_seed(5)
        self.new = new
        size = (2, sum(new), self.kv_heads, fmt.head_dim)
        self.k, self.v = torch.randn(size, generator=generator).to(self.dtype).to(DEVICE)
        self.cu = torch.tensor([0, *accumulate(new)], dtype=torch.int32, device=DEVICE)

    def rows(self, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        part = slice(int(self.cu[row]), int(self.cu[row + 1]))
        prefix = self.lengths[row] - self.new[row]
        k, v = super().rows(row)
        k, v = (torch.cat([x[:prefix], y[part].float().cpu()]) for x, y in ((k, self.k), (v, self.v)))
        return k, v


SCORING = {"sliding_window", "softcap", "sinks"}
CASES: dict[str, tuple[tuple, list[int], list[int], dict, dict]] = {
    "ragged": (("K8V8", 64, 16), [70, 33, 5, 40], [20, 1, 5, 0], dict(shared=True), {}),
    "blocks of pages, D 128": (("K4V4", 128, 32), [100, 64], [30, 32], dict(pages_per_block=2, strided=True), {}),
    "window and softcap": (("K4V2", 64, 16), [60], [25], {}, dict(sliding_window=19, softcap=4.0)),
    "calibrated": (("K4V4", 64, 16), [50, 30], [10, 30], dict(calibration=True), {}),
    "dense": (("K4V4", 64, 16), [40, 40], [12, 12], {}, dict(total_tokens=80, exact_lengths=True)),
    "sinks": (("K3V3", 64, 16), [50], [9], {}, dict(sinks=torch.tensor([0.5, -1.0, 1.0, 0.0]).to(DEVICE))),
}


@each_backend
@pytest.mark.parametrize("name", CASES)
def test_prefill_equals_the_model(name: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (fmt, dim, tokens), lengths, new, options, call = CASES[name]
    if options.get("calibration"):
        options = options | dict(calibration=calibration_of(2, dim))
    chunk = Chunk(Format.parse(fmt, dim, tokens), lengths, new, dtype=torch.float16, **options)
    if name == "ragged":
        monkeypatch.setattr(packed_triton, "STAGED", 1)  # a KV head at a time
    if name == "dense":
        call = call | dict(max_seqlen_q=12, max_seqlen_k=40)
    q = chunk.queries(new, 2)
    result = prefill_packed(
        q, chunk.k, chunk.v, chunk.pages, chunk.block_table, chunk.seq_lens, chunk.cu, chunk.fmt,
        calibration=chunk.calibration, return_lse=True, backend=backend, **call,
    )  # fmt: skip
    chunk.compare(result, q, new, {name: call[name] for name in call.keys() & SCORING})


@each_backend
@pytest.mark.parametrize("dim", [32, 48, 64, 80])
def test_padding_of_rows_does_not_depend_on_memory(backend: str, dim: int) -> None:
    """Unpacked rows may be wider than the head; what was in memory before, here NaN, is not read."""
    chunk = Chunk(Format.parse("K4V4", dim, 16), [40, 21], [9, 3], dtype=torch.float16)
    q = chunk.queries([9, 3], 2)
    arguments = (q, chunk.k, chunk.v, chunk.pages, chunk.block_table, chunk.seq_lens, chunk.cu, chunk.fmt)
    results = []
    for byte in (0, 0xFF):
        workspace = torch.full((2 * 2 * 61 * packed_job.padded_dim(dim) * 2,), byte, dtype=torch.uint8, device=DEVICE)
        results.append(prefill_packed(*arguments, workspace=workspace, backend=backend))
    assert bool(results[1].isfinite().all())
    assert torch.equal(*results)


@each_backend
def test_memory_of_the_caller(backend: str) -> None:
    """Output and scratch where they are told to be; scratch for one KV head is enough."""
    chunk = Chunk(Format.parse("K4V4", 64, 16), [40, 21], [9, 3], dtype=torch.float16)
    q = chunk.queries([9, 3], 2)
    arguments = (q, chunk.k, chunk.v, chunk.pages, chunk.block_table, chunk.seq_lens, chunk.cu, chunk.fmt)
    want = prefill_packed(*arguments, backend=backend)
    for heads in (1, 2):
        out = torch.full_like(q, float("nan"))
        workspace = torch.full((heads * 2 * 61 * 64 * 2,), 0xFF, dtype=torch.uint8, device=DEVICE)
        result = prefill_packed(*arguments, out=out, workspace=workspace, backend=backend)
        assert result is out
        assert torch.equal(out, want)
    if backend == "triton":
        with pytest.raises(ValueError, match="workspace: expected at least 15616 bytes"):
            prefill_packed(*arguments, workspace=workspace[:15615], backend=backend)
    for message, wrong in {
        r"out: expected shape \(12, 4, 64\)": dict(out=out[:5]),
        "out: expected torch.float16": dict(out=out.float()),
        "workspace: expected torch.uint8": dict(workspace=out),
        "workspace: expected one dimension": dict(workspace=workspace.view(2, -1)),
        "workspace: expected an address": dict(workspace=workspace[8:]),
        "cu_seqlens_k: expected a tensor, got list": dict(cu_seqlens_k=[0, 40, 61]),
        "exact_lengths: expected False without": dict(exact_lengths=True),
        r"cu_seqlens_k: expected contiguous \[3\], one more": dict(cu_seqlens_k=chunk.cu[:2]),
        r"cu_seqlens_k: expected torch.int32": dict(cu_seqlens_k=chunk.cu.long()),
    }.items():
        with pytest.raises((ValueError, TypeError), match=message):
            prefill_packed(*arguments, backend=backend, **wrong)


@each_backend
def test_prefix_sums_of_the_caller(backend: str) -> None:
    chunk = Chunk(Format.parse("K4V4", 64, 16), [40, 21, 30], [9, 3, 30], dtype=torch.float16)
    q = chunk.queries([9, 3, 30], 2)
    arguments = (q, chunk.k, chunk.v, chunk.pages, chunk.block_table, chunk.seq_lens, chunk.cu, chunk.fmt)
    cu_k = torch.tensor([0, 40, 61, 91], dtype=torch.int32, device=DEVICE)
    want = prefill_packed(*arguments, backend=backend)
    assert torch.equal(prefill_packed(*arguments, cu_seqlens_k=cu_k, backend=backend), want)


@each_backend
def test_tokens_before_the_window_are_not_unpacked(backend: str) -> None:
    """Scratch is full of NaN, and so stays what no query sees; a block of keys reaches before the window, though."""
    lengths, new, window = [700, 330], [20, 30], 40
    chunk = Chunk(Format.parse("K4V4", 64, 64), lengths, new, dtype=torch.float16)
    q = chunk.queries(new, 2)
    workspace = torch.full((2 * 2 * sum(lengths) * 64 * 2,), 0xFF, dtype=torch.uint8, device=DEVICE)
    hidden = [(length - count - window + 1) // 64 for length, count in zip(lengths, new, strict=True)]
    assert hidden == [10, 4]
    table = chunk.block_table.clone()
    for row, pages in enumerate(hidden):
        table[row, :pages] = 1 << 30  # pages that an engine has freed
    result = prefill_packed(
        q, chunk.k, chunk.v, chunk.pages, table, chunk.seq_lens, chunk.cu, chunk.fmt, return_lse=True,
        workspace=workspace, sliding_window=window, backend=backend,
    )  # fmt: skip
    chunk.compare(result, q, new, dict(sliding_window=window))
    if backend == "triton":
        rows = workspace.view(torch.float16).view(2, sum(lengths), 2, 64)
        unseen = (700 - 20 - window - packed_triton.WHOLE_BLOCKS) // 64 * 64
        assert rows[:, :unseen].isnan().all()
        assert not rows[:, unseen:].isnan().any()
        assert not rows[:, unseen : 64 * hidden[0]].any()
        assert rows[:, 64 * hidden[0] : 700].any(-1).all()


def test_invalid_prefill_arguments_are_named() -> None:
    chunk = Chunk(Format.parse("K4V4", 64, 16), [30], [5])
    q, rest = chunk.queries([5], 2), (chunk.pages, chunk.block_table, chunk.seq_lens, chunk.cu, chunk.fmt)
    with pytest.raises(ValueError, match=r"k_new: expected 5 tokens as q, got shape \(4, 2, 64\)"):
        prefill_packed(q, chunk.k[:4], chunk.v, *rest)
    with pytest.raises(TypeError, match=r"v_new: expected torch.bfloat16 as q"):
        prefill_packed(q, chunk.k, chunk.v.half(), *rest)
    with pytest.raises(ValueError, match=r"total_tokens: expected an int"):
        prefill_packed(q, chunk.k, chunk.v, *rest, total_tokens=-1)
    with pytest.raises(ValueError, match="backend: expected one of"):
        prefill_packed(q, chunk.k, chunk.v, *rest, backend="cuda")


def test_contents_are_checked_on_a_cpu() -> None:
    """Rows and blocks that are not there; entries that no query sees may be anything."""
    chunk = Chunk(Format.parse("K4V4", 64, 16), [70, 30], [5, 2])
    q = chunk.queries([5, 2], 2)

    def call(cu: list[int], table: torch.Tensor = chunk.block_table, **options) -> torch.Tensor:
        starts = torch.tensor(cu, dtype=torch.int32, device=DEVICE)
        rest = (chunk.pages, table, chunk.seq_lens, starts, chunk.fmt)
        return prefill_packed(q, chunk.k, chunk.v, *rest, backend="reference", **options)

    with pytest.raises(ValueError, match="cu_seqlens_q: expected numbers from 0 to 7, the rows of q, got 8"):
        call([0, 5, 8])
    with pytest.raises(ValueError, match=r"max_seqlen_q: expected at least 5, .*, got 4"):
        call([0, 5, 7], max_seqlen_q=4)
    with pytest.raises(ValueError, match="max_seqlen_q: expected at least 1, as q has rows, got 0"):
        call([0, 5, 7], max_seqlen_q=0)
    for entry in (-1, len(chunk.pages)):
        wrong = chunk.block_table.clone()
        wrong[0, 1] = entry
        last = len(chunk.pages) - 1
        with pytest.raises(ValueError, match=f"block_table: expected blocks from 0 to {last} .*, got {entry}"):
            call([0, 5, 7], wrong)
        options = dict(sliding_window=16)
        assert torch.equal(call([0, 5, 7], wrong, **options), call([0, 5, 7], **options))


@each_backend
def test_a_pool_without_blocks(backend: str) -> None:
    """Refused if the table has entries; a first chunk needs neither."""
    chunk = Chunk(Format.parse("K4V4", 64, 16), [5], [5], dtype=torch.float16)
    q, rest = chunk.queries([5], 2), (chunk.seq_lens, chunk.cu, chunk.fmt)
    with pytest.raises(ValueError, match="pages: expected at least one block, as block_table has entries, got 0"):
        prefill_packed(q, chunk.k, chunk.v, chunk.pages[:0], chunk.block_table, *rest, backend=backend)
    given = (chunk.pages[:0], chunk.block_table[:, :0])
    expected = prefill_packed(q, chunk.k, chunk.v, chunk.pages, chunk.block_table, *rest, backend=backend)
    assert torch.equal(prefill_packed(q, chunk.k, chunk.v, *given, *rest, backend=backend), expected)


def test_prefill_packed_passes_opcheck() -> None:
    chunk = Chunk(Format.parse("K4V4", 64, 16), [30], [5])
    q = chunk.queries([5], 2)
    tensors = (q, chunk.k, chunk.v, chunk.pages, chunk.block_table, chunk.seq_lens, chunk.cu, *[None] * 11)
    options = (None, None, None, None, None, None, False, True, "reference")
    given = (*tensors, "K4V4", 64, 16, True, *options)
    torch.library.opcheck(torch.ops.kvstrata.prefill_packed.default, given)
    torch.library.opcheck(torch.ops.kvstrata.prefill_packed_into.default, (*given, torch.empty_like(q)))


@pytest.mark.gpu
def test_graph_replay_reads_new_lengths_and_rows() -> None:
    assert HAS_GPU
    chunk = Chunk(Format.parse("K4V4", 128, 64), [300, 200], [64, 20], capacity=8)
    q = chunk.queries([64, 20], 4)
    arguments = (q, chunk.k, chunk.v, chunk.pages, chunk.block_table, chunk.seq_lens, chunk.cu, chunk.fmt)
    bounds = dict(max_seqlen_q=64, max_seqlen_k=512, total_tokens=600)
    want = prefill_packed(*arguments, **bounds)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = prefill_packed(*arguments, **bounds)
    graph.replay()
    assert torch.equal(out, want)


@each_backend
def test_lengths_beyond_the_table(backend: str) -> None:
    """A prefix is what the block table lists, a length below the new tokens is theirs; nothing is read beyond."""
    fmt = Format.parse("K4V4", 64, 16)
    chunk = Chunk(fmt, [48, 30, 9], [4, 9, 9], dtype=torch.float16)
    q = chunk.queries(chunk.new, 2)
    table = chunk.block_table[:, :3].contiguous()
    arguments = (q, chunk.k, chunk.v, chunk.pages, table)
    options = dict(return_lse=True, backend=backend)
    lengths = torch.tensor([52, 30, 9], dtype=torch.int32, device=DEVICE)
    want = prefill_packed(*arguments, lengths, chunk.cu, fmt, **options)
    far = torch.tensor([1000, 30, 2], dtype=torch.int32, device=DEVICE)  # 52 and 9
    sums = torch.tensor([0, 1000, 1030, 1032], dtype=torch.int32, device=DEVICE)
    for bounds in (
        {},
        dict(max_seqlen_q=9, max_seqlen_k=60, total_tokens=91),
        dict(max_seqlen_q=9, max_seqlen_k=1000, total_tokens=1039, cu_seqlens_k=sums),
        dict(max_seqlen_q=9, max_seqlen_k=1000, total_tokens=1039, cu_seqlens_k=sums, exact_lengths=True),
    ):
        got = prefill_packed(*arguments, far, chunk.cu, fmt, **options, **bounds)
        assert torch.equal(got.out, want.out)
        assert torch.equal(got.lse, want.lse)


@each_backend
@pytest.mark.parametrize("requests", [1, 2])
def test_equal_lengths_beyond_the_table(backend: str, requests: int) -> None:
    """Dense rows of as many tokens as the block table lists; scratch is full of NaN."""
    fmt = Format.parse("K4V4", 64, 16)
    chunk = Chunk(fmt, [36] * requests, [4] * requests, dtype=torch.float16)
    q, table = chunk.queries(chunk.new, 2), chunk.block_table[:, :2].contiguous()
    arguments = (q, chunk.k, chunk.v, chunk.pages, table)
    options = dict(return_lse=True, backend=backend)
    want = prefill_packed(*arguments, chunk.seq_lens, chunk.cu, fmt, **options)
    far = torch.full((requests,), 100, dtype=torch.int32, device=DEVICE)
    workspace = torch.full((2 * 2 * requests * 100 * 64 * 2,), 0xFF, dtype=torch.uint8, device=DEVICE)
    got = prefill_packed(
        *arguments, far, chunk.cu, fmt, max_seqlen_q=4, max_seqlen_k=100, total_tokens=100 * requests,
        exact_lengths=True, workspace=workspace, **options,
    )  # fmt: skip
    assert torch.equal(got.out, want.out)
    assert torch.equal(got.lse, want.lse)


def test_bounds_are_clipped_to_the_table() -> None:
    """Ragged requests do not look dense because of it: 60 and 44 tokens are not twice 52."""
    fmt = Format.parse("K4V4", 64, 16)
    chunk = Chunk(fmt, [60, 60], [4, 4])
    given = packed_job.Tensors(
        chunk.queries([4, 4], 2), chunk.k, chunk.v, chunk.pages, chunk.block_table[:, :3], chunk.seq_lens, chunk.cu
    )
    exact = dict(max_seqlen_q=4, exact_lengths=True)
    for lengths, clipped in (
        (dict(max_seqlen_k=52, total_tokens=104), (4, 52, 104, True)),
        (dict(max_seqlen_k=60, total_tokens=120), (4, 52, 104, True)),
        (dict(max_seqlen_k=60, total_tokens=104), (4, 52, 104, False)),
    ):
        job = packed_job.check(given, fmt, packed_job.Options(**exact, **lengths))
        assert packed_triton.bounds_of(job) == clipped


@pytest.mark.parametrize("dim", [48, 192])
def test_head_dims_that_are_padded(dim: int) -> None:
    """`prefill_attention` has no such head_dim: rows get zeros behind them."""
    chunk = Chunk(
        Format.parse("K4V4", dim, 16), [40, 21], [9, 3], dtype=torch.float16, calibration=calibration_of(2, dim)
    )
    q = chunk.queries([9, 3], 2)
    arguments = (q, chunk.k, chunk.v, chunk.pages, chunk.block_table, chunk.seq_lens, chunk.cu, chunk.fmt)
    result = prefill_packed(*arguments, calibration=chunk.calibration, return_lse=True, backend="triton")
    assert result.out.is_contiguous()
    chunk.compare(result, q, [9, 3], {})
    out = torch.full_like(q, float("nan"))
    prefill_packed(*arguments, calibration=chunk.calibration, out=out, backend="triton")
    assert torch.equal(out, result.out)


@pytest.mark.parametrize("options", [{}, dict(softcap=4.0, sinks=torch.tensor([0.5, -1.0, 1.0, 0.0]).to(DEVICE))])
def test_short_chunks_attend_in_parts(options: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer tiles than multiprocessors: the prefix is cut, and the parts are merged by their log-sum-exp."""
    monkeypatch.setattr(split, "SHORTEST", 16)
    monkeypatch.setattr(split, "ALIGNED", 16)
    for module in (packed_triton, repeat):
        monkeypatch.setattr(module, "processors_of", lambda device: (13, False))
    chunk = Chunk(Format.parse("K8V8", 64, 16), [117], [7], dtype=torch.float16)
    q = chunk.queries([7], 2)
    job = SimpleNamespace(tensors=chunk, options=SimpleNamespace(sliding_window=None))
    assert split.parts_of(job, 7, 117, 4, 13) == (3, 32)
    assert split.parts_of(job, 129, 239, 4, 13) is None, "two tiles of queries"
    assert split.parts_of(job, 7, 38, 4, 13) is None, "31 keys make one part"
    job.options.sliding_window = 5
    assert split.parts_of(job, 7, 117, 4, 13) is None
    calls, attend = [], split.attend_in_parts
    monkeypatch.setattr(packed_triton, "attend_in_parts", lambda *given: calls.append(given) or attend(*given))
    arguments = (q, chunk.k, chunk.v, chunk.pages, chunk.block_table, chunk.seq_lens, chunk.cu, chunk.fmt)
    result = prefill_packed(*arguments, return_lse=True, backend="triton", **options)
    assert len(calls) == 1
    chunk.compare(result, q, [7], options)
    assert torch.equal(prefill_packed(*arguments, backend="triton", **options), result.out)
    # Bounds from the host: on a GPU the second call repeats the launches of the first, all of them under capture too.
    bounds = dict(max_seqlen_q=7, max_seqlen_k=117, total_tokens=117, exact_lengths=True, return_lse=True)
    for _ in range(2):
        again = prefill_packed(*arguments, backend="triton", **bounds, **options)
        assert torch.equal(again.out, result.out)
        assert torch.equal(again.lse, result.lse)
    assert len(calls) == (3 if DEVICE.type == "cuda" else 4)
    if DEVICE.type == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = prefill_packed(*arguments, backend="triton", **bounds, **options)
        captured.out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(captured.out, result.out)
        assert len(calls) == 3
