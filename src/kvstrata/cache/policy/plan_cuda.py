"""The planner as kernels over the pages of a cache (plan.cu, choose.cu): three launches, no waiting."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise, repeat
from pathlib import Path

import numpy as np
import torch

from kvstrata import jit
from kvstrata.cache.move.launches import kernel
from kvstrata.cache.storage.page import PageFormat
from kvstrata.cache.storage.page_table import Buckets
from kvstrata.cache.storage.scratch import Lease
from kvstrata.cache.storage.tokens import Fresh
from kvstrata.layout.format import MAX_TIERS

from .plan import FAIL, POLICIES, Policy
from .reports import Reports

SOURCE, CHOOSE_SOURCE = (Path(__file__).with_name(name) for name in ("plan.cu", "choose.cu"))
THREADS = 512
TOGETHER = 1 << 25  # maximum number of tokens whose keys, 4 bytes each, are held at a time
NEARBY = 96 * 1024  # maximum bytes of keys bisected in shared memory, so that two blocks fit a multiprocessor
POINTERS = (
    "table", "count", "pointers", "places", "reports", "fresh", "mass", "begin", "scopes", "allowed", "key", "target",
    "starts", "survey", "merged", "share", "kind", "needed",
)  # fmt: skip
PARAMS = struct.Struct(f"{len(POINTERS)}Q {MAX_TIERS}q {MAX_TIERS}f {3 * MAX_TIERS}i 3f 18i 4x")
OFFSETS = {name: 8 * i for i, name in enumerate(POINTERS)}  # of the pointers in the struct
ADDRESSES, SIZES, WIDTH = struct.Struct(f"{len(POINTERS)}Q"), struct.Struct("2i"), struct.Struct("i")
SIZES_OFFSET = struct.calcsize(f"{len(POINTERS)}Q {MAX_TIERS}q {MAX_TIERS}f {3 * MAX_TIERS}i 3f")  # places, scopes
WIDTH_OFFSET, HEADROOM_OFFSET = SIZES_OFFSET + 8 * 4, SIZES_OFFSET + 17 * 4


@dataclass(frozen=True)
class DevicePlan:
    """A plan whose kernels are queued.

    ``target`` int8 ``[n]``: tokens of a head cache contiguous, tier by tier, slot by slot, then new ones. ``starts``
    int64 ``[head_caches * tiers]``: start of each bucket in it. ``results`` is one buffer: ``needed`` int64
    ``[scopes]`` and ``kind`` int32 ``[scopes, 2]`` as in `plan.Split`, then ``numbers`` int32 ``[3, buckets]``, filled
    when moves are counted (moves_cuda.py). ``places`` and ``fresh``: addresses of uploaded arrays. ``launches`` and
    their ``params`` can plan again; no params if there are several chunks.
    """

    target: torch.Tensor
    starts: torch.Tensor
    results: torch.Tensor
    scopes: int
    places: int
    fresh: int
    lease: Lease
    uploaded: torch.Tensor
    launches: tuple[jit.Launch, ...]
    params: bytearray | None

    @property
    def needed(self) -> torch.Tensor:
        return self.results[: 8 * self.scopes].view(torch.int64)

    @property
    def kind(self) -> torch.Tensor:
        return self.results[8 * self.scopes : 16 * self.scopes].view(torch.int32).view(-1, 2)

    @property
    def numbers(self) -> int:
        """Address of the part of ``results`` that counting moves fills."""
        return self.results.data_ptr() + 16 * self.scopes

    def read(self, results: np.ndarray) -> tuple[list[int | None], list[int], np.ndarray]:
        """``needed`` and ``spare`` of `plan.Plans`, and ``numbers``, from a host copy of ``results``."""
        needed, rest = results[: 8 * self.scopes].view(np.int64).tolist(), results[8 * self.scopes :].view(np.int32)
        kind = rest[: 2 * self.scopes].reshape(-1, 2).tolist()
        numbers = rest[2 * self.scopes :].reshape(3, -1).astype(np.int64)
        return (
            [n if one == FAIL else None for (one, _), n in zip(kind, needed, strict=True)],
            [n for _, n in kind],
            numbers,
        )


@lru_cache(maxsize=64)
def entry_of(name: str, plain: PageFormat, near: bool = False) -> str:
    """Template instance of a kernel; ``near``: keys are bisected in shared memory."""
    if name == "split":
        return "split<>"
    position = "short" if plain.position_dtype == torch.int16 else "int"
    flags = [plain.keeps_importance, *([near] if name == "choose" else [])]
    return f"{name}<{position}, {', '.join(str(flag).lower() for flag in flags)}>"


def kernels_needed(plain: PageFormat, policy: Policy, max_tokens: int) -> list[jit.Named]:
    """Kernels of the planner under a policy, for requests of up to ``max_tokens`` tokens."""
    names = ["survey", "split", *["merge"] * (policy.name == "importance" and not policy.per_head)]
    near = [True, *[False] * (4 * max_tokens > NEARBY)]
    choose = [(CHOOSE_SOURCE, entry_of("choose", plain, flag)) for flag in near]
    return [*choose, *((SOURCE, entry_of(name, plain)) for name in names)]


def plan_places(
    buckets: Buckets,
    policy: Policy,
    places: np.ndarray,
    lengths: np.ndarray,
    reports: Reports,
    scopes: Sequence[int] | np.ndarray,
    allowed: Sequence[int] | np.ndarray,
    headroom: int,
    fresh: Fresh | None = None,
    unwritten: np.ndarray | None = None,
) -> DevicePlan:
    """Targets for all tokens of places, planned scope by scope.

    Args:
        buckets: pages and tables.
        policy: policy of the cache.
        places: int ``[places]``, request * layers + layer.
        lengths: int ``[places]``, including new tokens.
        reports: reports of the cache; read when the kernels run.
        scopes: number of places in each scope, one or more.
        allowed: bytes of each scope.
        headroom: plain tokens per head cache to leave room for.
        fresh: new tokens.
        unwritten: int ``[places]``, 1 if the last plain token is counted but not in its page yet.
    """
    device, heads, tiers = buckets.device, buckets.kv_heads, len(buckets.page_formats)
    layers = buckets.page_table.shape[1]
    head_caches, width = len(places) * heads, int(lengths.max(initial=1))
    counts = buckets.host_count[places // layers, places % layers].sum(2, dtype=np.int64).reshape(-1)
    if fresh is not None:
        counts = counts + np.repeat(fresh.counts, heads)
    begin = np.cumsum(counts) - counts
    n, ends = int(counts.sum()), np.concatenate([[0], np.cumsum(scopes)])
    chunks = [(0, len(scopes))]
    if n > TOGETHER:
        chunks = _chunks(np.add.reduceat(counts.reshape(-1, heads).sum(1), ends[:-1]))
    listed = np.zeros((3, len(places)), np.int32)
    listed[0], listed[1] = places, lengths
    if unwritten is not None:
        listed[2] = unwritten
    arrays: dict[str, np.ndarray] = {
        "places": listed,
        "begin": begin,
        "allowed": np.array(allowed, np.int64),
    }
    arrays |= {
        f"scopes{i}": (ends[first : end + 1] - ends[first]).astype(np.int32) for i, (first, end) in enumerate(chunks)
    }
    if fresh is not None:
        arrays["fresh"] = fresh.packed()
    addresses, uploaded = upload(buckets, arrays)
    lease = buckets.arena.lease()
    bounds = [(int(ends[first]), int(ends[end])) for first, end in chunks]  # places of each chunk
    firsts = [int(begin[first * heads]) for first, _ in bounds] + [n]
    most = max(b - a for a, b in pairwise(firsts))
    target = lease.take("target", n, torch.int8)
    starts = lease.take("starts", head_caches * tiers, torch.int64)
    results = lease.take("results", 16 * len(allowed) + 12 * head_caches * tiers)
    key = lease.take("key", most, torch.int32).data_ptr()
    survey = lease.take("survey", head_caches * 2 * tiers, torch.int32).data_ptr()
    share = lease.take("share", head_caches, torch.int64).data_ptr()
    together = policy.name == "importance" and not policy.per_head
    merged = lease.take("merged", len(places) * width, torch.float32).data_ptr() if together else 0
    longest = 4 * int(counts.max(initial=0))
    nearby = longest if longest <= NEARBY else 0
    index, launched = device.index or 0, []
    with jit.use_device(index):
        stream = jit.current_stream(index)
        for i, ((scope, scope_end), (place, place_end)) in enumerate(zip(chunks, bounds, strict=True)):
            head_cache, many = place * heads, (place_end - place) * heads
            where = {
                "table": buckets.page_table.data_ptr(), "count": buckets.count.data_ptr(),
                "pointers": buckets.pool.pointers.data_ptr(), "reports": reports.numbers.data_ptr(),
                "places": addresses["places"] + 4 * place,
                "begin": addresses["begin"] + 8 * head_cache, "scopes": addresses[f"scopes{i}"],
                "allowed": addresses["allowed"] + 8 * scope, "key": key - 4 * firsts[i], "target": target.data_ptr(),
                "starts": starts.data_ptr() + 8 * head_cache * tiers, "survey": survey + 8 * head_cache * tiers,
                "merged": merged and merged + 4 * place * width, "share": share + 8 * head_cache,
                "needed": results.data_ptr() + 8 * scope, "kind": results.data_ptr() + 8 * (len(allowed) + scope),
            }  # fmt: skip
            if fresh is not None:
                where["fresh"] = addresses["fresh"] + 4 * place
                if fresh.importance is not None:
                    where["mass"] = fresh.importance.data_ptr()
            params = _params(buckets, policy, where, len(places), scope_end - scope, width, headroom)
            launches = [("survey", many, THREADS, 0), ("split", scope_end - scope, 32, 0)]
            if together:
                launches.insert(1, ("merge", place_end - place, THREADS, 0))
            launches.append(("choose", many, THREADS, nearby))
            for name, grid, block, shared in launches:
                entry = entry_of(name, buckets.page_formats[0], nearby > 0)
                source = CHOOSE_SOURCE if name == "choose" else SOURCE
                launched.append(jit.Launch(kernel(source, entry, index), grid, block, params, shared=shared))
                launched[-1](stream)
    return DevicePlan(
        target, starts, results, len(allowed), addresses["places"], addresses.get("fresh", 0), lease, uploaded,
        tuple(launched), params if len(chunks) == 1 else None,
    )  # fmt: skip


def _chunks(tokens: np.ndarray) -> list[tuple[int, int]]:
    """First and end of runs of scopes, each of up to `TOGETHER` tokens: keys of one run are held at a time."""
    chunks, first, total = [], 0, 0
    for scope, n in enumerate(tokens.tolist()):
        if scope > first and total + n > TOGETHER:
            chunks.append((first, scope))
            first, total = scope, 0
        total += n
    return [*chunks, (first, len(tokens))]


def upload(buckets: Buckets, arrays: dict[str, np.ndarray]) -> tuple[dict[str, int], torch.Tensor]:
    """Copy arrays to the device in one transfer; returns their addresses and the buffer that holds them."""
    sizes = [-(-x.nbytes // 8) * 8 for x in arrays.values()]
    whole, first = np.zeros(sum(sizes), np.uint8), np.cumsum([0, *sizes])
    for x, offset in zip(arrays.values(), first, strict=False):
        whole[offset : offset + x.nbytes] = np.ascontiguousarray(x).reshape(-1).view(np.uint8)
    buffer = buckets.pool.to_device(whole)
    return {name: buffer.data_ptr() + int(offset) for name, offset in zip(arrays, first, strict=False)}, buffer


def _params(
    buckets: Buckets,
    policy: Policy,
    addresses: dict[str, int],
    places: int,
    scopes: int,
    width: int,
    headroom: int,
) -> bytearray:
    kept = buckets.plan_params
    if kept is None or kept[0] is not policy:
        kept = buckets.plan_params = (policy, _template(buckets, policy))
    params = bytearray(kept[1])
    ADDRESSES.pack_into(params, 0, *map(addresses.get, POINTERS, repeat(0)))
    SIZES.pack_into(params, SIZES_OFFSET, places, scopes)
    WIDTH.pack_into(params, WIDTH_OFFSET, width)
    WIDTH.pack_into(params, HEADROOM_OFFSET, headroom)
    return params


def _template(buckets: Buckets, policy: Policy) -> bytes:
    """Parameters of a cache, without the addresses and sizes of a plan."""
    page_formats, (ladder, slopes) = buckets.page_formats, policy.ladder
    tiers, max_pages = len(page_formats), buckets.max_pages

    def padded(values: Sequence[float]) -> list[float]:
        return [*values, *[0] * (MAX_TIERS - len(values))]

    return PARAMS.pack(
        *[0] * len(POINTERS), *padded(policy.prices.page), *padded(slopes), *padded(ladder),
        *padded([kind.position_offset for kind in page_formats]),
        *padded([kind.importance_offset for kind in page_formats]), policy.steepest, 1.0 + policy.hysteresis,
        policy.floor, 0, 0, buckets.kv_heads, tiers, len(slopes), max_pages, buckets.pool.units,
        buckets.page_tokens.bit_length() - 1, 0, POLICIES.index(policy.name), policy.mode == "ema",
        policy.leave_plain, policy.per_head, policy.fills, policy.evict, policy.sink_tokens, policy.recent_tokens, 0,
    )  # fmt: skip
