"""Gates before any launch: the resource usage of a compiled kernel, compared with a multiprocessor's resources.

Registers, spills and static shared memory come from the assembler's report (`jit.usage`), so they can be checked on a
host without a GPU too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvstrata import jit

PORTABLE_SHARED = 48 * 1024  # bytes that a block may use on every GPU
RESERVED = 1024  # bytes of shared memory per block that the system reserves
KIB = 1024


class Rejected(Exception):
    """A rejected configuration: `kind` names the gate, the message the reason."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(frozen=True)
class Needs:
    """One kernel of a configuration with its launch: threads per block, dynamic shared memory in bytes."""

    source: Path
    entry: str
    threads: int
    dynamic: int = 0


@dataclass(frozen=True)
class Multiprocessor:
    """Resources of a multiprocessor: bytes of shared memory in total and per block, warps, blocks, registers."""

    shared: int
    shared_block: int
    warps: int = 64
    blocks: int = 32
    registers: int = 65536


# From the table of compute capabilities in the CUDA programming guide.
SMALL = Multiprocessor(100 * KIB, 99 * KIB, warps=48, blocks=16)
LARGE = Multiprocessor(228 * KIB, 227 * KIB)
KNOWN = {"sm_80": Multiprocessor(164 * KIB, 163 * KIB), "sm_90": LARGE, "sm_100": LARGE, "sm_103": LARGE}


def multiprocessor(arch: str) -> Multiprocessor:
    """Multiprocessor of an architecture; for an unknown one, the smallest known."""
    return KNOWN.get(arch, SMALL)


@dataclass(frozen=True)
class Limits:
    """Limits of a configuration: shared memory per block in bytes (None: that of the architecture), registers per
    thread, bytes spilled, and the minimum occupancy."""

    shared: int | None = None
    registers: int = 255
    spills: int = 0
    occupancy: float = 0.1


# `hardware`: what the GPU can launch. `portable`: what a block may use on every GPU, with registers to spare.
# `portable-50`: also half of the warps resident, which leaves 64 registers per thread on sm_90 (80 on sm_89).
HARDWARE = "hardware"
PRESETS = {
    HARDWARE: Limits(),
    "portable": Limits(PORTABLE_SHARED, registers=96),
    "portable-50": Limits(PORTABLE_SHARED, registers=96, occupancy=0.5),
}


@dataclass(frozen=True)
class Profile:
    """Resource usage of a configuration: the maximum over its kernels."""

    registers: int
    spills: int
    shared: int
    occupancy: float


def occupancy(registers: int, shared: int, threads: int, arch: str) -> float:
    """Resident warps of a kernel as a share of a multiprocessor's maximum."""
    has, warps = multiprocessor(arch), -(-threads // 32)
    per_warp = -(-max(registers, 1) * 32 // 256) * 256
    by_registers = has.registers // per_warp // warps
    by_shared = has.shared // (shared + RESERVED)
    return min(by_registers, by_shared, has.warps // warps, has.blocks) * warps / has.warps


def check(kernels: Sequence[Needs], usage: Callable[[Needs], jit.Usage], arch: str, limits: Limits) -> Profile:
    """Profile of a configuration whose kernels are within the limits; Rejected otherwise. ``usage`` may compile."""
    has = multiprocessor(arch)
    cap = has.shared_block if limits.shared is None else min(limits.shared, has.shared_block)
    checked = []
    for kernel in kernels:
        if not 32 <= kernel.threads <= 1024 or kernel.threads % 32:
            raise Rejected("divisibility", f"{kernel.threads} threads: expected whole warps, at most 1024 threads")
        if kernel.dynamic > cap:
            raise Rejected("shared memory", f"{kernel.dynamic} bytes of shared memory, the cap is {cap}")
        try:
            used = usage(kernel)
        except jit.CompileError as error:
            text = str(error)
            kind = "shared memory" if "too much shared data" in text else "does not compile"
            raise Rejected(kind, text.splitlines()[-1] if text else kernel.entry) from error
        shared = kernel.dynamic + used.shared_bytes
        if shared > cap:
            raise Rejected("shared memory", f"{shared} bytes of shared memory, the cap is {cap}")
        if used.spill_bytes > limits.spills:
            raise Rejected("spills", f"{used.spill_bytes} bytes spilled, {limits.spills} are allowed")
        if used.registers > limits.registers:
            raise Rejected("registers", f"{used.registers} registers, {limits.registers} are allowed")
        resident = occupancy(used.registers, shared, kernel.threads, arch)
        if resident == 0 or resident < limits.occupancy:
            raise Rejected("occupancy", f"{resident:.0%} of the warps are resident, at least {limits.occupancy:.0%}")
        checked.append(Profile(used.registers, used.spill_bytes, shared, resident))
    if not checked:
        return Profile(0, 0, 0, 1.0)
    return Profile(
        max(p.registers for p in checked),
        max(p.spills for p in checked),
        max(p.shared for p in checked),
        min(p.occupancy for p in checked),
    )
