"""CUDA C++ kernels on the CPU: the sources as they are, compiled with g++ against headers that emulate a block.

For tests on machines without a GPU. `launcher()` stands in for `kvstrata.jit` in a module under test.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from conftest import HAS_GPU
from kvstrata import jit
from kvstrata.cache.move import launches
from kvstrata.jit.compiler import header_folders

HERE = Path(__file__).parent / "emulator"
KEPT = Path(__file__).parents[1] / ".pytest_cache" / "emulated"
COMPILER = (
    "g++",
    "-std=c++20",
    "-w",
    "-ffp-contract=off",
    "-fPIC",
    "-fno-gnu-unique",  # each library has its own static shared memory
    "-U_FORTIFY_SOURCE",
)  # longjmp between stacks
PTX = {"fp8.cuh", "mma.cuh", "warp.cuh", "ring.cuh", "pdl.cuh", "cp_async.cuh", "vec.cuh", "ldmatrix.cuh"}
PTX |= {"barrier.cuh", "wmma.cuh"}  # instructions.h has these
SANITIZER = ("-fsanitize=undefined", "-fno-sanitize-recover=undefined")
HEAD = '#include "instructions.h"\ntemplate <class T> T params_of(void (*)(const T));\n'
START = """
extern "C" void start_{number}(const void* params, int grid_x, int grid_y, int threads, int shared_bytes) {{
  using T = decltype(params_of({entry}));
  run(static_cast<void (*)(const T)>({entry}), *static_cast<const T*>(params), grid_x, grid_y, threads, shared_bytes);
}}
"""


def missing() -> str | None:
    return None if shutil.which("g++") else "g++ is not installed"


@functools.cache
def _environment() -> str:
    """Compiler, options and headers of all kernels."""
    version = subprocess.run([*COMPILER, "--version"], capture_output=True, text=True, check=True).stdout
    return "\0".join([version, *COMPILER, *(path.read_text() for path in sorted(HERE.glob("*.*")))])


def _build(name: str, *arguments: str, source: str | None = None) -> Path:
    """Compile the source with g++, once for all processes and runs; the file is named by a hash of its inputs."""
    key = hashlib.sha256("\0".join((_environment(), *arguments, source or "")).encode()).hexdigest()[:16]
    built = KEPT / key / name
    built.parent.mkdir(parents=True, exist_ok=True)
    with (built.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not built.exists():
            part = built.with_suffix(".part")
            command = [*COMPILER, *arguments, "-I", str(HERE), "-o", str(part)]
            done = subprocess.run([*command, *(["-"] if source else [])], input=source, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr[:4000]
            part.rename(built)
    return built


@functools.cache
def _precompiled() -> Path:
    """Folder of instructions.h as g++ has parsed it, which is half the work on a small kernel."""
    return _build("instructions.h.gch", "-x", "c++-header", str(HERE / "instructions.h")).parent


@functools.cache
def _runtime() -> Path:
    """The library of runtime.cpp, optimised: kernels spend their time there."""
    options = ("-O2", "-fno-semantic-interposition", "-shared")
    return _build("runtime.so", *options, str(HERE / "runtime.cpp"))


def _text(path: Path) -> str:
    """The source with its headers in place, each once; dynamic shared memory as a pointer, PTX as calls by its name."""
    seen: set[str] = set(PTX)

    def whole(text: str) -> str:
        def header(match: re.Match[str]) -> str:
            if match[1] in seen:
                return ""
            seen.add(match[1])
            path_of_header = next(folder / match[1] for folder in header_folders(path) if (folder / match[1]).exists())
            return whole(path_of_header.read_text().replace("#pragma once", ""))

        return re.sub(r'#include "(.*)"\n', header, text)

    pattern = r"extern __shared__ (?:__align__\(\d+\) )?([\w ]+) (\w+)\[\];"
    text = re.sub(pattern, r"\1* \2 = reinterpret_cast<\1*>(dynamic_shared);", whole(path.read_text()))
    text = re.sub(r"__shared__ (alignas\(\d+\))", r"\1 __shared__", text)
    text = re.sub(r'asm\("([\w.]+) [^"]*" : "=\w"\((\w+)\) : (.+)\);', _call, text)
    return text.replace('extern "C" __global__', "")


def _call(instruction: re.Match[str]) -> str:
    name, out, operands = instruction.groups()
    values = re.sub(r'"\w"\(', "(", operands)
    return f"{out} = {name.replace('.', '_')}({values});"


def build(source: Path, entries: Sequence[str], sanitize: bool = False) -> dict[str, Kernel]:
    """Kernels of one source by entry, compiled together; ``sanitize`` aborts at undefined behaviour."""
    starts = "".join(START.format(number=number, entry=entry) for number, entry in enumerate(entries))
    options = SANITIZER if sanitize else ("-I", str(_precompiled()))
    options = (*options, "-shared", "-Wl,--no-as-needed", str(_runtime()), "-x", "c++")
    library = ctypes.CDLL(str(_build("kernel.so", *options, source=HEAD + _text(source) + starts)))
    return {entry: Kernel(library, getattr(library, f"start_{number}")) for number, entry in enumerate(entries)}


class Kernel:
    def __init__(self, built: ctypes.CDLL, start: Any) -> None:
        self.built, self.start = built, start

    def resident(self, block: int, shared: int = 0) -> int:
        return 1


class Launch:
    def __init__(
        self, kernel: Kernel, grid: Any, block: int, params: bytes | bytearray, *, shared: int = 0, **options: Any
    ) -> None:
        self.call = (*((grid, 1) if isinstance(grid, int) else grid), block, shared)
        self.kernel = kernel
        self.params = params if isinstance(params, bytearray) else bytearray(params)  # as in kvstrata.jit

    def __call__(self, stream: int) -> None:
        self.kernel.start(bytes(self.params), *self.call)


def launcher() -> SimpleNamespace:
    """A module like `kvstrata.jit`, whose kernels run here."""
    return SimpleNamespace(
        missing=lambda: None,
        arch_of=lambda device=None: "sm_90",
        current_stream=lambda device: 0,
        bind_context=lambda device: None,
        use_device=lambda device: contextlib.nullcontext(),
        current_device=lambda: 0,
        is_capturing=lambda: False,
        launch_on=lambda device, launch, stream=None: launch(0),
        capture_id=lambda stream: 1,
        load=lambda source, entry, arch=None: build(source, [entry])[entry],
        Launch=Launch,
        Kernel=jit.Kernel,
    )


def kernels_here(monkeypatch: pytest.MonkeyPatch, *modules: ModuleType) -> Iterator[str]:
    """Body of a fixture: the device on which kernels of these modules run, a GPU or the CPU that emulates one."""
    if HAS_GPU:
        yield "cuda"
        return
    if missing():
        pytest.skip(str(missing()))
    for module in (launches, *modules):
        monkeypatch.setattr(module, "jit", launcher())
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    launches.kernel.cache_clear()
    yield "cpu"
    launches.kernel.cache_clear()


def settling_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Body of a fixture: `kernels_here` for all of settling, in caches whose buckets ask for "cuda"."""
    from kvstrata import backends
    from kvstrata.cache.move import moves_cuda, phases, repack_cuda, whole_pages
    from kvstrata.cache.policy import centre_cuda, plan_cuda
    from kvstrata.quant import op as quantize_op

    modules = (moves_cuda, quantize_op, repack_cuda, phases, whole_pages, plan_cuda, centre_cuda)
    for where in kernels_here(monkeypatch, *modules):
        if where == "cpu":
            monkeypatch.setattr(quantize_op, "ROUNDS", {256: 0})
            monkeypatch.setattr(backends, "resolve", lambda name, device: "reference" if name == "auto" else name)
        yield where


