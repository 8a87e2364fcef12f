"""Every CUDA C++ kernel on small odd shapes; ``make gpu`` runs them under the four tools of compute-sanitizer."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from decode_model import case_of
from decode_model import check as check_decode
from kvstrata import copy_pages, store_packed
from kvstrata.cache import TieredCache
from kvstrata.jit import tuned
from kvstrata.layout import Format
from kvstrata.quant import op as quantize_op
from kvstrata.tools.check import check as check_op
from kvstrata.tools.check import sweeps
from packed_model import Batch, calibration_of, memory
from store_model import make
from test_packed_decode import CASES as PACKED
from test_packed_decode import case as check_packed
from test_quantize_pages import Call as PageCall
from test_quantize_pages import assert_bit_exact
from test_repack import CASES as REPACKS
from test_repack import MORE, Setup
from test_store import check

pytestmark = [pytest.mark.gpu, pytest.mark.sanitizer]
CASES = {
    "fp16 merged": dict(tokens=37, heads=8, k_dim=128, v_dim=128, kind="flat", num_blocks=12),
    "fp16 HND": dict(tokens=37, heads=4, k_dim=64, v_dim=64, kind="HND", num_blocks=12),
    "bf16 latent": dict(tokens=19, heads=1, k_dim=576, v_dim=None, source=torch.bfloat16),
    "unequal K and V": dict(tokens=19, heads=2, k_dim=192, v_dim=128, kind="NHD", cache_gap=8),
    "odd rows": dict(tokens=19, heads=3, k_dim=33, v_dim=65, offset=1, source_gap=1),
    "to e4m3": dict(tokens=37, heads=4, k_dim=128, v_dim=128, cache=torch.float8_e4m3fn, scales=2),
    "to e5m2": dict(tokens=19, heads=4, k_dim=128, v_dim=96, source=torch.float32, cache=torch.float8_e5m2, scales=1),
}


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("backend", ["cuda", "cuda_direct", "cuda_staged", "cuda_bulk"])
@pytest.mark.parametrize("name", CASES)
def test_store_under_sanitizers(name: str, backend: str, overlap: bool) -> None:
    check(make(device=torch.device("cuda"), **CASES[name]), backend, overlap=overlap)
    torch.cuda.synchronize()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("k_bits", "v_bits", "dim"), [(4, 4, 128), (8, 2, 64), (3, 3, 96), (2, 3, 80), (3, 8, 256)])
def test_quantize_pages_under_sanitizers(
    k_bits: int, v_bits: int, dim: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantize_op, "ROUNDS", {256: 0})  # a warp goes through all pages
    call = PageCall(Format(k_bits, v_bits, dim), dtype, centred=True)
    call.k[0, 0, 0] = float("nan")  # so that the way for such rows is taken too
    assert_bit_exact(call, "cuda")


@pytest.mark.parametrize("name", [*REPACKS, "pages of 64", "blocks of 16"])
def test_repack_under_sanitizers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Moves found, counted and placed on the device, then made phase by phase; whole pages are among them."""
    monkeypatch.setattr(quantize_op, "ROUNDS", {256: 0})  # a warp goes through all of these
    setup = Setup(**(REPACKS | MORE)[name])
    for leave, new in ((0.4, 9), (1.0, 100)):
        setup.demote("cuda", leave, new)
        setup.check()
    torch.cuda.synchronize()


@pytest.mark.parametrize("dim", [32, 48, 128])
def test_append_under_sanitizers(dim: int) -> None:
    cache = TieredCache(2, 3, dim, budget=None, page_tokens=16, max_requests=3, max_tokens=64, device="cuda")
    for lengths in ([5, 0, 20], [1, 1, 1], [2, 1, 0]):
        k, v = torch.randn(2, sum(lengths), 3, dim, device="cuda").bfloat16()
        cache.append(1, k, v, [0, 1, 2], lengths)
    for _ in range(20):
        cache.advance([0, 2])
        for layer in range(2):
            k, v = torch.randn(2, 5, 3, dim, device="cuda").bfloat16()
            cache.write(layer, k, v, torch.tensor([2, -1, 0, 3, -7], dtype=torch.int32, device="cuda"))
    cache.check()
    torch.cuda.synchronize()


@pytest.mark.parametrize(("q_len", "window"), [(1, None), (3, None), (2, 20)])
@pytest.mark.parametrize("dim", [64, 80, 128])
def test_decode_under_sanitizers(dim: int, q_len: int, window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if q_len == 1:  # as for many requests: a warp combines a column
        cut = dict(warps=2, resident=8, width=1, waves=1, combine=1)
        monkeypatch.setattr(tuned, "lookup", lambda op, gpu, shape: cut)
    sizes = dict(dim=dim, page_tokens=32, q_len=q_len, dtype=torch.bfloat16, group=4)
    case = case_of([70, 0, 33, 1], options=dict(sliding_window=window), **sizes)
    check_decode(case, "cuda")
    torch.cuda.synchronize()


@pytest.mark.parametrize("name", PACKED)
def test_packed_decode_under_sanitizers(name: str) -> None:
    check_packed(name, "cuda")
    torch.cuda.synchronize()


@pytest.mark.parametrize("calibrated", [False, True])
@pytest.mark.parametrize(("name", "dim"), [("K4V4", 128), ("K3V2", 80), ("K8V8", 64)])
def test_packed_store_under_sanitizers(name: str, dim: int, calibrated: bool) -> None:
    fmt = Format.parse(name, dim, 16)
    calibration = calibration_of(2, dim) if calibrated else None
    batch = Batch(fmt, [50, 3, 40], calibration=calibration, strided=True)
    pages = memory(fmt, *batch.pages.shape[:2], 1, strided=True)
    k, v = torch.randn(2, 93, 2, dim, device="cuda").bfloat16()
    k[5, 0, 3] = float("nan")
    slots = torch.cat(batch.slots).cuda()
    store_packed(k, v, pages, slots, fmt, calibration=calibration, backend="cuda")
    blocks = torch.arange(2, device="cuda")
    copy_pages(batch.pages, pages, blocks, blocks + 1, backend="cuda")
    assert torch.equal(pages[1:3], batch.pages[:2])


@pytest.fixture
def filled() -> Iterator[None]:
    """Nothing is as torch.empty found it: kernels load whole pages, slots without a token included."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("filled")
@pytest.mark.filterwarnings("ignore:.*deterministic:UserWarning")
@pytest.mark.parametrize("seed", range(check_op.SANITIZER_TRIALS[True]))
@pytest.mark.parametrize("op", ["settle", "decode", "packed"])
def test_sweep_trials_under_sanitizers(op: str, seed: int) -> None:
    """Plans, moves, centres, tables and observed steps of a cache; packed pages stored, read, prefilled and copied."""
    for backend in sweeps.find(op).SANITIZED:
        (outcome,) = sweeps.run(op, torch.device("cuda", torch.cuda.current_device()), backend, range(seed, seed + 1))
        assert outcome.error is None, outcome
    torch.cuda.synchronize()
