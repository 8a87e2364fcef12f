"""``prefill_attention``: many queries over keys as they come from the projections, writing nothing but the output.

The arguments are checked here and become a `PrefillJob`, which every backend takes: ``prefill_reference.run``,
``prefill_triton.run`` and ``prefill_cuda.run`` return (out, lse), None for what was not asked for. Under tracing the
call is the operator ``kvstrata::prefill_attention``.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Hashable
from importlib import import_module
from types import ModuleType
from typing import Any, NamedTuple

import torch

from kvstrata import backends
from kvstrata.attention.output import AttentionOutput
from kvstrata.call_cache import Guard, guard_of, traced

BACKENDS = ("auto", "reference", "triton", "cuda")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
HEAD_DIMS = (64, 96, 128, 256)

Result = tuple[torch.Tensor, torch.Tensor | None]


class PrefillJob(NamedTuple):
    """One call, checked. Dense ``[B, S, H, D]``, or ragged ``[T, H, D]`` with both cu_seqlens."""

    q: torch.Tensor  # inner stride 1, as k and v
    k: torch.Tensor
    v: torch.Tensor
    cu_seqlens_q: torch.Tensor | None  # int32 [sequences + 1], on the device
    cu_seqlens_k: torch.Tensor | None
    max_seqlen_q: int  # no sequence is longer; dense: the sizes
    max_seqlen_k: int
    causal: bool
    scale: float
    sliding_window: int | None
    softcap: float | None
    sinks: torch.Tensor | None  # float32 [Hq]
    return_lse: bool

    @property
    def ragged(self) -> bool:
        return self.cu_seqlens_q is not None

    @property
    def sequences(self) -> int:
        return self.q.shape[0] if self.cu_seqlens_q is None else self.cu_seqlens_q.shape[0] - 1

    @property
    def heads(self) -> int:
        return self.q.shape[-2]

    @property
    def kv_heads(self) -> int:
        return self.k.shape[-2]

    @property
    def head_dim(self) -> int:
        return self.q.shape[-1]

    def outputs(self) -> Result:
        """Memory for the results, contiguous: out in q's shape; lse, if asked for, without the last axis."""
        q = self.q
        lse = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device) if self.return_lse else None
        return torch.empty(q.shape, dtype=q.dtype, device=q.device), lse


def strides_of(x: torch.Tensor) -> tuple[int, int, int]:
    """Elements from one sequence, head and token to the next; 0 for the sequences of a ragged tensor."""
    return (0 if x.dim() == 3 else x.stride(0), x.stride(-2), x.stride(-3))


def lse_strides(lse: torch.Tensor | None) -> tuple[int, int, int]:
    """Elements from one sequence, head and token to the next."""
    return (0, 0, 0) if lse is None else strides_of(lse.unsqueeze(-1))


@functools.cache
def _module(backend: str) -> ModuleType:
    """Imported when first asked for: not every machine has what every backend needs."""
    return import_module(f"{__package__}.{backend}")


def missing(backend: str, job: PrefillJob) -> str | None:
    """Why ``backend`` cannot run this job, or None when it can."""
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
    from .configs import cuda_first

    ranked = ("cuda", "triton") if cuda_first(job) else ("triton", "cuda")
    return next((name for name in ranked if missing(name, job) is None), "reference")


def positive(name: str, value: float | None) -> None:
    if value is not None and not (isinstance(value, (int, float)) and 0 < value < math.inf):
        raise ValueError(f"{name}: expected a positive number, got {value!r}")


def check_sinks(sinks: torch.Tensor | None, heads: int, device: torch.device) -> torch.Tensor | None:
    """float32, one logit per query head."""
    if sinks is None:
        return None
    if not isinstance(sinks, torch.Tensor) or not sinks.is_floating_point() or tuple(sinks.shape) != (heads,):
        given = f"{sinks.dtype} {tuple(sinks.shape)}" if isinstance(sinks, torch.Tensor) else repr(sinks)
        raise ValueError(f"sinks: expected floats [{heads}], one per query head, got {given}")
    if sinks.device != device:
        raise ValueError(f"sinks: expected a tensor on {device}, where q is, got {sinks.device}")
    return sinks.detach().float().contiguous()


def check_sliding_window(sliding_window: int | None) -> None:
    if sliding_window is not None and (type(sliding_window) is not int or sliding_window < 1):
        raise ValueError(f"sliding_window: expected an int of at least 1, got {sliding_window!r}")


def _check_heads(q: torch.Tensor, k: torch.Tensor, axes: str) -> None:
    """q's heads are a multiple of k's; where other axes would fit, the error says so."""
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
    """As given, or read from the device."""
    if given is not None:
        return given
    return int(cu.diff().max()) if len(cu) > 1 else 0


