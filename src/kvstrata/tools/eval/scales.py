"""Scales of fewer bits, simulated: what fp8 in place of fp16 costs, and what it saves.

A row has one scale, whatever its width: with fp8 a token of one KV head is two bytes smaller. Rounding it makes the row
longer or shorter by up to 1 / 16 (e4m3) or 1 / 8 (e5m2), an error in addition to that of the codes; all of it is in the
direction of the row, so that it moves the scores that are large. ``by page``: an fp16 factor for each page and side
keeps the scales of its tokens in the range of fp8.

`python -m kvstrata.tools.eval.scales` prints the tables of docs/decisions.md.
"""

from __future__ import annotations

import torch

from kvstrata.layout import Format, rotate
from kvstrata.quant import reference as quant
from kvstrata.tools.render import Grid

FORMATS = ("K8V8", "K8V4", "K4V4", "K4V3", "K4V2", "K3V3", "K3V2", "K2V2")
KINDS = ("fp16", "e4m3", "e5m2", "e4m3 by page", "e5m2 by page")
DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
TOP = {"e4m3": 256.0, "e5m2": 1.0}  # what the largest scale of a page becomes
PAGE_TOKENS = 64


def check_kind(kind: str) -> str:
    if kind not in KINDS:
        raise ValueError(f"scales: expected one of {', '.join(KINDS)}, got {kind!r}")
    return kind


def round_scales(scale: torch.Tensor, kind: str) -> torch.Tensor:
    """float32 scales ``[..., tokens]`` as they come back from a page; the tokens are those of pages one after the
    other."""
    if check_kind(kind) == "fp16":
        return scale.half().float()
    name, _, by_page = kind.partition(" ")
    if not by_page:
        return _fp8(scale, name)
    tokens = scale.shape[-1]
    pages = torch.nn.functional.pad(scale, (0, -tokens % PAGE_TOKENS)).unflatten(-1, (-1, PAGE_TOKENS))
    factor = (pages.amax(-1, keepdim=True) / TOP[name]).half().float().clamp(min=quant.SMALLEST_STEP)
    return (_fp8(pages / factor, name) * factor).flatten(-2)[..., :tokens]


def _fp8(x: torch.Tensor, name: str) -> torch.Tensor:
    dtype = DTYPES[name]
    return x.clamp(max=torch.finfo(dtype).max).to(dtype).float()


def scale_bytes(kind: str) -> float:
    """Both scales of one token of one KV head."""
    return 4.0 if check_kind(kind) == "fp16" else 2 + (4 / PAGE_TOKENS if "page" in kind else 0)


def round_trip(x: torch.Tensor, bits: int, kind: str, gain: float = 1.0) -> torch.Tensor:
    """Rows ``[..., tokens, D]`` through codes as pages have them, with such scales; not rotated back."""
    rows = rotate(x.float())
    codes = quant.encode(rows, quant.step_of(rows, bits), bits)
    level = quant.levels(codes, bits)
    scale = (rows * level).sum(-1) / level.square().sum(-1) * gain
    return level * round_scales(scale, kind).unsqueeze(-1)


def sqnr(x: torch.Tensor, bits: int, kind: str) -> float:
    """Decibels: the error of each row relative to it, averaged over rows."""
    rows = rotate(x.float())
    error = (round_trip(x, bits, kind) - rows).square().sum(-1) / rows.square().sum(-1)
    return float(-10 * error.mean().log10())


def attention_error(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, format: Format, kind: str) -> float:
    """Relative error of attention's output for queries ``[n, D]`` over rows ``[tokens, D]`` in this format."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v

    exact = attend(*(rotate(x.float()) for x in (q, k, v)))
    coded = (
        round_trip(k, format.k_bits, kind, quant.K_GAIN[format.k_bits]),
        round_trip(v, format.v_bits, kind, quant.V_GAIN[format.v_bits]),
    )
    return float((attend(rotate(q.float()), *coded) - exact).norm() / exact.norm())


def samples(tokens: int = 1024, head_dim: int = 128, seed: int = 0) -> dict[str, torch.Tensor]:
    """Rows to round: Gaussian, as small as V often is, with norms over three decades, and with heavy tails."""
    random = torch.Generator().manual_seed(seed)
    rows = torch.randn(tokens, head_dim, generator=random)
    norms = torch.randn(tokens, 1, generator=random)
    squares = torch.randn(3, tokens, head_dim, generator=random).square().mean(0)
    return {
        "Gaussian": rows,
        "Gaussian x 0.05": 0.05 * rows,
        "log-normal norms": rows * norms.exp(),
        "Student t, 3 degrees": rows / squares.sqrt(),
    }


def sqnr_table(tokens: int = 1024) -> str:
    """SQNR of every width, kind of scale and sample, as Markdown."""
    lines = [
        [name, f"{bits}", *(f"{sqnr(rows, bits, kind):.1f}" for kind in KINDS)]
        for name, rows in samples(tokens).items()
        for bits in (2, 3, 4, 8)
    ]
    return Grid("", ["rows", "bits", *KINDS], lines).markdown()


def attention_table(spread: float = 2.0, tokens: int = 1024, head_dim: int = 128) -> str:
    """Relative error of attention over Gaussian rows by format, and bytes of a token, as Markdown; ``spread`` is the
    standard deviation of scores."""
    random = torch.Generator().manual_seed(1)
    k, v = torch.randn(2, tokens, head_dim, generator=random)
    q = spread * torch.randn(256, head_dim, generator=random)
    lines = []
    for name in FORMATS:
        format = Format.parse(name, head_dim)
        errors = [f"{100 * attention_error(q, k, v, format, kind):.1f} %" for kind in KINDS]
        fp8 = format.bytes_per_token - scale_bytes("fp16") + scale_bytes("e4m3")
        lines.append([name, f"{format.bytes_per_token}", f"{fp8:g}", *errors])
    return Grid("", ["format", "bytes, fp16", "bytes, fp8", *KINDS], lines).markdown()


if __name__ == "__main__":
    print(f"{sqnr_table()}\n\n{attention_table()}")
