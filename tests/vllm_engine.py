"""kvstrata in a real vLLM on one GPU, by hand: tokens beside FlashAttention, thousands of requests, a real checkpoint.

    python tests/vllm_engine.py tokens              mixed batches, prefix hits, preemption, drafts, block sizes
    python tests/vllm_engine.py soak [REQUESTS]     random requests: every token, every block back
    python tests/vllm_engine.py smol [MODEL]        greedy text of a checkpoint, and its drafts

Exits with 1 if something is wrong. Sums in other orders and 8-bit pages move logits a little, and a token with them
where the two best are close. So a request may leave the reference only where the reference's gap between them is small;
what comes after is not compared. Engines run in processes of their own, one per backend and format.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from kvstrata.tools.bench import vllm_engine
from kvstrata.tools.bench.vllm_engine import SMALL

MODEL = SMALL | {"vocab_size": 512}  # few tokens, so that n-grams repeat and drafts are made
# Nats between the reference's two best tokens up to which another may be taken. The mean gap is about 1.
LIMITS = {"FlashAttention": 0.2, "K8V8": 0.4, "K4V4": 3.0}
DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
ROOM = dict(max_model_len=2048, max_num_seqs=16, gpu_memory_utilization=0.05, kv_cache_memory_bytes=1 << 30)
SCENARIOS: dict[str, dict[str, Any]] = {
    "eager": dict(sizes=()),
    "graphs": {},
    "chunked": dict(max_num_batched_tokens=256),
    "prefix": dict(enable_prefix_caching=True, max_num_batched_tokens=512),
    "preempt": dict(cache_tokens=3072),
    "drafts": dict(speculative_config=DRAFTS),
    "block16": dict(block_size=16),
    "block128": dict(block_size=128, sizes=()),
    "window": dict(architectures=["MistralForCausalLM"], model_type="mistral", sliding_window=256),
    "dim64": dict(head_dim=64, num_attention_heads=32, num_key_value_heads=2),
    "dim256": dict(head_dim=256, num_attention_heads=8, num_key_value_heads=4),
}
MODELS = ("window", "dim64", "dim256")  # scenarios whose options are of the model
NEW_TOKENS = 128
ENGINES = {"FlashAttention": ("FLASH_ATTN", ""), "K8V8": ("CUSTOM", "K8V8"), "K4V4": ("CUSTOM", "K4V4")}
FAILED: list[str] = []


def token_bytes(format: str) -> int:
    layers, heads, dim = (MODEL[name] for name in ("num_hidden_layers", "num_key_value_heads", "head_dim"))
    return {"K8V8": 260, "K4V4": 132, "": 4 * dim}[format] * heads * layers


def start(model: str, backend: str, format: str, *, cache_tokens: int | None = None, **options: Any) -> Any:
    given = ROOM | dict(enable_prefix_caching=False, sizes=(1, 2, 4, 8, 16)) | options
    if cache_tokens:
        given["kv_cache_memory_bytes"] = cache_tokens * token_bytes(format)
    return vllm_engine.start(model, backend, format or None, **given)


def prompts() -> list[list[int]]:
    """12 prompts of 25 to 825 tokens, 4,100 in all; some share 300 tokens, some repeat themselves."""
    rng = random.Random(0)
    plain = [[rng.randrange(5, 512) for _ in range(40 + 157 * i)] for i in range(6)]
    shared = [rng.randrange(5, 512) for _ in range(300)]
    tails = [[rng.randrange(5, 512) for _ in range(20 + i)] for i in range(3)]
    return [*plain, *(shared + tail for tail in tails), *([11, 22, 33, 44, 55] * (5 * n) for n in (1, 9, 25))]


def generate(llm: Any, given: list[list[int]], counts: list[int]) -> list[dict[str, Any]]:
    """Greedy tokens of each prompt, and the gap between the two best logprobs at each."""
    import vllm

    plans = [
        vllm.SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True, detokenize=False, logprobs=2)
        for n in counts
    ]
    told = []
    for out in llm.generate([{"prompt_token_ids": p} for p in given], plans, use_tqdm=False):
        best = [sorted((x.logprob for x in step.values()), reverse=True)[:2] for step in out.outputs[0].logprobs]
        gaps = [round(b[0] - b[1], 4) for b in best]
        told.append({"tokens": list(out.outputs[0].token_ids), "gaps": gaps, "cached": out.num_cached_tokens})
    return told


class Counters:
    """What happened in an engine: that a scenario really had preemptions, drafts or prefix hits."""

    def __init__(self, llm: Any) -> None:
        self.preempted = self.drafted = self.accepted = self.cached = 0
        scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        preempt, schedule, update = scheduler._preempt_request, scheduler.schedule, scheduler.update_from_output

        def counted_preempt(*given: Any, **named: Any) -> Any:
            self.preempted += 1
            return preempt(*given, **named)

        def counted_schedule(*given: Any, **named: Any) -> Any:
            out = schedule(*given, **named)
            self.drafted += sum(map(len, (out.scheduled_spec_decode_tokens or {}).values()))
            return out

        def counted_update(scheduled: Any, output: Any) -> Any:
            self.accepted += sum(max(len(ids) - 1, 0) for ids in output.sampled_token_ids or ())
            return update(scheduled, output)

        scheduler._preempt_request, scheduler.schedule = counted_preempt, counted_schedule
        scheduler.update_from_output = counted_update

    def read(self, *runs: list[dict[str, Any]]) -> dict[str, int]:
        self.cached = sum(one["cached"] or 0 for run in runs for one in run)
        return vars(self)


def scenarios(backend: str, format: str, wanted: list[str]) -> None:
    """Child: run scenarios one after the other, and tell the tokens of two rounds of each."""
    for name in wanted:
        with tempfile.TemporaryDirectory() as model:
            begin = time.perf_counter()
            of_model, options = (SCENARIOS[name], {}) if name in MODELS else ({}, SCENARIOS[name])
            vllm_engine.write_model(model, MODEL | of_model)
            llm = start(model, backend, format, **options)
            vllm_engine.randomize(llm)
            counters, given = Counters(llm), prompts()
            rounds = [generate(llm, given, [NEW_TOKENS] * len(given)) for _ in range(2)]
            seconds = time.perf_counter() - begin
            tell(scenario=name, rounds=rounds, counters=counters.read(*rounds), seconds=seconds)
            vllm_engine.close(llm)
            del llm


def tell(**fields: Any) -> None:
    print("RESULT " + json.dumps(fields), flush=True)


def child(*arguments: str, seconds: float = 280) -> list[dict[str, Any]]:
    """What a child told, in order; its last words if it failed."""
    code: int | str
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        try:
            command = [sys.executable, __file__, *arguments]
            code = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, timeout=seconds).returncode
        except subprocess.TimeoutExpired:
            code = "timeout"
        log.seek(0)
        said = log.read().splitlines()
    if code:
        FAILED.append(f"{arguments}: exit {code}")
        plain = [line for line in said if not line.startswith("RESULT ")]
        print(f"  FAILED {arguments}: exit {code}\n" + "\n".join(plain)[-3000:], flush=True)
    return [json.loads(line[7:]) for line in said if line.startswith("RESULT ")]


def compare(name: str, want: list[dict[str, Any]], got: list[dict[str, Any]], limit: float) -> None:
    """Compare requests up to where they leave the reference; print, and note what is wrong."""
    left, compared = [], 0
    for number, (a, b) in enumerate(zip(want, got, strict=True)):
        pairs = list(zip(a["tokens"], b["tokens"], strict=True))
        at = next((i for i, (x, y) in enumerate(pairs) if x != y), None)
        compared += len(pairs) if at is None else at + 1
        if at is not None:
            left.append((a["gaps"][at], number, at))
    wrong = sorted((x for x in left if x[0] > limit), reverse=True)
    total = sum(len(a["tokens"]) for a in want)
    widest = max((x[0] for x in left), default=0.0)
    print(
        f"  {name}: {compared}/{total} tokens compared, {len(want) - len(left)}/{len(want)} requests equal,"
        f" others leave at gaps up to {widest:.3f}" + (f"; WRONG (gap, request, token): {wrong[:5]}" if wrong else ""),
        flush=True,
    )
    if wrong:
        FAILED.append(f"{name}: {len(wrong)} of {len(want)} requests")


def tokens(*wanted: str) -> None:
    names = list(wanted) or list(SCENARIOS)
    half = len(names) // 2 + 1
    listed = {
        "FlashAttention": [("eager", "graphs", "drafts", *MODELS)],
        "K8V8": [tuple(names[:half]), tuple(names[half:])],
        "K4V4": [("graphs",)],
    }
    with ThreadPoolExecutor() as threads:  # engines are small; they share the GPU
        jobs = {
            name: [threads.submit(child, "scenarios", *ENGINES[name], *part) for part in parts if part]
            for name, parts in listed.items()
        }
        told = {name: {x["scenario"]: x for job in parts for x in job.result()} for name, parts in jobs.items()}
    need = {"preempt": "preempted", "prefix": "cached", "drafts": "drafted"}
    own = told["FlashAttention"]
    for engine, by_scenario in told.items():
        for name, one in by_scenario.items():
            print(f"{engine} {name}: {one['seconds']:.0f} s, {one['counters']}", flush=True)
            if name in need and engine == "K8V8" and not one["counters"][need[name]]:
                FAILED.append(f"{engine} {name}: {need[name]} is 0")
            first = name if name in MODELS else "eager"
            for number, run in enumerate(one["rounds"]):
                compare(f"round {number} against FlashAttention", own[first]["rounds"][0], run, LIMITS[engine])
                if engine == "K8V8" and first in by_scenario:
                    compare(
                        f"round {number} against {engine} eager", by_scenario[first]["rounds"][0], run, LIMITS[engine]
                    )


def requests(count: int) -> tuple[list[list[int]], list[int]]:
    """Random prompts of 1 to 900 tokens, a third of them with one of five shared beginnings, and 1 to 64 new tokens."""
    rng = random.Random(1)
    heads = [[rng.randrange(5, 512) for _ in range(rng.randrange(60, 400))] for _ in range(5)]
    given = []
    for _ in range(count):
        tail = [rng.randrange(5, 512) for _ in range(int(2 ** rng.uniform(0, 9)))]
        given.append((rng.choice(heads) if rng.random() < 0.33 else []) + tail)
    return given, [rng.randrange(1, 65) for _ in range(count)]


def soaked(backend: str, format: str, count: str, alone: str) -> None:
    """Child: all requests at once in a cache that holds some of them; then a few alone, and the same again."""
    import torch

    tight = dict(max_num_seqs=64, sizes=(1, 2, 4, 8, 16, 32, 64), max_num_batched_tokens=1024)
    if backend == "CUSTOM":
        tight |= dict(cache_tokens=12288, enable_prefix_caching=True, speculative_config=DRAFTS)
    with tempfile.TemporaryDirectory() as model:
        vllm_engine.write_model(model, MODEL)
        llm = start(model, backend, format, **tight)
        vllm_engine.randomize(llm)
        counters = Counters(llm)
        pool = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
        given, counts = requests(int(count))
        few = range(0, len(given), max(len(given) // max(int(alone), 1), 1)) if int(alone) else ()
        generate(llm, given[:64], counts[:64])
        before = (pool.get_num_free_blocks(), torch.cuda.memory_allocated())
        begin = time.perf_counter()
        run = generate(llm, given, counts)
        seconds = time.perf_counter() - begin
        blocks, memory = pool.get_num_free_blocks() - before[0], torch.cuda.memory_allocated() - before[1]
        if int(alone):
            llm.reset_prefix_cache()
        single = {i: generate(llm, [given[i]], [counts[i]])[0] for i in few}
        tell(run=run, alone=single, counters=counters.read(run), seconds=seconds, blocks=blocks, memory=memory)
        vllm_engine.close(llm)


def soak(count: str = "2000", alone: str = "100") -> None:
    with ThreadPoolExecutor() as threads:
        jobs = [
            threads.submit(child, "soaked", *ENGINES["K8V8"], count, alone),
            threads.submit(child, "soaked", *ENGINES["FlashAttention"], count, "0"),
        ]
        ours, theirs = (job.result() for job in jobs)
    for told in ours:
        shown = f"{count} requests in {told['seconds']:.0f} s, {told['counters']}"
        print(f"K8V8: {shown}; free blocks {told['blocks']:+d}, memory {told['memory']:+,d} bytes", flush=True)
        if told["blocks"]:
            FAILED.append(f"soak: {-told['blocks']} blocks did not come back")
        if told["memory"] > 64 << 20:
            FAILED.append(f"soak: {told['memory']:,d} bytes more than before")
        single = {int(i): one for i, one in told["alone"].items()}
        compare(
            "against the same request alone", list(single.values()), [told["run"][i] for i in single], LIMITS["K8V8"]
        )
        for other in theirs:
            compare("against FlashAttention", other["run"], told["run"], LIMITS["K8V8"])


TEXTS = (
    "The KV cache of a language model",
    "List the numbers from one to fifty in words: one, two, three, four, five, six, seven,",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return fibonacci(n - 1) + fibonacci(n - 2)\n\n"
    "def test_fibonacci():\n    assert fibonacci(0) == 0\n    assert fibonacci(1) == 1\n    assert fibonacci(2) == 1\n",
    "Water boils at one hundred degrees. Water freezes at zero degrees. Water boils at one hundred degrees. Water",
)


def texts(folder: str, backend: str, format: str, drafts: str) -> None:
    """Child: greedy continuations of TEXTS by a checkpoint."""
    ids = json.loads(Path(folder, "prompts.json").read_text())
    given = dict(load_format="auto", max_num_seqs=8, sizes=(1, 2, 4, 8))
    if drafts == "drafts":
        given["speculative_config"] = DRAFTS | {"prompt_lookup_min": 2}
    llm = start(folder, backend, format, **given)
    counters = Counters(llm)
    run = generate(llm, ids, [160] * len(ids))
    tell(run=run, counters=counters.read(run))
    vllm_engine.close(llm)


def smol(model: str | None = None) -> None:
    from kvstrata.tools.eval import model as models
    from kvstrata.tools.eval import texts as long_texts

    net, tokenizer = models.load(model)
    with tempfile.TemporaryDirectory() as folder:
        net.bfloat16().save_pretrained(folder)
        page = models.encode(tokenizer, long_texts.load(["prose"]), 1200)[0].tolist()
        ids = [*(tokenizer(text).input_ids for text in TEXTS), page]
        Path(folder, "prompts.json").write_text(json.dumps(ids))
        del net
        cases = [(name, drafts) for name in ENGINES for drafts in ("plain", "drafts")]
        with ThreadPoolExecutor() as threads:
            jobs = [threads.submit(child, "texts", folder, *ENGINES[name], drafts) for name, drafts in cases]
            told = {case: job.result()[-1] for case, job in zip(cases, jobs, strict=True) if job.result()}
        for (name, drafts), one in told.items():
            print(f"{name} {drafts}: {one['counters']}", flush=True)
            print("  " + repr(tokenizer.decode(one["run"][0]["tokens"]))[:200], flush=True)
        runs = {case: one["run"] for case, one in told.items()}
        reference = runs["FlashAttention", "plain"]
        for (name, drafts), run in runs.items():
            compare(f"{name} {drafts} against FlashAttention", reference, run, LIMITS[name])


if __name__ == "__main__":
    command, *rest = sys.argv[1:]
    children = {"scenarios": lambda b, f, *names: scenarios(b, f, list(names)), "soaked": soaked, "texts": texts}
    {**children, "tokens": tokens, "soak": soak, "smol": smol}[command](*rest)
    if FAILED:
        print("FAILED:\n" + "\n".join(FAILED))
    elif command not in children:
        print(f"{command}: ok")
    sys.exit(bool(FAILED))
