"""Arguments and results of decode_attention: shapes, backends that are missing, errors that name a bad argument."""

from __future__ import annotations

import pytest
import torch

from conftest import HAS_GPU
from decode_model import (
    DEVICE,
    HAS_NUMBA,
    case_of,
    filled,
)
from kvstrata import AttentionOutput, DecodePlan, TieredCache, decode_attention
from kvstrata.attention.decode import op


def test_plans_for_other_calls_are_refused() -> None:
    cache, other = filled([20]), filled([20])
    q = torch.randn(1, 1, 6, 64, device=DEVICE)
    with pytest.raises(ValueError, match="plan: expected a plan for the given cache"):
        decode_attention(q, cache, plan=DecodePlan(other, 6))
    with pytest.raises(ValueError, match=r"plan: expected one for .*\(6, 1, \(0,\)\), got one for \(8, 1, \(0,\)\)"):
        decode_attention(q, cache, plan=DecodePlan(cache, 8))
    with pytest.raises(ValueError, match="heads: expected a multiple of 2, got 5"):
        DecodePlan(cache, 5)
    with pytest.raises(ValueError, match="fixed_split: expected an int of at least 1, got 0"):
        DecodePlan(cache, 6, fixed_split=0)


def test_return_options_determine_the_result_type() -> None:
    case = case_of([20])
    q, cache = case.q, case.cache
    out = decode_attention(q, cache)
    assert isinstance(out, torch.Tensor)
    assert not out.requires_grad
    with_lse = decode_attention(q, cache, return_lse=True)
    with_mass = decode_attention(q, cache, return_mass=True)
    both = decode_attention(q, cache, return_lse=True, return_mass=True)
    assert all(type(result) is AttentionOutput for result in (with_lse, with_mass, both))
    assert with_lse.mass is None
    assert with_mass.lse is None
    assert (both.lse.dtype, both.lse.shape) == (torch.float32, (1, 1, 6))
    assert (both.mass.dtype, both.mass.shape) == (torch.float32, (1, 2, 20))
    for result in (with_lse, with_mass, both):
        assert torch.equal(result.out, out)
    assert torch.equal(both.lse, with_lse.lse)
    assert torch.equal(both.mass, with_mass.mass)


BAD = {
    "cache": (lambda q, c: dict(cache=3), TypeError, "cache: expected a TieredCache or a PagedCache, got int"),
    "q type": (lambda q, c: dict(q=1), TypeError, "q: expected a tensor"),
    "q dims": (lambda q, c: dict(q=q[0]), ValueError, r"q: expected \[requests, q_len, a multiple of 2, 64\]"),
    "heads": (lambda q, c: dict(q=q[:, :, :3]), ValueError, r"q: expected .* a multiple of 2, 64\], got shape"),
    "head_dim": (lambda q, c: dict(q=q[..., :32]), ValueError, "q: expected"),
    "rows": (lambda q, c: dict(q=q[:1]), ValueError, "q: expected 2 rows, one per request, got 1"),
    "q_len": (lambda q, c: dict(q=q[:, :0]), ValueError, "q: expected at least one query"),
    "stride": (lambda q, c: dict(q=q.repeat(1, 1, 1, 2)[..., ::2]), ValueError, "q: expected an inner stride of 1"),
    "dtype": (lambda q, c: dict(q=q.double()), TypeError, "q: expected torch.float32 for this cache, got"),
    "layer": (lambda q, c: dict(layer=1), ValueError, "layer: expected an int from 0 to 0, got 1"),
    "requests": (lambda q, c: dict(requests=[0, 5]), ValueError, r"requests: expected some of \(0, 1\), got 5"),
    "requests type": (lambda q, c: dict(requests=["a"]), ValueError, "requests: expected whole numbers, got"),
    "plan": (lambda q, c: dict(plan="x"), TypeError, "plan: expected a DecodePlan or None, got str"),
    "scale": (lambda q, c: dict(scale=-1.0), ValueError, "scale: expected a positive number, got -1.0"),
    "softcap": (lambda q, c: dict(softcap=0), ValueError, "softcap: expected a positive number, got 0"),
    "window": (lambda q, c: dict(sliding_window=0), ValueError, "sliding_window: expected an int of at least 1, got 0"),
    "sinks": (lambda q, c: dict(sinks=torch.zeros(2)), ValueError, r"sinks: expected floats \[4\]"),
    "sinks type": (lambda q, c: dict(sinks=1.0), ValueError, r"sinks: expected floats \[4\].* got 1.0"),
    "backend": (lambda q, c: dict(backend="fast"), ValueError, "backend: expected one of"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named_in_the_error(name: str) -> None:
    change, error, message = BAD[name]
    cache = TieredCache(1, 2, 64, dtype=torch.float32, max_requests=2)
    cache.append(0, *torch.randn(2, 2, 5, 2, 64))
    q = torch.randn(2, 1, 4, 64)
    arguments = dict(q=q, cache=cache) | change(q, cache)
    with pytest.raises(error, match=message):
        decode_attention(**arguments)


def test_unavailable_backends_are_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    case = case_of([10])
    job = op._job(case.q, case.cache, 0, None, None, None, None, None, False, False)
    assert op._choose("auto", job) == ("numba" if HAS_NUMBA else "reference") or HAS_GPU
    monkeypatch.setattr(op, "_has_numba", lambda: False)
    assert op._choose("auto", job) == "reference" or HAS_GPU
    with pytest.raises(RuntimeError, match="backend: numba is not installed"):
        case.run("numba")
    if not HAS_GPU:
        with pytest.raises(RuntimeError, match="backend: cuda needs CUDA tensors"):
            case.run("cuda")
