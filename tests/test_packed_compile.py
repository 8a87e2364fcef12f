"""The kernels of packed pages, compiled ahead of time: registers, spills and shared memory within their gates."""

from __future__ import annotations

import pytest
import torch

import gates
from ahead import compile_triton
from kvstrata import Format
from kvstrata.attention.decode.stages import Cut
from kvstrata.attention.packed_decode import cuda as decode_cuda
from kvstrata.store.packed import copy, tail_cuda
from kvstrata.store.packed import cuda as store_cuda

DECODE = {
    "K4V4": (Format.parse("K4V4", 128), 4, False),
    "K8V8": (Format.parse("K8V8", 128), 4, False),
    "K2V2, window": (Format.parse("K2V2", 128), 8, True),
    "K4V2, 16 columns": (Format.parse("K4V2", 128), 16, True),
    "D 256": (Format.parse("K4V4", 256), 8, False),
    "D 64, small pages": (Format.parse("K3V2", 64, 16), 4, True),
}


@pytest.mark.parametrize(
    ("name", "arch", "plain"),
    [
        *((name, "sm_90", False) for name in DECODE),
        ("K4V4", "sm_80", False),
        ("D 64, small pages", "sm_80", False),
        ("K4V4", "sm_90", True),
        ("K2V2, window", "sm_90", True),
        ("D 256", "sm_80", True),
    ],
)
def test_decode_kernels_compile_within_resource_limits(name: str, arch: str, plain: bool) -> None:
    """No spills; registers for the warps that are to be resident; 48 KB of shared memory but on Hopper."""
    fmt, columns, ordered = DECODE[name]
    cut: Cut = decode_cuda.packed_cut(fmt, columns, arch, plain)
    usage = gates.usage(
        decode_cuda.FOLDER / "packed.cu", decode_cuda.entry_of(fmt, torch.bfloat16, ordered, cut, plain), arch=arch
    )
    assert usage.spill_bytes == usage.stack_bytes == 0, usage
    assert 0 < usage.registers <= (255 if cut.resident == 8 else 168), usage
    assert decode_cuda.shared_of(fmt, cut, plain) + usage.shared_bytes <= (227 if arch == "sm_90" else 48) * 1024


@pytest.mark.parametrize(("dim", "warps"), [(128, 4), (128, 8), (128, 1)])
def test_combine_kernel_compiles_within_resource_limits(dim: int, warps: int) -> None:
    entry = decode_cuda.combine_entry_of(torch.float16, dim, warps)
    usage = gates.usage(decode_cuda.FOLDER / "packed_combine.cu", entry, arch="sm_90")
    assert usage.spill_bytes == usage.stack_bytes == 0, usage
    assert usage.registers * max(warps, 4) * 32 <= 22 * 1024, usage  # room beside eight warps of packed.cu


@pytest.mark.parametrize(
    ("name", "dim", "dtype", "balanced", "arch"),
    [
        ("K4V4", 128, torch.bfloat16, False, "sm_90"),
        ("K8V8", 128, torch.float16, False, "sm_80"),
        ("K3V3", 64, torch.bfloat16, True, "sm_90"),
        ("K4V4", 128, torch.float32, True, "sm_90"),
    ],
)
def test_store_kernels_compile_within_resource_limits(
    name: str, dim: int, dtype: torch.dtype, balanced: bool, arch: str
) -> None:
    entry = store_cuda.entry_of(Format.parse(name, dim), dtype, balanced, torch.int32)
    usage = gates.usage(store_cuda.SOURCE, entry, arch=arch)
    assert usage.spill_bytes == 0, usage
    assert usage.registers <= 200, usage


@pytest.mark.parametrize(
    ("name", "dim", "balanced", "arch"),
    [("K4V4", 128, True, "sm_90"), ("K8V8", 128, False, "sm_80"), ("K3V3", 64, True, "sm_90")],
)
def test_tail_kernel_compiles_without_spills(name: str, dim: int, balanced: bool, arch: str) -> None:
    entry = store_cuda.entry_of(Format.parse(name, dim), torch.bfloat16, balanced, torch.int32, "quantize_tail")
    usage = gates.usage(tail_cuda.SOURCE, entry, arch=arch)
    assert usage.spill_bytes == usage.stack_bytes == 0, usage


