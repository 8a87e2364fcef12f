"""The Triton decode kernels, compiled ahead of time: no GPU needed, and shared memory that every GPU has."""

from __future__ import annotations

import pytest

from test_jit import compile_triton

MODULE = "kvstrata.attention.decode_triton"
TYPES = {f"{name}_ptr": "*i32" for name in ("requests", "length", "table", "count", "offsets")}
TYPES |= {f"{name}_ptr": "*fp32" for name in ("centre", "k_scale", "v_scale", "partial", "stats", "lse", "mass")}
TYPES |= {"q_ptr": "*bf16", "k_ptr": "*bf16", "v_ptr": "*bf16", "pointers_ptr": "*i64"}
TYPES |= {"scale": "fp32", "softcap": "fp32", "window": "i32", "max_length": "i32", "units": "i32"}
CONSTANTS = dict(
    KV_HEADS=8, GROUP=4, Q_LEN=1, DIM=64, WIDE=64, ROWS=16, ROW_BLOCKS=1, TIERS=2, FORMATS=0x4400, TOKENS=64, TOK=64,
    SPLITS=8, BLOCK=64, CENTRED=True, POSITION_BYTES=2, MANTISSA=0, SCALED=0, ORDERED=False, WINDOWED=False,
    CAPPED=False, MASS=False, PRECISION="tf32",
)  # fmt: skip
CASES = {
    "K4V4": (80, {}, {}),
    "K3V2, D 80, speculative, all options": (
        89, {}, dict(DIM=80, WIDE=128, TOK=32, FORMATS=0x2300, BLOCK=16, Q_LEN=4, ORDERED=True, WINDOWED=True,
                     CAPPED=True),
    ),
    "mass over two tiers": (90, {}, dict(TIERS=3, FORMATS=0x224400, MASS=True)),
    "fp8 pages": (
        89, {"k_ptr": "*u8", "v_ptr": "*u8"}, dict(TIERS=0, FORMATS=0, BLOCK=1, MANTISSA=3, SCALED=8, CENTRED=False),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_decode_compiles_ahead_of_time(name: str) -> None:
    arch, types, constants = CASES[name]
    used = compile_triton(
        MODULE, "decode_kernel", arch, TYPES | types, CONSTANTS | constants, num_warps=8, num_stages=1
    )
    assert 0 < used["REG"] <= 255, used
    assert used["DYNAMIC"] <= 48 * 1024, used


@pytest.mark.parametrize("arch", [80, 89, 90])
def test_combine_compiles_ahead_of_time(arch: int) -> None:
    types = {f"{name}_ptr": "*fp32" for name in ("partial", "stats", "sinks", "lse")} | {"out_ptr": "*bf16"}
    constants = dict(
        KV_HEADS=8, GROUP=4, Q_LEN=1, DIM=128, WIDE=128, SPLITS=8, WIDE_SPLITS=8, SINKS=True, LSE=True
    )  # fmt: skip
    used = compile_triton(MODULE, "combine_kernel", arch, types, constants)
    assert used["STACK"] == 0, used
