"""Continuous batching of transformers (`model.generate_batch`, `ContinuousBatchingManager`) over packed pages.

transformers still allocates blocks, schedules, shares prefixes and offloads. Two things change for a model inside
`packed_batching`: allocators count the bytes of a format instead of 16 bit, and our own attention function writes and
reads the blocks.

    cache tensor   uint8 [blocks][layers of the allocator][kv_heads][block_size * bytes per token]
    write_index    slot of each new row: block * block_size + offset; -1 for padding and for rows that no query will see
    read_index     block ids of each request, not slots of each token: the block table is built from them on the device
    block_table    decode batches of models with full attention only: one call of `decode_packed`, also as a CUDA graph

Layers with a sliding window keep ``ceil(window / block_size)`` blocks per request as a ring.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch

from kvstrata.hf import support
from kvstrata.hf.rope import frequencies
from kvstrata.hf.weights import calibration_of
from kvstrata.quant.calibration import Calibration, LayerCalibration

from .batch import Batch, DecodePart, make_batch
from .options import BLOCK_SIZES, Options
from .packed import PackedLayer

try:
    from transformers import AttentionInterface, PreTrainedModel
    from transformers.generation.continuous_batching import cache as cb_cache
    from transformers.generation.continuous_batching import continuous_api, initialization
    from transformers.generation.continuous_batching.cache_allocators import (
        FullAttentionCacheAllocator,
        SlidingAttentionCacheAllocator,
    )

    FULL, SLIDING = FullAttentionCacheAllocator.layer_type, SlidingAttentionCacheAllocator.layer_type
    MAKERS: dict[str, Any] = cb_cache.ATTN_TYPE_TO_ALLOCATOR
except (ImportError, AttributeError) as error:
    raise ImportError(
        "kvstrata.engines.transformers needs the cache allocators of transformers 5.19 or newer:"
        f" pip install 'transformers>=5.19' ({error})"
    ) from error

_options: dict[str, tuple[Options, list[LayerCalibration] | None]] = {}  # by attention name
_lock = threading.Lock()


class PackedAllocator(FullAttentionCacheAllocator):
    """Blocks of packed pages for the layers of full attention."""

    ring_blocks: int | None = None  # most blocks of a request, None for no limit

    def __init__(
        self,
        index: int,
        config: Any,
        num_key_value_heads: int,
        cache_dtype: torch.dtype,
        page_size: int,
        layer_indices: list[int],
        allow_block_sharing: bool,
    ) -> None:
        self.options, self.calibration = _options[config._attn_implementation]
        if page_size not in BLOCK_SIZES:
            raise ValueError(f"page_size: expected one of {BLOCK_SIZES} with packed pages, got {page_size}")
        self.config, self.cache_dtype, self.num_key_value_heads = config, cache_dtype, num_key_value_heads
        self.head_dim = cb_cache.find_head_dim(config)
        self.token_bytes = self.options.bytes_per_token(self.head_dim)
        self._before_cache_tensor_init(
            index=index,
            layer_indices=layer_indices,
            tokens_per_page=page_size,
            bytes_per_page=num_key_value_heads * page_size * self.token_bytes,
            allow_block_sharing=allow_block_sharing,
        )
        self.block_physical_stride = page_size  # in slots of a layer's view, which covers all blocks
        self._layers: dict[int, PackedLayer] = {}
        self._step: tuple[torch.Tensor, bool, Step] | None = None

    def register_cache_tensor(
        self, bytes_per_sector: int, non_trash_bytes: int, cache_tensor: torch.Tensor, pool: Any
    ) -> None:
        """Create each layer's view of the blocks."""
        self.bytes_per_sector = bytes_per_sector
        self._copy_view = cache_tensor.view(-1, self.bytes_per_block)
        blocks = len(self._copy_view)
        head_bytes = self.tokens_per_page * self.token_bytes
        shape = (blocks, self.num_key_value_heads, self.tokens_per_page, self.token_bytes)
        strides = (self.bytes_per_block, head_bytes, self.token_bytes, 1)
        self.views = {
            layer: cache_tensor.as_strided(shape, strides, place * self.bytes_per_page)
            for place, layer in enumerate(self.layer_indices)
        }
        self._after_cache_tensor_init(non_trash_bytes, bytes_per_sector, cache_tensor, pool)
        self.write_trash_index = -1  # padding writes nothing

    def get_read_indices(self, request_id: str, past_length: int, query_length: int) -> list[int]:
        """Block ids of a request; `Step` builds the block table from them."""
        return self.block_table[request_id][: self.blocks_of(past_length + query_length)]

    def blocks_of(self, tokens: Any) -> Any:
        """Number of blocks of a request with ``tokens`` tokens, an int or a tensor."""
        blocks = (tokens + self.tokens_per_page - 1) // self.tokens_per_page
        if self.ring_blocks is None:
            return blocks
        return blocks.clamp(max=self.ring_blocks) if torch.is_tensor(blocks) else min(blocks, self.ring_blocks)

    def update(self, *args: Any) -> Any:
        raise RuntimeError(
            "packed_batching: expected a manager that is used inside the context that created it; leave persistent"
            " managers (persistent_manager=True) in it, or destroy them"
        )

    get_cache_for_block_table = update

    def layer(self, number: int, module: Any, heads: int, scale: float, options: dict[str, Any]) -> PackedLayer:
        """Layer of the model, created at its first call."""
        layer = self._layers.get(number)
        if layer is None:
            window, sinks = options.get("sliding_window"), options.get("s_aux")
            if isinstance(self, PackedSlidingAllocator):
                window = self.sliding_window
            if sinks is None:
                sinks = getattr(module, "sinks", None)
            sinks = None if sinks is None else sinks.detach().float().contiguous()
            sizes = heads, self.num_key_value_heads, self.head_dim
            layer = PackedLayer(self.options, *sizes, scale, window, options.get("softcap"), sinks)
            layer.calibration = self._calibration_of(number, module).to(self.cache_tensor.device)
            self._layers[number] = layer
        return layer

    def _calibration_of(self, number: int, module: torch.nn.Module) -> LayerCalibration:
        """Calibration of a layer: from the file, or from the model's weights if that leaves the layer out."""
        own = LayerCalibration() if self.calibration is None else self.calibration[number]
        if own.packs:
            return own
        rope = frequencies(self.config, self.head_dim, self.layer_type)
        return calibration_of(module, self.num_key_value_heads, self.head_dim, rope or ())

    def step(self, starts: torch.Tensor, options: dict[str, Any]) -> Step:
        """The batch as two calls, built once for all layers, and again during a graph capture, as part of it."""
        capturing = starts.is_cuda and torch.cuda.is_current_stream_capturing()
        if self._step is None or self._step[0] is not starts or self._step[1] != capturing:
            self._step = starts, capturing, Step(self, starts, options)
        return self._step[2]


