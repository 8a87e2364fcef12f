"""kvstrata as vLLM's attention backend ``CUSTOM``: the interface of vLLM 0.32, and nothing else.

vLLM allocates blocks ``[num_blocks, kv_heads, block_size, bytes per token]``, `KvstrataBuilder` turns its batch into a
`Batch`, and `KvstrataImpl` passes rows and batch to a `PackedLayer`. tests/data/vllm_signatures.json lists every name
and signature that this file relies on. `register_vllm` of the package registers `KvstrataBackend` with vLLM.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from kvstrata.quant.calibration import Calibration, LayerCalibration

from .batch import Batch, make_batch
from .options import (
    BLOCK_SIZES,
    HEAD_DIMS,
    MOST_QUERIES,
    PREFERRED_BLOCK_SIZE,
    Options,
    heads_of_rank,
    layer_index,
    tail_tokens,
)
from .packed import PackedLayer
from .vllm_config import (
    REFUSALS,
    check_tail,
    kernel_block_size,
    most_prefilled,
    options_of,
    refused,
    slots_ahead,
)
from .warmup import warm_up
from .weights import Owner, calibration_of, update
from .workspace import workspace

try:
    from vllm.config import get_current_vllm_config_or_none
    from vllm.distributed.parallel_state import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
    from vllm.v1.attention.backend import (
        AttentionBackend,
        AttentionCGSupport,
        AttentionImpl,
        AttentionMetadata,
        AttentionMetadataBuilder,
        AttentionType,
        CommonAttentionMetadata,
    )
    from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheLayout
except ImportError as error:
    raise ImportError(
        f"kvstrata.engines.vllm needs vLLM 0.32 and its attention interface: pip install 'kvstrata[vllm]' ({error})"
    ) from error

logger = logging.getLogger("vllm.kvstrata")  # below vLLM's own logger, which has the handlers


class _Latest:
    """Options of the latest model, for calls that vLLM makes outside its configuration's context."""

    options: Options | None = None


_warmed: set[tuple[Any, ...]] = set()  # kinds of layers whose kernels are compiled and loaded
_logged: set[str] = set()


def current_options() -> Options:
    """Options from ``--additional-config`` of the current model."""
    config = get_current_vllm_config_or_none()
    if config is not None:
        _Latest.options = options_of(config)
    if _Latest.options is None:
        raise RuntimeError("kvstrata: vLLM requested the bytes of a block before it created a layer")
    return _Latest.options


class KvstrataBackend(AttentionBackend):
    """Packed pages of one format in vLLM's blocks."""

    forward_includes_kv_cache_update = False
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", "float16", "bfloat16"]

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[KvstrataImpl]:
        return KvstrataImpl

    @staticmethod
    def get_builder_cls() -> type[KvstrataBuilder]:
        return KvstrataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        return list(BLOCK_SIZES)

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        return PREFERRED_BLOCK_SIZE

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return list(HEAD_DIMS)

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return capability.major >= 8

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_kv_connector(cls) -> bool:
        return False

    @classmethod
    def validate_configuration(cls, *args: Any, **kwargs: Any) -> list[str]:
        reasons = super().validate_configuration(*args, **kwargs)
        return [f"kvstrata: {REFUSALS.get(reason, reason)}." for reason in reasons]

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        """Layouts in which the bytes of one block and KV head are contiguous."""
        return (KVCacheLayout.LBHNC, KVCacheLayout.BLHNC, KVCacheLayout.BHLNC)

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        if spec.state_content_bytes is not None:
            return spec
        if spec.head_size_v != spec.head_size:
            raise ValueError(f"kvstrata: expected V as wide as K, {spec.head_size}, got a head of {spec.head_size_v}.")
        if getattr(spec, "attention_chunk_size", None) is not None:
            raise ValueError("kvstrata: chunked local attention is not supported.")
        if getattr(spec, "sink_len", None):
            raise ValueError("kvstrata: layers with K and V of their own in every request are not supported.")
        if getattr(spec, "non_causal", False):
            raise ValueError("kvstrata: non-causal attention is not supported.")
        options = current_options()
        with refused():
            token_bytes = options.bytes_per_token(spec.head_size)
        return replace(spec, dtype=torch.uint8, state_content_bytes=token_bytes)


@dataclass
class KvstrataMetadata(AttentionMetadata):
    """Metadata of one step for `KvstrataImpl`."""

    batch: Batch
    slot_mapping: torch.Tensor


