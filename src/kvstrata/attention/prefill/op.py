"""``prefill_attention``: many queries over keys as the projections output them; writes nothing but the output.

The arguments are checked here and become a `PrefillJob`; every backend is a module with ``run(job) -> (out, lse)``.
Under tracing the call is the operator ``kvstrata::prefill_attention``.
"""

from __future__ import annotations

import functools
from importlib import import_module
from types import ModuleType
from typing import Any, NamedTuple

import torch

from kvstrata import backends
from kvstrata.attention.arguments import DTYPES, check_positive, check_sinks, check_sliding_window, kernel_sinks
from kvstrata.attention.output import AttentionOutput
from kvstrata.call_cache import Bounded, Guard, guard_of, signature, traced

from .configs import cuda_first
from .job import PrefillJob, Result, Run

BACKENDS = ("auto", "reference", "triton", "cuda")
HEAD_DIMS = (64, 96, 128, 256)


class Options(NamedTuple):
    """Options of a call as given, in the order of the operator's schema."""

    causal: bool = True
    scale: float | None = None
    cu_seqlens_q: torch.Tensor | None = None
    cu_seqlens_k: torch.Tensor | None = None
    max_seqlen_q: int | None = None
    max_seqlen_k: int | None = None
    sliding_window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None
    return_lse: bool = False
    backend: str = "auto"


@functools.cache
def _module(backend: str) -> ModuleType:
    """Backend module, imported at first use: its dependencies may not be installed."""
    return import_module(f"{__package__}.{backend}")


def missing(backend: str, job: PrefillJob) -> str | None:
    """Reason why ``backend`` cannot run this job, or None."""
    if reason := backends.missing(backend, job.q.device):
        return reason
    try:
        return None if backend == "reference" else _module(backend).missing(job)
    except ImportError as error:
        return f"{backend} is not there: {error}"


def _choose(backend: str, job: PrefillJob) -> str:
    if backend != "auto":
        if reason := missing(backend, job):
            raise RuntimeError(f"backend: {reason}")
        return backend
    if job.q.device.type != "cuda":
        return "reference"
    ranked = ("cuda", "triton") if cuda_first(job) else ("triton", "cuda")
    return next((name for name in ranked if missing(name, job) is None), "reference")


def _check_heads(q: torch.Tensor, k: torch.Tensor, axes: str) -> None:
    """Raise unless q's heads are a multiple of k's; the error suggests a transpose if that would fit."""
    heads, kv_heads = q.shape[-2], k.shape[-2]
    if heads and kv_heads and heads % kv_heads == 0:
        return
    message = f"k: expected {axes} with heads that divide q's {heads}, got shape {tuple(k.shape)}, q {tuple(q.shape)}"
    swapped = k.shape[-3]
    if swapped and (heads % swapped == 0 or q.shape[-3] % swapped == 0):
        first, second = (0, 1) if k.dim() == 3 else (1, 2)
        message += f"; if heads come before tokens, pass .transpose({first}, {second})"
    raise ValueError(message)


def _check_tensors(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ragged: bool) -> None:
    axes = "[tokens, heads, dim]" if ragged else "[batch, seq, heads, dim]"
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name}: expected a tensor, got {type(x).__name__}")
        if x.dim() != (3 if ragged else 4):
            when = "with" if ragged else "without"
            raise ValueError(f"{name}: expected {axes} {when} cu_seqlens, got shape {tuple(x.shape)}")
        if x.dtype not in DTYPES:
            raise TypeError(f"{name}: expected one of {DTYPES}, got {x.dtype}")
        if x.dtype != q.dtype:
            raise TypeError(f"{name}: expected {q.dtype} as q, got {x.dtype}")
        if x.device != q.device:
            raise ValueError(f"{name}: expected a tensor on {q.device}, where q is, got {x.device}")
        if x.shape[-1] not in HEAD_DIMS:
            raise ValueError(f"{name}: expected {axes} with a dim of {HEAD_DIMS}, got shape {tuple(x.shape)}")
        if x.shape[-1] != q.shape[-1]:
            raise ValueError(f"{name}: expected {axes} with q's dim of {q.shape[-1]}, got shape {tuple(x.shape)}")
        if x.stride(-1) != 1:
            raise ValueError(f"{name}: expected an inner stride of 1, got {x.stride(-1)}")
    if v.shape != k.shape:
        raise ValueError(f"v: expected shape {tuple(k.shape)} as k, got {tuple(v.shape)}")
    if not ragged and k.shape[0] != q.shape[0]:
        raise ValueError(f"k: expected {axes} with q's batch of {q.shape[0]}, got shape {tuple(k.shape)}")
    _check_heads(q, k, axes)


