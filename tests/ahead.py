"""Triton kernels compiled without a GPU: in one process without the interpreter, which the tests of a worker share.

As a program it reads lines of JSON, the arguments of `usage_of`, and answers each with what that gives or raises.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import re
import subprocess
import sys
import tempfile
import traceback
from importlib import import_module
from pathlib import Path
from subprocess import PIPE


def usage_of(
    module: str, name: str, arch: int, types: dict[str, str], constants: dict, options: dict[str, int]
) -> dict[str, int]:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = getattr(import_module(module), name)
    signature = {a: "constexpr" if a in constants else types.get(a, "i64") for a in kernel.arg_names}
    built = triton.compile(ASTSource(kernel, signature, constants), target=GPUTarget("cuda", arch, 32), options=options)
    cuobjdump = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(built.asm["cubin"])
        told = subprocess.run([cuobjdump, "-res-usage", file.name], check=True, capture_output=True, text=True).stdout
    used = {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", told)}
    return used | {"DYNAMIC": built.metadata.shared}


@functools.cache
def _process() -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    process = subprocess.Popen([sys.executable, __file__], stdin=PIPE, stdout=PIPE, text=True, env=environment)
    atexit.register(process.communicate)
    return process


def compile_triton(
    module: str, kernel: str, arch: int, types: dict[str, str], constants: dict, **options: int
) -> dict[str, int]:
    """Registers, stack, local and (as DYNAMIC) shared memory of a Triton kernel."""
    process = _process()
    process.stdin.write(json.dumps([module, kernel, arch, types, constants, options]) + "\n")
    process.stdin.flush()
    used, error = json.loads(process.stdout.readline() or '[null, "the compiler ended"]')
    assert error is None, error
    return used


if __name__ == "__main__":
    answers, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        try:
            answer = [usage_of(*json.loads(line)), None]
        except Exception:
            answer = [None, traceback.format_exc()]
        print(json.dumps(answer), file=answers, flush=True)
