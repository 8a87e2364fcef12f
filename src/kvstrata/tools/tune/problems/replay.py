"""Replay's cases: a step's copies into buffers of its own size, cut by blocks or warps; or a toy, in plain torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import torch

from kvstrata.jit.tuned import Choice
from kvstrata.replay import CopyPlan, reference, space
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
TOY = Style("fa", 8, 64)


def problems(arch: str, device: torch.device, backend: str) -> list[Problem]:
    return [_reference()] if backend == "reference" else [_cuda(style, device) for style in CASES]


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


def _inputs(style: Style, sets: int, device: torch.device) -> tuple[list[Inputs], dict[str, Any]]:
    inputs = [Inputs(style, device, seed, style) for seed in range(sets)]
    return inputs, {"poison": lambda i: inputs[i].poison(), "check": lambda i, out: inputs[i].assert_copied()}


def _build_cuda(style: Style, sets: int, device: torch.device) -> Ready:
    inputs, checks = _inputs(style, sets, device)

    def call(choice: Choice) -> Call:
        config = copy_cuda.Config(**choice)
        plans = [CopyPlan(one.dst, one.src, backend="cuda").configure(config) for one in inputs]
        return lambda i: plans[i].run()

    return Ready(call=call, **checks)


def _reference() -> Problem:
    """Rows at a time."""
    return Problem(
        op="replay",
        case=f"{TOY.case}-reference",
        shape={"rows": TOY.rows},
        space=Space({"rows": (1, 2, 4, TOY.rows + 1)}),
        default={"rows": 2},
        build=_build_reference,
    )


def _build_reference(device: torch.device) -> Ready:
    inputs, checks = _inputs(TOY, 1, device)
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]] = list(zip(inputs[0].dst, inputs[0].src, strict=True))

    def call(choice: Choice) -> Call:
        rows = choice["rows"]

        def run(i: int) -> None:
            for dst, src in pairs:
                for first in range(0, len(src), rows):
                    reference.copy(dst[first : first + rows], src[first : first + rows])

        return run

    return Ready(call=call, **checks)
