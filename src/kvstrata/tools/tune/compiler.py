"""Compiles kernels ahead of time in other processes: the search waits for one only if it is not done yet."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from pathlib import Path
from types import TracebackType

from kvstrata import jit

from .gates import Needs

Name = tuple[Path, str]


def is_triton(source: str | Path) -> bool:
    """True if a kernel is compiled by Triton, not NVRTC."""
    return Path(source).suffix == ".py"


def build(source: str, entry: str, arch: str) -> jit.Usage:
    """Compile a kernel into the cubin cache, or Triton's, and return its resource usage."""
    try:
        if is_triton(source):
            from kvstrata.attention.prefill import space as prefill_space

            return prefill_space.usage(entry, arch)
        return jit.usage(Path(source), entry, arch=arch)
    except jit.CompileError as error:
        text = str(error)
    raise jit.CompileError(text)  # without the frames that hold the compiler's objects


class Compiler:
    """Compiler for one architecture with `jobs` processes; 0 compiles in this process, on request."""

    def __init__(self, arch: str, jobs: int | None = None) -> None:
        self.arch = arch
        self.jobs = max((os.cpu_count() or 1) - 2, 1) if jobs is None else jobs
        self._pool: ProcessPoolExecutor | None = None
        self._running: dict[Name, Future[jit.Usage]] = {}
        self._done: dict[Name, jit.Usage] = {}

    def start(self, kernels: Iterable[Needs]) -> list[Future[jit.Usage]]:
        """Start compiling kernels that are not cached, each once."""
        if not self.jobs:
            return []
        for kernel in kernels:
            name = (kernel.source, kernel.entry)
            if name in self._running or name in self._done:
                continue
            if not is_triton(kernel.source) and (known := jit.known_usage(*name, arch=self.arch)):
                self._done[name] = known
                continue
            if self._pool is None:
                self._pool = ProcessPoolExecutor(self.jobs, mp_context=multiprocessing.get_context("spawn"))
            self._running[name] = self._pool.submit(build, str(kernel.source), kernel.entry, self.arch)
        return list(self._running.values())

    def is_ready(self, kernel: Needs) -> bool:
        """True if `usage` returns without waiting for another process."""
        name = (kernel.source, kernel.entry)
        return name not in self._running or self._running[name].done()

    def wait_for_any(self, seconds: float | None = None) -> bool:
        """Wait until another kernel is done; False if none is in progress, or none was done in time."""
        running = [future for future in self._running.values() if not future.done()]
        return bool(running and wait(running, seconds, FIRST_COMPLETED).done)

    @property
    def progress(self) -> tuple[int, int]:
        """Number of kernels that are done, and of all requested."""
        done = sum(future.done() for future in self._running.values())
        return done + len(self._done), len(self._running) + len(self._done)

    def usage(self, kernel: Needs, seconds: float | None = None) -> jit.Usage:
        """Resource usage of a kernel; CompileError if it does not compile, TimeoutError if it is not done in time."""
        name = (kernel.source, kernel.entry)
        if name in self._running:
            return self._running[name].result(seconds)
        if name not in self._done:
            self._done[name] = build(str(kernel.source), kernel.entry, self.arch)
        return self._done[name]

    def __enter__(self) -> Compiler:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._pool is None:
            return
        workers = list((self._pool._processes or {}).values())
        self._pool.shutdown(wait=False, cancel_futures=True)
        if not all(future.done() for future in self._running.values()):
            for worker in workers:  # their results are no longer needed; a cubin is written atomically
                worker.terminate()
