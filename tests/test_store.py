"""store_kv against an independent model, on every backend that this machine has."""

from __future__ import annotations

import functools
import operator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import kvstrata
from conftest import HAS_GPU
from kvstrata import call_cache as guard
from kvstrata import jit
from kvstrata.backends import missing
from kvstrata.store import cuda as store_cuda
from kvstrata.store import job as rows
from kvstrata.store import op, reference
from store_model import FP8, Call, make, nearest_fp8

DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
CUDA = [name for name in ("cuda", "cuda_direct", "cuda_staged", "cuda_bulk") if HAS_GPU and not missing(name, DEVICE)]
BACKENDS = ["reference", "triton", *CUDA]
FLOATS = [torch.float32, torch.float16, torch.bfloat16]
gpu = pytest.mark.gpu


def refuses(call: Call, backend: str) -> bool:
    """True if these rows do not fit a kernel that needs wide vectors (4 bytes when staged, 16 in bulk)."""
    if backend not in ("cuda_staged", "cuda_bulk") or call.k.shape[0] == 0:
        return False
    tensors = rows.Tensors(*(getattr(call, name) for name in rows.Tensors._fields))
    task = rows.check(tensors, call.layout)
    both = [t for t in (call.k, call.v, call.k_cache, call.v_cache) if t is not None]
    shape = store_cuda.shape_of(task, functools.reduce(operator.or_, (t.data_ptr() for t in both)) & 15)
    return not store_cuda.takes(shape, store_cuda.config_of(backend, shape, jit.arch_of()))


def check(call: Call, backend: str, **options) -> None:
    """Run and compare every byte of the pools, and that the caller's tensors are as they were."""
    expected = call.expected()
    before = [None if t is None else t.clone() for t in (call.k, call.v, call.slot_mapping, call.k_scale, call.v_scale)]
    if refuses(call, backend):
        with pytest.raises(ValueError, match="copies need rows"):
            call.run(kvstrata.store_kv, backend=backend, **options)
        return
    call.run(kvstrata.store_kv, backend=backend, **options)
    for pool, want in zip(call.pools, expected, strict=True):
        torch.testing.assert_close(pool, want, rtol=0, atol=0)
    after = (call.k, call.v, call.slot_mapping, call.k_scale, call.v_scale)
    for old, new in zip(before, after, strict=True):
        if old is not None:
            assert torch.equal(old.contiguous().view(torch.uint8), new.contiguous().view(torch.uint8))


@st.composite
def calls(draw) -> dict:
    source = draw(st.sampled_from([*FLOATS, *FP8]))
    cache = draw(st.sampled_from([source, *FP8])) if source in FLOATS else source
    dim = st.one_of(st.integers(1, 40), st.sampled_from([64, 80, 96, 128]))
    return dict(
        tokens=draw(st.integers(0, 12)),
        heads=draw(st.integers(1, 5)),
        k_dim=draw(dim),
        v_dim=draw(st.one_of(st.none(), dim)),
        source=source,
        cache=cache,
        kind=draw(st.sampled_from(["flat", "NHD", "HND"])),
        num_blocks=draw(st.integers(1, 5)),
        block_size=draw(st.integers(1, 7)),
        slot_dtype=draw(st.sampled_from([torch.int32, torch.int64])),
        source_gap=draw(st.sampled_from([0, 0, 1, 8])),
        cache_gap=draw(st.sampled_from([0, 0, 3, 16])),
        offset=draw(st.sampled_from([0, 0, 1, 4])),
        scales=draw(st.integers(0, 2)),
        seed=draw(st.integers(0, 1 << 16)),
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_any_call_equals_the_model(backend: str) -> None:
    compiles = backend.startswith("cuda") or (backend == "triton" and HAS_GPU)

    @settings(max_examples=25 if compiles else 150)
    @given(calls())
    def run(case: dict) -> None:
        check(make(device=DEVICE, **case), backend)

    run()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["flat", "NHD", "HND"])
