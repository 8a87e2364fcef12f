"""The Triton and Gluon kernels of prefill, compiled ahead of time: no GPU needed, no spills where it matters."""

from __future__ import annotations

import re

import pytest

import ahead
from kvstrata.attention.prefill.configs import TABLE, default_of
from kvstrata.attention.prefill.tiles import Config

HGMMA, UTMALDG = ahead.EVENTS["HGMMA"], ahead.EVENTS["UTMALDG"]  # warpgroup products, the copy engine

# ragged: keys end within a block. Entries of the table are compiled for their own length, as they were measured; the
# one for D 128 keeps one register on the stack when the keys are ragged and not causal.
CASES: dict[str, tuple[int, bool, bool, bool, int, Config]] = {
    f"default, D {dim}, sm_{arch}": (dim, True, True, True, arch, default_of(dim, arch == 90))
    for dim, arch in ((64, 80), (96, 80), (256, 80), (128, 90), (256, 90))
}
CASES |= {
    "two consumers in turns": (128, False, False, True, 90, Config(128, 128, 4, 2, specialize=True, pingpong=True)),
    "three consumers": (64, True, False, True, 90, Config(192, 64, 4, 3, specialize=True, pingpong=True)),
    "one consumer": (64, True, False, True, 90, Config(64, 64, 4, 3, specialize=True, registers=96)),
}
CASES |= {
    f"table {key}": (key[0], key[2], False, key[1] % config.block_n != 0, 90, config)
    for key, config in TABLE.items()
    if config is not None
}
# kernel, architecture, head_dim; new rows outside the cache
CHUNKS: dict[str, tuple[str | int | bool, ...]] = {
    "stage, sm_80": ("stage_kernel", 80, 96),
    "stage, sm_90": ("stage_kernel", 90, 128),
    "stage, D 256, sm_80": ("stage_kernel", 80, 256),
    "chunk, sm_80": ("chunk_kernel", 80, 128),
    "chunk after new rows, sm_80": ("chunk_kernel", 80, 128, True),
    "order": ("order_kernel", 90, 128),
    "chunk, D 128": ("specialized_chunk_kernel", 90, 128),
    "chunk, D 64": ("specialized_chunk_kernel", 90, 64),
    "chunk after new rows, D 96": ("specialized_chunk_kernel", 90, 96, True),
    "chunk after new rows, D 128": ("specialized_chunk_kernel", 90, 128, True),
}


def built(name: str) -> str:
    """Resource usage of a kernel, and its products, copies, exponentials and waits in order."""
    if name in CASES:
        return ahead.call("prefill_ahead:compile_prefill", *CASES[name])
    return ahead.call("prefill_ahead:compile_chunk", *CHUNKS[name])


@pytest.mark.parametrize("name", CASES)
def test_prefill_kernels_compile_within_resource_limits(name: str) -> None:
    """No spills; shared memory that there is; on Hopper warpgroup products, and the copy engine where asked for."""
    *_, arch, config = CASES[name]
    code = built(name)
    used = ahead.resources(code)
    assert used["STACK"] == 0, used
    assert used["SHARED"] <= (227 if arch == 90 else 99) * 1024, used
    assert (HGMMA in ahead.events(code)) == (arch == 90)
    assert (UTMALDG in ahead.events(code)) == config.specialize


@pytest.mark.parametrize("name", CHUNKS)
def test_chunk_kernels_compile_within_resource_limits(name: str) -> None:
    kernel, arch, dim, *_ = CHUNKS[name]
    code = built(name)
    used = ahead.resources(code)
    assert used["STACK"] == 0, used
    portable = 163 if dim == 256 else 99  # a Hadamard matrix of 256 x 256 halves: what sm_80 has, sm_86 and 89 have not
    assert used["SHARED"] <= (227 if arch == 90 else portable) * 1024, used
    assert (HGMMA in ahead.events(code)) == (arch == 90 and kernel != "order_kernel")
    assert (UTMALDG in ahead.events(code)) == (kernel == "specialized_chunk_kernel")


def test_the_softmax_overlaps_the_products() -> None:
    """In the loop of a consumer: both products are issued, then exponentials, and only then is p v waited for."""
    text = ahead.events(built("two consumers in turns")).replace(UTMALDG, "")
    assert re.search(r"M{16}we{60,}w", text), text
