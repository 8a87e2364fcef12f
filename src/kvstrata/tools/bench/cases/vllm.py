"""The vllm benchmark: vLLM at Llama-3.1-8B shapes with kvstrata's pages beside its own FlashAttention.

    B32-8192         decode steps of 32 requests with contexts of 8,192 tokens, as CUDA graphs
    largest-32768    the most requests with 32,768 tokens that fit LARGEST bytes of cache in each format
    prompt-32768     prompts that are computed, in chunks of 8,192 tokens

Times are microseconds per token, generated or of prompts, so their inverse is the throughput: with batches of different
sizes too. Every contender is an engine in a process of its own, one after the other, with the same random weights and a
cache of the same bytes, filled with random rows (`vllm_child`). Before the timing its tokens are compared with those of
bfloat16.
"""

from __future__ import annotations

import importlib.util
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvstrata.engines.options import Options
from kvstrata.layout import Format
from kvstrata.tools import child
from kvstrata.tools.bench import stats
from kvstrata.tools.bench.case import Bench, Case
from kvstrata.tools.bench.machine import describe
from kvstrata.tools.bench.probes import copy_bandwidth, floor
from kvstrata.tools.bench.results import CaseResult, Report, Row
from kvstrata.tools.bench.runner import against
from kvstrata.tools.bench.timer import Timer
from kvstrata.tools.bench.vllm_child import GROWTH, MARK
from kvstrata.tools.bench.vllm_engine import LLAMA_8B

CACHE, LARGEST = 68 << 30, 60 << 30  # bytes of an engine's cache: 16 x 32,768 tokens of bfloat16 fit; see above
MAX_TOKENS = 32768
BASELINE, PEER, OURS = "FlashAttention bf16", "FlashAttention fp8", "K4V4"
ENGINES = {  # contender: vLLM's backend, format, bits per element without scales
    BASELINE: ("FLASH_ATTN", None),
    OURS: ("CUSTOM", "K4V4"),
    PEER: ("FLASH_ATTN", "fp8"),
    "K8V8": ("CUSTOM", "K8V8"),
    "K4V2": ("CUSTOM", "K4V2"),
    "K2V2": ("CUSTOM", "K2V2"),
}
QUICK = (BASELINE, OURS)
TABLE = {"columns": "case,contender,batch,step,tokens,interval,speedup,vs_peer,capacity"}
STEPS = [(32, 8192), (16, 32768), (None, 32768), (1, 2048)]  # None: as many as fit
PROMPTS = [(8, 8192), (2, 32768)]
SECONDS = 150  # of one engine; starting takes most of it
# Least correlation of logprobs with those of bfloat16, by the narrower of K and V. A model of 32 layers with such
# weights had 0.986 with K4V4, 0.945 with K4V2, 0.904 with K2V2, and 0.67 to 0.75 with V of other tokens or none.
AGREEMENT = {16: 0.98, 8: 0.98, 4: 0.92, 3: 0.87, 2: 0.82}
LAYER_ERROR = 0.02  # of a layer's output over the engine's own blocks, beside float32 over the same bytes


@dataclass(frozen=True)
class Shape:
    """Sizes of one case."""

    what: str  # steps or prompts
    batch: int | None
    tokens: int

    @property
    def name(self) -> str:
        if self.what == "prompts":
            return f"prompt-{self.tokens}"
        return f"largest-{self.tokens}" if self.batch is None else f"B{self.batch}-{self.tokens}"


SHAPES = [*(Shape("steps", *sizes) for sizes in STEPS), *(Shape("prompts", *sizes) for sizes in PROMPTS)]


def token_bytes(engine: str) -> int:
    """Bytes of a token in all layers."""
    backend, format = ENGINES[engine]
    dim = LLAMA_8B["head_dim"]
    one = Options(format or "").bytes_per_token(dim) if backend == "CUSTOM" else 2 * dim * (1 if format else 2)
    return one * LLAMA_8B["num_key_value_heads"] * LLAMA_8B["num_hidden_layers"]


def batch_of(shape: Shape, engine: str) -> int:
    """Requests of a case in an engine."""
    if shape.batch is not None:
        return shape.batch
    return LARGEST // (token_bytes(engine) * (shape.tokens - GROWTH // 2))


def _absent(device: torch.device) -> Bench:
    raise RuntimeError("an engine is a process of its own")


def cases(device: torch.device, quick: bool) -> list[Case]:
    """Cases of the benchmark; LookupError without a CUDA device or vLLM."""
    if device.type != "cuda":
        raise LookupError("bench vllm: expected a CUDA device, got none")
    if importlib.util.find_spec("vllm") is None:
        raise LookupError("bench vllm: expected vLLM, which pip install 'kvstrata[vllm]' brings")
    shapes = SHAPES[:1] + SHAPES[4:5] if quick else SHAPES
    return [case_of(shape) for shape in shapes]


def case_of(shape: Shape) -> Case:
    """A case; its bytes are those of the K and V that a step of ours reads or a prompt writes."""
    batch = batch_of(shape, OURS)
    params = {"what": shape.what, "B": shape.batch or "largest", "T": shape.tokens}
    return Case("vllm", shape.name, params, batch * shape.tokens * token_bytes(OURS), _absent, wall=True)


