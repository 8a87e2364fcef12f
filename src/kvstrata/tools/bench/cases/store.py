"""The store benchmark: K and V rows at random slots of paged caches, with the note's kernel and libraries as peers.

Cases named ``fresh`` write the rows just before the store, as the projection before it does in a model, so that they
are in the L2; in all others every input comes from memory. ``overlap`` stores on a side stream while attention runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

import kvstrata
from kvstrata import jit
from kvstrata.backends import missing
from kvstrata.store import cuda as store_cuda
from kvstrata.store import op, reference
from kvstrata.store.job import Tensors, check
from kvstrata.tools.bench import Absent, Bench, Case, attach, peer, sets_for
from kvstrata.tools.bench.clock import Call

PAGE = 16
POISON = 0xFF
ALIGNED = 0  # address bits of separately allocated tensors
VARIANTS = ("triton", "cuda_direct", "cuda_staged", "cuda_bulk")
BASELINES = Path(__file__).parent.parent / "baselines"


@dataclass(frozen=True)
class Kind:
    """Rows of one model: heads, dim, with or without V, dtypes of rows and cache."""

    name: str
    heads: int
    dim: int
    has_v: bool = True
    source: torch.dtype = torch.float16
    cache: torch.dtype = torch.float16
    layout: str = "NHD"

    @property
    def bytes_per_token(self) -> int:
        """Bytes read and written per token: K, V and the slot."""
        return (1 + self.has_v) * self.heads * self.dim * (self.source.itemsize + self.cache.itemsize) + 4

    def cache_shape(self, tokens: int) -> tuple[int, ...]:
        """Cache shape with at least twice as many slots as tokens."""
        pages = max(2 * tokens, 16384) // PAGE
        nhd = self.layout == "NHD"
        return (pages, PAGE, self.heads, self.dim) if nhd else (pages, self.heads, PAGE, self.dim)

    @property
    def counts(self) -> tuple[int, ...]:
        """Numbers of tokens that are measured and tuned."""
        return (1, 16, 256, 2048, 8192, 65536) if self is KINDS[0] else (256, 8192, 65536)


KINDS = (
    Kind("8x128-fp16", 8, 128),
    Kind("8x128-fp16-HND", 8, 128, layout="HND"),
    Kind("32x128-fp16", 32, 128),
    Kind("1x576-bf16", 1, 576, has_v=False, source=torch.bfloat16, cache=torch.bfloat16),
    Kind("8x128-bf16-to-fp8", 8, 128, source=torch.bfloat16, cache=torch.float8_e4m3fn),
)


class Inputs:
    """One input set: rows, paged caches of at least twice as many slots, random slots, scales for fp8."""

    def __init__(self, kind: Kind, tokens: int, device: torch.device, seed: int) -> None:
        generator = torch.Generator(device).manual_seed(seed)
        shape = kind.cache_shape(tokens)

        def rows() -> torch.Tensor:
            return torch.randn(tokens, kind.heads, kind.dim, generator=generator, device=device).to(kind.source)

        self.kind, self.tokens = kind, tokens
        self.slot_mapping = torch.randperm(shape[0] * PAGE, generator=generator, device=device)[:tokens].int()
        self.rows = [rows() for _ in range(1 + kind.has_v)]
        self.caches = [torch.empty(shape, dtype=kind.cache, device=device) for _ in self.rows]
        rounds = kind.source != kind.cache
        self.scales = [torch.full((kind.heads,), 0.02 + i / 100, device=device) if rounds else None for i in range(2)]
        long = self.slot_mapping.long()
        self.page, self.row = long // PAGE, long % PAGE

    @property
    def tensors(self) -> Tensors:
        """Arguments in the order of ``store_kv`` and its plans."""
        k, k_cache, k_scale = self.rows[0], self.caches[0], self.scales[0]
        if not self.kind.has_v:
            return Tensors(k, None, k_cache, None, self.slot_mapping, k_scale, None)
        return Tensors(k, self.rows[1], k_cache, self.caches[1], self.slot_mapping, k_scale, self.scales[1])

    def store(self, backend: str) -> None:
        t, layout = self.tensors, self.kind.layout
        scales: dict[str, Any] = dict(k_scale=t.k_scale, v_scale=t.v_scale)
        kvstrata.store_kv(t.k, t.v, t.k_cache, t.v_cache, t.slot_mapping, **scales, layout=layout, backend=backend)

    def by_token(self, cache: torch.Tensor) -> torch.Tensor:
        return cache.transpose(1, 2) if self.kind.layout == "HND" else cache

    def poison(self) -> None:
        for cache in self.caches:
            cache.view(torch.uint8).fill_(POISON)

    def assert_stored(self) -> None:
        """Compare every byte of the caches: the rows where they belong, poison everywhere else."""
        for side, x, cache, scale in zip("kv", self.rows, self.caches, self.scales, strict=False):
            expected = torch.full_like(cache.view(torch.uint8), POISON).view(cache.dtype)
            if x.dtype != cache.dtype:
                x = reference.to_fp8(x, scale, cache.dtype).view(cache.dtype)
            bits = torch.uint8 if cache.dtype.itemsize == 1 else torch.int16
            self.by_token(expected).view(bits)[self.page, self.row] = x.view(bits)
            assert torch.equal(cache.view(torch.uint8), expected.view(torch.uint8)), f"{side}_cache is wrong"


def _index_put(inputs: Sequence[Inputs]) -> Call:
    """Store with plain torch: one indexed write for K and one for V, preceded by scaling and rounding for fp8."""

    def run(i: int) -> None:
        call = inputs[i]
        for x, cache, scale in zip(call.rows, call.caches, call.scales, strict=False):
            target = call.by_token(cache)
            if x.dtype != cache.dtype:
                x = reference.to_fp8(x, scale, cache.dtype)
                target = target.view(torch.uint8)
            target.index_put_((call.page, call.row), x)

    return run


@peer("store", "index_copy")
def index_copy(inputs: Sequence[Inputs]) -> Call:
    """``index_copy_`` on the caches viewed as flat slots."""
    kind = inputs[0].kind
    if kind.layout != "NHD" or kind.source != kind.cache:
        raise Absent("index_copy_ takes flat slots of one dtype")
    flat = [[cache.flatten(0, 1) for cache in one.caches] for one in inputs]
    slot_mapping = [one.slot_mapping.long() for one in inputs]

    def run(i: int) -> None:
        for x, cache in zip(inputs[i].rows, flat[i], strict=True):
            cache.index_copy_(0, slot_mapping[i], x)

    return run


@peer("store", "flashinfer")
def flashinfer(inputs: Sequence[Inputs]) -> Call:
    """FlashInfer's ``append_paged_kv_cache``; every token is a request of one page, so that slots can be random."""
    kind = inputs[0].kind
    if not kind.has_v or kind.source != kind.cache:
        raise Absent("append_paged_kv_cache takes K and V of the cache's dtype")
    if inputs[0].slot_mapping.device.type != "cuda":
        raise Absent("needs a CUDA device")
    import flashinfer as library

    def arguments(one: Inputs) -> tuple[Any, ...]:
        requests = torch.arange(one.tokens + 1, dtype=torch.int32, device=one.slot_mapping.device)
        last = (one.row + 1).int()
        pages = one.page.int()
        return (*one.rows, requests[:-1], one.row.int(), tuple(one.caches), pages, requests, last, kind.layout)

    prepared = [arguments(one) for one in inputs]
    return lambda i: library.append_paged_kv_cache(*prepared[i])