REMEMBERED = 4096
_passed: dict[tuple[Hashable, ...], Guard] = {}  # looks of calls whose arguments were checked
_latest: tuple[tuple[object, ...], Guard] = ((), lambda *tensors: False)  # of a dense call: causal, scale, softcap


def _look(
    tensors: tuple[torch.Tensor | None, ...], options: tuple[object, ...], exact: tuple[object, ...]
) -> tuple[Hashable, ...]:
    """Everything the checks of a call and its guard depend on. ``exact``: options whose type counts, as 1 == True."""
    looks = [None if x is None else (x.shape, x.stride(), x.dtype, x.device) for x in tensors]
    return (*looks, *options, *exact, *map(type, exact), torch.is_inference_mode_enabled())


def _check(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
    sinks: torch.Tensor | None,
    causal: bool,
    scale: float | None,
    softcap: float | None,
    sliding_window: int | None,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
) -> None:
    """Everything that shapes, strides, dtypes, devices and options decide; ValueError or TypeError."""
    if (cu_seqlens_q is None) != (cu_seqlens_k is None):
        raise ValueError("cu_seqlens_k: expected to be given exactly when cu_seqlens_q is")
    _check_tensors(q, k, v, cu_seqlens_q is not None)
    positive("scale", scale)
    positive("softcap", softcap)
    check_sliding_window(sliding_window)
    if sliding_window is not None and not causal:
        raise ValueError(f"sliding_window: expected None without causal, got {sliding_window}")
    check_sinks(sinks, q.shape[-2], q.device)
    if cu_seqlens_q is not None and cu_seqlens_k is not None:
        _check_lengths("cu_seqlens_q", cu_seqlens_q, q)
        _check_lengths("cu_seqlens_k", cu_seqlens_k, q)
        if cu_seqlens_k.shape != cu_seqlens_q.shape:
            raise ValueError(f"cu_seqlens_k: expected {len(cu_seqlens_q)} as cu_seqlens_q, got {len(cu_seqlens_k)}")
    for name, given in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)):
        if given is None:
            continue
        if cu_seqlens_q is None:
            raise ValueError(f"{name}: expected None without cu_seqlens, got {given!r}")
        if type(given) is not int or given < 0:
            raise ValueError(f"{name}: expected an int of at least 0, got {given!r}")


def _check_once(tensors: tuple[Any, ...], options: tuple[Any, ...]) -> None:
    """`_check`, unless a call that looks the same has passed; the next such dense call is known by its guard."""
    global _latest
    try:
        look = _look(tensors, options[:3], options[3:])
        guard = _passed.get(look)
    except (AttributeError, TypeError, RuntimeError):
        _check(*tensors, *options)
        return
    if guard is None:
        _check(*tensors, *options)
        if len(_passed) >= REMEMBERED:
            _passed.clear()
        guard = _passed[look] = guard_of(tensors[:3])
    if all(x is None for x in (*tensors[3:], *options[3:])):
        _latest = options[:3], guard


def run(job: PrefillJob, backend: str) -> Result:
    """A checked job on a backend that is there."""
    return _module(backend).run(job)


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
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
    backend: str = "auto",
    known: bool = False,
) -> Result:
    """Checks a call, unless it is ``known`` to look like one before, makes its job and runs it."""
    if backend not in BACKENDS:
        raise ValueError(f"backend: expected one of {BACKENDS}, got {backend!r}")
    if not known:
        tensors = (q, k, v, cu_seqlens_q, cu_seqlens_k, sinks)
        options = (causal, scale, softcap, sliding_window, max_seqlen_q, max_seqlen_k)
        _check_once(tensors, options)
    if cu_seqlens_q is not None and cu_seqlens_k is not None:
        longest = _longest(max_seqlen_q, cu_seqlens_q), _longest(max_seqlen_k, cu_seqlens_k)
    else:
        longest = (q.shape[1], k.shape[1])
    if sinks is not None:
        sinks = sinks.detach().float().contiguous()
    if q.requires_grad or k.requires_grad or v.requires_grad:
        q, k, v = q.detach(), k.detach(), v.detach()
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    job = PrefillJob(
        q, k, v, cu_seqlens_q, cu_seqlens_k, *longest, bool(causal), scale, sliding_window, softcap, sinks, return_lse
    )
    return run(job, _choose(backend, job))


