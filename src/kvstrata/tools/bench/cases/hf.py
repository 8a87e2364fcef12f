"""The hf benchmark: transformers' `generate` over a `StrataCache`, compared with transformers' own caches.

    B8-16384         steps of 8 rows with prompts of 16,384 random tokens, at Llama-3.1-8B shapes with random weights
    B1-8192-qwen3    at Qwen3-8B shapes
    B1-8192-gemma3   at Gemma 3 4B shapes: 29 of 34 layers with a sliding window of 1,024
    B1-2048-smollm2  on a CPU, in float32, at SmolLM2-135M shapes; nothing is compiled or captured there

A sample is the wall-clock time from one token to the next, as a caller of `generate` sees it: including sampling,
stopping criteria and the host part of a cache. The first steps, which compile and capture, are not sampled. Contenders
run one after the other, each in one call of `generate`; on a CPU, whose speed drifts, three times in turn. `first` is
the time to the first token, without compilation: for short prompts and on a CPU the median of a few calls after a first
one, for long prompts that of one call after a short one. `cache` is the memory held by the cache at the end, for
transformers' own caches what is allocated beyond the weights; `peak` is the maximum allocated beyond them.

    DynamicCache       the default of `generate`
    static, compiled   `cache_implementation="static"`, for which `generate` compiles the forward with CUDA graphs
    quantized, 4 bit   `QuantizedCache` with quanto or HQQ, if one of them is installed
    StrataCache 1.0    16 bit, captured
    StrataCache 0.25   a quarter of the bytes, captured; also with `compile=True`
    StrataCache K4V4   packed pages of one format, captured

A full run takes about seven minutes on an H200. Contenders that compile come last, one that takes too long is stopped,
and the report is saved after each.
"""

from __future__ import annotations

import faulthandler
import gc
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from kvstrata.tools.bench import stats
from kvstrata.tools.bench.case import Case
from kvstrata.tools.bench.machine import release
from kvstrata.tools.bench.results import CaseResult, Report, Row
from kvstrata.tools.bench.runner import compare, new_report
from kvstrata.tools.bench.timer import Timer

from .step import Model, model_of

BASELINE, PEER, QUANTIZED = "DynamicCache", "static, compiled", "quantized, 4 bit"
OURS, PLAIN, PACKED = "StrataCache 0.25", "StrataCache 1.0", "StrataCache K4V4"
COMPILED = "StrataCache 0.25, compiled"
CONTENDERS = (BASELINE, OURS, PLAIN, PACKED, QUANTIZED, COMPILED, PEER)
COMPILE = (COMPILED, PEER)  # contenders that compile the model's forward
KINDS = {BASELINE: "baseline", PEER: "peer", QUANTIZED: "peer", OURS: "ours"} | dict.fromkeys(
    (PLAIN, PACKED, COMPILED), "variant"
)
MEASURED = ("first_s", "firsts", "cache_bytes", "peak_bytes", "how", "left_out")  # of each contender, beside its steps
TABLE = {"columns": "case,contender,us,mean,slowest,first,cache,peak,speedup,vs_peer"}
WARM = 4  # warm-up steps, which compile and capture
STEPS = 200  # three settlings of every layer
EAGER_SECONDS = 2.0  # seconds of sampling for steps that are all alike, and slow
PROMPTS, PROMPT_SECONDS = 3, 2.0  # calls for the time to the first token, and seconds after which no further one begins
WARMED = 1 << 16  # tokens up to which a prompt is repeated; a longer one is cut to as many for the warm-up
CPU_ROUNDS = 3  # calls of `generate` of each contender on a CPU
CHUNK = 1 << 16  # tokens that an MLP processes at a time, so that activations leave room for the largest cache
LIMIT = 120.0  # seconds after which a contender is stopped
TOTAL, COMPILING = 420.0, 90.0  # seconds after which no contender begins; how much earlier one that compiles must
PATIENCE = {"cuda": 1.0, "cpu": 10.0}  # factor of these limits
QWEN3 = Model(layers=36, mlp=12288, vocab=151936, family="qwen3")
LLAMA = Model()
GEMMA3 = Model(34, 2560, 8, 4, 256, 10240, 262208, "gemma3_text", 1024)
SMOLLM2 = Model(layers=30, hidden=576, heads=9, kv_heads=3, head_dim=64, mlp=1536, vocab=49152)
TOY = Model(2, 64, 4, 2, 32, 64, 128)


