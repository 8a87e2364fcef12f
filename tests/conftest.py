"""Where the tests run: on the CPU with Triton's interpreter, or on a CUDA device with every backend."""

from __future__ import annotations

import functools
import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # workers are as many as cores; read when torch is imported

import torch

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is decorated, so before kvstrata is imported
    import interpreter

    interpreter.speed_up()

import pytest  # noqa: E402
from hypothesis import HealthCheck, settings  # noqa: E402
from typer import testing  # noqa: E402

import compile_once  # noqa: E402

compile_once.share()
testing._get_command = functools.cache(testing._get_command)  # 80 ms, which every invocation took
settings.register_profile("kvstrata", deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
settings.load_profile("kvstrata")


def capture_without_collections() -> None:
    """Disable garbage collection in ``torch.cuda.graph``: an earlier test's graph, freed there, ends the capture."""
    kind: Any = torch.cuda.graph
    enter, leave = kind.__enter__, kind.__exit__

    def __enter__(self: Any) -> None:
        gc.disable()
        try:
            enter(self)
        except BaseException:
            gc.enable()
            raise

    def __exit__(self: Any, *given: Any) -> None:
        try:
            leave(self, *given)
        finally:
            gc.enable()

    kind.__enter__, kind.__exit__ = __enter__, __exit__


if HAS_GPU:
    capture_without_collections()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if HAS_GPU:
        return
    for item in items:
        if item.get_closest_marker("gpu") or item.get_closest_marker("sanitizer"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_collection_finish() -> None:
    """Modules and tests, a million objects, are looked at by no later garbage collection."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if HAS_GPU else "cpu")


class Watch:
    """A clock that stands in for the module `time`: it runs while something sleeps, and by `tick` when it is read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = self.tick = 0.0
        self._patch = monkeypatch

    def drive(self, *modules: Any) -> None:
        """Replace `time` in these modules."""
        for module in modules:
            self._patch.setattr(module, "time", self)

    def monotonic(self) -> float:
        self.now += self.tick
        return self.now

    perf_counter = monotonic

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    return Watch(monkeypatch)


def invoke(*arguments: object) -> Any:
    """`kvstrata` with these arguments."""
    from kvstrata.tools.cli import app

    return testing.CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A folder of one's own for cubins and tuned tables."""
    from kvstrata.jit import tuned

    monkeypatch.setenv("KVSTRATA_CACHE", str(tmp_path / "cache"))
    tuned.forget()
    yield tmp_path / "cache"
    tuned.forget()


@pytest.fixture
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A backend's name; "emulated" is cuda on the CPU, on three multiprocessors."""
    if request.param != "emulated":
        return request.param
    import emulator

    emulator.decode_without_cuda(monkeypatch)
    return "cuda"
