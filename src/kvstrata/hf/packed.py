"""``PackedCache``: a transformers cache whose full-attention layers are packed pages of one format.

`StrataCache(config, format="K4V4")` creates one. There is no budget, no importance and no host part: a token is packed
when it is written, and pages, lengths and padding stay at fixed addresses on the device. So `generate` may compile
decode steps, and they may be captured in any CUDA graph.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer

import kvstrata
from kvstrata.cache.policy.budget import Memory
from kvstrata.checks import check_int
from kvstrata.layout import Format
from kvstrata.layout.blocks import check_format
from kvstrata.quant.calibration import Calibration

from . import attention, support
from .forward import Forward, columns_of
from .owned import adopt
from .packed_layer import PackedLayer
from .packed_rows import PackedRows
from .rope import frequencies
from .support import rows_of

TOKENS = 2**15  # default capacity of a row, unless a prompt or the config needs more
ROOM = 2**31  # slots are int32


class PackedSteps:
    """Marks a forward that is a step which the cache itself captures or compiles, and names what its graph reads."""

    ahead = False
    plan: PackedRows | None = None

    def has_plan(self, plan: PackedRows | None) -> bool:
        """True if these are the rows that steps read now, at the addresses that a graph has captured."""
        return plan is not None and plan is self.plan

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Context of such a forward."""
        self.ahead = True
        try:
            yield
        finally:
            self.ahead = False


