"""Compares attention inside a vLLM engine with the float32 reference, on the same rows and packed bytes.

Tokens of a model with random weights say little about 4 bits and fewer, since such a model amplifies rounding. So every
layer's attention is compared directly, in steps without CUDA graphs; the steps with graphs must then give the same
tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch

from kvstrata.engines import packed
from kvstrata.engines.batch import Batch, DecodePart, PrefillPart

OPS = ("decode_packed", "prefill_packed", "prefill_attention")


class Worst:
    """Largest relative error so far, and the number of calls that were compared."""

    def __init__(self) -> None:
        self.error, self.calls = 0.0, 0

    def add(self, out: torch.Tensor, expected: torch.Tensor) -> None:
        """Compare two outputs; NaN is an infinite error."""
        size = expected.float().norm()
        error = float((out.float() - expected.float()).norm() / size.clamp_min(1e-20))
        self.error = max(self.error, error if error == error else float("inf"))
        self.calls += 1


@contextmanager
def compare_with_reference() -> Iterator[Worst]:
    """Run every `PackedLayer.attend` twice, with the kernels and with the reference; the kernels' output is used."""
    worst, attend = Worst(), packed.PackedLayer.attend

    def attend_twice(
        self: packed.PackedLayer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cache: torch.Tensor, batch: Batch,
        out: torch.Tensor,
    ) -> None:  # fmt: skip
        attend(self, q, k, v, cache, batch, out)
        expected = torch.zeros_like(out)
        ops: Any = {op: partial(getattr(packed, op), backend="reference") for op in OPS}
        with mock.patch.multiple(packed, **ops):
            attend(self, q, k, v, cache, batch, expected)
        parts: list[DecodePart | PrefillPart] = [*batch.decodes, *batch.prefills]
        for part in parts:
            rows = slice(part.first, part.first + part.tokens)
            worst.add(out[rows], expected[rows])

    with mock.patch.object(packed.PackedLayer, "attend", attend_twice):
        yield worst


@contextmanager
def without_graphs(runner: Any) -> Iterator[None]:
    """Context in which a vLLM model runner runs its steps eagerly."""
    with mock.patch.object(runner.cudagraph_manager, "_graphs_captured", False):
        yield
