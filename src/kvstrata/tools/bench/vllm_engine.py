"""A vLLM engine in this process, at the shapes of a model and without its weights: for the benchmark and the tests.

vLLM's dummy weights are so small that attention does not affect the tokens; `randomize` gives weights with which it
does, the same in every process.
"""

from __future__ import annotations

import gc
import json
import os
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

# One process, no network, no optional dependencies; set before vLLM is imported.
ENVIRONMENT = {
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
}
SMALL: dict[str, Any] = {  # a Llama with every part, small enough to start in seconds
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "torch_dtype": "bfloat16",
    "hidden_act": "silu",
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 32000,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "initializer_range": 0.02,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA_8B = SMALL | {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}
LOGIT_STD = 3.0  # of logits after `randomize`: the best two of 32,000 tokens are then about 0.7 apart
FILLED = 3  # first token of a prompt that the connector reports as computed
SCORE_STD = 2.0  # of attention scores: a query attends to a few tokens, not to the mean of all


def prepare() -> None:
    """Set the environment that vLLM needs at import; the user's own settings are kept."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def write_model(folder: str, config: Mapping[str, Any]) -> None:
    """Write the configuration of a model, without weights or tokenizer."""
    Path(folder, "config.json").write_text(json.dumps(dict(config)))
    Path(folder, "generation_config.json").write_text(json.dumps({"bos_token_id": 1, "eos_token_id": 2}))


def start(model: str, backend: str, format: str | None, sizes: Sequence[int] = (), **options: Any) -> Any:
    """A ``vllm.LLM``.

    Args:
        model: folder of a configuration, with or without weights.
        backend: vLLM's name, ``CUSTOM`` for kvstrata.
        format: packed format with ``CUSTOM``, else vLLM's ``kv_cache_dtype``; None is the model's.
        sizes: batch sizes of decode steps that are captured as CUDA graphs; empty: no graphs.
        options: further arguments of ``vllm.LLM``.
    """
    prepare()
    import vllm

    from kvstrata.engines import register_vllm

    register_vllm()
    arguments: dict[str, Any] = dict(load_format="dummy", dtype="bfloat16", seed=0, skip_tokenizer_init=True)
    arguments["attention_config"] = {"backend": backend}
    if backend == "CUSTOM":
        arguments["additional_config"] = {"kvstrata": {"format": format}}
    elif format:
        arguments["kv_cache_dtype"] = format
    if sizes:
        graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": sorted(set(sizes))}
        arguments["compilation_config"] = graphs
    else:
        arguments["enforce_eager"] = True
    return vllm.LLM(model=model, **(arguments | options))


def close(llm: Any) -> None:
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    with suppress(Exception):
        llm.llm_engine.engine_core.shutdown()
    del llm
    cleanup_dist_env_and_memory()
    gc.collect()
    torch.cuda.empty_cache()


def runner_of(llm: Any) -> Any:
    """The model runner of an engine in this process."""
    return llm.llm_engine.model_executor.driver_worker.worker.model_runner


@torch.inference_mode()
def randomize(llm: Any) -> None:
    """Overwrite the weights in place; a weight depends only on its name and shape.

    Activations are about 1, scores and logits have the spreads above, and the residual stream of a layer is not small
    compared with the embedding's.
    """
    runner = runner_of(llm)
    config, parallel = runner.model_config, runner.parallel_config
    dim, heads = config.get_head_size(), config.get_num_attention_heads(parallel)
    qk_rows = (heads + config.get_num_kv_heads(parallel)) * dim  # rows of Q and K
    for name, weight in runner.get_model().named_parameters():
        if weight.dim() == 1:
            weight.fill_(1.0)
            continue
        generator = torch.Generator(weight.device).manual_seed(zlib.crc32(name.encode()))
        std = 1.0 if "embed" in name else weight.shape[-1] ** -0.5
        if "lm_head" in name:
            std *= LOGIT_STD
        weight.normal_(0.0, std, generator=generator)
        if "qkv_proj" in name:  # without it, scores of unit activations have a standard deviation of 1
            weight[:qk_rows].mul_(SCORE_STD**0.5)
