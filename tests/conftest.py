"""Where the tests run: on the CPU with Triton's interpreter, or on a CUDA device with every backend."""

from __future__ import annotations

import os

import torch

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is decorated, so before kvstrata is imported

import pytest  # noqa: E402
from hypothesis import HealthCheck, settings  # noqa: E402

settings.register_profile("kvstrata", deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
settings.load_profile("kvstrata")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if HAS_GPU:
        return
    for item in items:
        if item.get_closest_marker("gpu") or item.get_closest_marker("sanitizer"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if HAS_GPU else "cpu")
