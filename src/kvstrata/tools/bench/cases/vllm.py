"""The vllm benchmark: vLLM at Llama-3.1-8B shapes with kvstrata's pages and with its own FlashAttention.

    B32-8192         decode steps of 32 requests with contexts of 8,192 tokens, as CUDA graphs
    largest-32768    as many requests with 32,768 tokens as fit LARGEST bytes of cache in each format
    prompt-32768     prompts that are computed, in chunks of 8,192 tokens

Times are microseconds per token, generated or of prompts, so their inverse is the throughput, also for batches of
different sizes. Every contender is an engine in its own process, one after the other, with the same random weights and
a cache of the same bytes, filled with random rows (`vllm_child`). Before the timing its tokens are compared with those
of bfloat16 if the format has 8 bits, otherwise its attention is compared with float32 (`vllm_check`).
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
from kvstrata.tools import child
from kvstrata.tools.bench import stats
from kvstrata.tools.bench.case import Case
from kvstrata.tools.bench.machine import release
from kvstrata.tools.bench.results import CaseResult, Report, Row
from kvstrata.tools.bench.runner import compare, new_report
from kvstrata.tools.bench.timer import Timer
from kvstrata.tools.bench.vllm_child import GROWTH, MARK
from kvstrata.tools.bench.vllm_engine import LLAMA_8B

CACHE, LARGEST = 68 << 30, 60 << 30  # bytes of an engine's cache (fits 16 x 32,768 tokens of bfloat16); see above
MAX_TOKENS = 32768
BASELINE, PEER, OURS = "FlashAttention bf16", "FlashAttention fp8", "K4V4"
ENGINES = {  # contender: vLLM's backend, format
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
SECONDS = 150  # time limit of one engine; starting takes most of it
# Nats by which the best logprobs may differ from those of bfloat16; a wrong cache is off by 10 and more.
TOLERANCE = 4.0
EAGER_TOLERANCE = 1.0  # nats between steps with and without CUDA graphs
ERROR = 0.02  # relative error of a layer's attention against float32 on the same bytes; that of bfloat16 is 0.003


@dataclass(frozen=True)
class Shape:
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
    if shape.batch is not None:
        return shape.batch
    return LARGEST // (token_bytes(engine) * (shape.tokens - GROWTH // 2))


def cases(device: torch.device, quick: bool) -> list[Case]:
    """Cases of the benchmark; LookupError without a CUDA device or vLLM."""
    if device.type != "cuda":
        raise LookupError("bench vllm: expected a CUDA device, got none")
    if importlib.util.find_spec("vllm") is None:
        raise LookupError("bench vllm: expected vLLM, which pip install 'kvstrata[vllm]' brings")
    shapes = SHAPES[:1] + SHAPES[4:5] if quick else SHAPES
    return [case_of(shape) for shape in shapes]


def case_of(shape: Shape) -> Case:
    """A case; its bytes are the K and V that a step of ours reads or a prompt writes."""
    batch = batch_of(shape, OURS)
    params = {"what": shape.what, "B": shape.batch or "largest", "T": shape.tokens}
    return Case("vllm", shape.name, params, batch * shape.tokens * token_bytes(OURS), wall=True)


def run(
    chosen: Sequence[Case],
    device: torch.device,
    quick: bool = False,
    only: str = "*",
    *,
    revision: str | None = None,
    after_case: Callable[[Report], object] = lambda report: None,
) -> Report:
    """Measure one engine after the other; ``after_case`` gets the report after each."""
    shapes = [shape for shape in SHAPES if shape.name in {case.name for case in chosen}]
    sizes = {"cache_bytes": CACHE, "largest_bytes": LARGEST}
    method = {"quick": quick, "only": only, **sizes, "how": "samples in turn"}
    report = new_report("vllm", Timer(device), method, revision)
    release(device)  # also frees the timer's buffer
    for case in chosen:
        params = {**case.params, "batch": {}, "cache_tokens": {}}
        report.cases.append(CaseResult(case.name, params, case.bytes, 0, 1, True))
    reference: list[dict[str, Any]] = []
    for engine in QUICK if quick else ENGINES:
        begin = time.monotonic()
        reply, error = measure(engine, shapes)
        if engine == BASELINE:
            reference = reply.get("probe", [])
            report.machine["versions"]["vllm"] = reply.get("vllm")
        wrong = error or find_error(engine, reference, reply)
        for shape, case_result in zip(shapes, report.cases, strict=True):
            add_row(case_result, engine, shape, reply, wrong)
            compare(case_result)
        after_case(report)
        summary = wrong or f"{reply['cache_tokens']:,} tokens, started in {reply['start_s']:.0f} s"
        summary += f", error {reply['error']:.1e}" if "error" in reply else ""
        print(f"{engine}: {summary}; {time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True)
    return report


def measure(engine: str, shapes: Sequence[Shape]) -> tuple[dict[str, Any], str | None]:
    """Result of an engine's process, and why it failed or None."""
    backend, format = ENGINES[engine]
    job = {
        "backend": backend, "format": format, "model": LLAMA_8B, "cache_bytes": CACHE, "max_tokens": MAX_TOKENS,
        "seconds": 0.7 * SECONDS,
        "cases": [
            {"name": s.name, "what": s.what, "batch": batch_of(s, engine), "tokens": s.tokens} for s in shapes
        ],
    }  # fmt: skip
    command = [sys.executable, "-m", "kvstrata.tools.bench.vllm_child", json.dumps(job)]
    try:
        output, code = child.run(command, SECONDS)
        failed = f"exit code {code}: " + " / ".join(output.strip().splitlines()[-3:])[-600:]
    except child.Timeout as error:
        output, failed = error.output, str(error)
    lines = [line for line in output.splitlines() if line.startswith(MARK)]  # one per case
    return (json.loads(lines[-1].removeprefix(MARK)), None) if lines else ({}, failed)


