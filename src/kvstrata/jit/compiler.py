"""CUDA C++ source to cubin: NVRTC through cuda-core, kept on disk.

A kernel is one template instantiation, named by its C++ expression. The cache key covers the source, every header
under ``include/``, the options, the architecture and the compiler's version, so an entry never has to be
invalidated. Neither a GPU nor a driver is needed to compile.
"""

from __future__ import annotations

import functools
import hashlib
import io
import os
import re
import warnings
from dataclasses import dataclass
from pathlib import Path

INCLUDE = Path(__file__).parent / "include"
CACHE_BYTES = 1 << 30


class CompileError(RuntimeError):
    """NVRTC refused a kernel; the message holds the compiler's log."""


@dataclass(frozen=True)
class Cubin:
    """Machine code of one kernel: its bytes and the mangled name of its entry."""

    code: bytes
    symbol: str
    arch: str


@dataclass(frozen=True)
class Usage:
    """What one thread or block of a compiled kernel occupies."""

    registers: int
    spill_bytes: int
    stack_bytes: int
    shared_bytes: int


def cache_folder() -> Path:
    """Where cubins are kept: ``$KVSTRATA_CACHE``, else the user's cache folder."""
    if folder := os.environ.get("KVSTRATA_CACHE"):
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvstrata"


def header_folders(source: Path) -> list[Path]:
    """Where a kernel's headers are: ideas that any may use, and those beside it."""
    return [INCLUDE, source.parent] if any(source.parent.glob("*.cuh")) else [INCLUDE]


@functools.lru_cache(maxsize=64)
def _headers_digest(folder: Path) -> bytes:
    digest = hashlib.sha256()
    for where in header_folders(folder / "any.cu"):
        for header in sorted(where.glob("*.cuh")):
            digest.update(header.name.encode() + b"\0" + header.read_bytes() + b"\0")
    return digest.digest()


def _options(source: Path, arch: str, verbose: bool = False):
    from cuda.core import ProgramOptions

    folders = [str(folder) for folder in header_folders(source)]
    return ProgramOptions(
        arch=arch, std="c++17", include_path=folders, lineinfo=True, ptxas_options=["-v"] if verbose else None
    )


def _run_nvrtc(source: Path, entry: str, arch: str, verbose: bool = False) -> tuple[Cubin, str]:
    from cuda.core import Program

    log = io.StringIO()
    try:
        program = Program(source.read_text(), "c++", _options(source, arch, verbose))
        code = program.compile("cubin", name_expressions=(entry,), logs=log)
    except Exception as error:
        raise CompileError(f"{source.name}: cannot compile {entry} for {arch}\n{error}") from error
    return Cubin(bytes(code.code), code.symbol_mapping[entry].decode(), arch), log.getvalue()


def compile(source: Path, entry: str, *, arch: str) -> Cubin:
    """The cubin of ``entry`` (such as ``"store_direct<Copy<16>, 1>"``) for ``arch`` (such as ``"sm_90"``)."""
    from cuda.core.utils import FileStreamProgramCache, make_program_cache_key

    key = make_program_cache_key(
        code=source.read_text(),
        code_type="c++",
        options=_options(source, arch),
        target_type="cubin",
        name_expressions=(entry,),
        extra_digest=_headers_digest(source.parent),
    )
    try:
        cache = FileStreamProgramCache(cache_folder() / "cubin", max_size_bytes=CACHE_BYTES)
    except OSError as error:
        warnings.warn(f"cubins are not kept: {error}; name another folder in KVSTRATA_CACHE", stacklevel=2)
        return _run_nvrtc(source, entry, arch)[0]
    with cache:
        code, symbol = cache.get(key), cache.get(key + b".symbol")
        if code and symbol and code.startswith(b"\x7fELF"):
            return Cubin(code, symbol.decode(), arch)
        cubin, _ = _run_nvrtc(source, entry, arch)
        cache[key], cache[key + b".symbol"] = cubin.code, cubin.symbol.encode()
    return cubin


def usage(source: Path, entry: str, *, arch: str) -> Usage:
    """Registers, spills, stack and static shared memory of ``entry``, from the assembler's report."""
    _, log = _run_nvrtc(source, entry, arch, verbose=True)

    def number(pattern: str) -> int:
        return sum(int(n) for n in re.findall(pattern, log))

    return Usage(
        registers=number(r"Used (\d+) registers"),
        spill_bytes=number(r"(\d+) bytes spill (?:stores|loads)"),
        stack_bytes=number(r"(\d+) bytes stack frame"),
        shared_bytes=number(r"(\d+) bytes smem"),
    )
