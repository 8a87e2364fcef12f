"""Measurements of one vLLM engine in its own process: the child of the vllm benchmark.

    python -m kvstrata.tools.bench.vllm_child '{"backend": "CUSTOM", "format": "K4V4", "cache_bytes": 68719476736, ...}'

Decode steps run over a filled cache, so that contexts need no prefill: the blocks hold random rows in the engine's
format, each request has its own blocks, and vLLM treats the prompts as computed (`vllm_connector`). Prompts are
measured separately, computed as usual. The last line of the output is the result.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from typing import Any

import torch

from kvstrata.engines.options import Options
from kvstrata.engines.packed import PackedLayer

from . import vllm_check, vllm_engine

MARK = "RESULT "
GROWTH = 256  # tokens by which a context is shorter than its name says, to leave room for steps
GROUP, GROUPS = 8, 9  # steps of a sample, samples of a case
TOP = 20  # number of logprobs that are compared
FEW_BLOCKS = 64  # distinct blocks of rows, repeated over the cache


def blocks_like(cache: torch.Tensor, backend: str, format: str | None, head_dim: int) -> torch.Tensor:
    """A few blocks of random rows in the engine's format, shaped like ``cache [num_blocks, H, N, C]``."""
    generator = torch.Generator(cache.device).manual_seed(0)
    count, (kv_heads, block_size, content) = min(FEW_BLOCKS, cache.shape[0]), cache.shape[1:]
    if backend == "CUSTOM":
        layer = PackedLayer(Options(format or ""), kv_heads, kv_heads, head_dim, 1.0)
        blocks = torch.zeros(count, kv_heads, block_size, content, dtype=torch.uint8, device=cache.device)
        size = (2, count * block_size, kv_heads, head_dim)
        k, v = torch.randn(size, generator=generator, device=cache.device).bfloat16()
        layer.store(k, v, blocks, torch.arange(count * block_size, device=cache.device))
        return blocks.view(cache.dtype)
    rows = torch.randn(count, kv_heads, block_size, content, generator=generator, device=cache.device)
    if cache.dtype.itemsize == 1:
        return rows.to(torch.float8_e4m3fn).view(cache.dtype)
    return rows.to(cache.dtype)


@torch.inference_mode()
def fill(llm: Any, backend: str, format: str | None) -> None:
    """Overwrite every block of the engine's cache with random rows."""
    runner = vllm_engine.runner_of(llm)
    for cache in runner.kv_caches:
        blocks = blocks_like(cache, backend, format, runner.model_config.get_head_size())
        for first in range(0, cache.shape[0], len(blocks)):
            last = min(first + len(blocks), cache.shape[0])
            cache[first:last] = blocks[: last - first]


def steps(llm: Any, batch: int, context: int) -> list[float]:
    """Microseconds per token of decode steps, one sample per GROUP of steps."""
    import vllm

    engine, names = llm.llm_engine, [f"{batch}-{context}-{i}" for i in range(batch)]
    sampling = vllm.SamplingParams(temperature=0.0, max_tokens=GROWTH, ignore_eos=True, detokenize=False)
    prompt = [vllm_engine.FILLED] + [7] * (context - GROWTH - 1)
    for name in names:
        engine.add_request(name, {"prompt_token_ids": prompt}, sampling)
    started: set[str] = set()
    for _ in range(GROWTH // 2):
        started |= {out.request_id for out in engine.step() if out.outputs[0].token_ids}
        if len(started) == batch:
            break
    else:
        raise RuntimeError(f"{len(started)} of {batch} requests with {context} tokens run at once")
    samples = []
    for _ in range(GROUPS + 1):
        begin = time.perf_counter()
        tokens = sum(len(engine.step()) for _ in range(GROUP))
        samples.append((time.perf_counter() - begin) * 1e6 / (GROUP * batch))
        if tokens != GROUP * batch:
            raise RuntimeError(f"expected {GROUP * batch} tokens in {GROUP} steps of {batch} requests, got {tokens}")
    engine.abort_request(names)
    while engine.has_unfinished_requests():
        engine.step()
    return samples[1:]


def prompts(llm: Any, count: int, length: int, rounds: int = 3) -> list[float]:
    """Microseconds per token of computed prompts; each round has other tokens, and the first is not counted.

    A prompt is one token shorter than ``length``: together with the generated token it is as long as the model allows.
    """
    import vllm

    length -= 1

    sampling = vllm.SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False)
    samples = []
    for number in range(rounds):
        generator = torch.Generator().manual_seed(number)
        ids = torch.randint(5, 30000, (count, length), generator=generator).tolist()
        begin = time.perf_counter()
        llm.generate([{"prompt_token_ids": row} for row in ids], sampling, use_tqdm=False)
        samples.append((time.perf_counter() - begin) * 1e6 / (len(ids) * length))
    return samples[1:]


