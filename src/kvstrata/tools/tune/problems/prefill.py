"""Prefill's cases: all three kernels of the GPU, or on any device the reference, some heads at a time."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from kvstrata.attention.prefill import op as prefill
from kvstrata.attention.prefill import space as prefill_space
from kvstrata.attention.prefill.configs import features, nearest
from kvstrata.attention.prefill.job import PrefillJob
from kvstrata.attention.prefill.tiles import Config, choice_of, invalid, of_choice, tile_of
from kvstrata.jit.tuned import Choice
from kvstrata.tools.bench.case import sets_for
from kvstrata.tools.bench.cases.decode import _read
from kvstrata.tools.bench.cases.prefill import CHECKED, Shape, _close, _expected, _job, _shapes
from kvstrata.tools.bench.clock import Call
from kvstrata.tools.tune.gates import Needs
from kvstrata.tools.tune.space import Space

from . import Problem, Ready

PROCESSORS = 132  # where no GPU is at hand: those of the GPU that the default table is of
TOY = Shape(1, 4, 128, 64, True)


def problems(arch: str, device: torch.device, backend: str) -> list[Problem]:
    if backend == "reference":
        return [_reference()]
    return [_gpu(shape, arch, device) for shape in _shapes(quick=False)]


def _tiles(shape: Shape, rows: int) -> int:
    return shape.batch * shape.heads * -(-shape.length // rows)


def default_of(shape: Shape, arch: str, processors: int) -> Choice:
    """Choice that the op makes without a tuned table."""
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


def _checks(jobs: list[PrefillJob], call: Callable[[Choice], Call], device: torch.device) -> Ready:
    wanted = [_expected(job) for job in jobs]
    written: dict[int, torch.Tensor] = {}  # a replay writes where it wrote before

    def poison(i: int) -> None:
        if i in written:
            written[i].fill_(float("nan"))

    def check(i: int, out: torch.Tensor) -> None:
        written[i] = out
        assert out.shape == jobs[i].q.shape
        _close(out[:1, :, :CHECKED], wanted[i])
        assert not bool(out.isnan().any()), "an output is NaN"

    return Ready(call, poison, check, _read(device) if device.type == "cuda" else None)


def _build(shape: Shape, sets: int, device: torch.device) -> Ready:
    from kvstrata.attention.prefill import cuda as prefill_cuda
    from kvstrata.attention.prefill import triton as prefill_triton

    jobs = [_job(shape, device, seed) for seed in range(sets)]

    def call(choice: Choice) -> Call:
        tile = of_choice(choice, shape.dim)
        if isinstance(tile, Config):
            return lambda i: prefill_triton.run(jobs[i], tile)[0]
        return lambda i: prefill_cuda.run(jobs[i], tile)[0]

    return _checks(jobs, call, device)


def _reference() -> Problem:
    """Heads at a time."""
    return Problem(
        op="prefill",
        case=f"{TOY.name}-reference",
        shape={"tokens": TOY.length},
        space=Space({"heads": (1, 2, 4)}),
        default={"heads": 2},
        build=_build_reference,
    )


def _build_reference(device: torch.device) -> Ready:
    job = _job(TOY, device, 0)

    def call(choice: Choice) -> Call:
        parts = [slice(at, at + choice["heads"]) for at in range(0, TOY.heads, choice["heads"])]

        def run(i: int) -> torch.Tensor:
            parts_of_job = [
                job._replace(q=job.q[:, :, part], k=job.k[:, :, part], v=job.v[:, :, part]) for part in parts
            ]
            return torch.cat([prefill.run(one, "reference")[0] for one in parts_of_job], 2)

        return run

    return _checks([job], call, device)
