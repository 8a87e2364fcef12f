"""The planner as kernels over the pages of a cache (plan.cu): three launches, and nothing for the host to wait for."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from kvstrata import jit
from kvstrata.cache.move.launches import kernel
from kvstrata.cache.storage.page import PageFormat
from kvstrata.cache.storage.page_table import Buckets
from kvstrata.cache.storage.tokens import Fresh
from kvstrata.layout.format import MAX_TIERS

from .plan import FAIL, POLICIES, Policy

SOURCE = Path(__file__).with_name("plan.cu")
THREADS = 512
NEARBY = 96 * 1024  # bytes of keys that are bisected in shared memory, so that two blocks fit a multiprocessor
POINTERS = (
    "table", "count", "pointers", "places", "fresh", "mass", "begin", "scopes", "allowed", "key", "target", "starts",
    "survey", "merged", "share", "kind", "needed",
)  # fmt: skip
PARAMS = struct.Struct(f"{len(POINTERS)}Q {MAX_TIERS}q {MAX_TIERS}f {3 * MAX_TIERS}i 3f 19i")


@dataclass(frozen=True)
class DevicePlan:
    """A plan whose kernels are queued.

    ``target`` int8 ``[n]``: tokens of a head cache one after the other, tier by tier, slot by slot, then new ones.
    ``starts`` int64 ``[head_caches * tiers]``: where each bucket begins in it. ``kind`` int32 ``[scopes, 2]`` and
    ``needed`` int64 ``[scopes]`` are what `plan.Split` has.
    """

    target: torch.Tensor
    starts: torch.Tensor
    kind: torch.Tensor
    needed: torch.Tensor

    def outcome(self) -> tuple[list[int | None], list[int]]:
        """``needed`` and ``spare`` of `plan.Plans`; waits for the device."""
        kind, needed = self.kind.tolist(), self.needed.tolist()
        return [n if one == FAIL else None for (one, _), n in zip(kind, needed, strict=True)], [n for _, n in kind]


def entry_of(name: str, plain: PageFormat) -> str:
    if name == "split":
        return "split<>"
    position = "short" if plain.position_dtype == torch.int16 else "int"
    return f"{name}<{position}, {str(plain.keeps_importance).lower()}>"


def kernels_needed(plain: PageFormat, policy: Policy) -> list[jit.Named]:
    """Kernels of the planner under a policy."""
    names = ["survey", "split", "choose", *["merge"] * (policy.name == "importance" and not policy.per_head)]
    return [(SOURCE, entry_of(name, plain)) for name in names]


def plan_places(
    buckets: Buckets,
    policy: Policy,
    places: np.ndarray,
    numbers: np.ndarray,
    scopes: Sequence[int],
    allowed: Sequence[int],
    headroom: int,
    fresh: Fresh | None = None,
) -> DevicePlan:
    """Targets for all tokens of places, which are planned scope by scope.

    Args:
        buckets: the pages and tables.
        policy: of the cache.
        places: int ``[places]``, request * layers + layer.
        numbers: int ``[3, places]``: lengths with new tokens, queries, and lengths when mass was reported.
        scopes: places of each scope, one or more.
        allowed: bytes of each scope.
        headroom: room for so many more plain tokens of each head cache.
        fresh: new tokens.
    """
    device, heads, tiers = buckets.device, buckets.kv_heads, len(buckets.page_formats)
    layers = buckets.page_table.shape[1]
    head_caches, width = len(places) * heads, int(numbers[0].max(initial=1))
    counts = buckets.host_count[places // layers, places % layers].sum(2, dtype=np.int64).reshape(-1)
    if fresh is not None:
        counts = counts + np.repeat(fresh.counts, heads)
    begin = np.cumsum(counts) - counts
    n = int(counts.sum())
    small = np.minimum(numbers, np.iinfo(np.int32).max)
    arrays: dict[str, np.ndarray] = {
        "places": np.concatenate([places[None], small]).astype(np.int32),
        "begin": begin,
        "scopes": np.cumsum([0, *scopes]).astype(np.int32),
        "allowed": np.array(allowed, np.int64),
    }
    if fresh is not None:
        arrays["fresh"] = fresh.packed()
    addresses, kept = _upload(buckets, arrays)
    tensors = {
        "table": buckets.page_table, "count": buckets.count, "pointers": buckets.pool.pointers,
        "key": torch.empty(n, dtype=torch.int32, device=device),
        "target": torch.empty(n, dtype=torch.int8, device=device),
        "starts": torch.empty(head_caches * tiers, dtype=torch.int64, device=device),
        "survey": torch.empty(head_caches, 2, tiers, dtype=torch.int32, device=device),
        "share": torch.empty(head_caches, dtype=torch.int64, device=device),
        "kind": torch.empty(len(allowed), 2, dtype=torch.int32, device=device),
        "needed": torch.empty(len(allowed), dtype=torch.int64, device=device),
    }  # fmt: skip
    together = policy.name == "importance" and not policy.per_head
    if together:
        tensors["merged"] = torch.empty(len(places), width, dtype=torch.float32, device=device)
    if fresh is not None and fresh.importance is not None:
        tensors["mass"] = fresh.importance
    addresses |= {name: x.data_ptr() for name, x in tensors.items()}
    longest = 4 * int(counts.max(initial=0))
    nearby = longest if longest <= NEARBY else 0
    params = _params(buckets, policy, addresses, len(places), len(allowed), width, headroom, nearby > 0)
    launches = [("survey", head_caches, THREADS, 0), ("split", len(allowed), 32, 0)]
    if together:
        launches.insert(1, ("merge", len(places), THREADS, 0))
    launches.append(("choose", head_caches, THREADS, nearby))
    index = device.index or 0
    with torch.cuda.device(index):
        jit.bind_context(index)
        for name, grid, block, shared in launches:
            entry = entry_of(name, buckets.page_formats[0])
            jit.Launch(kernel(SOURCE, entry, index), grid, block, params, shared=shared)(jit.current_stream(index))
    del kept  # the allocator gives it to later work of this stream only
    return DevicePlan(tensors["target"], tensors["starts"], tensors["kind"], tensors["needed"])


def _upload(buckets: Buckets, arrays: dict[str, np.ndarray]) -> tuple[dict[str, int], torch.Tensor]:
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
    shared: bool,
) -> bytes:
    page_formats, (ladder, slopes) = buckets.page_formats, policy.ladder
    tiers, max_pages = len(page_formats), buckets.max_pages

    def padded(values: Sequence[float]) -> list[float]:
        return [*values, *[0] * (MAX_TIERS - len(values))]

    return PARAMS.pack(
        *(addresses.get(name, 0) for name in POINTERS), *padded(policy.prices.page), *padded(slopes), *padded(ladder),
        *padded([kind.position_offset for kind in page_formats]),
        *padded([kind.importance_offset for kind in page_formats]), policy.steepest, 1.0 + policy.hysteresis,
        policy.floor, places, scopes, buckets.kv_heads, tiers, len(slopes), max_pages, buckets.pool.units,
        buckets.page_tokens.bit_length() - 1, width, POLICIES.index(policy.name), policy.mode == "ema",
        policy.leave_plain, policy.per_head, policy.fills, policy.evict, policy.sink_tokens, policy.recent_tokens,
        headroom, shared,
    )  # fmt: skip
