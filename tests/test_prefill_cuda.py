"""The CUDA C++ prefill kernels: what they compile to, their banks, and their own code against the float64 model, run on
the GPU or, where there is none, on the CPU (emulator.py)."""

from __future__ import annotations

import contextlib
import functools
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import emulator
import gates
from conftest import HAS_GPU
from kvstrata import jit
from kvstrata.attention.prefill import cuda as prefill_cuda
from kvstrata.attention.prefill import op as prefill
from kvstrata.attention.prefill.job import PrefillJob
from kvstrata.attention.prefill.tiles import FEW, PORTABLE, Tile
from kvstrata.call_cache import PerThread
from kvstrata.tools.bench.baselines import prefill_v2
from prefill_model import Case, case_of, check, compare, model
from test_jit import ARCHITECTURES

FOLDER = prefill_cuda.SOURCE.parent
BF16, FP16 = torch.bfloat16, torch.float16
CHECKED = Tile(64, 64, 32, 4, 1, 1, 2)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """backend="cuda" on the GPU or, without one, on three emulated multiprocessors."""
    if HAS_GPU:
        return
    if reason := emulator.missing():
        pytest.skip(reason)
    properties = SimpleNamespace(multi_processor_count=3, shared_memory_per_multiprocessor=233472)
    launcher = emulator.launcher()
    monkeypatch.setattr(prefill_cuda, "jit", launcher)
    monkeypatch.setattr(prefill_v2, "jit", launcher)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(prefill, "missing", lambda backend, job: prefill_cuda.missing(job))
    monkeypatch.setattr(prefill_cuda, "_launches", PerThread())
    prefill_cuda._kernel.cache_clear()


def only(monkeypatch: pytest.MonkeyPatch, tile: Tile) -> None:
    monkeypatch.setattr(prefill_cuda, "tile_of", lambda *_: tile)


# Registers: 96 where a head is 64 wide. The output of a warp's 16 queries takes D / 2 registers and the queries D / 4
# (D 256: they stay in shared memory), so wider heads cannot do with 96. Two KV warps are at most one block of a
# multiprocessor, whose registers nobody else wants.
GATES = {
    "D 64": (PORTABLE[64], 96),
    "D 64, two KV warps": (FEW[64], 128),
    "D 96": (PORTABLE[96], 168),
    "D 128": (PORTABLE[128], 200),
    "D 256": (PORTABLE[256], 255),
}


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("name", GATES)
def test_kernels_stay_within_register_limits(name: str, arch: str) -> None:
    """No spills, the registers above, 48 KB of shared memory, and registers for the blocks that are to be resident."""
    if arch == "sm_89" and name != "D 64":
        pytest.skip("the same code as for sm_80")
    tile, registers = GATES[name]
    entry = prefill_cuda.entry(BF16, tile, softcap=False)
    usage = gates.usage(prefill_cuda.SOURCE, entry, arch=arch)
    assert usage.spill_bytes == usage.stack_bytes == 0, usage
    assert 0 < usage.registers <= registers, usage
    assert usage.registers * 32 * tile.warps * tile.resident <= 65536
    assert tile.shared() + usage.shared_bytes <= 48 * 1024


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_baseline_kernel_compiles_within_resource_limits(arch: str) -> None:
    usage = gates.usage(prefill_v2.SOURCE, prefill_v2.entry(FP16), arch=arch)
    assert usage.spill_bytes == 0, usage
    assert usage.shared_bytes == 24 * 1024  # as in the note


# Rows one after the other, as a comparison.
STRAIGHT = """
template <int kChunks_>
struct Straight {
  static constexpr int kChunks = kChunks_, kBytes = kChunks * 16;
  static __device__ __forceinline__ constexpr unsigned offset(unsigned row, unsigned chunk) {
    return row * kBytes + chunk * 16;
  }
  static __device__ __forceinline__ unsigned further(unsigned address, unsigned, unsigned, unsigned step) {
    return address + step * 32;
  }
};
"""
PROBE = f"""
#include "swizzle.cuh"
{STRAIGHT}
template <class Layout, int kWays> __global__ void probe() {{
  static_assert(tile_bank_ways<Layout>() == kWays, "other bank conflicts");
}}
"""


