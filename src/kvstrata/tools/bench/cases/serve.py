"""The serve benchmark: steps of a served model at Llama-3.1-8B shapes, including settling and attention mass.

    serve-B32-16384-0.25   wall-clock time of as many steps as contain a few settlings of every request: `mean` and
                           `slowest` show their cost. While the graph of a step runs, the host advances the cache
                           for the next one.

`no advance` is the step without `TieredCache.advance`, repeated over the same state. The decoder is that of the step
benchmark; 16 bit is a cache that never settles.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from kvstrata.tools.bench import Bench, Case
from kvstrata.tools.bench.clock import Call
from kvstrata.tools.bench.whole import PERIODS

from .step import TOY, Shape, decoder_of

SETTLE_EVERY = 64  # tokens, the default of a cache
SHAPES = [Shape(*sizes, budget) for sizes in ((32, 16384), (64, 4096), (1, 16384)) for budget in (None, 0.25)]
SHAPES.append(Shape(32, 32768, 0.25))  # at 16 bit it does not fit


def build(shape: Shape, device: torch.device) -> Bench:
    decoder = decoder_of(shape, device)

    def check(name: str, i: int, out: list[int]) -> None:
        """Assert that both methods give the same tokens from the same state, and that the budget holds."""
        memory = decoder.cache.memory()
        assert memory.allowed is None or memory.total <= memory.allowed, "the budget does not hold"
        assert len(out) == shape.batch, "tokens are missing"
        fused, again = (decoder.run(method).tolist() for method in ("fused", "unfused"))
        assert fused == again, f"{sum(map(int.__ne__, fused, again))} of {len(fused)} tokens are others"

    calls: dict[str, Call] = {
        "step": lambda i: decoder.step_ahead("fused"),
        "no advance": lambda i: decoder.run("fused").tolist(),
    }
    return Bench(
        contenders=calls, poison=lambda name, i: decoder.poison(), check=check, ours="step", baseline="no advance",
    )  # fmt: skip


def case_of(shape: Shape) -> Case:
    """Steps that settle a few times, at the default ``settle_every``."""
    return Case(
        "serve", shape.name.replace("step-", "serve-"), {**shape.params, "time": "wall"}, shape.bytes,
        partial(build, shape), wall=True, seconds=8.0, rounds=PERIODS * SETTLE_EVERY,
    )  # fmt: skip


def cases(device: torch.device, quick: bool) -> list[Case]:
    toy = replace(TOY, context=300, budget=0.3)
    return [case_of(shape) for shape in ([toy] if device.type != "cuda" else SHAPES[2:4] if quick else SHAPES)]
