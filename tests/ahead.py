"""Triton kernels compiled without a GPU: in one process without the interpreter, which the tests of a worker share.

As a program it reads lines of JSON, a function ("module:name") and its arguments, and answers each with its result.
"""

from __future__ import annotations

import ast
import atexit
import functools
import hashlib
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
from typing import Any
from unittest import mock

import gates


@functools.cache
def _process() -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    process = subprocess.Popen([sys.executable, __file__], stdin=PIPE, stdout=PIPE, text=True, env=environment)
    atexit.register(process.communicate)
    return process


def call(function: str, *arguments: Any) -> Any:
    """The result of a function in that process; an AssertionError with its traceback where it raised."""
    process = _process()
    process.stdin.write(json.dumps([function, arguments]) + "\n")
    process.stdin.flush()
    result, error = json.loads(process.stdout.readline() or '[null, "the compiler ended"]')
    assert error is None, error
    return result


def compile_triton(
    module: str, kernel: str, arch: int, types: dict[str, str], constants: dict, **options: int
) -> dict[str, int]:
    """Registers, stack, local and (as SHARED) shared memory of a Triton kernel."""
    return resources(call("ahead:compile_kernel", module, kernel, arch, types, constants, options))


EVENTS = {"HGMMA": "M", "MUFU.EX2": "e", "WARPGROUP.DEPBAR": "w", "UTMALDG": "c"}  # instructions by their letters


def events(listing: str) -> str:
    """Letters of the instructions of a kernel that are in `EVENTS`."""
    return listing.partition("EVENTS:")[2]


def resources(listing: str) -> dict[str, int]:
    return {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL|SHARED):(\d+)", listing)}


# In the process


def compile_kernel(module: str, name: str, arch: int, types: dict, constants: dict, options: dict) -> str:
    from triton.compiler import ASTSource

    kernel = getattr(import_module(module), name)
    signature = {a: "constexpr" if a in constants else types.get(a, "i64") for a in kernel.arg_names}
    return compile_source(ASTSource(kernel, signature, constants), arch, options)


def compile_anew(*arguments: Any) -> str:
    """`compile_kernel`, whatever is noted."""
    with mock.patch.dict(gates._known(), clear=True):
        return compile_kernel(*arguments)


def without_comments() -> None:
    """Let Triton read kernels without comments, docstrings and their place in a file: its keys depend on these."""
    from triton.runtime.jit import JITCallable

    init = JITCallable.__init__

    def init_plain(self: Any, fn: Any) -> None:
        init(self, fn)
        tree = ast.parse(self._src)
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and ast.get_docstring(node) is not None:
                node.body = node.body[1:] or [ast.Pass()]
        self._src, self.starting_line_number = ast.unparse(tree), 1

    JITCallable.__init__ = init_plain


def compile_source(source: Any, arch: int, options: dict, instructions: bool = False) -> str:
    """Registers, stack, local and shared memory of a kernel and, if asked for, its `EVENTS` in order.

    Compiled where Triton's own key of source, options and assembler, and its version, are new to `gates`.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import make_backend

    def listing() -> str:
        built = triton.compile(source, target=target, options=options)
        cuobjdump = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            Path(file.name).write_bytes(built.asm["cubin"])
            command = [cuobjdump, "-res-usage", *["-sass"] * instructions, file.name]
            text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        used = resources(text) | {"SHARED": built.metadata.shared}
        said = [f"{name}:{value}" for name, value in used.items()]
        if instructions:
            words = re.findall(r"\b(?:HGMMA|MUFU\.EX2|WARPGROUP\.DEPBAR|UTMALDG)\b", text)
            said.append("EVENTS:" + "".join(EVENTS[word] for word in words))
        return " ".join(said)

    target = GPUTarget("cuda", arch, 32)
    backend = make_backend(target)
    parsed = backend.parse_options(dict(options) | source.parse_options())
    key = [triton.__version__, source.hash(), backend.hash(), parsed.hash(), str(instructions), str(EVENTS)]
    name = f"{source.fn.__name__} sm_{arch}: {'events' if instructions else 'resources'}"
    return gates.kept(f"{hashlib.sha256('-'.join(key).encode()).hexdigest()[:24]} {name}", listing)


if __name__ == "__main__":
    answers, sys.stdout = sys.stdout, sys.stderr
    without_comments()
    for line in sys.stdin:
        name, given = json.loads(line)
        module, _, function = name.partition(":")
        try:
            answer = [getattr(import_module(module), function)(*given), None]
        except Exception:
            answer = [None, traceback.format_exc()]
        print(json.dumps(answer, default=vars), file=answers, flush=True)