def _check_lengths(name: str, cu: torch.Tensor, q: torch.Tensor) -> None:
    if not isinstance(cu, torch.Tensor) or cu.dtype != torch.int32 or cu.dim() != 1 or len(cu) < 1:
        given = f"{cu.dtype} {tuple(cu.shape)}" if isinstance(cu, torch.Tensor) else repr(cu)
        raise ValueError(f"{name}: expected int32 [sequences + 1], got {given}")
    if not cu.is_contiguous():
        raise ValueError(f"{name}: expected contiguous memory, got stride {cu.stride(0)}")
    if cu.device != q.device:
        raise ValueError(f"{name}: expected a tensor on {q.device}, where q is, got {cu.device}")


def _longest(given: int | None, cu: torch.Tensor) -> int:
    """Maximum length: as given, or read from the device."""
    if given is not None:
        return given
    return int(cu.diff().max()) if len(cu) > 1 else 0


def _check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Options) -> None:
    """Check everything that follows from shapes, strides, dtypes, devices and options; ValueError or TypeError."""
    cu_q, cu_k, sliding_window = options.cu_seqlens_q, options.cu_seqlens_k, options.sliding_window
    if (cu_q is None) != (cu_k is None):
        raise ValueError("cu_seqlens_k: expected to be given exactly when cu_seqlens_q is")
    _check_tensors(q, k, v, cu_q is not None)
    check_positive("scale", options.scale)
    check_positive("softcap", options.softcap)
    check_sliding_window(sliding_window)
    if sliding_window is not None and not options.causal:
        raise ValueError(f"sliding_window: expected None without causal, got {sliding_window}")
    check_sinks(options.sinks, q.shape[-2], q.device)
    if cu_q is not None and cu_k is not None:
        _check_lengths("cu_seqlens_q", cu_q, q)
        _check_lengths("cu_seqlens_k", cu_k, q)
        if cu_k.shape != cu_q.shape:
            raise ValueError(f"cu_seqlens_k: expected {len(cu_q)} as cu_seqlens_q, got {len(cu_k)}")
    for name, given in (("max_seqlen_q", options.max_seqlen_q), ("max_seqlen_k", options.max_seqlen_k)):
        if given is None:
            continue
        if cu_q is None:
            raise ValueError(f"{name}: expected None without cu_seqlens, got {given!r}")
        if type(given) is not int or given < 0:
            raise ValueError(f"{name}: expected an int of at least 0, got {given!r}")


_passed: Bounded[Guard] = Bounded()  # by signature of a call that passed the checks
_latest: tuple[tuple[object, ...], Guard] = ((), lambda *tensors: False)  # latest dense call: causal, scale, softcap


def _check_once(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Options) -> None:
    """`_check`, unless a call of the same signature has passed; remembers a dense call as the latest."""
    global _latest
    tensors = (options.cu_seqlens_q, options.cu_seqlens_k, options.sinks)
    scoring = (options.causal, options.scale, options.softcap)
    ints = (options.sliding_window, options.max_seqlen_q, options.max_seqlen_k)  # keyed by type too, as True == 1
    try:
        key = (*signature((q, k, v, *tensors)), *scoring, *ints, *map(type, ints), torch.is_inference_mode_enabled())
        guard = _passed.get(key)
    except (AttributeError, TypeError, RuntimeError):
        _check(q, k, v, options)
        return
    if guard is None:
        _check(q, k, v, options)
        guard = _passed[key] = guard_of((q, k, v))
    if all(x is None for x in (*tensors, *ints)):
        _latest = scoring, guard


def run(job: PrefillJob, backend: str) -> Result:
    """Run a checked job on an available backend."""
    return _module(backend).run(job)


