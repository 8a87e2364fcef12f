"""Plain rows into open pages: every backend that this machine has leaves the same bytes as the reference."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from conftest import HAS_GPU
from kvstrata.cache import TieredCache
from kvstrata.cache.move import append as append_op
from kvstrata.cache.move import append_cuda, apply

DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
BACKENDS = ["triton"] + (["cuda"] if HAS_GPU else [])


def build(device: torch.device, dtype: torch.dtype, dim: int, **options) -> TieredCache:
    options = dict(budget=None, page_tokens=16, max_requests=4, max_tokens=256, debug=True) | options
    return TieredCache(2, 3, dim, dtype=dtype, device=device, **options)


def rows(tokens: int, dim: int, dtype: torch.dtype, gap: int = 0, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(2, tokens, 3, dim + gap, generator=torch.Generator().manual_seed(seed)).to(dtype)
    k, v = x.to(DEVICE)[..., :dim]
    return k, v


@pytest.fixture
def forced(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """All appends through one backend."""
    prepare = append_op.prepare_append
    monkeypatch.setattr(apply, "prepare_append", lambda job: prepare(job, request.param))
    return request.param


@pytest.mark.parametrize("forced", BACKENDS, indirect=True)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("dim", "gap", "options"),
    [(64, 0, {}), (48, 16, {}), (32, 1, {"max_tokens": 40000}), (64, 0, {"policy": "recency"}),
     (64, 0, {"importance": "ema"})],
)  # fmt: skip
def test_rows_land_where_the_tables_say(forced: str, dtype: torch.dtype, dim: int, gap: int, options: dict) -> None:
    """Ragged chunks, single tokens, a fork that copies its last page: equal to a cache on the CPU's reference path."""
    cache = build(DEVICE, dtype, dim, **options)
    wanted: dict[int, list[torch.Tensor]] = {r: [torch.zeros(0, 3, dim, dtype=dtype)] * 2 for r in range(4)}

    def append(requests: list[int], lengths: list[int], seed: int) -> None:
        k, v = rows(sum(lengths), dim, dtype, gap, seed)
        cache.append(1, k, v, requests, lengths)
        at = 0
        for r, n in zip(requests, lengths, strict=True):
            wanted[r] = [torch.cat([old, x[at : at + n].cpu()]) for old, x in zip(wanted[r], (k, v), strict=True)]
            at += n

    append([0, 2], [5, 30], 0)
    append([0, 2], [2, 0], 20)
    append([2, 0, 1], [1, 0, 16], 1)
    for step in range(3):
        append([0, 1, 2], [1, 1, 1], 2 + step)
    wanted[cache.fork(2)] = list(wanted[2])
    append([3, 2], [1, 1], 9)
    cache.check()
    for request, (k, v) in wanted.items():
        got_k, got_v, positions = cache.gather(1, request)
        assert torch.equal(got_k.cpu(), k.transpose(0, 1))
        assert torch.equal(got_v.cpu(), v.transpose(0, 1))
        assert torch.equal(positions.cpu(), torch.arange(len(k)).expand(3, -1))
    if cache.policy.name == "importance":
        tokens = cache.buckets.snapshot(1, [0])
        first = tokens.importance[tokens.position == 7]
        assert torch.equal(first.cpu(), torch.full((3,), 0.0 if cache.policy.mode == "mean" else 1 / np.float32(8)))


def test_a_token_into_an_open_page_allocates_no_page() -> None:
    cache = build(DEVICE, torch.bfloat16, 64, budget=0.5)
    k, v = rows(17, 64, torch.bfloat16)
    cache.append(0, k, v)
    before = cache.memory()
    cache.append(0, k[:15], v[:15])
    after = cache.memory()
    assert after.kinds == before.kinds
    assert after.tiers == before.tiers
    cache.check()