def sample_logprobs(llm: Any) -> list[dict[str, Any]]:
    """First token of a few prompts, from prefill, and the best logprobs of the second, from decode."""
    import vllm

    sampling = vllm.SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True, detokenize=False, logprobs=TOP)
    ids = [[(7 * i + 13 * j) % 29000 + 5 for j in range(100 + 211 * i)] for i in range(4)]
    outs = llm.generate([{"prompt_token_ids": row} for row in ids], sampling, use_tqdm=False)
    completions = [out.outputs[0] for out in outs]
    return [
        {"first": each.token_ids[0], "second": {str(k): v.logprob for k, v in each.logprobs[1].items()}}
        for each in completions
    ]


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """Start the engine that ``given`` describes and run its cases; one that fails has an error instead of samples."""
    begin = time.perf_counter()
    backend, format = job["backend"], job["format"]
    vllm_engine.prepare()
    if backend == "CUSTOM":
        from kvstrata.engines.vllm import KvstrataBackend

        # Connectors are refused because they may split blocks by token; this one transfers nothing.
        KvstrataBackend.supports_kv_connector = classmethod(lambda cls: True)  # type: ignore[method-assign, assignment]
    import vllm

    from .vllm_connector import CONFIG

    result: dict[str, Any] = {"vllm": vllm.__version__, "cases": {}, "errors": {}}
    batches = sorted({case["batch"] for case in job["cases"] if case["what"] == "steps"})
    with tempfile.TemporaryDirectory() as model:
        vllm_engine.write_model(model, job["model"])
        llm = vllm_engine.start(
            model, backend, format, batches, max_model_len=job["max_tokens"], max_num_seqs=max(batches),
            max_num_batched_tokens=8192, enable_prefix_caching=False, gpu_memory_utilization=0.9,
            kv_cache_memory_bytes=job["cache_bytes"], kv_transfer_config=CONFIG,
        )  # fmt: skip
        vllm_engine.randomize(llm)
        cache = llm.llm_engine.vllm_config.cache_config
        result |= {"block_size": cache.block_size, "cache_tokens": cache.num_gpu_blocks * cache.block_size}
        result["start_s"] = time.perf_counter() - begin
        result["probe"] = sample_logprobs(llm)
        if backend == "CUSTOM":
            with vllm_check.without_graphs(vllm_engine.runner_of(llm)), vllm_check.compare_with_reference() as worst:
                result["eager"] = sample_logprobs(llm)
            result |= {"error": worst.error, "compared": worst.calls}
        fill(llm, backend, format)
        for case in job["cases"]:
            if time.perf_counter() - begin > job["seconds"]:
                result["errors"][case["name"]] = "no time was left"
                continue
            run = steps if case["what"] == "steps" else prompts
            try:
                result["cases"][case["name"]] = run(llm, case["batch"], case["tokens"])
            except Exception as error:  # anything that vLLM raises: other cases were measured
                result["errors"][case["name"]] = f"{type(error).__name__}: {error}"
                break  # the engine's state is unknown
            finally:  # the last line counts, in case the process is killed
                result["seconds"] = time.perf_counter() - begin
                print(MARK + json.dumps(result), flush=True)
        vllm_engine.close(llm)
    return result


if __name__ == "__main__":
    measure(json.loads(sys.argv[1]))