class KvstrataBuilder(AttentionMetadataBuilder[KvstrataMetadata]):
    """Splits vLLM's batch into decodes and prefills."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)
        threshold = self.reorder_batch_threshold
        if threshold > MOST_QUERIES:
            raise ValueError(
                f"kvstrata: speculative decoding with up to {MOST_QUERIES - 1} draft tokens is supported,"
                f" got batches of {threshold} tokens per request."
            )
        self.most_tokens = most_prefilled(vllm_config, kv_cache_spec.num_kv_heads, kv_cache_spec.head_size)
        self.slots_ahead = slots_ahead(vllm_config)
        self.tail_slots = None
        if options_of(vllm_config).tail:
            check_tail(vllm_config)
            requests = vllm_config.scheduler_config.max_num_seqs
            self.tail_slots = torch.full((requests,), -1, dtype=torch.int32, device=device)

    def _slots(self, common: CommonAttentionMetadata) -> torch.Tensor | None:
        """Tail slots of the batch's requests: their indices in the runner's table, -1 for padding."""
        if self.tail_slots is None:
            return None
        if common.req_idx is None or len(common.req_idx) > common.num_reqs:
            given = None if common.req_idx is None else len(common.req_idx)
            raise RuntimeError(f"kvstrata: a tail needs the index of each of {common.num_reqs} requests, got {given}.")
        pinned = self.tail_slots.device.type == "cuda"
        host = torch.full((common.num_reqs,), -1, dtype=torch.int32, pin_memory=pinned)
        host[: len(common.req_idx)] = torch.as_tensor(common.req_idx)
        # Same address in every step, for CUDA graphs.
        return self.tail_slots[: common.num_reqs].copy_(host, non_blocking=True)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> KvstrataMetadata:
        common = common_attn_metadata
        if common.causal is not True:
            raise ValueError("kvstrata: non-causal attention is not supported.")
        requests = common.num_reqs
        batch = make_batch(
            common.query_start_loc[: requests + 1],
            common.query_start_loc_cpu[: requests + 1],
            common.seq_lens[:requests],
            common.block_table_tensor[:requests],
            tokens=common.num_actual_tokens,
            max_query_len=common.max_query_len,
            max_seq_len=common.max_seq_len,
            threshold=self.reorder_batch_threshold,
            seq_lens_cpu=common.seq_lens_cpu_upper_bound,
            ahead=0 if common.req_idx is not None else self.slots_ahead,
            short=MOST_QUERIES,
            most_tokens=self.most_tokens,
            tail_slots=self._slots(common),
        )
        return KvstrataMetadata(batch, common.slot_mapping)


class KvstrataImpl(AttentionImpl[KvstrataMetadata]):
    """Attention of one layer."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> None:
        if alibi_slopes is not None:
            raise ValueError("kvstrata: ALiBi is not supported.")
        if attn_type != AttentionType.DECODER:
            raise ValueError(f"kvstrata: attention of type {attn_type} is not supported, only that of decoders.")
        if kv_sharing_target_layer_name is not None:
            raise ValueError("kvstrata: layers that share the K and V of another layer are not supported.")
        if kv_cache_dtype not in KvstrataBackend.supported_kv_cache_dtypes:
            raise ValueError(f"kvstrata: {REFUSALS['kv_cache_dtype not supported']}, got {kv_cache_dtype!r}.")
        if unknown := sorted(name for name, value in kwargs.items() if value is not None):
            raise ValueError(f"kvstrata: the model's attention argument {unknown[0]!r} is not supported.")
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.kv_cache_dtype, self.sliding_window = kv_cache_dtype, sliding_window
        self.options = current_options()
        self.config = get_current_vllm_config_or_none()
        with refused():
            self.layer = PackedLayer(
                self.options, num_heads, self.num_kv_heads, head_size, self.scale, sliding_window or None,
                logits_soft_cap or None, sinks,
            )  # fmt: skip
        self._given_sinks = sinks
        self._calibrated = self.options.calibration is None
        self.owner = Owner() if self.options.weights else None
        self._calibrated_by_weights = False

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Convert the sinks and calibrate K, after the weights of the model are loaded; again if they are reloaded."""
        if self._given_sinks is not None:
            sinks, used = self._given_sinks.detach().float().contiguous(), self.layer.sinks
            if used is None or used is self._given_sinks:
                self.layer.sinks = sinks
            else:  # in place, because graphs hold the address
                used.copy_(sinks)
        if self.options.calibration is None or self._calibrated_by_weights:
            self._calibrate_by_weights()

    def _calibrate_by_weights(self) -> None:
        """Balance and centre of K from the module that owns the layer; reloaded weights update them in place."""
        module = None if self.owner is None else self.owner.get()
        if module is None or self.config is None:
            return
        has_rope = bool(getattr(self.config.model_config.hf_text_config, "rope_parameters", None))
        with torch.inference_mode(False):
            own, what = calibration_of(module, self.num_heads, self.num_kv_heads, self.head_size, has_rope)
            if self._calibrated_by_weights:  # in place, because graphs hold the addresses
                update(self.layer.calibration, own)
            elif own is not None:
                self.layer.calibration = own.to(torch.device(self.config.device_config.device))
        self._calibrated_by_weights = True
        if get_tensor_model_parallel_rank() == 0 and what not in _logged:  # log once, not per layer
            _logged.add(what)
            text = "the model's weights give K a %s (%s)" if own else "the model's weights calibrate nothing: %s (%s)"
            logger.info("kvstrata: " + text, what, type(module).__name__)

    def _calibrate(self, layer: Any, device: torch.device) -> None:
        """Read this layer's part of the calibration file, once: during memory profiling, before graphs are captured."""
        if self._calibrated:
            return
        with refused():
            calibration = Calibration.load(self.options.calibration or "")
            number = layer_index(layer.layer_name)
            text = None if self.config is None else self.config.model_config.hf_text_config
            most = getattr(text, "num_hidden_layers", None)
            if layer.layer_name.startswith("draft_model.") or (most is not None and number >= most):
                self._calibrate_by_weights()  # a layer that makes drafts; the file is that of the target
                self._calibrated = True
                return
            own = calibration.of_model(calibration.model_layers if most is None else most)
            if number >= len(own):
                raise ValueError(f"calibration: expected a file with layer {number}, got {len(own)} layers")
            whole = own[number]
            if whole.shape is None or not whole.packs:  # such as a short sliding window
                self._calibrate_by_weights()
            else:
                if whole.shape[1] != self.head_size:
                    raise ValueError(f"calibration: expected head_dim {self.head_size}, got {whole.shape[1]}")
                rank, ranks = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
                heads = heads_of_rank(whole.shape[0], self.num_kv_heads, rank, ranks)
                parts = (None if x is None else x[heads].to(device) for x in (whole.balance, whole.centre))
                self.layer.calibration = LayerCalibration(*parts)
        self._calibrated = True

    def do_kv_cache_update(
        self, layer: Any, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        """Store the new rows; called before `forward`."""
        if kv_cache.numel() == 0:  # memory profiling
            return
        self._calibrate(layer, kv_cache.device)
        if not self.options.tail:  # with a tail, `forward` stores
            self.layer.store(key, value, kv_cache, slot_mapping)

    def _allocate(self, device: torch.device, dtype: torch.dtype) -> None:
        """Allocate what the layer needs in addition to vLLM's blocks, during memory profiling, so that vLLM counts it.

        Kernels are also compiled here; otherwise the first requests would wait for them.
        """
        if self.config is None:
            return
        most = most_prefilled(self.config, self.num_kv_heads, self.head_size)
        if self.options.tail and self.layer.tail is None:
            check_tail(self.config)
            rows = tail_tokens(self.config.num_speculative_tokens)
            size = (2, self.config.scheduler_config.max_num_seqs, self.num_kv_heads, rows, self.head_size)
            k, v = torch.zeros(size, dtype=dtype, device=device)
            self.layer.tail = (k, v)
        requests = self.config.scheduler_config.max_num_seqs
        block_size = kernel_block_size(self.config.cache_config.block_size)
        fmt = self.options.format_of(self.head_size, block_size)
        decode_bytes = self.layer.decode_bytes(fmt, self.num_heads, requests, MOST_QUERIES, device)
        workspace(device, max(self.layer.staged_bytes(most, dtype.itemsize), decode_bytes))
        capped, sinks = self.layer.softcap is None, self.layer.sinks is None
        own = self.layer.calibration
        kind = (
            self.num_heads, self.num_kv_heads, self.head_size, self.sliding_window, capped, sinks, dtype, device,
            self.options, block_size,
            own is not None and own.balance is not None, own is not None and own.centre is not None,
        )  # fmt: skip
        if kind not in _warmed:
            _warmed.add(kind)
            warm_up(self.layer, self.num_heads, block_size, dtype, device)

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: KvstrataMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of a step; writes ``output``."""
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("kvstrata: quantised attention outputs are not supported.")
        if attn_metadata is None:
            self._calibrate(layer, query.device)
            self._allocate(query.device, query.dtype)
            return output.fill_(0)
        batch = attn_metadata.batch
        if self.options.tail:
            if self.layer.tail is None:
                self._allocate(query.device, query.dtype)
            self.layer.store(key, value, kv_cache, attn_metadata.slot_mapping, batch.rows)
        self.layer.attend(query, key, value, kv_cache, batch, output.view(query.shape))
        return output
