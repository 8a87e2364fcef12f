"""Backends of prefill_attention_cached, for tests that run with each of them."""

from __future__ import annotations

import pytest

from decode_model import INTERPRETED
from kvstrata.attention.prefill_cached import triton as cached_triton

# On Hopper the Triton backend has a second kernel, prefill_cached/gluon.py: portable is Triton without it.
each_backend = pytest.mark.parametrize("backend", ["reference", "triton", "portable"], indirect=True)


def choose_backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Fixture: the backend of a case."""
    if request.param != "portable":
        return request.param
    if INTERPRETED:
        pytest.skip("under the interpreter there is no other kernel")
    monkeypatch.setattr(cached_triton, "_specialized", lambda job: False)
    return "triton"
