"""decode_packed: every backend against the float32 model, over blocks with holes, poison, padding and shared blocks."""

from __future__ import annotations

import pytest
import torch

import emulator
from conftest import HAS_GPU
from kvstrata import Format
from packed_model import DEVICE, Batch, calibration_of, without_cuda

EMULATED = pytest.param(
    "cuda", marks=pytest.mark.skipif(not HAS_GPU and bool(emulator.missing()), reason=str(emulator.missing()))
)
BACKENDS = ["reference", EMULATED]
each_backend = pytest.mark.parametrize("backend", BACKENDS)


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    if not HAS_GPU:
        without_cuda(monkeypatch)


def sinks(heads: int) -> torch.Tensor:
    return torch.tensor([0.5, -1.0, -torch.inf, 2.0, 0.0, 1.0])[:heads].to(DEVICE)


CASES: dict[str, tuple[tuple, list[int], dict, dict]] = {
    "one query": (("K4V4", 64, 16), [150, 1, 0, 97], {}, {}),
    "D 128, blocks of two pages": (("K4V2", 128, 64), [300, 64, 129], dict(pages_per_block=2, strided=True), {}),
    "8 bit in parts of pages": (("K8V8", 128, 64), [200, 70], dict(shared=True), dict(group=1)),
    "ragged queries": (("K4V4", 64, 16), [70, 33, 5], {}, dict(q_lens=[3, 1, 5], group=4)),
    "a request without queries": (("K2V2", 64, 32), [70, 33, 50], {}, dict(q_lens=[2, 0, 1])),
    "window": (("K4V4", 64, 16), [150, 20, 3], dict(pages_per_block=4), dict(sliding_window=33)),
    "window, queries": (("K3V3", 64, 16), [90, 40], {}, dict(q_lens=[4, 4], sliding_window=17, group=2)),
    "sinks and softcap": (("K4V4", 64, 16), [60, 0], {}, dict(sinks=sinks(6), softcap=3.0, loud=4.0)),
    "centre and balance": (("K4V4", 64, 16), [60, 25], dict(calibration=True), dict(sinks=sinks(6))),
    "centre under softcap": (("K4V4", 64, 16), [40], dict(calibration=True), dict(softcap=5.0, scale=0.2)),
    "sixteen queries of sixteen heads": (("K4V4", 64, 16), [60], dict(kv_heads=1), dict(q_lens=[16], group=16)),
    "D 256": (("K4V2", 256, 16), [50, 17], dict(dtype=torch.float16), dict(group=2)),
    "odd head_dim": (("K3V2", 80, 32), [70, 21], {}, dict(sliding_window=40)),
    "loud": (("K8V4", 64, 16), [130], {}, dict(loud=30.0)),
}


def case(name: str, backend: str) -> None:
    (fmt, dim, tokens), lengths, batch, call = CASES[name]
    batch, call = dict(batch), dict(call)
    if batch.get("calibration"):
        batch["calibration"] = calibration_of(2, dim)
    Batch(Format.parse(fmt, dim, tokens), lengths, **batch).check(backend, **call)


@each_backend
@pytest.mark.parametrize("name", CASES)
def test_against_the_model(name: str, backend: str) -> None:
    case(name, backend)
