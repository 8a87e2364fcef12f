"""Source to cubin without a GPU: cache, errors, processes at once; and the gates that every kernel has to pass."""

from __future__ import annotations

import ctypes
import dataclasses
import multiprocessing
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import gates
from ahead import compile_triton
from kvstrata import jit
from kvstrata.attention.decode import cuda as decode_cuda
from kvstrata.attention.prefill import cuda as prefill_cuda
from kvstrata.cache.move import append_cuda, moves_cuda, repack_cuda
from kvstrata.cache.move import phases as repack_phases
from kvstrata.cache.policy import centre_cuda, plan_cuda
from kvstrata.cache.storage import table_cuda
from kvstrata.jit import compiler
from kvstrata.jit import kernel as kernel_module
from kvstrata.layout import Format
from kvstrata.quant import op as quantize_op
from kvstrata.replay import cuda as copy_cuda
from kvstrata.store import cuda as store_cuda
from kvstrata.store.job import Rows, Task

pytest.importorskip("cuda.core")
ARCHITECTURES = ["sm_80", "sm_89", "sm_90"]
SMALL = """
template <int kAdd> __global__ void add(int* x) { x[threadIdx.x] += kAdd; }
"""


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVSTRATA_CACHE", str(tmp_path / "cache"))
    source = tmp_path / "small.cu"
    source.write_text(SMALL)
    return source