class PackedCache(Cache):
    """KV cache of a transformers model in packed pages of one format; `StrataCache` documents its use.

    Args:
        config: the model's (``model.config``); it is not changed.
        format: ``K{8,4,3,2}V{8,4,3,2}``, bits of K and V.
        page_tokens: tokens of a page, 16, 32 or 64.
        max_batch: largest number of rows, for `batch_repeat_interleave`; None is that of the first forward.
        max_tokens: capacity of a row in columns, allocated with the first token; None is the config's context length,
            at most 32768 for shorter prompts.
        calibration: balance and centres of the model's K, or the file that `kvstrata calibrate` wrote; None takes both
            from the weights and biases of the model's projections. Never from a text, so bytes depend on tokens alone.
        capture, compile: whether the cache captures or compiles steps itself; None leaves this to `generate`, and
            captures on CUDA if `generate` does not compile.

    Raises ValueError and TypeError for arguments that do not fit, ValueError from a forward whose columns do not fit
    ``max_tokens`` (in compiled or captured code an assertion of the device), and NotImplementedError for masks beyond
    causal order and padding. A decode step is safe under CUDA-graph capture and ``torch.compile(fullgraph=True)`` once
    a prompt has run.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> sizes = dict(num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=64)
        >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=64, hidden_size=64, intermediate_size=64, **sizes))
        >>> cache = PackedCache(model.config, format="K4V4", max_tokens=64)
        >>> tokens = model.generate(torch.ones(1, 8, dtype=torch.long), past_key_values=cache, max_new_tokens=4)
        >>> cache
        StrataCache(2 layers, format='K4V4', max_tokens=64)
    """

    interrupted = False  # a forward failed after some layers had stored their tokens

    def __init__(
        self,
        config: PreTrainedConfig,
        *refused: Any,
        format: str,
        page_tokens: int = 64,
        max_batch: int | None = None,
        max_tokens: int | None = None,
        calibration: Calibration | str | PathLike[str] | None = None,
        capture: bool | None = None,
        compile: bool = False,
        **options: Any,
    ) -> None:
        for name, value in [*(("budget", x) for x in refused), *options.items()]:
            raise TypeError(f"{name}: expected to be left out with format={format!r}, got {value!r}")
        if not isinstance(config, PreTrainedConfig):
            raise TypeError(f"config: expected the model's, model.config, got {type(config).__name__}")
        text = config.get_text_config(decoder=True)
        support.check(config, attention.check_implementation(text))
        check_format(Format.parse(format, 64, page_tokens))
        for name, number in (("max_batch", max_batch), ("max_tokens", max_tokens)):
            if number is not None:
                check_int(name, number, 1)
        self.calibration = support.calibration_of(calibration)
        if self.calibration is not None:
            self.calibration.check_rows()
        self.format, self.page_tokens, self.max_batch, self.max_tokens = format, page_tokens, max_batch, max_tokens
        self._text = text
        self.fmt: Format | None = None
        self.rope: list[float] | None = None
        self.state: PackedRows | None = None
        self._shape: tuple[int, int] | None = None
        self._dtype = torch.float16
        self._most = 0  # number of rows that pages are allocated for
        self.start = -1  # columns before those of an eager forward, -1 if unknown on the host
        self.may_begin = True  # rows may get their first token in the forward that is running
        self._before: tuple[torch.Tensor, torch.Tensor, bool] | None = None  # columns, lengths, `all_begun` before it
        self.steps, self.forward = PackedSteps(), Forward(capture, compile)

        layers = DynamicCache(config=config).layers
        if self.calibration is not None:
            self.calibration.check_kinds(support.kinds_of(layers, text))
        self.plain_layers = support.plain_layers(layers, text)
        self._packed = [place for place in range(len(layers)) if place not in self.plain_layers]
        self._known = len(self._packed)  # layers in a calibration, of which some may turn out to be plain
        for index, place in enumerate(self._packed):
            layers[place] = PackedLayer(self, place, index)
        super().__init__(layers=layers)
        support.warn_if_useless(self)
        attention.connect(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        adopt(self, state)

    def __copy__(self) -> PackedCache:
        """Deep copy: layers and pages cannot have two owners."""
        return copy.deepcopy(self)

    # Memory

    def build(self, key: torch.Tensor, value: torch.Tensor) -> str | None:
        """Allocate rows for K ``[rows, kv_heads, n, D]``; returns the reason if such a layer cannot be packed."""
        reason = support.misfit(key, value, self._shape)
        if reason or self.state is not None:
            return reason
        support.check_dtype(key.dtype)
        rows, heads, new, dim = key.shape
        if self.calibration is not None:
            self.calibration.check(self._known, heads, dim)
        self._shape, self._dtype = (heads, dim), key.dtype
        self.fmt, self.rope = Format.parse(self.format, dim, self.page_tokens), frequencies(self._text, dim)
        tokens = self.max_tokens
        if tokens is None:
            context = support.context(self._text) or TOKENS
            tokens = min(context, TOKENS) if 2 * new <= TOKENS else max(context, 2 * new)
        self._most = max(rows, self.max_batch or 0)
        blocks = -(-tokens // self.page_tokens)
        if self._most * blocks * self.page_tokens >= ROOM:
            raise ValueError(f"max_tokens: expected fewer than {ROOM} in {self._most} rows, got {tokens} in each")
        self.state = self.steps.plan = PackedRows(rows, blocks, self.page_tokens, key.device)
        return None

    def blocks(self) -> int:
        """Blocks of a layer, for all rows."""
        assert self.state is not None
        return self._most * self.state.block_table.shape[1]

    def keep_plain(self, place: int, reason: str) -> DynamicLayer:
        """Replace a packed layer by transformers' own; ``reason`` goes to ``plain_layers``."""
        self.plain_layers[place], self.layers[place] = reason, DynamicLayer()
        self._packed.remove(place)
        for index, packed in enumerate(self._layers()):
            packed.index = index
        if not any(packed > place for packed in self._packed):
            self.end_step()  # all others have run
        support.warn_if_useless(self)
        return self.layers[place]

    def _layers(self) -> list[PackedLayer]:
        return [layer for layer in self.layers if isinstance(layer, PackedLayer)]

    def stored(self) -> list[Any]:
        """Columns of each layer that is not packed; those of packed layers are undone after an error."""
        return columns_of(self._plain())

    def _plain(self) -> list[Any]:
        return [layer for layer in self.layers if not isinstance(layer, PackedLayer)]

    def memory(self) -> Memory:
        """Bytes allocated, including layers that are not packed; ``slab_slack`` is room without a token."""
        plain = [x for layer in self._plain() for x in vars(layer).values() if torch.is_tensor(x)]
        held = sum(x.nbytes for x in plain)
        if self.state is None or self.fmt is None or self._shape is None:
            return Memory(kinds={"plain_layers": held}, tiers={}, page_slack=0, slab_slack=0, full=held)
        pages = [layer.pages for layer in self._layers() if layer.pages is not None]
        tables = [x for x in vars(self.state).values() if torch.is_tensor(x)]
        tables += [x for layer in self._layers() for x in layer.calibration or () if x is not None]
        kinds = {"pages": sum(x.nbytes for x in pages), "tables": sum(x.nbytes for x in tables), "plain_layers": held}
        lengths = self.state.seq_lens.tolist()
        head_caches = len(pages) * self._shape[0]  # per row: layers x KV heads
        used = sum(-(-length // self.page_tokens) for length in lengths) * head_caches
        tokens, name = sum(lengths) * head_caches, self.fmt.name
        row = 2 * self.fmt.head_dim * self._dtype.itemsize
        return Memory(
            kinds=kinds,
            tiers={name: used * self.fmt.page_bytes},
            page_slack=(used * self.page_tokens - tokens) * self.fmt.page_bytes // self.page_tokens,
            slab_slack=kinds["pages"] - used * self.fmt.page_bytes,
            tokens={name: tokens},
            full=tokens * row + held,
        )

    def warmup(self, model: PreTrainedModel, rows: int = 1, progress: bool | None = None) -> None:
        """Compile and load what the first forwards of ``model`` need; raises what `kvstrata.warmup_packed` raises.

        ``rows`` is not used: kernels are the same for any number of rows. The cache is not changed.
        """
        self.forward.load_kernels(model.device)
        heads, kv_heads, dim = support.sizes(self._text)
        if self._packed and heads and kv_heads and dim:
            fmt = Format.parse(self.format, dim, self.page_tokens)
            where: dict[str, Any] = dict(dtype=model.dtype, device=model.device, progress=progress)
            kvstrata.warmup_packed(fmt, heads, kv_heads, **where)

    def __repr__(self) -> str:
        plain = "".join(f", layer {place} plain: {why}" for place, why in sorted(self.plain_layers.items()))
        room = f", max_tokens={self.max_tokens}" if self.max_tokens else ""
        return f"StrataCache({len(self._packed)} layers, format={self.format!r}{room}{plain})"

    # Forwards

    @property
    def rows(self) -> int:
        """Rows of the batch, 0 before the first token."""
        return 0 if self.state is None else len(self.state)

    def columns(self) -> int:
        """Columns before the forward that is running, or that failed, read from the device."""
        assert self.state is not None
        return int(self.state.columns if self._before is None else self._before[0])

    @property
    def ahead(self) -> bool:
        """True in a forward of one token of every row that the cache itself captures or compiles."""
        return self.steps.ahead

    @property
    def last(self) -> int:
        """Index of the last packed layer."""
        return len(self._packed) - 1

    @property
    def eager_only(self) -> str | None:
        """Reason why a decode step cannot be captured by the cache, or None."""
        return "some layers are not compressed" if self.plain_layers else None

    @property
    def decoding(self) -> str:
        """Mode of decode steps that `generate` does not compile: eager, compiled or captured, and the reason."""
        if self.eager_only:
            return f"eager: {self.eager_only}"
        device = torch.device("cpu") if self.state is None else self.state.columns.device
        return self.forward.describe(device)

    def begin(self, mask: torch.Tensor | None, positions: torch.Tensor | None, rows: int, queries: int) -> None:
        """Check the arguments of an eager forward before its first layer, and keep what is needed to undo it."""
        self._undo()
        assert self.state is not None
        self.start, self.may_begin = -1, not self.state.all_begun
        if not (self.state.columns.is_cuda and torch.cuda.is_current_stream_capturing()):
            self.start = self.state.check(mask, positions, rows, queries)
            self._keep(mask, queries)
        if queries > 1:
            self.forward.drop()

    def advance(self) -> None:
        """Prepare a step that the cache captures or compiles; raises ValueError if there is no room for it."""
        self._undo()
        assert self.state is not None
        self.state.check(None, None, self.rows, 1)
        self.may_begin = not self.state.all_begun
        if self.may_begin:  # this step computes more than others: it runs eagerly, and the next one is captured
            self.forward.warm.clear()
            self.forward.drop()
        self._keep(None, 1)

    def _keep(self, mask: torch.Tensor | None, queries: int) -> None:
        """Keep what is needed to undo a forward that is about to run."""
        assert self.state is not None
        self._before = self.state.columns.clone(), self.state.seq_lens.clone(), self.state.all_begun
        self.state.note_tokens(mask, queries)

    def end_step(self) -> None:
        """Count the new columns, which all layers have now."""
        self._before = None

    def end_forward(self) -> None:
        """A forward that was no step has returned; its model may have fewer layers than its config."""
        self._before = None

    is_even = True  # lengths are those of all layers

    def _undo(self) -> None:
        """Drop the columns of a forward that raised an error before all layers had them."""
        if self._before is None or self.state is None:
            return
        columns, seq_lens, self.state.all_begun = self._before
        self._before = None
        self.state.columns.copy_(columns)
        self.state.seq_lens.copy_(seq_lens)
        self.state.real[:, int(columns) :] = True

    def matches(self, mask: torch.Tensor) -> bool:
        """True if a mask is the padding of earlier calls followed by one token in every row."""
        self._undo()
        return self.state is not None and self.state.matches(mask)

    # Interface of transformers' Cache

    def reset(self) -> None:
        """Drop all tokens and their memory; the next forward may have another batch size."""
        for layer in self._plain():
            layer.keys = layer.values = None  # 5.17 would zero them and keep their rows
            layer.is_initialized = False
        for layer in self.layers:
            layer.reset()
        self.fmt = self.state = self.steps.plan = self._shape = self._before = None
        self.interrupted = False
        self.forward.drop()

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last ``-tokens_to_remove`` columns; ValueError for a positive number."""
        if tokens_to_remove > 0:
            raise ValueError(
                f"tokens_to_remove: expected 0 or less, got {tokens_to_remove}; crop(-n) removes n columns"
            )
        for layer in self._plain():
            layer.crop(tokens_to_remove)
        self._undo()
        if self.state is not None:
            self.state.crop(-tokens_to_remove)

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Make row i a copy of row ``beam_idx[i]``, int64 ``[rows]``, for beam search; pages that differ are copied.

        Raises IndexError for a row that does not exist.
        """
        rows = rows_of("beam_idx", beam_idx, self.rows)
        for layer in self._plain():
            layer.reorder_cache(beam_idx)
        self._pick(rows)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row ``repeats`` times; ValueError for more than ``max_batch`` rows."""
        if self.state is not None and self.rows * repeats > self._most:
            raise ValueError(
                f"max_batch: expected at least {self.rows * repeats} rows, got {self._most};"
                f" StrataCache(..., max_batch={self.rows * repeats})"
            )
        for layer in self._plain():
            layer.batch_repeat_interleave(repeats)
        self._pick([row for row in range(self.rows) for _ in range(repeats)])

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the rows ``indices``, int64 ``[n]`` or a bool mask ``[rows]``; raises IndexError for unknown rows."""
        rows = rows_of("indices", indices, self.rows)
        for layer in self._plain():
            layer.batch_select_indices(indices)
        self._pick(rows)

    def _pick(self, rows: list[int]) -> None:
        """Make row i a copy of row ``rows[i]``; only pages with tokens are copied, in rows that change."""
        if self.state is None or rows == list(range(self.rows)):
            return
        self._undo()
        blocks, device = self.state.block_table.shape[1], self.state.columns.device
        used = -(-int(self.state.seq_lens.max()) // self.page_tokens)
        moved = [(old, new) for new, old in enumerate(rows) if old != new]
        if moved and used:
            block = torch.arange(used, device=device)
            sources, targets = (torch.tensor(x, device=device).unsqueeze(1) * blocks for x in zip(*moved, strict=True))
            self._copy((sources + block).flatten(), (targets + block).flatten())
        if len(rows) != self.rows:
            self.forward.drop()
        self.state = self.steps.plan = self.state.select(torch.tensor(rows, dtype=torch.long, device=device))

    def _copy(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Copy blocks of every layer through scratch memory, because a target may be the source of another."""
        between = torch.arange(len(sources), device=sources.device)
        memory: torch.Tensor | None = None
        for layer in self._layers():
            if layer.pages is None:
                continue
            if memory is None:
                memory = layer.pages.new_empty(len(sources), *layer.pages.shape[1:])
            kvstrata.copy_pages(layer.pages, memory, sources, between)
            kvstrata.copy_pages(memory, layer.pages, between, targets)
