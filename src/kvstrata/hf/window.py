"""A layer with a sliding window: a 16-bit tail, and a ring of packed pages for the rest of the window.

    positions of a row   0 ......... n - W - MARGIN ......................... n - C ............ n
                           gone     | packed pages, slot = position mod ring | tail, 16 bit     |

Tokens that no later query can see are overwritten, so the bytes are those of one window, however long the text is. All
rows have the same number C of tail columns, right-aligned; shorter rows have padding on the left. A decode step attends
to both parts and merges them by log-sum-exp; everything else unpacks the window and attends with the model's own
function and mask. K of each row has its own balance and centre (window_rows.py).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Any, Protocol, TypeVar, cast

import torch
from transformers.cache_utils import CacheLayerMixin, DynamicSlidingWindowLayer

from kvstrata.attention import decode_packed
from kvstrata.layout import Format
from kvstrata.quant import reference as quant
from kvstrata.quant.calibration import Calibration
from kvstrata.store import store_packed

from . import attention, support
from . import mask as masks
from .logits import Logits
from .owned import Owned
from .rope import frequencies
from .window_rows import LARGEST, RowCalibration

T = TypeVar("T")
LADDER = ("K8V8", "K8V4", "K4V4", "K4V3", "K4V2", "K3V2", "K2V2")
LEAST = 256  # smaller windows are left to transformers: the tail would be a large part of them
MARGIN = 32  # tokens before the window that are kept, for `crop`
NUMBERS, TENSORS = ("columns", "lengths", "packed_to", "ended"), ("pages", "tail_k", "tail_v")  # in a file


class Owner(Protocol):
    """The part of a `StrataCache` that these layers use."""

    dtype: torch.dtype | None
    checked_window: masks.LastMask
    shares: bool
    options: dict[str, Any]
    calibration: Calibration | None
    _text: Any

    def _keep_plain(self, place: int, reason: str) -> Any: ...


def choose_format(fraction: float, head_dim: int, page_tokens: int) -> Format | None:
    """The widest format that takes at most ``fraction`` of 16 bit; None if there is none."""
    formats = (Format.parse(name, head_dim, page_tokens) for name in LADDER)
    return next((f for f in formats if f.bytes_per_token <= fraction * 4 * head_dim), None)


def window_of(text: Any, place: int, layer: Any) -> int | None:
    """Sliding window of a layer of transformers' `DynamicCache` that can be compressed, or None."""
    window = getattr(layer, "sliding_window", None)
    return window if window and window >= LEAST and support.slides(text, place, layer) else None


def _without_autocast(method: Callable[..., T]) -> Callable[..., T]:
    """Keep the dtypes of the tail and of the pages whatever an autocast around the model says."""

    @wraps(method)
    def run(self: WindowLayer, *args: Any) -> T:
        if not torch.is_autocast_enabled(self.device.type):
            return method(self, *args)
        with torch.autocast(self.device.type, enabled=False):
            return method(self, *args)

    return run


@lru_cache(maxsize=16)
def _ring_table(rows: int, blocks: int, device: torch.device) -> torch.Tensor:
    """Block table ``[rows, 2 * blocks]`` of rings of ``blocks`` blocks, the same for all layers and steps."""
    with torch.inference_mode(False):
        block = torch.arange(2 * blocks, device=device) % blocks
        return (torch.arange(rows, device=device).unsqueeze(1) * blocks + block).int()


