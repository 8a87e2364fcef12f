"""Kernels compiled ahead: those that a first prompt, settling and decode step load, and no others at run time."""

from __future__ import annotations

import contextlib
import io
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import emulator
import kvstrata
from conftest import HAS_GPU
from kvstrata import backends, jit
from kvstrata.attention.cache_warmup import kernels_needed, load_kernels, trial_run
from kvstrata.attention.decode import cuda as decode_cuda
from kvstrata.cache import TieredCache
from kvstrata.cache.move import append_cuda, launches, moves_cuda, phases, repack_cuda, whole_pages
from kvstrata.cache.policy import centre_cuda, plan_cuda
from kvstrata.cache.storage import page_triton, table_cuda
from kvstrata.jit import ahead, compiler
from kvstrata.quant import op as quantize_op
from kvstrata.quant.calibration import Calibration, LayerCalibration, factors

GPU = dict(arch="sm_90", gpu="emulated", shared=233472)
needs_compiler = pytest.mark.skipif(bool(jit.missing()), reason=str(jit.missing()))


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[jit.Named]]:
    """Kernels that are loaded, on the CPU with "cuda" emulated."""
    if HAS_GPU:
        pytest.skip("a GPU does not emulate")
    if emulator.missing():
        pytest.skip(str(emulator.missing()))
    names: set[jit.Named] = set()
    emulator.decode_without_cuda(monkeypatch)
    fake = emulator.launcher()
    load = fake.load
    fake.load = lambda source, entry, arch=None: names.add((source, entry)) or load(source, entry, arch)
    fake.Named = jit.Named
    planned = (plan_cuda, centre_cuda, table_cuda)
    for module in (launches, append_cuda, moves_cuda, quantize_op, repack_cuda, phases, whole_pages, *planned):
        monkeypatch.setattr(module, "jit", fake)
    monkeypatch.setattr(decode_cuda, "jit", fake)
    launches.kernel.cache_clear()
    monkeypatch.setattr(quantize_op, "ROUNDS", {256: 0})
    monkeypatch.setattr(backends, "resolve", lambda backend, device: "reference" if backend == "auto" else backend)
    table_cuda._kernel.cache_clear()
    yield names
    launches.kernel.cache_clear()
    table_cuda._kernel.cache_clear()
    decode_cuda._decode_kernel.cache_clear()
    decode_cuda._combine_kernel.cache_clear()


def small(**options) -> TieredCache:
    options = (
        dict(budget=0.3, recent_tokens=20, sink_tokens=4, page_tokens=16, dtype=torch.float16, settle_every=8)
        | dict(tiers=("K4V4", "K2V2"), max_tokens=512, max_requests=2)
        | options
    )
    return TieredCache(1, 2, 32, **options)


