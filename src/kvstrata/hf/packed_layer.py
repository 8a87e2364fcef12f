"""One layer of a `PackedCache`: pages at a fixed address, and the calibration of its K."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from transformers.cache_utils import CacheLayerMixin, DynamicLayer

from kvstrata.layout import Format
from kvstrata.quant.calibration import Calibration

from . import attention, support
from .forward import Forward
from .logits import Logits
from .owned import Owned
from .packed_op import Layer, strata_packed
from .packed_rows import PackedRows
from .weights import calibration_of


class Owner(Protocol):
    """The part of a `PackedCache` that its layers use."""

    fmt: Format | None
    state: PackedRows | None
    calibration: Calibration | None
    forward: Forward
    rope: list[float] | None
    start: int
    may_begin: bool

    @property
    def ahead(self) -> bool: ...

    @property
    def last(self) -> int: ...

    @property
    def is_compileable(self) -> bool: ...

    def build(self, key: torch.Tensor, value: torch.Tensor) -> str | None: ...

    def blocks(self) -> int: ...

    def columns(self) -> int: ...

    def keep_plain(self, place: int, reason: str) -> DynamicLayer: ...

    def begin(self, mask: torch.Tensor | None, positions: torch.Tensor | None, rows: int, queries: int) -> None: ...

    def end_step(self) -> None: ...


class PackedLayer(Owned[Owner], CacheLayerMixin):
    """Pages uint8 ``[blocks of all rows, kv_heads, page_bytes]`` of one layer."""

    is_sliding = False
    is_croppable = True

    def __init__(self, owner: Owner, place: int, index: int) -> None:
        super().__init__()
        self.owner, self.place, self.index = owner, place, index  # index in the model, index among packed layers
        self.number = index  # in a calibration; `index` shrinks when an earlier layer turns out to be plain
        self.pages: torch.Tensor | None = None
        self.calibration: Layer | None = None
        self.begun = False  # set in `attend`, when the host knows the number of columns
        self.attend_shared: attention.AttendShared | None = None  # layers with shared K and V are kept plain

    @property
    def is_compileable(self) -> bool:
        """True if `generate` may compile decode steps; not if the cache captures or compiles them itself."""
        return not self.owner.forward.capture and not self.owner.forward.compile

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        reason = self.owner.build(key_states, value_states)
        if reason:
            raise ValueError(f"past_key_values: expected layers that can be packed, got {reason}")
        assert self.owner.fmt is not None
        with torch.inference_mode(False):
            shape = (self.owner.blocks(), key_states.shape[1], self.owner.fmt.page_bytes)
            self.pages = torch.zeros(shape, dtype=torch.uint8, device=self.device)
        torch._dynamo.mark_static_address(self.pages, guard=False)
        self.is_initialized = True

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Wrap the new rows for `step`; a layer whose shape cannot be packed is replaced by a plain one here."""
        if self.is_initialized and (self.owner.ahead or torch.compiler.is_compiling()):
            return attention.Ready(self, key_states), attention.Ready(self, value_states)
        return self._update(key_states, value_states, *args, **kwargs)

    @torch.compiler.disable  # pages are allocated outside compiled code
    def _update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        attention.connect(self.owner)
        if not self.is_initialized:
            if reason := self.owner.build(key_states, value_states):
                return self.owner.keep_plain(self.place, reason).update(key_states, value_states, *args, **kwargs)
            self.lazy_initialization(key_states, value_states)
        elif self.owner.fmt is not None and self.pages is not None:
            support.check_shape(key_states, self.pages.shape[1], self.owner.fmt.head_dim)
        return attention.Pending(self, key_states), attention.Pending(self, value_states)

    def step(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        logits: Logits,
    ) -> torch.Tensor:
        """Store K and V, and return the attention output ``[rows, queries, heads, D]``; operators only."""
        state, fmt = self.owner.state, self.owner.fmt
        assert state is not None
        assert fmt is not None
        assert self.pages is not None
        key, value = key.to(query.dtype), value.to(query.dtype)  # autocast gives them different ones
        if self.owner.ahead:
            mask = None  # one token in every row
        if self.index == 0:
            state.advance(mask, query.shape[2])
        calibration = self.calibration or Layer()
        known = self.owner.start if self.begun else -1
        may_begin = self.owner.may_begin if self.begun or self.owner.ahead else not state.all_begun
        return strata_packed(
            query, key, value, self.pages, state, calibration, fmt, logits, padded=mask is not None, start=known,
            may_begin=may_begin,
        )  # fmt: skip

    def attend(self, call: attention.AttentionCall) -> torch.Tensor:
        """Run `step` after checks on the host; the first call also calibrates K."""
        query, key, value, mask, positions, _, logits, module = call
        if self.calibration is None:
            self.calibration = self._calibrate(module, key.shape[1], key.shape[3])
        if self.index == 0:
            self.owner.begin(mask, positions, len(query), query.shape[2])
        self.begun = True
        try:
            out = self.step(query, key, value, mask, logits)
        finally:
            self.begun = False
        if self.index == self.owner.last:
            self.owner.end_step()
        return out

    def _calibrate(self, module: torch.nn.Module, kv_heads: int, dim: int) -> Layer:
        """Balance and centre of the layer, from a file or from the model's weights."""
        if self.owner.calibration is not None:
            own = self.owner.calibration.layers[self.number]
        else:
            own = calibration_of(module, kv_heads, dim, self.owner.rope or ())
        own = own.to(self.device)
        calibration = Layer(own.balance, own.centre)
        for x in calibration:
            if x is not None:
                torch._dynamo.mark_static_address(x, guard=False)
        return calibration

    # Interface of transformers' cache layers; the PackedCache handles rows and columns.

    def get_seq_length(self) -> Any:
        """Number of columns: an int if the host knows it, otherwise a tensor on the device."""
        state = self.owner.state
        if state is None:
            return 0
        if torch.compiler.is_compiling() or (state.columns.is_cuda and torch.cuda.is_current_stream_capturing()):
            return state.columns
        return self.owner.columns()

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        state = self.owner.state
        if state is None:
            return query_length, 0
        if torch.compiler.is_compiling() or (query_length == 1 and self.owner.is_compileable):
            return state.tokens, 0  # one shape for all steps
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        state = self.owner.state
        return -1 if state is None else state.tokens

    def reset(self) -> None:
        self.pages = self.calibration = None
        self.is_initialized = False

    def offload(self) -> None:
        raise NotImplementedError("offloading: expected False, got True; a StrataCache stays on its device")
