"""Triton kernels compiled by another version of Triton than the tests run with, without a GPU: `make test-triton`.

As a plug-in of pytest it writes every distinct launch of the interpreter to the file KVSTRATA_TRITON_LAUNCHES: types,
alignments and constants, which decide what is compiled. As a program it compiles these launches for some architectures.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from importlib import import_module
from typing import Any

LAUNCHES = "KVSTRATA_TRITON_LAUNCHES"
OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg", "enable_fp_fusion")
NAMES = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32", "float64": "fp64", "bool": "i1"}
NAMES |= {f"{kind}int{bits}": f"{kind or 'i'}{bits}" for kind in ("", "u") for bits in (8, 16, 32, 64)}


def encoded(value: Any) -> Any:
    """A constant as JSON: a number or text as it is, another by its name."""
    value = getattr(value, "value", value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, tuple):
        return {"tuple": [encoded(x) for x in value]}
    if hasattr(value, "fn"):
        return {"function": [value.fn.__module__, value.fn.__name__]}
    return {"type": value.name}


def decoded(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    [(kind, given)] = value.items()
    if kind == "tuple":
        return tuple(decoded(x) for x in given)
    if kind == "function":
        return getattr(import_module(given[0]), given[1])
    import triton.language as tl

    return tl.dtype(given)


def describe(function: Any, options: dict[str, Any], arguments: tuple, named: dict[str, Any]) -> str:
    """A launch as a line: kernel, types, constants, alignments, compiler options; as Triton's own key."""
    signature = inspect.signature(function)
    bound = signature.bind(*arguments, **{name: x for name, x in named.items() if name in signature.parameters})
    bound.apply_defaults()
    any_value = options.get("do_not_specialize") or ()
    any_address = (*any_value, *(options.get("do_not_specialize_on_alignment") or ()))
    types, constants, aligned = {}, {}, []
    for name, value in bound.arguments.items():
        if "constexpr" in str(signature.parameters[name].annotation) or value is None:
            constants[name] = encoded(value)
        elif hasattr(value, "data_ptr"):
            types[name] = "*" + NAMES.get(str(value.dtype).removeprefix("torch."), "i8")
            aligned += [name] * (name not in any_address and value.data_ptr() % 16 == 0)
        elif isinstance(value, (bool, float)):
            types[name] = "u1" if isinstance(value, bool) else "fp32"
        elif value == 1 and name not in any_value:
            constants[name] = 1
        else:
            types[name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            aligned += [name] * (name not in any_value and value % 16 == 0)
    compiler = {name: x for name, x in named.items() if name in OPTIONS}
    return json.dumps([function.__module__, function.__name__, types, constants, aligned, compiler], sort_keys=True)


def record(path: str) -> None:
    """Write the launches of this process to a file, to which other workers write too."""
    from triton.runtime import interpreter

    given: dict[Any, dict[str, Any]] = {}
    seen: set[str] = set()
    init, launch = interpreter.InterpretedFunction.__init__, interpreter.GridExecutor.__call__

    def noted(self: Any, function: Any, **options: Any) -> None:
        init(self, function, **options)
        given[function] = options

    def written(self: Any, *arguments: Any, **named: Any) -> Any:
        line = describe(self.fn, given.get(self.fn, {}), arguments, named)
        if line not in seen and self.fn.__module__.startswith("kvstrata."):
            seen.add(line)
            with open(path, "a") as file:
                file.write(line + "\n")
        return launch(self, *arguments, **named)

    interpreter.InterpretedFunction.__init__, interpreter.GridExecutor.__call__ = noted, written


@contextlib.contextmanager
def captured() -> Iterator[Any]:
    """What is written to stderr, where Triton's compiler says what is wrong."""
    before = os.dup(2)
    with tempfile.TemporaryFile("w+") as file:
        os.dup2(file.fileno(), 2)
        try:
            yield file
        finally:
            os.dup2(before, 2)
            os.close(before)


def compiles(arch: int, line: str) -> str | None:
    """None, or what the compiler said."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    module, name, types, constants, aligned, options = json.loads(line)
    kernel = getattr(import_module(module), name)
    place = {name: (i,) for i, name in enumerate(kernel.arg_names)}
    signature = {x: "constexpr" if x in constants else types[x] for x in kernel.arg_names}
    known = {place[x]: decoded(value) for x, value in constants.items()}
    source = ASTSource(kernel, signature, known, {place[x]: [["tt.divisibility", 16]] for x in aligned})
    with captured() as said:
        try:
            triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
        except Exception as error:
            said.seek(0)
            errors = [text for text in said if "error" in text]
            return f"sm_{arch} {module}.{name} {constants}\n    {error!r} {' '.join(errors[:1])}"
    return None


def main(path: str, architectures: list[int]) -> int:
    import triton
    from rich.progress import track

    with open(path) as file:
        lines = sorted(set(file))
    jobs = [(arch, line) for arch in architectures for line in lines]
    with ProcessPoolExecutor() as pool:
        results = pool.map(compiles, *zip(*jobs, strict=True), chunksize=4)
        failed = [x for x in track(results, f"Triton {triton.__version__}", len(jobs)) if x is not None]
    print(*failed, f"Triton {triton.__version__}: {len(jobs)} kernels, {len(failed)} failed", sep="\n")
    return bool(failed)


if LAUNCHES in os.environ:
    os.environ["TRITON_INTERPRET"] = "1"  # before a kernel is decorated
    record(os.environ[LAUNCHES])
if __name__ == "__main__":
    sys.exit(main(sys.argv[1], [int(x) for x in sys.argv[2:]]))
