"""kvstrata in a real vLLM on one GPU, by hand: tokens against FlashAttention, thousands of requests, a real checkpoint.

    python tests/vllm_engine.py tokens              mixed batches, prefix hits, preemption, drafts, tails, other models
    python tests/vllm_engine.py soak [REQUESTS]     random requests: every token, every block back
    python tests/vllm_engine.py smol [MODEL]        greedy text of a checkpoint, and its drafts

Exits with 1 if something is wrong. ``--json FILE`` names the file that keeps what was compared, in the folder for
temporary files if left out.

Sums in other orders and 8-bit pages move logits a little, and a token with them where the two best are close. So a
request may leave the reference only where the reference's gap between them is small; what comes after is not compared.
Engines run in processes of their own, at the same time. What one has told stays if it fails later.
"""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
import tempfile
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from kvstrata.engines.options import Options
from kvstrata.tools.bench import vllm_engine
from kvstrata.tools.bench.vllm_engine import SMALL

MODEL = SMALL | {"vocab_size": 512}  # few tokens, so that n-grams repeat and drafts are made
# Nats between the reference's two best tokens up to which another may be taken. The mean gap is 0.85; over 160 tokens
# of this model on a CPU, 8-bit rows moved it by 0.04 (4-bit ones by 0.6) and changed one token in 40.
LIMITS = {"FlashAttention": 0.2, "K8V8": 0.4, "K4V4": 3.0}
# Logits of a real checkpoint reach 16 to 32, where bf16 has steps of 0.125: two of them are noise.
REAL_LIMITS = LIMITS | {"FlashAttention": 0.3}
LOSSES = {"FlashAttention": 0.002, "K8V8": 0.002, "K4V4": 0.02}  # of the perplexity, against bf16
LEAST = {"FlashAttention": 0.2, "K8V8": 0.1, "K4V4": 0.0}  # share of the tokens that has to be compared
BACKENDS = {"FlashAttention": ("FLASH_ATTN", ""), "K8V8": ("CUSTOM", "K8V8"), "K4V4": ("CUSTOM", "K4V4")}
DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
ROOM = dict(max_model_len=2048, max_num_seqs=16, gpu_memory_utilization=0.05, kv_cache_memory_bytes=1 << 30)
# Steps of 256 tokens, so that prompts come in chunks mixed with decodes; a cache that phase `preempt` does not fit.
BASE = dict(max_num_batched_tokens=256, enable_prefix_caching=True, cache_tokens=5632, sizes=(1, 2, 4, 8, 16))
VERIFY = dict(speculative_config=DRAFTS, sizes=(4, 8, 16, 32, 64))  # graphs are sized in tokens, 4 of each request
EAGER = dict(max_num_batched_tokens=256, enable_prefix_caching=False, sizes=())
FEW = {"num_hidden_layers": 2}
MISTRAL = dict(architectures=["MistralForCausalLM"], model_type="mistral", sliding_window=256)
ENGINES: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[str, ...]]] = {  # model, options, phases
    "base": ({}, BASE, ("mixed", "prefix", "preempt")),
    "drafts": ({}, BASE | VERIFY, ("mixed", "prefix", "preempt")),
    "tail": ({}, BASE | dict(tail=True), ("mixed", "prefix", "preempt")),
    "tail-drafts": ({}, BASE | VERIFY | dict(tail=True), ("mixed", "preempt")),
    "window": (FEW | MISTRAL, EAGER, ("mixed",)),
    "dim64": (FEW | dict(head_dim=64, num_attention_heads=32, num_key_value_heads=2), EAGER, ("mixed",)),
    "dim256": (FEW | dict(head_dim=256, num_attention_heads=8, num_key_value_heads=4), EAGER, ("mixed",)),
    "block16": ({}, EAGER | dict(block_size=16), ("mixed",)),
    "block128": ({}, EAGER | dict(block_size=128), ("mixed",)),
}  # fmt: skip
OTHER_MODELS = ("window", "dim64", "dim256")
PROCESSES = [  # backend, and its engines one after the other
    ("FlashAttention", ["base"]),
    ("FlashAttention", list(OTHER_MODELS)),
    ("K8V8", ["base", "block16"]),
    ("K8V8", ["drafts", "block128"]),
    ("K8V8", ["tail", "tail-drafts"]),
    ("K8V8", list(OTHER_MODELS)),
    ("K4V4", ["base"]),
]
NEED = {"mixed": "mixed", "prefix": "cached", "preempt": "preempted"}  # phase: what it has to count
FAILED: list[str] = []
KEPT: dict[str, Any] = {"compared": []}


