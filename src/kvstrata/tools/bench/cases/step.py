"""The step benchmark: a complete decode step, captured, with every method of updating the graph's metadata.

The step is that of `examples/engine.py` (`kvstrata.hf.step`): GEMMs by torch, `TieredCache.write` and
`decode_attention` in every layer, at the shapes of Llama-3.1-8B with random weights. Contexts are random K and V. Two
cases for each batch:

    step-B32-4096-16bit      wall-clock time of a step as an engine runs it: advance the cache, upload ids, positions
                             and requests, replay, read the tokens. Contexts grow by one token per step.
    step-B32-4096-16bit-gpu  device time of the metadata and the replay, over the same state each time; `replay` is
                             the graph alone, so the rest is the metadata's share. Requests do not grow, so no layer
                             observes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch

import kvstrata
from kvstrata.replay import GraphRunner
from kvstrata.tools.bench import Bench, Case
from kvstrata.tools.bench.clock import Call
from kvstrata.tools.bench.machine import release

OBSERVED = 2  # layers per step whose mass is added to importance, if there is a budget
GROWTH = 1024  # tokens that a request may grow by during sampling
INPUTS = ("ids", "positions", "requests")
# How metadata gets into the graph: options of a runner.
STAGINGS: dict[str, dict[str, Any]] = {
    "fused": dict(staging="copy", fused=True),
    "unfused": dict(staging="copy", fused=False),
    "in graph": dict(staging="graph", fused=True),
    "host-staged": dict(staging="host"),
}


@dataclass(frozen=True)
class Model:
    """Sizes of a decoder, and its ``model_type`` in transformers."""

    layers: int = 32
    hidden: int = 4096
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    mlp: int = 14336
    vocab: int = 128256
    family: str = "llama"
    window: int | None = None  # tokens that a query sees in all but every sixth layer

    @property
    def weights(self) -> int:
        """Weights that a step reads; of the embedding one row per token."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.mlp) + self.vocab * self.hidden


@dataclass(frozen=True)
class Shape:
    """A batch of requests with contexts of up to ``context`` tokens, and the cache's budget; None is 16 bit."""

    batch: int
    context: int
    budget: float | None = None
    model: Model = Model()
    page_tokens: int = 64

    @property
    def name(self) -> str:
        return f"step-B{self.batch}-{self.context}-{'16bit' if self.budget is None else self.budget}"

    @property
    def params(self) -> dict[str, Any]:
        return {"B": self.batch, "T": self.context, "budget": self.budget or "16bit"}

    @property
    def lengths(self) -> list[int]:
        """Tokens of each request: at different fill levels of their pages, so that not all need a new one at once."""
        return [self.context - 7 * i % self.page_tokens for i in range(self.batch)]

    @property
    def bytes(self) -> int:
        """Bytes of weights, and of K and V of the contexts under the budget."""
        one = 2 * self.model.layers * self.model.kv_heads * self.model.head_dim
        return 2 * self.model.weights + int(2 * one * sum(self.lengths) * (self.budget or 1.0))