def _note(inputs: Sequence[Inputs]) -> Call:
    """Baseline kernel store_warp.cu, launched by ``cuda.core.launch`` with prepared arguments."""
    import numpy
    from cuda.core import LaunchConfig, Stream, launch

    kind, tokens = inputs[0].kind, inputs[0].tokens
    kernel = jit.load(BASELINES / "store_warp.cu", f"store_warp<{kind.heads * kind.dim * kind.source.itemsize}>").core
    config, count = LaunchConfig(grid=-(-tokens // 8), block=256), numpy.int32(tokens)
    streams: dict[int, Any] = {}

    def run(i: int) -> None:
        (k, v), (k_cache, v_cache), slot_mapping = inputs[i].rows, inputs[i].caches, inputs[i].slot_mapping
        handle = jit.current_stream(slot_mapping.get_device())
        stream = streams.get(handle) or streams.setdefault(handle, Stream.from_handle(handle))
        launch(
            stream, config, kernel, k_cache.data_ptr(), v_cache.data_ptr(), slot_mapping.data_ptr(), k.data_ptr(),
            v.data_ptr(), count,
        )  # fmt: skip

    return run


def planned(inputs: Sequence[Inputs], config: store_cuda.Config | None = None) -> Call:
    """A planned launch, without a ``config`` of the kernel that ``auto`` picks: one driver call, nothing checked."""
    one = inputs[0]
    task = check(one.tensors, one.kind.layout)
    jit.bind_context(one.slot_mapping.get_device())
    launch = store_cuda.plan(task, one.slot_mapping, ALIGNED, "cuda", False, config)
    addresses = [op._addresses(each.tensors) for each in inputs]
    device = one.slot_mapping.get_device()

    def run(i: int) -> None:
        store_cuda.POINTERS.pack_into(launch.params, 0, *addresses[i])
        launch(jit.current_stream(device))

    return run


def build(kind: Kind, tokens: int, sets: int, fresh: bool, device: torch.device) -> Bench:
    inputs = [Inputs(kind, tokens, device, seed) for seed in range(sets)]
    contenders: dict[str, Call] = {"kvstrata": lambda i: inputs[i].store("auto"), "index_put": _index_put(inputs)}
    bench = Bench(
        contenders=contenders,
        poison=lambda name, i: inputs[i].poison(),
        check=lambda name, i, out: inputs[i].assert_stored(),
        ours="kvstrata",
        baseline="index_put",
    )
    for backend in VARIANTS:
        if reason := missing(backend, device):
            bench.absent[backend] = reason
        elif backend == "cuda_bulk" and kind.source != kind.cache:
            bench.absent[backend] = "bulk copies do not convert"
        else:
            contenders[backend] = lambda i, backend=backend: inputs[i].store(backend)  # type: ignore[misc]
            bench.variants.add(backend)
    if "cuda_direct" in contenders and kind.has_v and kind.source == kind.cache and kind.layout == "NHD":
        contenders["note"] = _note(inputs)
        bench.baseline = "note"
    if "cuda_direct" in contenders and tokens == 256 and not fresh:
        contenders["bare launch"] = planned(inputs)  # checked like the others
        bench.variants.add("bare launch")
        bench.host = {name: contenders[name] for name in ("kvstrata", "bare launch", "note") if name in contenders}
    attach(bench, "store", inputs)
    if fresh:
        bench.before = lambda i: [x.mul_(1) for x in inputs[i].rows] and inputs[i].slot_mapping.add_(0)
    return bench


def build_overlap(kind: Kind, tokens: int, sets: int, device: torch.device) -> Bench:
    """Attention of one layer (32 requests, 4,096 keys, GQA 4) and the store of the next, in sequence or in parallel."""
    inputs = [Inputs(kind, tokens, device, seed) for seed in range(sets)]
    q = torch.randn(32, 32, 1, kind.dim, device=device, dtype=kind.source)
    k, v = (torch.randn(32, 8, 4096, kind.dim, device=device, dtype=kind.source) for _ in range(2))
    side = torch.cuda.Stream(device)

    def attend() -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    def in_turn(i: int) -> torch.Tensor:
        inputs[i].store("auto")
        return attend()

    def side_by_side(i: int) -> torch.Tensor:
        here = torch.cuda.current_stream(device)
        side.wait_stream(here)
        with torch.cuda.stream(side):
            inputs[i].store("auto")
        out = attend()
        here.wait_stream(side)
        return out

    expected = attend()

    def verify(name: str, i: int, out: torch.Tensor) -> None:
        inputs[i].assert_stored()
        assert torch.allclose(out, expected, rtol=1e-2, atol=1e-3), "attention changed"

    return Bench(
        contenders={"side by side": side_by_side, "in turn": in_turn},
        poison=lambda name, i: inputs[i].poison(),
        check=verify,
        ours="side by side",
        baseline="in turn",
    )


def cases(device: torch.device, quick: bool) -> list[Case]:
    cuda = device.type == "cuda"
    cases = []
    for kind in KINDS:
        main = kind is KINDS[0]
        few = (16, 2048) if main else (256,)
        for tokens in few if quick or not cuda else kind.counts:
            moved = tokens * kind.bytes_per_token
            sets = sets_for(moved, device)
            for fresh in (False, True) if cuda and main and tokens <= 256 else (False,):
                name = f"{kind.name}-{'fresh-' if fresh else ''}{tokens}"
                params = {"rows": kind.name + ("-fresh" if fresh else ""), "T": tokens}
                cases.append(Case("store", name, params, moved, partial(build, kind, tokens, sets, fresh), sets=sets))
    if cuda:
        kind, tokens = KINDS[0], 8192
        moved = tokens * kind.bytes_per_token + 32 * 4096 * 8 * kind.dim * 2 * 2
        params = {"rows": "overlap", "T": tokens}
        name = f"overlap-{tokens}"
        cases.append(Case("store", name, params, moved, partial(build_overlap, kind, tokens, 2), sets=2, graph=True))
    return cases