def token_bytes(format: str, model: dict[str, Any]) -> int:
    layers, heads, dim = (model[name] for name in ("num_hidden_layers", "num_key_value_heads", "head_dim"))
    return (Options(format).bytes_per_token(dim) if format else 4 * dim) * heads * layers


def start(folder: str, model: dict[str, Any], backend: str, format: str, **options: Any) -> Any:
    given = ROOM | options
    if tokens := given.pop("cache_tokens", None):
        given["kv_cache_memory_bytes"] = tokens * token_bytes(format, model)
    if given.pop("tail", False):
        given["additional_config"] = {"kvstrata": {"format": format, "tail": True}}
    return vllm_engine.start(folder, backend, format or None, **given)


def prompts(phase: str) -> tuple[list[list[int]], int]:
    """Prompts of a phase, and how many tokens each gets."""
    rng = random.Random(0)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(5, 512) for _ in range(count)]

    if phase == "preempt":
        return [tokens(230 + 11 * i) for i in range(16)], 160
    plain, shared = [tokens(40 + 157 * i) for i in range(6)], tokens(300)
    tails = [shared + tokens(20 + i) for i in range(3)]
    return [*plain, *tails, *([11, 22, 33, 44, 55] * (5 * n) for n in (1, 9, 25))], 64  # 4,100 tokens


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
        told.append({"tokens": list(out.outputs[0].token_ids), "gaps": gaps, "cached": out.num_cached_tokens or 0})
    return told


class Counters:
    """What happened in an engine: that a phase really had mixed batches, prefix hits, preemptions or drafts."""

    def __init__(self, llm: Any) -> None:
        self.seen = dict.fromkeys(("steps", "mixed", "preempted", "drafted", "accepted", "cached"), 0)
        scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        preempt, schedule, update = scheduler._preempt_request, scheduler.schedule, scheduler.update_from_output

        def counted_preempt(*given: Any, **named: Any) -> Any:
            self.seen["preempted"] += 1
            return preempt(*given, **named)

        def counted_schedule(*given: Any, **named: Any) -> Any:
            out = schedule(*given, **named)
            new = out.num_scheduled_tokens.values()
            self.seen["steps"] += bool(new)
            self.seen["mixed"] += any(n <= 4 for n in new) and any(n > 16 for n in new)
            self.seen["drafted"] += sum(map(len, (out.scheduled_spec_decode_tokens or {}).values()))
            return out

        def counted_update(scheduled: Any, output: Any) -> Any:
            self.seen["accepted"] += sum(max(len(ids) - 1, 0) for ids in getattr(output, "sampled_token_ids", ()))
            return update(scheduled, output)

        scheduler._preempt_request, scheduler.schedule = counted_preempt, counted_schedule
        scheduler.update_from_output = counted_update

    def take(self, run: list[dict[str, Any]]) -> dict[str, int]:
        """Counts since the last call."""
        self.seen["cached"] = sum(one["cached"] for one in run)
        taken, self.seen = self.seen, dict.fromkeys(self.seen, 0)
        return taken


def tell(**fields: Any) -> None:
    print("RESULT " + json.dumps(fields), flush=True)


def engines(backend: str, format: str, *wanted: str) -> None:
    """Child: start engines one after the other and tell the tokens of each phase; a failure ends that engine only."""
    for name in wanted:
        begin, llm = time.perf_counter(), None
        try:
            changed, options, phases = ENGINES[name]
            with tempfile.TemporaryDirectory() as folder:
                vllm_engine.write_model(folder, MODEL | changed)
                llm = start(folder, MODEL | changed, backend, format, **options)
                vllm_engine.randomize(llm)
                counters = Counters(llm)
                tell(engine=name, phase="start", seconds=time.perf_counter() - begin)
                for phase in phases:
                    begin = time.perf_counter()
                    given, count = prompts("mixed" if phase == "prefix" else phase)
                    run = generate(llm, given, [count] * len(given))
                    seconds = time.perf_counter() - begin
                    tell(engine=name, phase=phase, run=run, counters=counters.take(run), seconds=seconds)
        except Exception as error:
            traceback.print_exc()
            tell(engine=name, phase="failed", error=f"{type(error).__name__}: {error}"[:500])
        vllm_engine.close(llm)  # also what a failed start left
        del llm