def prepare(job: PrefillJob, out: torch.Tensor, lse: torch.Tensor | None) -> Run | None:
    """Launch for checked jobs with the same signature, on the current device and by this thread; None for others.

    It takes a job, its output and the memory of its lse, or None.
    """
    backend = _choose("auto", job)
    return None if backend == "reference" else _module(backend).prepare(job, out, lse)


def _check_out(out: torch.Tensor, q: torch.Tensor) -> None:
    """Check the memory that the caller passed for the output."""
    if not isinstance(out, torch.Tensor):
        raise TypeError(f"out: expected a tensor, got {type(out).__name__}")
    if out.dtype != q.dtype:
        raise TypeError(f"out: expected {q.dtype} as q, got {out.dtype}")
    if out.shape != q.shape:
        raise ValueError(f"out: expected shape {tuple(q.shape)} as q, got {tuple(out.shape)}")
    if out.device != q.device:
        raise ValueError(f"out: expected a tensor on {q.device}, where q is, got {out.device}")
    if out.stride(-1) != 1:
        raise ValueError(f"out: expected an inner stride of 1, got {out.stride(-1)}")


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: tuple[Any, ...], known: bool = False,
    out: torch.Tensor | None = None,
) -> Result:  # fmt: skip
    """Check a call, unless it is ``known`` to have the signature of a checked one, and run it.

    ``options``: the fields of `Options`, as a plain tuple, which is faster to build for a repeated call.
    """
    causal, scale, cu_q, cu_k, max_q, max_k, sliding_window, softcap, sinks, return_lse, backend = options
    if backend not in BACKENDS:
        raise ValueError(f"backend: expected one of {BACKENDS}, got {backend!r}")
    if not known:
        _check_once(q, k, v, Options(*options))
    if out is not None:
        _check_out(out, q)
    if cu_q is not None and cu_k is not None:
        longest = _longest(max_q, cu_q), _longest(max_k, cu_k)
    else:
        longest = (q.shape[1], k.shape[1])
    if q.requires_grad or k.requires_grad or v.requires_grad:
        q, k, v = q.detach(), k.detach(), v.detach()
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    if sinks is not None:
        sinks = kernel_sinks(sinks)
    job = PrefillJob(
        q, k, v, cu_q, cu_k, *longest, bool(causal), scale, sliding_window, softcap, sinks, return_lse, out
    )  # fmt: skip
    return run(job, _choose(backend, job))


_library = torch.library.Library("kvstrata", "FRAGMENT")
SCHEMA = (
    " bool causal=True, float? scale=None, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None,"
    " SymInt? max_seqlen_q=None, SymInt? max_seqlen_k=None, int? sliding_window=None, float? softcap=None,"
    " Tensor? sinks=None, bool return_lse=False, str backend='auto')"
)
_library.define(f"prefill_attention(Tensor q, Tensor k, Tensor v,{SCHEMA} -> (Tensor out, Tensor lse)")
_library.define(f"prefill_attention_into(Tensor q, Tensor k, Tensor v, Tensor(a!) out,{SCHEMA} -> Tensor lse")


