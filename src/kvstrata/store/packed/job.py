"""One call of ``store_packed``, checked: what every backend is given."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

from kvstrata.layout import Format
from kvstrata.layout.blocks import Blocks, blocks_of, check_alignment

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class Calibration(Protocol):
    """Calibration of a layer: float32 ``[kv_heads, head_dim]`` or None each, applied before the rotation.

    K is divided by ``balance`` and Q multiplied with it; ``centre`` is subtracted from balanced K.
    """

    @property
    def balance(self) -> torch.Tensor | None: ...

    @property
    def centre(self) -> torch.Tensor | None: ...


class Job(NamedTuple):
    """Arguments of one call after checking."""

    k: torch.Tensor  # [T, H, D], inner stride 1
    v: torch.Tensor
    pages: torch.Tensor  # uint8 [num_blocks, H, pages_per_block * page_bytes]
    slot_mapping: torch.Tensor  # int32 or int64 [T]
    blocks: Blocks
    balance: torch.Tensor | None  # float32 [H, D], contiguous
    centre: torch.Tensor | None

    @property
    def format(self) -> Format:
        return self.blocks.format


def calibration_tensors(calibration: Calibration | None) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Balance and centre of a layer; None for those it does not have."""
    if calibration is None:
        return None, None
    try:
        return calibration.balance, calibration.centre
    except AttributeError:
        given = type(calibration).__name__
        raise TypeError(f"calibration: expected an object with balance and centre, got {given}") from None


def check_calibration(
    balance: torch.Tensor | None, centre: torch.Tensor | None, blocks: Blocks, device: torch.device
) -> None:
    shape = (blocks.kv_heads, blocks.format.head_dim)
    for name, x in (("calibration.balance", balance), ("calibration.centre", centre)):
        if x is None:
            continue
        if not isinstance(x, torch.Tensor) or x.dtype != torch.float32 or tuple(x.shape) != shape:
            given = f"{x.dtype} {tuple(x.shape)}" if isinstance(x, torch.Tensor) else repr(x)
            raise ValueError(f"{name}: expected float32 {shape}, got {given}")
        if not x.is_contiguous():
            raise ValueError(f"{name}: expected a contiguous tensor, got strides {x.stride()}")
        if x.device != device:
            raise ValueError(f"{name}: expected a tensor on {device}, where pages is, got {x.device}")


def _fail(argument: str, expected: str, given: object, error: type[Exception] = ValueError) -> None:
    raise error(f"{argument}: expected {expected}, got {given}")


def check(
    k: torch.Tensor,
    v: torch.Tensor,
    pages: torch.Tensor,
    slot_mapping: torch.Tensor,
    format: Format,
    balance: torch.Tensor | None,
    centre: torch.Tensor | None,
    *,
    address: bool = True,
) -> Job:
    """Check everything but the slots; ``address``: pages is memory, not a fake tensor."""
    for name, x in (("k", k), ("v", v), ("slot_mapping", slot_mapping)):
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name}: expected a tensor, got {type(x).__name__}")
    blocks = blocks_of(pages, format)
    if address:
        check_alignment(pages)
    if k.dim() != 3 or tuple(k.shape[1:]) != (blocks.kv_heads, format.head_dim):
        _fail("k", f"[tokens, {blocks.kv_heads}, {format.head_dim}] as pages and fmt", f"shape {tuple(k.shape)}")
    if v.shape != k.shape:
        _fail("v", f"shape {tuple(k.shape)} as k", tuple(v.shape))
    if k.dtype not in DTYPES:
        _fail("k", "float32, float16 or bfloat16", k.dtype, TypeError)
    if v.dtype != k.dtype:
        _fail("v", f"{k.dtype} as k", v.dtype, TypeError)
    for name, x in (("k", k), ("v", v)):
        if x.stride(2) != 1:
            _fail(name, "an inner stride of 1", x.stride(2))
    if slot_mapping.dtype not in (torch.int32, torch.int64):
        _fail("slot_mapping", "int32 or int64", slot_mapping.dtype, TypeError)
    if slot_mapping.dim() != 1 or slot_mapping.shape[0] != k.shape[0]:
        _fail("slot_mapping", f"[{k.shape[0]}], one slot per token", f"shape {tuple(slot_mapping.shape)}")
    for name, x in (("k", k), ("v", v), ("slot_mapping", slot_mapping)):
        if x.device != pages.device:
            _fail(name, f"a tensor on {pages.device}, where pages is", x.device)
    check_calibration(balance, centre, blocks, pages.device)
    return Job(k, v, pages, slot_mapping, blocks, balance, centre)