def child(*arguments: str, seconds: float) -> list[dict[str, Any]]:
    """Results of a child process, in order, also if it failed or took too long; then its last words are printed."""
    code: int | str
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        try:
            command = [sys.executable, __file__, *arguments]
            code = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, timeout=seconds).returncode
        except subprocess.TimeoutExpired:
            code = f"timeout after {seconds:.0f} s"
        log.seek(0)
        said = log.read().splitlines()
    told = [json.loads(line[7:]) for line in said if line.startswith("RESULT ")]
    if code or any("error" in one for one in told):
        FAILED.append(f"{' '.join(arguments)}: {code or 'an engine failed'}")
        plain = [line for line in said if not line.startswith("RESULT ")]
        print(f"FAILED {' '.join(arguments)}: {code}\n" + "\n".join(plain)[-2500:], flush=True)
    return told


def compare(name: str, want: list[dict[str, Any]], got: list[dict[str, Any]], kind: str, limits: Any = LIMITS) -> str:
    """Compare requests up to where they leave the reference; note what is wrong, and describe it in a line."""
    left, compared = [], 0
    for number, (a, b) in enumerate(zip(want, got, strict=True)):
        pairs = list(zip(a["tokens"], b["tokens"], strict=True))
        at = next((i for i, (x, y) in enumerate(pairs) if x != y), None)
        compared += len(pairs) if at is None else at + 1
        if at is not None:
            left.append((a["gaps"][at], number, at))
    wrong = sorted((x for x in left if x[0] > limits[kind]), reverse=True)
    total = sum(len(a["tokens"]) for a in want)
    row = dict(name=name, tokens=compared, of=total, requests=len(want), left=len(left), limit=limits[kind])
    row |= dict(widest_gap=max((x[0] for x in left), default=0.0), wrong=wrong[:20])
    KEPT["compared"].append(row)
    if wrong:
        FAILED.append(f"{name}: {len(wrong)} of {len(want)} requests, (gap, request, token) {wrong[:5]}")
    if compared < LEAST[kind] * total:
        FAILED.append(f"{name}: {compared} of {total} tokens could be compared")
    same = f"{len(want) - len(left)}/{len(want)}"
    return f"{compared:>7}/{total:<7} {same:>9} {row['widest_gap']:>7.3f} {'WRONG' if wrong else ''}"


