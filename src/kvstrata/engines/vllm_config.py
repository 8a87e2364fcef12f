"""Rules of a vLLM configuration for packed pages: refusals, sizes, drafts. Imports nothing of vLLM."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kvstrata.attention.packed_prefill.job import STAGED

from .options import BLOCK_SIZES, HEAD_DIMS, PREFERRED_BLOCK_SIZE, Options

# vLLM's reasons for refusing a configuration, and ours.
REFUSALS = {
    "head_size not supported": f"the model's head_dim is none of {HEAD_DIMS}",
    "dtype not supported": "the model's dtype is neither float16 nor bfloat16 (--dtype)",
    "kv_cache_dtype not supported": "kvstrata packs 16-bit rows itself, so --kv-cache-dtype has to be auto, or bfloat16"
    " or float16 if the checkpoint asks for an fp8 cache",
    "block_size not supported": f"--block-size has to be a multiple of {BLOCK_SIZES[0]}",
    "partial multimodal token full attention not supported": "bidirectional attention among image tokens is missing",
    "MLA not supported": "models with multi-head latent attention (MLA) are not supported",
    "sparse not supported": "models with sparse attention are not supported",
    "per-head quant scales not supported": "the checkpoint has scales for an fp8 KV cache, which packed pages ignore",
    "compute capability not supported": "the GPU is older than compute capability 8.0",
    "R-SWA not supported": "reference sliding-window attention is not supported",
    "non-causal attention not supported": "attention that is not causal is not supported",
    "batch invariance not supported": "batch-invariant mode is not supported yet",
    "KV connector not supported": "KV connectors may split blocks by token, which packed pages do not allow",
    "PCP not supported": "prefill context parallelism is not supported",
    "DCP not supported": "decode context parallelism is not supported",
}


DRAFTS_WITH_TAIL = ("ngram", "ngram_gpu")  # draft methods without layers of their own


@contextmanager
def refused() -> Iterator[None]:
    """Turn errors of a configuration into sentences that say who refuses it."""
    try:
        yield
    except (ValueError, TypeError, FileNotFoundError) as error:
        raise ValueError(f"kvstrata: {str(error).removeprefix('kvstrata.')}.") from error


def options_of(config: Any) -> Options:
    with refused():
        return Options.parse(config.additional_config)


def most_prefilled(config: Any, kv_heads: int, head_dim: int) -> int:
    """Tokens per prefill call, including prefixes, such that their unpacked rows fit STAGED bytes."""
    longest = config.model_config.max_model_len + config.scheduler_config.max_num_batched_tokens
    return max(min(STAGED // (4 * kv_heads * head_dim), longest), 1)


def kernel_block_size(block_size: int | None) -> int:
    """Tokens of a block as vLLM shows it to kernels: the largest of our sizes that divides its own, 16 of 48."""
    return max((size for size in BLOCK_SIZES if block_size and block_size % size == 0), default=PREFERRED_BLOCK_SIZE)


def check_tail(config: Any) -> None:
    """Raise ValueError if this configuration cannot have a 16-bit tail per request."""
    if not config.use_v2_model_runner:
        raise ValueError("kvstrata: a tail needs model runner V2, since V1 has no fixed index for a request.")
    if config.model_config.is_hybrid:
        raise ValueError("kvstrata: a tail needs prefix hits of whole blocks, which hybrid models do not guarantee.")
    drafts = config.speculative_config
    if drafts is not None and drafts.method not in DRAFTS_WITH_TAIL:
        raise ValueError(f"kvstrata: a tail works with drafts of {DRAFTS_WITH_TAIL} only, got {drafts.method!r}.")


def slots_ahead(config: Any) -> int:
    """Tokens by which device lengths of a draft model's batch may exceed those on the host, which vLLM does not update.

    The draft's first step has a token more than the target's, or all draft tokens at once. Such a batch has no
    ``req_idx``; model runner V1 gives none to the target's batches either.
    """
    drafts = config.speculative_config
    if drafts is None:
        return 0
    if drafts.parallel_drafting:
        return config.num_speculative_tokens
    return int(drafts.method == "draft_model")