@pytest.mark.parametrize("options", [dict(), dict(per_head=False), dict(policy="recency")], ids=str)
def test_kernels_of_first_operations_are_listed(loaded: set[jit.Named], options: dict) -> None:
    """Every kernel that prompts, appends, steps, settling, crop and decode load is among those compiled ahead."""
    cache = small(**options)
    cache.buckets.backend = "cuda"
    generator = torch.Generator().manual_seed(0)

    def rows(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
        k, v = torch.randn(2, *shape, 2, 32, generator=generator).half()
        return k, v

    cache.append(0, *rows(300), [0], mass=torch.rand(1, 2, 300, generator=generator), queries=300)
    cache.append(0, *rows(5), [1])
    cache.append(0, *rows(90), [1])
    uses_mass = cache.policy.name == "importance"
    q = torch.randn(2, 1, 8, 32, generator=generator).half()
    for step in range(12):
        cache.append(0, *rows(2, 1))
        kvstrata.decode_attention(q, cache, backend="cuda", return_mass=uses_mass and step % 2 == 1)
    cache.advance()
    cache.write(0, *rows(2))
    cache.settle()
    cache.crop(0, 200)
    kvstrata.decode_attention(q[:1], cache, requests=[1], backend="cuda")
    if uses_mass:
        plan = kvstrata.DecodePlan(cache, 8, observe=1)
        plan.update()
        kvstrata.decode_attention(q, cache, backend="cuda", plan=plan)
    # On a CPU the host's tables are the device's, so these are prepared and not run.
    ids, (k, v) = torch.zeros(1, dtype=torch.int32), rows(1)
    for kernel in append_cuda.KERNELS:
        append_cuda._prepare(kernel, cache.buckets, 0, k, v, cache._device_lengths, ids, None, None, 1, False)
    table_cuda.count_up(cache.buckets, ids, cache._device_lengths)
    table_cuda.NewPages(cache.buckets)
    table_cuda.NextPages(cache.buckets)
    needed = set(kernels_needed(cache, 8, 1, **GPU))
    missing = loaded - needed
    assert not missing, sorted(entry for _, entry in missing)
    assert len(loaded) > 12  # the path was taken
    unused = {entry.split("<")[0] for _, entry in needed - loaded}  # of other sizes and moves
    assert unused <= {"clear", "combine", "combine_alone", "copy_codes", "copy_rows", "observe"}, unused


@needs_compiler
def test_kernels_of_a_cache_compile_without_a_gpu(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In several threads, once: a second call finds everything on disk and compiles nothing."""
    names = append_cuda.kernels_needed(small().page_formats[0], False)
    run, together, waiting = compiler._run_nvrtc, threading.Barrier(2), iter(range(2))

    def watched(*arguments):
        if next(waiting, None) is not None:
            together.wait(60)  # the first two run at the same time
        return run(*arguments)

    monkeypatch.setattr(compiler, "_run_nvrtc", watched)
    error = io.StringIO()
    with contextlib.redirect_stderr(error):
        done = jit.compile_ahead(names, "sm_90", jobs=2, progress=True)
    assert done == names
    assert "compiled 3 kernels for sm_90 in" in error.getvalue()
    assert str(own_cache) in error.getvalue()
    monkeypatch.setattr(compiler, "_run_nvrtc", lambda *arguments: pytest.fail("it is in the cache"))
    with contextlib.redirect_stderr(error := io.StringIO()):
        assert jit.compile_ahead(names, "sm_90", jobs=2, progress=True) == []
    assert error.getvalue() == ""
    for name in names:
        assert jit.compile(*name, arch="sm_90").code[:4] == b"\x7fELF"


@needs_compiler
def test_a_kernel_that_does_not_compile_is_named(own_cache: Path) -> None:
    with pytest.raises(jit.CompileError, match="no_such_kernel"):
        jit.compile_ahead([(append_cuda.SOURCE, "no_such_kernel<1>")], "sm_90", progress=False)


def test_loaded_kernels_are_not_looked_up_again(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(ahead, "_loaded", set())
    monkeypatch.setattr(ahead, "compile_ahead", lambda names, arch, progress: calls.append(list(names)) or [])
    monkeypatch.setattr(ahead, "arch_of", lambda device: "sm_90")
    monkeypatch.setattr(ahead, "load", lambda source, entry, arch: None)
    monkeypatch.setattr(ahead, "bind_context", lambda device: None)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    names = [(Path("a.cu"), "a"), (Path("a.cu"), "b"), (Path("a.cu"), "a")]
    for _ in range(2):
        assert ahead.load_ahead(names, torch.device("cuda", 0)) == []
    assert calls == [names[:2]]


@pytest.mark.parametrize(
    "options", [dict(), dict(budget=None), dict(budget=None, budget_bytes=400_000), dict(policy="uniform"),
                dict(max_tokens=1), dict(max_tokens=40)], ids=str,
)  # fmt: skip
def test_warmup_does_not_change_the_cache(device: torch.device, options: dict) -> None:
    """Any budget, short tables; torch's random numbers are those that would have come."""
    cache = small(device=device, **options)
    if cache.max_tokens > 40:
        cache.append(0, *torch.zeros(2, 40, 2, 32, dtype=torch.float16, device=device))
    before = cache.length(0), torch.get_rng_state().clone()
    kvstrata.warmup(cache, heads=8, progress=False)
    kvstrata.warmup(cache, progress=False)
    assert cache.length(0) == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])
    cache.check()


