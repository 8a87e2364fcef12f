"""Replay's cases: a step's copies into buffers of its own size, cut by blocks or warps."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial

import torch

from kvstrata.jit.tuned import Choice
from kvstrata.replay import CopyPlan, space
from kvstrata.replay import cuda as copy_cuda
from kvstrata.tools.bench.case import sets_for
from kvstrata.tools.bench.cases.replay import Inputs, Style, bytes_of, shapes_of
from kvstrata.tools.bench.clock import Call
from kvstrata.tools.tune.gates import Needs
from kvstrata.tools.tune.space import Space

from . import Problem, Ready

CASES = (
    Style("vectors", 1, 32), Style("vectors", 7, 32), Style("fa", 1, 16), Style("fa", 64, 512), Style("fa", 64, 4096),
    Style("fa", 256, 4096), Style("fa", 256, 8192), Style("nsa", 64, 4096),
)  # fmt: skip


def problems(arch: str, device: torch.device) -> list[Problem]:
    return [_cuda(style, device) for style in CASES]


def _cuda(style: Style, device: torch.device) -> Problem:
    copies = len(shapes_of(style))
    sets = sets_for(bytes_of(style), device, memory=1 << 30) if device.type == "cuda" else 1

    def kernels(choice: Choice) -> list[Needs]:
        config = copy_cuda.Config(**choice)
        return [Needs(copy_cuda.SOURCE, copy_cuda.entry_of(copies, False, False, config), config.threads)]

    return Problem(
        op="replay",
        case=style.case,
        shape=copy_cuda.features(copies, bytes_of(style) // 2, False),
        space=Space(space.CHOICES),
        default=asdict(copy_cuda.DEFAULT),
        build=partial(_build_cuda, style, sets),
        sets=sets,
        invalid=lambda choice: space.invalid(copy_cuda.Config(**choice)),
        kernels=kernels,
    )


def _build_cuda(style: Style, sets: int, device: torch.device) -> Ready:
    inputs = [Inputs(style, device, seed, style) for seed in range(sets)]

    def call(choice: Choice) -> Call:
        config = copy_cuda.Config(**choice)
        plans = [CopyPlan(one.dst, one.src, backend="cuda").configure(config) for one in inputs]
        return lambda i: plans[i].run()

    return Ready(call, lambda i: inputs[i].poison(), lambda i, out: inputs[i].assert_copied())
