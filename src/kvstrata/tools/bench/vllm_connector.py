"""A KV connector that reports a prompt as already cached: decode steps over long contexts without their prefill.

vLLM allocates the blocks of such a prompt and computes only its last token. The benchmark fills the blocks
(`vllm_child.fill`). Prompts that do not begin with `FILLED` are computed as usual.
"""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorBase_V1
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, SupportsHMA

from .vllm_engine import FILLED

CONFIG = {"kv_connector": "FilledConnector", "kv_connector_module_path": __name__, "kv_role": "kv_consumer"}


class FilledConnector(KVConnectorBase_V1, SupportsHMA):
    """Connector that transfers nothing."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        if request.num_computed_tokens or request.prompt_token_ids[0] != FILLED:
            return 0, False
        return max(request.num_tokens - 1 - num_computed_tokens, 0), False

    def _no_op(self, *args: Any, **kwargs: Any) -> None:
        """Hooks of a transfer, which does not happen."""

    update_state_after_alloc = start_load_kv = wait_for_layer_load = save_kv_layer = wait_for_save = _no_op

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        return False, None

    request_finished_all_groups = request_finished
