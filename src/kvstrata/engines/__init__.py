"""Adaptors for engines that own their memory: the packed ops as an engine's attention backend.

    options.py        user options, and the bytes per token
    batch.py          an engine's batch as one decode call and one prefill call
    packed.py         store and attention of one layer over an engine's blocks
    weights.py        calibration of a layer from the model's weights
    workspace.py      scratch memory that all layers share
    warmup.py         a few steps before the first request, to compile kernels
    vllm.py           vLLM's attention interface; the only file that imports vLLM
    transformers.py   continuous batching of transformers; the only file that imports its cache allocators

docs/engines.md has the commands.
"""

from __future__ import annotations

import importlib
import logging

VLLM_BACKEND = "kvstrata.engines.vllm.KvstrataBackend"


def register_vllm() -> None:
    """Register kvstrata as vLLM's backend ``CUSTOM``: the entry point of group ``vllm.general_plugins``.

    vLLM calls it in each of its processes, perhaps more than once. The backend itself is imported when it is selected.
    A ``CUSTOM`` backend that another plug-in registered is kept, with a warning. A vLLM without such a registry only
    causes a warning too, because an error here would stop engines that do not use kvstrata.

    Raises ImportError if vLLM is not installed.
    """
    try:
        importlib.import_module("vllm")
    except ImportError as error:
        raise ImportError(
            f"kvstrata needs vLLM 0.32 for this plug-in: pip install 'kvstrata[vllm]' ({error})"
        ) from error
    logger = logging.getLogger(__name__)
    try:
        from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

        custom = AttentionBackendEnum.CUSTOM
        if custom.is_overridden() and custom.get_path() != VLLM_BACKEND:
            logger.warning("kvstrata: vLLM's backend CUSTOM is already %s and is kept", custom.get_path())
            return
        register_backend(custom, VLLM_BACKEND)
    except (ImportError, AttributeError) as error:
        logger.warning("kvstrata: this vLLM's registry of attention backends is not that of 0.32 (%s)", error)
