"""The benchmark of packed pages that an engine owns: decode from a block table, and the store of a step and a prompt.

Nothing is prepared outside a call: `decode_packed` reads lengths and blocks on the device, in its two launches. Decode
calls are captured and replayed; the cache of the device is filled by reading before each sample, as in `decode`. Peers
read as many tokens in bfloat16, contiguous (cuDNN), or in pages, bfloat16 and fp8 (FlashInfer). Cases ``ragged`` have
32 requests of 256 to 32,768 tokens, which only FlashInfer takes without padding.

Stores are those of 8 KV heads, head_dim 128: ``store_kv`` writes the same rows in bfloat16. Bytes are rows read and
codes written.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn.attention import SDPBackend

import kvstrata
from kvstrata.layout import Format
from kvstrata.quant import reference as quant
from kvstrata.tools.bench import Absent, Bench, Case, attach, peer, sets_for
from kvstrata.tools.bench.attention import assert_close, read
from kvstrata.tools.bench.cases.decode import CHECKED, PEER_PAGE, Rows, _close, _sdpa
from kvstrata.tools.bench.cases.decode import Shape as DecodeShape
from kvstrata.tools.bench.clock import Call

BLOCK_SIZE = 64
FORMATS = ("K8V8", "K4V4", "K4V2", "K2V2")
SHORTEST, LONGEST = 256, 32768  # tokens of ragged requests
POISON = 0xFF
CHECKED_BLOCKS = 32  # compared with the reference


def random_pages(
    fmt: Format, blocks: int, kv_heads: int, device: torch.device, generator: torch.Generator
) -> torch.Tensor:
    """Blocks of random codes with small scales: speed does not depend on what the codes say."""
    per_block = BLOCK_SIZE // fmt.page_tokens
    size = (blocks, kv_heads, per_block * fmt.page_bytes)
    pages = torch.randint(0, 256, size, dtype=torch.uint8, device=device, generator=generator)
    scales = torch.rand(blocks, kv_heads, per_block, fmt.scale_bytes // 2, device=device, generator=generator)
    by_page = pages.view(blocks, kv_heads, per_block, fmt.page_bytes)
    by_page[..., fmt.scale_offset :] = (scales * 0.01 + 0.002).half().view(torch.uint8)
    return pages


class Inputs:
    """One input set: packed blocks at shuffled places, a block table, lengths and queries."""

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
        rows = slice(requests)
        q = self.q if requests is None else self.q[: requests * self.q_len]
        return kvstrata.decode_packed(  # type: ignore[return-value]
            q, self.pages, self.block_table[rows], self.seq_lens[rows], self.fmt, backend=backend
        )


class RaggedRows:
    """K and V of requests of different lengths in pages of bfloat16, and what a decode over them gives."""

    def __init__(self, shape: DecodeShape, lengths: list[int], q: torch.Tensor) -> None:
        self.q, self.lengths, self.kv_heads = q, lengths, shape.kv_heads
        self.counts = [-(-n // PEER_PAGE) for n in lengths]
        size = (2, sum(self.counts), shape.kv_heads, PEER_PAGE, shape.head_dim)
        self.k, self.v = torch.empty(size, dtype=torch.bfloat16, device=q.device).normal_()
        expected = []
        for i, (begin, n) in enumerate(zip([0, *torch.tensor(self.counts).cumsum(0).tolist()], lengths, strict=False)):
            if i == CHECKED:
                break
            pages = slice(begin, begin + self.counts[i])
            k, v = (x[pages].transpose(0, 1).flatten(1, 2)[None, :, :n].float() for x in (self.k, self.v))
            rows = q[i].float()[None, :, None]
            expected.append(torch.nn.functional.scaled_dot_product_attention(rows, k, v, enable_gqa=True)[0, :, 0])
        self.expected = torch.stack(expected)


def _ragged_flashinfer(rows: RaggedRows, dtype: torch.dtype) -> Call:
    if rows.q.device.type != "cuda":
        raise Absent("needs a CUDA device")
    import flashinfer as library

    pages = (rows.k.to(dtype), rows.v.to(dtype))
    ints = partial(torch.tensor, dtype=torch.int32, device=rows.q.device)
    wrapper = library.BatchDecodeWithPagedKVCacheWrapper(
        torch.empty(1 << 30, dtype=torch.uint8, device=rows.q.device), "HND", use_tensor_cores=True
    )
    starts = [0, *torch.tensor(rows.counts).cumsum(0).tolist()]
    last = [(n - 1) % PEER_PAGE + 1 for n in rows.lengths]
    wrapper.plan(
        ints(starts), torch.arange(starts[-1], dtype=torch.int32, device=rows.q.device), ints(last), rows.q.shape[1],
        rows.kv_heads, rows.q.shape[2], PEER_PAGE, q_data_type=rows.q.dtype, kv_data_type=dtype,
    )  # fmt: skip
    return lambda i: wrapper.run(rows.q, pages)


@peer("packed ragged", "flashinfer")
def flashinfer(rows: RaggedRows) -> Call:
    return _ragged_flashinfer(rows, torch.bfloat16)


@peer("packed ragged", "flashinfer fp8")
def flashinfer_fp8(rows: RaggedRows) -> Call:
    return _ragged_flashinfer(rows, torch.float8_e4m3fn)


def ragged_lengths(requests: int) -> list[int]:
    """Lengths at equal ratios, long and short ones in turn."""
    steps = [SHORTEST * (LONGEST / SHORTEST) ** (i / max(requests - 1, 1)) for i in range(requests)]
    return [round(steps[i // 2 if i % 2 else -1 - i // 2]) for i in range(requests)]


def build(name: str, shape: DecodeShape, ragged: bool, sets: int, device: torch.device) -> Bench:
    fmt = Format.parse(name, shape.head_dim)
    lengths = ragged_lengths(shape.requests) if ragged else [shape.tokens] * shape.requests
    inputs = [Inputs(fmt, shape, lengths, device, seed) for seed in range(sets)]
    wanted = [one.decode("reference", CHECKED).float() for one in inputs]
    contenders: dict[str, Call] = {"kvstrata": lambda i: inputs[i].decode()}
    rows: Any
    if ragged:
        rows = RaggedRows(shape, lengths, inputs[0].q)
        contenders["triton" if device.type == "cuda" else "reference"] = lambda i: inputs[i].decode(
            "triton" if device.type == "cuda" else "reference"
        )
        baseline = "triton" if device.type == "cuda" else "reference"
    else:
        rows = Rows(shape, inputs[0].q.view(shape.requests, shape.q_len, shape.heads, shape.head_dim))
        contenders["flash"] = _sdpa(rows, SDPBackend.FLASH_ATTENTION)
        baseline = "flash"

    def check(contender: str, i: int, out: torch.Tensor) -> None:
        if contender in ("kvstrata", "triton", "reference"):
            _close(out[: CHECKED * shape.q_len], wanted[i])
            assert not bool(out.isnan().any()), "an output is NaN"
        elif ragged:
            _close(out, rows.expected, 0.1 if "fp8" in contender else 1e-2)
        else:
            _close(out, rows.expected, 0.1 if "fp8" in contender else 1e-2)

    bench = Bench(
        contenders=contenders,
        poison=lambda contender, i: None,
        check=check,
        ours="kvstrata",
        baseline=baseline,
        variants={"triton", "reference"} & contenders.keys(),
        host={"kvstrata": contenders["kvstrata"]},
        before=read(device),
    )
    attach(bench, "packed ragged" if ragged else "decode", rows)
    return bench


class Stores:
    """One input set of a store: rows, packed blocks, blocks of bfloat16 for store_kv, and slots of both."""

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
        wanted = torch.full_like(self.pages, POISON)
        kvstrata.store_packed(self.k, self.v, wanted, self.slot_mapping, self.fmt, backend="reference")
        blocks = slots // BLOCK_SIZE
        other = torch.ones(len(self.pages), dtype=torch.bool, device=slots.device).index_fill_(0, blocks, False)
        assert torch.equal(self.pages[other], wanted[other]), "a block of others was written to"
        few = blocks.unique()[:: max(1, len(blocks.unique()) // CHECKED_BLOCKS)]
        for ours, theirs in zip(self._rows(self.pages[few]), self._rows(wanted[few]), strict=True):
            assert_close(ours, theirs, 2e-2)

    def _rows(self, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V as stored; tokens that were not are zeros: the scale of poison is NaN."""
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
    if device.type == "cuda":
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


