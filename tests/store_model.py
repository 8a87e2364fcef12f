"""An independent model of ``store_kv`` for the tests: loops over tokens, and fp8 by search through all 256 values."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def nearest_fp8(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Bytes of the nearest finite fp8 value, ties to the even code; NaN is 0x7f. ``x`` is float32."""
    codes = torch.arange(128, dtype=torch.uint8)
    values = codes.view(dtype).double()
    codes, values = codes[values.isfinite()], values[values.isfinite()]
    distance = (x.double().abs().clamp(max=1e6).unsqueeze(-1) - values).abs()
    # Among equally near codes the even one wins: an odd code is charged an infinitesimal more.
    best = torch.where(distance == distance.amin(-1, keepdim=True), codes % 2, 2).argmin(-1)
    sign = torch.where(torch.signbit(x), 0x80, 0)
    return torch.where(x.isnan(), 0x7F, codes[best] | sign).to(torch.uint8)


@dataclass
class Call:
    """One call's tensors, with the pools that the caches are views of."""

    k: torch.Tensor
    v: torch.Tensor | None
    k_cache: torch.Tensor
    v_cache: torch.Tensor | None
    slot_mapping: torch.Tensor
    layout: str = "NHD"
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None
    pools: list[torch.Tensor] = field(default_factory=list)

    def run(self, store_kv, **options) -> None:
        store_kv(
            self.k, self.v, self.k_cache, self.v_cache, self.slot_mapping,
            layout=self.layout, k_scale=self.k_scale, v_scale=self.v_scale, **options,
        )  # fmt: skip

    def expected(self) -> list[torch.Tensor]:
        """Every byte of both pools after the call."""
        after = []
        sides = [(self.k, self.k_cache, self.k_scale), (self.v, self.v_cache, self.v_scale)]
        for (x, cache, scale), pool in zip(sides, self.pools, strict=False):
            copy = pool.clone()
            view = copy.view(cache.dtype).as_strided(cache.shape, cache.stride(), cache.storage_offset())
            paged = view.dim() == 4
            by_token = view.transpose(1, 2) if paged and self.layout == "HND" else view
            block_size = by_token.shape[1] if paged else 1
            bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[cache.dtype.itemsize]
            for token, slot in enumerate(self.slot_mapping.tolist()):
                if not 0 <= slot < by_token.shape[0] * block_size:
                    continue
                row = x[token]
                if x.dtype != cache.dtype:
                    inverse = 1.0 if scale is None else (1.0 / scale).reshape(-1, 1).cpu()
                    row = nearest_fp8(row.cpu().float() * inverse, cache.dtype).to(x.device).view(cache.dtype)
                at = by_token[slot // block_size, slot % block_size] if paged else by_token[slot]
                at.view(bits).copy_(row.view(bits))
            after.append(copy)
        return after


def poisoned(size: int, device: torch.device) -> torch.Tensor:
    """Bytes that are NaN in every float type when read whole."""
    return torch.full((size,), 0xFF, dtype=torch.uint8, device=device)


def make(
    tokens: int,
    heads: int,
    k_dim: int,
    v_dim: int | None,
    *,
    device: torch.device,
    source: torch.dtype = torch.float16,
    cache: torch.dtype | None = None,
    kind: str = "NHD",
    num_blocks: int = 5,
    block_size: int = 4,
    slot_dtype: torch.dtype = torch.int32,
    slot_mapping: list[int] | None = None,
    source_gap: int = 0,
    cache_gap: int = 0,
    offset: int = 0,
    scales: int = 0,
    seed: int = 0,
) -> Call:
    """A call on random data. ``kind`` is flat, NHD or HND; gaps (in elements) make strided views; ``offset`` shifts
    bases off their alignment; ``scales`` is 0 (none), 1 (one value) or 2 (one per head)."""
    generator = torch.Generator().manual_seed(seed)
    cache = cache or source

    def source_rows(dim: int) -> torch.Tensor:
        fused = torch.randn(tokens, heads + 1, dim + source_gap, generator=generator) * 4
        special = torch.tensor([0.0, -0.0, float("inf"), float("-inf"), float("nan"), 1e-3, 448.0, 464.0, 6e4, 1e-9])
        pick = torch.randint(0, 4 * len(special), fused.shape, generator=generator)
        fused = torch.where(pick < len(special), special[pick % len(special)], fused).to(source)
        flat = torch.cat([torch.zeros(offset, dtype=torch.float32).to(source), fused.flatten()]).to(device)
        return flat[offset:].view(fused.shape)[:, 1:, :dim]

    def cache_blocks(dim: int) -> tuple[torch.Tensor, torch.Tensor]:
        shape = {
            "flat": (num_blocks * block_size, heads),
            "NHD": (num_blocks, block_size, heads),
            "HND": (num_blocks, heads, block_size),
        }
        full = (*shape[kind][:-1], shape[kind][-1] + (cache_gap > 0), dim + cache_gap)
        count = offset + torch.Size(full).numel()
        pool = poisoned(count * cache.itemsize, device)
        view = pool.view(cache)[offset:].view(full)
        return pool, view.narrow(-2, 0, shape[kind][-1]).narrow(-1, 0, dim)

    if slot_mapping is None:
        order = torch.randperm(num_blocks * block_size, generator=generator)[:tokens].tolist()
        slot_mapping = (order + [-1, num_blocks * block_size, -7] * tokens)[:tokens]
        for i in range(0, tokens, 5):
            slot_mapping[i] = [-1, num_blocks * block_size, 2**31 - 1][i // 5 % 3]
    k, (k_pool, k_cache) = source_rows(k_dim), cache_blocks(k_dim)
    call = Call(k, None, k_cache, None, torch.tensor(slot_mapping, dtype=slot_dtype, device=device), pools=[k_pool])
    call.layout = "HND" if kind == "HND" else "NHD"
    if v_dim is not None:
        call.v, (v_pool, call.v_cache) = source_rows(v_dim), cache_blocks(v_dim)
        call.pools.append(v_pool)
    if scales and source != cache:
        values = torch.rand(2, heads if scales == 2 else 1, generator=generator) * 2 + 0.05
        call.k_scale = values[0].to(device)
        call.v_scale = values[1].to(device) if v_dim is not None else None
    return call
