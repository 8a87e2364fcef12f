"""A KV connector that says a prompt is in the cache already: decode steps over long contexts without their prefill.

vLLM allocates the blocks of such a prompt and computes its last token alone. What the blocks hold is for the benchmark
to fill in (`vllm_child.fill`). Prompts that do not begin with `FILLED` are computed as usual.
"""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorBase_V1
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, SupportsHMA

from .vllm_engine import FILLED

CONFIG = {"kv_connector": "FilledConnector", "kv_connector_module_path": __name__, "kv_role": "kv_consumer"}


class FilledConnector(KVConnectorBase_V1, SupportsHMA):
    """Moves nothing."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        if request.num_computed_tokens or request.prompt_token_ids[0] != FILLED:
            return 0, False
        return max(request.num_tokens - 1 - num_computed_tokens, 0), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        pass

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return False, None

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return False, None

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        pass

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        pass