@dataclass(frozen=True)
class Shape:
    """Sizes of one call of `generate`."""

    rows: int
    tokens: int
    family: str = "llama"
    model: Model = LLAMA
    without: tuple[str, ...] = ()  # contenders to leave out
    number_bytes: int = 2  # bytes per value of weights, and of K and V that are not compressed
    cpu_steps: int = 20  # steps on a CPU

    @property
    def name(self) -> str:
        return f"B{self.rows}-{self.tokens}" + ("" if self.family == "llama" else f"-{self.family}")

    @property
    def bytes(self) -> int:
        """Bytes read by a step without compression: weights, and K and V of the prompts."""
        model, tokens = self.model, self.tokens
        if model.window is not None:  # mean over layers
            full = model.layers // 6
            tokens = (full * tokens + (model.layers - full) * min(tokens, model.window)) // model.layers
        return self.number_bytes * model.weights + self.rows * tokens * self.row_bytes

    @property
    def row_bytes(self) -> int:
        """Bytes of a token in all layers."""
        return 2 * self.number_bytes * self.model.layers * self.model.kv_heads * self.model.head_dim


VARIANTS = (PLAIN, PACKED, QUANTIZED, COMPILED)
SHAPES = [Shape(1, 8192), Shape(8, 16384, without=(QUANTIZED, COMPILED)), Shape(1, 2048, without=VARIANTS[1:])]
SHAPES += [Shape(1, 32768, without=(*VARIANTS, PEER)), Shape(32, 16384, without=VARIANTS)]
SHAPES.append(Shape(1, 8192, "qwen3", QWEN3, (*VARIANTS, PEER)))
SHAPES += [Shape(rows, tokens, "gemma3", GEMMA3, (PACKED, QUANTIZED)) for rows, tokens in ((1, 8192), (8, 16384))]
CPU_SHAPES = [
    Shape(1, n, "smollm2", SMOLLM2, (PACKED, QUANTIZED, *COMPILE), 4, 64) for n in (2048, 4096)
]  # one settling
TOY_SHAPE = Shape(2, 100, model=TOY)


def cases(device: torch.device, quick: bool) -> list[Case]:
    """Cases of the benchmark; on a CPU a small model, or a toy with ``quick``."""
    if device.type != "cuda":
        return [case_of(shape) for shape in ([TOY_SHAPE] if quick else CPU_SHAPES)]
    return [case_of(shape) for shape in (SHAPES[:2] if quick else SHAPES)]


def case_of(shape: Shape) -> Case:
    params = {"B": shape.rows, "T": shape.tokens, "model": shape.family, "time": "wall"}
    return Case("hf", shape.name, params, shape.bytes, wall=True)


def shape_of(case: Case) -> Shape:
    known = {shape.name: shape for shape in (*SHAPES, *CPU_SHAPES, TOY_SHAPE)}
    return known[case.name]


def load(shape: Shape, device: torch.device) -> Any:
    """The model of a shape, whose MLPs process a long prompt in chunks; the previous model is freed first."""
    model_of.cache_clear()
    release(device)
    model = model_of(shape.model, device)

    def in_chunks(whole: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] * x.shape[1] <= CHUNK:
            return whole(x)
        out = torch.empty_like(x)
        for part, into in zip(x.flatten(0, 1).split(CHUNK), out.flatten(0, 1).split(CHUNK), strict=True):
            into.copy_(whole(part.unsqueeze(0))[0])
        return out

    for layer in model.model.layers:
        layer.mlp.forward = partial(in_chunks, layer.mlp.forward)
    return model


@dataclass
class Measured:
    """One contender: µs of each step, seconds to the first token, bytes of its cache, first tokens, how it decoded."""

    samples: list[float]
    first: float
    cache: int
    tokens: list[list[int]]
    decoding: str = ""
    peak: int = 0


def _quantizer() -> str | None:
    """Library that quantises transformers' own cache, or None."""
    from transformers.utils import is_hqq_available, is_optimum_quanto_available

    return "quanto" if is_optimum_quanto_available() else "hqq" if is_hqq_available() else None


def cache_of(name: str, model: Any, tokens: int) -> tuple[Any, dict[str, Any]]:
    """A contender's cache for ``tokens`` tokens, None if `generate` creates it, and arguments of `generate`."""
    from transformers.cache_utils import QuantizedCache

    from kvstrata.hf import StrataCache

    if name == BASELINE:
        return None, {}
    if name == PEER:
        return None, {"cache_implementation": "static"}
    if name == QUANTIZED:
        return None, {"past_key_values": QuantizedCache(_quantizer() or "quanto", model.config, nbits=4)}
    amount = name.split()[1].strip(",")
    if name == PACKED:
        cache = StrataCache(model.config, format=amount, max_tokens=tokens, capture=True)
    else:
        cache = StrataCache(model.config, budget=float(amount), max_tokens=tokens, compile=name == COMPILED)
    return cache, {"past_key_values": cache}


