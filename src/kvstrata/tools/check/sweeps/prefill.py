"""prefill_attention of prompts and chunks, dense or ragged, in memory full of NaN, against attention in float32."""

from __future__ import annotations

from itertools import accumulate, pairwise

import torch

import kvstrata

from .draw import CLOSE, FLOATS, Draw, unsupported_errors
from .oracle import attention

BACKENDS = ("reference", "triton", "cuda")
SANITIZED = ("cuda",)
DIMS = (64, 96, 128, 256)
SPARE = 3  # rows of NaN before and after ragged sequences
LEAST = {"out": 1e-2, "lse": 1.0}  # minimum RMS that errors are relative to: a sink may take all weight

Sequence = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # q [Sq, Hq, D], k and v [Sk, Hkv, D]
Result = tuple[torch.Tensor, torch.Tensor]  # out [Sq, Hq, D], lse [Sq, Hq]


def trial(draw: Draw, backend: str) -> str:
    """Any lengths, including more queries than keys; windows, soft caps and sinks in any combination."""
    kv_heads, group, dim = draw.size(1, 3), draw.one(1, 2, 4, 7), draw.one(*DIMS)
    heads, dtype = kv_heads * group, draw.one(*_dtypes(draw, backend))
    ragged, causal = draw.one(False, True), draw.one(False, True, True)
    lengths = [_lengths(draw) for _ in range(draw.size(1, 4))] if ragged else [_lengths(draw)] * draw.size(1, 2)
    window = draw.one(None, 1, 33, draw.size(1, 200)) if causal else None
    softcap, loud = draw.one(None, None, 5.0), draw.one(1.0, 1.0, 6.0)
    sinks = 2 * draw.normal(heads) if draw.one(False, True) else None
    gap, bound = draw.one(0, 0, 8, 8 if backend == "cuda" else 3), draw.one(None, 0, 40)  # 3: unaligned rows
    what = (
        f"lengths {lengths}{' ragged' if ragged else ''}, {heads}/{kv_heads} heads, D {dim}, {dtype}, causal {causal},"
        f" window {window}, softcap {softcap}, sinks {sinks is not None}, gap {gap}"
    )

    def rows(count: int, n: int, scale: float = 1.0) -> torch.Tensor:
        return (scale * draw.normal(n, count, dim)).to(dtype)

    given = [(rows(heads, a, loud), rows(kv_heads, b), rows(kv_heads, b)) for a, b in lengths]
    options: dict[str, object] = dict(
        causal=causal, sliding_window=window, softcap=softcap, backend=backend, return_lse=True
    )
    options["sinks"] = None if sinks is None else sinks.to(draw.device)
    if ragged and bound is not None:
        options["max_seqlen_q"], options["max_seqlen_k"] = (max(n) + bound for n in zip(*lengths, strict=True))
    with unsupported_errors(RuntimeError, "backend: "):
        results = (_ragged if ragged else _dense)(given, draw.device, gap, options)
    for i, (result, (q, k, v)) in enumerate(zip(results, given, strict=True)):
        own, (keys, values) = len(k) - len(q) + torch.arange(len(q)), (x.transpose(0, 1) for x in (k, v))
        want = attention(q, keys, values, own, causal=causal, window=window, softcap=softcap, sinks=sinks)
        for name, a, b in zip(("out", "lse"), result, want[:2], strict=True):
            live = b.isfinite()
            assert a.shape == b.shape, f"{name} of sequence {i} is {tuple(a.shape)}: {what}"
            assert torch.equal(a[~live], b[~live]), f"{name} of sequence {i} where nothing is seen: {what}"
            least = LEAST[name] * max(int(live.sum()), 1) ** 0.5
            off = float((a[live].float() - b[live]).norm() / b[live].norm().clamp(min=least))
            assert off <= CLOSE[dtype], f"{name} of sequence {i} is off by {off:.1e}: {what}"
    return what


def _dtypes(draw: Draw, backend: str) -> tuple[torch.dtype, ...]:
    """Dtypes that the backend supports; Triton's interpreter computes wrongly in bfloat16."""
    if backend == "cuda":
        return torch.float16, torch.bfloat16
    return (torch.float32, torch.float16) if backend == "triton" and draw.device.type == "cpu" else FLOATS


def _lengths(draw: Draw) -> tuple[int, int]:
    """Number of queries and keys: a whole prompt, a chunk after a prefix, or unrelated numbers."""
    n = draw.one(1, 64, draw.size(0, 200))
    return draw.one((n, n), (n, n + draw.size(0, 100)), (n, draw.size(0, 200)))


def _inside(x: torch.Tensor, gap: int) -> torch.Tensor:
    """Copy of ``x`` as a view in which each row is followed by ``gap`` NaNs."""
    room = x.new_full((*x.shape[:-1], x.shape[-1] + gap), torch.nan)
    room[..., : x.shape[-1]] = x
    return room[..., : x.shape[-1]]


def _dense(given: list[Sequence], device: torch.device, gap: int, options: dict[str, object]) -> list[Result]:
    """All sequences as one batch."""
    rows = (torch.stack(x).to(device) for x in zip(*given, strict=True))
    q, k, v = (_inside(x, gap) for x in rows)
    out, lse, _ = kvstrata.prefill_attention(q, k, v, **options)  # type: ignore[arg-type]
    assert lse is not None
    assert out.dtype == q.dtype, f"out is {out.dtype}"
    return [(o.cpu(), s.cpu()) for o, s in zip(out, lse, strict=True)]


def _ragged(given: list[Sequence], device: torch.device, gap: int, options: dict[str, object]) -> list[Result]:
    """All sequences as one ragged batch, between rows of NaN."""

    def pack(rows: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        spare = rows[0].new_full((SPARE, *rows[0].shape[1:]), torch.nan)
        ends = torch.tensor(list(accumulate(map(len, rows), initial=SPARE)), dtype=torch.int32)
        return _inside(torch.cat([spare, *rows, spare]).to(device), gap), ends.to(device)

    (q, ends_q), (k, ends_k), (v, _) = (pack(x) for x in zip(*given, strict=True))
    ends = dict(cu_seqlens_q=ends_q, cu_seqlens_k=ends_k)
    out, lse, _ = kvstrata.prefill_attention(q, k, v, **ends, **options)  # type: ignore[arg-type]
    assert lse is not None
    assert out.dtype == q.dtype, f"out is {out.dtype}"
    parts = [slice(begin, end) for begin, end in pairwise(ends_q.tolist())]
    return [(out[part].cpu(), lse[part].cpu()) for part in parts]