def test_warmup_of_a_calibrated_cache_with_layers_of_their_own(device: torch.device) -> None:
    """A trial has one layer, the one with the most to apply; shares and sensitivities are those of several."""
    ones = torch.ones(2, 32)
    measured = Calibration(
        [LayerCalibration(), LayerCalibration(2 * ones, ones), LayerCalibration(ones)], [1, 2, 4], [1, 1, 1]
    )
    sizes = dict(budget=0.3, recent_tokens=20, page_tokens=16, dtype=torch.float16, max_tokens=512, device=device)
    cache = TieredCache(3, 2, 32, calibration=measured, sensitivity=measured.sensitivity, **sizes)
    kvstrata.warmup(cache, heads=8, progress=False)
    trial = trial_run(cache)
    assert trial.layers == 1
    assert trial.balance is not None
    assert torch.equal(factors(trial.balance[0, 0]), 2 * ones.to(device))
    assert cache.length(0, 2) == 0


@pytest.mark.gpu
def test_nothing_is_compiled_after_warmup(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With an empty disk cache, on a GPU."""
    cache = TieredCache(2, 2, 64, budget=0.25, device="cuda", max_requests=3, max_tokens=4096)
    kvstrata.warmup(cache, heads=8, progress=False)
    monkeypatch.setattr(compiler, "_run_nvrtc", lambda *arguments: pytest.fail(f"compiled later: {arguments[1]}"))
    q = torch.randn(3, 1, 8, 64, device="cuda").bfloat16()
    for layer in range(2):
        k, v = torch.randn(2, 3, 1500, 2, 64, device="cuda").bfloat16()
        cache.append(layer, k, v, mass=torch.rand(3, 2, 1500, device="cuda"))
    for _ in range(80):
        cache.advance()
        for layer in range(2):
            cache.write(layer, *torch.randn(2, 3, 2, 64, device="cuda").bfloat16())
            result = kvstrata.decode_attention(q, cache, layer, return_mass=True)
            cache.update_importance(layer, result.mass)
            kvstrata.decode_attention(q, cache, layer)


def test_copies_are_compiled_as_compaction_launches_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """The types and constants of the kernel that is compiled ahead are those of the launch, for pages of any size."""
    calls: list[tuple] = []

    def note(*arguments: object, grid: object = None, **constants: object) -> None:
        calls.append(
            (tuple(getattr(x, "dtype", x if isinstance(x, torch.dtype) else type(x)) for x in arguments), constants)
        )

    class Kernel:
        warmup = staticmethod(note)

        def __getitem__(self, grid: object) -> Callable[..., None]:
            return note

    monkeypatch.setattr(page_triton, "pages_kernel", Kernel())
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    pool = SimpleNamespace(pointers=torch.zeros(4, dtype=torch.int64), units=64, device=torch.device("cpu"))
    for size in (16, 4096 + 64, 33024):
        calls.clear()
        page_triton.load_copy(pool, [size])
        page_triton.copy(pool, *torch.zeros(2, 3, dtype=torch.int64), size)
        assert calls[0] == calls[1]
    calls.clear()
    page_triton.load_copy(pool, [8192, 16384, 33024])
    assert len(calls) == 1, "one kernel serves pages of all tiers"


@pytest.mark.gpu
def test_compaction_compiles_nothing_after_the_first_prompt() -> None:
    cache = TieredCache(2, 2, 64, budget=0.25, device="cuda", max_requests=3, max_tokens=4096)
    load_kernels(cache, 8)
    compiled = page_triton.pages_kernel.device_caches[cache.device.index or 0][0]
    before = len(compiled)
    assert before
    for tier in range(len(cache.page_formats)):
        handles = cache.pool.allocate(tier, 7)
        workspace = cache.pool.workspace()
        cache.pool._move(handles[:3], handles[3:6], tier, workspace[:, 1:])  # aligned to 8 bytes
        cache.pool.release(handles)
    assert len(compiled) == before


def test_invalid_warmup_arguments_are_named(device: torch.device) -> None:
    with pytest.raises(TypeError, match="cache: expected a TieredCache"):
        kvstrata.warmup(SimpleNamespace())
    for heads in (0, 3, 2.0):
        with pytest.raises(ValueError, match="heads: expected a multiple of 2"):
            kvstrata.warmup(small(device=device), heads)
    with pytest.raises(ValueError, match="q_len"):
        kvstrata.warmup(small(device=device), 2, q_len=0)
