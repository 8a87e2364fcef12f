"""Inputs of a reference decode: one part per tier, with the tokens of every (request, KV head) in one tensor.

G is requests times KV heads, M the pages of the longest bucket, N its slots. Shorter buckets are padded with slots that
are not ``valid``. The bytes of such slots are never used: scores there are masked, and values are either codes, which
are finite for any bits, or set to zero.
"""

from __future__ import annotations

import functools

import numpy as np
import torch

from kvstrata.cache.storage.views import BucketedCacheLayer
from kvstrata.layout.format import UNIT, Format
from kvstrata.layout.fragments import Side
from kvstrata.layout.rotation import hadamard
from kvstrata.layout.unpack import dims, k_order, turn, unpack, v_order
from kvstrata.quant.calibration import factors
from kvstrata.store.paged_cache import PagedCache


def _times(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """``b @ a.mT`` for ``a [G, n, k]``, ``b [G, m, k]`` with few m.

    For m > 8, products with a transposed right side are ten times slower on some CPUs; a copy of b is small.
    """
    if b.shape[1] <= 8:
        return torch.bmm(b, a.transpose(1, 2))
    return torch.bmm(a, b.transpose(1, 2).contiguous()).transpose(1, 2)


class Plain:
    """Rows in the model's dtype, or fp8 with scales."""

    def __init__(self, k: torch.Tensor, v: torch.Tensor, count: np.ndarray, position: torch.Tensor | None) -> None:
        """Copy rows ``[G, slots, D]``, which may hold anything past the end of a bucket (``count [G]``)."""
        longest, self.least = int(count.max()), int(count.min())
        self.k, self.v = k[:, :longest].float(), v[:, :longest].float()
        self.valid: torch.Tensor | None = None  # bool [G, N]; None if all are
        if self.least < longest:
            counts = torch.from_numpy(count).to(k.device).unsqueeze(1)
            self.valid = torch.arange(longest, device=k.device) < counts
            self.v[:, self.least :].masked_fill_(~self.valid[:, self.least :].unsqueeze(2), 0.0)
        self.position = None if position is None else position[:, :longest]  # [G, N], anything where not valid

    def scores(self, q: torch.Tensor) -> torch.Tensor:
        """``q [G, R, D]`` -> ``[G, R, N]``."""
        return _times(self.k, q)

    def values(self, weights: torch.Tensor) -> torch.Tensor:
        """``weights [G, R, N]``, zero where not valid -> ``[G, R, D]``."""
        return torch.bmm(weights, self.v)


@functools.lru_cache(maxsize=64)
def _turn(head_dim: int, rotate: bool, side: Side, device: torch.device) -> torch.Tensor:
    """Matrix that rotates and permutes dims: from a query to the order of K's codes, or from V's codes to an output."""
    full = hadamard(head_dim, "cpu") if rotate else torch.eye(head_dim, dtype=torch.float32, device="cpu")
    turned = full[:, dims(head_dim, "k")] if side == "k" else full[dims(head_dim, "v")]
    return turned.contiguous().to(device)


@functools.lru_cache(maxsize=256)
def _slots(pages: int, tokens: int, device: torch.device) -> torch.Tensor:
    """Slots of a bucket in the order of K's codes."""
    return k_order(torch.arange(pages * tokens, device=device).view(pages, tokens))


class Coded:
    """Codes; scales and mid-rise offsets are applied to scores and weights, the rotation to query and output."""

    def __init__(
        self,
        pages: torch.Tensor,
        format: Format,
        centre: torch.Tensor,
        count: np.ndarray,
        position: torch.Tensor | None,
    ) -> None:
        """``pages`` uint8 ``[G, M, bytes]``, ``centre [G, 1, D]``, ``position [G, M, P]``."""
        self.format, self.centre, self.pages, self.least = format, centre, pages.shape[1], int(count.min())
        raw = pages[:, :, format.scale_offset : format.page_bytes].view(torch.float16).float()
        # [G, M, tile, g, side, r] -> side, G, r, tile, g, M: the order of K's codes
        scales = raw.unflatten(2, (-1, 8, 2, 2)).permute(4, 0, 5, 2, 3, 1).flatten(2).unsqueeze(2)
        self.valid: torch.Tensor | None = None
        if self.least < self.pages * format.page_tokens:
            counts = torch.from_numpy(count).to(pages.device).unsqueeze(1)
            self.valid = _slots(self.pages, format.page_tokens, pages.device) < counts
            scales.masked_fill_(~self.valid.unsqueeze(1), 0.0)
        self.k_scale, self.v_scale = scales.unbind(0)
        self.words = turn(pages, format)
        self.position = None if position is None else k_order(position)

    def scores(self, q: torch.Tensor) -> torch.Tensor:
        """``q [G, R, D]`` -> ``[G, R, N]``."""
        turned = q @ _turn(q.shape[2], self.format.rotate, "k", q.device)
        middle = turned.sum(2, keepdim=True).mul_((2**self.format.k_bits - 1) * 0.5)
        scores = torch.bmm(turned, unpack(self.words, self.format, "k")).sub_(middle).mul_(self.k_scale)
        return scores.add_((q * self.centre).sum(2, keepdim=True)) if self.format.centre else scores

    def values(self, weights: torch.Tensor) -> torch.Tensor:
        """``weights [G, R, N]``, zero where not valid -> ``[G, R, D]``."""
        scaled = weights * self.v_scale
        middle = scaled.sum(2, keepdim=True).mul_((2**self.format.v_bits - 1) * 0.5)
        values = unpack(self.words, self.format, "v")
        out = _times(values, v_order(scaled, self.pages)).sub_(middle)
        return out @ _turn(out.shape[2], self.format.rotate, "v", out.device)


def _read(buckets: BucketedCacheLayer, handles: np.ndarray, start: int, size: int) -> torch.Tensor:
    """Bytes ``start .. start + size`` of pages: uint8 ``[*handles.shape, size]``, a copy."""
    if buckets.space is not None and start % 4 == size % 4 == 0:
        words = buckets.space.view(torch.int32)
        pages = (buckets.space.numel() - start - size) // UNIT + 1
        rows = words.as_strided((pages, size // 4), (UNIT // 4, 1), start // 4)
        selected = rows.index_select(0, torch.from_numpy(handles.ravel()))
        return selected.view(torch.uint8).view(*handles.shape, size)
    out = torch.empty(*handles.shape, size, dtype=torch.uint8, device=buckets.slab_pointers.device)
    for row, handle in zip(out.view(-1, size), handles.ravel().tolist(), strict=True):
        slab, offset = buckets.slabs[handle // buckets.units], handle % buckets.units * UNIT + start
        assert slab is not None
        row.copy_(slab[offset : offset + size])
    return out


def stored_centre(buckets: BucketedCacheLayer) -> torch.Tensor:
    """Centres of stored K, which is divided by the balance: float32 ``[requests, kv_heads, D]``."""
    return buckets.centre if buckets.balance is None else buckets.centre * factors(-buckets.balance)


def tier_parts(
    buckets: BucketedCacheLayer, requests: list[int], dtype: torch.dtype, positions: bool
) -> list[Plain | Coded]:
    """One part per tier that holds tokens of these requests; with their positions if ``positions``."""
    counts = buckets.count.cpu().numpy()[requests].astype(np.int64)  # [B, H, tiers]
    table = buckets.page_table.cpu().numpy()
    parts: list[Plain | Coded] = []
    for tier, format in enumerate(buckets.formats):
        count = np.ascontiguousarray(counts[:, :, tier]).reshape(-1)
        longest = int(count.max(initial=0))
        if longest == 0:
            continue
        tokens, groups = format.page_tokens, len(count)
        pages = -(-longest // tokens)
        handles = table[requests, :, tier, :pages].reshape(groups, pages).astype(np.int64)
        used = np.arange(pages) * tokens < count[:, None]
        handles = np.where(used, handles, handles[used][0])
        position = None
        if positions:
            size = tokens * buckets.position_dtype.itemsize
            position = _read(buckets, handles, buckets.position_offsets[tier], size).view(buckets.position_dtype)
        if format.plain:
            k, v = (
                _read(buckets, handles, start, format.k_bytes).view(dtype).view(groups, pages * tokens, -1)
                for start in (format.k_offset, format.v_offset)
            )
            parts.append(Plain(k, v, count, None if position is None else position.flatten(1)))
        else:
            centre = stored_centre(buckets)[requests].flatten(0, 1).unsqueeze(1)
            parts.append(Coded(_read(buckets, handles, 0, format.page_bytes), format, centre, count, position))
    return parts


def paged_parts(cache: PagedCache, requests: list[int]) -> list[Plain | Coded]:
    """Tokens of these requests as one part; an empty list if there are none."""
    length = cache.seq_lens.cpu().numpy()[requests].astype(np.int64)
    longest = int(length.max(initial=0))
    if longest <= 0:
        return []
    blocks = -(-longest // cache.block_size)
    table = cache.block_table[torch.tensor(requests, device=cache.device), :blocks].long()
    used = torch.arange(blocks, device=cache.device) * cache.block_size
    table = torch.where(used < torch.from_numpy(length).to(cache.device).unsqueeze(1), table, 0)
    sides = []
    for x, scale in zip(cache.by_head(), (cache.k_scale, cache.v_scale), strict=True):
        rows = x[table].transpose(1, 2).flatten(2, 3).float()  # [B, H, N, D]
        if scale is not None:
            rows = rows * scale.view(-1, 1, 1)
        sides.append(rows.flatten(0, 1))
    position = torch.arange(blocks * cache.block_size, device=cache.device).expand(len(sides[0]), -1)
    return [Plain(sides[0], sides[1], np.repeat(length, cache.kv_heads), position)]
