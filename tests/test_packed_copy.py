"""copy_pages: blocks move byte for byte, nothing else changes; capacity of formats."""

from __future__ import annotations

import pytest
import torch

from kvstrata import Format, copy_pages
from packed_model import DEVICE, each_backend, kernels  # noqa: F401


def pools(blocks: int, strided: bool) -> torch.Tensor:
    size = Format.parse("K4V3", 80, 16).page_bytes
    whole = torch.randint(0, 256, (blocks, 3, size + 32 * strided), dtype=torch.uint8, device=DEVICE)
    return whole[:, :, 16:-16] if strided else whole


@each_backend
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_named_blocks_are_copied_between_pools(backend: str, dtype: torch.dtype) -> None:
    src, dst = pools(6, True), pools(4, False)
    source = torch.tensor([5, 0, -1, 2, 3, 6], device=DEVICE, dtype=dtype)
    target = torch.tensor([1, 3, 0, -7, 4, 2], device=DEVICE, dtype=dtype)
    want, kept = dst.clone(), src.clone()
    want[1], want[3] = src[5], src[0]
    copy_pages(src, dst, source, target, backend=backend)
    assert torch.equal(dst, want)
    assert torch.equal(src, kept)


@each_backend
def test_named_blocks_are_copied_within_a_pool(backend: str) -> None:
    pool = pools(6, False)
    want = pool.clone()
    want[4], want[5] = pool[0], pool[1]
    copy_pages(pool, pool, torch.tensor([0, 1], device=DEVICE), torch.tensor([4, 5], device=DEVICE), backend=backend)
    assert torch.equal(pool, want)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["cuda", "triton", "reference"])
def test_copy_to_host_and_back_restores_blocks(backend: str) -> None:
    pool = pools(6, True)
    host = torch.zeros(3, *pool.shape[1:], dtype=torch.uint8).pin_memory()
    there, here = torch.tensor([4, 1], device=DEVICE), torch.tensor([0, 2], device=DEVICE)
    want = pool.clone()
    copy_pages(pool, host, there, here, backend=backend)
    pool[there] = 0
    copy_pages(host, pool, here, there, backend=backend)
    assert torch.equal(pool, want)


def test_invalid_copy_arguments_are_named() -> None:
    pool, numbers = pools(4, False), torch.arange(2, device=DEVICE)
    wrong = {
        "dst: expected blocks of": (pool, pool[:, :2], numbers, numbers),
        "src: expected torch.uint8": (pool.int(), pool, numbers, numbers),
        "dst_blocks: expected torch.int64": (pool, pool, numbers, numbers[:1]),
        "src_blocks: expected int32 or int64": (pool, pool, numbers.float(), numbers),
    }
    odd = torch.zeros(pool.numel() + 8, dtype=torch.uint8, device=DEVICE)[8:].view(pool.shape)
    wrong["dst: expected an address that is a multiple of 16"] = (pool, odd, numbers, numbers)
    wrong["dst: expected blocks and heads that do not overlap"] = (pool, pool[:1].expand(4, -1, -1), numbers, numbers)
    for x in (pool.to("meta"), pool.to_sparse()):
        got = "one on meta" if x.is_meta else "torch.sparse_coo"
        wrong[f"src: expected a .*, got {got}"] = (x, pool, numbers, numbers)
        wrong[f"dst: expected a .*, got {got}"] = (pool, x, numbers, numbers)
    for message, arguments in wrong.items():
        with pytest.raises((ValueError, TypeError), match=message):
            copy_pages(*arguments)


def test_copy_pages_passes_opcheck() -> None:
    pool, numbers = pools(4, False), torch.arange(2, device=DEVICE)
    torch.library.opcheck(torch.ops.kvstrata.copy_pages.default, (pool, pools(4, False), numbers, numbers, "reference"))


def test_block_bytes_and_token_capacity_of_a_format() -> None:
    fmt = Format.parse("K4V4", 128)
    assert fmt.page_bytes == 64 * fmt.bytes_per_token == 64 * (128 + 4)
    assert fmt.block_bytes(128, kv_heads=8) == 2 * 8 * fmt.page_bytes
    assert fmt.tokens_in(10 * fmt.page_bytes - 1) == 9 * 64
    assert fmt.tokens_in(10 * fmt.block_bytes(128, 8) * 32, kv_heads=8, layers=32, block_size=128) == 10 * 128
    for message, call in {
        "block_size: expected a multiple of 64": lambda: fmt.block_bytes(32),
        "nbytes: expected an int": lambda: fmt.tokens_in(-1),
        "layers: expected an int": lambda: fmt.tokens_in(1, layers=0),
        "kv_heads: expected an int": lambda: fmt.tokens_in(1, kv_heads=0),
    }.items():
        with pytest.raises(ValueError, match=message):
            call()