def test_copy_kernel_uses_at_most_64_registers() -> None:
    assert gates.usage(copy.SOURCE, f"copy_pages<int, {copy.PER}>", arch="sm_90").registers <= 64


def test_triton_compiles_ahead_of_time() -> None:
    f = Format.parse("K4V2", 128)
    offsets = dict(V_OFFSET=f.v_offset, SCALE_OFFSET=f.scale_offset, PAGE_BYTES=f.page_bytes)
    pointers = {"pages_ptr": "*u8", "table_ptr": "*i32", "length_ptr": "*i32", "hadamard_ptr": "*fp16"}
    pointers |= {f"{name}_ptr": "*i32" for name in ("slot_mapping", "cu", "cu_q", "cu_k", "k_places", "v_places")}
    pointers |= {f"{name}_ptr": "*i32" for name in ("seq_lens", "tail_slots", "sink_slots")}
    pointers |= {f"{name}_ptr": "*bf16" for name in ("tail_k", "tail_v", "sink_k", "sink_v")}
    pointers |= {f"{name}_ptr": "*fp32" for name in ("balance", "centre", "partial", "stats")}
    pointers |= {f"{name}_ptr": "*bf16" for name in ("q", "k", "v", "k_out", "v_out", "k_new", "v_new")}
    pointers |= {"scale": "fp32", "softcap": "fp32"}
    both = dict(DIM=128, WIDE=128, K_BITS=4, V_BITS=2, TOKENS=64, BALANCED=True, CENTRED=True, **offsets)
    kernels = {
        ("kvstrata.store.packed.triton", "store_kernel"): dict(
            TOK=8, K_STEP=0.3, V_STEP=0.9, K_GAIN=1.0, V_GAIN=1.0, ROTATED=128
        ),
        ("kvstrata.attention.packed_decode.triton", "decode_kernel"): dict(
            KV_HEADS=8, GROUP=4, Q_LEN=1, ROWS=16, ROW_BLOCKS=1, BLOCK_SIZE=128, TOK=32, SPLITS=4, BLOCK=128,
            RAGGED=True, WINDOWED=True, CAPPED=True, PRECISION="tf32", TAIL=0, SINK=0,
        ),
        ("kvstrata.attention.packed_prefill.triton", "unpack_kernel"): dict(
            DENSE=False, HEADS=8, BLOCK_SIZE=128, BLOCK=128, WHOLE=True, TAIL=0, SINK=0, PADDED=128
        ),
    }  # fmt: skip
    plain = [(name, dict(constants, TAIL=128, SINK=4)) for name, constants in list(kernels.items())[1:]]
    plain[-1][1]["DENSE"] = True
    store = kernels["kvstrata.store.packed.triton", "store_kernel"]
    plain.append((("kvstrata.store.packed.tail_triton", "tail_kernel"), dict(store, RAGGED=True, TAIL=128, SINKS=4)))
    for (module, kernel), constants in [*kernels.items(), *plain]:
        stores = {"enable_fp_fusion": False} if "store" in module else {}
        used = compile_triton(module, kernel, 90, pointers, both | constants, num_warps=8, **stores)
        assert 0 < used["REG"] <= 255, (kernel, used)
        assert used["SHARED"] <= 99 * 1024, (kernel, used)
    prefill = "kvstrata.attention.packed_prefill"
    assert compile_triton(f"{prefill}.triton", "sums_kernel", 90, pointers, dict(BLOCK=128), num_warps=4)["REG"] <= 64
    pointers |= {f"{name}_ptr": "*fp32" for name in ("parts_lse", "own_lse", "lse")}
    pointers |= {f"{name}_ptr": "*bf16" for name in ("parts", "own", "out")}
    merge = dict(PARTS=4, HEADS=32, DIM=128, WIDE=128, BLOCK=4, LSE=True)
    assert compile_triton(f"{prefill}.split_triton", "merge_kernel", 90, pointers, merge, num_warps=4)["REG"] <= 64