class PackedSlidingAllocator(PackedAllocator):
    """Blocks of packed pages for layers with a sliding window: a ring per request."""

    supports_block_sharing = False
    supports_block_table = False
    layer_type = SLIDING

    def __init__(self, **arguments: Any) -> None:
        self.sliding_window: int = arguments["config"].sliding_window
        self.ring_blocks: int = -(-self.sliding_window // arguments["page_size"])
        super().__init__(**arguments)

    def _compute_blocks_needed(self, allocated_blocks: int, past_length: int, query_length: int) -> int:
        return max(0, self.blocks_of(past_length + query_length) - allocated_blocks)

    def get_write_indices(self, request_id: str, past_length: int, query_length: int) -> list[int]:
        """Slots in the ring; -1 for tokens that later tokens of the same chunk would overwrite."""
        table, page = self.block_table[request_id], self.tokens_per_page
        end = past_length + query_length
        first = max(past_length, end - self.ring_blocks * page)
        slots = [table[position // page % self.ring_blocks] * page + position % page for position in range(first, end)]
        return [-1] * (first - past_length) + slots


class Step:
    """One batch for the layers of an allocator: where new rows go, and which blocks are read."""

    def __init__(self, allocator: PackedAllocator, starts: torch.Tensor, options: dict[str, Any]) -> None:
        ends = options["cu_seq_lens_k"][allocator.layer_type]
        self.late_store = allocator.ring_blocks is not None
        table = options.get("block_table")
        if table is not None:  # decodes only, nothing is read on the host
            table, seq_lens = table[allocator.index], ends.diff()
            last = (seq_lens.long() - 1).clamp(min=0).unsqueeze(1)
            block = table.gather(1, last // allocator.tokens_per_page).long()
            slots = (block * allocator.tokens_per_page + last % allocator.tokens_per_page).squeeze(1)
            self.slots = slots.masked_fill(seq_lens == 0, -1)
            self.tokens = len(seq_lens)
            self.batch = Batch((DecodePart(self.tokens, table, seq_lens, None, None),))
            return
        starts_cpu, lengths = starts.cpu(), ends.cpu().diff()
        requests = int((starts_cpu.diff() > 0).sum())  # padding requests come last
        self.tokens = int(starts_cpu[requests])
        self.slots = options["write_index"][allocator.index][: self.tokens]
        blocks = options["read_index"][allocator.index]
        sizes = dict(
            tokens=self.tokens,
            max_query_len=int(starts_cpu.diff().max()),
            max_seq_len=int(lengths.max()),
            threshold=1 if len(blocks) else 0,  # without blocks, all requests are prompts
            seq_lens_cpu=lengths[:requests],
        )
        seq_lens = ends.diff()[:requests]
        table = self._table(allocator, blocks, seq_lens, int(lengths.max()))
        self.batch = make_batch(starts[: requests + 1], starts_cpu[: requests + 1], seq_lens, table, **sizes)

    @staticmethod
    def _table(allocator: PackedAllocator, blocks: torch.Tensor, seq_lens: torch.Tensor, longest: int) -> torch.Tensor:
        """Block table, int32 ``[requests, blocks of the longest]``, from the concatenated block ids of all requests."""
        width = -(-longest // allocator.tokens_per_page)
        if not len(blocks):
            return torch.zeros(len(seq_lens), width, dtype=torch.int32, device=seq_lens.device)
        counts = allocator.blocks_of(seq_lens.long())
        place = torch.arange(width, device=seq_lens.device) % counts.clamp(min=1).unsqueeze(1)
        place = place + (counts.cumsum(0) - counts).unsqueeze(1)
        return blocks[place.clamp(max=len(blocks) - 1)].int()

    def run(
        self, layer: PackedLayer, cache: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        """Store the new rows and attend; returns ``[T, heads, head_dim]``, zero for padding."""
        out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
        early = self.tokens
        if self.late_store and self.batch.prefills:  # the chunk would overwrite tokens that its first queries see
            early = self.batch.prefills[0].first
        if early:
            layer.store(k[:early], v[:early], cache, self.slots[:early])
        layer.attend(q, k, v, cache, self.batch, out)
        if early < self.tokens:
            layer.store(k[early : self.tokens], v[early : self.tokens], cache, self.slots[early:])
        return out


@torch.compiler.disable
def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    scaling: float | None = None,
    cache: Any = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Attention function of transformers' interface: ``query [1, heads, T, D]``, ``key, value [1, kv_heads, T, D]``.

    Returns ``[1, T, heads, D]``. Writes the blocks of ``cache``.
    """
    number: Any = getattr(module, "layer_idx", None)
    allocator = getattr(cache, "layer_to_allocator", {}).get(number)
    if not isinstance(allocator, PackedAllocator):
        raise NotImplementedError(
            "attention: expected a batch of generate_batch or a ContinuousBatchingManager inside packed_batching, got"
            " another forward; leave the context first"
        )
    if key.shape[-1] != allocator.head_dim or value.shape != key.shape:
        raise NotImplementedError(
            f"packed_batching: expected K and V of {allocator.head_dim} values per head, got {key.shape[-1]} and"
            f" {value.shape[-1]}"
        )
    if options.get("dropout"):
        raise NotImplementedError(f"dropout: expected 0 with packed pages, got {options['dropout']}")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    layer = allocator.layer(number, module, query.shape[1], scale, options)
    q, k, v = (x[0].transpose(0, 1).contiguous() for x in (query, key, value))
    step = allocator.step(options["cu_seq_lens_q"], options)
    return step.run(layer, allocator.views[number], q, k, v).unsqueeze(0), None


def _allocator_factory(original: type, packed: type) -> Any:
    """Factory of allocators for `PagedAttentionCache`: ours for a model inside `packed_batching`, else the original."""

    def make(**arguments: Any) -> Any:
        return (packed if arguments["config"]._attn_implementation in _options else original)(**arguments)

    make.supports_block_table = original.supports_block_table  # type: ignore[attr-defined]
    make.original = original  # type: ignore[attr-defined]
    return make


def _resolve_config(config: Any, cb_config: Any, workload_hints: Any, *args: Any, **kwargs: Any) -> Any:
    """transformers' own function, plus block tables for decode batches, which it passes only to its flash attention."""
    resolved = _resolve_original(config, cb_config, workload_hints, *args, **kwargs)
    if config._attn_implementation not in _options:
        return resolved
    if all(kind == FULL for kind in cb_cache.group_layers_by_attn_type(config)):
        wanted = deepcopy(cb_config)
        initialization.resolve_using_hints(wanted, workload_hints)
        initialization.resolve_without_hints(wanted)
        resolved.max_blocks_per_request = wanted.max_blocks_per_request
    graphs = any(resolved.cuda_graph_booleans) and resolved.max_blocks_per_request > 0
    resolved.use_cuda_graph = (False, graphs)  # no graphs for prompts, whose batches are split on the host
    resolved.use_async_batching = bool(resolved.use_async_batching and graphs)
    return resolved


_resolve_original = continuous_api.resolve_continuous_batching_config


def _install() -> None:
    """Make transformers choose allocators by model; does nothing the second time."""
    pairs = {
        FullAttentionCacheAllocator: PackedAllocator,
        SlidingAttentionCacheAllocator: PackedSlidingAllocator,
    }
    for kind, maker in list(MAKERS.items()):
        if maker in pairs:
            MAKERS[kind] = _allocator_factory(maker, pairs[maker])
    continuous_api.resolve_continuous_batching_config = _resolve_config


@contextmanager
def packed_batching(model: PreTrainedModel, format: str = "K8V8", calibration: str | None = None) -> Iterator[None]:
    """Context in which continuous batching of a model uses packed pages of one format.

    Args:
        model: a decoder whose layers have full attention or a sliding window. Inside the context its config names
            another attention function, so only `generate_batch` and managers created there work.
        format: format of K and V, such as ``K8V8`` or ``K4V4``; head_dim must be 64, 128 or 256.
        calibration: file of `kvstrata calibrate`, or None. Layers without one there are calibrated by their weights.

    Blocks hold as many tokens as before in fewer bytes; ``num_blocks`` still means the bytes of that many 16-bit
    blocks, so the pool holds more tokens. Decode batches of models without sliding windows run as CUDA graphs if
    transformers would capture them.

    Raises ValueError or TypeError for a format, a page size or head dims that packed pages do not have, and for a model
    whose attention does not go through transformers' attention interface (Falcon, GPT-J).

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> sizes = dict(num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=64)
        >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=64, hidden_size=64, intermediate_size=64, **sizes))
        >>> with packed_batching(model, "K8V8"):
        ...     out = model.generate_batch([[1, 2, 3], [4, 5]], max_new_tokens=4)
        >>> [len(request.generated_tokens) for request in out.values()]
        [4, 4]
    """
    options = Options(format, calibration)
    text = model.config.get_text_config(decoder=True)
    # transformers batches others too, and their attention sees no other token of their request, or all of the batch.
    support.check(model.config, "sdpa", "packed_batching serves", "generate works")
    options.bytes_per_token(cb_cache.find_head_dim(text))  # raises for other head dims
    given = None
    if calibration is not None:
        shape = support.sizes(text)[1] or 0, cb_cache.find_head_dim(text)
        file = Calibration.load(calibration)
        given = file.of_model(text.num_hidden_layers, shape)
        groups = cb_cache.group_layers_by_attn_type(text)
        file.check_kinds(["window" if i in groups.get(SLIDING, ()) else "layer" for i in range(text.num_hidden_layers)])
    name = f"kvstrata_{format}_{id(model):x}_flash"  # "flash": no masks; a digit after it would be a version
    before = model.config._attn_implementation
    with _lock:
        _install()
        _options[name] = options, given
        AttentionInterface.register(name, packed_attention)
    try:
        model.config._attn_implementation = name
        yield
    finally:
        model.config._attn_implementation = before
        with _lock:
            _options.pop(name, None)
            AttentionInterface._global_mapping.pop(name, None)
