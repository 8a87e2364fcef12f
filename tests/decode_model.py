"""Model of `decode_attention`, written for reading: float32, one query at a time, from dequantised tokens.

`tokens_of` reads a cache token by token, without anything that decode itself uses. `Case` holds a cache, queries and
options; `check` compares a backend with the model. A backend may err twice as much as the same attention in plain torch
and the cache's dtype does, plus a floor for rounding.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib.util import find_spec

import pytest
import torch

from conftest import HAS_GPU
from kvstrata import PagedCache, TieredCache, decode_attention
from kvstrata.attention.decode import op
from kvstrata.cache.policy.scopes import move_tokens
from kvstrata.cache.storage.page_table import DROP
from kvstrata.cache.storage.transaction import Transaction
from kvstrata.quant import reference as quant

DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
HAS_NUMBA = find_spec("numba") is not None
BACKENDS = [
    "reference",
    pytest.param(
        "numba", marks=pytest.mark.skipif(HAS_GPU or not HAS_NUMBA, reason="numba, a CPU backend, is not there")
    ),
    "triton",
    pytest.param("cuda", marks=pytest.mark.gpu),
]
INTERPRETED = not HAS_GPU  # Triton: keep cases small
EPS = {torch.float32: 2e-6, torch.float16: 2**-11, torch.bfloat16: 2**-8}
HALF = torch.bfloat16 if HAS_GPU else torch.float32  # what the machine's models run in
each_backend = pytest.mark.parametrize("backend", BACKENDS)


def few(backend: str, chosen: bool) -> None:
    """Under the interpreter, where a case takes seconds, only the chosen ones."""
    if backend == "triton" and INTERPRETED and not chosen:
        pytest.skip("one kind is enough under the interpreter")


@dataclass
class Tokens:
    """The tokens of one KV head of a request, float32."""

    k: torch.Tensor  # [n, D]
    v: torch.Tensor
    position: torch.Tensor  # [n]


def tokens_of(cache: TieredCache | PagedCache, layer: int, request: int, head: int) -> Tokens:
    if isinstance(cache, PagedCache):
        length = int(cache.seq_lens[request])
        sides = []
        for x, scale in ((cache.k, cache.k_scale), (cache.v, cache.v_scale)):
            rows = torch.zeros(length, x.shape[-1])
            for i in range(length):
                page, row = int(cache.block_table[request, i // cache.block_size]), i % cache.block_size
                rows[i] = (x[page, row, head] if cache.layout == "NHD" else x[page, head, row]).float().cpu()
            if scale is not None:
                rows *= float(scale.flatten()[head if scale.numel() > 1 else 0])
            sides.append(rows)
        return Tokens(sides[0], sides[1], torch.arange(length))
    every = cache.buckets.snapshot(layer, [request])
    ks, vs, positions = [], [], []
    for tier, kind in enumerate(cache.page_formats):
        at = ((every.tier == tier) & (every.head_cache == head)).nonzero().flatten()
        if not len(at):
            continue
        rows = cache.buckets.read(layer, [request], every[at], tier)
        if kind.format.plain:
            k, v = rows.k.float(), rows.v.float()
        else:
            k = quant.decode(rows.k, rows.k_scale, kind.format.k_bits)
            v = quant.decode(rows.v, rows.v_scale, kind.format.v_bits)
            k, v = quant.restore(k, v, kind.format, cache.centre[request, layer, head])
        ks.append(k.cpu())
        vs.append(v.cpu())
        positions.append(every.position[at].cpu())
    dim = cache.head_dim
    if not ks:
        return Tokens(torch.zeros(0, dim), torch.zeros(0, dim), torch.zeros(0, dtype=torch.int64))
    return Tokens(torch.cat(ks), torch.cat(vs), torch.cat(positions))


@dataclass
class Case:
    """A cache, queries in its dtype, and the options of the call."""

    cache: TieredCache | PagedCache
    q: torch.Tensor
    requests: list[int]
    lengths: list[int]
    layer: int = 0
    options: dict = field(default_factory=dict)
    known: tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]] | None = None

    def expectations(self) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
        """`expected` in float32 and in the dtype of q, which may be the same."""
        if self.known is None:
            want = self.expected()
            self.known = want, want if self.q.dtype == torch.float32 else self.expected(low=True)
        return self.known

    def expected(self, low: bool = False) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """out, lse, mass in float32; with ``low`` the products are done in the dtype of q."""
        q, (batch, q_len, heads, dim) = self.q.cpu(), self.q.shape
        scale = self.options.get("scale") or dim**-0.5
        window, softcap, sinks = (self.options.get(name) for name in ("sliding_window", "softcap", "sinks"))
        kv_heads = self.cache.kv_heads
        longest = self.cache.max_length if isinstance(self.cache, PagedCache) else max(self.lengths, default=0)
        out, lse = torch.zeros(q.shape), torch.full((batch, q_len, heads), -torch.inf)
        mass = torch.zeros(batch, kv_heads, longest)
        cast = (lambda x: x.to(q.dtype)) if low else (lambda x: x.float())
        for b, request in enumerate(self.requests):
            for head in range(kv_heads):
                tokens = tokens_of(self.cache, self.layer, request, head)
                for h in range(head * heads // kv_heads, (head + 1) * heads // kv_heads):
                    for i in range(q_len):
                        own = self.lengths[b] - q_len + i
                        seen = tokens.position <= own
                        if window is not None:
                            seen &= tokens.position > own - window
                        k, v, position = tokens.k[seen], tokens.v[seen], tokens.position[seen]
                        score = (cast(k) @ cast(q[b, i, h])).float() * scale
                        if softcap is not None:
                            score = softcap * torch.tanh(score / softcap)
                        logits = score if sinks is None else torch.cat([score, sinks[h : h + 1].float().cpu()])
                        if not len(logits):
                            continue
                        weight = logits.softmax(0)[: len(score)]
                        lse[b, i, h] = logits.logsumexp(0)
                        out[b, i, h] = (cast(weight) @ cast(v)).float()
                        mass[b, head].index_add_(0, position, weight)
        return (out.to(q.dtype).float() if low else out), lse, mass

    def run(self, backend: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return decode_attention(
            self.q, self.cache, self.layer, requests=self.requests, return_lse=True, return_mass=True, backend=backend,
            **self.options,
        )  # fmt: skip


def check(case: Case, backend: str) -> None:
    """A backend against the model."""
    if backend in ("cuda", "numba"):  # float32 and fp8 are left to Triton, plain pages to the reference
        options = (case.options.get(name) for name in ("sliding_window", "softcap", "sinks"))
        job = op._job(case.q, case.cache, case.layer, case.requests, None, *options, True, True)
        if reason := op.missing(backend, job):
            pytest.skip(reason)
    got = case.run(backend)
    want, low = case.expectations()
    assert got[0].shape == case.q.shape
    assert got[0].dtype == case.q.dtype
    for name, a, b, c in zip(("out", "lse", "mass"), got, want, low, strict=True):
        a = a.float().cpu()
        assert a.shape == b.shape, name
        assert torch.equal(a.isfinite(), b.isfinite()), name
        live = b.isfinite()
        if not live.any():
            continue
        largest = b[live].abs().max().clamp(min=1e-3)
        allowed = 2 * (c - b)[live].abs().max() + 4 * EPS[case.q.dtype] * largest
        error = (a - b)[live].abs().max()
        assert error <= allowed, f"{name}: {error} > {allowed}"
        assert torch.equal(a[~live], b[~live]), name
    if case.options.get("sinks") is None:
        queries = (want[1] > -torch.inf).sum(1).view(*want[2].shape[:2], -1).sum(-1)
        torch.testing.assert_close(got[2].sum(-1).cpu(), queries.float(), rtol=1e-3, atol=1e-4)


def filled(
    lengths: list[int],
    *,
    kv_heads: int = 2,
    dim: int = 64,
    tiers: tuple[str, ...] = ("K8V8", "K4V4", "K3V3", "K2V2"),
    dtype: torch.dtype = torch.float32,
    page_tokens: int = 16,
    recent: int = 5,
    plain: bool = True,
    drop: float = 0.0,
    layers: int = 1,
    large: float = 1.0,
    seed: int = 0,
    **arguments: object,
) -> TieredCache:
    """A cache whose tokens are in tiers at random, head by head, the ``recent`` last in plain pages, others too where
    ``plain``; free pages and the tails of pages are poisoned."""
    generator = torch.Generator().manual_seed(seed)
    longest = max(*lengths, 1)
    cache = TieredCache(
        layers, kv_heads, dim, budget=None, tiers=tiers, dtype=dtype, device=DEVICE, max_requests=len(lengths),
        max_tokens=longest + 16, page_tokens=page_tokens, debug=True, **arguments,
    )  # fmt: skip
    for request in range(len(lengths)):
        cache.add_request()
        assert cache.requests[-1] == request
    for layer in range(layers):
        rows = torch.randn(2, sum(lengths), kv_heads, dim, generator=generator)
        rows[0] += 3 * torch.randn(kv_heads, dim, generator=generator)  # K has a constant part
        rows[0] *= large
        k, v = rows.to(dtype).to(DEVICE)
        cache.append(layer, k, v, requests=list(range(len(lengths))), seq_lens=lengths)
        for request, length in enumerate(lengths):
            tokens = cache.buckets.snapshot(layer, [request])
            target = torch.randint(0 if plain else 1, len(tiers) + 1, (len(tokens),), generator=generator)
            target[torch.rand(len(tokens), generator=generator) < drop] = DROP
            target = target.to(DEVICE).masked_fill(tokens.position >= length - recent, 0)
            with Transaction(cache.pool) as change:
                move_tokens(cache, change, [(layer, [request])], tokens, target)
    poison_tails(cache)
    return cache


def poison_tails(cache: TieredCache) -> None:
    """Slots without a token hold 0xFF: NaN rows and scales, positions of -1."""
    for tier, kind in enumerate(cache.page_formats):
        ones = torch.full((1, kind.stride), 0xFF, dtype=torch.uint8, device=DEVICE)
        count = cache.buckets.host_count[..., tier]
        for request, layer, head in zip(*(count % cache.page_tokens).nonzero(), strict=True):
            n = int(count[request, layer, head])
            handles = cache.buckets.host_table[request, layer, head, tier, n // cache.page_tokens].reshape(1)
            if cache.pool.owners(handles)[0] > 1:  # another request may have tokens there
                continue
            page = cache.pool.read(handles, 0, kind.stride).clone()
            zero = torch.zeros(cache.page_tokens, dtype=torch.int64, device=DEVICE)
            slots = torch.arange(cache.page_tokens, device=DEVICE)
            bad, empty = kind.read(ones, zero, slots), (slots >= n % cache.page_tokens).nonzero().flatten()
            kind.write(page, zero[empty], empty, bad[empty])
            cache.pool.write(handles, 0, page)


def case_of(
    lengths: list[int],
    *,
    group: int = 3,
    q_len: int = 1,
    options: dict | None = None,
    seed: int = 0,
    loud: float = 1.0,
    **cache: object,
) -> Case:
    """Queries over a filled cache; ``loud`` makes scores large."""
    made = filled(lengths, seed=seed, **cache)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(seed + 1)
    q = loud * torch.randn(len(lengths), q_len, made.kv_heads * group, made.head_dim, generator=generator)
    return Case(made, q.to(made.dtype).to(DEVICE), list(range(len(lengths))), lengths, options=options or {})


_last: dict[str, Case] = {}  # two of them


def check_of(backend: str, lengths: list[int], **how: object) -> None:
    """`check` of `case_of`; backends that are tested one after the other share the case and what is expected of it."""
    key = repr((lengths, sorted(how.items())))
    if key not in _last:
        while len(_last) > 1:
            del _last[next(iter(_last))]
        _last[key] = case_of(lengths, **how)  # type: ignore[arg-type]
    check(_last[key], backend)
