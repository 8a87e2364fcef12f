"""decode_attention over the num_blocks that store_kv writes (`PagedCache`): every backend against the float32 model."""

from __future__ import annotations

import pytest
import torch

from decode_model import DEVICE, HALF, Case, check, each_backend, few
from kvstrata import PagedCache, decode_attention, store_kv


def paged_case(
    lengths: list[int], *, layout: str = "NHD", dtype: torch.dtype = HALF, cache_dtype: torch.dtype | None = None,
    dim: int = 64, kv_heads: int = 2, group: int = 2, q_len: int = 1, block_size: int = 16, scaled: str = "none",
    options: dict | None = None, strided: bool = False, seed: int = 0,
) -> Case:  # fmt: skip
    """Blocks at shuffled places, written by store_kv, poison everywhere else, and behind the end of the block table."""
    generator = torch.Generator().manual_seed(seed)
    max_blocks = -(-max(lengths) // block_size) + 1
    num_blocks = len(lengths) * max_blocks + 2
    inner = (block_size, kv_heads) if layout == "NHD" else (kv_heads, block_size)
    cache_dtype = cache_dtype or dtype
    full = torch.full((2, num_blocks, *inner, dim * (2 if strided else 1)), torch.nan).to(cache_dtype).to(DEVICE)
    k_cache, v_cache = full[..., :dim]
    block_table = (
        torch.randperm(num_blocks, generator=generator)[: len(lengths) * max_blocks].view(len(lengths), -1).int()
    )
    rows, slot_mapping = [], []
    for request, length in enumerate(lengths):
        at = torch.arange(length)
        slot_mapping.append(block_table[request][at // block_size].long() * block_size + at % block_size)
        rows.append(torch.randn(2, length, kv_heads, dim, generator=generator))
        block_table[request, -(-length // block_size) :] = -1 if request % 2 else 2**30
    scale = {"none": None, "one": torch.tensor([0.02]), "heads": torch.linspace(0.01, 0.03, kv_heads)}[scaled]
    scales = {} if scale is None else dict(k_scale=scale.to(DEVICE), v_scale=(2 * scale).to(DEVICE))
    k, v = torch.cat(rows, 1).to(dtype).to(DEVICE)
    store_kv(k, v, k_cache, v_cache, torch.cat(slot_mapping).to(DEVICE), layout=layout, **scales)
    counts = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    cache = PagedCache(k_cache, v_cache, block_table.to(DEVICE), counts, layout=layout, **scales)
    q = torch.randn(len(lengths), q_len, kv_heads * group, dim, generator=generator).to(dtype).to(DEVICE)
    return Case(cache, q, list(range(len(lengths))), lengths, options=options or {})


@each_backend
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("dim", [64, 80, 128])
def test_paged_cache_equals_the_model(backend: str, layout: str, dim: int) -> None:
    few(backend, dim < 128)
    check(paged_case([40, 0, 17, 16, 1], layout=layout, dim=dim), backend)


@each_backend
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("dim", [64, 80, 128])
def test_strided_paged_cache_equals_the_model(backend: str, layout: str, dim: int) -> None:
    few(backend, dim < 128)
    check(paged_case([21, 30], layout=layout, dim=dim, strided=True, block_size=8), backend)


@each_backend
@pytest.mark.parametrize("cache_dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("scaled", ["none", "one", "heads"])
def test_fp8_paged_cache_equals_the_model(backend: str, cache_dtype: torch.dtype, scaled: str) -> None:
    check(paged_case([40, 5], cache_dtype=cache_dtype, scaled=scaled), backend)


@each_backend
def test_paged_cache_with_score_options_equals_the_model(backend: str) -> None:
    sinks = torch.randn(6, device=DEVICE)
    options = dict(sliding_window=20, softcap=10.0, sinks=sinks)
    case = paged_case([44, 3, 26], q_len=4, group=3, block_size=1, options=options)
    check(case, backend)
    some = Case(case.cache, case.q[:1], [2], [26], options=options)
    check(some, backend)


@each_backend
def test_sinks_of_minus_infinity_give_zeros_where_no_token_is_seen(backend: str) -> None:
    sinks = torch.tensor([0.0, -torch.inf, 0.0, -torch.inf], device=DEVICE)
    case = paged_case([9, 0, 2], q_len=3, options=dict(sinks=sinks))
    check(case, backend)
    out = decode_attention(case.q, case.cache, sinks=sinks, backend=backend)
    assert not out[1].any()


def _paged(**changes: object) -> PagedCache:
    k = torch.zeros(4, 16, 2, 64)
    given = dict(k=k, v=k, block_table=torch.zeros(1, 4, dtype=torch.int32), seq_lens=torch.ones(1, dtype=torch.int32))
    return PagedCache(**(given | changes))  # type: ignore[arg-type]


BAD_BLOCKS = {
    "layout": (dict(layout="DHN"), ValueError, "layout: expected one of"),
    "k type": (dict(k="a"), TypeError, "k: expected a tensor, got str"),
    "block table type": (dict(block_table=[[0, 1]]), TypeError, "block_table: expected a tensor, got list"),
    "k": (dict(k=torch.zeros(4, 64)), ValueError, "k: expected 4 dimensions"),
    "no heads": (dict(k=torch.zeros(4, 16, 0, 64)), ValueError, "k: expected no dimension of size 0, got shape"),
    "k dtype": (dict(k=torch.zeros(4, 16, 2, 64).double()), TypeError, "k: expected one of"),
    "v": (dict(v=torch.zeros(4, 16, 1, 64)), ValueError, "v: expected shape"),
    "v dtype": (dict(v=torch.zeros(4, 16, 2, 64).half()), TypeError, "v: expected torch.float32 as k"),
    "stride": (dict(v=torch.zeros(4, 16, 2, 128)[..., ::2]), ValueError, "v: expected an inner stride of 1"),
    "block_table": (dict(block_table=torch.zeros(1, 4)), TypeError, "block_table: expected torch.int32"),
    "seq_lens": (dict(seq_lens=torch.ones(3, dtype=torch.int32)), ValueError, "seq_lens: expected 1, one per row"),
    "k_scale": (dict(k_scale=torch.ones(1)), ValueError, "k_scale: expected None for torch.float32"),
}


@pytest.mark.parametrize("name", BAD_BLOCKS)
def test_bad_blocks_are_named(name: str) -> None:
    changes, error, message = BAD_BLOCKS[name]
    with pytest.raises(error, match=message):
        _paged(**changes)


def test_bad_calls_are_named() -> None:
    q = torch.randn(1, 1, 4, 64)
    with pytest.raises(ValueError, match="layer: expected 0, a PagedCache"):
        decode_attention(q, _paged(), layer=1)
    with pytest.raises(TypeError, match=r"q: expected torch\.float32"):
        decode_attention(q.half(), _paged())
