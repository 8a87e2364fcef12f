"""Compile the prefill kernels for `test_prefill_compile`, in the process of `ahead`."""

from __future__ import annotations

import triton
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.language import NVMMASharedLayout

from ahead import compile_source
from kvstrata.attention.prefill import gluon as prefill_gluon
from kvstrata.attention.prefill import triton as prefill_triton
from kvstrata.attention.prefill.tiles import Config
from kvstrata.attention.prefill_cached import gluon as cached_gluon
from kvstrata.attention.prefill_cached import staging_triton
from kvstrata.attention.prefill_cached import triton as cached_triton
from kvstrata.layout.unpack_triton import whole_pages


def compile_prefill(dim, causal, ragged, tail, arch, given):
    config, wide = Config(*given), triton.next_power_of_2(dim)
    sides = {"q": config.block_m, "k": config.block_n, "v": config.block_n, "out": 64}
    constants = dict(HEADS=16, GROUP=4, DIM=dim, BLOCK_N=config.block_n, CAUSAL=causal, SINKS=False, LSE=True)
    constants["TAIL"] = causal or ragged or tail
    options = dict(num_warps=4 if config.specialize else config.warps)
    if config.registers:
        options["maxnreg"] = config.registers
    if config.specialize:
        kernel, source, layout = prefill_gluon.specialized_kernel, GluonASTSource, f",{NVMMASharedLayout(128, 16, 4)!r}"
        sides["q"] = 64
        consumers = config.block_m // 64
        registers = prefill_gluon.registers_of(consumers, config.registers)
        constants |= dict(
            STAGES=config.stages,
            CONSUMERS=consumers,
            PINGPONG=config.pingpong,
            ORDER=config.order % 2,
            DIM=wide,
            REGISTERS=registers,
        )
    else:
        kernel, source, layout = prefill_triton.prefill_kernel, ASTSource, ""
        options["num_stages"] = config.stages
        constants |= dict(
            WIDE=wide,
            BLOCK_M=config.block_m,
            WINDOWED=False,
            CAPPED=False,
            RAGGED=ragged,
            ORDER=config.order,
            PRECISION="tf32",
        )
    types, aligned = {}, {}
    for i, name in enumerate(kernel.arg_names):
        side = name.removesuffix("_desc").removesuffix("_ptr")
        if name in constants:
            types[name] = "constexpr"
            continue
        if side in sides and config.specialize:
            types[name] = f"tensordesc<fp16[1, 1, {sides[side]}, {wide}]{layout}>"
            continue
        types[name] = "*fp32" if name.endswith("_ptr") else "i32"
        if side in sides:
            types[name] = "*fp16"
        elif side.startswith("cu_"):
            types[name] = "*i32"
        if name in ("factor", "softcap"):
            types[name] = "fp32"
        elif types[name][0] == "*" or name.startswith("stride_"):
            aligned[(i,)] = [["tt.divisibility", 16]]
    return compile_source(source(kernel, types, constants, aligned), arch, options, instructions=True)


def compile_chunk(kernel, arch, dim, beside=False):
    """One of `prefill_attention_cached`."""
    wide, hopper = triton.next_power_of_2(dim), kernel == "specialized_chunk_kernel"
    all = dict(
        KV_HEADS=8,
        GROUP=4,
        DIM=dim,
        WIDE=wide,
        BLOCK_M=128,
        BLOCK_N=128 if arch == 90 else 64,
        SINKS=True,
        LSE=True,
        STAGES=cached_gluon.STAGES,
        CONSUMERS=2,
        TIERS=3,
        TOKENS=64,
        BLOCK=dim,
        FORMATS=0x324400,
        CENTRED=True,
        BALANCED=True,
        POSITION_BYTES=4,
        MANTISSA=0,
        SCALED=0,
        PAGE=64,
        WINDOWED=False,
        CAPPED=False,
        BESIDE=beside,
        PRECISION="tf32",
        MAX_BLOCKS=64,
        REGISTERS=prefill_gluon.registers_of(2, None),
        WHOLE=whole_pages(dim, 64, (4, 3, 2)),
    )
    modules = {"stage_kernel": staging_triton, "chunk_kernel": cached_triton}
    kernel = getattr(modules.get(kernel, cached_gluon), kernel)
    constants = {name: value for name, value in all.items() if name in kernel.arg_names}
    kinds = dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "out_ptr", "k_rows_ptr", "v_rows_ptr"), "*bf16")
    kinds |= dict.fromkeys(("acc_ptr", "stats_ptr", "lse_ptr", "sinks_ptr", "centre_ptr", "k_scale_ptr"), "*fp32")
    kinds |= {
        "v_scale_ptr": "*fp32",
        "balance_ptr": "*i8",
        "pointers_ptr": "*i64",
        "hadamard_ptr": "*fp16",
        "factor": "fp32",
        "softcap": "fp32",
    }
    kinds |= dict.fromkeys(constants, "constexpr")
    block = f"tensordesc<bf16[1, 1, {cached_gluon.BLOCK_N}, {wide}],{NVMMASharedLayout(128, 16, 4)!r}>"
    kinds |= {"k_desc": block, "v_desc": block}
    types = {name: kinds.get(name, "*i32" if name.endswith("_ptr") else "i32") for name in kernel.arg_names}
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, (name, kind) in enumerate(types.items())
        if kind[0] == "*" or name.startswith("stride_q")
    }
    options = {
        "stage_kernel": dict(num_warps=staging_triton.stage_warps(dim)),
        "order_kernel": dict(num_warps=1),
        "chunk_kernel": dict(num_warps=8, num_stages=2),
        "specialized_chunk_kernel": dict(num_warps=4),
    }
    source = GluonASTSource if hopper else ASTSource
    return compile_source(source(kernel, types, constants, aligned), arch, options[kernel.__name__], instructions=True)
