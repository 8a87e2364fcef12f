"""Registers, spills and shared memory of kernels, as their compilers said of the same source before.

NVRTC and Triton take seconds for a kernel, and say the same of the same source, headers, options and architecture. What
they said is in data/kernel_usage.json under a hash of all of these and of their versions: whatever changes, the kernel
is compiled again. `make gates` writes the file anew; without it, or with an old one, tests only take longer.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import inspect
import json
import os
from collections.abc import Callable
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

from kvstrata import jit
from kvstrata.jit import compiler

FILE = Path(__file__).parent / "data" / "kernel_usage.json"
RECORD = "KVSTRATA_RECORD_GATES"  # in the environment: write what is not in the file


@functools.cache
def _compiler() -> str:
    """NVRTC's version and how it is called."""
    try:
        version = metadata.version("nvidia-cuda-nvrtc")
    except metadata.PackageNotFoundError:  # of a toolkit: which build it is, only this process knows
        version = str(os.getpid())
    return "\0".join([version, *(inspect.getsource(x) for x in (compiler._options, compiler._run_nvrtc))])


def key_of(what: str, source: Path, entry: str, arch: str, *more: str) -> str:
    """Hash of all that the machine code of a kernel depends on, and of `more`; then, for readers, its name."""
    digest = hashlib.sha256(compiler._headers_digest(source.parent))
    for text in (_compiler(), source.read_text(), entry, arch, what, *more):
        digest.update(b"\0" + text.encode())
    return f"{digest.hexdigest()[:24]} {source.name} {entry} {arch}: {what}"


@functools.cache
def _known() -> dict[str, Any]:
    return json.loads(FILE.read_text()) if FILE.exists() else {}


def _record(key: str, value: Any) -> None:
    """Add to the file, which other workers write too."""
    with FILE.open("a+") as file:
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
        if os.environ.get(RECORD):
            _record(key, _known()[key])
    return _known()[key]


def usage(source: Path, entry: str, *, arch: str) -> jit.Usage:
    """Registers, spills, stack and static shared memory of a kernel; `jit.usage` where nothing is kept."""
    return jit.Usage(**kept(key_of("usage", source, entry, arch), lambda: asdict(jit.usage(source, entry, arch=arch))))
