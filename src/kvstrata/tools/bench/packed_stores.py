"""Cases of `bench packed`: the stores of a decode step and of a prompt, 8 KV heads of 128.

``store_kv`` writes the same rows in bfloat16, at the same slots. Bytes are rows read and codes written; ``store_kv``
writes more.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial

import torch

import kvstrata
from kvstrata.layout import Format
from kvstrata.quant import reference as quant

from .attention import assert_close
from .case import Bench, Case, sets_for
from .clock import Call

BLOCK_SIZE = 64
POISON = 0xFF
CHECKED_BLOCKS = 32  # compared with the reference
SECONDS = 2.0  # maximum seconds of sampling


class Stores:
    """One input set: rows, packed blocks, bfloat16 blocks for store_kv, and the slots in both."""

    def __init__(self, fmt: Format, tokens: int, prompt: bool, kv_heads: int, device: torch.device, seed: int) -> None:
        generator = torch.Generator(device).manual_seed(seed)
        self.fmt, dim = fmt, fmt.head_dim
        blocks = max(2 * -(-tokens // BLOCK_SIZE), 1024 if device.type == "cuda" else 8)
        self.k, self.v = torch.randn(2, tokens, kv_heads, dim, device=device, generator=generator).bfloat16()
        per_block = BLOCK_SIZE // fmt.page_tokens
        self.pages = torch.empty(blocks, kv_heads, per_block * fmt.page_bytes, dtype=torch.uint8, device=device)
        self.rows = torch.empty(2, blocks, BLOCK_SIZE, kv_heads, dim, dtype=torch.bfloat16, device=device)
        if prompt:
            order = torch.randperm(blocks, device=device, generator=generator)[: -(-tokens // BLOCK_SIZE)]
            slots = order[:, None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE, device=device)
            self.slot_mapping = slots.flatten()[:tokens].int()
        else:
            self.slot_mapping = torch.randperm(blocks * BLOCK_SIZE, device=device, generator=generator)[:tokens].int()

    def store(self, backend: str = "auto") -> None:
        kvstrata.store_packed(self.k, self.v, self.pages, self.slot_mapping, self.fmt, backend=backend)

    def store_kv(self) -> None:
        kvstrata.store_kv(self.k, self.v, self.rows[0], self.rows[1], self.slot_mapping)

    @functools.cached_property
    def expected(self) -> torch.Tensor:
        pages = torch.full_like(self.pages, POISON)
        kvstrata.store_packed(self.k, self.v, pages, self.slot_mapping, self.fmt, backend="reference")
        return pages

    def poison(self, name: str) -> None:
        if name == "store_kv":
            self.rows.view(torch.uint8).fill_(POISON)
        else:
            self.pages.fill_(POISON)

    def assert_stored(self, name: str) -> None:
        slots = self.slot_mapping.long()
        if name == "store_kv":
            for x, rows in zip((self.k, self.v), self.rows, strict=True):
                assert torch.equal(rows.flatten(0, 1)[slots], x), "a row is wrong"
            return
        expected = self.expected
        blocks = slots // BLOCK_SIZE
        other = torch.ones(len(self.pages), dtype=torch.bool, device=slots.device).index_fill_(0, blocks, False)
        assert torch.equal(self.pages[other], expected[other]), "a block of others was written to"
        few = blocks.unique()[:: max(1, len(blocks.unique()) // CHECKED_BLOCKS)]
        for ours, theirs in zip(self._rows(self.pages[few]), self._rows(expected[few]), strict=True):
            assert_close(ours, theirs, 2e-2)

    def _rows(self, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V as stored; tokens that were not stored are zeros: the scale of poison is NaN."""
        k, v = quant.dequantize_page(blocks.contiguous().view(-1, self.fmt.page_bytes), self.fmt)
        return k.nan_to_num(0.0), v.nan_to_num(0.0)


def build_store(name: str, tokens: int, prompt: bool, sets: int, device: torch.device) -> Bench:
    fmt = Format.parse(name, 128)
    heads = 8 if device.type == "cuda" else 1
    inputs = [Stores(fmt, tokens, prompt, heads, device, seed) for seed in range(sets)]
    contenders: dict[str, Call] = {
        "kvstrata": lambda i: inputs[i].store(),
        "store_kv": lambda i: inputs[i].store_kv(),
    }
    variants = {"store_kv"}
    if device.type == "cuda" and name == "K4V4":
        contenders["triton"] = lambda i: inputs[i].store("triton")
        variants.add("triton")
    return Bench(
        contenders=contenders,
        poison=lambda contender, i: inputs[i].poison(contender),
        check=lambda contender, i, out: inputs[i].assert_stored(contender),
        ours="kvstrata",
        baseline="store_kv",
        variants=variants,
        host={name: contenders[name] for name in ("kvstrata", "store_kv")},
    )


def store_case(name: str, tokens: int, prompt: bool, device: torch.device) -> Case:
    """A step of ``tokens`` single rows, or a prompt of that length."""
    cuda, fmt = device.type == "cuda", Format.parse(name, 128)
    moved = tokens * (8 if cuda else 1) * (2 * 128 * 2 + fmt.bytes_per_token) + 4 * tokens
    sets = sets_for(moved, device)
    make: Callable[[torch.device], Bench] = partial(build_store, name, tokens, prompt, sets)
    case = f"store-{name}-{'prompt-' if prompt else ''}{tokens}"
    params = {"kind": f"store {name}", "T": tokens}
    return Case("packed", case, params, moved, make, sets=sets, seconds=SECONDS)
