"""Machine code that is suspected: a pair of registers read sooner after it is cleared than elsewhere.

``CS2R R50, SRZ`` clears two registers. Where a predicated instruction stood between, NVRTC 13.0 let ``ISETP`` read them
five cycles later; six is the least that it leaves otherwise. On an H200 kernels with five ended in illegal accesses, or
wrote wrong pages in half of all runs of a test, and their likes with more did neither: a pointer was tested before
its null was there. So kernels test a flag instead. The stall counts are in bits 105 to 108 of an instruction.
"""

from __future__ import annotations

import inspect
import re
import subprocess
from pathlib import Path

import pytest
import torch
import triton

import gates
from kvstrata import jit
from kvstrata.attention.decode import cuda as decode_cuda
from kvstrata.attention.decode import stages
from kvstrata.layout import Format
from kvstrata.quant import op as quantize_op

NVDISASM = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
CYCLES = 6  # the least that it leaves elsewhere
LINE = re.compile(r"\s+/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;\s+/\* (0x[0-9a-f]{16}) \*/\n\s+/\* (0x[0-9a-f]{16}) \*/")


def instructions(source: Path, entry: str, folder: Path) -> list[tuple[str, int]]:
    """Text and stall count of every instruction."""
    file = folder / "kernel.cubin"
    file.write_bytes(jit.compile(source, entry, arch="sm_90").code)
    listing = subprocess.run([NVDISASM, "-c", "-hex", "-ndf", file], capture_output=True, text=True, check=True).stdout
    return [(text, int(high, 16) >> 41 & 15) for text, _, high in LINE.findall(listing)]


def read_too_early(code: list[tuple[str, int]]) -> list[str]:
    found = []
    for i, (text, stall) in enumerate(code):
        match = re.match(r"CS2R R(\d+), SRZ", text)
        if not match:
            continue
        pair, cycles = {f"R{int(match[1])}", f"R{int(match[1]) + 1}"}, stall
        for after, wait in code[i + 1 :]:
            written, _, read = after.partition(",")
            if cycles >= CYCLES or "BRA" in after or "EXIT" in after:
                break
            if pair & set(re.findall(r"\bR\d+", read)):
                found.append(f"{text}, {cycles} cycles before {after}")
            if pair & set(re.findall(r"\bR\d+", written)) and not after.startswith("@"):
                break
            cycles += wait
    return found


def test_the_search_finds_a_known_pattern() -> None:
    code = [
        ("CS2R R50, SRZ", 2),
        ("@P2 IMAD.WIDE R50, R23, 0x100, R54", 3),
        ("ISETP.NE.U32.AND P3, PT, R50, RZ, PT", 1),
    ]
    assert len(read_too_early(code)) == 1
    assert not read_too_early([code[0], ("FADD R1, R2, R3", 5), code[2]])
    assert not read_too_early([code[0], ("MOV R50, R2", 4), code[2]])


KERNELS = [
    *(
        (quantize_op.SOURCE, quantize_op.entry_of(Format(bits, bits, dim), dtype))
        for bits in (2, 3, 4, 8)
        for dim, dtype in ((128, torch.bfloat16), (64, torch.float16))
    ),
    *(
        (quantize_op.SOURCE, quantize_op.entry_of(format, torch.bfloat16, by_address=True))
        for format in (Format(4, 4, 128), Format(4, 4, 64, 16), Format(3, 3, 64, 16), Format(2, 2, 64, 16))
    ),
    *(
        (decode_cuda.FOLDER / "decode.cu", stages.decode_entry(formats, torch.bfloat16, 1, "sm_90"))
        for formats in [tuple(Format.parse(name, 128) for name in ("K16V16", "K4V4", "K3V3", "K2V2"))]
    ),
]


@pytest.mark.parametrize(("source", "entry"), KERNELS, ids=lambda x: str(x).split("/")[-1])
def test_zeroed_registers_are_not_read_too_early(source: Path, entry: str, tmp_path: Path) -> None:
    def searched() -> list:
        code = instructions(source, entry, tmp_path)
        return [len(code), read_too_early(code)]

    search = [inspect.getsource(x) for x in (instructions, read_too_early)]
    key = gates.key_of("read too early", source, entry, "sm_90", triton.__version__, LINE.pattern, str(CYCLES), *search)
    count, early = gates.kept(key, searched)
    assert count > 500
    assert not early
