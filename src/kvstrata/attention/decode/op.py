"""``decode_attention``: a few queries of each request over all tokens of its cache, in one pass over the bytes.

Arguments are checked here and become a `Job`, the input of every backend: ``reference.decode``, ``numba.decode``,
``triton.decode`` and ``cuda.decode`` return (out, lse, mass), with None for results that were not requested.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

import torch

from kvstrata.attention.arguments import DTYPES, check_positive, check_sinks, check_sliding_window, kernel_sinks
from kvstrata.attention.output import AttentionOutput
from kvstrata.cache.storage.views import BucketedCacheLayer
from kvstrata.cache.tiered_cache import TieredCache
from kvstrata.checks import whole_numbers
from kvstrata.store.paged_cache import PagedCache

from .job import Job, Result
from .plan import DecodePlan

BACKENDS = ("auto", "reference", "numba", "triton", "cuda")
GPU_BACKENDS = ("triton", "cuda")  # observe inside their kernels
Cache = TieredCache | PagedCache


@functools.cache
def _module(backend: str) -> ModuleType:
    """Module of a backend, imported at first use: its dependencies may not be installed."""
    return import_module(f"{__package__}.{backend}")


@functools.cache
def _has_numba() -> bool:
    return find_spec("numba") is not None


@functools.cache
def _repeat(backend: str, device: str) -> ModuleType | None:
    """Module of repeated eager calls, if CUDA C++ may run them."""
    if backend != "cuda" and (backend != "auto" or device != "cuda"):
        return None
    try:
        return _module("repeat")
    except ImportError:
        return None


def missing(backend: str, job: Job) -> str | None:
    """Reason why ``backend`` cannot run this job, or None when it can."""
    from kvstrata.backends import missing as missing_on_device

    if backend == "numba":
        return _module("numba").missing(job) if _has_numba() else "numba is not installed"
    if reason := missing_on_device(backend, job.q.device):
        return reason
    if backend == "cuda":
        try:
            return _module("cuda").missing(job)
        except ImportError as error:
            return f"cuda cannot be imported: {error}"
    return None


def _choose(backend: str, job: Job) -> str:
    if backend != "auto":
        if reason := missing(backend, job):
            raise RuntimeError(f"backend: {reason}")
        return backend
    ranked = ("cuda", "triton") if job.q.device.type == "cuda" else ("numba",)
    return next((name for name in ranked if missing(name, job) is None), "reference")


def requests_of(cache: Cache, requests: Sequence[int] | None) -> list[int]:
    """Requests of a call: all in use, or those given; errors name the argument."""
    if not isinstance(cache, (TieredCache, PagedCache)):
        raise TypeError(f"cache: expected a TieredCache or a PagedCache, got {type(cache).__name__}")
    known = cache._active if isinstance(cache, TieredCache) else range(cache.block_table.shape[0])
    if requests is None:
        return sorted(known)
    given = whole_numbers("requests", requests)
    for request in given:
        if request not in known:
            raise ValueError(f"requests: expected some of {tuple(sorted(known))}, got {request}")
    return given


def capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def longest(cache: TieredCache, layer: int, requests: Sequence[int]) -> int:
    """Length of the longest request; during capture the maximum, since requests may be longer at replay."""
    if capturing(cache.device):
        return cache.max_tokens
    return int(cache._lengths[list(requests), layer].max(initial=0))


def check_query(q: torch.Tensor, cache: Cache) -> None:
    """Check inner stride, dtype and device of q."""
    if q.stride(-1) != 1:
        raise ValueError(f"q: expected an inner stride of 1, got {q.stride(-1)}")
    if isinstance(cache, TieredCache):
        dtypes: tuple[torch.dtype, ...] = (cache.dtype,)
    else:
        dtypes = DTYPES if cache.fp8 else (cache.k.dtype,)
    if q.dtype not in dtypes:
        raise TypeError(f"q: expected {' or '.join(map(str, dtypes))} for this cache, got {q.dtype}")
    if q.device != cache.device:
        raise ValueError(f"q: expected a tensor on {cache.device}, where the cache is, got {q.device}")


def source_of(
    cache: Cache, layer: int, requests: list[int]
) -> tuple[BucketedCacheLayer | None, PagedCache | None, int]:
    """Buckets of a layer or the paged cache, and the longest length."""
    if isinstance(cache, TieredCache):
        return cache.bucket_views(layer), None, longest(cache, layer, requests)
    if layer != 0:
        raise ValueError(f"layer: expected 0, a PagedCache is one layer, got {layer!r}")
    return None, cache, cache.max_length


def _check_shape(q: torch.Tensor, cache: Cache, rows: int) -> None:
    if not isinstance(q, torch.Tensor):
        raise TypeError(f"q: expected a tensor, got {type(q).__name__}")
    heads, dim = cache.kv_heads, cache.head_dim
    if q.dim() != 4 or q.shape[3] != dim or q.shape[2] == 0 or q.shape[2] % heads:
        raise ValueError(f"q: expected [requests, q_len, a multiple of {heads}, {dim}], got shape {tuple(q.shape)}")
    if q.shape[0] != rows:
        raise ValueError(f"q: expected {rows} rows, one per request, got {q.shape[0]}")
    if q.shape[1] == 0:
        raise ValueError("q: expected at least one query, got q_len 0")


def _job(
    q: torch.Tensor,
    cache: Cache,
    layer: int,
    requests: Sequence[int] | None,
    scale: float | None,
    sliding_window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
    return_lse: bool,
    return_mass: bool,
) -> Job:
    rows = requests_of(cache, requests)
    _check_shape(q, cache, len(rows))
    check_query(q, cache)
    check_positive("scale", scale)
    check_positive("softcap", softcap)
    check_sliding_window(sliding_window)
    check_sinks(sinks, q.shape[2], q.device)
    sinks = None if sinks is None else kernel_sinks(sinks)
    scale = q.shape[3] ** -0.5 if scale is None else float(scale)
    buckets, paged, max_length = source_of(cache, layer, rows)
    job = (cache.kv_heads, max_length, scale, sliding_window, softcap, sinks, return_lse, return_mass)
    owner = cache if isinstance(cache, TieredCache) else None
    return Job(q.detach(), buckets, paged, rows, *job, owner=owner)


def decode_attention(
    q: torch.Tensor,
    cache: TieredCache | PagedCache,
    layer: int = 0,
    *,
    requests: Sequence[int] | None = None,
    scale: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    return_lse: bool = False,
    return_mass: bool = False,
    plan: DecodePlan | None = None,
    backend: str = "auto",
) -> torch.Tensor | AttentionOutput:
    """Attention of the newest queries of each request over all tokens in its cache, whatever their tier.

    Args:
        q: ``[B, q_len, Hq, D]`` in the cache's dtype (float32, float16 or bfloat16 over fp8 blocks). Hq is a multiple
            of the cache's KV heads, the inner stride is 1, other strides are free.
        cache: `TieredCache` or `PagedCache` that already holds K and V of the q_len new tokens.
        layer: layer of the cache; 0 for a PagedCache.
        requests: request of each row of q; None is all in use, ascending.
        scale: factor of the scores; None is ``D ** -0.5``.
        sliding_window: number of positions that a query sees, including its own; None is all.
        softcap: cap c of the scores, which become ``c * tanh(score / c)``; None is no cap.
        sinks: ``[Hq]``, attention-sink logit per head, added to the softmax denominator.
        return_lse: also return the log-sum-exp of the scores, including the sink.
        return_mass: also return the attention mass that `TieredCache.update_importance` takes.
        plan: `DecodePlan` of the step, shared by all layers; None builds one for this call. A plan that observes also
            adds the mass to the importance of the cache's tokens, in place, in the layers that it selects.
        backend: ``auto``, ``reference``, ``numba`` (CPU), ``triton`` or ``cuda``.

    Query i is at position ``length - q_len + i`` and sees no later one. A query that sees no token yields zeros and an
    lse of -inf (with a sink: its logit). Nothing else is modified. Safe under CUDA-graph capture on a GPU backend, once
    an eager call of the same shape has compiled its kernels.

    Returns:
        out in q's shape and dtype. With ``return_lse`` or ``return_mass`` an `AttentionOutput` with lse float32
        ``[B, q_len, Hq]`` and mass float32 ``[B, Hkv, max length]``: by position, the softmax weight of each token,
        summed over queries and over the query heads of its KV head, 0 for positions without a token. The last size is
        ``cache.max_tokens`` in a captured call, and the capacity of the block_table for a PagedCache.

    Raises:
        ValueError, TypeError: an argument does not fit; the message names it.
        RuntimeError: the backend cannot run here.

    Example:
        >>> cache = kvstrata.TieredCache(1, 2, 64, budget=0.25, recent_tokens=32, page_tokens=16, dtype=torch.float32)
        >>> cache.append(0, *torch.randn(2, 1000, 2, 64))
        >>> result = kvstrata.decode_attention(torch.randn(1, 1, 8, 64), cache, return_mass=True)
        >>> result.out.shape, result.mass.shape
        (torch.Size([1, 1, 8, 64]), torch.Size([1, 2, 1000]))
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend: expected one of {BACKENDS}, got {backend!r}")
    repeat = None
    plain = sliding_window is None and softcap is None and sinks is None and not (return_lse or return_mass)
    if plain and plan is None and type(cache) is TieredCache:
        repeat = _repeat(backend, cache.device.type)
        if repeat is not None and (last := cache._decoded) is not None:
            result = last.repeat(q, cache, layer, requests, scale)
            if result is not None:
                return result
    job = _job(q, cache, layer, requests, scale, sliding_window, softcap, sinks, return_lse, return_mass)
    if plan is not None:
        if not isinstance(plan, DecodePlan):
            raise TypeError(f"plan: expected a DecodePlan or None, got {type(plan).__name__}")
        plan.check(job, cache)
        job = job._replace(plan=plan, layer=layer, observation=plan.observation)
    chosen = _choose(backend, job)
    out, lse, mass = run(job, chosen)
    if repeat is not None and chosen == "cuda" and not capturing(q.device):
        repeat.remember(q, cache, layer, requests, scale, job.requests)
    return AttentionOutput(out, lse, mass) if return_lse or return_mass else out


def run(job: Job, backend: str) -> Result:
    """Run a checked job on an available backend."""
    decode, observation = _module(backend).decode, job.observation
    if observation is None or backend in GPU_BACKENDS or not observation.due(job.layer):
        return decode(job)
    out, lse, mass = decode(job._replace(return_mass=True))
    observation.add(job.layer, job.requests, mass)
    return out, lse, mass if job.return_mass else None
