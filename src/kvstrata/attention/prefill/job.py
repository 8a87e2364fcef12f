"""`PrefillJob`: one checked call of ``prefill_attention``, the input of every backend, which returns a `Result`."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

Result = tuple[torch.Tensor, torch.Tensor | None]  # out, and lse if requested


class PrefillJob(NamedTuple):
    """One checked call. Dense ``[B, S, H, D]``, or ragged ``[T, H, D]`` with both cu_seqlens."""

    q: torch.Tensor  # inner stride 1, as k and v
    k: torch.Tensor
    v: torch.Tensor
    cu_seqlens_q: torch.Tensor | None  # int32 [sequences + 1], on the device
    cu_seqlens_k: torch.Tensor | None
    max_seqlen_q: int  # upper bound of every sequence's length; dense: the sizes
    max_seqlen_k: int
    causal: bool
    scale: float
    sliding_window: int | None
    softcap: float | None
    sinks: torch.Tensor | None  # float32 [Hq]
    return_lse: bool
    out: torch.Tensor | None = None  # memory of the output, q's shape and inner stride 1; None: allocated

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
        """Memory of the results: out in q's shape, contiguous unless given; lse without the last axis."""
        q = self.q
        lse = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device) if self.return_lse else None
        return torch.empty(q.shape, dtype=q.dtype, device=q.device) if self.out is None else self.out, lse


Run = Callable[[PrefillJob, torch.Tensor, torch.Tensor | None], None]  # job, out, lse


def strides_of(x: torch.Tensor) -> tuple[int, int, int]:
    """Strides of sequence, head and token, in elements; a ragged tensor has a sequence stride of 0."""
    return (0 if x.dim() == 3 else x.stride(0), x.stride(-2), x.stride(-3))


def lse_strides(lse: torch.Tensor | None) -> tuple[int, int, int]:
    """Strides of sequence, head and token, in elements; zeros without an lse."""
    return (0, 0, 0) if lse is None else strides_of(lse.unsqueeze(-1))
