"""Compiled loops over several threads: torch's own, by OpenMP, or those of a pool, since loops release the GIL."""

from __future__ import annotations

import ctypes
import functools
import itertools
import os
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

Team = Callable[[int, int, int, int], None]
PARTS = 4  # parts of a loop for each thread of OpenMP, which may start late or be interrupted


@functools.lru_cache(maxsize=4)
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, "kvstrata")


_forked = False


def openmp() -> Team | None:
    """``GOMP_parallel(function, data, threads, 0)`` of the OpenMP library that torch has loaded.

    All threads call ``function(data)``, both given as addresses. None if torch has no such library, or after a fork,
    which its threads do not survive.
    """
    return None if _forked else _gomp_parallel()


@functools.lru_cache(maxsize=1)
def _gomp_parallel() -> Team | None:
    if "OpenMP" not in torch.__config__.parallel_info().partition("ATen parallel backend:")[2]:
        return None
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:  # not Linux
        return None
    paths = set(re.findall(r"/\S*/lib(?:gomp|iomp5|omp)\b[^/\s]*$", maps, re.MULTILINE))
    of_torch = {path for path in paths if Path(path).parent.parent.name == "torch" or "torch.libs" in path}
    chosen = of_torch or paths
    if len(chosen) != 1:
        return None
    run: Any = getattr(ctypes.CDLL(chosen.pop()), "GOMP_parallel", None)
    if run is not None:
        run.argtypes, run.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint], None
    return run


def _after_fork() -> None:
    global _forked
    _pool.cache_clear()
    _forked = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def share_out(loop: Callable[..., None], arguments: Sequence[Any], units: int, threads: int) -> None:
    """Run the compiled ``loop(*arguments, first, last)`` over ``range(units)``, split among up to ``threads`` threads.

    By OpenMP if possible: after an operation of torch its threads keep their cores busy for a while, waiting for the
    next one, and those of a pool would compete with them.
    """
    threads = max(min(threads, units), 1)
    if threads == 1:
        loop(*arguments, 0, units)
    elif (team := openmp()) is not None:
        from .region_numba import region

        function, data = region(loop, arguments, units, -(-units // (threads * PARTS)))
        team(function, data.ctypes.data, threads, 0)
    else:
        ends = [-(-units * (i + 1) // threads) for i in range(threads)]
        others = [_pool(threads - 1).submit(loop, *arguments, *part) for part in itertools.pairwise(ends)]
        loop(*arguments, 0, ends[0])
        for other in others:
            other.result()
