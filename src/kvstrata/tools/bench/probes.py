"""The two yardsticks of every result: the bandwidth of a plain copy, and the cost of an empty kernel."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch

from .clock import Call
from .stats import summary
from .timer import Timer

LARGEST = 4 << 30  # bytes of a buffer; more are copied in parts, so that a probe does not take all memory
EMPTY = Path(__file__).parent / "baselines" / "empty.cu"


def copy_call(moved: int, sets: int, device: torch.device) -> Call:
    """Contiguous copy that reads and writes ``moved`` bytes in total, on rotating buffers."""
    half = max(moved // 2, 1)
    if half > LARGEST:
        return _copy_in_parts(half, device)
    stride = -(-half // 512) * 512  # every buffer aligned like a separate allocation
    source = torch.randint(0, 256, (sets, stride), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    pairs = [(target[i, :half], source[i, :half]) for i in range(sets)]
    return lambda i: pairs[i][0].copy_(pairs[i][1])


def _copy_in_parts(half: int, device: torch.device) -> Call:
    source = torch.randint(0, 256, (LARGEST,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)

    def copy(i: int) -> None:
        for first in range(0, half, LARGEST):
            size = min(LARGEST, half - first)
            target[:size].copy_(source[:size])

    return copy


@functools.cache
def empty_call(device: torch.device) -> tuple[Call, str]:
    """A call that does nothing on the device, and a description of it."""
    if device.type != "cuda":
        return (lambda i: None), "an empty Python function"
    try:
        from kvstrata import jit

        kernel = jit.load(EMPTY, "empty")
        kernel.launch(grid=1, block=32)
    except Exception as error:  # a run is worth more than this probe; the report says which one was used
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        return (lambda i: torch.cuda._sleep(0)), f"torch.cuda._sleep(0), since {reason}"
    return (lambda i: kernel.launch(grid=1, block=32)), EMPTY.name


def copy_bandwidth(timer: Timer, nbytes: int | None = None, rounds: int = 20) -> dict[str, Any]:
    """TB/s of a large device copy, bytes read plus bytes written, with its 95 % interval."""
    nbytes = nbytes or (2 << 30 if timer.device.type == "cuda" else 1 << 27)
    us = summary(timer.sample({"copy": copy_call(2 * nbytes, 1, timer.device)}, rounds)["copy"])
    tb_s = [2e-6 * nbytes / t for t in (us.median, us.hi, us.lo)]
    return {"nbytes": nbytes, **dict(zip(("tb_s", "lo", "hi"), tb_s, strict=True))}


def floor(timer: Timer) -> dict[str, Any]:
    """Microseconds between two events around an empty kernel, with their 95 % interval, and the kernel's name."""
    call, kernel = empty_call(timer.device)
    us = summary(timer.sample({"empty": call}, 100)["empty"])
    return {"us": us.median, "lo": us.lo, "hi": us.hi, "kernel": kernel}