def decode_without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run backend "cuda" of `decode_attention` on the emulator, with three multiprocessors."""
    from kvstrata.attention.decode import cuda as decode_cuda
    from kvstrata.attention.decode import op, plan, repeat

    properties = SimpleNamespace(name="emulated", multi_processor_count=3, shared_memory_per_multiprocessor=233472)
    monkeypatch.setattr(decode_cuda, "jit", launcher())
    monkeypatch.setattr(repeat, "jit", decode_cuda.jit)
    for plans in ("_PLANS", "_OWNED"):
        monkeypatch.setattr(decode_cuda, plans, type(getattr(decode_cuda, plans))())
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(op, "missing", lambda backend, job: decode_cuda.missing(job) if backend == "cuda" else None)
    monkeypatch.setattr(plan.DecodePlan, "_has_kernels", lambda self: True)
    for kernel in (decode_cuda._decode_kernel, decode_cuda._combine_kernel):
        kernel.cache_clear()


EMULATED = pytest.param(
    "emulated", marks=pytest.mark.skipif(HAS_GPU or bool(missing()), reason="the kernels run on the GPU")
)
CUDA = pytest.param("cuda", marks=pytest.mark.gpu)


def on(*backends: object) -> pytest.MarkDecorator:
    """Run a test with these backends, through the fixture `backend`."""
    return pytest.mark.parametrize("backend", backends, indirect=True)
