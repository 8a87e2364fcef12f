"""The prefill benchmark: dense attention of whole prompts, and a chunk of new tokens over a 4-bit cache.

Operations are the two products; of a causal one only the visible half counts. Calls are captured and replayed; L2 is
filled by reading before each sample. Tensors are contiguous ``[batch, seq, heads, dim]``; SDPA gets transposed views.
Ours are ``kvstrata`` (auto) and the backends that auto did not choose. ``ideas-*`` cases compare variants of prefill.cu
(one tile for all shapes, without overlapped copies, with two KV warps) with ``v2``, the kernel that the work started
from, which gets copies of its inputs with heads first, the only layout that it supports.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.nn.attention import SDPBackend

from kvstrata.attention.prefill import cuda as prefill_cuda
from kvstrata.attention.prefill import op as prefill
from kvstrata.attention.prefill.job import PrefillJob
from kvstrata.attention.prefill.tiles import FEW, PORTABLE, Tile
from kvstrata.attention.prefill_cached import op as cached
from kvstrata.attention.prefill_cached.job import CachedJob
from kvstrata.layout import Format
from kvstrata.tools.bench import Bench, Case, attach, peer, sets_for, synthetic
from kvstrata.tools.bench.attention import absent, assert_close, chunk_bench, chunk_cost, fill_l2, sdpa
from kvstrata.tools.bench.clock import Call

CHECKED = 2  # heads of the first sequence compared with float32
NEW, PREFIX = 512, 32256  # a chunk, and the tokens before it: 32k together
SECONDS = 4.0  # maximum seconds of sampling
IDEAS = [(2, 8, 512, 64), (4, 16, 1024, 64)]  # fewer blocks than multiprocessors, and more than are resident


@dataclass(frozen=True)
class Shape:
    batch: int
    heads: int
    length: int
    dim: int
    causal: bool
    kv_heads: int | None = None

    @property
    def name(self) -> str:
        heads = f"{self.heads}" if self.kv_heads is None else f"{self.heads}h{self.kv_heads}"
        return f"{'causal' if self.causal else 'full'}-B{self.batch}-H{heads}-S{self.length}-D{self.dim}"

    @property
    def flops(self) -> int:
        pairs = self.length * (self.length + 1) // 2 if self.causal else self.length**2
        return 4 * self.batch * self.heads * pairs * self.dim

    @property
    def bytes(self) -> int:
        rows = 2 * self.heads + 2 * (self.kv_heads or self.heads)
        return self.batch * rows * self.length * self.dim * 2


def make_job(shape: Shape, device: torch.device, seed: int) -> PrefillJob:
    generator = torch.Generator(device).manual_seed(seed)

    def rows(heads: int) -> torch.Tensor:
        size = (shape.batch, shape.length, heads, shape.dim)
        return torch.randn(size, device=device, generator=generator).half()

    q, k, v = rows(shape.heads), *(rows(shape.kv_heads or shape.heads) for _ in range(2))
    lengths = (shape.length, shape.length)
    return PrefillJob(q, k, v, None, None, *lengths, shape.causal, shape.dim**-0.5, None, None, None, False)


def _expected(job: PrefillJob) -> torch.Tensor:
    kv_heads = CHECKED if job.heads == job.kv_heads else 1
    q, k, v = (x[:1, :, :n].float() for x, n in ((job.q, CHECKED), (job.k, kv_heads), (job.v, kv_heads)))
    return prefill.run(job._replace(q=q, k=k, v=v), "reference")[0]


def _sdpa(jobs: list[PrefillJob], backend: SDPBackend) -> Call:
    def tensors(i: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q, k, v = (x.transpose(1, 2) for x in (jobs[i].q, jobs[i].k, jobs[i].v))
        return q, k, v

    return sdpa(backend, tensors, jobs[0].causal)


@peer("prefill", "cudnn")
def cudnn(jobs: list[PrefillJob]) -> Call:
    return _sdpa(jobs, SDPBackend.CUDNN_ATTENTION)


@peer("prefill", "efficient")
def efficient(jobs: list[PrefillJob]) -> Call:
    return _sdpa(jobs, SDPBackend.EFFICIENT_ATTENTION)


@peer("prefill", "flashinfer")
def flashinfer(jobs: list[PrefillJob]) -> Call:
    import flashinfer as library

    job = jobs[0]
    batch, length, heads, dim = job.q.shape
    ragged = [[x.flatten(0, 1).contiguous() for x in (j.q, j.k, j.v)] for j in jobs]
    workspace = torch.empty(256 << 20, dtype=torch.uint8, device=job.q.device)
    ends = torch.arange(batch + 1, dtype=torch.int32, device=job.q.device) * length
    wrapper = library.BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD")
    try:  # compiles for new sizes
        wrapper.plan(ends, ends, heads, job.kv_heads, dim, causal=job.causal, q_data_type=job.q.dtype)
    except RuntimeError as error:
        raise absent(error) from error

    def call(i: int) -> torch.Tensor:
        return wrapper.run(*ragged[i]).view(batch, length, heads, dim)

    return call


def _v2(jobs: list[PrefillJob]) -> Call:
    from kvstrata.tools.bench.baselines import prefill_v2

    tensors, launches = [], []  # launches only keep addresses
    for job in jobs:
        q, k, v = (x.transpose(1, 2).contiguous() for x in (job.q, job.k, job.v))
        out = torch.empty_like(q)
        tensors.append((q, k, v, out))
        launches.append(prefill_v2.launch(q, k, v, out, causal=job.causal))

    def call(i: int) -> torch.Tensor:
        launches[i](torch.cuda.current_stream().cuda_stream)
        return tensors[i][3].transpose(1, 2)

    return call


def make_bench(jobs: list[PrefillJob], contenders: dict[str, Call], ours: str, baseline: str) -> Bench:
    expected = [_expected(job) for job in jobs]
    written: dict[tuple[str, int], torch.Tensor] = {}  # a replay writes to the memory of its capture

    def poison(name: str, i: int) -> None:
        if (name, i) in written:
            written[name, i].fill_(float("nan"))

    def check(name: str, i: int, out: torch.Tensor) -> None:
        written[name, i] = out
        assert out.shape == jobs[i].q.shape
        assert_close(out[:1, :, :CHECKED], expected[i], 5e-3)
        assert not bool(out.isnan().any()), "an output is NaN"

    before = fill_l2(jobs[0].q.device)
    return Bench(contenders=contenders, poison=poison, check=check, ours=ours, baseline=baseline, before=before)


def build(shape: Shape, sets: int, device: torch.device) -> Bench:
    jobs = [make_job(shape, device, seed) for seed in range(sets)]
    chosen = prefill._choose("auto", jobs[0])
    contenders: dict[str, Call] = {"kvstrata": lambda i: prefill.run(jobs[i], chosen)[0]}
    contenders["flash"] = _sdpa(jobs, SDPBackend.FLASH_ATTENTION)
    bench = make_bench(jobs, contenders, "kvstrata", "flash")
    if device.type == "cuda":
        for backend in ("triton", "cuda"):
            if backend == chosen:
                continue
            if reason := prefill.missing(backend, jobs[0]):
                bench.absent[backend] = reason
            else:
                contenders[backend] = lambda i, backend=backend: prefill.run(jobs[i], backend)[0]  # type: ignore[misc]
                bench.variants.add(backend)
        attach(bench, "prefill", jobs)
        if shape.length <= 512:  # for longer ones it is the same
            bench.host = {"kvstrata": contenders["kvstrata"]}
    return bench


def ideas() -> dict[str, Tile]:
    """Tiles of ``v3`` and of two variants that each differ in one respect."""
    tile = PORTABLE[64]
    return {"v3": tile, "copies not overlapped": replace(tile, stages=1), "two KV warps": FEW[64]}


def build_ideas(shape: Shape, sets: int, device: torch.device) -> Bench:
    jobs = [make_job(shape, device, seed) for seed in range(sets)]
    contenders: dict[str, Call] = {
        name: lambda i, tile=tile: prefill_cuda.run(jobs[i], tile)[0]  # type: ignore[misc]
        for name, tile in ideas().items()
    }
    contenders["v2"] = _v2(jobs)
    bench = make_bench(jobs, contenders, "v3", "v2")
    bench.variants = contenders.keys() - {"v3", "v2"}
    return bench


def build_tiers(device: torch.device, prefix: int = PREFIX, heads: int = 32, kv_heads: int = 8) -> Bench:
    """A chunk over a cache in K4V4: in parts, or unpacked completely first and then SDPA with flash or cuDNN."""
    dim = 128 if device.type == "cuda" else 64
    formats = tuple(Format.parse(name, dim) for name in ("K16V16", "K4V4"))
    counts = torch.zeros(1, kv_heads, 2, dtype=torch.int64)
    counts[..., 0], counts[..., 1] = NEW, prefix
    buckets = synthetic.layer(formats, counts, torch.bfloat16, device, 0)
    q = torch.randn(NEW, heads, dim, device=device).bfloat16()
    sizes = (kv_heads, NEW + prefix, dim**-0.5, None, None, None, False)
    job = CachedJob(q, [NEW], buckets, None, [0], *sizes)
    expected = cached.run(job, "reference")[0].float()
    backend = cached._choose("auto", job)

    def rows() -> tuple[torch.Tensor, torch.Tensor]:
        from kvstrata.attention.prefill_cached import staging_triton

        k, v, _ = staging_triton.unpack(job)
        return k[:, :, : NEW + prefix], v[:, :, : NEW + prefix]

    def run(backend: str, i: int) -> torch.Tensor:
        return cached.run(job, backend)[0]

    check = partial(assert_close, expected=expected, limit=1e-2)
    return chunk_bench(q, partial(run, backend), rows, partial(run, "reference"), check)


def shapes_of(quick: bool) -> list[Shape]:
    goals = [(2, 8, 512, 64), (4, 16, 512, 64), (4, 16, 1024, 64), (4, 16, 2048, 128), (1, 32, 8192, 128)]
    rest = [(8, 16, 128, 64), (8, 16, 256, 64), (4, 16, 2048, 64), (1, 32, 8192, 64)]
    rest += [(8, 16, 128, 128), (8, 16, 256, 128), (4, 16, 512, 128), (4, 16, 1024, 128)]
    sizes = goals[:: 3 if quick else 1] + ([] if quick else rest)
    shapes = [Shape(*size, causal) for size in sizes for causal in (False, True)]
    return shapes if quick else [*shapes, Shape(1, 32, 4096, 128, True, kv_heads=8)]


def cases(device: torch.device, quick: bool) -> list[Case]:
    cuda = device.type == "cuda"
    shapes = shapes_of(quick) if cuda else [Shape(1, 2, 128, 64, True)]
    cases = []
    for shape in shapes:
        kind = "few-" * (shape.batch * shape.heads < 32) + shape.name.partition("-")[0]
        params = {"kind": kind + "-gqa" * (shape.kv_heads is not None), "D": shape.dim, "T": shape.length}
        sets = min(sets_for(shape.bytes, device), 2)
        make: Callable[[torch.device], Bench] = partial(build, shape, sets)
        sizes: dict[str, Any] = dict(flops=shape.flops, sets=sets, graph=cuda, seconds=SECONDS)
        cases.append(Case("prefill", shape.name, params, shape.bytes, make, **sizes))
    for shape in [Shape(*size, causal) for size in IDEAS for causal in (False, True)] if cuda else []:
        sets = min(sets_for(shape.bytes, device), 2)
        params = {"kind": "ideas", "causal": shape.causal, "D": shape.dim, "S": shape.length}
        make = partial(build_ideas, shape, sets)
        sizes = dict(flops=shape.flops, sets=sets, graph=True, seconds=SECONDS)
        cases.append(Case("prefill", f"ideas-{shape.name}", params, shape.bytes, make, **sizes))
    prefix, heads, kv_heads, dim = (PREFIX, 32, 8, 128) if cuda else (512, 2, 1, 64)
    moved, flops = chunk_cost(Format.parse("K4V4", dim), prefix, NEW, heads, kv_heads)
    params = {"kind": "tiers", "D": dim, "T": prefix + NEW}
    name = f"tiers-K4V4-{prefix}+{NEW}"
    tiers = partial(build_tiers, prefix=prefix, heads=heads, kv_heads=kv_heads)
    # plain tokens are among the earlier ones, new ones among the quantised
    cases.append(Case("prefill", name, params, moved, tiers, flops=flops, graph=cuda, seconds=SECONDS))
    return cases
