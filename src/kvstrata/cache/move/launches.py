"""Kernel launches that are prepared together and run in order on the current stream."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from kvstrata import jit


@functools.lru_cache(maxsize=256)
def kernel(source: Path, entry: str, device: int) -> jit.Kernel:
    """The kernel ``entry`` of a source, compiled for a device."""
    return jit.load(source, entry, jit.arch_of(device))


@dataclass(frozen=True)
class Launches:
    """Launches on one device; ``kept`` are the tensors they read. ``run`` allocates nothing."""

    device: int
    launches: tuple[jit.Launch, ...]
    kept: object

    def run(self) -> None:
        """Launch all on the device's current stream."""
        if not self.launches:
            return
        with jit.use_device(self.device):
            stream = jit.current_stream(self.device)
            for launch in self.launches:
                launch(stream)


def prepare(device: int, build: Callable[[], Iterable[jit.Launch]], kept: object) -> Launches:
    """Call ``build`` with the device's context current."""
    with jit.use_device(device):
        return Launches(device, tuple(build()), kept)