def logprob_error(
    reference: list[dict[str, Any]], reply: list[dict[str, Any]], tolerance: float = TOLERANCE
) -> str | None:
    """Error message if the decoded tokens differ from the reference by more than ``tolerance``; else None."""
    worst, compared = 0.0, 0
    for want, got in zip(reference, reply, strict=False):
        if want["first"] != got["first"]:
            continue  # two tokens at the prompt's end were equally likely
        compared += 1
        best = sorted(want["second"], key=want["second"].get, reverse=True)[:3]
        worst = max(worst, *(abs(want["second"][t] - got["second"].get(t, -math.inf)) for t in best))
    if not compared:
        return "no prompt has the first token of the reference"
    return f"logprobs are {worst:.1f} from those of the reference" if worst > tolerance else None


def find_error(engine: str, reference: list[dict[str, Any]], reply: dict[str, Any]) -> str | None:
    """Error message if an engine's tokens or attention are wrong; else None."""
    if ENGINES[engine][0] == "CUSTOM":
        if not reply["compared"]:
            return "no attention was compared with the reference"
        if not reply["error"] <= ERROR:
            return f"attention is {reply['error']:.1e} from float32 on the same bytes"
        if graphs := logprob_error(reply["eager"], reply["probe"], EAGER_TOLERANCE):
            return f"with CUDA graphs: {graphs}"
    wide = ENGINES[engine][1] in (None, "fp8", "K8V8")  # narrower formats differ from bfloat16 by their rounding
    return logprob_error(reference, reply["probe"]) if wide else None


def add_row(result: CaseResult, engine: str, shape: Shape, reply: dict[str, Any], wrong: str | None) -> None:
    kinds = {BASELINE: "baseline", PEER: "peer", OURS: "ours"}
    samples = reply.get("cases", {}).get(shape.name)
    error = wrong or (None if samples else reply["errors"].get(shape.name, "not measured"))
    row = Row(engine, kinds.get(engine, "variant"), error is None, error)
    if error is None:
        row.us, row.samples = stats.summary(samples), samples
        result.params["batch"][engine] = batch_of(shape, engine)
        result.params["cache_tokens"][engine] = reply["cache_tokens"]
    result.rows.append(row)