def cases(device: torch.device, quick: bool) -> list[Case]:
    cuda = device.type == "cuda"
    shapes = [DecodeShape(32, 16384), DecodeShape(32, 1024), DecodeShape(1, 16384)][: 1 if quick else 3]
    if not cuda:
        shapes = [DecodeShape(2, 256, 8, 2, 64)]
    listed = []
    formats = ("K4V4",) if quick or not cuda else FORMATS
    for shape in shapes:
        for name in formats:
            moved = shape.requests * shape.tokens * shape.kv_heads * Format.parse(name, shape.head_dim).bytes_per_token
            listed.append(_decode_case(f"{name}-{shape.name}", name, shape, False, moved, device))
    if cuda and not quick:
        shape = DecodeShape(32, LONGEST)
        for name in formats:
            fmt = Format.parse(name, shape.head_dim)
            moved = sum(ragged_lengths(32)) * shape.kv_heads * fmt.bytes_per_token
            listed.append(_decode_case(f"{name}-ragged-B32", name, shape, True, moved, device))
        shape = DecodeShape(32, 16384, q_len=4)
        moved = shape.requests * shape.tokens * shape.kv_heads * Format.parse("K4V4", 128).bytes_per_token
        listed.append(_decode_case(f"K4V4-{shape.name}", "K4V4", shape, False, moved, device))
    for tokens, prompt in ((32, False), (256, False), (16384, True)) if cuda else ((4, False),):
        for name in formats:
            fmt = Format.parse(name, 128)
            moved = tokens * (8 if cuda else 1) * (2 * 128 * 2 + fmt.bytes_per_token) + 4 * tokens
            sets = sets_for(moved, device)
            make: Callable[[torch.device], Bench] = partial(build_store, name, tokens, prompt, sets)
            case = f"store-{name}-{'prompt-' if prompt else ''}{tokens}"
            listed.append(Case("packed", case, {"kind": f"store {name}", "T": tokens}, moved, make, sets=sets))
    return listed


def _decode_case(case: str, name: str, shape: DecodeShape, ragged: bool, moved: int, device: torch.device) -> Case:
    params = {"kind": name, "B": shape.requests, "heads": shape.heads, "kv_heads": shape.kv_heads,
              "head_dim": shape.head_dim, "q_len": shape.q_len, "T": shape.tokens}  # fmt: skip
    sets = min(sets_for(moved, device), 2)
    make = partial(build, name, shape, ragged, sets)
    return Case("packed", case, params, moved, make, sets=sets, graph=device.type == "cuda")