@lru_cache(maxsize=1)
def model_of(sizes: Model, device: torch.device) -> Any:
    """Model with random weights, created on the device."""
    from transformers import AutoConfig, AutoModelForCausalLM

    windows = {} if sizes.window is None else {"sliding_window": sizes.window}
    config = AutoConfig.for_model(
        sizes.family, **windows, hidden_size=sizes.hidden, intermediate_size=sizes.mlp, num_hidden_layers=sizes.layers,
        vocab_size=sizes.vocab, num_attention_heads=sizes.heads, num_key_value_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device(device):
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


class Decoder:
    """Requests with filled contexts, and a captured step for each method of updating its metadata."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        from kvstrata.hf.step import decode_step

        sizes, batch = shape.model, shape.batch
        self.model, self.batch, self.device = model_of(sizes, device), batch, device
        self.cache = kvstrata.TieredCache(
            sizes.layers, sizes.kv_heads, sizes.head_dim, budget=shape.budget, dtype=self.model.dtype, device=device,
            max_requests=batch, max_tokens=shape.context + GROWTH, page_tokens=shape.page_tokens,
            rope=self.model.model.rotary_emb.inv_freq,
        )  # fmt: skip
        kvstrata.warmup(self.cache, sizes.heads, progress=False)
        self.requests = [self.cache.add_request() for _ in range(batch)]
        self._fill(shape)
        self.plan = kvstrata.DecodePlan(self.cache, sizes.heads, observe=0 if shape.budget is None else OBSERVED)
        buffers = dict.fromkeys(INPUTS, ((batch,), torch.int32))
        step = partial(decode_step, self.model, self.cache, self.plan)
        pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
        self.runners = {
            name: GraphRunner(
                step, buffers, [batch], fill={"requests": -1}, device=device, pool=pool, progress=False, **options
            ).capture()
            for name, options in STAGINGS.items()
        }
        # Metadata on the host; on the device it is one copy, whose rows are the inputs.
        self.host = torch.zeros(3, batch, dtype=torch.int32, pin_memory=device.type == "cuda")
        self.host[0] = torch.randint(0, sizes.vocab, (batch,), generator=torch.Generator().manual_seed(0))
        self.host[1] = torch.tensor(shape.lengths) - 1  # position of the newest token
        self.host[2] = torch.arange(batch)
        self.on_device = torch.zeros_like(self.host, device=device)
        self.host_rows = dict(zip(INPUTS, self.host.unbind(), strict=True))
        self.device_rows = dict(zip(INPUTS, self.on_device.unbind(), strict=True))
        self.advance()

    def _fill(self, shape: Shape) -> None:
        generator, tokens = torch.Generator(self.device).manual_seed(0), sum(shape.lengths)
        rows = (2, tokens, shape.model.kv_heads, shape.model.head_dim)
        k, v = torch.randn(rows, generator=generator, device=self.device, dtype=self.model.dtype)
        for layer in range(shape.model.layers):
            self.cache.append(layer, k, v, self.requests, shape.lengths)

    def advance(self) -> None:
        """Make room for one more token per request, and update positions."""
        self.cache.advance(self.requests)
        self.host[1] += 1

    def run(self, method: str) -> torch.Tensor:
        """Update the metadata by the given method, replay, and return the next tokens: views of the runner's memory."""
        runner = self.runners[method]
        if method == "host-staged":
            return runner(**self.host_rows)
        if method == "in graph":
            for name, row in self.host_rows.items():
                runner.staged[name].copy_(row, non_blocking=True)
            return runner.replay(self.batch)
        self.on_device.copy_(self.host, non_blocking=True)
        return runner(**self.device_rows)

    def step(self, method: str) -> list[int]:
        """A step as an engine runs it; its tokens are the inputs of the next step."""
        self.advance()
        tokens: list[int] = self.run(method).tolist()
        self.host[0] = torch.tensor(tokens)
        return tokens

    def step_ahead(self, method: str) -> list[int]:
        """A step whose room was made before: replay, make room for the next one meanwhile, read the tokens."""
        tokens = self.run(method)
        copy = self.host.clone()  # the previous copy may still be in flight
        self.host = copy.pin_memory() if self.device.type == "cuda" else copy
        self.host_rows = dict(zip(INPUTS, self.host.unbind(), strict=True))
        self.advance()
        read: list[int] = tokens.tolist()
        self.host[0] = torch.tensor(read)
        return read

    def poison(self) -> None:
        """Overwrite all metadata with zeros and padding requests, so that missing metadata changes the tokens."""
        on_device = [self.device_rows, *(held for r in self.runners.values() for held in (r.buffers, r.staged))]
        for held in on_device:
            for name, tensor in held.items():
                tensor.fill_(-1 if name == "requests" else 0)


_built: dict[tuple[Shape, torch.device], Decoder] = {}


def decoder_of(shape: Shape, device: torch.device) -> Decoder:
    """The decoder of a shape, kept until another is requested: both cases of a shape share it."""
    if (shape, device) not in _built:
        _built.clear()
        release(device)  # the previous cache may take most of the memory
        _built[shape, device] = Decoder(shape, device)
    return _built[shape, device]


def build_wall(shape: Shape, device: torch.device) -> Bench:
    decoder = decoder_of(shape, device)
    ids: list[torch.Tensor] = []  # inputs of the last step

    def step(method: str, i: int) -> list[int]:
        ids[:] = [decoder.host[0].clone()]
        return decoder.step(method)

    def check(name: str, i: int, out: list[int]) -> None:
        """Assert that the same state with metadata from plain copies gives the same tokens."""
        decoder.host[0] = ids[0]
        again = decoder.run("unfused").tolist()
        decoder.host[0] = torch.tensor(out)
        assert out == again, f"{sum(map(int.__ne__, out, again))} of {len(out)} tokens are others"

    calls: dict[str, Call] = {method: partial(step, method) for method in STAGINGS}
    return Bench(
        contenders=calls,
        poison=lambda name, i: decoder.poison(),
        check=check,
        ours="fused",
        baseline="unfused",
        variants=STAGINGS.keys() - {"fused", "unfused"},
    )


def build_gpu(shape: Shape, device: torch.device) -> Bench:
    decoder = decoder_of(shape, device)
    expected = decoder.run("unfused").clone()

    def run(method: str, i: int) -> torch.Tensor:
        return decoder.run(method)

    calls: dict[str, Call] = {method: partial(run, method) for method in STAGINGS}
    calls["replay"] = lambda i: decoder.runners["fused"].replay(decoder.batch)

    def poison(name: str, i: int) -> None:
        decoder.poison()
        if name == "replay":
            decoder.run("fused")

    def check(name: str, i: int, out: torch.Tensor) -> None:
        assert torch.equal(out, expected), f"{int((out != expected).sum())} of {len(out)} tokens are others"

    return Bench(
        contenders=calls,
        poison=poison,
        check=check,
        ours="fused",
        baseline="replay",
        variants=STAGINGS.keys() - {"fused"},
        host=dict(calls),
        burst=1,
    )


Build = Callable[[Shape, torch.device], Bench]


def cases_of(shape: Shape) -> list[Case]:
    """Device time first, then wall-clock time, which grows the contexts."""
    kinds: list[tuple[str, Build, bool]] = [("-gpu", build_gpu, False), ("", build_wall, True)]
    return [
        Case(
            "step", shape.name + end, {**shape.params, "time": "wall" if wall else "gpu"}, shape.bytes,
            partial(build, shape), wall=wall, seconds=2.0,
        )
        for end, build, wall in kinds
    ]  # fmt: skip


# K and V of 64 x 4,096, 128 x 2,048 and 256 x 1,024 tokens are 34 GB each.
SHAPES = [Shape(1, 4096), Shape(8, 4096), Shape(32, 4096), Shape(64, 4096), Shape(128, 2048), Shape(256, 1024)]
TOY = Shape(3, 40, model=Model(2, 64, 4, 2, 64, 96, 128), page_tokens=16)


def cases(device: torch.device, quick: bool) -> list[Case]:
    shapes = [TOY] if device.type != "cuda" else SHAPES[2:3] if quick else SHAPES
    return [case for shape in shapes for case in cases_of(shape)]