@pytest.mark.parametrize(
    "expected",
    [
        *(f"Swizzle<{n}>,1" for n in (2, 6, 8, 10, 12, 16, 32)),
        *("Straight<8>,8", "Straight<12>,4", "Straight<32>,8"),
    ],
)
def test_bank_conflicts_at_compile_time(tmp_path: Path, expected: str) -> None:
    (tmp_path / "probe.cu").write_text(PROBE)
    jit.usage(tmp_path / "probe.cu", f"probe<{expected}>", arch="sm_80")


def test_bank_conflicts_are_an_error(tmp_path: Path) -> None:
    (tmp_path / "probe.cu").write_text(PROBE)
    with pytest.raises(jit.CompileError, match="other bank conflicts"):
        jit.usage(tmp_path / "probe.cu", "probe<Straight<8>,1>", arch="sm_80")


@pytest.mark.skipif(HAS_GPU, reason="the emulator counts them")
@pytest.mark.parametrize(("layout", "ways"), [("Swizzle", 1), ("Straight", 8)])
def test_bank_conflicts_of_a_run(
    cuda: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str, ways: int
) -> None:
    """The addresses that ldmatrix is given; the result does not depend on the layout."""
    if layout == "Straight":
        for file in FOLDER.glob("prefill*.cu*"):
            shutil.copy(file, tmp_path)
        header = tmp_path / "prefill_tile.cuh"
        text = header.read_text().replace("using Layout = Swizzle<", "using Layout = Straight<")
        text = text.replace('#include "swizzle.cuh"\n', f'#include "swizzle.cuh"\n{STRAIGHT}')
        header.write_text("\n".join(line for line in text.split("\n") if "tile_bank_ways" not in line))
        monkeypatch.setattr(prefill_cuda, "SOURCE", tmp_path / "prefill.cu")
    only(monkeypatch, PORTABLE[64])
    kernel = prefill_cuda._kernel(BF16, PORTABLE[64], False, False, -1)
    kernel.built.bank_ways_seen()  # type: ignore[attr-defined]  # of other tests
    check(case_of([(20, 40)], dtype=BF16), "cuda")
    assert kernel.built.bank_ways_seen() == ways  # type: ignore[attr-defined]


CASES: dict[str, tuple[list[tuple[int, int]], dict]] = {
    "one key": ([(1, 1)], {}),
    "GQA, many heads": ([(65, 65), (65, 65)], dict(heads=6, kv_heads=2)),
    "chunk after a prefix": ([(33, 150)], {}),
    "queries that see nothing": ([(150, 33)], {}),
    "no keys at all": ([(5, 0)], {}),
    "window": ([(70, 129)], dict(sliding_window=37)),
    "window of one": ([(40, 40)], dict(sliding_window=1)),
    "not causal": ([(40, 77)], dict(causal=False)),
    "sinks": ([(40, 20)], dict(sinks=torch.tensor([0.7, -torch.inf]))),
    "large logits": ([(64, 64)], dict(loud=100.0)),
}