def tokens(seconds: str = "125") -> None:
    with ThreadPoolExecutor() as threads:  # engines are small; they share the GPU
        jobs = [
            threads.submit(child, "engines", *BACKENDS[backend], *names, seconds=float(seconds))
            for backend, names in PROCESSES
        ]
        told = [(backend, job.result()) for (backend, _), job in zip(PROCESSES, jobs, strict=True)]
    runs = {(b, x["engine"], x["phase"]): x for b, lines in told for x in lines if "run" in x}
    started = {(b, x["engine"]): x["seconds"] for b, lines in told for x in lines if x["phase"] == "start"}
    print(f"{'':34} {'compared':>15} {'equal':>9} {'gap':>7}", flush=True)
    wanted = [(b, name, phase) for b, names in PROCESSES for name in names for phase in ENGINES[name][2]]
    for backend, name, phase in wanted:
        one, label = runs.get((backend, name, phase)), f"{backend} {name} {phase}"
        if one is None:
            FAILED.append(f"{label}: not run")
            print(f"{label:34} not run", flush=True)
            continue
        counts = one["counters"]
        KEPT.setdefault("counters", {})[label] = counts | {"seconds": one["seconds"]}
        needed = [NEED[phase]] if backend != "FlashAttention" and name not in OTHER_MODELS else []
        needed += ["drafted", "accepted"] if "drafts" in name else []
        FAILED.extend(f"{label}: {what} is 0" for what in needed if not counts[what])
        first = "mixed" if phase == "prefix" else phase
        theirs = runs.get(("FlashAttention", name if name in OTHER_MODELS else "base", first))
        line = "no reference" if theirs is None else compare(label, theirs["run"], one["run"], backend)
        about = " ".join(f"{what} {n}" for what, n in counts.items() if n)
        print(
            f"{label:34} {line:>40} {started.get((backend, name), 0):4.0f} + {one['seconds']:.0f} s; {about}",
            flush=True,
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


def soaked(backend: str, format: str, count: str, alone: str, tail: str = "") -> None:
    """Child: all requests at once in a cache that holds some of them; then a few alone."""
    import torch

    tight = dict(max_num_seqs=64, sizes=(1, 2, 4, 8, 16, 32, 64), max_num_batched_tokens=1024)
    if backend == "CUSTOM":
        tight |= dict(cache_tokens=4096, enable_prefix_caching=True, tail=bool(tail))
        tight |= dict(speculative_config=DRAFTS, sizes=(4, 8, 16, 32, 64, 128, 256))
    with tempfile.TemporaryDirectory() as folder:
        vllm_engine.write_model(folder, MODEL)
        llm = start(folder, MODEL, backend, format, **tight)
        vllm_engine.randomize(llm)
        counters = Counters(llm)
        pool = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
        given, counts = requests(int(count))
        generate(llm, given[:64], counts[:64])
        before = (pool.get_num_free_blocks(), torch.cuda.memory_allocated())
        begin = time.perf_counter()
        run = generate(llm, given, counts)
        seconds = time.perf_counter() - begin
        blocks, memory = pool.get_num_free_blocks() - before[0], torch.cuda.memory_allocated() - before[1]
        tell(run=run, counters=counters.take(run), seconds=seconds, blocks=blocks, memory=memory)
        if int(alone):
            llm.reset_prefix_cache()
            few = range(0, len(given), max(len(given) // int(alone), 1))
            tell(alone={i: generate(llm, [given[i]], [counts[i]])[0] for i in few})
        vllm_engine.close(llm)


def soak(count: str = "2000", alone: str = "60", seconds: str = "105") -> None:
    listed = {"K8V8": (*BACKENDS["K8V8"], count, alone), "K8V8 tail": (*BACKENDS["K8V8"], count, "0", "tail"),
              "FlashAttention": (*BACKENDS["FlashAttention"], count, "0")}  # fmt: skip
    with ThreadPoolExecutor() as threads:
        jobs = {n: threads.submit(child, "soaked", *given, seconds=float(seconds)) for n, given in listed.items()}
        told = {name: {key: value for one in job.result() for key, value in one.items()} for name, job in jobs.items()}
    theirs = told.pop("FlashAttention").get("run")
    for name, one in told.items():
        if "run" not in one:
            FAILED.append(f"soak {name}: not run")
            continue
        shown = {key: one[key] for key in ("seconds", "blocks", "memory", "counters")}
        KEPT[name] = shown
        print(f"{name}: {count} requests, {json.dumps(shown)}", flush=True)
        if one["blocks"]:
            FAILED.append(f"soak {name}: {-one['blocks']} blocks did not come back")
        if one["memory"] > 64 << 20:
            FAILED.append(f"soak {name}: {one['memory']:,d} bytes more than before")
        FAILED.extend(f"soak {name}: {x} is 0" for x in ("preempted", "drafted", "cached") if not one["counters"][x])
        single = {int(i): x for i, x in one.get("alone", {}).items()}
        if single:
            line = compare(f"{name} alone", list(single.values()), [one["run"][i] for i in single], "K8V8")
            print(f"{name + ' against itself alone':34} {line}", flush=True)
        if theirs is None:
            FAILED.append(f"soak {name}: no reference")
        else:
            line = compare(f"{name} against FlashAttention", theirs, one["run"], "K8V8")
            print(f"{name + ' against FlashAttention':34} {line}", flush=True)


TEXTS = (
    "The KV cache of a language model",
    "List the numbers from one to fifty in words: one, two, three, four, five, six, seven,",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return fibonacci(n - 1) + fibonacci(n - 2)\n\n"
    "def test_fibonacci():\n    assert fibonacci(0) == 0\n    assert fibonacci(1) == 1\n    assert fibonacci(2) == 1\n",
    "Water boils at one hundred degrees. Water freezes at zero degrees. Water boils at one hundred degrees. Water",
)


def write_checkpoint(net: Any, folder: str) -> None:
    """Write a model of transformers for vLLM; `save_pretrained` refuses one that was read from a .gguf file."""
    from safetensors.torch import save_file

    state = {name: x.bfloat16().contiguous() for name, x in net.state_dict().items()}
    config = json.loads(net.config.to_json_string())
    config.pop("quantization_config", None)
    config["tie_word_embeddings"] = bool(net.config.tie_word_embeddings)
    if config["tie_word_embeddings"]:
        state.pop("lm_head.weight", None)
    save_file(state, Path(folder, "model.safetensors"), metadata={"format": "pt"})
    config |= {"architectures": [type(net).__name__], "dtype": "bfloat16"}
    Path(folder, "config.json").write_text(json.dumps(config))


def loss_of(llm: Any, ids: list[int]) -> float:
    """Mean negative log-likelihood of the tokens of a prompt. It comes in chunks, which read earlier ones packed."""
    import vllm

    llm.reset_prefix_cache()
    plan = vllm.SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    (out,) = llm.generate([{"prompt_token_ids": ids}], [plan], use_tqdm=False)
    chosen = [step[token].logprob for token, step in zip(ids[1:], out.prompt_logprobs[1:], strict=True)]
    return -sum(chosen) / len(chosen)


def texts(folder: str, backend: str, format: str, drafts: str) -> None:
    """Child: greedy continuations of TEXTS by a checkpoint."""
    ids = json.loads(Path(folder, "prompts.json").read_text())
    given = dict(load_format="auto", max_num_seqs=8, sizes=(1, 2, 4, 8), max_num_batched_tokens=128)
    if drafts == "drafts":
        given["speculative_config"] = DRAFTS | {"prompt_lookup_min": 2}
    llm = start(folder, {}, backend, format, **given)
    counters = Counters(llm)
    run = generate(llm, ids, [160] * len(ids))
    tell(run=run, counters=counters.take(run), loss=None if drafts == "drafts" else loss_of(llm, ids[-1]))
    vllm_engine.close(llm)


def smol(model: str | None = None, seconds: str = "150") -> None:
    from kvstrata.tools.eval import model as models
    from kvstrata.tools.eval import texts as long_texts

    net, tokenizer = models.load(model)
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(net, folder)
        page = models.encode(tokenizer, long_texts.load(["prose"]), 1800)[0].tolist()
        ids = [*(tokenizer(text).input_ids for text in TEXTS), page]
        Path(folder, "prompts.json").write_text(json.dumps(ids))
        del net
        cases = [(name, drafts) for name in BACKENDS for drafts in ("plain", "drafts")]
        with ThreadPoolExecutor() as threads:
            jobs = [
                threads.submit(child, "texts", folder, *BACKENDS[name], drafts, seconds=float(seconds))
                for name, drafts in cases
            ]
            told = {case: job.result()[-1] for case, job in zip(cases, jobs, strict=True) if job.result()}
    for (name, drafts), one in told.items():
        print(f"{name} {drafts}: {one['counters']}", flush=True)
        print("  " + repr(tokenizer.decode(one["run"][0]["tokens"]))[:200], flush=True)
        if reference := told.get(("FlashAttention", "plain")):
            line = compare(f"smol {name} {drafts}", reference["run"], one["run"], name, REAL_LIMITS)
            print(f"{name + ' ' + drafts:34} {line}", flush=True)
            if drafts == "plain":
                more = one["loss"] - reference["loss"]
                KEPT.setdefault("loss", {})[name] = dict(nll=one["loss"], perplexity=math.exp(one["loss"]), more=more)
                print(f"{'':34} perplexity {math.exp(one['loss']):.3f}, {100 * math.expm1(more):+.2f} %", flush=True)
                if abs(math.expm1(more)) > LOSSES[name]:
                    FAILED.append(f"smol {name}: perplexity {math.expm1(more):+.4f}, limit {LOSSES[name]}")
    FAILED.extend(f"smol {name} {drafts}: not run" for name, drafts in cases if (name, drafts) not in told)


if __name__ == "__main__":
    command, *rest = sys.argv[1:]
    children = {"engines": engines, "soaked": soaked, "texts": texts}
    file = Path(tempfile.gettempdir(), f"vllm_{command}.json")
    if "--json" in rest:
        place = rest.index("--json")
        file = Path(rest[place + 1])
        del rest[place : place + 2]
    {**children, "tokens": tokens, "soak": soak, "smol": smol}[command](*rest)
    if command not in children:
        file.write_text(json.dumps(KEPT | {"command": command, "failed": FAILED}, indent=1))
        print(f"{'FAILED:' if FAILED else command + ': ok'} ({file})", *FAILED, sep="\n")
        sys.exit(bool(FAILED))
