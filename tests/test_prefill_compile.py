"""The Triton and Gluon kernels of prefill, compiled ahead of time: no GPU needed, no spills where it matters."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest

from kvstrata.attention.prefill_configs import TABLE, Config, default_of

# Reads lines [dim, causal, packed, ragged, arch, config, path], or of a chunk
# [kernel, arch, dim, first, last, path]; writes what each kernel takes, and its machine code.
SCRIPT = """
import json, subprocess, sys
from pathlib import Path
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.language import NVMMASharedLayout
from kvstrata.attention import cached_gluon, cached_triton, prefill_gluon, prefill_triton
from kvstrata.attention.prefill_configs import Config
from kvstrata.attention.unpack_triton import whole_pages

def compile(dim, causal, packed, ragged, arch, given, path):
    config, wide = Config(*given), triton.next_power_of_2(dim)
    sides = {"q": config.block_m, "k": config.block_n, "v": config.block_n, "out": 64}
    constants = dict(HEADS=16, GROUP=4, DIM=dim, BLOCK_N=config.block_n, CAUSAL=causal, SINKS=False, LSE=True)
    constants["TAIL"] = causal or packed or ragged
    options = dict(num_warps=4 if config.specialize else config.warps)
    if config.registers:
        options["maxnreg"] = config.registers
    if config.specialize:
        kernel, source, layout = prefill_gluon.specialized_kernel, GluonASTSource, f",{NVMMASharedLayout(128, 16, 4)!r}"
        sides["q"] = 64
        consumers = 2 if config.split else config.block_m // 64
        registers = prefill_gluon.registers_of(consumers, config.registers)
        constants |= dict(STAGES=config.stages, CONSUMERS=consumers, PINGPONG=config.pingpong, ORDER=config.order % 2,
                          DIM=wide, SPLIT=config.split, REGISTERS=registers)
    else:
        kernel, source, layout = prefill_triton.prefill_kernel, ASTSource, ""
        options["num_stages"] = config.stages
        constants |= dict(WIDE=wide, BLOCK_M=config.block_m, WINDOWED=False, CAPPED=False, PACKED=packed,
                          TMA=config.tma, PERSISTENT=config.persistent, ORDER=config.order, PRECISION="tf32")
    types, aligned = {}, {}
    for i, name in enumerate(kernel.arg_names):
        side = name.removesuffix("_desc").removesuffix("_ptr")
        if name in constants:
            types[name] = "constexpr"
            continue
        if side in sides and (config.specialize or (config.tma and side != "out")):
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
    write(source(kernel, types, constants, aligned), arch, options, path)

def write(source, arch, options, path):
    built = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    cuobjdump = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    Path(path).with_suffix(".cubin").write_bytes(built.asm["cubin"])
    command = [cuobjdump, "-res-usage", "-sass", Path(path).with_suffix(".cubin")]
    code = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    Path(path).write_text(f"SHARED:{built.metadata.shared} " + code)

def compile_chunk(kernel, arch, dim, first, last, path):
    # those of prefill_attention_cached
    wide, hopper = triton.next_power_of_2(dim), kernel == "specialized_chunk_kernel"
    all = dict(KV_HEADS=8, GROUP=4, DIM=dim, WIDE=wide, BLOCK_M=128, BLOCK_N=128 if arch == 90 else 64, FIRST=first,
               LAST=last, SINKS=last, LSE=last, STAGES=cached_gluon.STAGES, CONSUMERS=2, TIERS=3, TOKENS=64, BLOCK=dim,
               FORMATS=0x324400, CENTRED=True, POSITION_BYTES=4, MANTISSA=0, SCALED=0, PAGE=64, WINDOWED=False,
               CAPPED=False, PRECISION="tf32", MOST=64, REGISTERS=prefill_gluon.registers_of(2, None),
               WHOLE=whole_pages(dim, 64, (4, 3, 2)))
    kernel = getattr(cached_gluon if hopper or kernel == "order_kernel" else cached_triton, kernel)
    constants = {name: value for name, value in all.items() if name in kernel.arg_names}
    kinds = dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "out_ptr", "k_rows_ptr", "v_rows_ptr"), "*bf16")
    kinds |= dict.fromkeys(("acc_ptr", "stats_ptr", "lse_ptr", "sinks_ptr", "centre_ptr", "k_scale_ptr"), "*fp32")
    kinds |= {"v_scale_ptr": "*fp32", "pointers_ptr": "*i64", "hadamard_ptr": "*fp16", "factor": "fp32",
              "softcap": "fp32"}
    kinds |= dict.fromkeys(constants, "constexpr")
    block = f"tensordesc<bf16[1, 1, {cached_gluon.BLOCK_N}, {wide}],{NVMMASharedLayout(128, 16, 4)!r}>"
    kinds |= {"k_desc": block, "v_desc": block}
    types = {name: kinds.get(name, "*i32" if name.endswith("_ptr") else "i32") for name in kernel.arg_names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, (name, kind) in enumerate(types.items())
               if kind[0] == "*" or name.startswith("stride_q")}
    options = {"stage_kernel": dict(num_warps=cached_triton.stage_warps(dim)), "order_kernel": dict(num_warps=1),
               "chunk_kernel": dict(num_warps=8, num_stages=2), "specialized_chunk_kernel": dict(num_warps=4)}
    source = GluonASTSource if hopper else ASTSource
    write(source(kernel, types, constants, aligned), arch, options[kernel.__name__], path)

