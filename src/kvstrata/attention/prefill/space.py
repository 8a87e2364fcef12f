"""What can be set in prefill, for `kvstrata tune`: which of the three kernels, and its blocks.

    triton   triton.py   block_m, block_n, stages, order, registers
    gluon    gluon.py    block_m, block_n, stages, registers, pingpong      (sm_90)
    cuda     prefill.cu          block_m, block_n, stages, groups, resident

Kernels of Triton's are compiled by Triton, into its own cache, with the very arguments of a launch: no GPU is needed,
and the first call finds them there. What they take is read from the machine code.
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
from .configs import Config, of_choice
from .cuda import IDEAS, Tile
from .op import PrefillJob

SOURCE = Path(__file__).with_name("triton.py")
WHEN = {
    "order": ("kernel", ("triton",)),
    "registers": ("kernel", ("triton", "gluon")),
    "pingpong": ("kernel", ("gluon",)),
    "groups": ("kernel", ("cuda",)),
    "resident": ("kernel", ("cuda",)),
}
SHARED = 227 * 1024  # bytes that a block may have on sm_90
SIDES = {"triton": ((64, 128), (64, 128)), "gluon": ((64, 128, 192), (64, 128)), "cuda": ((32, 64, 128), (32, 64))}
STAGES = {"triton": (2, 3), "gluon": (2, 3), "cuda": (1, 2, 3, 4)}
WARPS = 64  # of a multiprocessor


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
        "groups": (1, 2),
        "resident": (2, 3, 5),
    }


def choice_of(found: Config | Tile) -> Choice:
    """As the space names it."""
    if isinstance(found, Tile):
        sizes = dict(block_m=found.block_m, block_n=found.block_n, stages=found.stages)
        return {"kernel": "cuda", **sizes, "groups": found.groups, "resident": found.resident}
    sizes = dict(block_m=found.block_m, block_n=found.block_n, stages=found.stages)
    if found.specialize:
        more = dict(registers=found.registers or 0, pingpong=int(found.pingpong))
        return {"kernel": "gluon", **sizes, **more}
    return {"kernel": "triton", **sizes, "order": found.order, "registers": found.registers or 0}


def invalid(choice: Choice, dim: int) -> str | None:
    """Why a choice makes no sense, or None."""
    kernel, block_m, block_n = choice["kernel"], choice["block_m"], choice["block_n"]
    some_m, some_n = SIDES[kernel]
    if block_m not in some_m or block_n not in some_n:
        return f"{kernel} has no blocks of {block_m} by {block_n}"
    if choice["stages"] not in STAGES[kernel]:
        return f"{kernel} has no {choice['stages']} stages"
    if choice.get("registers") and block_m != 64:
        return "a limit of registers is for blocks of 64 queries"
    if choice.get("pingpong") and block_m == 64:
        return "one warpgroup takes no turns"
    found = of_choice(choice, dim)
    if isinstance(found, Tile):
        if found.groups > 1 and block_m > found.stages * block_n:
            return "a group's output does not fit its stages"
        fits = found.resident * (found.shared(IDEAS) + 1024) <= SHARED and found.resident * found.warps <= WARPS
        return None if fits else "so many blocks do not fit"
    wanted = 2 * dim * (block_m + 2 * choice["stages"] * block_n)
    return None if wanted <= SHARED else f"{wanted} bytes of shared memory, there are {SHARED}"


def kernels(size: tuple[int, ...], causal: bool, choice: Choice) -> list[tuple[Path, str, int, int]]:
    """(source, entry, threads, bytes of shared memory asked for at the launch) of a float16 job of ``size``: batch,
    heads, KV heads, tokens, head_dim."""
    found = of_choice(choice, size[-1])
    if isinstance(found, Tile):
        entry = prefill_cuda.entry(torch.float16, found, IDEAS, softcap=False)
        return [(prefill_cuda.SOURCE, entry, 32 * found.warps, found.shared(IDEAS))]
    threads = 128 * (found.block_m // 64 + 1) if found.specialize else 32 * found.warps
    _, heads, kv_heads, length, dim = size
    alike = (1, heads, kv_heads, length if length % 128 else 1024, dim)  # the kernel is the same for whole blocks
    return [(SOURCE, json.dumps([alike, causal, found]), threads, 0)]


def usage(entry: str, arch: str) -> jit.Usage:
    """What a kernel of Triton's takes, compiled if it is not in Triton's cache; jit.CompileError if it cannot be."""
    import triton

    if triton.knobs.runtime.interpret:
        raise jit.CompileError("Triton compiles nothing while TRITON_INTERPRET is set")
    size, causal, config = json.loads(entry)
    drivers = triton.runtime.driver
    kept, drivers._active = drivers._active, _Ahead(int(arch[3:]))
    try:
        built = _compile(tuple(size), causal, Config(*config))
    except Exception as error:  # of many kinds, from the front end to ptxas
        raise jit.CompileError(f"{type(error).__name__}: {error}"[:2000]) from None
    finally:
        drivers._active = kept
    found = {name: int(n) for name, n in re.findall(r"(REG|STACK):(\d+)", _resources(built.asm["cubin"]))}
    return jit.Usage(found["REG"], found["STACK"], found["STACK"], built.metadata.shared)


class _Ahead:
    """The driver of a GPU that is not there: all that Triton asks for before it compiles."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return self.capability  # kernels are kept by device: those of a real one stay out of this

    def get_current_stream(self, device: int) -> int:
        return 0


def _compile(size: tuple[int, ...], causal: bool, config: Config) -> Any:
    """The kernel that a launch on tensors of this size would take, which is all that is looked at."""
    from . import launch as prefill_launch
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
