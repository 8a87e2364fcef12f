"""A layer with a sliding window: a ring of 16-bit rows for the newest tokens, and a ring of packed pages for the rest.

    positions of a row   0 ........ n - W - MARGIN ........................ n - C ............ n
                          gone    | packed pages, slot = position mod ring | tail, position mod C + 1     |

Tokens that no later query can see are overwritten, so the bytes are those of one window, however long the text is. Both
rings are in window_rings.py; K of each row has its own balance and centre (window_rows.py). A decode step moves one
token from the tail to the pages and attends to both (window_step.py). Everything else unpacks the window and attends
with the model's own function and mask.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NoReturn, Protocol

import numpy as np
import torch
from transformers.cache_utils import CacheLayerMixin, DynamicSlidingWindowLayer

from kvstrata.cache.policy.centre import HORIZON
from kvstrata.layout import Format
from kvstrata.quant.calibration import Calibration, LayerCalibration

from . import attention, balance, support
from . import mask as masks
from .forward import Forward
from .guard import FEWEST, MOST, Sample, WindowGuard
from .logits import Logits
from .owned import Owned
from .rope import interleaved, layer_frequencies
from .steps import Steps
from .window_counts import Geometry, RowCounts, StepSlots, behind_padding
from .window_prompts import Setting, WindowPrompts
from .window_rings import TENSORS, WindowRings, without_autocast
from .window_rows import RowCalibration, check_sizes
from .window_step import read, store, strata_window
from .window_warmup import load_kernels

LADDER = ("K8V8", "K8V4", "K4V4", "K4V3", "K4V2", "K3V2", "K2V2")
LEAST = 256  # smaller windows are left to transformers: the tail would be a large part of them
MARGIN = 32  # tokens before the window that are kept, for `crop`
GPU_QUERIES = 1 << 14  # on a GPU, queries of all rows and heads that attend in one call, so that they fill it


class Owner(Protocol):
    """The part of a `StrataCache` that these layers use."""

    dtype: torch.dtype | None
    checked_window: masks.LastMask
    shares: bool
    options: dict[str, Any]
    calibration: Calibration | None
    steps: Steps
    forward: Forward
    window_guard: WindowGuard | None
    window_prompts: WindowPrompts
    _text: Any

    @property
    def window_layers(self) -> dict[int, int]: ...

    def _useful_tokens(self, value: torch.Tensor, new: np.ndarray) -> np.ndarray: ...

    def _keep_plain(self, place: int, reason: str) -> Any: ...


@lru_cache(maxsize=64)
def choose_format(fraction: float, head_dim: int, page_tokens: int) -> Format | None:
    """The widest format that takes at most ``fraction`` of 16 bit; None if there is none."""
    formats = (Format.parse(name, head_dim, page_tokens) for name in LADDER)
    return next((f for f in formats if f.bytes_per_token <= fraction * 4 * head_dim), None)


def window_of(text: Any, place: int, layer: Any) -> int | None:
    """Sliding window of a layer of transformers' `DynamicCache` that can be compressed, or None."""
    window = getattr(layer, "sliding_window", None)
    return window if window and window >= LEAST and support.slides(text, place, layer) else None


