"""The decode benchmark: one query of each request over all its tokens, in tiers or in bfloat16.

Peers read as many tokens in bfloat16, contiguous; FlashInfer in pages, in bfloat16 and in fp8. Bytes are those that our
cache streams: codes and scales, or rows; queries and outputs are not counted. Calls are captured and replayed. Before
each sample the L2 cache is filled by reading, as a model's weights do between two attentions: dirty lines of others
would otherwise be written back during our sample.

The work list of a step is built once for all layers; ``with its list`` builds it in every call, for one layer, as calls
without a plan do. For mixes, ``with mass`` also returns the mass of every token (`return_mass`), and ``with list and
mass`` does so without a plan, as StrataCache's calls do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch.nn.attention import SDPBackend

from kvstrata.attention.decode import op
from kvstrata.attention.decode.job import Job, Result
from kvstrata.layout import Format
from kvstrata.tools.bench import Absent, Bench, Case, attach, peer, sets_for, synthetic
from kvstrata.tools.bench.attention import assert_close, fill_l2, sdpa
from kvstrata.tools.bench.clock import Call

CHECKED = 2  # requests compared with the reference
RECENT = 64  # plain tokens in a tiered cache
PEER_PAGE = 16  # tokens of FlashInfer's pages
NARROW, WIDE = ("K4V4", "K3V3", "K2V2"), ("K8V8", "K4V4", "K2V2")
EIGHT = ("K8V8", "K8V4")  # default tiers of a TieredCache at a budget of 0.5
MEAN = 0.211  # fraction of 16 bit: 3.25 bits of codes per value at head_dim 128
WIDEST = 0.51  # fraction of 16 bit from which on tokens are in 8 and 16 bit
OURS = ("kvstrata", "with its list", "with mass", "with list and mass")


@dataclass(frozen=True)
class Shape:
    requests: int
    tokens: int
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    q_len: int = 1

    @property
    def usual(self) -> bool:
        return (self.heads, self.kv_heads, self.head_dim) == (32, 8, 128)

    @property
    def name(self) -> str:
        heads = "" if self.usual else f"-{self.heads}h{self.kv_heads}d{self.head_dim}"
        return f"B{self.requests}-{self.tokens}{heads}{'' if self.q_len == 1 else f'-q{self.q_len}'}"


def shares(budget: float, formats: Sequence[Format]) -> tuple[float, ...]:
    """Shares of the older tokens in two or three tiers for which they take ``budget`` of their 16-bit bytes."""
    most, *between, least = (f.bytes_per_token for f in formats)
    target = min(max(budget * 4 * formats[0].head_dim, least), most)
    second = [0.4 * min(1.0, (most - target) / (most - x), (target - least) / (x - least)) for x in between]
    left = target - sum(share * x for share, x in zip(second, between, strict=True))
    first = (left - (1 - sum(second)) * least) / (most - least)
    return (first, *second, 1 - sum(second) - first)


def counts_of(shape: Shape, tiers: tuple[str, ...], budget: float) -> torch.Tensor:
    """Tokens of every tier, equal for all heads; plain only, or recent ones in plain and the rest in tiers."""
    counts = torch.zeros(shape.requests, shape.kv_heads, 1 + len(tiers), dtype=torch.int64)
    old = shape.tokens - RECENT if tiers else 0
    if tiers and budget > WIDEST:  # some old ones in plain as well
        [lossy] = (f.bytes_per_token / (4 * shape.head_dim) for f in formats_of(shape, tiers)[1:])
        old = min(old, round((1 - budget) / (1 - lossy) * shape.tokens))
    counts[..., 0] = shape.tokens - old
    if len(tiers) == 1:
        counts[..., 1] = old
    elif tiers:
        for tier, share in enumerate(shares(budget, formats_of(shape, tiers)[1:])[:-1], start=1):
            counts[..., tier] = round(share * old)
        counts[..., len(tiers)] = old - counts[..., 1:].sum(-1)
    return counts


def mixed(tiers: tuple[str, ...], budget: float) -> bool:
    """True if older tokens are in several formats."""
    return len(tiers) > 1 or (len(tiers) == 1 and budget > WIDEST)


def formats_of(shape: Shape, tiers: tuple[str, ...]) -> tuple[Format, ...]:
    return tuple(Format.parse(name, shape.head_dim) for name in ("K16V16", *tiers))


def bytes_of(shape: Shape, tiers: tuple[str, ...], budget: float) -> int:
    counts = counts_of(shape, tiers, budget).sum((0, 1)).tolist()
    return sum(n * f.bytes_per_token for n, f in zip(counts, formats_of(shape, tiers), strict=True))


def make_job(shape: Shape, tiers: tuple[str, ...], budget: float, device: torch.device, seed: int) -> Job:
    counts = counts_of(shape, tiers, budget)
    buckets = synthetic.layer(formats_of(shape, tiers), counts, torch.bfloat16, device, seed)
    generator = torch.Generator(device).manual_seed(seed)
    size = (shape.requests, shape.q_len, shape.heads, shape.head_dim)
    q = torch.randn(size, device=device, generator=generator).bfloat16()
    rows, scale = list(range(shape.requests)), shape.head_dim**-0.5
    return Job(q, buckets, None, rows, shape.kv_heads, shape.tokens, scale, None, None, None, False, False)


class DenseRows:
    """K and V in bfloat16 for the peers, and their expected outputs for the first requests."""

    def __init__(self, shape: Shape, q: torch.Tensor) -> None:
        size = (shape.requests, shape.kv_heads, shape.tokens, shape.head_dim)
        self.k, self.v = (torch.empty(size, dtype=torch.bfloat16, device=q.device).normal_() for _ in range(2))
        self.q = q.transpose(1, 2)
        few_q, few_k, few_v = (x[:CHECKED].float() for x in (self.q, self.k, self.v))
        out = torch.nn.functional.scaled_dot_product_attention(few_q, few_k, few_v, enable_gqa=True)
        self.expected = out.transpose(1, 2)
        self.lengths = [shape.tokens] * shape.requests

    def pages(self, dtype: torch.dtype) -> list[torch.Tensor]:
        """K and V as consecutive pages of each request, ``[pages, kv_heads, PEER_PAGE, head_dim]``."""
        by_page = (x.unflatten(2, (-1, PEER_PAGE)).transpose(1, 2).flatten(0, 1) for x in (self.k, self.v))
        return [x.to(dtype).contiguous() for x in by_page]


def sdpa_peer(rows: DenseRows, backend: SDPBackend) -> Call:
    return sdpa(backend, lambda i: (rows.q, rows.k, rows.v))


@peer("decode", "cudnn")
def cudnn(rows: DenseRows) -> Call:
    return sdpa_peer(rows, SDPBackend.CUDNN_ATTENTION)


def _flashinfer(rows: Any, dtype: torch.dtype) -> Call:
    """FlashInfer's decode over the pages of `Rows`, or of a similar object."""
    if rows.q.device.type != "cuda":
        raise Absent("needs a CUDA device")
    if rows.q.shape[2] != 1:
        raise Absent("its decode supports one query only")
    import flashinfer as library

    k, v = rows.pages(dtype)
    ints = partial(torch.tensor, dtype=torch.int32, device=rows.q.device)
    starts = [0, *accumulate(-(-n // PEER_PAGE) for n in rows.lengths)]
    last = [(n - 1) % PEER_PAGE + 1 for n in rows.lengths]
    wrapper = library.BatchDecodeWithPagedKVCacheWrapper(
        torch.empty(1 << 30, dtype=torch.uint8, device=rows.q.device), "HND", use_tensor_cores=True
    )
    wrapper.plan(
        ints(starts), ints(list(range(starts[-1]))), ints(last), rows.q.shape[1], k.shape[1], k.shape[3], PEER_PAGE,
        q_data_type=rows.q.dtype, kv_data_type=dtype,
    )  # fmt: skip
    q = rows.q[:, :, 0].contiguous()
    return lambda i: wrapper.run(q, (k, v)).unsqueeze(1)


for op_name in ("decode", "packed ragged"):
    peer(op_name, "flashinfer")(partial(_flashinfer, dtype=torch.bfloat16))
    peer(op_name, "flashinfer fp8")(partial(_flashinfer, dtype=torch.float8_e4m3fn))


def assert_first_close(out: torch.Tensor, expected: torch.Tensor, limit: float = 1e-2) -> None:
    assert_close(out[:CHECKED], expected, limit)
    assert not bool(out.isnan().any()), "an output is NaN"


def build(shape: Shape, tiers: tuple[str, ...], budget: float, sets: int, device: torch.device) -> Bench:
    jobs = [make_job(shape, tiers, budget, device, seed) for seed in range(sets)]
    # Each list of formats is one more kernel to compile, and synthetic pages have positions of two bytes.
    mass = mixed(tiers, budget) and shape.usual and shape.q_len == 1 and shape.tokens <= 1 << 15
    with_mass = [job._replace(return_mass=mass) for job in jobs]
    checked = [job._replace(q=job.q[:CHECKED], requests=job.requests[:CHECKED]) for job in with_mass]
    expected_results = [op.run(job, "reference") for job in checked]
    contenders: dict[str, Call] = {}
    if device.type == "cuda":
        from kvstrata.attention.decode.cuda import WorkPlan
        from kvstrata.attention.decode.source import Source

        sizes = (shape.kv_heads, shape.heads, shape.q_len)
        plans = [WorkPlan(Source.of(job), tuple(job.requests), *sizes) for job in jobs]
        for plan in plans:
            plan.update()
        contenders = {
            "kvstrata": lambda i: plans[i].run(jobs[i]),
            "with its list": lambda i: op.run(jobs[i], "cuda"),
        }
        if mass:
            contenders["with mass"] = lambda i: plans[i].run(with_mass[i])
            contenders["with list and mass"] = lambda i: op.run(with_mass[i], "cuda")
    else:
        contenders = {"kvstrata": lambda i: op.run(jobs[i], "reference")}
    ours = contenders.keys() & set(OURS)
    rows = DenseRows(shape, jobs[0].q)
    contenders["flash"] = sdpa_peer(rows, SDPBackend.FLASH_ATTENTION)

    def check(name: str, i: int, result: torch.Tensor | Result) -> None:
        if isinstance(result, torch.Tensor):
            assert_first_close(result, rows.expected, 0.1 if "fp8" in name else 1e-2)
            return
        out, _, weights = result
        assert_first_close(out, expected_results[i][0].float())
        if weights is not None and (expected := expected_results[i][2]) is not None:
            assert_first_close(weights, expected, 2e-2)

    bench = Bench(
        contenders=contenders,
        poison=lambda name, i: None,
        check=check,
        ours="kvstrata",
        baseline="flash",
        variants=ours - {"kvstrata"},
        host={name: contenders[name] for name in OURS if name in ours},
        before=fill_l2(device),
    )
    attach(bench, "decode", rows)
    return bench


def cases(device: torch.device, quick: bool) -> list[Case]:
    cuda = device.type == "cuda"
    widths: list[tuple[str, ...]] = [("K8V8",), ("K4V4",), ("K3V3",), ("K2V2",), NARROW, ()]
    if not cuda:
        shapes, widths = [Shape(1, 1024, 8, 2, 64)], [("K4V4",)]
    else:
        shapes = [Shape(32, 16384), Shape(8, 65536), Shape(32, 1024), Shape(1, 16384)][: 1 if quick else 4]
    chosen = [(shape, tiers, MEAN) for shape in shapes for tiers in widths]
    if cuda and not quick:
        for n in (1024, 2048, 4096, 8192, 16384):
            chosen += [(Shape(32, n), NARROW, 0.2), *((Shape(32, n), WIDE, budget) for budget in (0.3, 0.4))]
            chosen.append((Shape(32, n), EIGHT, 0.5))
            chosen += [(Shape(32, n), ("K8V8",), 0.0), (Shape(32, n), ("K8V8",), 0.75), (Shape(32, n), (), 1.0)]
        others = [Shape(8, 16384, 32, 32), Shape(32, 16384, 64, 8), Shape(64, 16384, 32, 1)]
        others += [Shape(32, 16384, 32, 8, 64), Shape(32, 16384, q_len=4)]
        chosen += [(shape, NARROW, MEAN if shape.head_dim == 128 else 0.22) for shape in others]
    by_name: dict[str, Case] = {}
    for shape, tiers, budget in chosen:
        kind = f"mixed{budget:g}" if mixed(tiers, budget) else "".join(tiers) or "16bit"
        name = f"{kind}-{shape.name}"
        moved = bytes_of(shape, tiers, budget)
        params = {"kind": kind, "B": shape.requests, "heads": shape.heads, "kv_heads": shape.kv_heads,
                  "head_dim": shape.head_dim, "q_len": shape.q_len, "T": shape.tokens}  # fmt: skip
        sets = min(sets_for(moved, device), 2)
        make: Callable[[torch.device], Bench] = partial(build, shape, tiers, budget, sets)
        by_name[name] = Case("decode", name, params, moved, make, sets=sets, graph=cuda)
    return list(by_name.values())
