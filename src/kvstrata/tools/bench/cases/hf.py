"""The hf benchmark: transformers' `generate` over a `StrataCache`, beside transformers' own caches.

    B8-16384         steps of 8 rows with prompts of 16,384 random tokens, at Llama-3.1-8B shapes with random weights
    B1-8192-qwen3    the same at Qwen3-8B shapes
    B1-2048-smollm2  on a CPU, in float32: at SmolLM2-135M shapes; nothing is compiled or captured there

A sample is the wall-clock time from one token to the next, as a caller of `generate` sees it: sampling, stopping
criteria and the host's part of a cache included. The first steps, which compile and capture, are no samples. Contenders
run one after the other, each in one call of `generate`. `first` is the time to the first token, for which nothing is
compiled; `cache` is what the cache holds at the end: for transformers' own, what is allocated beyond the weights.

    DynamicCache       the default of `generate`
    static, compiled   `cache_implementation="static"`, for which `generate` compiles the forward with CUDA graphs
    StrataCache 1.0    16 bit, captured
    StrataCache 0.25   a quarter of the bytes, captured
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvstrata.tools.bench import stats
from kvstrata.tools.bench.case import Bench, Case
from kvstrata.tools.bench.machine import describe
from kvstrata.tools.bench.probes import copy_bandwidth, floor
from kvstrata.tools.bench.results import CaseResult, Report, Row
from kvstrata.tools.bench.runner import against
from kvstrata.tools.bench.timer import Timer

from .step import Model, model_of

BASELINE, PEER, OURS, PLAIN = "DynamicCache", "static, compiled", "StrataCache 0.25", "StrataCache 1.0"
CONTENDERS = (BASELINE, PLAIN, OURS, PEER)  # compiling last: a run that is stopped has the others
KINDS = {BASELINE: "baseline", PEER: "peer", OURS: "ours", PLAIN: "variant"}
TABLE = {"columns": "case,contender,us,mean,slowest,first,cache,speedup,vs_peer"}
WARM = 4  # steps that compile and capture
STEPS = 200  # three settlings of every layer
CPU_STEPS, TOY_STEPS = 64, 20  # one settling, none
QWEN3 = Model(layers=36, mlp=12288, vocab=151936)
LLAMA = Model()
SMOLLM2 = Model(layers=30, hidden=576, heads=9, kv_heads=3, head_dim=64, mlp=1536, vocab=49152)
TOY = Model(2, 64, 4, 2, 32, 64, 128)


@dataclass(frozen=True)
class Shape:
    """Prompts of one call of `generate`."""

    rows: int
    tokens: int
    family: str = "llama"
    model: Model = LLAMA
    number_bytes: int = 2  # of weights, and of K and V that are not compressed

    @property
    def name(self) -> str:
        return f"B{self.rows}-{self.tokens}" + ("" if self.family == "llama" else f"-{self.family}")

    @property
    def bytes(self) -> int:
        """Weights, and K and V of the prompts, which a step without compression reads."""
        return self.number_bytes * self.model.weights + self.rows * self.tokens * self.row_bytes

    @property
    def row_bytes(self) -> int:
        """Bytes of a token in all layers."""
        return 2 * self.number_bytes * self.model.layers * self.model.kv_heads * self.model.head_dim


SHAPES = [Shape(1, 8192), Shape(8, 16384), Shape(1, 2048), Shape(1, 32768), Shape(32, 16384)]
SHAPES.append(Shape(1, 8192, "qwen3", QWEN3))
CPU_SHAPES = [Shape(1, tokens, "smollm2", SMOLLM2, 4) for tokens in (2048, 4096)]
TOY_SHAPE = Shape(2, 100, model=TOY)


def _absent(device: torch.device) -> Bench:
    raise RuntimeError("a contender is a call of generate")


def cases(device: torch.device, quick: bool) -> list[Case]:
    """Cases of the benchmark: a small model on a CPU, and a toy for the quick one."""
    if device.type != "cuda":
        return [case_of(shape) for shape in ([TOY_SHAPE] if quick else CPU_SHAPES)]
    return [case_of(shape) for shape in (SHAPES[:2] if quick else SHAPES)]


def contenders(device: torch.device) -> list[str]:
    """Caches to compare, in their order; `generate` compiles nothing on a CPU."""
    return [name for name in CONTENDERS if name != PEER or device.type == "cuda"]


def steps_of(shape: Shape, device: torch.device, quick: bool) -> int:
    """Decode steps of a call."""
    if device.type != "cuda":
        return TOY_STEPS if shape == TOY_SHAPE else CPU_STEPS
    return STEPS // 3 if quick else STEPS


def case_of(shape: Shape) -> Case:
    params = {"B": shape.rows, "T": shape.tokens, "model": shape.family, "time": "wall"}
    return Case("hf", shape.name, params, shape.bytes, _absent, wall=True)


def shape_of(case: Case) -> Shape:
    known = {shape.name: shape for shape in (*SHAPES, *CPU_SHAPES, TOY_SHAPE)}
    return known[case.name]


def load(shape: Shape, device: torch.device) -> Any:
    """A model with random weights, made on the device."""
    if shape.family != "qwen3":
        return model_of(shape.model, device)
    from transformers import Qwen3Config, Qwen3ForCausalLM

    model_of.cache_clear()
    release(device)
    m = shape.model
    config = Qwen3Config(
        hidden_size=m.hidden, intermediate_size=m.mlp, num_hidden_layers=m.layers, vocab_size=m.vocab,
        num_attention_heads=m.heads, num_key_value_heads=m.kv_heads, head_dim=m.head_dim,
        max_position_embeddings=40960,
    )  # fmt: skip
    usual = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        torch.manual_seed(0)
        with torch.device(device):
            return Qwen3ForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(usual)


def release(device: torch.device) -> None:
    """Give back what is no longer used."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