@pytest.mark.parametrize("tokens", [1, 5, 40])
@pytest.mark.parametrize("budget", [None, 0.3])
def test_rows_with_any_strides(tokens: int, budget: float | None) -> None:
    k, v = rows(tokens, 64, torch.bfloat16)
    strange = [x.permute(2, 0, 1).contiguous().permute(1, 2, 0) for x in (k, v)]
    assert strange[0].stride(2) != 1
    straight, other = (build(DEVICE, torch.bfloat16, 64, budget=budget, recent_tokens=16) for _ in range(2))
    straight.append(0, k, v)
    other.append(0, *strange)
    for a, b in zip(straight.gather(0), other.gather(0), strict=True):
        assert torch.equal(a, b)


def test_unknown_backend_is_named_in_the_error() -> None:
    cache = build(torch.device("cpu"), torch.float32, 32)
    zero, one = np.zeros(1, np.int64), np.ones(1, np.int64)
    x = torch.zeros(1, 3, 32)
    job = append_op.Job(cache.buckets, 0, zero, one, zero, np.zeros((1, 3), np.int64), x, x,
                        np.zeros(1, np.float32), None, cache._device_lengths)  # fmt: skip
    with pytest.raises(ValueError, match="backend: expected one of"):
        append_op.append_rows(job, "fast")
    if not HAS_GPU:
        with pytest.raises(RuntimeError, match="cuda needs CUDA tensors"):
            append_op.append_rows(job, "cuda")


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@pytest.mark.parametrize(
    "arguments", [(128, 2, 16, 2, True), (64, 2, 8, 4, False), (48, 4, 16, 2, True), (32, 2, 2, 2, True)]
)
def test_kernels_stay_within_register_limits(arguments: tuple, arch: str) -> None:
    """No spills and few registers: the kernel is a copy."""
    pytest.importorskip("cuda.core")
    from kvstrata import jit

    balanced = torch.bfloat16 if arguments[1] == 2 else torch.float32
    for kernel, dtype in itertools.product(append_cuda.KERNELS, (None, balanced)):
        usage = jit.usage(append_cuda.SOURCE, append_cuda.entry_of(*arguments, kernel, dtype), arch=arch)
        assert usage.spill_bytes == usage.stack_bytes == usage.shared_bytes == 0, usage
        assert 0 < usage.registers <= 64, usage


@pytest.mark.parametrize("arch", [80, 90])
def test_triton_compiles_ahead_of_time(arch: int) -> None:
    from ahead import compile_triton

    types = {f"{name}_ptr": "*i32" for name in ("table", "count", "length", "meta")}
    types |= {"k_ptr": "*i16", "v_ptr": "*i16", "pointers_ptr": "*i64", "importance_ptr": "*fp32"}
    types["balance_ptr"] = "*i8"
    constants = dict(
        HEADS=3, DIM=128, WIDE=128, PAGE=64, ROW=256, V_OFFSET=16384, POSITION_OFFSET=32768, POSITION_BYTES=2,
        IMPORTANCE_OFFSET=32896, BY_TOKEN=False, DTYPE="bfloat16",
    )  # fmt: skip
    used = compile_triton("kvstrata.cache.move.append_triton", "append_kernel", arch, types, constants)
    assert 0 < used["REG"] <= 128, used
    types = {f"{name}_ptr": "*i64" for name in ("pointers", "handle", "slot", "tier", "offset", "position")}
    constants = dict(POSITION_BYTES=2, IMPORTANCE=True, WRITE=True, BLOCK=256)
    types |= {"importance_ptr": "*fp32"}
    assert compile_triton("kvstrata.cache.storage.page_triton", "side_kernel", arch, types, constants)["LOCAL"] == 0
    types = {"pointers_ptr": "*i64", "handles_ptr": "*i64", "others_ptr": "*i64", "data_ptr": "*i32"}
    constants = dict(FROM="page", TO="page", BLOCK=1024)
    assert compile_triton("kvstrata.cache.storage.page_triton", "pages_kernel", arch, types, constants)["LOCAL"] == 0