class WindowLayer(WindowRings, Owned[Owner], CacheLayerMixin):
    """Tail and pages of one window; ``columns`` is the length as transformers counts it, padding included."""

    is_sliding = True
    is_compileable = False
    is_croppable = False  # crop removes tokens but does not restore 16-bit values of packed ones

    slots: StepSlots  # of the last step

    def __init__(
        self, owner: Owner, place: int, index: int, sliding_window: int, fraction: float, recent_tokens: int
    ) -> None:
        """``place``: among the model's layers, ``index``: among those with a compressed window."""
        super().__init__()
        self.owner, self.place, self.index = owner, place, index
        self.sliding_window, self.fraction = sliding_window, fraction
        self.recent_tokens = max(min(recent_tokens, sliding_window // 8), 1)
        self.page_tokens = 64 if sliding_window >= 1024 else 16
        self.ring_blocks = -(-(sliding_window - self.recent_tokens + MARGIN) // self.page_tokens)
        self.ring = self.ring_blocks * self.page_tokens
        self.attend_shared: attention.AttendShared | None = None
        self.reset()

    @property
    def arguments(self) -> tuple[Any, ...]:
        """Arguments for a layer like this one."""
        return self.owner, self.place, self.index, self.sliding_window, self.fraction, self.recent_tokens

    def plain(self) -> DynamicSlidingWindowLayer:
        """transformers' own layer, to replace this one."""
        return DynamicSlidingWindowLayer(self.sliding_window)

    def reset(self) -> None:
        self.columns, self.is_initialized = 0, False
        self.counts = RowCounts.empty(0)
        self.pages = self.table = self.tail_k = self.tail_v = torch.empty(0, 0, 0, 0, device="cpu")
        self.calibration = RowCalibration(0, 0, 0, "cpu")

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        rows, heads, _, dim = key_states.shape
        dtype = self.owner.dtype or (torch.float16 if key_states.dtype == torch.float32 else key_states.dtype)
        support.check_dtype(dtype)
        self.dtype, self.device = dtype, key_states.device
        self.format, self.counts = self._format(dim), RowCounts.empty(rows)  # the first prompt brings rings: `take`
        if (given := self.given()) is not None:
            check_sizes(given, heads, dim)
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

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Wrap the new rows for `attend`; a layer whose shape cannot be packed is replaced by a plain one here."""
        if self.owner.steps.ahead:
            return attention.Ready(self, key_states), attention.Ready(self, value_states)
        return self._update(key_states, value_states, *args, **kwargs)

    @torch.compiler.disable  # graph break: the cache runs eagerly
    def _update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        attention.connect(self.owner)
        if not self.is_initialized:
            if reason := self.misfit(key_states, value_states):
                reason = f"sliding window of {self.sliding_window}, {reason}"
                return self.owner._keep_plain(self.place, reason).update(key_states, value_states, *args, **kwargs)
            self.lazy_initialization(key_states, value_states)
        elif self.columns:
            self.owner.window_prompts.finish()
            support.check_shape(key_states, self.tail_k.shape[1], self.tail_k.shape[3])
        return attention.Pending(self, key_states), attention.Pending(self, value_states)

    def step(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        logits: Logits,
    ) -> torch.Tensor:
        """`attend` in a step made of operators only, whose mask hides nothing."""
        return strata_window(self.owner.steps, self.index, query, key, value, logits)

    def attend(self, call: attention.AttentionCall) -> torch.Tensor:
        """Attention output ``[rows, queries, heads, D]``; stores K and V."""
        query, key, value, mask, positions, model_attention, logits, _ = call
        rows, queries = len(query), query.shape[2]
        if rows != self.rows:
            raise ValueError(f"past_key_values: expected {self.rows} rows as before, got {rows}")
        real = self._tokens_among(mask, rows, queries)
        if queries == 1 and self.columns and real is None:
            self.begin_step()
            out = self.decode(query, key, value, logits)
            if self.owner.shares:
                self.attend_shared = lambda query, mask, model_attention, logits: self._read(query, logits)
            self.end_step()
            return out
        self.owner.forward.drop()
        if queries > 1 and positions is not None and positions.dim() == 2:
            masks.check_positions(positions.to(query.device), real)
        before = min(self.columns, self.sliding_window - 1)
        keys, values = key, value
        if before:
            past_k, past_v = self.past(before, key.dtype)
            keys, values = torch.cat([past_k, key], 2), torch.cat([past_v, value], 2)
        if self.owner.shares:
            self.attend_shared = lambda query, mask, model_attention, logits: self._prompt(
                query, keys, values, mask, model_attention
            )
        out = self._prompt(query, keys, values, mask, model_attention)
        if self.columns:
            self._balance_empty(call, real)
            if queries >= FEWEST and (check := self._check_of(call, real)):
                check(self.calibration)
            self._finish_estimate()  # before anything is stored, since the warning may be an error
            self.append(key, value, real)
        else:
            self._leave(call, real)
        self.columns += queries
        return out

    def _leave(self, call: attention.AttentionCall, real: torch.Tensor | None) -> None:
        """Leave a first prompt to `WindowPrompts`."""
        owner, left = self.owner, sum(place > self.place for place in self.owner.window_layers)
        load_kernels(self.format, call.query.shape[1], call.key.shape[1], self.dtype, self.device)
        check = self._check_of(call, real)
        prompt = self, call, real, self.setting(call), self.given(), left, check
        owner.window_prompts.add(*prompt, owner._useful_tokens)
        self._finish_estimate()

    def _finish_estimate(self) -> None:
        """Warn after the last layer with a compressed window if one of them has a large error."""
        guard = self.owner.window_guard
        if guard is not None and self.place == max(self.owner.window_layers):
            self.owner.window_guard = None
            guard.finish()

    def _balance_empty(self, call: attention.AttentionCall, real: torch.Tensor | None) -> None:
        """Estimate the balance of rows that had only padding so far."""
        lengths, queries = self.counts.lengths, call.query.shape[2]
        if all(lengths) or not (setting := self.setting(call)).balanced:
            return
        new = np.ones((self.rows, queries), bool) if real is None else real.cpu().numpy()
        empty = [row for row, length in enumerate(lengths) if not length and new[row].any()]
        if not empty:
            return
        useful = self.owner._useful_tokens(call.value, new)
        prompt = call.query[empty], call.key[empty], new[empty], useful[empty], call.module, setting.rope
        self.calibration.balance[empty] = balance.of_first_prompt(*prompt, has_tiers=False).balance

    def setting(self, call: attention.AttentionCall) -> Setting:
        """Setting of a first prompt."""
        owner, calibrated = self.owner, self.given() is not None
        rope = layer_frequencies(call.module, owner._text, call.key.shape[3], "sliding_attention")
        balanced = not calibrated and owner.options.get("balance") is not False
        return Setting(
            type(call.module), rope, interleaved(call.module), call.logits.softcap is None, calibrated, balanced,
            self.format, (self.recent_tokens, self.ring), (self.dtype, self.device),
            (call.query.shape, call.key.shape, call.key.dtype),
        )  # fmt: skip

    def _is_first(self) -> bool:
        """True for the first layer with a compressed window."""
        return self.place == min(self.owner.window_layers)

    def given(self) -> LayerCalibration | None:
        """Balance and centre of this layer in the user's calibration; None without one."""
        given = self.owner.calibration
        return given.windows[self.index] if given is not None and given.windows else None

    def _check_of(
        self, call: attention.AttentionCall, real: torch.Tensor | None
    ) -> Callable[[RowCalibration], None] | None:
        """Function that estimates the format's error in new tokens, given the balance; None without a guard."""
        owner = self.owner
        if self._is_first():
            new = np.ones((self.rows, call.key.shape[2]), bool) if real is None else real.cpu().numpy()
            given = None if owner.calibration is None else owner.calibration.window_fingerprint
            setting = (self.format, owner.options.get("balance") is not False, given)
            owner.window_guard = WindowGuard.begin(self.fraction, call.module, new, setting)
        if (guard := owner.window_guard) is None:
            return None

        def check(own: RowCalibration) -> None:
            row = guard.request
            chosen = slice(MOST) if real is None else real[row].nonzero().flatten()[:MOST]
            q, k, v = (x[row].detach()[:, chosen] for x in (call.query, call.key, call.value))
            sample = Sample(
                q, k, v, call.logits, balance=own.balance[row], rope=own.rope, interleaved=own.interleaved,
                centre=None if own.centres else own.centre[row] * own.balance[row],
                ahead=torch.tensor([HORIZON], device=k.device), plain=(0, self.recent_tokens),
            )  # fmt: skip
            guard.add(self.place, self.format, sample, lambda x: choose_format(x, k.shape[2], self.page_tokens))

        return check

    # Tokens and padding

    def _tokens_among(self, mask: torch.Tensor | None, rows: int, queries: int) -> torch.Tensor | None:
        """Token mask of the new columns, bool ``[rows, queries]``, None without padding.

        Raises NotImplementedError for other masks, and for a row that continues after padding: windows count columns.
        """
        real, known, place = None, self.owner.checked_window, (self.columns, self.counts)
        if mask is not None:
            masks.check_shape(mask, queries, self.get_mask_sizes(queries)[0])
            if not self._is_first() and known.holds(mask) and known.found[0] == place:  # as in an earlier layer
                return known.found[1]
            real = masks.new_tokens(mask, queries).expand(rows, -1)
        padded = real is not None and not bool(real.all())
        if any(self.counts.ended) or padded:
            new = torch.ones(rows, queries, dtype=torch.bool) if real is None else real.cpu()
            behind = behind_padding(self.counts, new, self.sliding_window)
            if bool(behind.any()):
                self._refuse_padding(int(behind.nonzero()[0]))
        if mask is None or real is None:
            return None
        self._check_mask(mask, real)
        known.set(mask, (place, real if padded else None))
        return known.found[1]

    @staticmethod
    def _refuse_padding(row: int) -> NoReturn:
        raise NotImplementedError(
            f"attention_mask: expected padding on the left in layers with a sliding window, got row {row} with tokens"
            " behind padding; budget=1.0 leaves these layers to transformers"
        )

    def _check_mask(self, mask: torch.Tensor, new: torch.Tensor) -> None:
        """Raise NotImplementedError unless a mask is causal order, the window and padding."""
        queries, (width, offset) = new.shape[1], self.get_mask_sizes(new.shape[1])
        column = torch.arange(offset, offset + width, device=mask.device)
        first = self._numbers([self.columns - n for n in self.counts.lengths]).unsqueeze(1)
        known = torch.cat([(column[:-queries] >= first) & (column[:-queries] < self.columns), new], 1)
        masks.check_causal(mask, known, queries, self.sliding_window)

    # Steps: one token in every row

    def begin_step(self) -> None:
        """Host part of a step: rows about to be packed get a centre, tails are full, and the slots are known.

        Raises NotImplementedError for a row that continues after padding. Does not change what the layer holds.
        """
        geometry = Geometry(self.sliding_window, self.recent_tokens, self.ring, self.rows)
        known, key = self.owner.steps.slots, (geometry, self.device)
        if key not in known:
            known[key] = StepSlots(*key)
        self.slots = known[key]
        if self.slots.is_ready and self.slots.counts is self.counts:  # as another layer of this step
            return
        if any(self.counts.ended):
            self._refuse_padding(self.counts.ended.index(True))
        first = self.counts.unpacked([1] * self.rows, self.recent_tokens)
        if first:
            self.calibration.fix_centres(first, self._in_order(), [self.counts.held[row] for row in first])
        if self.counts.lacks(self.recent_tokens):
            self.refill()
        self.slots.fill(self.counts)
        self.slots.is_ready = not first

    def matches(self, mask: torch.Tensor) -> bool:
        """True if ``mask [rows, columns]`` is the padding of earlier calls followed by one token in every row."""
        if mask.dim() != 2 or mask.shape != (self.rows, self.columns + 1) or any(self.counts.ended):
            return False
        first = self._numbers([self.columns - n for n in self.counts.lengths]).unsqueeze(1)
        return torch.equal(mask.to(self.device) != 0, torch.arange(self.columns + 1, device=self.device) >= first)

    @without_autocast
    def decode(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, logits: Logits) -> torch.Tensor:
        """Device part: store the token of every row and attend, ``[rows, 1, heads, D]``. Capturable."""
        return read(self, self.slots, query, store(self, self.slots, query, key, value), logits)

    @without_autocast
    def _read(self, query: torch.Tensor, logits: Logits) -> torch.Tensor:
        """Attention of other queries than those of `decode`, after it."""
        return read(self, self.slots, query, self.calibration.of_query(query[:, :, 0].to(self.dtype)), logits)

    def end_step(self) -> None:
        """Count the token of a step."""
        self.columns += 1
        self.counts = self.slots.after

    # Reading

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
        parts, each = [], masks.QUERIES
        if query.device.type == "cuda":
            each = max(each, GPU_QUERIES // (query.shape[0] * query.shape[1]))
        for new in masks.chunks(query.shape[2], each):
            seen = slice(max(before + new.start - self.sliding_window + 1, 0), before + new.stop)
            parts.append(model_attention(query[:, :, new], key[:, :, seen], value[:, :, seen], mask[:, :, new, seen]))
        return torch.cat(parts, 1)

    # Files

    def numbers(self) -> dict[str, Any]:
        """Numbers of this layer in a file, in addition to its tensors."""
        own = {"columns": self.columns} | self.counts._asdict() | self.calibration.numbers()
        return own | {"window": self.sliding_window, "dtype": str(self.dtype) if self.is_initialized else None}

    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors of this layer by name."""
        own = {name: getattr(self, name) for name in TENSORS} | self.calibration.tensors()
        return own if self.is_initialized else {}

    def restore(self, numbers: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        """Restore a layer from `numbers` and `tensors`; raises KeyError or ValueError for anything else."""
        self.columns, self.counts = numbers["columns"], RowCounts(*(numbers[name] for name in RowCounts._fields))
        if numbers["dtype"] is None:
            return
        tail = tensors["tail_k"]
        self.dtype, self.device = tail.dtype, tail.device
        self.format = self._format(tail.shape[-1])
        rows, heads = tail.shape[:2]
        shape = (rows * self.ring_blocks, heads, self.format.page_bytes)
        if tensors["pages"].shape != shape or tail.shape != tensors["tail_v"].shape or self.rows != rows:
            raise ValueError(f"window: expected pages {shape}, got {tuple(tensors['pages'].shape)}")
        expected = (rows, heads, self.recent_tokens + 1, tail.shape[-1])
        if tail.shape != expected:
            raise ValueError(f"window: expected tail_k {expected}, got {tuple(tail.shape)}")
        with torch.inference_mode(False):
            for name in TENSORS:
                setattr(self, name, tensors[name].clone())  # tensors of a file may not be aligned
        self.table = self._ring_table(rows)
        self.calibration = RowCalibration(rows, heads, tail.shape[-1], self.device)
        self.calibration.restore(numbers, tensors)
        self.is_initialized = True

    # Interface of transformers' cache layers

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last ``-tokens_to_remove`` columns; RuntimeError if the window would reach overwritten tokens."""
        count = -int(tokens_to_remove)
        if count <= 0 or not self.is_initialized:
            return
        counts, window = self.counts.cropped(count), self.sliding_window
        if any(self.counts.ended):
            raise NotImplementedError("crop: expected rows that end with a token, got padding on the right")
        # A step that failed may have overwritten one more token than the counters say.
        first = [p + 1 - self.ring for p in counts.written_to]  # position of the oldest token that is there
        if any(max(n - window + 1, 0) < p for n, p in zip(counts.lengths, first, strict=True)):
            most = min(n - window + 1 - p for n, p in zip(self.counts.lengths, first, strict=True) if p > 0)
            raise RuntimeError(
                f"crop: expected at most {most} columns to remove, since tokens before the window of {window} were"
                f" overwritten, got {count}"
            )
        self.columns, self.counts = max(self.columns - count, 0), counts

    def _pick(self, index: torch.Tensor) -> None:
        if self.is_initialized:
            rows = torch.arange(self.rows)[index.cpu()]
            if len(rows) != self.rows:
                self.owner.forward.drop()  # a captured step reads tensors that are replaced here
            self.pick(rows)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self._pick(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._pick(torch.arange(self.rows).repeat_interleave(repeats))

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
        tokens = sum(min(n, self.sliding_window - 1) for n in self.counts.lengths)
        return tokens * self.tail_k.shape[1] * 4 * self.tail_k.shape[3]

    def offload(self) -> None:
        raise NotImplementedError("offloading: expected False, got True; a StrataCache stays on its device")
