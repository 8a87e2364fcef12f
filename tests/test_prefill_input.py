"""Arguments of prefill_attention: what is refused, in which words, and what a repeated call does not vouch for."""

from __future__ import annotations

import re

import pytest
import torch

from conftest import HAS_GPU
from kvstrata import prefill_attention


def test_cached_checks_do_not_accept_equal_values_of_other_types() -> None:
    """A cached check does not accept arguments that merely compare equal."""
    prefill_attention(X, X, X, sliding_window=1)
    with pytest.raises(ValueError, match="sliding_window: expected an int"):
        prefill_attention(X, X, X, sliding_window=True)
    wide = torch.zeros(1, 8, 2, 128)
    prefill_attention(wide, wide, wide)
    with pytest.raises(ValueError, match="inner stride"):
        prefill_attention(wide[..., ::2], X, X)


X = torch.zeros(1, 8, 2, 64)
CU = torch.tensor([0, 8], dtype=torch.int32)
BAD = {
    "q: expected a tensor": dict(q=3),
    "k: expected [batch, seq, heads, dim] without cu_seqlens, got shape (8, 2, 64)": dict(k=X[0]),
    "q: expected [tokens, heads, dim] with cu_seqlens, got shape (1, 8, 2, 64)": dict(cu_seqlens_q=CU, cu_seqlens_k=CU),
    "q: expected one of": dict(q=X.double()),
    "k: expected torch.float32 as q": dict(k=X.half()),
    "q: expected [batch, seq, heads, dim] with a dim of (64, 96, 128, 256), got shape": dict(q=X[..., :32]),
    "k: expected [batch, seq, heads, dim] with q's dim of 64, got shape": dict(k=torch.zeros(1, 8, 2, 128)),
    "v: expected an inner stride of 1": dict(v=torch.zeros(1, 8, 2, 128)[..., ::2]),
    "v: expected shape (1, 8, 2, 64) as k, got (1, 7, 2, 64)": dict(v=X[:, :7]),
    "k: expected [batch, seq, heads, dim] with q's batch of 1, got shape (2, 8, 2, 64)": dict(
        k=X.expand(2, -1, -1, -1), v=X.expand(2, -1, -1, -1)
    ),
    "k: expected [batch, seq, heads, dim] with heads that divide q's 3, got shape (1, 8, 2, 64), q (1, 8, 3, 64)": dict(
        q=torch.zeros(1, 8, 3, 64)
    ),
    "k: expected [batch, seq, heads, dim] with heads that divide q's 2, got shape (1, 2, 8, 64), q (1, 8, 2, 64); if "
    "heads come before tokens, pass .transpose(1, 2)": dict(k=X.transpose(1, 2), v=X.transpose(1, 2)),
    "scale: expected a positive": dict(scale=0.0),
    "softcap: expected a positive": dict(softcap=-1.0),
    "sliding_window: expected an int": dict(sliding_window=0),
    "sliding_window: expected None without causal": dict(sliding_window=3, causal=False),
    "sinks: expected floats [2]": dict(sinks=torch.zeros(3)),
    "cu_seqlens_k: expected to be given": dict(cu_seqlens_q=CU),
    "max_seqlen_q: expected None": dict(max_seqlen_q=8),
    "backend: expected one of": dict(backend="fast"),
}


@pytest.mark.parametrize("message", BAD)
def test_invalid_arguments_are_named(message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        prefill_attention(**(dict(q=X, k=X, v=X) | BAD[message]))


RAGGED = dict(q=X[0], k=X[0], v=X[0], cu_seqlens_q=CU, cu_seqlens_k=CU)
BAD_RAGGED = {
    "cu_seqlens_q: expected int32": dict(cu_seqlens_q=CU.long()),
    "cu_seqlens_k: expected int32": dict(cu_seqlens_k=CU[:0]),
    "cu_seqlens_k: expected 2 as": dict(cu_seqlens_k=torch.zeros(3, dtype=torch.int32)),
    "cu_seqlens_q: expected contiguous": dict(cu_seqlens_q=torch.zeros(4, dtype=torch.int32)[::2]),
    "max_seqlen_k: expected an int": dict(max_seqlen_k=-1),
    "k: expected [tokens, heads, dim] with heads that divide q's 2, got shape (2, 8, 64), q (8, 2, 64); if heads come "
    "before tokens, pass .transpose(0, 1)": dict(k=X[0].transpose(0, 1), v=X[0].transpose(0, 1)),
}


@pytest.mark.parametrize("message", BAD_RAGGED)
def test_invalid_ragged_arguments_are_named(message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        prefill_attention(**(RAGGED | BAD_RAGGED[message]))


def test_a_checked_ragged_call_does_not_skip_checks_of_a_dense_one() -> None:
    """Repeat a call without cu_seqlens, and in another grad or inference mode."""
    prefill_attention(**RAGGED)
    with pytest.raises(ValueError, match="without cu_seqlens"):
        prefill_attention(RAGGED["q"], RAGGED["k"], RAGGED["v"])
    q, k, v = torch.randn(3, 1, 8, 2, 64)
    want = prefill_attention(q, k, v)
    assert torch.equal(prefill_attention(q, k, v), want)
    with torch.inference_mode():
        assert torch.equal(prefill_attention(q, k, v), want)
    learned = torch.nn.Parameter(q)
    out = prefill_attention(learned, k.requires_grad_(), v)
    assert torch.equal(out, want)
    assert not out.requires_grad


@pytest.mark.skipif(HAS_GPU, reason="there it is")
def test_an_unavailable_backend_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="backend: cuda"):
        prefill_attention(X, X, X, backend="cuda")
