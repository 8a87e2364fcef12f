"""A compressed request as a safetensors file: no pickle, versioned, validated before anything is read into a cache.

    pages.<tier>       uint8   [pages, page_bytes]    by layer, KV head, index; slots without a token are zero
    position.<tier>    int32   [pages, P]
    importance.<tier>  float32 [pages, P]
    count              int32   [layers, kv_heads, tiers]
    length, queries, reported  int64 [layers]
    centre             float32 [layers, kv_heads, head_dim]
    centred            uint8   [layers]
    balance            int8    [layers, kv_heads, head_dim]  powers of two; missing: all 0
    direction          int8    [layers, kv_heads, head_dim]  of the error of K; missing: all 0
    ahead_from         int64   [1]                    may be missing: the length to settle ahead from

The metadata holds the version, the parameters of the cache and a digest of all tensors. Parameters that determine the
meaning of the bytes must be the same in the cache that loads. The digest detects damage; whatever a malicious file
could still contain (counts, positions, scales out of range) is checked tensor by tensor.
"""

from __future__ import annotations

import hashlib
import json
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from kvstrata.cache.policy.reports import MOST
from kvstrata.cache.policy.room import fits_plain
from kvstrata.cache.policy.scopes import move_tokens, pairs, plan_scopes, scopes_of
from kvstrata.quant.reference import DIRECTION_MOST

if TYPE_CHECKING:
    from kvstrata.cache.state import CacheState
    from kvstrata.cache.storage.transaction import Transaction

KIND = "kvstrata.cache"
VERSION = 1


def _meaning(cache: CacheState) -> dict[str, Any]:
    """Parameters that must be equal in the file and in the cache that reads it."""
    return {
        "layers": cache.layers,
        "kv_heads": cache.kv_heads,
        "head_dim": cache.head_dim,
        "page_tokens": cache.page_tokens,
        "dtype": str(cache.dtype),
        "tiers": [f.name for f in cache.formats],
        "rotate": [f.rotate for f in cache.formats],
        "centre": [f.centre for f in cache.formats],
        "importance": cache.policy.mode if cache.policy.name == "importance" else None,
    }


def _settings(cache: CacheState) -> dict[str, Any]:
    """Parameters that are recorded but may differ when a file is read."""
    return {
        "policy": cache.policy.name,
        "per_head": cache.policy.per_head,
        "recent_tokens": cache.recent_tokens,
        "sink_tokens": cache.sink_tokens,
        "budget": cache._arguments["budget"],
        "budget_bytes": cache._arguments["budget_bytes"],
        "max_tokens": cache.max_tokens,
        "max_requests": cache.max_requests,
        "evict": cache.policy.evict,
        "settle_every": cache.policy.settle_every,
        "hysteresis": cache.policy.hysteresis,
        "decay": cache.decay,
        "rope": cache.rope,
        "interleaved": cache.interleaved,
        "sensitivity": cache._arguments["sensitivity"],
    }


def digest(tensors: dict[str, torch.Tensor]) -> str:
    whole = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        whole.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        whole.update(tensor.view(torch.uint8).numpy().tobytes() if tensor.numel() else b"")
    return whole.hexdigest()


def taken(cache: CacheState, request: int) -> dict[str, torch.Tensor]:
    """All tensors of a request, by their names in the file."""
    buckets, parts = cache.buckets, {}
    for tier, kind in enumerate(cache.page_formats):
        pages = []
        for layer in range(cache.layers):
            bucket, index, handles = buckets._pages_of(layer, [request], tier)
            raw = cache.pool.read(handles, 0, kind.stride)
            count = buckets.host_count[request, layer, :, tier][bucket]
            used = torch.from_numpy(np.arange(cache.page_tokens) + index[:, None] * cache.page_tokens < count[:, None])
            page, slot = used.nonzero().to(cache.device).unbind(1)
            clean = torch.zeros_like(raw)
            kind.write(clean, page, slot, kind.read(raw, page, slot))
            pages.append(clean)
        whole = torch.cat(pages)
        parts[f"pages.{tier}"] = whole[:, : kind.format.page_bytes]
        parts[f"position.{tier}"] = kind.positions(whole).int()
        parts[f"importance.{tier}"] = kind.importance(whole).float()
    parts["count"] = torch.from_numpy(buckets.host_count[request])
    parts["length"] = torch.from_numpy(cache._lengths[request]).long()
    for name, numbers in zip(("queries", "reported"), cache.reports.numbers[request].unbind(1), strict=True):
        parts[name] = numbers.long().clone(memory_format=torch.contiguous_format)
    parts["centre"] = cache.centre[request]
    parts["centred"] = torch.from_numpy(cache._centred[request]).to(torch.uint8)
    if cache.balance is not None:
        parts["balance"] = cache.balance[request]
    if cache.direction is not None:
        parts["direction"] = cache.direction[request]
    parts["ahead_from"] = torch.tensor([int(cache._ahead_from[request])])
    return parts