for line in sys.stdin:
    case = json.loads(line)
    (compile_chunk if isinstance(case[0], str) else compile)(*case)
"""


# ragged: keys end within a block. Entries of the table are compiled for their own length, as they were measured; the
# one for D 128 keeps one register on the stack when the keys are ragged and not causal.
CASES: dict[str, tuple[int, bool, bool, bool, int, Config]] = {
    f"default, D {dim}, sm_{arch}": (dim, True, True, True, arch, default_of(dim, arch == 90))
    for dim, arch in ((64, 80), (96, 80), (256, 80), (128, 90), (256, 90))
}
CASES |= {
    "descriptors": (64, True, False, True, 90, Config(64, 64, 4, 3, tma=True, order=2)),
    "two consumers in turns": (128, False, False, True, 90, Config(128, 128, 4, 2, specialize=True, pingpong=True)),
    "three consumers": (64, True, False, True, 90, Config(192, 64, 4, 3, specialize=True, pingpong=True)),
    "two consumers of the same queries": (64, True, False, True, 90, Config(64, 64, 4, 4, specialize=True, split=True)),
    "one consumer": (64, True, False, True, 90, Config(64, 64, 4, 3, specialize=True, registers=96)),
}
CASES |= {
    f"table {key}": (key[0], key[2], False, key[1] % config.block_n != 0, 90, config)
    for key, config in TABLE.items()
    if config is not None
}
# kernel, architecture, head_dim, first and last chunk
CHUNKS: dict[str, tuple[str, int, int, bool, bool]] = {
    "stage, sm_80": ("stage_kernel", 80, 96, True, True),
    "stage, sm_90": ("stage_kernel", 90, 128, True, True),
    "stage, D 256": ("stage_kernel", 90, 256, True, True),
    "stage, D 256, sm_80": ("stage_kernel", 80, 256, True, True),
    "chunk, sm_80": ("chunk_kernel", 80, 128, False, True),
    "order": ("order_kernel", 90, 128, True, True),
    "first chunk, D 128": ("specialized_chunk_kernel", 90, 128, True, False),
    "last chunk, D 96": ("specialized_chunk_kernel", 90, 96, False, True),
    "only chunk, D 64": ("specialized_chunk_kernel", 90, 64, True, True),
}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What the tools say about every case, compiled in one process without the interpreter."""
    folder = tmp_path_factory.mktemp("prefill")
    paths = {name: folder / f"{i}.txt" for i, name in enumerate(CASES | CHUNKS)}
    lines = "".join(json.dumps([*case, str(paths[name])]) + "\n" for name, case in (CASES | CHUNKS).items())
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], input=lines, capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    return {name: path.read_text() for name, path in paths.items()}


@pytest.mark.parametrize("name", CASES)
def test_kernels_fit(name: str, built: dict[str, str]) -> None:
    """No spills; shared memory that there is; on Hopper warpgroup products, and the copy engine where asked for."""
    *_, arch, config = CASES[name]
    code = built[name]
    used = {what: int(n) for what, n in re.findall(r"(REG|STACK|SHARED):(\d+)", code)}
    assert used["STACK"] == 0, used
    assert used["SHARED"] <= (227 if arch == 90 else 99) * 1024, used
    assert ("HGMMA" in code) == (arch == 90)
    assert ("UTMALDG" in code) == (config.tma or config.specialize)


@pytest.mark.parametrize("name", CHUNKS)
def test_kernels_of_chunks_fit(name: str, built: dict[str, str]) -> None:
    kernel, arch, *_ = CHUNKS[name]
    used = {what: int(n) for what, n in re.findall(r"(REG|STACK|SHARED):(\d+)", built[name])}
    assert used["STACK"] == 0, used
    assert used["SHARED"] <= (227 if arch == 90 else 99) * 1024, used
    assert ("HGMMA" in built[name]) == (arch == 90 and kernel != "order_kernel")
    assert ("UTMALDG" in built[name]) == (kernel == "specialized_chunk_kernel")


def test_the_softmax_runs_beside_the_products(built: dict[str, str]) -> None:
    """In the loop of a consumer: both products are issued, then exponentials, and only then is p v waited for."""
    events = re.findall(r"\b(HGMMA|MUFU\.EX2|WARPGROUP\.DEPBAR)\b", built["two consumers in turns"])
    text = "".join({"HGMMA": "M", "MUFU.EX2": "e", "WARPGROUP.DEPBAR": "w"}[event] for event in events)
    assert re.search(r"M{16}we{60,}w", text), text
