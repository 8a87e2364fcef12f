"""Kernels compiled ahead in other processes: the search waits for one only if it is not done yet."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path
from types import TracebackType

from kvstrata import jit
from kvstrata.tune.gates import Needs


def _build(source: str, entry: str, arch: str) -> jit.Usage:
    """What a kernel takes; its cubin is in the cache afterwards."""
    try:
        used = jit.usage(Path(source), entry, arch=arch)
        jit.compile(Path(source), entry, arch=arch)
    except jit.CompileError as error:
        text = str(error)
    else:
        return used
    raise jit.CompileError(text)  # without the frames that hold the compiler's objects


class Compiler:
    """For one architecture; `jobs` processes, none: in this one, when asked."""

    def __init__(self, arch: str, jobs: int | None = None) -> None:
        self.arch = arch
        self.jobs = max((os.cpu_count() or 1) - 2, 1) if jobs is None else jobs
        self._pool: ProcessPoolExecutor | None = None
        self._ahead: dict[tuple[Path, str], Future[jit.Usage]] = {}
        self._done: dict[tuple[Path, str], jit.Usage] = {}

    def ahead(self, kernels: Iterable[Needs]) -> list[Future[jit.Usage]]:
        """Begin with these; one per different kernel."""
        if not self.jobs:
            return []
        for kernel in kernels:
            if (name := (kernel.source, kernel.entry)) not in self._ahead:
                if self._pool is None:
                    self._pool = ProcessPoolExecutor(self.jobs, mp_context=multiprocessing.get_context("spawn"))
                self._ahead[name] = self._pool.submit(_build, str(kernel.source), kernel.entry, self.arch)
        return list(self._ahead.values())

    def usage(self, kernel: Needs) -> jit.Usage:
        """What a kernel takes; CompileError for one that cannot be compiled."""
        name = (kernel.source, kernel.entry)
        if name in self._ahead:
            return self._ahead[name].result()
        if name not in self._done:
            self._done[name] = _build(str(kernel.source), kernel.entry, self.arch)
        return self._done[name]

    def __enter__(self) -> Compiler:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
