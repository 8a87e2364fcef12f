"""kvstrata in a real vLLM on one GPU, by hand: tokens beside FlashAttention 3, and speed.

    python tests/vllm_engine.py tokens
    python tests/vllm_engine.py speed CUSTOM:K4V4:32:8192

Weights are dummies. Requests may leave the reference where it is undecided: the gap of its two best tokens is shown.
"""

import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

for name, value in {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_PLUGINS": "",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TVM_FFI_DISABLE_TORCH_C_DLPACK": "1",
}.items():
    os.environ.setdefault(name, value)

TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "torch_dtype": "bfloat16",
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 32000,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "initializer_range": 0.02,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA8B = TINY | {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
}
GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
COMMON = dict(load_format="dummy", dtype="bfloat16", seed=0, skip_tokenizer_init=True)


def options(backend, fmt, graphs, sizes):
    given = {"attention_config": {"backend": backend}}
    if backend == "CUSTOM":
        given["additional_config"] = {"kvstrata": {"format": fmt}}
    elif fmt:
        given["kv_cache_dtype"] = fmt
    given |= {"compilation_config": GRAPHS | {"cudagraph_capture_sizes": sizes}} if graphs else {"enforce_eager": True}
    return given


def engine(model, backend, fmt, graphs, sizes=(1, 2, 4, 8, 16), **given):
    import vllm

    from kvstrata.engines import register_vllm

    register_vllm()
    return vllm.LLM(model=model, **(COMMON | options(backend, fmt, graphs, list(sizes)) | given))


def close(llm):
    import torch
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    llm.llm_engine.engine_core.shutdown()
    del llm
    cleanup_dist_env_and_memory()
    gc.collect()
    torch.cuda.empty_cache()


def prompts():
    plain = [[(7 * i + 13 * j) % 31000 + 5 for j in range(40 + 157 * i)] for i in range(6)]
    shared = [
        [(11 * j) % 31000 + 5 for j in range(300)] + [(17 * i + j) % 31000 + 5 for j in range(20)] for i in range(3)
    ]
    again = [([101, 202, 303, 404, 505] * 40)[: 120 + i] for i in range(3)]  # what n-gram drafts repeat
    return plain + shared + again


SMALL = dict(max_model_len=4096, max_num_seqs=16, gpu_memory_utilization=0.5, kv_cache_memory_bytes=2 << 30)
SCENARIOS = {
    "plain": dict(enable_prefix_caching=False),
    "chunked": dict(enable_prefix_caching=False, max_num_batched_tokens=256, enable_chunked_prefill=True),
    "prefix": dict(enable_prefix_caching=True, max_num_batched_tokens=512),
    # about 4,900 tokens in 12 requests; room for some 2,600 of them, so that requests are preempted
    "preempt": dict(enable_prefix_caching=False, max_model_len=1536),
    "drafts": dict(
        enable_prefix_caching=False,
        speculative_config={
            "method": "ngram",
            "num_speculative_tokens": 3,
            "prompt_lookup_max": 3,
            "prompt_lookup_min": 2,
        },
    ),
    "block16": dict(enable_prefix_caching=False, block_size=16),
    "block128": dict(enable_prefix_caching=False, block_size=128),
}


def one(scenario, backend, fmt, graphs):
    """Tokens and the gap between the two best logprobs at each, of every prompt; twice, so that prefixes are hit."""
    import vllm

    given = SMALL | SCENARIOS[scenario]
    if scenario == "preempt":
        layers, heads, dim = TINY["num_hidden_layers"], TINY["num_key_value_heads"], TINY["head_dim"]
        token = {"K8V8": 260, "K4V4": 132}.get(fmt, 4 * dim) * heads * layers
        given["kv_cache_memory_bytes"] = 2600 * token
    with tempfile.TemporaryDirectory() as model:
        Path(model, "config.json").write_text(json.dumps(TINY))
        Path(model, "generation_config.json").write_text(json.dumps({"bos_token_id": 1, "eos_token_id": 2}))
        llm = engine(model, backend, fmt, graphs, **given)
        sampling = vllm.SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True, detokenize=False, logprobs=2)
        runs = []
        for _ in range(2):
            outs = llm.generate([{"prompt_token_ids": p} for p in prompts()], sampling, use_tqdm=False)
            runs.append([])
            for out in outs:
                steps = out.outputs[0]
                best = [sorted((x.logprob for x in step.values()), reverse=True)[:2] for step in steps.logprobs]
                runs[-1].append({"tokens": list(steps.token_ids), "gap": [b[0] - b[1] for b in best]})
        close(llm)
    return runs


