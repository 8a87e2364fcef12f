"""Scales of fp8, simulated: the figures behind the decision for fp16 (docs/decisions.md)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvstrata.layout import Format, rotate
from kvstrata.quant import reference as quant
from kvstrata.tools.eval import contenders, rounding, scales

DECISIONS = Path(__file__).parent.parent / "docs" / "decisions.md"


def test_fp16_is_what_pages_have() -> None:
    x = torch.randn(64, 128)
    for bits in (2, 3, 4, 8):
        codes = quant.encode(rotate(x), quant.step_of(rotate(x), bits), bits)
        pages = quant.decode(codes, quant.refit(rotate(x), codes, bits), bits)
        assert torch.equal(scales.round_trip(x, bits, "fp16"), pages)


@pytest.mark.parametrize(("kind", "most"), [("e4m3", 1 / 16), ("e5m2", 1 / 8)])
def test_a_page_factor_keeps_small_scales(kind: str, most: float) -> None:
    scale = torch.rand(2, 100) * 1e-4 + 1e-4  # below the range of e4m3; the last page is not full
    by_page = scales.round_scales(scale, f"{kind} by page")
    assert by_page.shape == scale.shape
    assert ((by_page - scale) / scale).abs().max() < most + 2e-3
    assert scales.round_scales(torch.tensor([1e6]), kind) == torch.finfo(scales.DTYPES[kind]).max
    assert bool((scales.round_scales(torch.zeros(64), f"{kind} by page") == 0).all())


def test_what_fp8_costs_grows_with_the_width() -> None:
    rows = scales.samples()["Gaussian"]
    lost = [scales.sqnr(rows, bits, "fp16") - scales.sqnr(rows, bits, "e4m3 by page") for bits in (2, 3, 4, 8)]
    assert lost == sorted(lost)
    assert lost[0] < 0.05
    assert lost[-1] > 10


def test_what_fp8_saves_is_less_than_it_costs() -> None:
    """Two bytes spent on wider codes for some tokens lower the squared error by more than fp8 scales raise it."""
    random = torch.Generator().manual_seed(1)
    k, v = torch.randn(2, 2048, 128, generator=random)
    q = 2 * torch.randn(256, 128, generator=random)
    squares = {
        (name, kind): scales.attention_error(q, k, v, Format.parse(name, 128), kind) ** 2
        for name in ("K4V4", "K4V3", "K3V2")
        for kind in ("fp16", "e4m3", "e4m3 by page")
    }
    for name, wider in (("K4V3", "K4V4"), ("K3V2", "K4V3")):
        gap = Format.parse(wider, 128).bytes_per_token - Format.parse(name, 128).bytes_per_token
        saved = 1 - (squares[wider, "fp16"] / squares[name, "fp16"]) ** (2 / gap)
        for kind in ("e4m3", "e4m3 by page"):
            assert squares[name, kind] / squares[name, "fp16"] - 1 > saved


def test_the_tables_in_the_docs() -> None:
    """Printed by the module; figures may differ in the last digit from machine to machine."""
    text = DECISIONS.read_text(encoding="utf-8")
    for table in (scales.sqnr_table(), scales.attention_table()):
        header, _, *lines = table.splitlines()
        assert header in text
        kept = text[text.index(header) :].splitlines()[2 : 2 + len(lines)]
        for line, known in zip(lines, kept, strict=True):
            cells, figures = (row.strip("| ").split(" | ") for row in (line, known))
            assert cells[:2] == figures[:2]
            for a, b in zip(cells[2:], figures[2:], strict=True):
                assert float(a.rstrip("% ")) == pytest.approx(float(b.rstrip("% ")), abs=0.3)


def test_the_simulation_in_a_model_takes_them() -> None:
    x = torch.randn(1, 2, 70, 64)
    plain = rounding.round_rows(x, 4, 1.0)
    assert torch.allclose(rounding.round_rows(x, 4, 1.0, "fp16"), plain, atol=2e-3)
    assert not torch.allclose(rounding.round_rows(x, 4, 1.0, "e5m2"), plain, atol=2e-2)
    names = [contender.name for contender in contenders.at_bits(2.5, scales=["e4m3"])]
    assert names == ["simulated K3V2, 2.5 bits", "simulated K3V2 e4m3, 2.5 bits"]
    with pytest.raises(ValueError, match=r"scales: expected one of fp16, e4m3, .*, got 'fp8'"):
        contenders.at_bits(2.5, scales=["fp8"])