@dataclass
class TokenClock:
    """Stopping criterion that records the time of every token, and ends after some seconds of steps."""

    seconds: float | None = None
    times: list[float] = field(default_factory=list)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        input_ids[:, -1].tolist()  # a token exists once the host has read it
        self.times.append(time.perf_counter())
        enough = self.seconds is not None and len(self.times) > 3 * WARM
        over = enough and self.times[-1] - self.times[0] > (self.seconds or 0)
        return torch.full((len(input_ids),), over, dtype=torch.bool, device=input_ids.device)


def _generate(model: Any, ids: torch.Tensor, new: int, clock: TokenClock, options: dict[str, Any]) -> tuple[float, Any]:
    """Seconds to the first token, and the output of `generate`."""
    from transformers import StoppingCriteriaList

    begin = time.perf_counter()
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False, pad_token_id=0,
        eos_token_id=None, stopping_criteria=StoppingCriteriaList([clock]), return_dict_in_generate=True, **options,
    )  # fmt: skip
    return clock.times[0] - begin, out


@contextmanager
def growing_segments(device: torch.device, name: str) -> Iterator[None]:
    """Let torch grow its segments of memory for the static cache: at B32-16384 it runs out because of fragments."""
    if device.type != "cuda" or name != PEER:
        yield
        return
    torch.cuda.memory._set_allocator_settings("expandable_segments:True")
    try:
        yield
    finally:
        torch.cuda.memory._set_allocator_settings("expandable_segments:False")