def _operator(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Operator ``kvstrata::prefill_attention``; lse is empty if not requested."""
    out, lse = _attend(q, k, v, Options(*options))
    return out, out.new_empty(0, dtype=torch.float32) if lse is None else lse


def _operator_into(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, *options: Any) -> torch.Tensor:
    """Operator ``kvstrata::prefill_attention_into``, which writes to ``out``."""
    _, lse = _attend(q, k, v, Options(*options), out=out)
    return out.new_empty(0, dtype=torch.float32) if lse is None else lse


_library.impl("prefill_attention", _operator, "CompositeExplicitAutograd")
_library.impl("prefill_attention_into", _operator_into, "CompositeExplicitAutograd")


@torch.library.register_fake("kvstrata::prefill_attention", lib=_library)
def _fake(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *given: Any) -> tuple[torch.Tensor, torch.Tensor]:
    options = Options(*given)._replace(max_seqlen_q=None, max_seqlen_k=None)  # may be symbolic
    _check(q, k, v, options)
    shape = q.shape[:-1] if options.return_lse else (0,)
    return q.new_empty(q.shape), q.new_empty(shape, dtype=torch.float32)


@torch.library.register_fake("kvstrata::prefill_attention_into", lib=_library)
def _fake_into(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, *given: Any) -> torch.Tensor:
    _check_out(out, q)
    return _fake(q, k, v, *given)[1]


_is_compiling = torch.compiler.is_compiling


def prefill_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = True,
    scale: float | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    return_lse: bool = False,
    out: torch.Tensor | None = None,
    backend: str = "auto",
) -> torch.Tensor | AttentionOutput:
    """Attention of many queries over K and V in memory; forward only.

    Args:
        q: ``[batch, seq, heads, dim]``, or ragged ``[tokens, heads, dim]`` with cu_seqlens; float16, bfloat16 or
            float32; dim 64, 96, 128 or 256; any strides, the last one 1.
        k, v: same axes and dtype as q, with their own sequence length and KV heads that divide q's heads.
        causal: query i of n is at position ``keys - n + i`` and sees no later key.
        scale: factor of the scores; None is ``dim ** -0.5``.
        cu_seqlens_q, cu_seqlens_k: int32 ``[sequences + 1]``, contiguous: sequence n is rows ``cu[n] .. cu[n + 1]`` of
            q and of k. Rows outside every sequence may hold anything; out is undefined there.
        max_seqlen_q, max_seqlen_k: upper bounds of the lengths; None reads them from the device.
        sliding_window: number of positions a query sees, including its own; None is all. Needs ``causal``.
        softcap: c replaces a score by ``c * tanh(score / c)``.
        sinks: ``[heads]``, attention-sink logit per head, added to the softmax denominator.
        return_lse: also return the natural log-sum-exp of the scores, including sinks.
        out: memory for the output in q's shape and dtype, disjoint from q, k and v; any strides, the last one 1. None
            allocates it.
        backend: ``auto``, ``reference``, ``triton`` or ``cuda``.

    Returns:
        out in q's shape and dtype, contiguous unless it was given. With ``return_lse`` an `AttentionOutput` with a
        float32 lse ``[batch, seq, heads]`` (ragged: ``[tokens, heads]``) and no mass. A query that sees no key gives
        zeros and an lse of -inf (with a sink: its logit).

    Raises:
        ValueError, TypeError: an argument has a wrong shape, stride, value, device or dtype; the error names it.
        RuntimeError: the backend is not available for this call.

    Only ``out`` is mutated. Safe under ``torch.compile(fullgraph=True)``. Safe under CUDA-graph capture once a call of
    the same shapes has run, which compiles the kernel; ragged calls also need both max_seqlen.

    Example:
        >>> q, (k, v) = torch.randn(1, 100, 8, 64), torch.randn(2, 1, 300, 2, 64)  # a chunk of 100 after 200 tokens
        >>> kvstrata.prefill_attention(q, k, v).shape
        torch.Size([1, 100, 8, 64])
    """
    # Under torch.compile, fake tensors, subclasses and dispatch modes the call is the operator. Other calls skip the
    # dispatcher, which saves host time; a dense call with the signature of the latest one skips the checks too.
    dense = cu_seqlens_q is cu_seqlens_k is sinks is None and max_seqlen_q is max_seqlen_k is sliding_window is None
    known = dense and not _is_compiling() and (latest := _latest)[0] == (causal, scale, softcap) and latest[1](q, k, v)
    dispatch = not known and (_is_compiling() or traced() or not type(q) is type(k) is type(v) is torch.Tensor)
    if dispatch:
        for name, x in (("q", q), ("k", k), ("v", v)):
            if not isinstance(x, torch.Tensor):
                raise TypeError(f"{name}: expected a tensor, got {type(x).__name__}")
        q, k, v = q.detach(), k.detach(), v.detach()
        sinks = sinks.detach() if isinstance(sinks, torch.Tensor) else sinks
    options = (
        causal, scale, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, sliding_window, softcap, sinks,
        return_lse, backend,
    )  # fmt: skip
    if not dispatch:
        result, lse = _attend(q, k, v, options, known, out)
    elif out is None:
        result, lse = torch.ops.kvstrata.prefill_attention(q, k, v, *options)
    else:
        result, lse = out, torch.ops.kvstrata.prefill_attention_into(q, k, v, out, *options)
    return AttentionOutput(result, lse) if return_lse else result
