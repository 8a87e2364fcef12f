"""The benchmark of packed pages that an engine owns: decode from a block table, stores, and chunks over a prefix.

Nothing is prepared outside a call: `decode_packed` reads lengths and blocks on the device, in its two launches. Decode
calls are captured and replayed; the L2 cache is filled by reading before each sample, as in `decode`. Peers read as
many tokens in bfloat16, contiguous (cuDNN), or in pages, bfloat16 and fp8 (FlashInfer). Cases named ``ragged`` have 32
requests of 256 to 32,768 tokens, which only FlashInfer supports without padding.

Stores (``store-*``) are in packed_stores.py, chunks of a prompt (``chunk-*``) in packed_chunks.py.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.nn.attention import SDPBackend

import kvstrata
from kvstrata import jit
from kvstrata.attention.packed_warmup import kernels_needed
from kvstrata.layout import Format
from kvstrata.tools.bench import Bench, Case, attach, runner, sets_for
from kvstrata.tools.bench.attention import assert_close, fill_l2
from kvstrata.tools.bench.cases.decode import CHECKED, PEER_PAGE, DenseRows, assert_first_close, sdpa_peer
from kvstrata.tools.bench.cases.decode import Shape as DecodeShape
from kvstrata.tools.bench.clock import Call
from kvstrata.tools.bench.packed_chunks import chunk_case
from kvstrata.tools.bench.packed_stores import BLOCK_SIZE, store_case

FORMATS = ("K8V8", "K4V4", "K4V2", "K3V3", "K2V2")
FEW = ("K8V8", "K4V4", "K2V2")
SECONDS = 2.0  # maximum seconds of sampling
LIMIT = 140.0  # seconds after which no case begins
SHORTEST, LONGEST = 256, 32768  # tokens of ragged requests


def random_pages(
    fmt: Format, blocks: int, kv_heads: int, device: torch.device, generator: torch.Generator
) -> torch.Tensor:
    """Blocks of random codes with small scales: speed does not depend on the values of codes."""
    per_block = BLOCK_SIZE // fmt.page_tokens
    size = (blocks, kv_heads, per_block * fmt.page_bytes)
    pages = torch.randint(0, 256, size, dtype=torch.uint8, device=device, generator=generator)
    scales = torch.rand(blocks, kv_heads, per_block, fmt.scale_bytes // 2, device=device, generator=generator)
    by_page = pages.view(blocks, kv_heads, per_block, fmt.page_bytes)
    by_page[..., fmt.scale_offset :] = (scales * 0.01 + 0.002).half().view(torch.uint8)
    return pages


class Inputs:
    """One input set: packed blocks in shuffled order, a block table, lengths and queries."""

    def __init__(self, fmt: Format, shape: DecodeShape, lengths: list[int], device: torch.device, seed: int) -> None:
        generator = torch.Generator(device).manual_seed(seed)
        counts = [-(-n // BLOCK_SIZE) for n in lengths]
        order = torch.randperm(sum(counts), device=device, generator=generator).int()
        self.fmt, self.pages = fmt, random_pages(fmt, sum(counts), shape.kv_heads, device, generator)
        self.block_table = torch.zeros(len(lengths), max(counts), dtype=torch.int32, device=device)
        for row, blocks in enumerate(order.split(counts)):
            self.block_table[row, : len(blocks)] = blocks
        self.seq_lens = torch.tensor(lengths, dtype=torch.int32, device=device)
        size = (len(lengths) * shape.q_len, shape.heads, shape.head_dim)
        self.q = torch.randn(size, device=device, generator=generator).bfloat16()
        self.q_len = shape.q_len

    def decode(self, backend: str = "auto", requests: int | None = None) -> torch.Tensor:
        q, table, lengths = self.q, self.block_table, self.seq_lens
        if requests is not None:
            q, table, lengths = q[: requests * self.q_len], table[:requests], lengths[:requests]
        return kvstrata.decode_packed(q, self.pages, table, lengths, self.fmt, backend=backend)  # type: ignore[return-value]


class RaggedRows:
    """K and V of requests of different lengths in pages of bfloat16, and the expected output of a decode over them."""

    def __init__(self, shape: DecodeShape, lengths: list[int], q: torch.Tensor) -> None:
        self.q, self.lengths = q.unsqueeze(2), lengths
        counts = [-(-n // PEER_PAGE) for n in lengths]
        size = (2, sum(counts), shape.kv_heads, PEER_PAGE, shape.head_dim)
        self.both = torch.empty(size, dtype=torch.bfloat16, device=q.device).normal_()
        expected = []
        for i, pages in enumerate(self.both.split(counts, 1)[:CHECKED]):
            k, v = pages.transpose(1, 2).flatten(2, 3)[:, None, :, : lengths[i]].float()
            rows = self.q[i : i + 1].float()
            expected.append(torch.nn.functional.scaled_dot_product_attention(rows, k, v, enable_gqa=True))
        self.expected = torch.cat(expected).transpose(1, 2)

    def pages(self, dtype: torch.dtype) -> torch.Tensor:
        return self.both.to(dtype)


def ragged_lengths(requests: int) -> list[int]:
    """Lengths at equal ratios, alternating long and short ones."""
    steps = [SHORTEST * (LONGEST / SHORTEST) ** (i / max(requests - 1, 1)) for i in range(requests)]
    return [round(steps[i // 2 if i % 2 else -1 - i // 2]) for i in range(requests)]


def build(name: str, shape: DecodeShape, ragged: bool, sets: int, device: torch.device) -> Bench:
    compile_ahead(device)
    fmt = Format.parse(name, shape.head_dim)
    lengths = ragged_lengths(shape.requests) if ragged else [shape.tokens] * shape.requests
    inputs = [Inputs(fmt, shape, lengths, device, seed) for seed in range(sets)]
    expected = [each.decode("reference", CHECKED).float() for each in inputs]
    contenders: dict[str, Call] = {"kvstrata": lambda i: inputs[i].decode()}
    rows: Any
    if ragged:
        rows = RaggedRows(shape, lengths, inputs[0].q)
        baseline = "triton" if device.type == "cuda" else "reference"
        contenders[baseline] = lambda i: inputs[i].decode(baseline)
    else:
        rows = DenseRows(shape, inputs[0].q.view(shape.requests, shape.q_len, shape.heads, shape.head_dim))
        contenders["flash"] = sdpa_peer(rows, SDPBackend.FLASH_ATTENTION)
        baseline = "flash"

    def check(contender: str, i: int, out: torch.Tensor) -> None:
        if contender in ("kvstrata", "triton", "reference"):
            assert_close(out[: CHECKED * shape.q_len], expected[i], 1e-2)
            assert not bool(out.isnan().any()), "an output is NaN"
        else:
            assert_first_close(out, rows.expected, 0.1 if "fp8" in contender else 1e-2)

    bench = Bench(
        contenders=contenders,
        poison=lambda contender, i: None,
        check=check,
        ours="kvstrata",
        baseline=baseline,
        variants={"triton", "reference"} & contenders.keys(),
        host={"kvstrata": contenders["kvstrata"]},
        before=fill_l2(device),
    )
    attach(bench, "packed ragged" if ragged else "decode", rows)
    if ragged and "flashinfer" in contenders:
        del contenders[baseline]
        bench.baseline, bench.variants = "flashinfer", set()
    return bench


def compile_ahead(device: torch.device) -> None:
    """Compile the CUDA C++ kernels of all cases in parallel: one after the other they take minutes."""
    if device.type == "cuda":
        arch = jit.arch_of(device)
        kinds = [(Format.parse(name, 128), 4 if name == "K4V4" else 1) for name in FORMATS]
        needed = [kernels_needed(fmt, 32, 8, torch.bfloat16, q_len=q_len, arch=arch) for fmt, q_len in kinds]
        jit.load_ahead([kernel for kernels in needed for kernel in kernels], device)


def _decode_case(name: str, shape: DecodeShape, ragged: bool, device: torch.device) -> Case:
    fmt = Format.parse(name, shape.head_dim)
    tokens = sum(ragged_lengths(shape.requests)) if ragged else shape.requests * shape.tokens
    moved = tokens * shape.kv_heads * fmt.bytes_per_token
    params = {"kind": name, "B": shape.requests, "heads": shape.heads, "kv_heads": shape.kv_heads,
              "head_dim": shape.head_dim, "q_len": shape.q_len, "T": shape.tokens}  # fmt: skip
    sets = min(sets_for(moved, device), 2)
    make = partial(build, name, shape, ragged, sets)
    case = f"{name}-ragged-B{shape.requests}" if ragged else f"{name}-{shape.name}"
    cuda = device.type == "cuda"
    return Case("packed", case, params, moved, make, sets=sets, graph=cuda, seconds=SECONDS)


run = partial(runner.run, seconds=LIMIT)


def cases(device: torch.device, quick: bool) -> list[Case]:
    if device.type != "cuda":
        shape = DecodeShape(2, 256, 8, 2, 64)
        return [_decode_case("K4V4", shape, False, device), store_case("K4V4", 4, False, device),
                chunk_case("K4V4", 96, 40, device)]  # fmt: skip
    decode = partial(_decode_case, device=device)
    if quick:
        listed = [decode("K4V4", DecodeShape(32, 16384), False)]
        listed += [store_case("K4V4", 32, False, device), store_case("K4V4", 16384, True, device)]
        return [*listed, chunk_case("K4V4", 16384, 1024, device)]
    listed = [decode(name, DecodeShape(32, 16384), False) for name in FORMATS]
    listed += [decode(name, DecodeShape(n, t), False) for n, t in ((32, 1024), (1, 16384)) for name in FEW]
    listed += [decode(name, DecodeShape(32, LONGEST), True) for name in ("K8V8", "K4V4")]
    listed.append(decode("K4V4", DecodeShape(32, 16384, q_len=4), False))
    for tokens, prompt in ((32, False), (16384, True)):
        listed += [store_case(name, tokens, prompt, device) for name in FORMATS]
    listed += [store_case("K4V4", tokens, prompt, device) for tokens, prompt in ((256, False), (2048, True))]
    return listed + [chunk_case("K4V4", 16384, new, device) for new in (64, 256, 1024, 4096)]