@dataclass
class Measured:
    """One contender: µs of each step, seconds to the first token, bytes of its cache, first tokens, how it decoded."""

    samples: list[float]
    first: float
    cache: int
    tokens: list[list[int]]
    how: str = ""


def measure(name: str, model: Any, shape: Shape, ids: torch.Tensor, new: int) -> Measured:
    """Run one contender."""
    from transformers import StoppingCriteria, StoppingCriteriaList

    from kvstrata.hf import StrataCache

    device = ids.device
    times: list[float] = []

    class Clock(StoppingCriteria):
        """Time of every token; it is there when the host reads it."""

        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
            input_ids[:, -1].tolist()
            times.append(time.perf_counter())
            return torch.zeros(len(input_ids), dtype=torch.bool, device=device)

    cache: Any = None
    options: dict[str, Any] = {}
    if name == PEER:
        options["cache_implementation"] = "static"
    elif name != BASELINE:
        cache = StrataCache(model.config, budget=float(name.split()[-1]), max_tokens=shape.tokens + new + 64)
        options["past_key_values"] = cache
    begin = time.perf_counter()
    before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=new + WARM + 1, do_sample=False, pad_token_id=0,
        eos_token_id=None, stopping_criteria=StoppingCriteriaList([Clock()]), return_dict_in_generate=True, **options,
    )  # fmt: skip
    release(device)
    held = torch.cuda.memory_allocated(device) - before if device.type == "cuda" else 0
    steps = [1e6 * (b - a) for a, b in zip(times[WARM:], times[WARM + 1 :], strict=False)]
    how = ""
    if cache is not None:
        how = cache.decoding
        memory = cache.memory()
        held = memory.total + memory.scratch
        assert memory.allowed is None or memory.total <= memory.allowed, "the budget does not hold"
        assert cache.tiered.length(0) == ids.shape[1] + len(times) - 1, "tokens are missing"
    if name == PEER:
        model._cache = None  # generate keeps it, and its graphs, for the next call
        torch._dynamo.reset()
    return Measured(steps, times[0] - begin, held, out.sequences[:, ids.shape[1] :].tolist(), how)


def run(
    chosen: Sequence[Case],
    device: torch.device,
    quick: bool = False,
    only: str = "*",
    *,
    revision: str | None = None,
    after_case: Callable[[Report], object] = lambda report: None,
) -> Report:
    """Measure one contender after the other; ``after_case`` sees the report after each case."""
    timer = Timer(device)
    report = Report(
        op="hf",
        machine=describe(device, revision),
        method={"quick": quick, "only": only, "steps": STEPS // 3 if quick else STEPS, "how": "generate, one by one"},
        peak=copy_bandwidth(timer),
        floor=floor(timer),
    )
    del timer
    release(device)
    for case in chosen:
        shape = shape_of(case)
        model = load(shape, device)
        new = steps_of(shape, device, quick)
        generator = torch.Generator(device).manual_seed(1)
        ids = torch.randint(0, shape.model.vocab, (shape.rows, shape.tokens), device=device, generator=generator)
        params = {**case.params, "first_s": {}, "cache_bytes": {}, "how": {}}
        result = CaseResult(case.name, params, case.bytes, 0, 1, True)
        report.cases.append(result)
        first_tokens: list[int] | None = None
        for name in contenders(device):
            row, begin = Row(name, KINDS[name]), time.perf_counter()
            release(device)
            try:
                told = measure(name, model, shape, ids, new)
                if first_tokens is None:
                    first_tokens = [tokens[0] for tokens in told.tokens]
                same = sum(a == tokens[0] for a, tokens in zip(first_tokens, told.tokens, strict=True))
                # The prompt is computed at 16 bit by all; what is off by rounding is a token in some row at most.
                assert 2 * same >= len(first_tokens), f"{same} of {len(first_tokens)} first tokens are as before"
            except (AssertionError, RuntimeError) as error:
                row.correct, row.error = False, " ".join(str(error).split())[:300]
            else:
                row.us, row.samples = stats.summary(told.samples), told.samples
                params["first_s"][name], params["cache_bytes"][name] = told.first, told.cache
                params["how"][name] = told.how
            result.rows.append(row)
            took = time.perf_counter() - begin
            print(f"{case.name} {name}: {row.error or params['how'][name]} {took:.0f} s", file=sys.stderr, flush=True)
        judge(result)
        after_case(report)
        del model
    return report


def judge(case: CaseResult) -> None:
    """Fill in the comparisons of rows that have times."""
    baseline, peer = case.row("baseline"), case.row("peer")
    for row in case.rows:
        if row.us is not None:
            row.vs_baseline = against(baseline, row) if baseline and baseline is not row else None
            row.vs_peer = against(peer, row) if peer and row.kind in ("ours", "variant") else None
