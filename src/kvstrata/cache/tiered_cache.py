"""``TieredCache``: K and V of many requests in tiers of falling precision, under a budget in bytes.

    append ──▶ fits? ──yes──▶ 16-bit bucket
                 └──no──▶ plan (policy/plan.py) ──▶ move (storage/page_table.py): rows and tokens to their tiers

The class makes the state (state.py) and offers the operations; each is in a file of its own:

    policy/  sizes.py pages, slabs and budget from the arguments; room.py whether tokens fit; scopes.py what to settle;
             mass.py attention mass to importance
    ops/     append.py, step.py (the token of a captured step), crop.py, fork.py, files.py, inspect.py, books.py (bytes
             allocated and invariants)
    storage/ transaction.py an operation as a whole, or not at all

Every operation plans first, takes the pages it needs and changes the rest when nothing can fail any more. State that
kernels read is in device tensors at fixed addresses (`bucket_views`); the host knows the page lists, the counts and the
owners of pages, never a token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from os import PathLike
from typing import Any

import numpy as np
import torch

from kvstrata.checks import check_int, check_names, check_number, check_rope, check_tiers, whole_numbers

from .ops import books
from .ops import inspect as read
from .ops.append import append_tokens
from .ops.arguments import check_mass
from .ops.crop import crop_request
from .ops.fork import assign
from .ops.step import advance, write
from .policy import room
from .policy.budget import DEFAULT, Memory, check_budget, default_tiers
from .policy.importance import MODES
from .policy.mass import add_mass
from .policy.plan import POLICIES, Policy, whole_pages
from .policy.prices import Prices, format_error
from .policy.scopes import scopes_of, settle_scopes
from .policy.sizes import Sizes
from .state import CacheState
from .storage.page_table import Buckets
from .storage.pool import Pool
from .storage.transaction import Transaction
from .storage.views import BucketedCacheLayer

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class TieredCache(CacheState):
    """K and V of up to ``max_requests`` requests, compressed token by token so that a byte budget holds at all times.

    Args:
        layers, kv_heads, head_dim: of the model; ``head_dim`` a multiple of 16 from 32 to 256.
        budget: a fraction of what the tokens held would take at ``dtype``, for each request and layer on its own
            (short contexts have a floor, see docs/cache.md); 1.0 compresses nothing, None is no limit. A fraction that
            has bytes to spare at K8V8 leaves them.
        budget_bytes: bytes for everything, in place of ``budget``.
        tiers: names of formats for older tokens, best first, none larger than the one before; None chooses by the
            budget (`budget.default_tiers`).
        recent_tokens, sink_tokens: how many of the last and of the first tokens are kept at ``dtype``.
        dtype, device: of the model's K and V.
        max_requests, max_tokens: the size of the tables. ``max_tokens`` up to 32768 has 2-byte positions, else 4.
        page_tokens: 64, 32 or 16; small contexts want small pages.
        policy: ``importance`` (least expected error by attention mass), ``recency``, ``uniform``.
        per_head: each KV head chooses its own tokens; False: all heads of a layer choose alike.
        evict: drop the least important tokens where the lowest tier is not small enough, instead of `BudgetExceeded`.
        settle_every: when settling is needed, make room for about this many more tokens if possible: from half to
            twice as many, so that sink and recent tokens and room are whole pages.
        hysteresis: a token that is already quantised counts this much more when tiers are chosen.
        importance: ``mean`` (mass per query so far) or ``ema`` with ``decay``.
        rope: how far RoPE turns each pair of channels from one position to the next, in radians, as a model's
            ``inv_freq``; with it K's centre foresees longer contexts (docs/formats.md). None: K is not turned.
        debug: poison freed pages.
        slab_bytes: the most bytes of an allocation, at least a page of ``dtype``; None chooses.

    Errors name the argument. Operations that raise, also for want of memory, leave the cache as it was. Not safe under
    graph capture, except for `write` and what reads `bucket_views`. For several streams see docs/cache.md.

    Example:
        >>> cache = kvstrata.TieredCache(1, 2, 64, budget=0.25, recent_tokens=32, page_tokens=16, dtype=torch.float32)
        >>> k, v = torch.randn(2, 2000, 2, 64)
        >>> cache.append(0, k, v)
        >>> cache.length(0), cache.memory().total <= 0.25 * cache.memory().full
        (2000, True)
    """

    def __init__(
        self,
        layers: int,
        kv_heads: int,
        head_dim: int,
        *,
        budget: float | None = DEFAULT,
        budget_bytes: int | None = None,
        tiers: Sequence[str] | None = None,
        recent_tokens: int = 64,
        sink_tokens: int = 4,
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
        rope: Sequence[float] | None = None,
        debug: bool = False,
        slab_bytes: int | None = None,
    ) -> None:
        self._arguments = {name: value for name, value in locals().items() if name != "self"}
        self.layers = check_int("layers", layers, 1)
        self.kv_heads = check_int("kv_heads", kv_heads, 1)
        self.head_dim = head_dim
        self.recent_tokens = check_int("recent_tokens", recent_tokens, 1)
        self.sink_tokens = check_int("sink_tokens", sink_tokens, 0)
        self.max_requests = check_int("max_requests", max_requests, 1)
        self.max_tokens = check_int("max_tokens", max_tokens, 1)
        self.page_tokens = page_tokens
        check_int("settle_every", settle_every, 1)
        if dtype not in DTYPES:
            raise ValueError(f"dtype: expected one of {DTYPES}, got {dtype!r}")
        if policy not in POLICIES:
            raise ValueError(f"policy: expected one of {POLICIES}, got {policy!r}")
        if importance not in MODES:
            raise ValueError(f"importance: expected one of {MODES}, got {importance!r}")
        check_number("decay", decay, "[0, 1)", lambda x: 0 <= x < 1)
        check_number("hysteresis", hysteresis, "[0, inf)", lambda x: 0 <= x < math.inf)
        for name, flag in (("per_head", per_head), ("evict", evict), ("debug", debug)):
            if not isinstance(flag, bool):
                raise TypeError(f"{name}: expected True or False, got {flag!r}")
        self.dtype, self.device = dtype, torch.device(device)
        if self.device.type == "cuda" and not torch.cuda.is_available():
            raise RuntimeError(f"device: expected one that torch sees, got {self.device}, and it sees no CUDA device")
        if self.device.type == "cuda":
            self.device = torch.empty(0, device=self.device).device  # with its number
        self.decay, self.debug = decay, debug
        self.rope = self._arguments["rope"] = check_rope(rope, head_dim)
        amount = check_budget(budget, budget_bytes)
        self._arguments["budget"] = amount if budget_bytes is None else None

        sizes = Sizes(
            amount=amount,
            layers=layers,
            kv_heads=kv_heads,
            head_dim=head_dim,
            kept=recent_tokens + sink_tokens,
            settle_every=settle_every,
            dtype=dtype,
            device=self.device,
            max_requests=max_requests,
            max_tokens=max_tokens,
            page_tokens=page_tokens,
            importance=policy == "importance",
            slab_bytes=slab_bytes,
        )
        self.position_dtype = sizes.position_dtype
        if tiers is None:
            tiers = default_tiers(amount, sizes.expected)
        check_names(tiers)
        self.page_formats = sizes.page_formats(tiers)
        self.formats = tuple(kind.format for kind in self.page_formats)
        check_tiers(self.formats, tiers)
        self._arguments["tiers"] = tuple(tiers)

        with torch.inference_mode(False):  # whoever makes the cache: its tensors are written to later
            strides = [kind.stride for kind in self.page_formats]
            slab, capacity = sizes.slabs(strides[0], len(strides))
            self.pool = Pool(strides, slab, capacity, self.device, debug)
            self.buckets = Buckets(self.pool, self.page_formats, max_requests, layers, kv_heads, sizes.max_pages)
            centre_shape = (max_requests, layers, kv_heads, head_dim)
            self.centre = torch.zeros(centre_shape, dtype=torch.float32, device=self.device)
            lengths = torch.zeros(max_requests, layers, dtype=torch.int32, device="cpu")
            self._lengths, self._device_lengths = lengths.numpy(), lengths.to(self.device)
        self._queries = np.zeros((max_requests, layers), np.int64)  # whose mass was reported
        self._reported = np.zeros((max_requests, layers), np.int64)  # the length when it was
        self._centred = np.zeros((max_requests, layers), bool)
        self._active: set[int] = set()
        self._ahead_from = np.zeros(max_requests, np.int64)  # the length from which `settle_ahead` is tried

        self.budget = sizes.budget(strides, self.pool.slab_sizes, sum(books.fixed(self).values()))
        headroom = whole_pages(settle_every, recent_tokens + sink_tokens, page_tokens)
        leave_plain = isinstance(amount, float) and self.formats[1].name == "K8V8"
        if leave_plain:
            self.budget = replace(self.budget, ceiling_room=headroom)
        self.policy = Policy(
            policy,
            importance,
            per_head,
            evict,
            recent_tokens,
            sink_tokens,
            hysteresis,
            headroom,
            Prices(self.budget.page_price, page_tokens),
            tuple(format_error(f) for f in self.formats),
            leave_plain=leave_plain,
        )

    # What is there

    def bucket_views(self, layer: int) -> BucketedCacheLayer:
        """The state of a layer as kernels read it; valid until the cache goes, also across growth."""
        self._check_layer(layer)
        self.pool.note_stream()
        return BucketedCacheLayer(
            self.buckets.page_table[:, layer],
            self.buckets.count[:, layer],
            self._device_lengths[:, layer],
            self.centre[:, layer],
            self.pool.pointers,
            self.pool.slabs,
            self.pool.units,
            self.formats,
            self.pool.strides,
            tuple(kind.position_offset for kind in self.page_formats),
            tuple(kind.importance_offset for kind in self.page_formats),
            self.position_dtype,
            None if self.pool.space is None else self.pool.space.bytes,
        )

    def gather(self, layer: int, request: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """``k, v [kv_heads, n, head_dim]`` as attention sees them, in ``dtype``, and int64 positions ``[kv_heads, n]``.

        Sorted by position. Where eviction left heads with different numbers of tokens, n is the largest, and the rest
        is zero with position -1.
        """
        self._check_layer(layer)
        self._check_request(request)
        self.pool.note_stream()
        k, v, positions = read.gather(self, layer, [request])
        return k[0], v[0], positions[0]

    def tier_map(self, layer: int, request: int = 0) -> torch.Tensor:
        """The tier of every token in the order of ``gather``: int64 ``[kv_heads, n]``, -1 for none."""
        return read.tier_map(self, layer, request)

    def importance(self, layer: int, request: int = 0) -> torch.Tensor:
        """The estimated mass per query in the order of ``gather``: float32 ``[kv_heads, n]``, 0 for none."""
        return read.importance(self, layer, request)

    def memory(self) -> Memory:
        """What is allocated, in bytes; never waits for the device."""
        return books.memory(self)

    def check(self) -> None:
        """Assert that owners, counts, positions and bytes agree; reads every page, for tests and debugging."""
        books.check(self)

    # Tokens come and settle

    def add_request(self) -> int:
        """Take an unused request into use, empty; RuntimeError if all ``max_requests`` are in use."""
        request = self._unused_request()
        self._active.add(request)
        return request

    def append(
        self,
        layer: int,
        k: torch.Tensor,
        v: torch.Tensor,
        requests: Sequence[int] | None = None,
        seq_lens: Sequence[int] | None = None,
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
            seq_lens: new tokens of each request, for packed rows of several.
            mass: what the queries of these tokens gave to all positions, the new ones included, as in
                `update_importance`: a prompt that attends before it is stored settles by it at once.
            queries: how many queries of each request are in ``mass``; None is one per token, so that all requests need
                the same number of tokens.

        Raises ValueError, TypeError or BudgetExceeded with nothing changed.
        """
        append_tokens(self, layer, k, v, requests, seq_lens, mass, queries)

    def advance(self, requests: Sequence[int] | None = None) -> None:
        """One more token for each of these requests (None: all in use) in every layer, whose rows `write` brings.

        Room is made first, by settling where it is needed, so that a step with `write` in it can be captured in a
        graph: advance, then replay `DecodePlan.update` and for each layer `write` and `decode_attention`. Until all
        layers are written the new tokens are not defined, and nothing else may be done with the cache: advance all
        requests of a step in one call. To take a step back, write anything and `crop`. Raises BudgetExceeded or
        ValueError with nothing changed.
        """
        advance(self, self._given(requests))

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor, requests: torch.Tensor | None = None) -> None:
        """K and V of the tokens that the last `advance` made room for. One kernel; safe under graph capture.

        Args:
            layer: index.
            k, v: ``[rows, kv_heads, head_dim]`` or ``[rows, 1, kv_heads, head_dim]``.
            requests: int32 ``[rows]`` on the device, whose row each is, read when the kernel runs; negative for
                padding, which rows of requests that were not advanced have to be: they would be written over a token
                of theirs, or of a fork. None is 0, 1, ...
        """
        self._check_layer(layer)
        self.pool.note_stream()
        write(self, layer, k, v, requests)

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
        mass = check_mass(self, mass, len(given), max(ends, default=0))
        if self.policy.name == "importance":
            with self._operation() as change:
                add_mass(self, change, layer, given, mass, queries, ends)

    def settle(self, layer: int | None = None, requests: Sequence[int] | None = None) -> None:
        """Move tokens to the tiers that importance or age ask for now, where the budget is short of headroom.

        ``append`` does so when it must; calling it at a quiet moment makes room ahead of time. None is all.
        """
        if layer is not None:
            self._check_layer(layer)
        scopes = scopes_of(self, self._given(requests))
        with self._operation() as change:
            settle_scopes(self, change, range(self.layers) if layer is None else [layer], scopes)

    def compact(self) -> None:
        """Move pages so that each tier has at most one slab that is not full, and give the others back.

        Happens by itself when the budget needs it; a captured graph stays valid, since it reads the tables.
        """
        self.pool.note_stream()
        room.compact(self, self.pool.workspace())

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        """Tell the cache that ``stream`` uses its pages, as `torch.Tensor.record_stream` does for a tensor.

        Needed for a stream on which only a captured graph is replayed: operations and `bucket_views` note the stream
        they are called on by themselves. What such a stream has queued is safe when the cache gives memory back.
        """
        self.pool.record_stream(stream)

    # Requests

    def fork(self, request: int) -> int:
        """A second request with the same tokens, sharing every page until one of both changes it."""
        self._check_request(request)
        twin = self._unused_request()
        assign(self, {twin: request}, [])
        return twin

    def reorder(self, indices: Sequence[int], requests: Sequence[int] | None = None) -> None:
        """Beams: ``requests[i]`` becomes what ``requests[indices[i]]`` was; None is all in use, ascending."""
        given = self._given(requests)
        if len(indices) != len(given):
            raise ValueError(f"indices: expected {len(given)}, one per request, got {len(indices)}")
        chosen = whole_numbers("indices", indices)
        for index in chosen:
            check_int("indices", index, 0, len(given) - 1)
        assign(self, {given[i]: given[index] for i, index in enumerate(chosen)}, [])

    def select(self, indices: Sequence[int]) -> None:
        """Requests 0, 1, ... become what requests ``indices[0]``, ``indices[1]``, ... were; all others are freed."""
        chosen = whole_numbers("indices", indices)
        for request in chosen:
            self._check_request(request, "indices")
        if len(chosen) > self.max_requests:
            raise ValueError(f"indices: expected at most {self.max_requests}, got {len(chosen)}")
        assign(self, dict(enumerate(chosen)), [r for r in self.requests if r >= len(chosen)])

    def crop(self, request: int, length: int) -> None:
        """Drop all tokens at positions >= ``length``, in every layer and tier (speculative rollback).

        What was quantised stays as it is. Can settle, and raise BudgetExceeded, where a smaller length has a smaller
        budget than the tokens that stay take.
        """
        self._check_request(request)
        check_int("length", length, 0)
        crop_request(self, request, length)

    def free_request(self, request: int) -> None:
        """Forget a request; pages that no fork shares go back."""
        self._check_request(request)
        assign(self, {}, [request])

    def save(self, path: str | PathLike[str], request: int = 0) -> None:
        """Write a request as safetensors: its pages as they are, tables, centres, and the parameters of the cache."""
        from .ops.files import save

        self._check_request(request)
        save(self, path, request)

    def load(self, path: str | PathLike[str]) -> int:
        """Read a request that a cache with the same parameters saved; ValueError for any other file."""
        from .ops.files import load

        return load(self, path)

    def __deepcopy__(self, memo: dict[int, Any]) -> TieredCache:
        """A cache of its own with the same requests; pages that forks share are there once for each."""
        from .ops.clone import clone

        memo[id(self)] = twin = clone(self)
        return twin

    def __reduce__(self) -> tuple[Any, ...]:
        """For pickle, torch.save and copy.copy, which gives a cache of its own: arguments, and what requests hold."""
        from .ops.clone import parts, restored

        return restored, (type(self), self._arguments, parts(self))

    def _operation(self) -> Transaction:
        """All changes of an operation or none; after it the budget holds."""
        return Transaction(self.pool, lambda workspace: room.tidy(self, workspace))
