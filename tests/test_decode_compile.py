"""The decode kernels, compiled ahead of time: no GPU needed, and shared memory that every GPU has."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import gates
from ahead import compile_triton
from kvstrata import jit
from kvstrata.attention.decode import cuda as decode_cuda
from kvstrata.attention.decode import stages
from kvstrata.jit.kernel import PORTABLE_SHARED
from kvstrata.layout import Format

MODULE = "kvstrata.attention.decode.triton"
TYPES = {f"{name}_ptr": "*i32" for name in ("requests", "length", "table", "count", "offsets", "weights", "state")}
TYPES |= {f"{name}_ptr": "*fp32" for name in ("centre", "k_scale", "v_scale", "partial", "stats", "lse", "mass")}
TYPES |= {"balance_ptr": "*i8", "q_ptr": "*bf16", "k_ptr": "*bf16", "v_ptr": "*bf16", "pointers_ptr": "*i64"}
TYPES |= {"scale": "fp32", "softcap": "fp32", "window": "i32", "max_length": "i32", "units": "i32"}
TYPES |= {"log2_decay": "fp32", "first_block": "i32"}
CONSTANTS = dict(
    KV_HEADS=8, GROUP=4, Q_LEN=1, DIM=64, WIDE=64, ROWS=16, ROW_BLOCKS=1, TIERS=2, FORMATS=0x4400, TOKENS=64, TOK=64,
    SPLITS=8, BLOCK=64, CENTRED=True, BALANCED=True, POSITION_BYTES=2, MANTISSA=0, SCALED=0, ORDERED=False,
    WINDOWED=False, CAPPED=False, MASS=False, OBSERVE=False, EMA=False, PRECISION="tf32",
)  # fmt: skip
CASES = {
    "K4V4": (80, {}, {}),
    "K3V2, D 80, speculative, all options": (
        89, {}, dict(DIM=80, WIDE=128, TOK=32, FORMATS=0x2300, BLOCK=16, Q_LEN=4, ORDERED=True, WINDOWED=True,
                     CAPPED=True),
    ),
    "mass over two tiers": (90, {}, dict(TIERS=3, FORMATS=0x224400, MASS=True)),
    "importance in place": (80, {}, dict(TIERS=3, FORMATS=0x224400, MASS=True, OBSERVE=True, EMA=True)),
    "fp8 pages": (
        89, {"k_ptr": "*u8", "v_ptr": "*u8"}, dict(TIERS=0, FORMATS=0, BLOCK=1, MANTISSA=3, SCALED=8, CENTRED=False,
                                                   BALANCED=False),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_decode_compiles_ahead_of_time(name: str) -> None:
    arch, types, constants = CASES[name]
    used = compile_triton(
        MODULE, "decode_kernel", arch, TYPES | types, CONSTANTS | constants, num_warps=8, num_stages=1
    )
    assert 0 < used["REG"] <= 255, used
    assert used["SHARED"] <= 48 * 1024, used


@pytest.mark.parametrize("arch", [80, 89, 90])
def test_combine_compiles_ahead_of_time(arch: int) -> None:
    types = {f"{name}_ptr": "*fp32" for name in ("partial", "stats", "sinks", "lse")} | {"out_ptr": "*bf16"}
    constants = dict(
        KV_HEADS=8, GROUP=4, Q_LEN=1, DIM=128, WIDE=128, SPLITS=8, WIDE_SPLITS=8, SINKS=True, LSE=True
    )  # fmt: skip
    used = compile_triton(MODULE, "combine_kernel", arch, types, constants)
    assert used["STACK"] == 0, used


def formats(head_dim: int, page_tokens: int, *names: str) -> tuple[Format, ...]:
    return tuple(Format.parse(name, head_dim, page_tokens) for name in ("K16V16", *names))


KERNELS = {
    "three tiers": (formats(128, 64, "K4V4", "K3V3", "K2V2"), 1, {}),
    "two blocks of columns": (formats(128, 64, "K8V8", "K2V2"), 2, {"ordered": True}),
    "window": (formats(128, 64, "K2V2"), 1, {"ordered": True}),
    "D 256": (formats(256, 64, "K4V2"), 1, {}),
    "four tiers, mass": (formats(128, 64, "K8V8", "K4V4", "K3V3", "K2V2"), 1, {"mass": True}),
    "D 80, small pages, mass": (formats(80, 16, "K8V4", "K3V2"), 1, {"mass": True}),
    "four tiers, importance, balance": (
        formats(128, 64, "K8V8", "K4V4", "K3V3", "K2V2"), 1, {"observe": True, "balanced": True},
    ),
    "rows of store_kv": (formats(128, 16), 1, {"rows": True}),
}  # fmt: skip


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])  # sm_89: the code of sm_80
@pytest.mark.parametrize("name", KERNELS)
def test_decode_kernels_compile_within_resource_limits(name: str, arch: str) -> None:
    """No spills; registers for the warps that are to be resident; 48 KB of shared memory but on Hopper."""
    tiers, width, flags = KERNELS[name]
    entry = stages.decode_entry(tiers, torch.bfloat16, width, arch, **flags)
    usage = gates.usage(decode_cuda.FOLDER / "decode.cu", entry, arch=arch)
    assert usage.spill_bytes == usage.stack_bytes == 0, usage
    assert 0 < usage.registers <= (255 if stages.resident_warps(tiers[0].head_dim, width) == 8 else 168), usage
    dynamic = stages.block_warps(tiers, arch) * stages.SLOTS * stages.slot_bytes(tiers)
    assert dynamic + usage.shared_bytes <= (227 if arch == "sm_90" else 48) * 1024


def code_bytes(source: Path, entry: str) -> int:
    key = gates.key_of("bytes", source, entry, "sm_90")
    return gates.kept(key, lambda: len(jit.compile(source, entry, arch="sm_90").code))


def test_calls_without_balance_and_observation_have_no_code_for_them() -> None:
    """Tiers that share a multiprocessor wait for instructions, also for those around which they branch."""
    flags = ({}, {"balanced": True}, {"mass": True}, {"observe": True})
    entries = [stages.decode_entry(formats(128, 64), torch.bfloat16, 1, "sm_90", **given) for given in flags]
    sizes = [code_bytes(decode_cuda.FOLDER / "decode.cu", entry) for entry in entries]
    assert sizes[0] + 1000 < sizes[1]
    assert sizes[2] + 1000 < sizes[3]


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])  # sm_89: the code of sm_80
def test_list_and_combine_kernels_compile_within_resource_limits(arch: str) -> None:
    assert gates.usage(decode_cuda.FOLDER / "worklist.cu", "worklist", arch=arch).registers <= 64
    assert gates.usage(decode_cuda.FOLDER / "rows.cu", "rows", arch=arch).registers <= 32
    assert gates.usage(decode_cuda.FOLDER / "observe.cu", "observe", arch=arch).registers <= 64
    for dim, warps in ((128, 4), (128, 16), (80, 4), (256, 8), (64, 1), (128, 1), (80, 1), (256, 1)):
        entry = stages.combine_entry(torch.float16, dim, warps)
        usage = gates.usage(decode_cuda.FOLDER / "combine.cu", entry, arch=arch)
        assert usage.spill_bytes == usage.stack_bytes == 0, usage
        assert warps > 1 or usage.registers <= 128, usage  # a block finds room where one of decode.cu's has ended


@pytest.mark.parametrize("tiers", range(1, decode_cuda.MAX_TIERS + 1))
def test_list_takes_the_shared_memory_that_every_launch_gets(tiers: int) -> None:
    """However many requests and KV heads: what the kernel declares itself counts, too."""
    static = gates.usage(decode_cuda.FOLDER / "worklist.cu", "worklist", arch="sm_90").shared_bytes
    for units in (1, 8, 100, 16256, 16288, 16384, 16385, 100_000, 1_000_001):
        parts, dynamic = decode_cuda.list_parts(units, tiers)
        assert dynamic + static <= PORTABLE_SHARED
        assert parts * dynamic >= units * tiers * decode_cuda.BASE_BYTES


def test_stages_fit_their_slots() -> None:
    """Whatever the format: a stage divides the page, fits its slot, and is the page where that cannot be cut."""
    for head_dim in range(32, 257, 16):
        for page_tokens in (16, 32, 64):
            for name in ("K16V16", "K8V8", "K8V2", "K4V4", "K3V3", "K4V3", "K2V2"):
                f = Format.parse(name, head_dim, page_tokens)
                tokens = stages.stage_tokens(f)
                assert page_tokens % tokens == 0
                assert tokens * f.bytes_per_token <= stages.slot_bytes((f,))
                if "3" in name:
                    assert tokens == page_tokens