@pytest.mark.parametrize("name", CASES)
def test_dense_cases_equal_the_model(cuda: None, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    lengths, options = CASES[name]
    only(monkeypatch, PORTABLE[64])
    check(on_device(case_of(lengths, dtype=BF16, **options)), "cuda")


@pytest.mark.parametrize("tile", [PORTABLE[64], FEW[64]], ids=["one KV warp", "two KV warps"])
@pytest.mark.parametrize("causal", [False, True])
def test_scores_of_minus_inf(cuda: None, monkeypatch: pytest.MonkeyPatch, tile: Tile, causal: bool) -> None:
    """A key or a whole tile of keys without weight, a query without any key; NaN stays in its row."""
    only(monkeypatch, tile)
    case = case_of([(70, 97)], heads=4, kv_heads=2, dtype=FP16, causal=causal)
    q, k, v = case.sequences[0]
    q[..., 0], k[..., 0] = q[..., 0].abs() + 0.5, k[..., 0].abs() + 0.5
    q[3, [0, 7, 69], 0] = -torch.inf
    k[0, :66, 0] = -torch.inf  # the first tiles of either group
    check(case, "cuda")
    ((out, lse),) = case.dense("cuda")
    bad = q.clone()
    bad[0, 8, 1] = torch.nan
    ((spoilt, _),) = Case([(bad, k, v)], case.options).dense("cuda")
    assert (out[3, [0, 7, 69]] == 0).all()
    assert (lse[3, [0, 7, 69]] == -torch.inf).all()
    assert spoilt[0, 8].isnan().all()
    spoilt[0, 8] = out[0, 8]
    assert torch.equal(spoilt, out)


def on_device(case: Case) -> Case:
    if "sinks" in case.options:
        case.options["sinks"] = case.options["sinks"].to(case.sequences[0][0].device)
    return case


@pytest.mark.parametrize("causal", [False, True])
def test_ragged_cases_equal_the_model(cuda: None, monkeypatch: pytest.MonkeyPatch, causal: bool) -> None:
    """NaN before and after every sequence but the first and last neighbours; one is empty, one has no keys."""
    only(monkeypatch, PORTABLE[64])
    lengths = [(33, 33), (0, 7), (1, 100), (4, 0), (66, 65)]
    check(case_of(lengths, dtype=BF16, causal=causal), "cuda", ragged=True)


TILES = {
    "two KV warps": (FEW[64], {}),
    "four KV warps, softcap": (Tile(64, 16, 16, 4, 4, 2, 2), dict(softcap=2.0)),
    "D 96, two row tiles, three stages": (Tile(96, 64, 32, 2, 1, 3, 1), dict(dim=96, heads=8)),
    "D 128": (PORTABLE[128], dict(dim=128)),
    "D 256": (PORTABLE[256], dict(dim=256)),
}


@pytest.mark.parametrize("name", TILES)
def test_every_tile_equals_the_model(cuda: None, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    tile, options = TILES[name]
    only(monkeypatch, tile)
    for lengths in ([(65, 113)], [(17, 16)]):
        check(case_of(lengths, dtype=FP16, **options), "cuda")


def test_strided_inputs_read_nothing_outside(cuda: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens before heads, NaN in the gaps and past the end: nothing of it is read, nothing is written around out."""
    only(monkeypatch, PORTABLE[64])
    case = case_of([(37, 50)], heads=4, kv_heads=2, dtype=BF16)
    (q, k, v), given = case.sequences[0], []
    for x in (q, k, v):
        room = torch.full((1, x.shape[1] + 40, x.shape[0], 72), torch.nan, dtype=x.dtype, device=x.device)
        view = room[:, : x.shape[1], :, :64]
        view.copy_(x.transpose(0, 1))
        given.append(view)
    out, lse, _ = prefill.prefill_attention(*given, return_lse=True, backend="cuda")
    compare([(out[0].transpose(0, 1), lse[0].transpose(0, 1))], case.expected(), case.expected(low=True), BF16)


def test_a_launch_is_planned_once(cuda: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls that look alike share one, with addresses of their own; another length has another."""
    only(monkeypatch, PORTABLE[64])
    monkeypatch.setattr(prefill_cuda, "_launches", PerThread())
    for seed in (1, 2):
        check(case_of([(20, 33)], dtype=BF16, seed=seed), "cuda")
    assert len(prefill_cuda._launches.known) == 1
    check(case_of([(20, 34)], dtype=BF16), "cuda")
    assert len(prefill_cuda._launches.known) == 2


def test_checking_build_verifies_every_product(cuda: None) -> None:
    """It compares every score and every product with plain sums; one stage."""
    case = case_of([(33, 50)], dtype=BF16)
    counters = torch.zeros(4, dtype=torch.int32, device=case.sequences[0][0].device)
    q, k, v = case.batch()
    job = PrefillJob(q, k, v, None, None, 33, 50, True, 0.125, None, None, None, True)
    out, lse = prefill_cuda.run(job, CHECKED, counters)
    assert lse is not None
    compare([(out[0].transpose(0, 1), lse[0].transpose(0, 1))], case.expected(), case.expected(low=True), BF16)
    scores, wrong_scores, products, wrong_products = counters.tolist()
    # two heads; all four warps see something of both tiles of 32 keys
    assert scores == 2 * (4 * 16 * 32 + 4 * 16 * 32)
    assert products == 2 * (4 * 16 * 64 + 4 * 16 * 64)
    assert wrong_scores == wrong_products == 0


@pytest.mark.skipif(HAS_GPU, reason="needs a source that is wrong")
def test_checking_build_finds_a_wrong_operand(cuda: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for file in FOLDER.glob("prefill*.cu*"):
        shutil.copy(file, tmp_path)
    kernel = tmp_path / "prefill.cu"
    right = "mma_16x8x16(In{}, s[r][n + 1], a[r], b[2], b[3]);"
    assert right in kernel.read_text()
    kernel.write_text(kernel.read_text().replace(right, right.replace("b[2], b[3]", "b[3], b[2]")))
    monkeypatch.setattr(prefill_cuda, "SOURCE", kernel)
    q, k, v = case_of([(16, 32)], dtype=BF16).batch()
    counters = torch.zeros(4, dtype=torch.int32)
    job = PrefillJob(q, k, v, None, None, 16, 32, False, 0.125, None, None, None, False)
    prefill_cuda.run(job, CHECKED, counters)
    assert counters[1] > 0


def test_jobs_that_cannot_run() -> None:
    q, k, v = torch.randn(3, 1, 8, 2, 64).half()
    job = PrefillJob(q, k, v, None, None, 8, 8, True, 0.125, None, None, None, False)
    assert prefill_cuda.missing(job) is None
    heads_first = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    assert prefill_cuda.missing(job._replace(q=heads_first[0], k=heads_first[1], v=heads_first[2])) is None
    odd = torch.randn(1, 8, 2, 65).half()[..., :64]
    assert "rows of k at multiples of 16 bytes" in str(prefill_cuda.missing(job._replace(k=odd)))
    assert "float16 or bfloat16" in str(prefill_cuda.missing(job._replace(q=q.float())))


@pytest.mark.parametrize("by", [1, 2, 3, 7, 12, 64, 1000003, 2**30, 2**31 - 1])
def test_division_by_a_product(by: int) -> None:
    _, factor, shift = prefill_cuda.divisor(by)
    assert factor < 1 << 32
    for n in (0, 1, by - 1, by, by + 1, 3 * by - 1, 3 * by, 2**31 - 1, 2**31 - 1 - by, 123456789):
        n %= 2**31
        assert ((n * factor >> 32) + n & 0xFFFFFFFF) >> shift == n // by


@pytest.mark.parametrize(("queries", "keys"), [(70, 70), (33, 150), (150, 33), (1, 1)])
@pytest.mark.parametrize("causal", [False, True])
def test_baseline_kernel_equals_the_model(cuda: None, queries: int, keys: int, causal: bool) -> None:
    case = case_of([(queries, keys)], kv_heads=2, dtype=FP16, causal=causal)
    q, k, v = (x.unsqueeze(0) for x in case.sequences[0])
    out = torch.full_like(q, torch.nan)
    go = prefill_v2.launch(q, k, v, out, causal=causal)
    go(prefill_v2.jit.current_stream(q.get_device()))
    wanted = functools.partial(model, *case.sequences[0], case.options)
    (want, lse), (low, _) = wanted(), wanted(low=True)
    compare([(out[0], lse)], [(want, lse)], [(low, lse)], FP16)


SMALL = {
    "D 64": (PORTABLE[64], {}),
    "D 96, window": (PORTABLE[96], dict(dim=96, sliding_window=20)),
    "D 128": (PORTABLE[128], dict(dim=128, heads=8)),
    "D 256, softcap": (PORTABLE[256], dict(dim=256, softcap=5.0)),
    "two KV warps": (FEW[64], dict(heads=8)),
    "one stage": (CHECKED, {}),
}


@pytest.mark.gpu
@pytest.mark.sanitizer
@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("name", SMALL)
def test_cuda_kernels_run_under_sanitizers(monkeypatch: pytest.MonkeyPatch, name: str, ragged: bool) -> None:
    tile, options = SMALL[name]
    only(monkeypatch, tile)
    lengths = [(65, 97), (3, 40), (0, 5)] if ragged else [(65, 97), (65, 97)]
    check(case_of(lengths, dtype=BF16, **options), "cuda", ragged=ragged)
    torch.cuda.synchronize()


@pytest.mark.gpu
@pytest.mark.sanitizer
@pytest.mark.parametrize("causal", [False, True])
def test_baseline_under_sanitizers(causal: bool) -> None:
    test_baseline_kernel_equals_the_model(None, 45, 70, causal)
    torch.cuda.synchronize()
