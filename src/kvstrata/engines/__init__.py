"""Adaptors for engines that own their memory: the packed ops behind an engine's attention interface.

    options.py   what a user configures, and the bytes of a token
    batch.py     an engine's batch as one decode call and one prefill call
    packed.py    store and attention of one layer over an engine's blocks
    vllm.py      vLLM's attention interface; the only file that imports vLLM

docs/engines.md has the commands.
"""

from __future__ import annotations

import logging

VLLM_BACKEND = "kvstrata.engines.vllm.KvstrataBackend"


def register_vllm() -> None:
    """Register kvstrata as vLLM's backend ``CUSTOM``: the entry point of group ``vllm.general_plugins``.

    vLLM calls it in each of its processes, perhaps more than once. The backend itself is imported when it is selected.
    A ``CUSTOM`` backend that another plug-in registered is kept, with a warning.

    Raises ImportError if vLLM is not installed or has no such registry.
    """
    try:
        from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
    except ImportError as error:
        raise ImportError(
            f"kvstrata needs vLLM 0.32 for this plug-in: pip install 'kvstrata[vllm]' ({error})"
        ) from error
    custom = AttentionBackendEnum.CUSTOM
    if custom.is_overridden() and custom.get_path() != VLLM_BACKEND:
        logging.getLogger(__name__).warning(
            "kvstrata: vLLM's backend CUSTOM is %s already, and stays so", custom.get_path()
        )
        return
    register_backend(custom, VLLM_BACKEND)
