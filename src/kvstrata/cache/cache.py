"""``TieredCache``: K and V of many requests in tiers of falling precision, under a budget in bytes.

    append ──▶ fits? ──yes──▶ 16-bit bucket
                 └──no──▶ plan (settle.py) ──▶ move (buckets.py): new rows and old tokens to their tiers

Every operation plans first and raises before it changes anything; what it then does to pages is one `Buckets.move` per
layer. State that kernels read is in device tensors at fixed addresses (`bucket_views`); the host knows the page lists,
the counts and the owners of pages, never a token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from os import PathLike
from typing import Any

import numpy as np
import torch

from ..layout.format import Format
from . import importance as importance_module
from . import read
from .allocate import Prices, format_error
from .append_op import Job
from .arguments import check_int, ragged
from .books import check
from .buckets import DROP, NEW, Buckets, Tokens
from .budget import Budget, BudgetExceeded, Memory, default_tiers
from .centre import fix_centres
from .pages import PageKind, Rows
from .pool import EMPTY, UNIT, Pool
from .settle import POLICIES, Plan, Policy, Scope, plan, plan_all, whole_pages
from .views import BucketedCacheLayer

MANY_SLABS = 1 << 15
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class TieredCache:
    """K and V of up to ``max_requests`` requests, compressed token by token so that a byte budget holds at all times.

    Args:
        layers, kv_heads, head_dim: of the model; ``head_dim`` a multiple of 16 from 32 to 256.
        budget: a float below 1 is a fraction of what the tokens held would take at ``dtype``, for each request and
            layer on its own (short contexts have a floor, see docs/cache.md); an int is bytes for everything; None or
            1.0 compresses nothing.
        tiers: names of formats for older tokens, best first, none larger than the one before; None chooses by the
            budget (`budget.default_tiers`).
        window, sinks: the last and the first tokens, kept at ``dtype``.
        dtype, device: of the model's K and V.
        max_requests, max_tokens: the size of the tables. ``max_tokens`` up to 32768 has 2-byte positions, else 4.
        page_tokens: 64, 32 or 16; small contexts want small pages.
        policy: ``importance`` (least expected error by attention mass), ``recency``, ``uniform``.
        per_head: each KV head chooses its own tokens; False: all heads of a layer choose alike.
        evict: drop the least important tokens where the lowest tier is not small enough, instead of `BudgetExceeded`.
        settle_every: when settling is needed, make room for this many more tokens if possible, or a few less so that
            sinks, window and room are whole pages.
        hysteresis: a token that is already quantised counts this much more when tiers are chosen.
        importance: ``mean`` (mass per query so far) or ``ema`` with ``decay``.
        debug: poison freed pages.
        slab_bytes: of an allocation; None chooses.

    Errors name the argument. Operations that raise leave the cache as it was. Not safe under graph capture, except for
    what reads `bucket_views`.

    Example:
        >>> cache = kvstrata.TieredCache(1, 2, 64, budget=0.25, window=32, page_tokens=16, dtype=torch.float32)
        >>> k, v = torch.randn(2, 1000, 2, 64)
        >>> cache.append(0, k, v)
        >>> cache.length(0), cache.memory().total <= 0.25 * cache.memory().full
        (1000, True)
    """

    def __init__(
        self,
        layers: int,
        kv_heads: int,
        head_dim: int,
        *,
        budget: int | float | None = 0.25,
        tiers: Sequence[str] | None = None,
        window: int = 64,
        sinks: int = 4,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cpu",
        max_requests: int = 1,
        max_tokens: int = 8192,
        page_tokens: int = 64,
        policy: str = "importance",
        per_head: bool = True,
        evict: bool = False,
        settle_every: int = 64,
        hysteresis: float = 0.25,
        importance: str = "mean",
        decay: float = 0.9,
        debug: bool = False,
        slab_bytes: int | None = None,
    ) -> None:
        self.layers = check_int("layers", layers, 1)
        self.kv_heads = check_int("kv_heads", kv_heads, 1)
        self.head_dim = head_dim
        self.window = check_int("window", window, 1)
        self.sinks = check_int("sinks", sinks, 0)
        self.max_requests = check_int("max_requests", max_requests, 1)
        self.max_tokens = check_int("max_tokens", max_tokens, 1)
        self.page_tokens = page_tokens
        check_int("settle_every", settle_every, 1)
        if dtype not in DTYPES:
            raise ValueError(f"dtype: expected one of {DTYPES}, got {dtype}")
        if policy not in POLICIES:
            raise ValueError(f"policy: expected one of {POLICIES}, got {policy!r}")
        if importance not in importance_module.MODES:
            raise ValueError(f"importance: expected one of {importance_module.MODES}, got {importance!r}")
        if not 0 <= decay < 1:
            raise ValueError(f"decay: expected a number in [0, 1), got {decay!r}")
        if not hysteresis >= 0:
            raise ValueError(f"hysteresis: expected a number of at least 0, got {hysteresis!r}")
        self.dtype, self.device = dtype, torch.device(device)
        self.decay, self.debug = decay, debug
        amount = Budget.check(budget)

        self.position_dtype = torch.int16 if max_tokens <= 2**15 else torch.int32
        keeps = policy == "importance"
        max_pages = -(-max_tokens // page_tokens)
        sizes: dict[str, Any] = dict(
            amount=amount,
            layers=layers,
            kv_heads=kv_heads,
            token_bytes=2 * head_dim * dtype.itemsize,
            kept=window + sinks,
            page_tokens=page_tokens,
            max_requests=max_requests,
            max_tokens=max_tokens,
        )

        def kinds(names: Sequence[str]) -> tuple[PageKind, ...]:
            plain = f"K{8 * dtype.itemsize}V{8 * dtype.itemsize}"
            formats = (Format.parse(name, head_dim, page_tokens) for name in (plain, *names))
            return tuple(PageKind(f, dtype, self.position_dtype, keeps, self.device) for f in formats)

        def slabs(stride: int, tiers: int) -> tuple[int, int]:
            """Bytes of one, and how many the tables hold: small ones waste less, but there are not to be millions."""
            pages = max_requests * layers * kv_heads * (max_pages + tiers - 1)
            size = stride * max(min(max(layers * kv_heads // 16, 1), 8), pages // MANY_SLABS)
            size = size if slab_bytes is None else slab_bytes
            check_int("slab_bytes", size, stride)
            size = size // UNIT * UNIT
            capacity = 2 * (-(-pages // (size // stride)) + tiers)
            return size, min(capacity, 2**31 // (size // UNIT))  # what handles can name

        def expected(names: Sequence[str]) -> Budget:
            """The budget with these tiers, but for the smaller tables."""
            strides = [kind.stride for kind in kinds(names)]
            size, capacity = slabs(strides[0], len(strides))
            price = tuple(-(-size // (size // stride)) for stride in strides)
            fixed = 8 * capacity + 4 * max_requests * layers * kv_heads * (len(strides) * max_pages + head_dim)
            return Budget(**sizes, page_price=price, fixed=fixed, reserve=len(strides) * size)

        if tiers is None:
            tiers = default_tiers(amount, expected)
        self.kinds = kinds(tiers)
        self.formats = tuple(kind.format for kind in self.kinds)
        for better, worse in zip(self.formats, self.formats[1:], strict=False):
            if worse.plain or worse.page_bytes > better.page_bytes:
                raise ValueError(f"tiers: expected none larger than the one before, got {worse.name} in {tuple(tiers)}")
        if len(self.formats) == 1:
            raise ValueError("tiers: expected at least one format, got none")
        strides = [kind.stride for kind in self.kinds]

        size, capacity = slabs(strides[0], len(strides))
        self.pool = Pool(strides, size, capacity, self.device, debug)
        self.buckets = Buckets(self.pool, self.kinds, max_requests, layers, kv_heads, max_pages)
        centre_shape = (max_requests, layers, kv_heads, head_dim)
        self.centre = torch.zeros(centre_shape, dtype=torch.float32, device=self.device)
        lengths = torch.zeros(max_requests, layers, dtype=torch.int32)
        self._lengths, self._device_lengths = lengths.numpy(), lengths.to(self.device)
        self._queries = np.zeros((max_requests, layers), np.int64)  # whose mass was reported
        self._reported = np.zeros((max_requests, layers), np.int64)  # the length when it was
        self._centred = np.zeros((max_requests, layers), bool)
        self._active: set[int] = set()
        self._ahead_from = np.zeros(max_requests, np.int64)  # the length from which `_settle_ahead` is tried

        price = tuple(-(-size // n) for n in self.pool.per_slab)
        self.policy = Policy(
            policy,
            importance,
            per_head,
            evict,
            window,
            sinks,
            hysteresis,
            whole_pages(settle_every, window + sinks, page_tokens),
            Prices(price, page_tokens),
            tuple(format_error(f) for f in self.formats),
        )
        fixed = sum(self._fixed().values())
        self.budget = Budget(**sizes, page_price=price, fixed=fixed, reserve=len(strides) * size)

    # What is there

    @property
    def requests(self) -> tuple[int, ...]:
        """The requests in use, ascending."""
        return tuple(sorted(self._active))

    def length(self, request: int = 0, layer: int = 0) -> int:
        """Tokens appended to a layer of a request and not cropped; 0 for a request that is not in use."""
        self._check_layer(layer)
        check_int("request", request, 0, self.max_requests - 1)
        return int(self._lengths[request, layer])

    def bucket_views(self, layer: int) -> BucketedCacheLayer:
        """The state of a layer as kernels read it; valid until the cache goes, also across growth."""
        self._check_layer(layer)
        return BucketedCacheLayer(
            self.buckets.table[:, layer],
            self.buckets.count[:, layer],
            self._device_lengths[:, layer],
            self.centre[:, layer],
            self.pool.pointers,
            self.pool.slabs,
            self.pool.units,
            self.formats,
            self.pool.strides,
            tuple(kind.position_offset for kind in self.kinds),
            tuple(kind.importance_offset for kind in self.kinds),
            self.position_dtype,
            None if self.pool.space is None else self.pool.space.bytes,
        )

    def gather(self, layer: int, request: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """``k, v [kv_heads, n, head_dim]`` as attention sees them, in ``dtype``, and int64 positions ``[kv_heads, n]``.

        Sorted by position. Where eviction left heads with different numbers of tokens, n is the largest, and the rest
        is zero with position -1.
        """
        return read.gather(self, layer, request)

    def tier_map(self, layer: int, request: int = 0) -> torch.Tensor:
        """The tier of every token in the order of ``gather``: int64 ``[kv_heads, n]``, -1 for none."""
        return read.tier_map(self, layer, request)

    def importance(self, layer: int, request: int = 0) -> torch.Tensor:
        """The estimated mass per query in the order of ``gather``: float32 ``[kv_heads, n]``, 0 for none."""
        return read.importance(self, layer, request)

    def memory(self) -> Memory:
        """What is allocated, in bytes; never waits for the device."""
        counts = self.buckets.host_count[list(self.requests)].astype(np.int64).sum((0, 1, 2))
        used = [self.pool.pages(tier) * stride for tier, stride in enumerate(self.pool.strides)]
        slots = [self.pool.pages(tier) * self.page_tokens for tier in range(len(self.kinds))]
        slack = sum(
            max(n - int(count), 0) * stride // self.page_tokens
            for n, count, stride in zip(slots, counts, self.pool.strides, strict=True)
        )
        names = [f.name for f in self.formats]
        return Memory(
            kinds={"slabs": self.pool.nbytes, **self._fixed()},
            tiers=dict(zip(names, used, strict=True)),
            page_slack=slack,
            slab_slack=self.pool.nbytes - sum(used),
            tokens=dict(zip(names, counts.tolist(), strict=True)),
            full=int(self._lengths.sum()) * self.kv_heads * 2 * self.head_dim * self.dtype.itemsize,
            allowed=self.budget.allowed([self._lengths[r].tolist() for r in self.requests]),
        )

    def _fixed(self) -> dict[str, int]:
        tensors = {
            "table": self.buckets.table,
            "count": self.buckets.count,
            "centre": self.centre,
            "length": self._device_lengths,
            "slab_pointers": self.pool.pointers,
        }
        return {name: tensor.nbytes for name, tensor in tensors.items()}

    # Checks of arguments

    def _check_layer(self, layer: int) -> None:
        check_int("layer", layer, 0, self.layers - 1)

    def _check_request(self, request: int, name: str = "request") -> None:
        if request not in self._active:
            raise ValueError(f"{name}: expected one of {self.requests}, got {request!r}")

    def _given(self, requests: Sequence[int] | None) -> list[int]:
        if requests is None:
            return list(self.requests)
        for request in requests:
            self._check_request(request, "requests")
        if len(set(requests)) != len(requests):
            raise ValueError(f"requests: expected each once, got {list(requests)}")
        return list(requests)

    def _free_request(self) -> int:
        for request in range(self.max_requests):
            if request not in self._active:
                return request
        raise RuntimeError(f"max_requests: expected more than {self.max_requests}, all are in use")

    # Tokens

    def _tokens(self, layer: int, request: int) -> Tokens:
        self._check_layer(layer)
        self._check_request(request)
        return self.buckets.snapshot(layer, [request])

    def _new_tokens(self, requests: Sequence[int], layer: int, lengths: Sequence[int]) -> Tokens:
        """Tokens to be appended, row by row, head by head."""
        rows = sum(lengths)
        index = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(list(lengths)))
        starts = torch.tensor([int(self._lengths[r, layer]) for r in requests])
        first = torch.tensor([sum(lengths[:i]) for i in range(len(lengths))])
        position = (torch.arange(rows) - first[index] + starts[index]).to(self.device)
        ends = (starts + torch.tensor(list(lengths)))[index].to(self.device)
        index = index.to(self.device)
        heads = torch.arange(self.kv_heads, device=self.device)
        each = torch.ones_like(heads)
        return Tokens(
            (index.unsqueeze(1) * self.kv_heads + heads).flatten(),
            torch.full((rows * self.kv_heads,), NEW, device=self.device),
            torch.arange(rows * self.kv_heads, device=self.device),
            torch.outer(position, each).flatten(),
            importance_module.initial(self.policy.mode, torch.outer(ends, each).flatten()),
        )

    # Budget

    def _physical(self, layer: int) -> int:
        """The price of a layer's pages, shared ones once."""
        total = 0
        for tier, price in enumerate(self.policy.prices.page):
            handles = self.buckets.host_table[:, layer, :, tier]
            total += len(np.unique(handles[handles >= 0])) * price
        return total

    def _fits_plain(self, layer: int, requests: Sequence[int], lengths: Sequence[int]) -> bool:
        """Whether new tokens can all go to the plain bucket as things stand."""
        if self.budget.amount is None:
            return True
        prices, p = self.policy.prices, self.page_tokens
        if not self.budget.shared:
            for request, new in zip(requests, lengths, strict=True):
                counts = torch.from_numpy(self.buckets.host_count[request, layer].astype(np.int64))
                counts[:, 0] += new
                if prices.total(counts) > self.budget.pages(int(self._lengths[request, layer]) + new):
                    return False
            return True
        pages = 0
        for request, new in zip(requests, lengths, strict=True):
            count = self.buckets.host_count[request, layer, :, 0].astype(np.int64)
            pages += int((-(-(count + new) // p) - -(-count // p)).sum())
            open_heads = np.flatnonzero(count % p)
            last = self.buckets.host_table[request, layer, open_heads, 0, count[open_heads] // p]
            pages += int((self.pool.owners(last) > 1).sum())
        return self._physical(layer) + pages * prices.page[0] <= self.budget.pages(0)

    def _scopes(self, requests: Sequence[int]) -> list[list[int]]:
        """Requests that share a sum of bytes, if any of the given is among them."""
        if not requests:
            return []
        return [sorted(self._active | set(requests))] if self.budget.shared else [[r] for r in requests]

    def _scope(self, layer: int, requests: list[int], tokens: Tokens, lengths: Sequence[int]) -> Scope:
        """Tokens of requests that will have these lengths, with the bytes they share."""
        per_head = torch.tensor(list(lengths)).repeat_interleave(self.kv_heads).to(self.device)
        queries, reported = (
            torch.from_numpy(x[requests, layer]).repeat_interleave(self.kv_heads).to(self.device)
            for x in (self._queries, self._reported)
        )
        allowed = self.budget.pages(lengths[0])
        return Scope(tokens, per_head, queries, reported, self.kv_heads, allowed, max(lengths))

    def _plan(
        self, layer: int, requests: list[int], tokens: Tokens, lengths: Sequence[int], headroom: int | None = None
    ) -> torch.Tensor:
        """Targets for all tokens of a scope whose requests will have these lengths, or BudgetExceeded."""
        if self.budget.amount is None:
            return tokens.tier.clamp(min=0)
        scope = self._scope(layer, requests, tokens, lengths)
        made = plan(scope, self.policy, self.policy.settle_every if headroom is None else headroom)
        return self._target(made, layer, requests, scope, lengths)

    def _target(
        self, made: Plan, layer: int, requests: list[int], scope: Scope, lengths: Sequence[int]
    ) -> torch.Tensor:
        if made.needed is not None:
            where = f"for the pages of layer {layer} and requests {requests} ({sum(lengths)} tokens)"
            raise BudgetExceeded(where, made.needed, scope.allowed)
        return made.target

    def _apply(self, layer: int, requests: list[int], tokens: Tokens, target: torch.Tensor) -> None:
        self._apply_all([(layer, requests, tokens, target)])

    def _apply_all(
        self, jobs: Sequence[tuple[int, list[int], Tokens, torch.Tensor]], fresh: Rows | None = None
    ) -> None:
        """The targets of several layers and scopes, in one go; new tokens are rows of ``fresh``."""
        layers: list[int] = []
        requests: list[int] = []
        parts, targets, centres = [], [], []
        for layer, scope, tokens, target in jobs:
            fix_centres(self, layer, scope, tokens, target, fresh)
            parts.append(replace(tokens, bucket=tokens.bucket + len(requests) * self.kv_heads))
            targets.append(target)
            centres.append(self.centre[scope, layer].flatten(0, 1))
            layers += [layer] * len(scope)
            requests += scope
        if requests:
            self.buckets.move(layers, requests, Tokens.cat(parts), torch.cat(targets), fresh, torch.cat(centres))

    def _set_length(self, request: int, layer: int, length: int) -> None:
        self._lengths[request, layer] = length
        if self.device.type != "cpu":
            self._device_lengths[request, layer] = length

    def _tidy(self) -> None:
        """Give back what the budget does not allow to keep: empty slabs, then holes in slabs."""
        allowed = self.budget.allowed([self._lengths[r].tolist() for r in self.requests])
        fixed = self.budget.fixed

        def over() -> bool:
            too_many = int((self.pool.tier != EMPTY).sum()) > self.pool.capacity // 2
            return too_many or (allowed is not None and fixed + self.pool.nbytes > allowed)

        if over():
            self.pool.trim()
        if over():
            self.compact()

    def compact(self) -> None:
        """Move pages so that each tier has at most one slab that is not full, and give the others back.

        Happens by itself when the budget needs it; a captured graph stays valid, since it reads the tables.
        """
        for tier in range(len(self.kinds)):
            old, new = self.pool.compact(tier)
            if len(old):
                table = self.buckets.host_table[:, :, :, tier]
                at = np.searchsorted(old, table).clip(max=len(old) - 1)
                table[...] = np.where(old[at] == table, new[at], table)
        self.pool.trim()
        for layer in range(self.layers):
            self.buckets.push(layer, self.requests)

    # Operations

    def add(self) -> int:
        """A new, empty request."""
        request = self._free_request()
        self._active.add(request)
        return request

    def append(
        self,
        layer: int,
        k: torch.Tensor,
        v: torch.Tensor,
        requests: Sequence[int] | None = None,
        lengths: Sequence[int] | None = None,
        *,
        mass: torch.Tensor | None = None,
        queries: int | None = None,
    ) -> None:
        """Add tokens to a layer, settling it first where they would not fit.

        Args:
            layer: index.
            k, v: ``[tokens, kv_heads, head_dim]``, the requests' tokens one after the other, or
                ``[requests, tokens, kv_heads, head_dim]``; in the cache's dtype and on its device.
            requests: which; None is 0, 1, ... A request not in use yet is taken into use.
            lengths: tokens of each request, for packed rows of several.
            mass: what the queries of these tokens gave to all positions, the new ones included, as in
                `update_importance`: a prompt that attends before it is stored settles by it at once.
            queries: how many queries of each request are in ``mass``; None is one per token, so that all requests need
                the same number of tokens.

        Raises ValueError, TypeError or BudgetExceeded with nothing changed.
        """
        self._check_layer(layer)
        k, v, requests, lengths = ragged(self, layer, k, v, requests, lengths)
        asked, lengths = list(requests), list(lengths)
        if not sum(lengths):
            self._active.update(asked)
            return
        if mass is None and self._append_plain(layer, k, v, asked, lengths, room_only=True):
            return
        fits = self._fits_plain(layer, asked, lengths)
        if fits and mass is None:
            self._append_plain(layer, k, v, asked, lengths)
            self._tidy()
            return
        if mass is None and self._settle_ahead(layer, asked, lengths):
            self._append_plain(layer, k, v, asked, lengths)
            self._tidy()
            return
        new = self._new_tokens(asked, layer, lengths)
        undo = None
        if mass is not None:
            if queries is None and len(set(lengths)) > 1:
                raise ValueError(f"queries: expected how many are in mass, got None with lengths {lengths}")
            queries = check_int("queries", lengths[0] if queries is None else queries, 1)
            ends = [int(self._lengths[r, layer]) + n for r, n in zip(asked, lengths, strict=True)]
            mass = self._check_mass(mass, len(asked), max(ends))
            if self.policy.name == "importance":
                own = mass[new.bucket // self.kv_heads, new.bucket % self.kv_heads, new.position]
                one = torch.ones_like(new.bucket)
                heard = importance_module.updated(self.policy.mode, new.importance, own, queries, one, self.decay)
                new = replace(new, importance=heard)
                undo = self._hear(layer, asked, mass, queries, ends)
        if fits:
            self._append_plain(layer, k, v, asked, lengths, new.importance)
            self._tidy()
            return
        flat_k, flat_v = (x.detach().reshape(-1, self.head_dim) for x in (k, v))
        fresh = Rows(flat_k, flat_v, None, None, new.position, new.importance)
        jobs: list[tuple[list[int], Tokens, torch.Tensor]] = []
        plain: list[int] = []  # those among the asked that need not settle
        row_of = new.bucket // self.kv_heads
        for scope in self._scopes(asked):
            mine = [i for i, r in enumerate(asked) if r in scope]
            if not self.budget.shared and self._fits_plain(layer, scope, [lengths[mine[0]]]):
                plain.append(mine[0])
                continue
            keep = torch.isin(row_of, torch.tensor(mine, device=self.device)).nonzero().flatten()
            coming = new[keep].renumbered({i: scope.index(asked[i]) for i in mine}, self.kv_heads)
            tokens = Tokens.cat([self.buckets.snapshot(layer, scope), coming])
            ends = [int(self._lengths[r, layer]) + sum(lengths[i] for i in mine if asked[i] == r) for r in scope]
            try:
                jobs.append((scope, tokens, self._plan(layer, scope, tokens, ends)))
            except BudgetExceeded:
                if undo:
                    undo()
                raise
        self._active.update(asked)
        self._apply_all([(layer, *job) for job in jobs], fresh)
        for i, (request, count) in enumerate(zip(asked, lengths, strict=True)):
            if i not in plain:
                self._set_length(request, layer, int(self._lengths[request, layer]) + count)
                continue
            rows = slice(sum(lengths[:i]), sum(lengths[: i + 1]))
            first = None if mass is None else new.importance.view(-1, self.kv_heads)[rows].flatten()
            self._append_plain(layer, k[rows], v[rows], [request], [count], first)
        self._tidy()

    def _append_plain(
        self,
        layer: int,
        k: torch.Tensor,
        v: torch.Tensor,
        requests: list[int],
        lengths: list[int],
        importance: torch.Tensor | None = None,
        room_only: bool = False,
    ) -> bool:
        """New rows to the plain buckets; ``room_only``: only if they fit pages that are there, False if they do not.

        Such an append takes no page, so it needs no look at the budget, which never shrinks as tokens come.
        """
        ids, counts = np.array(requests), np.array(lengths)
        before = (self.buckets.room if room_only else self.buckets.make_room)(layer, ids, counts)
        if before is None:
            return False
        starts = self._lengths[ids, layer].astype(np.int64)
        ends = starts + counts
        if self.policy.mode == "mean":  # begins at 0, whatever the length
            first = np.zeros(len(ids), np.float32)
        else:
            first = importance_module.initial(self.policy.mode, torch.from_numpy(ends)).numpy()
        by_token = None if importance is None else importance.view(-1, self.kv_heads).contiguous()
        self.buckets.append(
            Job(self.buckets, layer, ids, counts, starts, before, k, v, first, by_token, self._device_lengths)
        )
        self._lengths[ids, layer] = ends
        self._active.update(requests)
        return True

    def settle(self, layer: int | None = None, requests: Sequence[int] | None = None) -> None:
        """Move tokens to the tiers that importance or age ask for now, where the budget is short of headroom.

        ``append`` does so when it must; calling it at a quiet moment makes room ahead of time. None is all.
        """
        if layer is not None:
            self._check_layer(layer)
        self._settle(range(self.layers) if layer is None else [layer], self._scopes(self._given(requests)))

    def _settle(self, layers: Sequence[int], scopes: list[list[int]], room: dict[int, int] | None = None) -> bool:
        """All of these in one go; with ``room`` only if every request gets it for so many tokens, else False."""
        if self.budget.amount is None:
            return False
        places = [(at, scope) for at in layers for scope in scopes]
        lengths = [[int(self._lengths[r, at]) for r in scope] for at, scope in places]
        asked = [
            self._scope(*place, self.buckets.snapshot(*place), n) for place, n in zip(places, lengths, strict=True)
        ]
        plans = plan_all(asked, self.policy, self.policy.settle_every)
        if room is not None:
            wanted = [max(room.get(r, 0) for r in scope) for _, scope in places]
            if any(made.needed is not None or made.spare < n for made, n in zip(plans, wanted, strict=True)):
                return False
        jobs = [
            (at, scope, x.tokens, self._target(made, at, scope, x, n))
            for made, (at, scope), x, n in zip(plans, places, asked, lengths, strict=True)
        ]
        self._apply_all(jobs)
        self._tidy()
        return True

    def _settle_ahead(self, layer: int, requests: list[int], lengths: list[int]) -> bool:
        """Make room in all layers at once when one needs it: a step of a model brings them all to the same point.

        One search for all costs little more than for one. Only requests that have no room settle: when one does, does
        not depend on the others. Where no room is found, it is not tried again for a while.
        """
        if len(set(requests)) < len(requests) or not self._active.issuperset(requests):
            return False
        if self.layers == 1 or self.policy.name != "importance" or not self.policy.per_head:
            return False
        room = dict(zip(requests, lengths, strict=True))
        if not self.budget.shared:
            room = {r: n for r, n in room.items() if not self._fits_plain(layer, [r], [n])}
        full = list(room)
        if not full or bool((self._lengths[full, layer] < self._ahead_from[full]).any()):
            return False
        if not self._settle(range(self.layers), self._scopes(full), room):
            self._ahead_from[full] = self._lengths[full, layer] + self.policy.settle_every
            return False
        return self._fits_plain(layer, requests, lengths)

    def update_importance(
        self, layer: int, mass: torch.Tensor, requests: Sequence[int] | None = None, queries: int = 1
    ) -> None:
        """Add the attention mass that tokens got.

        Args:
            layer: index.
            mass: ``[requests, kv_heads, positions]``, by position, summed over the query heads of a KV head and over
                ``queries`` queries; at least as many positions as the longest request has tokens.
            requests: which; None is all in use, ascending.
            queries: how many queries of each request are in ``mass``.

        What is not finite or negative counts as 0. Nothing happens under a policy that does not look at importance.
        """
        self._check_layer(layer)
        given = self._given(requests)
        check_int("queries", queries, 1)
        ends = [int(self._lengths[r, layer]) for r in given]
        mass = self._check_mass(mass, len(given), max(ends, default=0))
        if self.policy.name == "importance":
            self._hear(layer, given, mass, queries, ends)

    def _check_mass(self, mass: torch.Tensor, requests: int, longest: int) -> torch.Tensor:
        if mass.dim() != 3 or tuple(mass.shape[:2]) != (requests, self.kv_heads) or mass.shape[2] < longest:
            raise ValueError(
                f"mass: expected [{requests}, {self.kv_heads}, at least {longest}], got {tuple(mass.shape)}"
            )
        if not mass.is_floating_point():
            raise TypeError(f"mass: expected a floating-point tensor, got {mass.dtype}")
        return mass.to(self.device)

    def _hear(
        self, layer: int, requests: Sequence[int], mass: torch.Tensor, queries: int, ends: Sequence[int]
    ) -> Callable[[], None]:
        """Write mass into pages; ``ends``: the lengths when it was given. Returns what undoes it."""
        before: list[tuple[Tokens, torch.Tensor]] = []
        told = self._queries[:, layer].copy(), self._reported[:, layer].copy()
        # A page that several share hears from one after the other.
        for part in [[i] for i in range(len(requests))] if self.pool.shares else [list(range(len(requests)))]:
            mine = [requests[i] for i in part]
            tokens, handle = self.buckets.look(layer, mine)
            own = mass if len(part) == len(mass) else mass[part]
            own = own[tokens.bucket // self.kv_heads, tokens.bucket % self.kv_heads, tokens.position]
            owners = self.buckets.owners(layer, mine, tokens)
            heard = importance_module.updated(self.policy.mode, tokens.importance, own, queries, owners, self.decay)
            before.append((tokens, handle))
            self.buckets.set_side(handle, replace(tokens, importance=heard))
        self._queries[list(requests), layer] += queries
        self._reported[list(requests), layer] = ends

        def undo() -> None:
            for tokens, handle in reversed(before):
                self.buckets.set_side(handle, tokens)
            self._queries[:, layer], self._reported[:, layer] = told

        return undo

    def free(self, request: int) -> None:
        """Forget a request; pages that no fork shares go back."""
        self._check_request(request)
        self._assign({}, [request])
        self._ahead_from[request] = 0

    def fork(self, request: int) -> int:
        """A second request with the same tokens, sharing every page until one of both changes it."""
        self._check_request(request)
        twin = self._free_request()
        self._assign({twin: request}, [])
        return twin

    def reorder(self, indices: Sequence[int], requests: Sequence[int] | None = None) -> None:
        """Beams: ``requests[i]`` becomes what ``requests[indices[i]]`` was; None is all in use, ascending."""
        given = self._given(requests)
        if len(indices) != len(given):
            raise ValueError(f"indices: expected {len(given)}, one per request, got {len(indices)}")
        for index in indices:
            check_int("indices", int(index), 0, len(given) - 1)
        self._assign({given[i]: given[int(index)] for i, index in enumerate(indices)}, [])

    def select(self, indices: Sequence[int]) -> None:
        """Requests 0, 1, ... become what requests ``indices[0]``, ``indices[1]``, ... were; all others are freed."""
        chosen = [int(index) for index in indices]
        for request in chosen:
            self._check_request(request, "indices")
        if len(chosen) > self.max_requests:
            raise ValueError(f"indices: expected at most {self.max_requests}, got {len(chosen)}")
        self._assign(dict(enumerate(chosen)), [r for r in self.requests if r >= len(chosen)])

    def _assign(self, source: dict[int, int], gone: Sequence[int]) -> None:
        """Requests become copies of what others were, pages shared; some go."""
        table, count = self.buckets.host_table, self.buckets.host_count
        to, origin = list(source), list(source.values())
        state = (table, count, self._lengths, self._queries, self._reported, self._centred)
        new = [x[origin].copy() for x in state]
        centres = self.centre[origin].clone()
        changed = [*to, *gone]
        old_handles = table[changed]
        old_handles = old_handles[old_handles >= 0]
        self.pool.retain(new[0][new[0] >= 0])
        for x, values in zip(state, new, strict=True):
            x[to] = values
        self.centre[to] = centres
        left = list(gone)
        for x in state:
            x[left] = -1 if x is table else 0
        self.centre[left] = 0
        self.pool.release(old_handles)
        self._active = (self._active | set(to)) - set(gone)
        if self.device.type != "cpu":
            self._device_lengths.copy_(torch.from_numpy(self._lengths))
            for layer in range(self.layers):
                self.buckets.push(layer, changed)
        self._tidy()

    def crop(self, request: int, length: int) -> None:
        """Drop all tokens at positions >= ``length``, in every layer and tier (speculative rollback).

        What was quantised stays as it is. Can settle, and raise BudgetExceeded, where a smaller length has a smaller
        budget than the tokens that stay take.
        """
        self._check_request(request)
        check_int("length", length, 0)
        if length == 0:
            self._assign({}, [request])
            self._active.add(request)
            return
        jobs = []
        for layer in range(self.layers):
            if int(self._lengths[request, layer]) <= length:
                continue
            scope = [request]
            tokens = self.buckets.snapshot(layer, scope)
            kept = tokens.position < length
            target = torch.where(kept, tokens.tier, DROP)
            if not self._fits_cropped(layer, request, tokens, target, length):
                [scope] = self._scopes([request])
                lengths = [length if r == request else int(self._lengths[r, layer]) for r in scope]
                tokens = self.buckets.snapshot(layer, scope)
                mine = tokens.bucket // self.kv_heads == scope.index(request)
                kept = ~mine | (tokens.position < length)
                at = kept.nonzero().flatten()
                target = torch.full_like(tokens.tier, DROP)
                target[at] = self._plan(layer, scope, tokens[at], lengths)
            jobs.append((layer, scope, tokens, target))
        self._apply_all(jobs)
        for layer, *_ in jobs:
            self._set_length(request, layer, length)
            self._reported[request, layer] = min(length, self._reported[request, layer])
        self._tidy()

    def _fits_cropped(self, layer: int, request: int, tokens: Tokens, target: torch.Tensor, length: int) -> bool:
        if self.budget.amount is None:
            return True
        prices = self.policy.prices
        if not self.budget.shared:
            return prices.total(prices.counts(tokens.bucket, target, self.kv_heads)) <= self.budget.pages(length)
        copies = 0
        for tier, price in enumerate(prices.page):
            handles = self.buckets._pages_of(layer, [request], tier)[2]
            copies += int((self.pool.owners(handles) > 1).sum()) * price
        return self._physical(layer) + copies <= self.budget.pages(0)

    def check(self) -> None:
        """Assert that owners, counts, positions and bytes agree; reads every page, for tests and debugging."""
        check(self)

    def save(self, path: str | PathLike[str], request: int = 0) -> None:
        """Write a request as safetensors: its pages as they are, tables, centres, and all parameters."""
        from .files import save

        self._check_request(request)
        save(self, path, request)

    def load(self, path: str | PathLike[str]) -> int:
        """Read a request that a cache with the same parameters saved; ValueError for any other file."""
        from .files import load

        return load(self, path)
