"""The store's cases: the CUDA C++ kernels, or on any device the reference, with a few tokens at a time."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from kvstrata.jit.tuned import Choice
from kvstrata.store import cuda as store_cuda
from kvstrata.store import reference, space
from kvstrata.store.job import Task, Tensors, check
from kvstrata.tools.bench.case import sets_for
from kvstrata.tools.bench.cases.store import ALIGNED, KINDS, Inputs, Kind, planned
from kvstrata.tools.bench.clock import Call
from kvstrata.tools.tune.gates import Needs
from kvstrata.tools.tune.space import Space

from . import Problem, Ready

TOY = 512  # tokens


def problems(arch: str, device: torch.device) -> list[Problem]:
    return [_cuda(kind, tokens, arch, device) for kind in KINDS for tokens in kind.counts]


def task_of(kind: Kind, tokens: int) -> Task:
    """Task of the benchmark's inputs, without allocating them."""
    empty = partial(torch.empty, device="meta")
    rows = empty(tokens, kind.heads, kind.dim, dtype=kind.source)
    cache = empty(kind.cache_shape(tokens), dtype=kind.cache)
    scale = empty(kind.heads) if kind.source != kind.cache else None
    v = (rows, cache, scale) if kind.has_v else (None, None, None)
    tensors = Tensors(rows, v[0], cache, v[1], empty(tokens, dtype=torch.int32), scale, v[2])
    return check(tensors, kind.layout)


def _cuda(kind: Kind, tokens: int, arch: str, device: torch.device) -> Problem:
    task = task_of(kind, tokens)
    shape = store_cuda.shape_of(task, ALIGNED)

    def kernels(choice: Choice) -> list[Needs]:
        config = store_cuda.Config.of(choice)
        return [Needs(store_cuda.SOURCE, space.entry(shape, torch.int32, config), config.threads)]

    sets = sets_for(tokens * kind.bytes_per_token, device) if device.type == "cuda" else 1
    return Problem(
        op="store",
        case=f"{kind.name}-{tokens}",
        shape=store_cuda.features(shape),
        space=Space(space.CHOICES, space.WHEN),
        default=space.choice_of(store_cuda.config_of("cuda", shape, arch)),
        build=partial(_build_cuda, kind, tokens, sets),
        sets=sets,
        invalid=lambda choice: space.invalid(shape, store_cuda.Config.of(choice), arch),
        kernels=kernels,
    )


def _inputs(kind: Kind, tokens: int, sets: int, device: torch.device) -> tuple[list[Inputs], dict[str, Any]]:
    inputs = [Inputs(kind, tokens, device, seed) for seed in range(sets)]
    return inputs, {"poison": lambda i: inputs[i].poison(), "check": lambda i, out: inputs[i].assert_stored()}


def _build_cuda(kind: Kind, tokens: int, sets: int, device: torch.device) -> Ready:
    inputs, checks = _inputs(kind, tokens, sets, device)
    return Ready(call=lambda choice: planned(inputs, store_cuda.Config.of(choice)), **checks)


def toy(device: torch.device) -> Problem:
    """Tokens at a time: the only parameter of a loop over torch's indexed writes."""
    kind, tokens = KINDS[0], TOY
    return Problem(
        op="store",
        case=f"{kind.name}-{tokens}-reference",
        shape={"tokens": tokens},
        space=Space({"chunk": (16, 64, 256, tokens)}),
        default={"chunk": 64},
        build=partial(_build_reference, kind, tokens),
    )


def _build_reference(kind: Kind, tokens: int, device: torch.device) -> Ready:
    inputs, checks = _inputs(kind, tokens, 1, device)

    def call(choice: Choice) -> Call:
        tensors, size = inputs[0].tensors, choice["chunk"]
        k, v = tensors.k, tensors.v

        def run(i: int) -> None:
            for part in (slice(first, first + size) for first in range(0, tokens, size)):
                slots = tensors.slot_mapping[part]
                rows = tensors._replace(k=k[part], v=None if v is None else v[part], slot_mapping=slots)
                reference.store_kv(rows, kind.layout)

        return run

    return Ready(call=call, **checks)
