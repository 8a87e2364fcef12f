"""K that is rounded along a direction: Triton against the reference, in pages and in moves."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import test_quantize_pages as pages
import test_repack as repack
from kvstrata.cache.move import apply, moves
from kvstrata.cache.storage.page import Rows
from kvstrata.cache.storage.tokens import Tokens
from kvstrata.cache.storage.transaction import Transaction
from kvstrata.layout import Format
from kvstrata.quant import reference
from kvstrata.quant.op import quantize_pages

DEVICE = pages.DEVICE
EXTREME = 3  # of four directions: the largest weights, of either sign


def directions(rows: int, dim: int, seed: int = 0) -> torch.Tensor:
    """Random ones; every fourth is zero, and every fourth as large as can be."""
    generator = torch.Generator().manual_seed(seed)
    found = reference.direction_of(torch.randn(rows, dim, generator=generator), True)
    found[2::4] = 0
    found[EXTREME::4] = 31 - 62 * torch.randint(0, 2, (dim,), generator=generator, dtype=torch.int8)
    return found.to(DEVICE)


@pytest.mark.parametrize("centred", [True, False])
@pytest.mark.parametrize(("bits", "dim"), [((2, 3), 64), ((3, 2), 80), ((4, 4), 96), ((8, 4), 64), ((3, 3), 128)])
def test_pages_with_a_direction_have_the_bytes_of_the_reference(bits: tuple[int, int], dim: int, centred: bool) -> None:
    """Rows that are not finite, zero and tiny among them, and empty slots; V and K of 8 bits have no direction."""
    call = pages.Call(Format(*bits, dim, 16), torch.float32, pages=4, centred=True)
    call.k[:4] = torch.tensor([torch.nan, torch.inf, 0.0, 2.0**-24], device=DEVICE)[:, None, None]
    call.centres = torch.tensor([0, 3, 2, 1], dtype=torch.int32, device=DEVICE)
    found = {}
    for backend, direction in (("reference", None), *((name, directions(4, dim)) for name in ("reference", "triton"))):
        pool = call.pool.clone()
        given = dict(centre=call.centre if centred else None, direction=direction)
        given["centres"] = call.centres if centred or direction is not None else None
        quantize_pages(call.k, call.v, pool, call.pages, call.source, call.heads, call.format, **given, backend=backend)
        found[backend, direction is not None] = pool.cpu()
    assert torch.equal(found["triton", True], found["reference", True])
    with_, without = (call.parts(found["reference", aimed]) for aimed in (True, False))
    assert torch.equal(with_[1], without[1])
    assert torch.equal(with_[3], without[3])
    changed = [not torch.equal(a, b) for a, b in zip(with_[0], without[0], strict=True)]
    assert changed == [False] * 4 if bits[0] == 8 else changed == [True, True, False, True]


def test_codes_that_oppose_a_tiny_row_have_a_scale_of_zero() -> None:
    """Not one below zero, whose sign would stay."""
    call = pages.Call(Format(2, 2, 64, 16, rotate=False), torch.float32, pages=2)
    call.k.zero_()
    call.k[..., :5] = torch.tensor([4.5, 4.5, 4.5, 4.5, -7.5], device=DEVICE) * 2.0**-32
    call.centres, call.direction = torch.zeros_like(call.heads), torch.zeros(1, 64, dtype=torch.int8, device=DEVICE)
    call.direction[0, :5] = torch.tensor([31, 31, 31, 31, -10])
    for backend in ("reference", "triton"):
        pool = call.pool.clone()
        given = dict(centres=call.centres, direction=call.direction, backend=backend)
        quantize_pages(call.k, call.v, pool, call.pages, call.source, call.heads, call.format, **given)
        codes, _, scale, _ = call.parts(pool.cpu())
        assert (codes[0, 0, :5] == 1).all()  # below zero
        assert not scale.view(torch.int16).any()


class Setup(repack.Setup):
    """Buckets whose head caches have directions: new rows and tokens that change their width are rounded along them."""

    def __init__(self, tiers: tuple[str, ...], dim: int, **options) -> None:
        self.along = directions(6, dim, 1)
        super().__init__(tiers, dim, **options)

    def move(self, tokens: Tokens, target: torch.Tensor, rows, backend: str) -> None:
        fresh = None if rows is None else Rows(*rows, None, None, tokens.position, tokens.importance)
        self.buckets.backend = backend
        with Transaction(self.pool) as change:
            places = self.layers, self.requests
            target = target.to(DEVICE)
            apply.move(self.buckets, change, *places, tokens, target, fresh, self.centre, self.along)


CASES = {
    "all widths": dict(tiers=("K8V8", "K4V3", "K3V2", "K2V2"), dim=64),
    "blocks of 16": dict(tiers=("K3V3", "K2V2"), dim=80, dtype=torch.bfloat16),
    "blocks of 32": dict(tiers=("K8V4", "K4V4", "K4V2"), dim=96, dtype=torch.float16),  # codes are kept
}


@pytest.mark.parametrize("name", list(CASES))
def test_moves_with_a_direction_are_those_of_the_reference(name: str) -> None:
    """Plain and coded tokens to any lower tier, those that keep their codes, and new rows."""
    ours, wanted = (Setup(**CASES[name], tokens=6) for _ in range(2))
    for leave, new in ((0.4, 8), (0.6, 0)):
        ours.demote("triton", leave, new)
        wanted.demote("reference", leave, new)
        ours.check()
        repack.assert_equal(ours.state(), wanted.state())


def rows_of(setup: Setup, tier: int) -> Tokens:
    """Tokens of a tier, with the numbers of their head caches as in `Setup.tokens`."""
    tokens = setup.tokens()
    return tokens[(tokens.tier == tier).nonzero().flatten()]


def k_of(setup: Setup, tokens: Tokens, tier: int) -> Rows:
    """Their rows, in the same order."""
    parts = []
    for pair in (tokens.head_cache // 2).unique_consecutive().tolist():
        some = tokens[(tokens.head_cache // 2 == pair).nonzero().flatten()]
        some = replace(some, head_cache=some.head_cache % 2)
        parts.append(setup.buckets.read(setup.layers[pair], [setup.requests[pair]], some, tier))
    scale = None if tier == 0 else torch.cat([part.k_scale for part in parts])
    k, v = (torch.cat([getattr(part, name) for part in parts]) for name in ("k", "v"))
    return Rows(k, v, scale, None, tokens.position, tokens.importance)


@pytest.mark.parametrize("source", [0, 1])
def test_each_head_cache_has_its_own_direction(source: int) -> None:
    """In the reference: tokens from plain rows, or from K8, to the tier of K3."""
    setup = Setup(("K8V4", "K3V3"), 64, tokens=16)
    tokens, before = setup.tokens(), rows_of(setup, source)
    rows, own = k_of(setup, before, source), before.head_cache
    given = 3, True, reference.K_GAIN[3], setup.along[own]
    if source == 0:
        codes, _ = reference.quantize_plain(rows.k, setup.centre[own], *given)
    else:
        codes, _ = reference.quantize_coded(rows.k, rows.k_scale, 8, *given)
    wanted = dict(zip(zip(own.tolist(), before.position.tolist(), strict=True), codes, strict=True))
    setup.move(tokens, torch.where(tokens.tier == source, 2, tokens.tier), None, "reference")
    after = rows_of(setup, 2)
    places = zip(after.head_cache.tolist(), after.position.tolist(), strict=True)
    found = {place: code for place, code in zip(places, k_of(setup, after, 2).k, strict=True) if place in wanted}
    assert len(found) == len(wanted) > 20
    assert all(torch.equal(found[place], code) for place, code in wanted.items())


@pytest.mark.parametrize(("arch", "k_bits"), [(80, 3), (90, 2)])
def test_triton_compiles_ahead_of_time(arch: int, k_bits: int) -> None:
    """Both kernels with a direction, whose rows stay in registers."""
    from ahead import compile_triton

    format = Format(k_bits, 2, 64)
    names = (
        "pages",
        "source",
        "heads",
        "centres",
        "k_table",
        "k_high",
        "v_table",
        "v_high",
        "packed",
        "places",
        "formats",
    )
    types = {f"{name}_ptr": "*i32" for name in names}
    types |= {f"{name}_ptr": "*bf16" for name in ("k", "v")} | {f"{name}_ptr": "*u8" for name in ("pool", "scratch")}
    types |= {"centre_ptr": "*fp32", "steps_ptr": "*fp32", "pointers_ptr": "*i64", "side_ptr": "*i64"}
    types["direction_ptr"] = "*i8"
    constants = dict(
        DIM=64, WIDE=64, TOKENS=64, K_BITS=k_bits, V_BITS=2, K_STEP=0.3, V_STEP=0.9957, K_BYTES=format.k_bytes,
        V_BYTES=format.v_bytes, ROTATE=True, CENTRED=True, AIM=3900, BLOCK=1024,
    )  # fmt: skip
    kernel = "kvstrata.quant.triton", "quantize_kernel"
    used = compile_triton(*kernel, arch, types, constants, enable_fp_fusion=False)
    assert 0 < used["REG"] <= 255, used
    assert used["STACK"] == 0, used
    constants = dict(
        DIM=64, WIDE=64, ROTATED=64, PAGE=64, ROW=128, DTYPE="bfloat16", POSITION_BYTES=2, IMPORTANCE=True,
        CENTRED=True, AIMED=True, COLUMNS=len(moves.COLUMNS),
    )  # fmt: skip
    kernel = "kvstrata.cache.move.repack_triton", "repack_kernel"
    used = compile_triton(*kernel, arch, types, constants, enable_fp_fusion=False)
    assert 0 < used["REG"] <= 255, used
    assert used["LOCAL"] == 0, used