def forbid_nvrtc(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("compiled again")

    monkeypatch.setattr(compiler, "_run_nvrtc", refuse)


def test_second_compile_comes_from_disk(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = jit.compile(small, "add<3>", arch="sm_90")
    assert first.code.startswith(b"\x7fELF")
    assert "add" in first.symbol
    forbid_nvrtc(monkeypatch)
    assert jit.compile(small, "add<3>", arch="sm_90") == first


@pytest.mark.parametrize("change", ["source", "entry", "arch", "headers"])
def test_whatever_changes_the_code_changes_the_key(small: Path, monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    jit.compile(small, "add<3>", arch="sm_90")
    entry, arch = "add<3>", "sm_90"
    if change == "source":
        small.write_text(SMALL + "// another\n")
    elif change == "entry":
        entry = "add<4>"
    elif change == "arch":
        arch = "sm_80"
    else:
        monkeypatch.setattr(compiler, "_headers_digest", lambda folder: b"other headers")
    forbid_nvrtc(monkeypatch)
    with pytest.raises(AssertionError, match="compiled again"):
        jit.compile(small, entry, arch=arch)


def test_damaged_entry_is_compiled_again(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = jit.compile(small, "add<3>", arch="sm_90")
    damaged = [f for f in (tmp_path / "cache").rglob("*") if f.is_file() and f.read_bytes() == first.code]
    assert len(damaged) == 1
    damaged[0].write_bytes(b"not a cubin")
    again = jit.compile(small, "add<3>", arch="sm_90")
    assert again.code.startswith(b"\x7fELF")
    assert again.symbol == first.symbol
    forbid_nvrtc(monkeypatch)
    assert jit.compile(small, "add<3>", arch="sm_90") == again


def test_error_holds_the_log(small: Path) -> None:
    small.write_text("__global__ void broken() { int x = ; }")
    with pytest.raises(
        jit.CompileError, match=r"(?s)small.cu: cannot compile broken for sm_90.*expected an expression"
    ):
        jit.compile(small, "broken", arch="sm_90")


def test_unusable_cache_folder_gives_a_warning(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSTRATA_CACHE", str(small))  # a file, not a folder
    with pytest.warns(UserWarning, match="cubins are not cached"):
        assert jit.compile(small, "add<3>", arch="sm_90").code.startswith(b"\x7fELF")


def test_bulk_copies_are_for_hopper_and_newer() -> None:
    shape = store_cuda.shape_of(dataclasses.replace(STORES["fp16 8x128"], tokens=1 << 17), 0)
    kernels = {arch: store_cuda.config_of("cuda", shape, arch).kernel for arch in ("sm_80", "sm_89", "sm_90", "sm_100")}
    merged = dataclasses.replace(shape, task=dataclasses.replace(shape.task, k=WIDE, v=WIDE))
    assert set(kernels.values()) == {"direct"}, "rows of one head in HND pages are too short for bulk copies"
    kernels = {
        arch: store_cuda.config_of("cuda", merged, arch).kernel for arch in ("sm_80", "sm_89", "sm_90", "sm_100")
    }
    assert kernels == {"sm_80": "direct", "sm_89": "direct", "sm_90": "bulk", "sm_100": "bulk"}


def test_processes_compile_at_once(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from jit_child import compile_add

    # Python 3.11 does not tell the server sys.path, and says nothing of a module that it then does not find.
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(Path(__file__).parent), *sys.path])))
    forks = multiprocessing.get_context("forkserver")  # which imports torch once, where spawned processes do so each
    forks.set_forkserver_preload(["jit_child"])
    with forks.Pool(4) as pool:
        symbols = pool.starmap(compile_add, [(str(small), add) for add in (1, 2, 1, 2, 1, 2, 1, 2)])
    assert len(set(symbols)) == 2


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_cp_async_compiles_for_its_widths_only(small: Path, arch: str) -> None:
    small.write_text("""
#include "cp_async.cuh"
template <int kBytes> __global__ void copy(char* x) {
  __shared__ alignas(16) char stage[64];
  cp_async_ca<4>(stage, x); cp_async_ca<8>(stage + 16, x + 16); cp_async_ca<16>(stage + 32, x + 32);
  cp_async_cg<16>(stage + 48, x + 48); commit_group(); cp_async<kBytes>(stage, x); commit_group();
  wait_group<1>(); wait_group<0>(); x[0] = stage[threadIdx.x];
}""")
    for width in (4, 8, 16, 32):
        assert jit.usage(small, f"copy<{width}>", arch=arch).spill_bytes == 0
    with pytest.raises(jit.CompileError, match=r"cp\.async copies 4, 8 or 16 bytes"):
        jit.compile(small, "copy<2>", arch=arch)


def _task(heads: int, k_dim: int, v_dim: int | None, source: torch.dtype, cache: torch.dtype, per_head: bool) -> Task:
    def rows(dim: int) -> Rows:  # HND pages of 16, so that neither heads nor pages merge
        return Rows(heads, dim, heads * dim, dim, heads * 16 * dim, dim, 16 * dim, 64, 16)

    return Task(8192, rows(k_dim), None if v_dim is None else rows(v_dim), source, cache, per_head)


WIDE = Rows(1, 1024, 1024, 0, 1024, 0, 0, 1 << 18, 1)  # a token's heads as one row, slots that adjoin
STORES = {
    "fp16 8x128": _task(8, 128, 128, torch.float16, torch.float16, False),
    "fp16 32x128": _task(32, 128, 128, torch.float16, torch.float16, False),
    "bf16 1x576": _task(1, 576, None, torch.bfloat16, torch.bfloat16, False),
    "fp32 3x33": _task(3, 33, 65, torch.float32, torch.float32, False),
    "bf16 to e4m3": _task(8, 128, 128, torch.bfloat16, torch.float8_e4m3fn, True),
    "fp32 to e5m2": _task(8, 128, 128, torch.float32, torch.float8_e5m2, True),
    "fp16 merged": Task(65536, WIDE, WIDE, torch.float16, torch.float16, False),
    "fp8 odd": _task(3, 33, 33, torch.float8_e4m3fn, torch.float8_e4m3fn, False),
}


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("backend", ["cuda", "cuda_direct", "cuda_staged", "cuda_bulk"])
@pytest.mark.parametrize("name", STORES)
def test_store_kernels_compile_within_resource_limits(name: str, backend: str, arch: str) -> None:
    """No spills, no stack; registers and shared memory as each kernel needs them and no more."""
    shape = store_cuda.shape_of(STORES[name], 0)
    config = store_cuda.config_of(backend, shape, arch)
    if not store_cuda.takes(shape, config) or (config.kernel == "bulk" and arch != "sm_90"):
        pytest.skip("a kernel that does not take these rows here")
    if config.kernel == "bulk":
        shape = dataclasses.replace(shape, task=store_cuda.in_chunks(shape.task))
    usage = gates.usage(store_cuda.SOURCE, store_cuda.entry_of(shape, torch.int32, config), arch=arch)
    assert usage.spill_bytes == usage.stack_bytes == 0, usage
    assert 0 < usage.registers <= {"direct": 64, "staged": 64, "bulk": 32}[config.kernel], usage
    assert usage.shared_bytes <= {"direct": 0, "staged": 32, "bulk": 8}[config.kernel] * 1024 + 256, usage
    assert (usage.shared_bytes == 0) == (config.kernel == "direct")


QUANTISED = [
    (Format(4, 4, 128), torch.bfloat16, 128),
    (Format(8, 8, 128), torch.bfloat16, 168),
    (Format(3, 3, 128), torch.bfloat16, 128),
    (Format(2, 2, 64), torch.float16, 80),
    (Format(4, 2, 128, rotate=False), torch.float32, 168),
    (Format(4, 4, 256), torch.bfloat16, 255),
    (Format(3, 2, 80), torch.bfloat16, 168),  # tiles share words
]


@pytest.mark.parametrize(
    ("arch", "format", "dtype", "registers"),
    [("sm_90", *case) for case in QUANTISED] + [("sm_80", *case) for case in QUANTISED[::3]],  # sm_89: that of sm_80
    ids=lambda x: getattr(x, "name", str(x)),
)
def test_quantize_kernels_compile_within_resource_limits(
    arch: str, format: Format, dtype: torch.dtype, registers: int
) -> None:
    """Register use leaves enough warps to hide memory latency; a few spills are allowed at 128 registers per tile."""
    usage = gates.usage(quantize_op.SOURCE, quantize_op.entry_of(format, dtype), arch=arch)
    assert usage.spill_bytes <= (256 if format.head_dim == 256 else 0), usage
    assert usage.stack_bytes <= (96 if format.head_dim == 256 else 0), usage
    assert 0 < usage.registers <= registers, usage
    assert usage.shared_bytes == 0, usage  # asked for at the launch


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize(
    ("file", "entry"),
    [("store_warp.cu", "store_warp<2048>"), ("store_warp.cu", "store_warp<1152>"), ("empty.cu", "empty")],
)
def test_baseline_kernels_compile_without_spills(file: str, entry: str, arch: str) -> None:
    folder = Path(jit.__file__).parent.parent / "tools" / "bench" / "baselines"
    assert gates.usage(folder / file, entry, arch=arch).spill_bytes == 0


@pytest.mark.parametrize("mantissa", [0, 3])
@pytest.mark.parametrize("arch", [80, 89, 90])
def test_triton_store_compiles_ahead_of_time(arch: int, mantissa: int) -> None:
    source, cache = ("*bf16", "*u8") if mantissa else ("*i16", "*i16")
    types = {"k_ptr": source, "v_ptr": source, "k_cache_ptr": cache, "v_cache_ptr": cache}
    types |= {"slot_mapping_ptr": "*i32", "k_scale_ptr": "*fp32", "v_scale_ptr": "*fp32"}
    constants = dict(HEADS=8, K_DIM=128, V_DIM=128, PAGE_SIZE=16, MANTISSA=mantissa, K_SCALES=8, V_SCALES=8, BLOCK=1024)
    used = compile_triton("kvstrata.store.triton", "store_kernel", arch, types, constants)
    assert 0 < used["REG"] <= 128, used
    assert used["LOCAL"] == 0, used


@pytest.mark.parametrize(("arch", "k_bits"), [(80, 4), (89, 3), (90, 8)])
def test_triton_quantise_compiles_ahead_of_time(arch: int, k_bits: int) -> None:
    format = Format(k_bits, 2, 64)
    names = ("pages", "source", "heads", "centres", "k_table", "k_high", "v_table", "v_high")
    types = {f"{name}_ptr": "*i32" for name in names}
    types |= {"k_ptr": "*bf16", "v_ptr": "*bf16", "pool_ptr": "*u8", "scratch_ptr": "*u8"}
    types |= {"centre_ptr": "*fp32", "direction_ptr": "*i8"}
    constants = dict(
        DIM=64, WIDE=64, TOKENS=64, K_BITS=k_bits, V_BITS=2, K_STEP=0.3, V_STEP=0.9957, K_BYTES=format.k_bytes,
        V_BYTES=format.v_bytes, ROTATE=True, CENTRED=True, AIM=0, BLOCK=1024,
    )  # fmt: skip
    used = compile_triton("kvstrata.quant.triton", "quantize_kernel", arch, types, constants, enable_fp_fusion=False)
    assert 0 < used["REG"] <= 255, used


def test_structs_of_parameters_have_their_padding() -> None:
    """The driver reads as many bytes as the kernel's struct has; one with a pointer in it has a multiple of 8."""
    structs = {
        "append": append_cuda.PARAMS, "centre": centre_cuda.PARAMS, "combine": decode_cuda.COMBINE,
        "decode": decode_cuda.DECODE,
        "moves": moves_cuda.PARAMS, "phases": repack_phases.PARAMS, "prefill": prefill_cuda.PARAMS,
        "quantize": quantize_op.PARAMS, "repack": repack_cuda.PARAMS, "store": store_cuda.PARAMS,
        "plan": plan_cuda.PARAMS, "rows": decode_cuda.ROWS, "table": table_cuda.PARAMS,
        "next": table_cuda.NEXT, "worklist": decode_cuda.WORKLIST,
    }  # fmt: skip
    assert {name: struct.size % 8 for name, struct in structs.items()} == dict.fromkeys(structs, 0)
    rooms = copy_cuda.CAPACITIES
    assert {len(copy_cuda.empty_params(room, None)) % 8 for room in rooms} == {0}


def test_a_launch_takes_no_shared_memory_from_an_earlier_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a kernel may ask for is a property of the kernel: a later launch with less must not lower it."""
    driver = pytest.importorskip("cuda.bindings.driver")
    allowed = []

    def set_attribute(attribute, value, kernel, device):
        allowed.append(value)
        return (0,)

    monkeypatch.setattr(driver, "cuKernelSetAttribute", set_attribute)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    core = SimpleNamespace(handle=0)
    kernel = SimpleNamespace(entry="x", core=core, driver=driver, function=None, static_shared=4 << 10, opted={})
    for shared in (60 << 10, 50 << 10, 60 << 10, 70 << 10, 1 << 10):
        jit.Launch(kernel, 1, 32, bytes(8), shared=shared)
        assert shared <= (allowed[-1] if allowed else 0)
    assert allowed == [60 << 10, 70 << 10]


def test_a_launch_passes_its_configuration_to_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """Grid, block, shared memory, stream, attributes and parameters, as the driver reads them; errors have a name."""
    driver = pytest.importorskip("cuda.bindings.driver")
    words, answer, seen = ctypes.c_uint32 * 14, [0], []

    def driver_call(config: int, function: int, args: int, extra: int | None) -> int:
        read = words.from_address(config)
        stream, attributes = read[8] | read[9] << 32, read[12]
        [params] = (ctypes.c_void_p * 1).from_address(args)
        seen.append((list(read[:7]), stream, attributes, function, ctypes.string_at(params, 16), extra))
        return answer[0]

    call = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 4)(driver_call)
    monkeypatch.setattr(kernel_module, "_launch_kernel", lambda: call)
    kernel = SimpleNamespace(entry="x", driver=driver, function=driver.CUfunction(1 << 40), static_shared=0, opted={})
    launch = jit.Launch(kernel, (5, 6), 64, bytes(16), shared=1024, overlap=True)
    launch.params[:8] = b"abcdefgh"
    for stream in (1 << 33, 1 << 33, 0, 7):
        launch(stream)
    shape = [5, 6, 1, 64, 1, 1, 1024]
    wanted = [(shape, stream, 1, 1 << 40, b"abcdefgh" + bytes(8), None) for stream in (1 << 33, 1 << 33, 0, 7)]
    assert seen == wanted
    jit.Launch(kernel, 3, 32, bytearray(16))(9)
    assert seen[-1] == ([3, 1, 1, 32, 1, 1, 0], 9, 0, 1 << 40, bytes(16), None)
    answer[0] = 700
    with pytest.raises(RuntimeError, match="x: the launch failed with CUDA_ERROR_ILLEGAL_ADDRESS"):
        launch(7)