_library = torch.library.Library("kvstrata", "FRAGMENT")
_library.define(
    "prefill_attention(Tensor q, Tensor k, Tensor v, *, bool causal=True, float? scale=None,"
    " Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, SymInt? max_seqlen_q=None, SymInt? max_seqlen_k=None,"
    " int? sliding_window=None, float? softcap=None, Tensor? sinks=None, bool return_lse=False, str backend='auto')"
    " -> (Tensor out, Tensor lse)"
)


def _operator(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Operator ``kvstrata::prefill_attention``; lse is empty where not asked for."""
    out, lse = _attend(q, k, v, **options)
    return out, out.new_empty(0, dtype=torch.float32) if lse is None else lse


_library.impl("prefill_attention", _operator, "CompositeExplicitAutograd")


@torch.library.register_fake("kvstrata::prefill_attention", lib=_library)
def _fake(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = True,
    scale: float | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    return_lse: bool = False,
    **unused: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    _check(q, k, v, cu_seqlens_q, cu_seqlens_k, sinks, causal, scale, softcap, sliding_window, None, None)
    shape = q.shape[:-1] if return_lse else (0,)
    return q.new_empty(q.shape), q.new_empty(shape, dtype=torch.float32)


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
    backend: str = "auto",
) -> torch.Tensor | AttentionOutput:
    """Attention of many queries over K and V in memory; forward only.

    Args:
        q: ``[batch, seq, heads, dim]``, or ragged ``[tokens, heads, dim]`` with cu_seqlens; float16, bfloat16 or
            float32; dim 64, 96, 128 or 256; any strides with an inner one of 1.
        k, v: the same axes and dtype, with a sequence length of their own and KV heads that divide q's heads.
        causal: query i of n stands at position ``keys - n + i`` and sees no later key.
        scale: of the scores; None is ``dim ** -0.5``.
        cu_seqlens_q, cu_seqlens_k: int32 ``[sequences + 1]``: sequence n is rows ``cu[n] .. cu[n + 1]`` of q and of k.
            Rows of no sequence may hold anything; what out holds there is not defined.
        max_seqlen_q, max_seqlen_k: no sequence is longer; None reads it from the device, which waits and cannot be
            captured.
        sliding_window: a query sees this many positions, its own the last of them; None is all. Needs ``causal``.
        softcap: c makes c * tanh(score / c) of a score.
        sinks: ``[heads]``, attention-sink logit per head, added to the softmax denominator.
        return_lse: also float32 ``[batch, seq, heads]`` (ragged: ``[tokens, heads]``), the natural log of the sum of
            the exponentials, the sink's included.
        backend: ``auto``, ``reference``, ``triton`` or ``cuda``.

    A query that sees no key gives zeros and -inf (with a sink: its logit). Nothing is mutated; safe under
    ``torch.compile(fullgraph=True)`` and, once a shape has run, under graph capture.

    Returns out in q's shape and dtype, contiguous; with ``return_lse`` an `AttentionOutput`, whose mass is None.

    Raises ValueError, TypeError or RuntimeError (a backend that is not there), naming the argument.

    Example:
        >>> q, (k, v) = torch.randn(1, 100, 8, 64), torch.randn(2, 1, 300, 2, 64)  # a chunk of 100 after 200 tokens
        >>> kvstrata.prefill_attention(q, k, v).shape
        torch.Size([1, 100, 8, 64])
    """
    # Under torch.compile, fake tensors, subclasses and dispatch modes the call is the operator. Everything else goes
    # straight to the job, which costs the host less; a dense call like the latest one is known by one comparison.
    dense = cu_seqlens_q is cu_seqlens_k is sinks is None and max_seqlen_q is max_seqlen_k is sliding_window is None
    known = dense and not _is_compiling() and (latest := _latest)[0] == (causal, scale, softcap) and latest[1](q, k, v)
    if not known and (_is_compiling() or traced() or not type(q) is type(k) is type(v) is torch.Tensor):
        for name, x in (("q", q), ("k", k), ("v", v)):
            if not isinstance(x, torch.Tensor):
                raise TypeError(f"{name}: expected a tensor, got {type(x).__name__}")
        out, lse = torch.ops.kvstrata.prefill_attention(
            q.detach(), k.detach(), v.detach(), causal=causal, scale=scale, cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_k=cu_seqlens_k, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k,
            sliding_window=sliding_window, softcap=softcap, return_lse=return_lse, backend=backend,
            sinks=sinks.detach() if isinstance(sinks, torch.Tensor) else sinks,
        )  # fmt: skip
    else:
        out, lse = _attend(
            q, k, v, causal, scale, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, sliding_window, softcap,
            sinks, return_lse, backend, known,
        )  # fmt: skip
    return AttentionOutput(out, lse) if return_lse else out
