"""Appends new rows to the plain bucket: the slots after the last token, for all heads in one launch.

    k, v [T, H, D] ──▶ page table[request, head, 0, slot // P], row slot % P,  slot = count[request, head, 0] + j

for row j of a request's new rows. Position and initial importance are also written to the page.

`write_rows` writes the last token of each request, whose count and length already include it (ops/step.py): it changes
no count, and reads on the device which requests the rows belong to.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from importlib.util import find_spec
from types import ModuleType

from kvstrata.backends import resolve

from . import append_cuda, append_reference
from .append_job import Job, Written


@lru_cache(maxsize=1)
def _numba() -> ModuleType | None:
    if find_spec("numba") is None:
        return None
    from . import append_numba

    return append_numba


def write_rows(written: Written, backend: str = "auto") -> None:
    """Write the rows; safe under graph capture. Skips requests without a token and request ids out of range."""
    backend = resolve(backend, written.buckets.device)
    if written.k.shape[0] == 0:
        return
    if backend == "reference":
        loops = _numba()
        (append_reference if loops is None else loops).write_rows(written)
    elif backend == "triton":
        from . import append_triton

        append_triton.write_rows(written)
    else:
        append_cuda.write_rows(written)


def append_rows(job: Job, backend: str = "auto") -> None:
    """Write the rows; ``k`` and ``v`` may have any token and head stride."""
    prepare_append(job, backend)()


def prepare_append(job: Job, backend: str = "auto") -> Callable[[], None]:
    """Function that writes the rows without allocating."""
    backend = resolve(backend, job.buckets.device)
    if job.k.shape[0] == 0:
        return lambda: None
    if backend == "reference":
        return append_reference.prepare_append(job)
    if backend == "triton":
        from . import append_triton

        return append_triton.prepare_append(job)
    return append_cuda.prepare_append(job)