def run(
    chosen: Sequence[Case],
    device: torch.device,
    quick: bool = False,
    only: str = "*",
    *,
    revision: str | None = None,
    after_case: Callable[[Report], object] = lambda report: None,
) -> Report:
    """Measure one engine after the other; ``after_case`` sees the report after each."""
    shapes = [shape for shape in SHAPES if shape.name in {case.name for case in chosen}]
    timer = Timer(device)
    report = Report(
        op="vllm",
        machine=describe(device, revision),
        method={"quick": quick, "only": only, "cache_bytes": CACHE, "largest_bytes": LARGEST, "how": "samples in turn"},
        peak=copy_bandwidth(timer),
        floor=floor(timer),
    )
    del timer
    torch.cuda.empty_cache()
    for case in chosen:
        params = {**case.params, "batch": {}, "cache_tokens": {}}
        report.cases.append(CaseResult(case.name, params, case.bytes, 0, 1, True))
    reference: list[dict[str, Any]] = []
    for engine in QUICK if quick else ENGINES:
        begin = time.monotonic()
        told, error = measure(engine, shapes)
        if engine == BASELINE:
            reference = told.get("probe", [])
            report.machine["versions"]["vllm"] = told.get("vllm")
        wrong = error or difference(engine, reference, told)
        for shape, case_result in zip(shapes, report.cases, strict=True):
            add(case_result, engine, shape, told, wrong)
        judge(report)
        after_case(report)
        said = f"{told['cache_tokens']:,} tokens, started in {told['start_s']:.0f} s" if told else ""
        said += f", agreement {agreement(reference, told['probe']):.3f}" if told else ""
        said += f", layer error {told['layer_error']:.4f}" if "layer_error" in told else ""
        said += f"; {wrong}" if wrong else ""
        print(f"{engine}: {said}; {time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True)
    return report


def measure(engine: str, shapes: Sequence[Shape]) -> tuple[dict[str, Any], str | None]:
    """Output of an engine's process, and the reason why it failed or None."""
    backend, format = ENGINES[engine]
    given = {
        "backend": backend, "format": format, "model": LLAMA_8B, "cache_bytes": CACHE, "max_tokens": MAX_TOKENS,
        "seconds": 0.7 * SECONDS,
        "cases": [
            {"name": s.name, "what": s.what, "batch": batch_of(s, engine), "tokens": s.tokens} for s in shapes
        ],
    }  # fmt: skip
    command = [sys.executable, "-m", "kvstrata.tools.bench.vllm_child", json.dumps(given)]
    try:
        said, code = child.run(command, SECONDS)
        failed = f"exit code {code}: " + " / ".join(said.strip().splitlines()[-3:])[-600:]
    except child.Late as late:
        said, failed = late.said, str(late)
    lines = [line for line in said.splitlines() if line.startswith(MARK)]  # one after each case
    return (json.loads(lines[-1].removeprefix(MARK)), None) if lines else ({}, failed)


def agreement(reference: list[dict[str, Any]], told: list[dict[str, Any]]) -> float:
    """Correlation of logprobs that were decoded over the cache with those of the reference; NaN: none to compare.

    Prompts whose first tokens differ are left out: two tokens of the prompt's end were as good as each other.
    """
    pairs = [(a["second"], b["second"]) for a, b in zip(reference, told, strict=False) if a["first"] == b["first"]]
    if not pairs:
        return math.nan
    want, got = (torch.tensor([pair[i] for pair in pairs], dtype=torch.float64) for i in (0, 1))
    both = torch.stack([(x - x.mean(1, keepdim=True)).flatten() for x in (want, got)])
    return float(torch.corrcoef(both)[0, 1])


def difference(engine: str, reference: list[dict[str, Any]], told: dict[str, Any]) -> str | None:
    """Sentence if what an engine decoded over its cache is wrong; else None."""
    backend, format = ENGINES[engine]
    bits = 16
    if format:
        fmt = Format.parse(format, LLAMA_8B["head_dim"]) if backend == "CUSTOM" else None
        bits = 8 if fmt is None else min(fmt.k_bits, fmt.v_bits)
    found = agreement(reference, told["probe"])
    if math.isnan(found):
        return "no prompt has the first token of bfloat16"
    if found < AGREEMENT[bits]:
        return f"logprobs correlate with those of bfloat16 by {found:.3f}, {AGREEMENT[bits]} is the least"
    if (error := told.get("layer_error", 0.0)) > LAYER_ERROR or math.isnan(error):
        return f"a layer's decode is wrong by {error:.3f} of its largest output"
    return None


def add(result: CaseResult, engine: str, shape: Shape, told: dict[str, Any], wrong: str | None) -> None:
    """Add an engine's row to a case."""
    kinds = {BASELINE: "baseline", PEER: "peer", OURS: "ours"}
    samples = told.get("cases", {}).get(shape.name)
    error = wrong or (None if samples else told["errors"].get(shape.name, "not measured"))
    row = Row(engine, kinds.get(engine, "variant"), error is None, error)
    if error is None:
        row.us, row.samples = stats.summary(samples), samples
        result.params["batch"][engine] = batch_of(shape, engine)
        result.params["cache_tokens"][engine] = told["cache_tokens"]
    result.rows.append(row)


def judge(report: Report) -> None:
    """Fill in the comparisons of all rows that have times."""
    for case in report.cases:
        baseline, peer = case.row("baseline"), case.row("peer")
        for row in case.rows:
            if row.us is None:
                continue
            row.vs_baseline = against(baseline, row) if baseline and baseline is not row else None
            row.vs_peer = against(peer, row) if peer and row.kind in ("ours", "variant") else None