def first_times(name: str, model: Any, ids: torch.Tensor, tokens: int) -> list[float]:
    """Seconds to the first token in calls of `generate`, the first of which compiles; [] if they take too long."""
    times: list[float] = []
    few = ids[:, : max(WARMED // len(ids), 1)]
    calls = PROMPTS + 1 if few.shape == ids.shape and ids.is_cuda else 1
    while name != PEER and len(times) < calls and sum(times[1:]) < PROMPT_SECONDS:
        gc.collect()  # free the previous cache
        times.append(_generate(model, few, 1, TokenClock(), cache_of(name, model, tokens)[1])[0])
    return times[1:]


def measure(name: str, model: Any, shape: Shape, ids: torch.Tensor, new: int, warm: bool = False) -> Measured:
    """Measure one contender; ``warm``: it was measured before in this process."""
    device, tokens = ids.device, shape.tokens + new + 64
    firsts = [] if warm else first_times(name, model, ids, tokens)
    cache, options = cache_of(name, model, tokens)
    release(device)
    before = 0
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
    clock = TokenClock(EAGER_SECONDS if name in (BASELINE, QUANTIZED) else None)
    gc.freeze()  # do not scan objects of earlier contenders while a step is timed
    try:
        with growing_segments(device, name):
            first, out = _generate(model, ids, new + WARM + 1, clock, options)
        release(device)
        held = torch.cuda.memory_allocated(device) - before if device.type == "cuda" else 0
        peak = torch.cuda.max_memory_allocated(device) - before if device.type == "cuda" else 0
    finally:
        gc.unfreeze()
        if name in COMPILE:
            model._cache = None  # generate keeps the static cache and its graphs for the next call
            torch._dynamo.reset()
    times = clock.times
    steps = [1e6 * (b - a) for a, b in zip(times[WARM:], times[WARM + 1 :], strict=False)]
    decoding = ""
    if cache is not None:
        decoding, memory = cache.decoding, cache.memory()
        held = memory.total + memory.scratch
        assert memory.allowed is None or memory.total <= memory.allowed, "the budget does not hold"
        if name != PACKED:
            assert cache.tiered.length(0) == ids.shape[1] + len(times) - 1, "tokens are missing"
    first = statistics.median(firsts) if firsts else first
    return Measured(steps, first, held, out.sequences[:, ids.shape[1] :].tolist(), decoding, peak)


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise TimeoutError after ``seconds``, and end the process a minute later if that does not help."""

    def stop(*_: object) -> None:
        raise TimeoutError(f"took longer than {seconds:.0f} s")

    try:
        before = signal.signal(signal.SIGALRM, stop)
    except (AttributeError, ValueError):  # not POSIX, or not the main thread
        yield
        return
    signal.setitimer(signal.ITIMER_REAL, seconds)
    faulthandler.dump_traceback_later(seconds + 60, exit=True, file=2)  # stderr
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        faulthandler.cancel_dump_traceback_later()
        signal.signal(signal.SIGALRM, before)


def contenders_in_order(shapes: Sequence[Shape], cuda: bool, rounds: int = 1) -> list[tuple[Shape, str]]:
    """Pairs of shape and contender in run order: model by model, those that compile last."""
    quantizes = _quantizer() is not None
    available = [name for name in CONTENDERS if name != QUANTIZED or (quantizes and cuda)]
    jobs = [(shape, name) for shape in shapes for name in available * rounds if name not in shape.without]
    families = list(dict.fromkeys(shape.family for shape in shapes))
    return sorted(
        jobs, key=lambda job: (families.index(job[0].family), COMPILE.index(job[1]) if job[1] in COMPILE else -1)
    )


def run(
    chosen: Sequence[Case],
    device: torch.device,
    quick: bool = False,
    only: str = "*",
    *,
    revision: str | None = None,
    after_case: Callable[[Report], object] = lambda report: None,
) -> Report:
    """Measure one contender after the other; ``after_case`` gets the report after each."""
    steps = STEPS // 3 if quick else STEPS
    method = {"quick": quick, "only": only, "steps": steps, "how": "decode steps, one contender after another"}
    report = new_report("hf", Timer(device), method, revision)
    start, model, loaded = time.perf_counter(), None, ""
    first_tokens: dict[str, list[int]] = {}
    results: dict[str, CaseResult] = {}
    rounds = CPU_ROUNDS if device.type == "cpu" else 1
    for case in chosen:
        measured: dict[str, Any] = {name: {} for name in MEASURED}
        results[case.name] = CaseResult(case.name, case.params | measured, case.bytes, 0, 1, True)
        report.cases.append(results[case.name])
    for shape, name in contenders_in_order([shape_of(case) for case in chosen], device.type == "cuda", rounds):
        result, begin = results[shape.name], time.perf_counter()
        if begin - start > PATIENCE[device.type] * (TOTAL - COMPILING * (name in COMPILE)):
            if all(row.name != name for row in result.rows):
                result.params["left_out"][name] = f"{begin - start:.0f} s had passed"
            continue
        if loaded != shape.family:
            model, loaded = None, shape.family
            model = load(shape, device)
        row = run_contender(name, model, shape, device, quick, result, first_tokens)
        decoding = row.error or result.params["how"][name]
        took, now = (time.perf_counter() - x for x in (begin, start))
        print(f"{shape.name} {name}: {decoding} {took:.0f} s, {now:.0f} s in all", file=sys.stderr, flush=True)
        compare(result)
        after_case(report)
    return report


def run_contender(
    name: str,
    model: Any,
    shape: Shape,
    device: torch.device,
    quick: bool,
    result: CaseResult,
    first_tokens: dict[str, list[int]],
) -> Row:
    """Add the row of one contender, or samples to the one it has; with an error if it failed.

    ``first_tokens`` of each case are those of the first contender.
    """
    new = (STEPS // 3 if quick else STEPS) if device.type == "cuda" else shape.cpu_steps
    generator = torch.Generator(device).manual_seed(1)
    ids = torch.randint(0, shape.model.vocab, (shape.rows, shape.tokens), device=device, generator=generator)
    row = next((row for row in result.rows if row.name == name), None)
    again = row is not None
    if row is None:
        row = Row(name, KINDS[name])
        result.rows.append(row)
    elif row.error:
        return row
    release(device)
    try:
        with limited(PATIENCE[device.type] * LIMIT):
            measured = measure(name, model, shape, ids, new, again)
        known = first_tokens.setdefault(shape.name, [tokens[0] for tokens in measured.tokens])
        same = sum(a == tokens[0] for a, tokens in zip(known, measured.tokens, strict=True))
        # All compute the prompt at 16 bit; rounding may change a token in some row at most.
        assert 2 * same >= len(known), f"{same} of {len(known)} first tokens are as before"
    except (AssertionError, ImportError, RuntimeError, TimeoutError) as error:
        row.correct, row.error = False, " ".join(str(error).split())[:300]
        row.us, row.samples = None, []
    else:
        row.samples = [*row.samples, *measured.samples]
        row.us = stats.summary(row.samples)
        firsts = result.params["firsts"].setdefault(name, [])
        firsts.append(measured.first)
        kept = {
            "first_s": statistics.median(firsts),
            "cache_bytes": measured.cache,
            "peak_bytes": measured.peak,
            "how": measured.decoding,
        }
        for key, value in kept.items():
            result.params[key][name] = value
    return row
