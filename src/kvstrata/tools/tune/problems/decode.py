"""Tuning problems of decode: the CUDA C++ kernels."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch

from kvstrata.attention.decode import op, space, stages
from kvstrata.jit.tuned import Choice
from kvstrata.tools.bench.attention import fill_l2
from kvstrata.tools.bench.case import sets_for
from kvstrata.tools.bench.cases import decode
from kvstrata.tools.bench.cases.decode import MEAN, NARROW, Shape, formats_of
from kvstrata.tools.bench.clock import Call
from kvstrata.tools.tune.gates import Needs
from kvstrata.tools.tune.space import Space

from . import Problem, Ready

Tiers = tuple[str, ...]
CASES: list[tuple[Shape, Tiers]] = [
    (Shape(32, 16384), NARROW),
    (Shape(32, 1024), NARROW),
    (Shape(1, 16384), NARROW),
    (Shape(32, 16384, q_len=4), NARROW),
    (Shape(32, 16384), ("K4V4",)),
    (Shape(32, 16384), ("K2V2",)),
    (Shape(32, 4096), ()),
]


def problems(arch: str, device: torch.device) -> list[Problem]:
    return [_cuda(shape, tiers, arch, device) for shape, tiers in CASES]


def _name(shape: Shape, tiers: Tiers) -> str:
    return f"{'mixed' if len(tiers) > 1 else ''.join(tiers) or '16bit'}-{shape.name}"


def _cuda(shape: Shape, tiers: Tiers, arch: str, device: torch.device) -> Problem:
    formats = formats_of(shape, tiers)
    columns = shape.q_len * shape.heads // shape.kv_heads
    page = formats[0].page_tokens
    tokens = (-(-shape.tokens // page) + len(formats)) * page  # as in the synthetic layer's table
    sets = min(sets_for(decode.bytes_of(shape, tiers, MEAN), device), 2) if device.type == "cuda" else 1

    def kernels(choice: Choice) -> list[Needs]:
        needed = space.kernels(formats, torch.bfloat16, stages.Cut(**choice), arch, ordered=shape.q_len > 1)
        return [Needs(Path(source), entry, threads, dynamic) for source, entry, threads, dynamic in needed]

    return Problem(
        op="decode",
        case=_name(shape, tiers),
        shape=stages.features(formats, False, shape.requests * shape.kv_heads, tokens, columns),
        space=Space(space.choices(columns)),
        default=asdict(stages.cut_of(formats, columns, arch)),
        build=partial(_build_cuda, shape, tiers, sets),
        sets=sets,
        graph=True,
        invalid=lambda choice: space.invalid(stages.Cut(**choice)),
        kernels=kernels,
    )


def _build_cuda(shape: Shape, tiers: Tiers, sets: int, device: torch.device) -> Ready:
    from kvstrata.attention.decode.cuda import WorkPlan
    from kvstrata.attention.decode.source import Source

    jobs = [decode.make_job(shape, tiers, MEAN, device, seed) for seed in range(sets)]
    checked = [job._replace(q=job.q[: decode.CHECKED], requests=job.requests[: decode.CHECKED]) for job in jobs]
    wanted = [op.run(job, "reference")[0].float() for job in checked]
    sizes = (shape.kv_heads, shape.heads, shape.q_len)

    def call(choice: Choice) -> Call:
        plans = [WorkPlan(Source.of(job), tuple(job.requests), *sizes, cut=stages.Cut(**choice)) for job in jobs]
        for plan in plans:
            plan.update()
        return lambda i: plans[i].run(jobs[i])[0]

    return Ready(call, lambda i: None, lambda i, out: decode.assert_first_close(out, wanted[i]), fill_l2(device))