def compare(name, want, runs):
    """A request may leave the reference where the reference's two best tokens are close; said with that gap."""
    for number, run in enumerate(runs):
        same, left = 0, []
        for r, (a, b) in enumerate(zip(want, run, strict=True)):
            at = next((i for i, (x, y) in enumerate(zip(a["tokens"], b["tokens"], strict=True)) if x != y), None)
            if at is None:
                same += 1
            else:
                left.append((r, at, round(a["gap"][at], 4)))
        print(
            f"  {name} run {number}: {same}/{len(want)} equal; left (request, token, gap of the reference): {left}",
            flush=True,
        )


def child(*arguments):
    result = subprocess.run([sys.executable, __file__, *arguments], capture_output=True, text=True)
    lines = [x for x in result.stdout.splitlines() if x.startswith("RESULT ")]
    if not lines:
        print(f"  FAILED {arguments}\n" + (result.stdout + result.stderr)[-2500:], flush=True)
        return None
    return json.loads(lines[-1][7:])


def tokens():
    reference = child("one", "plain", "FLASH_ATTN", "", "eager")
    if reference is None:
        sys.exit(1)
    compare("FLASH_ATTN eager, itself", reference[0], reference[1:])
    cases = [
        ("plain", "FLASH_ATTN", "", "graphs"),
        ("plain", "CUSTOM", "K8V8", "eager"),
        ("plain", "CUSTOM", "K8V8", "graphs"),
        ("chunked", "CUSTOM", "K8V8", "graphs"),
        ("prefix", "CUSTOM", "K8V8", "graphs"),
        ("preempt", "CUSTOM", "K8V8", "graphs"),
        ("drafts", "CUSTOM", "K8V8", "graphs"),
        ("block16", "CUSTOM", "K8V8", "graphs"),
        ("block128", "CUSTOM", "K8V8", "eager"),
        ("plain", "CUSTOM", "K4V4", "graphs"),
    ]
    ours = None
    for case in cases:
        runs = child("one", *case)
        if runs is None:
            continue
        compare(" ".join(case), reference[0], runs)
        if case[1:3] == ("CUSTOM", "K8V8"):
            if ours is None:
                ours = runs[0]
            else:
                compare("   against our own plain eager", ours, runs)


def speed(backend, fmt, batch, context, steps=64):
    import vllm

    with tempfile.TemporaryDirectory() as model:
        Path(model, "config.json").write_text(json.dumps(LLAMA8B))
        Path(model, "generation_config.json").write_text(json.dumps({"bos_token_id": 1, "eos_token_id": 2}))
        llm = engine(
            model,
            backend,
            fmt,
            True,
            sizes=sorted({1, batch}),
            max_model_len=context + 512,
            max_num_seqs=batch,
            gpu_memory_utilization=0.9,
            enable_prefix_caching=True,
            max_num_batched_tokens=8192,
        )
        given = [{"prompt_token_ids": [(31 * i + 7 * j) % 120000 + 5 for j in range(context)]} for i in range(batch)]

        def timed(count):
            sampling = vllm.SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False)
            begin = time.perf_counter()
            llm.generate(given, sampling, use_tqdm=False)
            return time.perf_counter() - begin

        cold = timed(1)
        timed(4)
        # Prompts are prefix hits now: the difference of two lengths is decode steps alone.
        pairs = [(timed(8), timed(8 + steps)) for _ in range(3)]
        step = sorted((b - a) / steps for a, b in pairs)[1]
        cache = llm.llm_engine.vllm_config.cache_config
        result = dict(
            backend=backend,
            format=fmt,
            batch=batch,
            context=context,
            step_ms=round(step * 1e3, 3),
            tokens_per_s=round(batch / step),
            prefill_tokens_per_s=round(batch * context / cold),
            block_size=cache.block_size,
            cache_tokens=cache.num_gpu_blocks * cache.block_size,
        )
        close(llm)
    return result


if __name__ == "__main__":
    command, *rest = sys.argv[1:]
    if command == "tokens":
        tokens()
    elif command == "one":
        print("RESULT " + json.dumps(one(rest[0], rest[1], rest[2], rest[3] == "graphs")))
    elif command == "speed1":
        print("RESULT " + json.dumps(speed(rest[0], rest[1], int(rest[2]), int(rest[3]))))
    elif command == "speed":
        for case in rest or [
            "FLASH_ATTN::32:8192",
            "CUSTOM:K4V4:32:8192",
            "FLASH_ATTN:fp8:32:8192",
            "CUSTOM:K8V8:32:8192",
        ]:
            print(" ", child("speed1", *case.split(":")), flush=True)
