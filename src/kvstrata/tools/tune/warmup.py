"""Kernels compiled before they are asked for: the tuned ones, and what the ops choose by themselves."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch

from kvstrata import jit
from kvstrata.jit import tuned

from . import problems
from .compiler import Compiler
from .gates import Needs
from .tables import arch_of


@dataclass
class Warmed:
    """Kernels that were compiled or already cached, and those that failed."""

    arch: str
    tables: list[str]
    kernels: int = 0
    failed: dict[str, str] = field(default_factory=dict)


def tables_for(arch: str, gpu: str | None) -> list[str]:
    """Slugs of the GPUs whose tables are meant: the one named, or all of the architecture."""
    if gpu is not None:
        return [gpu]
    paths = [p for folder in (tuned.SHIPPED, tuned.user_folder()) for p in sorted(folder.glob("*.json"))]
    return sorted({path.stem for path in paths if arch_of(path) == arch})


def kernels(ops: Iterable[str], arch: str, gpus: Iterable[str]) -> list[Needs]:
    """Every kernel of the top configurations of each entry and of the defaults, each once."""
    unique: dict[tuple[str, str], Needs] = {}
    for op in ops:
        known = {problem.case: problem for problem in problems.find(op, arch, torch.device("cpu"), "cuda")}
        entries = [entry for gpu in gpus for entry in tuned.table(gpu).get(op, [])]
        wanted = [
            (known[entry["case"]], choice) for entry in entries if entry["case"] in known for choice in entry["top"]
        ]
        for problem, choice in [*wanted, *((problem, problem.default) for problem in known.values())]:
            for kernel in [] if problem.invalid(choice) else problem.kernels(choice):
                unique.setdefault((str(kernel.source), kernel.entry), kernel)
    return list(unique.values())


def compile_all(wanted: list[Needs], jobs: int | None, result: Warmed) -> Iterator[Needs]:
    """Compile in `jobs` processes (None: as many as there are cores); yields a kernel when it is done."""
    jobs = min(os.cpu_count() or 1, len(wanted)) if jobs is None else jobs
    with Compiler(result.arch, jobs) as compiler:
        compiler.ahead(wanted)
        for kernel in wanted:
            try:
                compiler.usage(kernel)
                result.kernels += 1
            except jit.CompileError as error:
                result.failed[kernel.entry] = str(error)
            yield kernel
