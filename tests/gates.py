"""Registers, spills and shared memory of kernels, as their compilers said of the same source before.

NVRTC and Triton take seconds for a kernel, and say the same of the same source, headers, options and architecture. What
they said is in data/kernel_usage.json under a hash of all of these, comments aside, and of their versions: whatever
changes, the kernel is compiled again. `make gates` writes the file anew, with what is still true of the old one;
without it, or with an old one, tests only take longer.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import inspect
import json
import os
import re
from collections.abc import Callable
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

from kvstrata import jit
from kvstrata.jit import compiler

FILE = Path(__file__).parent / "data" / "kernel_usage.json"
RECORD = "KVSTRATA_RECORD_GATES"  # in the environment: a file to write, with everything that is asked for
TOKEN = re.compile(r"""("(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])')|//[^\n]*|/\*.*?\*/""", re.DOTALL)


@functools.cache
def _compiler() -> str:
    """NVRTC's version and how it is called."""
    try:
        version = metadata.version("nvidia-cuda-nvrtc")
    except metadata.PackageNotFoundError:  # of a toolkit: which build it is, only this process knows
        version = str(os.getpid())
    return "\0".join([version, *(inspect.getsource(x) for x in (compiler._options, compiler._run_nvrtc))])


def code_of(text: str) -> str:
    """C++ without comments, empty lines and indentation, on which no machine code depends."""
    lines = TOKEN.sub(lambda token: token[1] or " ", text).splitlines()
    return "\n".join(" ".join(line.split()) for line in lines if line.strip())


@functools.cache
def _headers(folder: Path) -> str:
    """Code of all headers that sources in a folder can include."""
    folders = compiler.header_folders(folder / "any.cu")
    return "\0".join(f"{x.name}\0{code_of(x.read_text())}" for one in folders for x in sorted(one.glob("*.cuh")))


def key_of(what: str, source: Path, entry: str, arch: str, *more: str) -> str:
    """Hash of all that the machine code of a kernel depends on, and of `more`; then, for readers, its name."""
    digest = hashlib.sha256()
    for text in (_compiler(), _headers(source.parent), code_of(source.read_text()), entry, arch, what, *more):
        digest.update(text.encode() + b"\0")
    return f"{digest.hexdigest()[:24]} {source.name} {entry} {arch}: {what}"


@functools.cache
def _known() -> dict[str, Any]:
    return json.loads(FILE.read_text()) if FILE.exists() else {}


def _record(path: str, key: str, value: Any) -> None:
    """Add to a file, which other workers write too."""
    with open(path, "a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        known = json.loads(file.read() or "{}") | {key: value}
        file.truncate(0)
        in_order = sorted(known, key=lambda name: name.partition(" ")[::-1])  # by kernel
        lines = (f"{json.dumps(name)}: {json.dumps(known[name])}" for name in in_order)
        file.write("{\n" + ",\n".join(lines) + "\n}\n")


def kept(key: str, compute: Callable[[], Any]) -> Any:
    """What `compute` returns, as JSON has it; it is called only for keys that are not in the file."""
    if key not in _known():
        _known()[key] = compute()
    if path := os.environ.get(RECORD):
        _record(path, key, _known()[key])
    return _known()[key]


def usage(source: Path, entry: str, *, arch: str) -> jit.Usage:
    """Registers, spills, stack and static shared memory of a kernel; `jit.usage` where nothing is kept."""
    return jit.Usage(**kept(key_of("usage", source, entry, arch), lambda: asdict(jit.usage(source, entry, arch=arch))))
