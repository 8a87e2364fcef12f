"""Stand-ins for the names of vLLM that kvstrata.engines.vllm imports, made from the recorded signatures.

Dataclasses with vLLM's fields and classes without behaviour, so that our classes can be imported and fed with the
shapes that vLLM gives them. What vLLM itself does is not imitated; a GPU host with vLLM tests that.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import sys
from collections.abc import Iterator
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any, Generic, TypeVar

import pytest
import torch

import kvstrata.engines
import vllm_signatures as signatures
from conftest import HAS_GPU

M = TypeVar("M")


def _fields(file: str, *classes: str) -> list[tuple[str, Any, Any]]:
    names = [name for cls in classes for name in signatures.recorded(file, cls, "fields")]
    return [(name, Any, dataclasses.field(default=None)) for name in dict.fromkeys(names)]


def _enum(file: str, name: str) -> type[Enum]:
    members = signatures.recorded(file, name, "members")
    return Enum(name, {key: eval(value) for key, value in members.items()})


class AttentionBackend:
    reasons: tuple[str, ...] = ()

    @classmethod
    def validate_configuration(cls, **kwargs: Any) -> list[str]:
        return list(cls.reasons)


class AttentionMetadataBuilder(Generic[M]):
    def __init__(self, kv_cache_spec: Any, layer_names: Any, vllm_config: Any, device: Any) -> None:
        self.vllm_config = vllm_config

    def _init_reorder_batch_threshold(self, threshold: int, supports_spec_as_decode: bool = False) -> None:
        drafts = self.vllm_config.num_speculative_tokens
        self.reorder_batch_threshold = threshold + drafts * supports_spec_as_decode


class AttentionImpl(Generic[M]):
    pass


class Engine(SimpleNamespace):
    """Our module, and what stands for vLLM's configuration."""

    def configure(self, config: Any, **changed: Any) -> None:
        self.current.config = None if config is None else config_of(config, **changed)


def config_of(additional: Any, drafts: int = 0, **changed: Any) -> SimpleNamespace:
    """The fields of vLLM's configuration that are read; ``changed``: those of a model or scheduler."""
    sizes = dict(max_model_len=4096, max_num_batched_tokens=512, max_num_seqs=8, is_hybrid=False) | changed
    return SimpleNamespace(
        additional_config=additional,
        model_config=SimpleNamespace(
            max_model_len=sizes["max_model_len"],
            is_hybrid=sizes["is_hybrid"],
            hf_text_config=SimpleNamespace(rope_parameters=sizes.get("rope_parameters"), **sizes.get("text", {})),
        ),
        device_config=SimpleNamespace(device=torch.device("cuda" if HAS_GPU else "cpu")),
        scheduler_config=SimpleNamespace(
            max_num_batched_tokens=sizes["max_num_batched_tokens"], max_num_seqs=sizes["max_num_seqs"]
        ),
        speculative_config=SimpleNamespace(
            method=sizes.get("method", "ngram"), parallel_drafting=sizes.get("parallel_drafting", False)
        )
        if drafts
        else None,
        num_speculative_tokens=drafts,
        cache_config=SimpleNamespace(block_size=sizes.get("block_size", 64)),
        use_v2_model_runner=sizes.get("use_v2_model_runner", True),
    )


@contextlib.contextmanager
def engine() -> Iterator[Engine]:
    """Import kvstrata.engines.vllm with stand-ins for vLLM, for the time of a with statement."""
    current = SimpleNamespace(config=None, rank=0, ranks=1)
    backend, interface = signatures.BACKEND, signatures.INTERFACE
    common = dataclasses.make_dataclass("CommonAttentionMetadata", _fields(backend, "CommonAttentionMetadata"))
    spec = dataclasses.make_dataclass("AttentionSpec", _fields(interface, "KVCacheSpec", "AttentionSpec"), frozen=True)
    layouts = _enum(signatures.LAYOUT, "KVCacheLayout")
    contents: dict[str, dict[str, Any]] = {
        "vllm": {},
        "vllm.config": {"get_current_vllm_config_or_none": lambda: current.config},
        "vllm.distributed": {},
        "vllm.distributed.parallel_state": {
            "get_tensor_model_parallel_rank": lambda: current.rank,
            "get_tensor_model_parallel_world_size": lambda: current.ranks,
        },
        "vllm.v1": {},
        "vllm.v1.attention": {},
        "vllm.v1.attention.backend": {
            "AttentionBackend": AttentionBackend,
            "AttentionMetadataBuilder": AttentionMetadataBuilder,
            "AttentionImpl": AttentionImpl,
            "AttentionMetadata": type("AttentionMetadata", (), {}),
            "CommonAttentionMetadata": common,
            "AttentionCGSupport": _enum(backend, "AttentionCGSupport"),
            "AttentionType": SimpleNamespace(DECODER="decoder", ENCODER_DECODER="encoder_decoder"),
        },
        "vllm.v1.kv_cache_interface": {"AttentionSpec": spec, "KVCacheLayout": layouts},
    }
    modules = {}
    for name, names in contents.items():
        modules[name] = ModuleType(name)
        modules[name].__dict__.update(names, __path__=[])
    ours = "kvstrata.engines.vllm"
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in sys.modules if name.split(".")[0] == "vllm" or name == ours]:
            patch.delitem(sys.modules, name)
        for name, module in modules.items():
            patch.setitem(sys.modules, name, module)
        try:
            loaded = importlib.import_module(ours)
            yield Engine(ours=loaded, current=current, common=common, spec=spec, layouts=layouts)
        finally:
            sys.modules.pop(ours, None)
            vars(kvstrata.engines).pop("vllm", None)


CONFIG = {"kvstrata": {"format": "K4V4"}}
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")


@pytest.fixture(name="engine")
def configured() -> Iterator[Engine]:
    """Our module with K4V4 pages, in every test of a file that imports this."""
    with engine() as made:
        made.configure(CONFIG)
        yield made


def layer_of(engine, **given):
    arguments = dict(num_heads=32, head_size=128, scale=128**-0.5, num_kv_heads=8) | given
    return engine.ours.KvstrataImpl(**arguments)


def profile(impl, name="model.layers.2.attn"):
    """A forward of memory profiling, which has neither a cache nor metadata."""
    q, k = (torch.zeros(1, heads, impl.head_size, device=DEVICE) for heads in (impl.num_heads, impl.num_kv_heads))
    impl.forward(SimpleNamespace(layer_name=name), q, k, k, torch.empty(0), None, torch.empty_like(q))
