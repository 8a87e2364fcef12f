"""Model of `prefill_attention`, written for reading: float64, one sequence and head at a time.

`check` compares a backend with it. A backend may err twice as much as the same attention in plain torch and the dtype
of q does, plus a floor for rounding.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import pytest
import torch

from conftest import HAS_GPU
from kvstrata import AttentionOutput, prefill_attention

DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
BACKENDS = ["reference", "triton", pytest.param("cuda", marks=pytest.mark.gpu)]
INTERPRETED = not HAS_GPU  # Triton: keep cases small
HALF = torch.float16  # the interpreter computes wrongly in bfloat16
DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if HAS_GPU else [])
EPS = {torch.float32: 2e-6, torch.float16: 2**-11, torch.bfloat16: 2**-8}


def seen(queries: int, keys: int, causal: bool, window: int | None) -> torch.Tensor:
    """bool ``[queries, keys]``"""
    own = torch.arange(queries).unsqueeze(1) + keys - queries
    position = torch.arange(keys)
    mask = torch.ones(queries, keys, dtype=torch.bool)
    if causal:
        mask &= position <= own
    if window is not None:
        mask &= position > own - window
    return mask


def model(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: dict, low: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """``q [Hq, Sq, D]``, ``k, v [Hkv, Sk, D]``: out, lse; with ``low`` every product is rounded to the dtype of q."""
    dtype = q.dtype

    def times(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (a.to(dtype).float() @ b.float()).to(dtype).double() if low else a.double() @ b.double()

    group = q.shape[0] // k.shape[0]
    scale = options.get("scale") or q.shape[2] ** -0.5
    softcap, sinks = options.get("softcap"), options.get("sinks")
    mask = seen(q.shape[1], k.shape[1], options.get("causal", True), options.get("sliding_window")).to(q.device)
    out, lse = torch.zeros_like(q, dtype=torch.float64), torch.zeros_like(q[..., 0], dtype=torch.float64)
    for head in range(q.shape[0]):
        keys, values = k[head // group], v[head // group]
        scores = times(q[head], keys.T) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores.masked_fill(~mask, -torch.inf)
        logits = scores
        if sinks is not None:
            logits = torch.cat([scores, sinks[head].double().expand(len(scores), 1)], 1)
        lse[head] = torch.logsumexp(logits, 1) if logits.shape[1] else -torch.inf
        weights = torch.exp(scores - lse[head].unsqueeze(1)).nan_to_num(0.0)
        out[head] = times(weights, values)
    return out, lse


@dataclass
class Case:
    """Sequences ``(q [Hq, Sq, D], k, v [Hkv, Sk, D])`` and the options of the call."""

    sequences: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
    options: dict = field(default_factory=dict)

    def expected(self, low: bool = False) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [model(*sequence, self.options, low) for sequence in self.sequences]

    def dense(self, backend: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Run as one batch; results have heads first, like the model's."""
        q, k, v = self.batch()
        result = prefill_attention(q, k, v, return_lse=True, backend=backend, **self.options)
        assert type(result) is AttentionOutput
        assert result.mass is None
        out, lse, _ = result
        assert (out.shape, out.dtype) == (q.shape, q.dtype)
        assert (lse.shape, lse.dtype) == (q.shape[:3], torch.float32)
        assert out.is_contiguous()
        assert lse.is_contiguous()
        return [(o.transpose(0, 1), s.transpose(0, 1)) for o, s in zip(out, lse, strict=True)]

    def batch(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k, v: contiguous ``[batch, seq, heads, dim]``."""
        q, k, v = (torch.stack([x.transpose(0, 1) for x in xs]) for xs in zip(*self.sequences, strict=True))
        return q, k, v

    def ragged(self, backend: str, spare: int = 3, **more: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """All sequences end to end, between rows of NaN."""

        def pack(xs: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
            rows = [x.transpose(0, 1) for x in xs]
            bad = torch.full((spare, *rows[0].shape[1:]), torch.nan, dtype=rows[0].dtype, device=DEVICE)
            ends = torch.tensor([spare, *(len(r) for r in rows)]).cumsum(0).int().to(DEVICE)
            return torch.cat([bad, *rows, bad]), ends

        (q, ends_q), (k, ends_k), (v, _) = (pack(list(x)) for x in zip(*self.sequences, strict=True))
        out, lse, _ = prefill_attention(
            q, k, v, cu_seqlens_q=ends_q, cu_seqlens_k=ends_k, return_lse=True, backend=backend, **more, **self.options
        )
        assert out.shape == q.shape
        assert lse.shape == q.shape[:2]
        ends = ends_q.tolist()
        parts = [slice(a, b) for a, b in pairwise(ends)]
        return [(out[part].transpose(0, 1), lse[part].transpose(0, 1)) for part in parts]


def compare(
    got: list[tuple[torch.Tensor, torch.Tensor]],
    want: list[tuple[torch.Tensor, torch.Tensor]],
    low: list[tuple[torch.Tensor, torch.Tensor]],
    dtype: torch.dtype,
) -> None:
    for i, (mine, true, rounded) in enumerate(zip(got, want, low, strict=True)):
        for name, a, b, c in zip(("out", "lse"), mine, true, rounded, strict=True):
            a = a.double()
            assert a.shape == b.shape, name
            assert torch.equal(a.isfinite(), b.isfinite()), f"{name} {i}: finite where it should not be, or not"
            live = b.isfinite()
            assert torch.equal(a[~live], b[~live]), name
            if not live.any():
                continue
            floor = 4 * EPS[dtype if name == "out" else torch.float32] * b[live].abs().max().clamp(min=1e-3)
            allowed = 2 * (c - b)[live].abs().max() + floor
            error = (a - b)[live].abs().max()
            assert error <= allowed, f"{name} {i}: {error} > {allowed}"


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """The largest, over all queries, of the largest error in a row against the largest value of the row."""
    error, size = (got.double() - want).abs().amax(-1), want.abs().amax(-1)
    return float((error / size.clamp(min=1e-30)).max())


def check(case: Case, backend: str, ragged: bool = False, **more: int) -> None:
    got = case.ragged(backend, **more) if ragged else case.dense(backend)
    compare(got, case.expected(), case.expected(low=True), case.sequences[0][0].dtype)


def case_of(
    lengths: list[tuple[int, int]],
    *,
    heads: int = 2,
    kv_heads: int = 1,
    dim: int = 64,
    dtype: torch.dtype = HALF,
    loud: float = 1.0,
    seed: int = 0,
    **options: object,
) -> Case:
    """Random sequences of (queries, keys)."""
    generator = torch.Generator().manual_seed(seed)

    def rows(count: int, n: int) -> torch.Tensor:
        return torch.randn(count, n, dim, generator=generator).to(dtype).to(DEVICE)

    sequences = [(rows(heads, a) * loud, rows(kv_heads, b), rows(kv_heads, b)) for a, b in lengths]
    return Case(sequences, dict(options))
