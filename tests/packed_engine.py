"""A small engine over packed pages with a tail and sink tokens: requests grow by chunks, share blocks and roll back.

It keeps every request's rows, and so knows what each position must read as: exact in tail and sinks, else what the
bytes of its page decode to. The pages of a twin, into which every token is packed at once, say which bytes a full page
must have.
"""

from __future__ import annotations

from itertools import accumulate

import torch

from kvstrata import Format, PlainRows, decode_packed, prefill_packed, store_packed
from packed_model import DEVICE, POISON, Batch, Calibration, memory, stored_rows


class Engine(Batch):
    """``tail``: pages of rows per slot, 0 for none; ``slots``: those of each request, negative for none."""

    def __init__(self, fmt: Format, requests: int, *, blocks: int = 8, kv_heads: int = 2, pages_per_block: int = 1,
                 tail: int = 1, sinks: int = 0, slots: list[int] | None = None, sink_slots: list[int] | None = None,
                 dtype: torch.dtype = torch.bfloat16, calibration: Calibration | None = None, strided: bool = False,
                 backend: str = "reference", seed: int = 0) -> None:  # fmt: skip
        self.fmt, self.dtype, self.calibration, self.kv_heads, self.backend = fmt, dtype, calibration, kv_heads, backend
        self.block_size, self.generator = pages_per_block * fmt.page_tokens, torch.Generator().manual_seed(seed)
        order = torch.randperm(requests * blocks + 2, generator=self.generator).int()
        self.block_table = order[: requests * blocks].view(requests, blocks).to(DEVICE)
        self.pages = memory(fmt, len(order), kv_heads, pages_per_block, strided)
        self.twin = memory(fmt, len(order), kv_heads, pages_per_block)
        self.lengths = [0] * requests
        self.history = torch.zeros(2, requests, blocks * self.block_size, kv_heads, fmt.head_dim, dtype=dtype)
        self.tail_slots = list(range(requests)) if slots is None else slots
        self.sink_slots = list(range(requests))[::-1] if sink_slots is None else sink_slots
        self.tail = self._rows(requests, tail * fmt.page_tokens, self.tail_slots) if tail else None
        self.sinks = self._rows(requests, sinks, self.sink_slots) if sinks else None
        self.stored: list[int] = []  # of the last step
        self.rolled_back = False

    def _rows(self, requests: int, tokens: int, slots: list[int]) -> PlainRows:
        """Rows of more slots than there are requests, all NaN, with something between them."""
        size = (2, requests + 1, self.kv_heads + 1, tokens, self.fmt.head_dim)
        k, v = torch.full(size, torch.nan, dtype=self.dtype, device=DEVICE)[:, :, 1:]
        return PlainRows(k, v, torch.tensor(slots, dtype=torch.int32, device=DEVICE))

    @property
    def seq_lens(self) -> torch.Tensor:
        return torch.tensor(self.lengths, dtype=torch.int32, device=DEVICE)

    @property
    def slots(self) -> list[torch.Tensor]:
        return [self.slots_of(row, torch.arange(n)) for row, n in enumerate(self.lengths)]

    @property
    def given(self) -> dict[str, PlainRows | None]:
        return dict(tail=self.tail, sink_tokens=self.sinks)

    def share(self, row: int, other: int, blocks: int) -> None:
        """A prefix hit: a request begins with another's first blocks, and no rows of its own."""
        assert self.lengths[row] == 0
        assert self.lengths[other] >= blocks * self.block_size
        self.block_table[row, :blocks] = self.block_table[other, :blocks]
        self.lengths[row] = blocks * self.block_size
        self.history[:, row, : self.lengths[row]] = self.history[:, other, : self.lengths[row]]
        if self.sinks is not None:  # its first tokens were computed by the other
            self.sink_slots[row] = -1
            self.sinks.slots[row] = -1

    def step(self, counts: list[int], padding: int = 0, ragged: bool = True) -> None:
        """Append tokens to each request in one call, with rows of padding behind."""
        assert ragged or len(set(counts)) == 1
        new = torch.randn(2, sum(counts) + padding, self.kv_heads, self.fmt.head_dim, generator=self.generator)
        new = new.to(self.dtype)
        slots, at = [], 0
        for row, count in enumerate(counts):
            position = torch.arange(self.lengths[row], self.lengths[row] + count)
            slots.append(self.slots_of(row, position))
            self.history[:, row, position] = new[:, at : at + count]
            self.lengths[row] += count
            at += count
        mapping = torch.cat([*slots, torch.full((padding,), -1)]).to(DEVICE)
        cu = torch.tensor([0, *accumulate(counts)], dtype=torch.int32, device=DEVICE) if ragged else None
        k, v = new.to(DEVICE)
        self.new, self.cu, self.stored = (k, v), cu, counts
        common = dict(calibration=self.calibration, backend=self.backend)
        rows = dict(**self.given, seq_lens=self.seq_lens, cu_seqlens_q=cu)
        store_packed(k, v, self.pages, mapping, self.fmt, **rows, **common)
        store_packed(k, v, self.twin, mapping, self.fmt, **common)

    def roll_back(self, row: int, count: int) -> None:
        """Drop the last tokens of a request, as after rejected drafts."""
        assert count <= self.lengths[row]
        self.lengths[row] -= count
        self.rolled_back = True  # pages behind the last may have been full once

    def split(self, row: int) -> tuple[int, int]:
        """Positions before the first are in sink rows, those from the second on in the tail."""
        page, length = self.fmt.page_tokens, self.lengths[row]
        packed = length // page * page if self.tail is not None and self.tail_slots[row] >= 0 else length
        kept = self.sinks.k.shape[2] if self.sinks is not None and self.sink_slots[row] >= 0 else 0
        return min(kept, packed), packed

    def rows(self, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        sinks, packed = self.split(row)
        exact = self.history[:, row, : self.lengths[row]].float()
        coded = stored_rows(self.pages, self.fmt, self.slots[row], self.calibration)
        return tuple(torch.cat([e[:sinks], c[sinks:packed], e[packed:]]) for e, c in zip(exact, coded, strict=True))  # type: ignore[return-value]

    def check_bytes(self) -> None:
        """Bytes of full pages are those of the twin; pages that are not full were never touched."""
        for row, length in enumerate(self.lengths):
            _, packed = self.split(row)
            page, per = self.fmt.page_tokens, self.block_size // self.fmt.page_tokens
            sizes = (-1, self.kv_heads, per, self.fmt.page_bytes)
            mine, twin = (x[self.block_table[row].long()].reshape(sizes) for x in (self.pages, self.twin))
            mine, twin = (x.transpose(1, 2).flatten(0, 1) for x in (mine, twin))
            full = packed // page
            assert torch.equal(mine[:full], twin[:full]), f"request {row}: full pages"
            if self.tail is not None and self.tail_slots[row] >= 0 and length > packed and not self.rolled_back:
                assert (mine[full + 1 :] == POISON).all(), f"request {row}: pages to come"

    def decode(self, q_lens: list[int] | None = None, group: int = 2, backend: str = "", **options: object) -> None:
        """The last positions of each request against the model."""
        q_lens = q_lens or [min(n, 1) for n in self.lengths]
        q = self.queries(q_lens, group)
        cu = torch.tensor([0, *accumulate(q_lens)], dtype=torch.int32, device=DEVICE)
        result = decode_packed(
            q, self.pages, self.block_table, self.seq_lens, self.fmt, calibration=self.calibration, cu_seqlens_q=cu,
            return_lse=True, backend=backend or self.backend, **self.given, **options,
        )  # fmt: skip
        self.compare(result, q, q_lens, {x: y for x, y in options.items() if x not in ("fixed_split", "workspace")})

    def prefill(self, backend: str, group: int = 2, **options: object) -> None:
        """The rows of the last step, unquantised, over what is before them, against the model."""
        q, (k, v) = self.queries(self.stored, group), (x[: sum(self.stored)] for x in self.new)
        cu = torch.tensor([0, *accumulate(self.stored)], dtype=torch.int32, device=DEVICE)
        result = prefill_packed(
            q, k, v, self.pages, self.block_table, self.seq_lens, cu, self.fmt, calibration=self.calibration,
            return_lse=True, backend=backend, **self.given, **options,
        )  # fmt: skip
        model = Fresh(self)
        model.compare(result, q, self.stored, dict(options))


class Fresh(Engine):
    """View of an engine in which the tokens of the last step read as given."""

    def __init__(self, engine: Engine) -> None:
        self.__dict__ |= engine.__dict__

    def rows(self, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        before = self.lengths[row] - self.stored[row]
        exact = self.history[:, row, before : self.lengths[row]].float()
        return tuple(torch.cat([x[:before], e]) for x, e in zip(super().rows(row), exact, strict=True))  # type: ignore[return-value]