def save(cache: CacheState, path: str | PathLike[str], request: int) -> None:
    from safetensors.torch import save_file

    if not Path(path).parent.is_dir():
        raise FileNotFoundError(f"path: expected a file in a folder that exists, got {str(path)!r}")
    parts = taken(cache, request)
    tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in parts.items()}
    metadata = {
        "kind": KIND,
        "version": str(VERSION),
        "meaning": json.dumps(_meaning(cache)),
        "settings": json.dumps(_settings(cache)),
        "digest": digest(tensors),
    }
    save_file(tensors, path, metadata=metadata)


class Refused(Exception):
    """Raised for a file that cannot be read; the message is the reason."""


def want(condition: object, message: str) -> None:
    if not condition:
        raise Refused(message)


def _read(cache: CacheState, path: str | PathLike[str]) -> dict[str, torch.Tensor]:
    """Tensors of a file whose header is ours and whose digest matches."""
    from safetensors import SafetensorError, safe_open

    want(not Path(path).is_dir(), "it is a folder")
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            metadata = file.metadata() or {}
            want(metadata.get("kind") == KIND, f"kind: expected {KIND!r}, got {metadata.get('kind')!r}")
            version = metadata.get("version")
            want(version == str(VERSION), f"version: expected {VERSION}, got {version!r}")
            meaning, expected = json.loads(metadata.get("meaning", "null")), _meaning(cache)
            want(isinstance(meaning, dict), "meaning: expected an object")
            for name, value in expected.items():
                want(
                    meaning.get(name) == value, f"{name}: expected {value!r} as in the cache, got {meaning.get(name)!r}"
                )
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise Refused(f"not a complete safetensors file ({error})") from error
    want(metadata.get("digest") == digest(tensors), "the digest differs: the file is damaged")
    return tensors


