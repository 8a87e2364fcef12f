"""Kernels compiled before they are asked for: the tuned ones, and what the ops choose by themselves."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path

import torch

from kvstrata import jit
from kvstrata.jit import tuned

from . import problems
from .compiler import build, by_triton
from .gates import Needs
from .problems import Problem
from .tables import arch_of


@dataclass
class Warmed:
    """Kernels that were compiled or already cached, and those that failed."""

    arch: str
    tables: list[str]
    kernels: int = 0
    failed: dict[str, str] = field(default_factory=dict)

    def count(self, kernel: Needs, error: str | None) -> None:
        if error is None:
            self.kernels += 1
        else:
            self.failed[kernel.entry] = error


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
            for kernel in _kernels(problem, choice):
                unique.setdefault((str(kernel.source), kernel.entry), kernel)
    return list(unique.values())


def _kernels(problem: Problem, choice: tuned.Choice) -> list[Needs]:
    return [] if problem.invalid(choice) else problem.kernels(choice)


def compile_all(wanted: list[Needs], jobs: int | None, result: Warmed) -> Iterator[Needs]:
    """Compile in `jobs` processes (None: as many as there are cores); yields a kernel when it is done."""
    jobs = min(os.cpu_count() or 1, len(wanted)) if jobs is None else jobs
    if jobs == 0:
        for kernel in wanted:
            result.count(kernel, _compile(str(kernel.source), kernel.entry, result.arch))
            yield kernel
        return
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        running = {pool.submit(_compile, str(kernel.source), kernel.entry, result.arch): kernel for kernel in wanted}
        for done in as_completed(running):
            result.count(running[done], done.result())
            yield running[done]


def _compile(source: str, entry: str, arch: str) -> str | None:
    """Into the cache of cubins, or Triton's; what went wrong, or None."""
    try:
        if by_triton(source):
            build(source, entry, arch)
        else:
            jit.compile(Path(source), entry, arch=arch)
    except jit.CompileError as error:
        return str(error)
    return None