class WindowLayer(Owned[Owner], CacheLayerMixin):
    """Packed pages of one window; ``columns`` is the length as transformers counts it, padding included."""

    is_sliding = True
    is_compileable = False
    is_croppable = False  # crop removes tokens but does not restore 16-bit values of packed ones

    format: Format  # set with the first token, like the tensors
    pages: torch.Tensor  # uint8 [rows * ring_blocks, kv_heads, page_bytes]
    tail_k: torch.Tensor  # [rows, kv_heads, C, D]
    tail_v: torch.Tensor
    calibration: RowCalibration

    def __init__(
        self, owner: Owner, place: int, index: int, sliding_window: int, fraction: float, recent_tokens: int
    ) -> None:
        """``place``: among the model's layers, ``index``: among those with a compressed window."""
        super().__init__()
        self.owner, self.place, self.index = owner, place, index
        self.sliding_window, self.fraction = sliding_window, fraction
        self.recent_tokens = min(recent_tokens, sliding_window // 8)
        self.page_tokens = 64 if sliding_window >= 1024 else 16
        self.ring_blocks = -(-(sliding_window - self.recent_tokens + MARGIN) // self.page_tokens) + 1
        self.attend_shared: attention.AttendShared | None = None
        self.reset()

    def plain(self) -> DynamicSlidingWindowLayer:
        """transformers' own layer, to replace this one."""
        return DynamicSlidingWindowLayer(self.sliding_window)

    def reset(self) -> None:
        self.columns, self.is_initialized = 0, False
        self.lengths: list[int] = []  # tokens of each row
        self.packed_to: list[int] = []  # position after the last one that was ever packed
        self.ended: list[bool] = []  # rows whose last column is padding
        self.pages = self.tail_k = self.tail_v = torch.empty(0, 0, 0, 0, device="cpu")
        self.calibration = RowCalibration(0, 0, 0, "cpu")

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        rows, heads, _, dim = key_states.shape
        dtype = self.owner.dtype or (torch.float16 if key_states.dtype == torch.float32 else key_states.dtype)
        self.dtype, self.device = dtype, key_states.device
        self.format = self._format(dim)
        size = (rows * self.ring_blocks, heads, self.format.page_bytes)
        with torch.inference_mode(False):  # steps outside inference mode write to it
            self.pages = torch.zeros(size, dtype=torch.uint8, device=self.device)
        self.tail_k, self.tail_v = torch.zeros(2, rows, heads, 0, dim, dtype=dtype, device=self.device)
        self.calibration = RowCalibration(rows, heads, dim, self.device)
        self.lengths, self.packed_to, self.ended = [0] * rows, [0] * rows, [False] * rows
        self.is_initialized = True

    def _format(self, head_dim: int) -> Format:
        """Format of the pages; raises ValueError if none fits the budget."""
        form = choose_format(self.fraction, head_dim, self.page_tokens)
        if form is None:
            raise ValueError(f"budget: expected more than {LADDER[-1]} of {head_dim} values takes, got {self.fraction}")
        return form

    def misfit(self, key: torch.Tensor, value: torch.Tensor) -> str | None:
        """Reason why K and V ``[rows, kv_heads, n, D]`` cannot be packed, or None."""
        if reason := support.misfit(key, value, None):
            return reason
        if choose_format(self.fraction, key.shape[-1], self.page_tokens) is None:
            return f"a budget of {self.fraction}, less than {LADDER[-1]} of {key.shape[-1]} values takes"
        return None

    @torch.compiler.disable  # graph break: the cache runs eagerly
    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Wrap the new rows for `attend`; a layer whose shape cannot be packed is replaced by a plain one here."""
        attention.connect(self.owner)
        if not self.is_initialized:
            if reason := self.misfit(key_states, value_states):
                reason = f"sliding window of {self.sliding_window}, {reason}"
                return self.owner._keep_plain(self.place, reason).update(key_states, value_states, *args, **kwargs)
            self.lazy_initialization(key_states, value_states)
        else:
            support.check_shape(key_states, self.tail_k.shape[1], self.tail_k.shape[3])
        return attention.Pending(self, key_states), attention.Pending(self, value_states)

    def attend(self, call: attention.AttentionCall) -> torch.Tensor:
        """Attention output ``[rows, queries, heads, D]``; stores K and V."""
        query, key, value, mask, positions, model_attention, logits, _ = call
        rows, queries = len(query), query.shape[2]
        if rows != len(self.lengths):
            raise ValueError(f"past_key_values: expected {len(self.lengths)} rows as before, got {rows}")
        real = self._tokens_among(mask, rows, queries)
        if not self.columns:
            self._calibrate(call, real)
        if queries == 1 and self.columns and real is None:
            self._append(key, value, None)
            if self.owner.shares:
                self.attend_shared = lambda query, mask, model_attention, logits: self._decode(query, logits)
            return self._decode(query, logits)
        if queries > 1 and positions is not None and positions.dim() == 2:
            masks.check_positions(positions.to(query.device), real)
        before = min(self.columns, self.sliding_window - 1)
        keys, values = key, value
        if before:
            past_k, past_v = self._past(before, key.dtype)
            keys, values = torch.cat([past_k, key], 2), torch.cat([past_v, value], 2)
        if self.owner.shares:
            self.attend_shared = lambda query, mask, model_attention, logits: self._prompt(
                query, keys, values, mask, model_attention
            )
        out = self._prompt(query, keys, values, mask, model_attention)
        self._append(key, value, real)
        return out

    def _calibrate(self, call: attention.AttentionCall, real: torch.Tensor | None) -> None:
        """Fix the balance of all rows, and with a calibration the centre."""
        own, given = self.calibration, self.owner.calibration
        own.rope = frequencies(self.owner._text, call.key.shape[3], "sliding_attention") or []
        own.centres = call.logits.softcap is None
        if given is not None and given.windows:
            own.adopt(given.windows[self.index])
        elif self.owner.options.get("balance") is not False:
            own.estimate(call, real)

    # Tokens and padding

    def _tokens_among(self, mask: torch.Tensor | None, rows: int, queries: int) -> torch.Tensor | None:
        """Token mask of the new columns, bool ``[rows, queries]``, None without padding.

        Raises NotImplementedError for other masks, and for a row that continues after padding: windows count columns.
        """
        real = None
        if mask is not None:
            masks.check_shape(mask, queries, self.get_mask_sizes(queries)[0])
            real = masks.new_tokens(mask, queries).expand(rows, -1)
        if any(self.ended) or (real is not None and not bool(real.all())):
            new = torch.ones(rows, queries, dtype=torch.bool) if real is None else real.cpu()
            for row, own in enumerate(new):
                begun = self.ended[row] or (self.lengths[row] > 0 and not bool(own[0]))
                if begun and bool(own.any()):
                    raise NotImplementedError(
                        "attention_mask: expected padding on the left in layers with a sliding window, got row"
                        f" {row} with tokens behind padding; budget=1.0 leaves these layers to transformers"
                    )
        if mask is not None and real is not None and not self.owner.checked_window.holds(mask):
            self._check_mask(mask, real)
            self.owner.checked_window.set(mask)
        return None if real is None or bool(real.all()) else real

    def _check_mask(self, mask: torch.Tensor, new: torch.Tensor) -> None:
        """Raise NotImplementedError unless a mask is causal order, the window and padding."""
        queries, (width, offset) = new.shape[1], self.get_mask_sizes(new.shape[1])
        column = torch.arange(offset, offset + width, device=mask.device)
        first = self._numbers([self.columns - n for n in self.lengths]).unsqueeze(1)
        known = torch.cat([(column[:-queries] >= first) & (column[:-queries] < self.columns), new], 1)
        masks.check_causal(mask, known, queries, self.sliding_window)

    # Reading

    @_without_autocast
    def _decode(self, query: torch.Tensor, logits: Logits) -> torch.Tensor:
        """Attention of one query in every row, whose token is stored: packed pages and tail, merged by log-sum-exp."""
        rows, heads, width = *query.shape[:2], self.tail_k.shape[2]
        q = query[:, :, 0].to(self.dtype)
        out, lse = self._attend_tail(q, logits)
        parts, tops = [out], [lse]
        if self.sliding_window > width and max(self.lengths) > width:
            own, of_centre = self.calibration.of_query(q)
            packed = decode_packed(
                own, self.pages, self._table(rows), self._packed_lens(), self.format, scale=logits.scale,
                sliding_window=self.sliding_window - width, softcap=logits.softcap, return_lse=True,
            )  # fmt: skip
            assert not isinstance(packed, torch.Tensor)
            parts.append(packed.out.float())
            tops.append(cast(torch.Tensor, packed.lse) + of_centre * logits.scale)
        if logits.sinks is not None:
            parts.append(torch.zeros_like(out))
            tops.append(logits.sinks.detach().float().expand(rows, heads))
        weights = torch.stack(tops).softmax(0).unsqueeze(-1)
        return (weights * torch.stack(parts)).sum(0).unsqueeze(1).to(query.dtype)

    def _attend_tail(self, q: torch.Tensor, logits: Logits) -> tuple[torch.Tensor, torch.Tensor]:
        """Output ``[rows, heads, D]`` and log-sum-exp ``[rows, heads]`` over the tail, float32."""
        rows, kv_heads, width, dim = self.tail_k.shape
        by_group = q.float().view(rows, kv_heads, -1, dim)
        scores = by_group @ self.tail_k.float().transpose(-1, -2) * logits.scale
        if logits.softcap is not None:
            scores = (scores / logits.softcap).tanh() * logits.softcap
        if min(self.lengths) < width:
            first = self._numbers([width - n for n in self.lengths]).view(-1, 1, 1, 1)
            scores = scores.masked_fill(torch.arange(width, device=q.device) < first, -torch.inf)
        lse = scores.logsumexp(-1, keepdim=True)
        out = (scores - lse).exp() @ self.tail_v.float()
        return out.reshape(rows, -1, dim), lse.reshape(rows, -1)

    def _packed_lens(self) -> torch.Tensor:
        """Packed tokens of each row, int32, modulo the ring, so that a table of two turns of the ring suffices."""
        ring, width = self.ring_blocks * self.page_tokens, self.tail_k.shape[2]
        counts = [max(n - width, 0) for n in self.lengths]
        return self._numbers([n if n < ring else ring + n % ring for n in counts], torch.int32)

    def _numbers(self, values: list[int], dtype: torch.dtype = torch.int64) -> torch.Tensor:
        """Copy a few numbers to the device without waiting for it."""
        return torch.tensor(values, dtype=dtype, device="cpu").to(self.device, non_blocking=True)

    def _table(self, rows: int) -> torch.Tensor:
        """Block table of the rings, int32 ``[rows, 2 * ring_blocks]``."""
        return _ring_table(rows, self.ring_blocks, self.device)

    @_without_autocast
    def _past(self, count: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V ``[rows, kv_heads, count, D]`` of each row's last tokens, right-aligned; zero before them."""
        rows, width = len(self.lengths), self.tail_k.shape[2]
        tails = [x[:, :, max(width - count, 0) :].to(dtype) for x in (self.tail_k, self.tail_v)]
        if count <= width:
            return tails[0], tails[1]
        k, v = quant.restore(*quant.dequantize_page(self.pages.unsqueeze(2), self.format), self.format)
        ends = self._numbers(self.lengths).unsqueeze(1)
        position = ends - count + torch.arange(count - width, device=self.device)
        slot = position % (self.ring_blocks * self.page_tokens)
        out = []
        rings = [x.squeeze(2).unflatten(0, (rows, -1)).transpose(1, 2).flatten(2, 3) for x in (k, v)]
        rings[0] = self.calibration.restored(rings[0])
        for ring, tail in zip(rings, tails, strict=True):  # [rows, kv_heads, slots, D]
            index = slot[:, None, :, None].expand(-1, ring.shape[1], -1, ring.shape[-1])
            old = ring.gather(2, index).masked_fill((position < 0)[:, None, :, None], 0)
            out.append(torch.cat([old.to(dtype), tail], 2))
        return out[0], out[1]

    def _prompt(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        model_attention: attention.ModelAttention,
    ) -> torch.Tensor:
        """The model's own attention over K and V of the window and the new rows, in chunks of queries with a mask."""
        before = key.shape[2] - query.shape[2]
        if mask is None:
            return model_attention(query, key, value, None)
        parts = []
        for new in masks.chunks(query.shape[2]):
            seen = slice(max(before + new.start - self.sliding_window + 1, 0), before + new.stop)
            parts.append(model_attention(query[:, :, new], key[:, :, seen], value[:, :, seen], mask[:, :, new, seen]))
        return torch.cat(parts, 1)

    # Writing

    @_without_autocast
    def _append(self, key: torch.Tensor, value: torch.Tensor, real: torch.Tensor | None) -> None:
        """Append the new rows, without padding, to the tail, and pack tokens older than the tail keeps."""
        new = [key.detach(), value.detach()]  # detached: the tail must not keep autograd graphs alive
        if self.dtype == torch.float16 != key.dtype:
            new = [x.clamp(-LARGEST, LARGEST) for x in new]
        self.columns += key.shape[2]
        if real is None:
            self.lengths = [n + key.shape[2] for n in self.lengths]
            self.ended = [False] * len(self.ended)
        else:
            order = real.int().argsort(dim=1, stable=True)[:, None, :, None]  # padding first
            new = [x.gather(2, order.expand(-1, x.shape[1], -1, x.shape[-1])) for x in new]
            self.lengths = [n + c for n, c in zip(self.lengths, real.sum(1).tolist(), strict=True)]
            self.ended = [n > 0 and not last for n, last in zip(self.lengths, real[:, -1].tolist(), strict=True)]
        self.tail_k, self.tail_v = (
            torch.cat([tail, x.to(self.dtype)], 2) for tail, x in zip((self.tail_k, self.tail_v), new, strict=True)
        )
        if self.tail_k.shape[2] >= self.recent_tokens + self.page_tokens:
            self._pack()

    def _pack(self) -> None:
        """Move all but the last ``recent_tokens`` of the tail to the ring."""
        rows, kv_heads, width, dim = self.tail_k.shape
        count, ring = width - self.recent_tokens, self.ring_blocks * self.page_tokens
        ends = self._numbers([n - self.recent_tokens for n in self.lengths]).unsqueeze(1)
        position = ends - count + torch.arange(count, device=self.device)
        slot = torch.arange(rows, device=self.device).unsqueeze(1) * ring + position % ring
        slot = slot.masked_fill((position < 0) | (position < ends - ring), -1).flatten()
        first = [row for row, n in enumerate(self.lengths) if n > self.recent_tokens and not self.packed_to[row]]
        self.calibration.fix_centres(first, self.tail_k, [self.lengths[row] for row in first])
        old = (self.calibration.packed(self.tail_k[:, :, :count]), self.tail_v[:, :, :count])
        k, v = (x.transpose(1, 2).reshape(-1, kv_heads, dim) for x in old)
        store_packed(k, v, self.pages, slot, self.format)
        self.tail_k, self.tail_v = (x[:, :, count:].contiguous() for x in (self.tail_k, self.tail_v))
        self.packed_to = [max(n - self.recent_tokens, 0, p) for n, p in zip(self.lengths, self.packed_to, strict=True)]

    # Files

    def numbers(self) -> dict[str, Any]:
        """Numbers of this layer in a file, in addition to its tensors."""
        own = {name: getattr(self, name) for name in NUMBERS}
        own |= self.calibration.numbers()
        return own | {"window": self.sliding_window, "dtype": str(self.dtype) if self.is_initialized else None}

    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors of this layer by name."""
        own = {name: getattr(self, name) for name in TENSORS} | self.calibration.tensors()
        return own if self.is_initialized else {}

    def restore(self, numbers: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        """Restore a layer from `numbers` and `tensors`; raises KeyError or ValueError for anything else."""
        for name in NUMBERS:
            setattr(self, name, numbers[name])
        if numbers["dtype"] is None:
            return
        tail = tensors["tail_k"]
        self.dtype, self.device = tail.dtype, tail.device
        self.format = self._format(tail.shape[-1])
        rows, heads = tail.shape[:2]
        shape = (rows * self.ring_blocks, heads, self.format.page_bytes)
        if tensors["pages"].shape != shape or tail.shape != tensors["tail_v"].shape or len(self.lengths) != rows:
            raise ValueError(f"window: expected pages {shape}, got {tuple(tensors['pages'].shape)}")
        for name in TENSORS:
            setattr(self, name, tensors[name].clone())  # tensors of a file may not be aligned
        self.calibration = RowCalibration(rows, heads, tail.shape[-1], self.device)
        self.calibration.restore(numbers, tensors)
        self.is_initialized = True

    # Interface of transformers' cache layers

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last ``-tokens_to_remove`` columns; RuntimeError if the window would reach overwritten tokens."""
        count = -tokens_to_remove
        if count <= 0 or not self.is_initialized:
            return
        lengths = [max(n - count, 0) for n in self.lengths]
        ring, window = self.ring_blocks * self.page_tokens, self.sliding_window
        if any(self.ended):
            raise NotImplementedError("crop: expected rows that end with a token, got padding on the right")
        if any(max(n - window + 1, 0) < p - ring for n, p in zip(lengths, self.packed_to, strict=True)):
            raise RuntimeError(
                f"crop: expected at most {MARGIN} columns to remove once the window of {window} is full, got {count}"
            )
        keep = max(self.tail_k.shape[2] - count, 0)
        self.tail_k, self.tail_v = self.tail_k[:, :, :keep], self.tail_v[:, :, :keep]
        self.columns, self.lengths = max(self.columns - count, 0), lengths

    def _pick(self, index: torch.Tensor) -> None:
        if self.is_initialized:
            rows = torch.arange(len(self.lengths))[index.cpu()]
            self.lengths, self.packed_to, self.ended = (
                [x[row] for row in rows.tolist()] for x in (self.lengths, self.packed_to, self.ended)
            )
            rows = rows.to(self.device)
            with torch.inference_mode(False):
                self.pages = self.pages.unflatten(0, (-1, self.ring_blocks))[rows].flatten(0, 1)
            self.tail_k, self.tail_v = self.tail_k[rows], self.tail_v[rows]
            self.calibration.pick(rows)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self._pick(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._pick(torch.arange(len(self.lengths)).repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self._pick(indices)

    def get_seq_length(self) -> int:
        return self.columns

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        before = min(self.columns, self.sliding_window - 1)
        return before + query_length, self.columns - before

    def get_max_length(self) -> int:
        return self.sliding_window

    def full_bytes(self) -> int:
        """Bytes of the window's tokens at 16 bit."""
        tokens = sum(min(n, self.sliding_window - 1) for n in self.lengths)
        return tokens * self.tail_k.shape[1] * 4 * self.tail_k.shape[3]

    def offload(self) -> None:
        raise NotImplementedError("offloading: expected False, got True; a StrataCache stays on its device")