def validate(cache: CacheState, tensors: dict[str, torch.Tensor]) -> None:
    """Check shapes, dtypes and ranges of all tensors; raises Refused."""
    layers, heads, tiers, p = cache.layers, cache.kv_heads, len(cache.page_formats), cache.page_tokens

    def shaped(name: str, dtype: torch.dtype, *shape: int) -> torch.Tensor:
        tensor = tensors.get(name)
        if tensor is None:
            raise Refused(f"{name}: missing")
        want(tensor.dtype == dtype and tuple(tensor.shape) == shape, f"{name}: expected {dtype} {shape}")
        return tensor

    count = shaped("count", torch.int32, layers, heads, tiers).long()
    length = shaped("length", torch.int64, layers)
    want((length >= 0).all() and (length <= cache.max_tokens).all(), f"length: expected up to {cache.max_tokens}")
    want((count >= 0).all() and (count <= length[:, None, None]).all(), "count: expected up to the length")
    totals = count.sum(-1)
    want((totals <= length[:, None]).all(), "count: expected no more tokens than the length")
    want(cache.policy.evict or (totals == length[:, None]).all(), "count: expected all tokens, some were evicted")
    want((shaped("queries", torch.int64, layers) >= 0).all(), "queries: expected 0 or more")
    reported = shaped("reported", torch.int64, layers)
    want((reported >= 0).all() and (reported <= length).all(), "reported: expected up to the length")
    want(shaped("centre", torch.float32, layers, heads, cache.head_dim).isfinite().all(), "centre: expected numbers")
    centred = shaped("centred", torch.uint8, layers)
    want((centred <= 1).all(), "centred: expected 0 or 1")
    want((centred.bool() | (count[:, :, 1:].sum((1, 2)) == 0)).all(), "centred: expected 1 where tokens are quantised")
    if "balance" in tensors:
        balance = shaped("balance", torch.int8, layers, heads, cache.head_dim)
        want((balance.abs() <= 8).all(), "balance: expected powers from -8 to 8")
        want(cache.balance is not None or not balance.any(), "balance: expected none, or a cache with balance=True")
    if "direction" in tensors:
        direction = shaped("direction", torch.int8, layers, heads, cache.head_dim)
        most = DIRECTION_MOST
        want(((direction >= -most) & (direction <= most)).all(), f"direction: expected numbers from -{most} to {most}")
        want(cache.direction is not None or not direction.any(), "direction: expected none, or balance=True")
    if "ahead_from" in tensors:
        want((shaped("ahead_from", torch.int64, 1) >= 0).all(), "ahead_from: expected 0 or more")
    keys = []
    for tier, kind in enumerate(cache.page_formats):
        per_bucket = -(-count[:, :, tier].flatten() // p)
        n = int(per_bucket.sum())
        bucket = torch.repeat_interleave(torch.arange(layers * heads), per_bucket)
        index = torch.arange(n) - (per_bucket.cumsum(0) - per_bucket)[bucket]
        used = torch.arange(p) + index.unsqueeze(1) * p < count[:, :, tier].flatten()[bucket].unsqueeze(1)
        pages = shaped(f"pages.{tier}", torch.uint8, n, kind.format.page_bytes)
        position = shaped(f"position.{tier}", torch.int32, n, p).long()
        importance = shaped(f"importance.{tier}", torch.float32, n, p)
        limit = length.repeat_interleave(heads)[bucket].unsqueeze(1)
        want(((position >= 0) & (position < limit))[used].all(), f"position.{tier}: expected below the length")
        want((importance.isfinite() & (importance >= 0)).all(), f"importance.{tier}: expected numbers from 0 on")
        keys.append((bucket.unsqueeze(1) * cache.max_tokens + position)[used])
        if kind.format.plain:
            empty = not any(rows[~used].any() for rows in kind.plain_rows(pages))
            want(empty, f"pages.{tier}: expected zeros where there is no token")
        else:
            f = kind.format
            scale = pages[:, f.scale_offset : f.scale_offset + f.scale_bytes].clone().view(torch.float16)
            want((scale.isfinite() & (scale >= 0)).all(), f"pages.{tier}: expected finite scales from 0 on")
    every = torch.cat(keys)
    want(len(torch.unique(every)) == len(every), "position: expected each once in a head")


def load(cache: CacheState, path: str | PathLike[str]) -> int:
    try:
        tensors = _read(cache, path)
        validate(cache, tensors)
    except Refused as error:
        raise ValueError(f"path: expected a request that this cache can hold, {str(path)!r} is not: {error}") from error
    request = cache._unused_request()
    put(cache, request, tensors)
    return request


def put(cache: CacheState, request: int, tensors: dict[str, torch.Tensor]) -> None:
    """Fill an unused request with the tensors that `taken` returned; BudgetExceeded leaves the cache unchanged."""
    cache._forget([request])
    with cache._operation() as change:
        _put(cache, change, request, tensors)
        _fit(cache, change, request)


def _put(cache: CacheState, change: Transaction, request: int, tensors: dict[str, torch.Tensor]) -> None:
    """Set pages, tables and counters of the request; its part of the device's tables is written immediately."""
    buckets, count = cache.buckets, tensors["count"].numpy()
    changed = [(cache.centre[request], tensors["centre"])]
    if cache.balance is not None:
        changed.append((cache.balance[request], tensors.get("balance", torch.zeros(cache.balance.shape[1:]))))
    if cache.direction is not None:
        changed.append((cache.direction[request], tensors.get("direction", torch.zeros(cache.direction.shape[1:]))))
    reports = torch.stack([tensors[name].clamp(max=MOST) for name in ("queries", "reported")], 1)
    changed.append((cache.reports.numbers[request], reports))
    before = [own.clone() for own, _ in changed]

    def push() -> None:
        if cache.device.type != "cpu":
            cache._device_lengths[request].copy_(torch.from_numpy(cache._lengths[request]))
            buckets.push([request])

    def restore() -> None:
        for (own, _), old in zip(changed, before, strict=True):
            own.copy_(old)
        push()

    change.undo(restore)  # undone last, after the host's tables are restored
    cache._activate(change, [request])
    for tier, kind in enumerate(cache.page_formats):
        pages = tensors[f"pages.{tier}"].to(cache.device)
        whole = torch.zeros(len(pages), kind.stride, dtype=torch.uint8, device=cache.device)
        whole[:, : kind.format.page_bytes] = pages
        kind.positions(whole)[:] = tensors[f"position.{tier}"].to(cache.device)
        kind.importance(whole)[:] = tensors[f"importance.{tier}"].to(cache.device)
        handles = change.allocate(tier, len(pages))
        cache.pool.write(handles, 0, whole)
        listed = np.arange(buckets.max_pages) < -(-count[..., tier, None].astype(np.int64) // cache.page_tokens)
        table = np.full(listed.shape, -1, np.int32)
        table[listed] = handles
        change.set(buckets.host_table, np.index_exp[request, :, :, tier], table)
    change.set(buckets.host_count, request, count)
    buckets.forget(request, change)
    change.set(cache._centred, request, tensors["centred"].numpy().astype(bool))
    change.set(cache._lengths, request, tensors["length"].numpy())
    change.set(cache._ahead_from, request, int(tensors["ahead_from"]) if "ahead_from" in tensors else 0)
    for own, values in changed:
        own.copy_(values)
    push()


def _fit(cache: CacheState, change: Transaction, request: int) -> None:
    """Settle the request if it does not fit the budget of this cache."""
    [scope] = scopes_of(cache, [request])
    short = [layer for layer in range(cache.layers) if not fits_plain(cache, layer, [request], [0])]
    places = [(layer, scope) for layer in short]
    lengths = [[int(cache._lengths[r, layer]) for r in scope] for layer in short]
    tokens = cache.buckets.snapshots(*pairs(places))
    move_tokens(cache, change, places, tokens, plan_scopes(cache, places, tokens, lengths))
