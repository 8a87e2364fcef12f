"""The quantise benchmark: K and V rows in bfloat16 into whole pages of codes, all heads in one launch.

The rows of a prompt: every page has 64 consecutive tokens of one head, and every head has its centre. Bytes are rows
read, pages written and the index of rows. ``plain`` cases skip the rotation, to show its cost; ``aimed`` ones have a
direction for every head, as the tiers of a `StrataCache` do.
"""

from __future__ import annotations

from functools import partial

import torch

from kvstrata.backends import missing
from kvstrata.layout import Format
from kvstrata.layout.format import UNIT
from kvstrata.quant import reference
from kvstrata.quant.job import Job
from kvstrata.quant.op import quantize_pages
from kvstrata.tools.bench import Bench, Case, sets_for
from kvstrata.tools.bench.clock import Call

POISON = 0xFF
CHECKED = 256  # pages that are compared with the reference, code by code


class Inputs(Job):
    """One input set: rows, pages, and the source rows of each page."""

    @classmethod
    def make(
        cls, format: Format, tokens: int, heads: int, device: torch.device, seed: int, aimed: bool = False
    ) -> Inputs:
        generator = torch.Generator(device).manual_seed(seed)
        k, v = torch.randn(2, tokens, heads, format.head_dim, generator=generator, device=device).bfloat16()
        size, runs = format.page_tokens, tokens // format.page_tokens
        n = runs * heads
        order = torch.randperm(n, generator=generator, device=device)
        query = torch.randn(heads, format.head_dim, generator=generator, device=device)
        rows = torch.arange(tokens, dtype=torch.int32, device=device).view(runs, 1, size).expand(runs, heads, size)
        return cls(
            k=k,
            v=v,
            pool=torch.empty(n * format.page_bytes, dtype=torch.uint8, device=device),
            pages=(order * (format.page_bytes // UNIT)).int(),
            source=rows.reshape(n, size).contiguous(),
            heads=torch.arange(heads, dtype=torch.int32, device=device).repeat(runs),
            format=format,
            centre=torch.randn(heads, format.head_dim, generator=generator, device=device),
            centres=torch.arange(heads, dtype=torch.int32, device=device).repeat(runs),
            direction=reference.direction_of(query, format.rotate) if aimed else None,
        )

    def run(self, backend: str) -> None:
        quantize_pages(**self._asdict(), backend=backend)

    def assert_quantised(self) -> None:
        """Compare the bytes of some pages with the reference; all others must have been written."""
        f = self.format
        chosen = torch.linspace(0, len(self.pages) - 1, CHECKED, device=self.pool.device).long().unique()
        page = self.pool.view(-1, f.page_bytes)
        rows, head = self.source[chosen].long(), self.heads[chosen].long().unsqueeze(1)
        centre = self.centre[head]  # type: ignore[index]
        direction = None if self.direction is None else self.direction[head]
        want = reference.quantize_page(self.k[rows, head], self.v[rows, head], f, centre, direction)
        got = page[self.pages[chosen].long() * UNIT // f.page_bytes]
        sides = {
            "K": slice(0, f.v_offset),
            "V": slice(f.v_offset, f.scale_offset),
            "scales": slice(f.scale_offset, None),
        }
        for name, side in sides.items():
            assert torch.equal(got[:, side], want[:, side]), f"{name}: bytes differ from those of the reference"
        assert not (page[:, f.scale_offset :] == POISON).all(-1).any(), "a page was not written"


def build(format: Format, tokens: int, heads: int, sets: int, aimed: bool, device: torch.device) -> Bench:
    inputs = [Inputs.make(format, tokens, heads, device, seed, aimed) for seed in range(sets)]
    contenders: dict[str, Call] = {"kvstrata": lambda i: inputs[i].run("auto")}
    baseline = "triton" if missing("triton", device) is None else "reference"
    contenders[baseline] = lambda i: inputs[i].run(baseline)
    return Bench(
        contenders=contenders,
        poison=lambda name, i: inputs[i].pool.fill_(POISON),  # type: ignore[arg-type]
        check=lambda name, i, out: inputs[i].assert_quantised(),
        ours="kvstrata",
        baseline=baseline,
        host={"kvstrata": contenders["kvstrata"]},
    )


def cases(device: torch.device, quick: bool) -> list[Case]:
    cuda = device.type == "cuda"
    tokens = 65536 if cuda and not quick else 8192 if cuda else 1024
    heads = 8 if cuda else 2
    names = ["K8V8", "K4V4", "K3V3", "K2V2", "K4V2"] if not quick else ["K4V4"]
    listed = []
    for dim in (128, 64) if not quick else (128,):
        for name in names:
            kinds = [("", True, False)]
            if dim == 128:
                kinds.append(("-plain", False, False))
            if not name.startswith("K8"):
                kinds.append(("-aimed", True, True))
            for suffix, rotated, aimed in kinds:
                format = Format.parse(name, dim, rotate=rotated)
                moved = tokens * heads * (2 * dim * 2 + format.bytes_per_token + 4)
                params = {"format": name, "head_dim": dim, "rotate": rotated, "T": tokens}
                params |= {"aimed": True} if aimed else {}
                make = partial(build, format, tokens, heads, sets := sets_for(moved, device), aimed)
                listed.append(Case("quantize", f"{name}-d{dim}{suffix}", params, moved, make, sets=sets))
    return listed