@pytest.mark.parametrize(
    ("heads", "k_dim", "v_dim", "source", "cache", "scales"),
    [
        (8, 128, 128, torch.float16, torch.float16, 0),
        (1, 576, None, torch.bfloat16, torch.bfloat16, 0),
        (2, 192, 128, torch.bfloat16, torch.bfloat16, 0),
        (4, 128, 128, torch.bfloat16, torch.float8_e4m3fn, 2),
        (4, 64, 64, torch.float16, torch.float8_e5m2, 1),
        (3, 33, 65, torch.float32, torch.float32, 0),
    ],
)
def test_shapes_of_common_models_equal_the_model(backend, kind, heads, k_dim, v_dim, source, cache, scales) -> None:
    call = make(7, heads, k_dim, v_dim, device=DEVICE, source=source, cache=cache, kind=kind, scales=scales)
    if source == cache != torch.float32:
        assert not refuses(call, backend), "rows of whole 16-byte vectors are for every kernel"
    check(call, backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_padding_leaves_every_byte(backend: str) -> None:
    call = make(6, 2, 32, 32, device=DEVICE, slot_mapping=[-1, 20, -(2**31), 2**31 - 1, -1, 21])
    poison = [pool.clone() for pool in call.pools]
    call.run(kvstrata.store_kv, backend=backend)
    assert all(torch.equal(pool, old) for pool, old in zip(call.pools, poison, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
def test_call_without_tokens_writes_nothing(backend: str) -> None:
    check(make(0, 2, 32, 32, device=DEVICE), backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_offsets_past_2_31(backend: str) -> None:
    """Pages whose byte offset needs more than 31 bits; the memory between them is never touched."""
    stride, tokens = 1 << 30, 4
    pool = torch.empty(2 * stride + 4096, dtype=torch.uint8, device=DEVICE)
    pool[-4096:] = 0xFF
    cache = pool.view(torch.float8_e4m3fn).as_strided((3, 4, 2, 32), (stride, 64, 32, 1))
    k = torch.arange(tokens * 64, dtype=torch.uint8, device=DEVICE).view(torch.float8_e4m3fn).view(tokens, 2, 32)
    slot_mapping = torch.tensor([8, 11, 9, 10], device=DEVICE)
    kvstrata.store_kv(k, None, cache, None, slot_mapping, backend=backend)
    wanted = k.view(torch.uint8)[[0, 2, 3, 1]].flatten()
    assert torch.equal(pool[2 * stride : 2 * stride + 256], wanted)
    assert (pool[2 * stride + 256 :] == 0xFF).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_head_stride_times_head_past_2_31(backend: str) -> None:
    """A pool with heads outermost: head times stride does not fit 32 bits."""
    stride = 1 << 30
    pool = torch.empty(2 * stride + 4096, dtype=torch.uint8, device=DEVICE)
    pool[-4096:] = 0xFF
    cache = pool.view(torch.float8_e4m3fn).as_strided((8, 3, 32), (32, stride, 1))
    k = torch.arange(2 * 3 * 32, dtype=torch.uint8, device=DEVICE).view(torch.float8_e4m3fn).view(2, 3, 32)
    kvstrata.store_kv(k, None, cache, None, torch.tensor([5, 0], device=DEVICE), backend=backend)
    rows = pool[2 * stride : 2 * stride + 256].view(8, 32)
    assert torch.equal(rows[[5, 0]], k.view(torch.uint8)[:, 2])
    assert (rows[[1, 2, 3, 4, 6, 7]] == 0xFF).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_k_and_v_in_one_pool_and_strided_slots(backend: str) -> None:
    """[num_blocks, 2, block_size, heads, dim], as in engines: blocks of K do not adjoin; every second slot counts."""
    pool = torch.full((5, 2, 4, 2, 64), 7.0, dtype=torch.float16, device=DEVICE)
    k, v = torch.randn(2, 3, 2, 64, device=DEVICE).half()
    slot_mapping = torch.tensor([6, -1, 17, -1, 2**40, -1], device=DEVICE)[::2]
    want = pool.clone()
    for token, slot in enumerate((6, 17)):
        want[slot // 4, 0, slot % 4], want[slot // 4, 1, slot % 4] = k[token], v[token]
    kvstrata.store_kv(k, v, pool[:, 0], pool[:, 1], slot_mapping, backend=backend)
    assert torch.equal(pool, want)


def test_nothing_to_store_in_rows_without_elements(device: torch.device) -> None:
    slot_mapping = torch.tensor([0, 1], device=device)
    for heads, dim in ((0, 16), (2, 0)):
        rows_, cache = torch.zeros(2, heads, dim, device=device), torch.zeros(4, heads, dim, device=device)
        kvstrata.store_kv(rows_, rows_, cache, cache.clone(), slot_mapping)
    k, cache = torch.ones(2, 2, 16, device=device), torch.zeros(4, 2, 16, device=device)
    kvstrata.store_kv(k, k[..., :0], cache, cache[..., :0], slot_mapping)
    assert torch.equal(cache[:2], k)


def test_plans_are_not_mixed_up(device: torch.device) -> None:
    """Calls that differ in one thing only, one after the other and back again, each against the model."""
    kinds = [
        dict(kind="NHD", block_size=2), dict(kind="HND", block_size=2), dict(offset=1), dict(offset=8),
        dict(source_gap=8), dict(slot_dtype=torch.int64), dict(cache=FP8[0]), dict(cache=FP8[0], scales=1),
        dict(cache=FP8[0], scales=2), dict(cache=FP8[1]), dict(v_dim=None),
    ]  # fmt: skip
    for backend in ("auto", *BACKENDS):
        for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
            for kind in (*kinds, *reversed(kinds)):
                call = make(**(dict(tokens=5, heads=2, k_dim=32, v_dim=32, device=device) | kind))
                with mode():
                    check(call, backend)
        if not HAS_GPU:
            break


@gpu
@pytest.mark.parametrize("backend", ["triton", "cuda"])
def test_more_than_2_31_elements(backend: str) -> None:
    """Source and cache both hold more than 2^31 one-byte vectors of odd rows."""
    tokens, dim = (1 << 24) + 3, 129
    k = torch.randint(0, 256, (tokens, 1, dim), dtype=torch.uint8, device=DEVICE)
    cache = torch.zeros_like(k)
    slot_mapping = torch.arange(tokens - 1, -1, -1, device=DEVICE)
    k8, cache8 = k.view(torch.float8_e4m3fn), cache.view(torch.float8_e4m3fn)
    kvstrata.store_kv(k8, None, cache8, None, slot_mapping, backend=backend)
    assert torch.equal(cache.flip(0), k)
    # And V of one element a row: its vectors run out long before those of K.
    narrow, narrow_cache = k8[..., :1].contiguous(), cache8[..., :1].contiguous()
    kvstrata.store_kv(k8, narrow, cache8, narrow_cache, slot_mapping, backend=backend)
    assert torch.equal(narrow_cache.view(torch.uint8).flip(0), k[..., :1])


@pytest.mark.parametrize("dtype", FP8)
def test_every_fp16_value_rounds_to_the_nearest_fp8(dtype: torch.dtype) -> None:
    """All 65,536 float16 bit patterns, scaled; reference against search, then every backend against reference."""
    x = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.float16).view(512, 1, 128)
    scale = torch.tensor([0.37])
    want = reference.to_fp8(x, scale, dtype)
    assert torch.equal(want, nearest_fp8(x.float() * (1.0 / scale), dtype))
    for backend in BACKENDS[1:]:
        if backend == "cuda_bulk":
            continue
        cache = torch.zeros(512, 1, 128, dtype=torch.uint8, device=DEVICE).view(dtype)
        slot_mapping, factor = torch.arange(512, device=DEVICE), scale.to(DEVICE)
        kvstrata.store_kv(x.to(DEVICE), None, cache, None, slot_mapping, k_scale=factor, backend=backend)
        assert torch.equal(cache.view(torch.uint8).cpu(), want), backend


def test_threads_do_not_share_plans(device: torch.device) -> None:
    """Eight threads with equal shapes and different data, many times each."""
    made = [make(4, 2, 32, 32, device=device, seed=seed) for seed in range(8)]
    wanted = [call.expected() for call in made]

    def work(call: Call) -> None:
        for _ in range(50):
            call.run(kvstrata.store_kv)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, made))
    for call, want in zip(made, wanted, strict=True):
        assert all(torch.equal(pool, w) for pool, w in zip(call.pools, want, strict=True))


@pytest.mark.parametrize("v_dim", [32, None])
def test_store_kv_passes_opcheck(v_dim: int | None, device: torch.device) -> None:
    call = make(3, 2, 32, v_dim, device=device, slot_mapping=[0, 5, -1])
    call.k = torch.nan_to_num(call.k)  # opcheck compares with ==
    for pool in call.pools:
        pool.zero_()
    if call.v is not None:
        call.v = torch.nan_to_num(call.v)
    arguments = (call.k, call.v, call.k_cache, call.v_cache, call.slot_mapping, None, None, "NHD", "auto", False)
    torch.library.opcheck(torch.ops.kvstrata.store_kv.default, arguments)


def test_compiles_as_one_graph(device: torch.device) -> None:
    @torch.compile(fullgraph=True, backend="aot_eager", dynamic=True)
    def step(k, v, k_cache, v_cache, slot_mapping):
        kvstrata.store_kv(k * 2, v + 1, k_cache, v_cache, slot_mapping)
        return k_cache.sum() * 0 + 1

    for tokens in (1, 3, 5):
        call = make(tokens, 2, 32, 32, device=device, seed=tokens)
        call.k, call.v = call.k.contiguous(), call.v.contiguous()
        doubled = Call(call.k * 2, call.v + 1, call.k_cache, call.v_cache, call.slot_mapping, pools=call.pools)
        expected = doubled.expected()
        step(call.k, call.v, call.k_cache, call.v_cache, call.slot_mapping)
        assert all(torch.equal(pool, want) for pool, want in zip(call.pools, expected, strict=True))


def test_guard_in_python_decides_alike(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """The Python guard agrees with TensorGuards, which not every torch has."""
    k, cache, slot_mapping = torch.randn(3, 2, 32), torch.randn(8, 2, 32), torch.arange(3)
    others = [
        (k[:2], cache, slot_mapping),
        (k.half(), cache, slot_mapping),
        (k, cache.transpose(0, 1), slot_mapping),
        (k, cache, slot_mapping.int()),
        (3, cache, slot_mapping),
    ]
    for make_guard in (guard.guard_of, guard.python_guard):
        same = make_guard([k, cache, slot_mapping])
        assert same(k.clone(), cache.clone(), slot_mapping.clone())
        assert not any(same(*other) for other in others)
        with FlopCounterMode(display=False):
            assert not same(k, cache, slot_mapping)


@pytest.mark.parametrize("kind", [dict(v_dim=32), dict(v_dim=None), dict(v_dim=32, cache=FP8[0], scales=1)])
def test_the_fast_path_is_taken_if_it_applies(kind: dict) -> None:
    """With a stand-in for the launch: taken by an equal call, and by no call that differs in anything."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    cpu, launched = torch.device("cpu"), []
    call = make(3, 2, 32, device=cpu, slot_mapping=[0, 1, 2], **kind)

    def run(other: Call = call, **options) -> int:
        before = len(launched)
        other.run(kvstrata.store_kv, **options)
        return len(launched) - before

    def plant() -> None:
        run()
        plan = op._plans.latest
        plan.launch = lambda *addresses: launched.append(addresses)
        plan.options = ("NHD", "auto", False, call.v is None, call.v_cache is None, call.k_scale is None,
                        call.v_scale is None)  # fmt: skip

    op._plans.known.clear()
    plant()
    assert run() == 1
    assert launched[0][0] == call.k.data_ptr()
    assert launched[0][-1] == call.slot_mapping.data_ptr()
    for change in (
        dict(tokens=2, slot_mapping=[0, 1]),
        dict(heads=3),
        dict(offset=1),
        dict(slot_dtype=torch.int64),
        dict(source_gap=8),
    ):
        changed = dict(tokens=3, heads=2, k_dim=32, device=cpu, slot_mapping=[0, 1, 2]) | kind | change
        assert run(make(**changed)) == 0, change
    plant()
    with torch.inference_mode():
        assert run() == 0  # the guard sees the mode, and is made anew for it
        op._plans.latest.launch = lambda *addresses: launched.append(addresses)
        assert run() == 1
    with FakeTensorMode() as mode:
        fake = Call(
            *(
                None if t is None else mode.from_tensor(t)
                for t in (call.k, call.v, call.k_cache, call.v_cache, call.slot_mapping)
            )
        )
        fake.k_scale, fake.v_scale = (None if t is None else mode.from_tensor(t) for t in (call.k_scale, call.v_scale))
        assert run(fake) == 0
    op._plans.known.clear()
    op._plans.latest = None


def test_guard_refuses_none() -> None:
    """``v`` given without ``v_cache`` after a call that had both: the guard says no, the check says why."""
    call = make(3, 2, 32, 32, device=DEVICE, slot_mapping=[0, 1, 2])
    call.run(kvstrata.store_kv)
    call.v_cache = None
    with pytest.raises(ValueError, match="v_cache: expected v and v_cache"):
        call.run(kvstrata.store_kv)


def test_dispatch_modes_see_the_operator(device: torch.device) -> None:
    call = make(3, 2, 32, 32, device=device, slot_mapping=[0, 1, 2])
    call.run(kvstrata.store_kv)
    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    with Watch():
        call.run(kvstrata.store_kv)
    assert "kvstrata.store_kv.default" in seen


def test_fake_tensors_are_checked(device: torch.device) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        k, cache = torch.empty(3, 2, 32), torch.empty(8, 2, 32)
        kvstrata.store_kv(k, k, cache, cache.clone(), torch.empty(3, dtype=torch.int64))
        with pytest.raises(ValueError, match="slot_mapping: expected shape"):
            kvstrata.store_kv(k, k, cache, cache.clone(), torch.empty(4, dtype=torch.int64))


@gpu
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("backend", ["triton", *CUDA])
def test_graph_replay_reads_new_slots_and_rows(backend: str, overlap: bool) -> None:
    if overlap and backend == "triton":
        pytest.skip("an option of the CUDA C++ kernels")
    options = {"backend": backend} | ({"overlap": True} if overlap else {})
    static = make(6, 2, 64, 64, device=DEVICE)
    static.run(kvstrata.store_kv, **options)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        static.k.mul_(1)  # something to depend on
        static.run(kvstrata.store_kv, **options)
    for seed in range(1, 6):
        fresh = make(6, 2, 64, 64, device=DEVICE, seed=seed)
        static.k.copy_(torch.nan_to_num(fresh.k))
        static.v.copy_(fresh.v)
        static.slot_mapping.copy_(fresh.slot_mapping)
        for pool in static.pools:
            pool.fill_(0xFF)
        want = static.expected()
        graph.replay()
        assert all(torch.equal(pool, w) for pool, w in zip(static.pools, want, strict=True))


@gpu
def test_side_stream_and_no_hidden_copy() -> None:
    call = make(12, 4, 64, 64, device=DEVICE, source_gap=8)
    want = call.expected()
    call.run(kvstrata.store_kv)
    for pool in call.pools:
        pool.fill_(0xFF)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10_000_000)
        call.run(kvstrata.store_kv)
    assert not stream.query(), "the store waited for the stream"
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    stream.synchronize()
    assert all(torch.equal(pool, w) for pool, w in zip(call.pools, want, strict=True))


@gpu
def test_check_is_refused_under_capture() -> None:
    call = make(2, 2, 64, 64, device=DEVICE, slot_mapping=[0, 1])
    call.run(kvstrata.store_kv)
    torch.cuda.synchronize()
    with torch.cuda.graph(torch.cuda.CUDAGraph()), pytest.raises(RuntimeError, match="check: expected False"):
        call.run(kvstrata.store_kv, check=True)
