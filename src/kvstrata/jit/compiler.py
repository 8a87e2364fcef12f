"""CUDA C++ source to cubin: NVRTC through cuda-core, cached on disk.

A kernel is one template instantiation, named by its C++ expression. The cache key covers the source, every header
under ``include/``, the options, the architecture and the compiler's version, so an entry never has to be
invalidated. Neither a GPU nor a driver is needed to compile.
"""

from __future__ import annotations

import functools
import hashlib
import io
import json
import os
import re
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path

INCLUDE = (Path(__file__).parent / "include", Path(__file__).parents[1] / "layout")
CACHE_BYTES = 1 << 30


class CompileError(RuntimeError):
    """NVRTC could not compile a kernel; the message contains its log."""


@dataclass(frozen=True)
class Cubin:
    """Machine code of one kernel, and the mangled name of its entry."""

    code: bytes
    symbol: str
    arch: str


@dataclass(frozen=True)
class Usage:
    """Registers, spills and stack per thread, and shared memory per block, of a compiled kernel."""

    registers: int
    spill_bytes: int
    stack_bytes: int
    shared_bytes: int


def cache_folder() -> Path:
    """Folder of compiled kernels: ``$KVSTRATA_CACHE``, or ``kvstrata`` in the user's cache folder."""
    if folder := os.environ.get("KVSTRATA_CACHE"):
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvstrata"


def header_folders(source: Path) -> list[Path]:
    """Include folders of a kernel: the shared ones, and its own folder if it has headers."""
    return [*INCLUDE, source.parent] if any(source.parent.glob("*.cuh")) else [*INCLUDE]


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
    """Cubin of ``entry`` (such as ``"store_direct<Copy<16>, 1>"``) for ``arch`` (such as ``"sm_90"``)."""
    return _cached(source, entry, arch, with_usage=False)[0]


def usage(source: Path, entry: str, *, arch: str) -> Usage:
    """Registers, spills, stack and static shared memory of ``entry``, from the assembler's report."""
    used = _cached(source, entry, arch, with_usage=True)[1]
    assert used is not None
    return used


def known_usage(source: Path, entry: str, *, arch: str) -> Usage | None:
    """Cached `usage`, or None; compiles nothing."""
    from cuda.core.utils import FileStreamProgramCache

    if not (folder := cache_folder() / "cubin").is_dir():
        return None
    key = _key(source, entry, arch)
    with FileStreamProgramCache(folder, max_size_bytes=CACHE_BYTES) as cache:
        used = cache.get(key + b".usage") if cache.get(key) else None
    return Usage(**json.loads(used)) if used else None


def _key(source: Path, entry: str, arch: str) -> bytes:
    from cuda.core.utils import make_program_cache_key

    return make_program_cache_key(
        code=source.read_text(),
        code_type="c++",
        options=_options(source, arch),
        target_type="cubin",
        name_expressions=(entry,),
        extra_digest=_headers_digest(source.parent),
    )


def _cached(source: Path, entry: str, arch: str, with_usage: bool) -> tuple[Cubin, Usage | None]:
    """Cached cubin and usage; compiles and caches them first if needed."""
    from cuda.core.utils import FileStreamProgramCache

    key = _key(source, entry, arch)
    try:
        cache = FileStreamProgramCache(cache_folder() / "cubin", max_size_bytes=CACHE_BYTES)
    except OSError as error:
        warnings.warn(f"cubins are not cached: {error}; name another folder in KVSTRATA_CACHE", stacklevel=3)
        cubin, log = _run_nvrtc(source, entry, arch, True)
        return cubin, _usage(log)
    with cache:
        code, symbol, used = cache.get(key), cache.get(key + b".symbol"), cache.get(key + b".usage")
        if code and symbol and code.startswith(b"\x7fELF") and (used or not with_usage):
            return Cubin(code, symbol.decode(), arch), Usage(**json.loads(used)) if used else None
        cubin, log = _run_nvrtc(source, entry, arch, True)
        measured = _usage(log)
        cache[key], cache[key + b".symbol"] = cubin.code, cubin.symbol.encode()
        cache[key + b".usage"] = json.dumps(asdict(measured)).encode()
    return cubin, measured


def _usage(log: str) -> Usage:
    def number(pattern: str) -> int:
        return sum(int(n) for n in re.findall(pattern, log))

    return Usage(
        registers=number(r"Used (\d+) registers"),
        spill_bytes=number(r"(\d+) bytes spill (?:stores|loads)"),
        stack_bytes=number(r"(\d+) bytes stack frame"),
        shared_bytes=number(r"(\d+) bytes smem"),
    )
