"""Compiled loops over several threads: they release the GIL, so a thread pool is enough."""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any


@functools.lru_cache(maxsize=4)
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, "kvstrata")


if hasattr(os, "register_at_fork"):  # threads do not survive a fork
    os.register_at_fork(after_in_child=_pool.cache_clear)


def share_out(loop: Callable[..., None], arguments: Sequence[Any], units: int, threads: int) -> None:
    """Run ``loop(*arguments, first, last)`` over ``range(units)``, split among up to ``threads`` threads."""
    threads = max(min(threads, units), 1)
    ends = [-(-units * (i + 1) // threads) for i in range(threads)]
    others = [_pool(threads - 1).submit(loop, *arguments, *part) for part in itertools.pairwise(ends)]
    loop(*arguments, 0, ends[0])
    for other in others:
        other.result()
