"""From ``.cu`` source to callable: key, build, cache, load, launch."""

from __future__ import annotations

import functools
import importlib.util

from .ahead import Named, compile_ahead, load_ahead
from .compiler import CompileError, Cubin, Usage, cache_folder, compile, known_usage, usage
from .kernel import (
    Kernel,
    Launch,
    arch_of,
    bind_context,
    capture_id,
    current_device,
    current_stream,
    is_capturing,
    launch_on,
    load,
    use_device,
)

__all__ = [
    "CompileError",
    "Cubin",
    "Kernel",
    "Launch",
    "Named",
    "Usage",
    "arch_of",
    "bind_context",
    "cache_folder",
    "capture_id",
    "compile",
    "compile_ahead",
    "current_device",
    "current_stream",
    "is_capturing",
    "known_usage",
    "launch_on",
    "load",
    "load_ahead",
    "missing",
    "usage",
    "use_device",
]


@functools.lru_cache(maxsize=1)
def missing() -> str | None:
    """Reason why CUDA C++ kernels cannot be compiled on this machine, or None."""
    if importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.core") is None:
        return "cuda-core is not installed: pip install 'kvstrata[cuda]'"
    try:
        from cuda.bindings import nvrtc

        nvrtc.nvrtcVersion()
    except Exception as error:
        return f"NVRTC cannot be loaded ({error}): pip install 'kvstrata[cuda]'"
    return None
