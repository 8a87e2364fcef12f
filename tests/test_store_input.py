"""Arguments of store_kv: what is refused, in which words, and that nothing is written then."""

from __future__ import annotations

import pytest
import torch

import kvstrata
from store_model import Call, make


def test_check_names_position_and_value(device: torch.device) -> None:
    call = make(3, 2, 32, 32, device=device, slot_mapping=[1, 20, 99])
    poison = call.pools[0].clone()
    with pytest.raises(IndexError, match=r"slot_mapping\[1\]: expected at most 19, .* got 20"):
        call.run(kvstrata.store_kv, check=True)
    assert torch.equal(call.pools[0], poison)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layout": "x"}, "layout: expected"),
        ({"slot_mapping": torch.zeros(3, 1, dtype=torch.int32)}, "slot_mapping: expected shape"),
    ],
)
def test_check_validates_arguments_before_slots(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        bad(make(3, 2, 32, 32, device=torch.device("cpu")), **changes).run(kvstrata.store_kv, check=True)


def bad(call: Call, **changes) -> Call:
    for name, value in changes.items():
        setattr(call, name, value)
    return call


BAD = {
    "k rank": (lambda c: bad(c, k=c.k[0]), ValueError, r"k: expected \[tokens, heads, dim\]"),
    "cache rank": (lambda c: bad(c, k_cache=c.k_cache[0, 0]), ValueError, "k_cache: expected"),
    "heads": (lambda c: bad(c, k=c.k[:, :1]), ValueError, r"k: expected \[tokens, 2, 32\] as in k_cache"),
    "dim": (lambda c: bad(c, v=c.v[..., :16]), ValueError, r"v: expected \[tokens, 2, 32\] as in v_cache"),
    "tokens of v": (lambda c: bad(c, v=c.v[:1]), ValueError, r"v: expected \[3, 2, dim\]"),
    "v without cache": (lambda c: bad(c, v_cache=None), ValueError, "v_cache: expected v and v_cache"),
    "cache without v": (lambda c: bad(c, v=None), ValueError, "v: expected v and v_cache"),
    "blocks of v": (lambda c: bad(c, v_cache=c.v_cache[:2]), ValueError, "v_cache: expected 5 blocks of 4"),
    "dtype of v": (lambda c: bad(c, v=c.v.float()), TypeError, r"v: expected torch.float16"),
    "dtype of v_cache": (lambda c: bad(c, v_cache=c.v_cache.float()), TypeError, r"v_cache: expected torch.float16"),
    "dtype pair": (lambda c: bad(c, k=c.k.float(), v=c.v.float()), TypeError, "torch.float32 into torch.float16"),
    "integers": (lambda c: bad(c, k=c.k.int(), v=c.v.int(), k_cache=c.k_cache.int(), v_cache=c.v_cache.int()),
                 TypeError, "torch.int32 into torch.int32"),
    "inner stride": (lambda c: bad(c, k=c.k.transpose(1, 2).contiguous().transpose(1, 2)), ValueError,
                     "k: expected an inner stride of 1, got 2"),
    "expanded cache": (lambda c: bad(c, k_cache=c.k_cache[:1].expand(5, -1, -1, -1)), ValueError, "do not share"),
    "slot_mapping length": (
        lambda c: bad(c, slot_mapping=c.slot_mapping[:2]), ValueError, r"slot_mapping: expected shape \(3,\)"
    ),
    "slot_mapping rank": (
        lambda c: bad(c, slot_mapping=c.slot_mapping[:, None]), ValueError, r"slot_mapping: expected shape \(3,\)"
    ),
    "slot_mapping dtype": (
        lambda c: bad(c, slot_mapping=c.slot_mapping.short()), TypeError, "slot_mapping: expected torch.int32 or torch"
    ),
    "layout": (lambda c: bad(c, layout="DHN"), ValueError, "layout: expected one of"),
    "scale without fp8": (lambda c: bad(c, k_scale=torch.ones(1)), ValueError, "k_scale: expected None"),
    "device": (lambda c: bad(c, k=c.k.to("meta")), ValueError, "k: expected a tensor on"),
    "k is a list": (lambda c: bad(c, k=[1.0]), TypeError, "k: expected a tensor, got list"),
    "k is None": (lambda c: bad(c, k=None), TypeError, "k: expected a tensor, got NoneType"),
    "slot_mapping is a list": (
        lambda c: bad(c, slot_mapping=[1]), TypeError, "slot_mapping: expected a tensor, got list"
    ),
    "scale is a number": (lambda c: bad(c, k_scale=0.5), TypeError, "k_scale: expected a tensor, got float"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named_and_nothing_is_written(name: str, device: torch.device) -> None:
    change, error, message = BAD[name]
    call = make(3, 2, 32, 32, device=device, slot_mapping=[0, 1, 2])
    poison = [pool.clone() for pool in call.pools]
    with pytest.raises(error, match=message):
        change(call).run(kvstrata.store_kv)
    assert all(torch.equal(pool, old) for pool, old in zip(call.pools, poison, strict=True))


@pytest.mark.parametrize(
    ("scale", "error", "message"),
    [
        (torch.ones(3), ValueError, r"k_scale: expected one value or one per head \(\[2\]\)"),
        (torch.ones(1, 2), ValueError, "k_scale: expected one value"),
        (torch.ones(2, dtype=torch.float16), TypeError, "k_scale: expected torch.float32"),
        (torch.ones(4)[::2], ValueError, "k_scale: expected a contiguous"),
    ],
)
def test_invalid_scales_raise(scale, error, message, device: torch.device) -> None:
    call = make(3, 2, 32, None, device=device, cache=torch.float8_e4m3fn)
    call.k_scale = torch.ones(4, device=device)[::2] if scale.stride() == (2,) else scale.to(device)
    with pytest.raises(error, match=message):
        call.run(kvstrata.store_kv)


def test_unequal_scale_kinds_and_scale_without_v(device: torch.device) -> None:
    call = make(3, 2, 32, 32, device=device, cache=torch.float8_e4m3fn, scales=2)
    call.v_scale = call.v_scale[:1]
    with pytest.raises(ValueError, match="v_scale: expected the shape of k_scale"):
        call.run(kvstrata.store_kv)
    call = make(3, 2, 32, None, device=device, cache=torch.float8_e4m3fn)
    call.v_scale = torch.ones(1, device=device)
    with pytest.raises(ValueError, match="v_scale: expected None without v"):
        call.run(kvstrata.store_kv)


def test_unknown_and_unavailable_backends() -> None:
    call = make(1, 1, 16, 16, device=torch.device("cpu"))
    with pytest.raises(ValueError, match="backend: expected one of"):
        call.run(kvstrata.store_kv, backend="fast")
    with pytest.raises(RuntimeError, match="cuda needs CUDA tensors, got some on cpu"):
        call.run(kvstrata.store_kv, backend="cuda")
    with pytest.raises(ValueError, match=r"overlap: expected a CUDA C\+\+ backend, got 'reference'"):
        call.run(kvstrata.store_kv, overlap=True)
