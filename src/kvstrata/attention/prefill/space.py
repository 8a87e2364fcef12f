"""Search space of prefill for `kvstrata tune`: which of the three kernels, and its tile.

    triton   triton.py    block_m, block_n, stages, order, registers
    gluon    gluon.py     block_m, block_n, stages, registers, pingpong      (sm_90)
    cuda     prefill.cu   block_m, block_n, stages, kv_warps, resident

Triton and Gluon kernels are compiled ahead of time into Triton's own cache, with the arguments of a launch: no GPU is
needed, and the first call finds them there. Their registers and shared memory are read from the machine code.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch

from kvstrata import jit
from kvstrata.jit.tuned import Choice, Value

from . import cuda as prefill_cuda
from . import launch as prefill_launch
from .job import PrefillJob
from .tiles import Config, Tile, of_choice

SOURCE = Path(__file__).with_name("triton.py")
WHEN = {
    "order": ("kernel", ("triton",)),
    "registers": ("kernel", ("triton", "gluon")),
    "pingpong": ("kernel", ("gluon",)),
    "kv_warps": ("kernel", ("cuda",)),
    "resident": ("kernel", ("cuda",)),
}


def choices(causal: bool, arch: str) -> dict[str, tuple[Value, ...]]:
    """Values of every parameter; the Gluon kernel is offered on sm_90 only."""
    return {
        "kernel": ("triton", "gluon", "cuda") if arch == "sm_90" else ("triton", "cuda"),
        "block_m": (32, 64, 128, 192),
        "block_n": (32, 64, 128),
        "stages": (1, 2, 3, 4),
        "order": (0, 2) if causal else (0,),
        "registers": (0, 128, 168),
        "pingpong": (0, 1),
        "kv_warps": (1, 2),
        "resident": (2, 3, 5),
    }


def kernels(size: tuple[int, ...], causal: bool, choice: Choice) -> list[tuple[Path, str, int, int]]:
    """Kernels of a float16 job, as (source, entry, threads, bytes of dynamic shared memory).

    ``size``: batch, heads, KV heads, tokens, head_dim.
    """
    tile = of_choice(choice, size[-1])
    if isinstance(tile, Tile):
        entry = prefill_cuda.entry(torch.float16, tile, softcap=False)
        return [(prefill_cuda.SOURCE, entry, 32 * tile.warps, tile.shared())]
    threads = 128 * (tile.block_m // 64 + 1) if tile.specialize else 32 * tile.warps
    _, heads, kv_heads, length, dim = size
    alike = (1, heads, kv_heads, length if length % 128 else 1024, dim)  # same kernel for whole blocks
    return [(SOURCE, json.dumps([alike, causal, tile]), threads, 0)]


def usage(entry: str, arch: str) -> jit.Usage:
    """Registers and shared memory of a Triton kernel, compiled unless cached; raises jit.CompileError."""
    import triton

    if triton.knobs.runtime.interpret:
        raise jit.CompileError("Triton compiles nothing while TRITON_INTERPRET is set")
    size, causal, config = json.loads(entry)
    drivers = triton.runtime.driver
    driver, drivers._active = drivers._active, _Ahead(int(arch[3:]))
    try:
        built = _compile(tuple(size), causal, Config(*config))
    except Exception as error:  # many types, from the front end to ptxas
        raise jit.CompileError(f"{type(error).__name__}: {error}"[:2000]) from None
    finally:
        drivers._active = driver
    used = {name: int(n) for name, n in re.findall(r"(REG|STACK):(\d+)", _resources(built.asm["cubin"]))}
    return jit.Usage(used["REG"], used["STACK"], used["STACK"], built.metadata.shared)


class _Ahead:
    """Stand-in for the driver of an absent GPU: everything that Triton queries before it compiles."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return self.capability  # part of Triton's cache key: do not mix these kernels with those of a real device

    def get_current_stream(self, device: int) -> int:
        return 0


def _compile(size: tuple[int, ...], causal: bool, config: Config) -> Any:
    """Compiled kernel that a launch on float16 tensors of this size would use."""
    from . import triton as prefill_triton

    batch, heads, kv_heads, length, dim = size
    q, k = (torch.empty(batch, length, n, dim, dtype=torch.float16, device="cpu") for n in (heads, kv_heads))
    job = PrefillJob(q, k, k, None, None, length, length, causal, dim**-0.5, None, None, None, False)
    with prefill_launch.compiling() as built:
        prefill_triton.run(job, config)
    return built[0]


def _resources(cubin: bytes) -> str:
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([tool, "-res-usage", file.name], check=True, capture_output=True, text=True).stdout
