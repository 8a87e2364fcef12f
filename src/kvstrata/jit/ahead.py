"""Compiles kernels ahead of need: several at once, with a progress line.

NVRTC releases Python's lock, so threads compile in parallel, and kernels in the cubin cache are only loaded. Each op
lists the kernels that it launches in a function `kernels_needed` next to the launch.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import torch

from .compiler import cache_folder, compile, known_usage
from .kernel import arch_of, bind_context, load

Named = tuple[Path, str]  # source and entry of a kernel


def compile_ahead(
    kernels: Iterable[Named], arch: str, *, jobs: int | None = None, progress: bool | None = None
) -> list[Named]:
    """Compile those of ``kernels`` that are not in the cubin cache; returns them. Needs no GPU.

    ``jobs``: threads, None for one per core. ``progress``: a line on stderr; None writes it to a terminal only. Raises
    CompileError for the first kernel that does not compile.
    """
    missing = [one for one in dict.fromkeys(kernels) if known_usage(*one, arch=arch) is None]
    if not missing:
        return []
    show = sys.stderr.isatty() if progress is None else progress
    start = time.monotonic()

    def report(done: int) -> None:
        if show:
            print(f"\rkvstrata: compiling kernels, {done} of {len(missing)}", end="", file=sys.stderr, flush=True)

    with ThreadPoolExecutor(min(jobs or os.cpu_count() or 1, len(missing))) as pool:
        futures = [pool.submit(compile, *kernel, arch=arch) for kernel in missing]
        report(0)
        try:
            for done, future in enumerate(as_completed(futures), 1):
                future.result()
                report(done)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    if show:
        summary = f"compiled {len(missing)} kernels for {arch} in {time.monotonic() - start:.1f} s"
        print(f"\rkvstrata: {summary}, kept in {cache_folder()}", file=sys.stderr)
    return missing


_loaded: set[tuple[Named, int]] = set()


def load_ahead(kernels: Iterable[Named], device: torch.device, progress: bool | None = None) -> list[Named]:
    """Compile kernels and load them onto a CUDA device; returns those compiled. Loading again is free."""
    index = torch.cuda.current_device() if device.index is None else device.index
    wanted = [kernel for kernel in dict.fromkeys(kernels) if (kernel, index) not in _loaded]
    if not wanted:
        return []
    arch = arch_of(index)
    compiled = compile_ahead(wanted, arch, progress=progress)
    with torch.cuda.device(index):
        bind_context(index)
        for kernel in wanted:
            load(*kernel, arch)
            _loaded.add((kernel, index))
    return compiled
