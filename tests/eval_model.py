"""A tiny random model with a vocabulary of letters, for tests of `kvstrata.tools.eval`."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hf_model import SIZES


def model(seed: int = 0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    sizes = SIZES | dict(vocab_size=96, pad_token_id=None, eos_token_id=2)
    config = LlamaConfig(**sizes, head_dim=64, initializer_range=0.2)
    return LlamaForCausalLM(config).eval()


def tokens(n: int, rows: int = 1) -> torch.Tensor:
    return torch.randint(0, 96, (rows, n), generator=torch.Generator().manual_seed(1))


class Letters:
    """A tokenizer of characters."""

    def __call__(self, text: str, return_tensors: str = "pt", add_special_tokens: bool = True) -> object:
        ids = torch.tensor([[ord(c) % 96 for c in text]])
        return type("Encoding", (), {"input_ids": ids})()
