"""Tuning problems of prefill: its three GPU kernels."""

from __future__ import annotations

from functools import partial

import torch

from kvstrata.attention.prefill import space as prefill_space
from kvstrata.attention.prefill.configs import features, nearest
from kvstrata.attention.prefill.tiles import Config, choice_of, invalid, of_choice, tile_of
from kvstrata.jit.tuned import Choice
from kvstrata.tools.bench.case import sets_for
from kvstrata.tools.bench.cases.prefill import Shape, make_bench, make_job, shapes_of
from kvstrata.tools.bench.clock import Call
from kvstrata.tools.tune.gates import Needs
from kvstrata.tools.tune.space import Space

from . import Problem, Ready

PROCESSORS = 132  # without a GPU: that of the GPU of the default table


def problems(arch: str, device: torch.device) -> list[Problem]:
    return [_gpu(shape, arch, device) for shape in shapes_of(quick=False)]


def _tiles(shape: Shape, rows: int) -> int:
    return shape.batch * shape.heads * -(-shape.length // rows)


def default_of(shape: Shape, arch: str, processors: int) -> Choice:
    """The op's choice without a tuned table."""
    few = _tiles(shape, 128) <= processors
    tile = nearest(shape.dim, shape.length, shape.causal, few) if arch == "sm_90" else None
    return choice_of(tile or tile_of(shape.dim, _tiles(shape, 64), processors))


def _gpu(shape: Shape, arch: str, device: torch.device) -> Problem:
    cuda = device.type == "cuda"
    processors = torch.cuda.get_device_properties(device).multi_processor_count if cuda else PROCESSORS
    sets = min(sets_for(shape.bytes, device), 2) if cuda else 1
    size = (shape.batch, shape.heads, shape.kv_heads or shape.heads, shape.length, shape.dim)

    def kernels(choice: Choice) -> list[Needs]:
        return [Needs(*kernel) for kernel in prefill_space.kernels(size, shape.causal, choice)]

    return Problem(
        op="prefill",
        case=shape.name,
        shape=features(shape.dim, shape.length, shape.causal, _tiles(shape, 128)),
        space=Space(prefill_space.choices(shape.causal, arch), prefill_space.WHEN),
        default=default_of(shape, arch, processors),
        build=partial(_build, shape, sets),
        sets=sets,
        graph=True,
        invalid=lambda choice: invalid(choice, shape.dim),
        kernels=kernels,
    )


def _build(shape: Shape, sets: int, device: torch.device) -> Ready:
    from kvstrata.attention.prefill import cuda as prefill_cuda
    from kvstrata.attention.prefill import triton as prefill_triton

    jobs = [make_job(shape, device, seed) for seed in range(sets)]
    bench = make_bench(jobs, {}, "", "")

    def call(choice: Choice) -> Call:
        tile = of_choice(choice, shape.dim)
        if isinstance(tile, Config):
            return lambda i: prefill_triton.run(jobs[i], tile)[0]
        return lambda i: prefill_cuda.run(jobs[i], tile)[0]

    return Ready(call, partial(bench.poison, ""), partial(bench.check, ""), bench.before)
