"""``TieredCache``: K and V of many requests in tiers of decreasing precision, under a byte budget.

    append ──▶ fits? ──yes──▶ 16-bit bucket
                 └──no──▶ plan (policy/plan.py) ──▶ move (storage/page_table.py): rows and tokens to their tiers

The class creates the state (state.py) and offers the operations; those on whole requests come from its base class
(request_operations.py). Each operation has its own file:

    policy/  sizes.py: pages, slabs and budget from the arguments; room.py: whether tokens fit; scopes.py: the parts
             that are settled together; mass.py: attention mass to importance
    ops/     append.py, step.py (the token of a captured step), crop.py, fork.py, files.py, inspect.py, books.py (bytes
             allocated and invariants)
    storage/ transaction.py: an operation takes effect completely or not at all

Every operation plans first, allocates the pages it needs and changes state only once nothing can fail any more. State
that kernels read is in device tensors at fixed addresses (`bucket_views`); the host keeps page lists, counts and page
refcounts, never tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from kvstrata.checks import check_device, check_int, check_names, check_number, check_rope, check_tiers, whole_numbers
from kvstrata.quant.calibration import Calibration

from .ops import books
from .ops import inspect as read
from .ops.append import append_tokens
from .ops.arguments import check_mass
from .ops.step import advance, write
from .policy import room
from .policy.balance import set_balance
from .policy.budget import DEFAULT, Memory, check_budget, default_tiers
from .policy.calibrated import calibrated
from .policy.importance import MODES
from .policy.mass import add_mass
from .policy.plan import POLICIES, Policy, whole_pages
from .policy.prices import Prices, format_error
from .policy.reports import Reports
from .policy.scopes import scopes_of, settle_scopes
from .policy.shares import check_sensitivity, shares_of
from .policy.sizes import Sizes
from .request_operations import RequestOperations
from .storage.page_table import Buckets
from .storage.pool import Pool
from .storage.scratch import register
from .storage.transaction import Transaction
from .storage.views import BucketedCacheLayer

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class TieredCache(RequestOperations):
    """K and V of up to ``max_requests`` requests, compressed token by token so that a byte budget holds at all times.

    Args:
        layers, kv_heads, head_dim: sizes of the model; ``head_dim`` is a multiple of 16 from 32 to 256.
        budget: fraction of the bytes that the tokens held would take at ``dtype``, for each request and layer
            separately (short contexts have a floor, see docs/cache.md). 1.0 compresses nothing, None is no limit. Once
            everything is at K8V8, the rest of a fraction stays unused.
        budget_bytes: bytes for the whole cache, instead of ``budget``.
        tiers: format names for older tokens, widest first; None chooses by budget (`budget.default_tiers`).
        recent_tokens, sink_tokens: number of last and of first tokens that are kept at ``dtype``.
        dtype, device: dtype and device of the model's K and V.
        max_requests, max_tokens: sizes of the tables. Positions take 2 bytes up to 32768 ``max_tokens``, else 4.
        page_tokens: 64, 32 or 16; short contexts benefit from small pages.
        policy: ``importance`` (least expected error by attention mass), ``recency`` or ``uniform``.
        per_head: True lets each KV head choose its own tokens; False makes all heads of a layer choose the same ones.
        evict: drop the least important tokens if the narrowest tier does not fit, instead of raising `BudgetExceeded`.
        settle_every: tokens of room to make when settling is needed, if possible. Adjusted from half to twice as many
            so that sink tokens, recent tokens and room fill whole pages.
        hysteresis: extra weight of a token that is already quantised when tiers are chosen.
        importance: ``mean`` (mass per query so far) or ``ema`` with ``decay``.
        decay: decay of the moving average per query, in [0, 1).
        rope: RoPE angle of each channel pair per position, in radians (a model's ``inv_freq``); it lets the centre of
            K anticipate longer contexts (docs/formats.md). None if K is not rotated.
        interleaved: True if RoPE pairs channels (2i, 2i + 1), False for (i, i + n); None recognises it by the rows.
        calibration: balance, centres and mean queries (`kvstrata calibrate`), instead of estimates from requests;
            a token's codes then depend only on its own row and the tiers it has passed through, not on the rest of the
            request or batch.
        sensitivity: one number per layer, the relative cost of rounding its K and V; layers with a higher one get more
            of a fraction's bytes, with the same total (docs/cache.md). None treats all layers alike.
        balance: True allows `set_balance` to give each request its own balance; implied by a calibration with one
            or with a mean query.
        debug: poison freed pages.
        slab_bytes: maximum bytes of one allocation, at least a page of ``dtype``; None chooses.

    Operations modify the cache in place. If one raises, also for lack of memory, the cache is unchanged. None is safe
    under CUDA-graph capture, except for `write` and kernels that read `bucket_views`. Streams: see docs/cache.md.

    Raises ValueError, TypeError or RuntimeError (no such device), naming the argument.

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
        interleaved: bool | None = None,
        calibration: Calibration | None = None,
        sensitivity: Sequence[float] | None = None,
        balance: bool = False,
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
        self.max_tokens = check_int("max_tokens", max_tokens, 1, 2**31 - 1)  # positions are int32
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
        for name, flag in (("per_head", per_head), ("evict", evict), ("debug", debug), ("balance", balance)):
            if not isinstance(flag, bool):
                raise TypeError(f"{name}: expected True or False, got {flag!r}")
        self.dtype, self.device = dtype, check_device(device)
        if self.device.type == "cuda" and not torch.cuda.is_available():
            raise RuntimeError(f"device: expected one that torch sees, got {self.device}, and it sees no CUDA device")
        if self.device.type == "cuda":
            self.device = torch.empty(0, device=self.device).device  # with its index
        self.decay, self.debug = decay, debug
        self.rope = self._arguments["rope"] = check_rope(rope, head_dim)
        self.set_interleaved(interleaved)
        if calibration is not None:
            if not isinstance(calibration, Calibration):
                raise TypeError(f"calibration: expected a Calibration, got {type(calibration).__name__}")
            calibration.check(layers, kv_heads, head_dim)
        sensitivity = self._arguments["sensitivity"] = check_sensitivity(sensitivity, layers)
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
        sizes.check_tables(len(self.formats))

        with torch.inference_mode(False):  # the tensors are written later, also outside inference mode
            strides = [kind.stride for kind in self.page_formats]
            slab, capacity = sizes.slabs(strides[0], len(strides))
            self.pool = Pool(strides, slab, capacity, self.device, debug)
            self.buckets = Buckets(self.pool, self.page_formats, max_requests, layers, kv_heads, sizes.max_pages)
            shape = (layers, kv_heads, head_dim)
            self._calibrated = calibrated(calibration, shape, self.device, balance, self.formats)
            first, *each = self._calibrated.centre, max_requests, 1, 1, 1
            self.centre = first.repeat(each)
            own = self._calibrated.balance
            self.balance = None if own is None else own.repeat(each)
            own = self._calibrated.direction
            self.direction = None if own is None else own.repeat(each)
            lengths = torch.zeros(max_requests, layers, dtype=torch.int32, device="cpu")
            self._lengths, self._device_lengths = lengths.numpy(), lengths.to(self.device)
            self.reports = Reports(max_requests, layers, self.device)
        register(self, self.buckets.arena)
        self._centred = np.tile(self._calibrated.centred, (max_requests, 1))
        self._active = frozenset()
        self._views: dict[int, BucketedCacheLayer] = {}  # by layer
        self._ahead_from = np.zeros(max_requests, np.int64)  # length from which `settle_ahead` is tried
        self._ahead, self._due, self._prompt = [], None, None

        self.budget = sizes.budget(strides, self.pool.slab_sizes, sum(books.fixed(self).values()))
        headroom = whole_pages(min(settle_every, max_tokens), recent_tokens + sink_tokens, page_tokens)
        leave_plain = isinstance(amount, float) and self.formats[1].name == "K8V8"
        self.budget = replace(self.budget, look_ahead=headroom)
        if leave_plain:
            self.budget = replace(self.budget, ceiling_room=headroom)
        elif sensitivity is not None and isinstance(amount, float):
            self.budget = replace(self.budget, shares=shares_of(self.budget, sensitivity, head_dim))
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

    # Reading

    def bucket_views(self, layer: int) -> BucketedCacheLayer:
        """State of a layer as kernels read it: views, valid for the lifetime of the cache, also when it grows.

        Safe to read under CUDA-graph capture. Raises ValueError for a layer that does not exist.
        """
        self._check_layer(layer)
        self.pool.note_stream()
        if layer not in self._views:
            with torch.inference_mode(False):  # the caller may be in inference mode
                self._views[layer] = self._view(layer)
        return self._views[layer]

    def _view(self, layer: int) -> BucketedCacheLayer:
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
            None if self.balance is None else self.balance[:, layer],
            None if self.pool.space is None else self.pool.space.bytes,
        )

    def gather(self, layer: int, request: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Dequantise the tokens of a request: K and V as attention sees them, sorted by position.

        Returns ``k, v [kv_heads, n, head_dim]`` in ``dtype`` and int64 positions ``[kv_heads, n]``. If eviction left
        heads with different numbers of tokens, n is the largest; the rest is zero, with position -1. Raises ValueError
        for a layer or request that does not exist.
        """
        self._check_layer(layer)
        self._check_request(request)
        self.pool.note_stream()
        k, v, positions = read.gather(self, layer, [request])
        return k[0], v[0], positions[0]

    def tier_map(self, layer: int, request: int = 0) -> torch.Tensor:
        """Tier of every token in the order of `gather`: int64 ``[kv_heads, n]``, -1 for none. Raises as `gather`."""
        return read.tier_map(self, layer, request)

    def importance(self, layer: int, request: int = 0) -> torch.Tensor:
        """Mass per query in the order of `gather`: float32 ``[kv_heads, n]``, 0 for none. Raises as `gather`."""
        return read.importance(self, layer, request)

    def memory(self) -> Memory:
        """Bytes allocated, by purpose and by tier; does not synchronise with the device."""
        return books.memory(self)

    def check(self) -> None:
        """Assert that refcounts, counts, positions and bytes agree; reads every page, for tests and debugging."""
        books.check(self)

    # Writing and settling

    def set_interleaved(self, interleaved: bool | None) -> None:
        """Set how RoPE pairs channels, as the argument ``interleaved`` does; for centres that are not fixed yet.

        Raises ValueError for anything but True, False and None.
        """
        if interleaved is not None and type(interleaved) is not bool:
            raise ValueError(f"interleaved: expected True, False or None, got {interleaved!r}")
        self.interleaved = self._arguments["interleaved"] = interleaved

    def set_balance(
        self,
        layer: int,
        balance: torch.Tensor,
        requests: Sequence[int] | None = None,
        *,
        query: torch.Tensor | None = None,
    ) -> None:
        """Set the balance of requests that have no tokens in a layer yet (`kvstrata.quant.calibration.pair_balance`).

        Args:
            layer: index of the layer.
            balance: float32 ``[kv_heads, head_dim]`` or ``[requests, kv_heads, head_dim]``, powers of two from 1 / 256
                to 256. K of the requests is divided by it, and queries are multiplied by it.
            requests: any below ``max_requests``, in use or not; None is all in use. A request keeps its balance until
                it is freed or cropped to length 0.
            query: mean query of each KV head, float32 of the same shape as ``balance`` and not multiplied by it. K of
                less than 8 bits is rounded so that its error has hardly a component along it. None, zeros, and numbers
                that are not finite round each value to the nearest code.

        Raises ValueError or TypeError, naming the argument. Not safe under CUDA-graph capture.
        """
        self._check_layer(layer)
        given = list(self.requests) if requests is None else whole_numbers("requests", requests)
        for request in given:
            check_int("requests", request, 0, self.max_requests - 1)
        set_balance(self, layer, balance, given, query)

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
        """Add tokens to a layer, settling it first if they do not fit.

        Args:
            layer: index of the layer.
            k, v: ``[tokens, kv_heads, head_dim]``, packed request after request, or
                ``[requests, tokens, kv_heads, head_dim]``; in the cache's dtype and on its device. Not modified.
            requests: request of each row; None is 0, 1, ... A request that is not in use yet is put into use.
            seq_lens: new tokens of each request, for packed rows of several requests.
            mass: attention mass that the queries of these tokens gave to all positions, including the new ones, as in
                `update_importance`. A prompt that attends before it is stored settles by it at once.
            queries: number of queries of each request that ``mass`` sums over; None is one per token, which requires
                the same number of tokens in all requests.

        Raises ValueError, TypeError or BudgetExceeded, and leaves the cache unchanged. Not safe under CUDA-graph
        capture: see `advance` and `write`.
        """
        append_tokens(self, layer, k, v, requests, seq_lens, mass, queries)

    def advance(self, requests: Sequence[int] | None = None) -> None:
        """Make room for one more token of each request (None: all in use) in every layer; `write` fills it.

        Settles where needed, on the host, so that the rest of a step can be captured in a CUDA graph: call advance,
        then replay `DecodePlan.update` and, for each layer, `write` and `decode_attention`. Advance all requests of a
        step in one call. Until all layers are written, the new tokens are undefined and no other operation may run. To
        undo a step, write anything and `crop`. Raises BudgetExceeded or ValueError, and leaves the cache unchanged.
        """
        advance(self, self._given(requests))

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor, requests: torch.Tensor | None = None) -> None:
        """Write K and V of the tokens that the last `advance` made room for: one kernel, safe under CUDA-graph capture.

        Args:
            layer: index of the layer.
            k, v: ``[rows, kv_heads, head_dim]`` or ``[rows, 1, kv_heads, head_dim]``.
            requests: int32 ``[rows]`` on the device, the request of each row, read when the kernel runs; negative for
                padding. Rows of requests that were not advanced must be padding: they would overwrite an existing
                token of the request or of a fork. None is 0, 1, ...

        Raises ValueError or TypeError, naming the argument; the values of ``requests`` are not checked.
        """
        self._check_layer(layer)
        self.pool.note_stream()
        write(self, layer, k, v, requests)

    def update_importance(
        self, layer: int, mass: torch.Tensor, requests: Sequence[int] | None = None, queries: int = 1
    ) -> None:
        """Add the attention mass that tokens received to their importance.

        Args:
            layer: index of the layer.
            mass: ``[requests, kv_heads, positions]``, by position, summed over the query heads of a KV head and over
                ``queries`` queries; at least as many positions as the longest request has tokens. Not modified.
                Negative and non-finite values count as 0.
            requests: request of each row; None is all in use, ascending.
            queries: number of queries of each request that ``mass`` sums over.

        Does nothing if the policy does not use importance. Raises ValueError or TypeError, naming the argument.
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
        """Move tokens to the tiers that the policy assigns now, where the budget has little room left.

        `append` settles when it must; a call at an idle moment makes room ahead of time. None means all layers or all
        requests. Raises BudgetExceeded or ValueError, and leaves the cache unchanged.
        """
        if layer is not None:
            self._check_layer(layer)
        scopes = scopes_of(self, self._given(requests))
        self._forget([request for scope in scopes for request in scope])
        with self._operation() as change:
            settle_scopes(self, change, range(self.layers) if layer is None else [layer], scopes)

    def compact(self) -> None:
        """Move pages so that each tier has at most one partly filled slab, and free the empty ones.

        Runs automatically when the budget needs it. A captured graph stays valid, since it reads the page tables.
        """
        self.pool.note_stream()
        room.compact(self, self.pool.workspace())

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        """Tell the cache that ``stream`` uses its pages, as `torch.Tensor.record_stream` does for a tensor.

        Needed for a stream that only replays a captured graph; operations and `bucket_views` record the stream they are
        called on. Memory is not reused before the work queued on recorded streams is done. Raises AttributeError for
        anything but a stream.
        """
        self.pool.record_stream(stream)

    def _operation(self) -> Transaction:
        """Transaction of one operation: all of its changes or none; the budget holds afterwards."""
        self._due = None
        return Transaction(self.pool, lambda workspace: room.tidy(self, workspace))
