"""Describe the part of vLLM's source that kvstrata.engines.vllm relies on; nothing of vLLM is imported.

Record it again, after reading what changed, with: python tests/vllm_signatures.py FOLDER, which holds ``vllm/``.
"""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

RECORD = Path(__file__).parent / "data" / "vllm_signatures.json"
BACKEND, REGISTRY = "vllm/v1/attention/backend.py", "vllm/v1/attention/backends/registry.py"
INTERFACE, LAYOUT = "vllm/v1/kv_cache_interface.py", "vllm/v1/kv_cache_layout.py"
LAYER, PARALLEL = "vllm/model_executor/layers/attention/attention.py", "vllm/distributed/parallel_state.py"
CONFIG, PLUGINS = "vllm/config/vllm.py", "vllm/plugins/__init__.py"
MODEL, SCHEDULER, CACHE = "vllm/config/model.py", "vllm/config/scheduler.py", "vllm/config/cache.py"
DRAFTS, STATE = "vllm/config/speculative.py", "vllm/v1/worker/gpu/model_states/default.py"
SPECULATOR = "vllm/v1/worker/gpu/spec_decode/standalone_ar/speculator.py"
DEVICE, LINEAR = "vllm/config/device.py", "vllm/model_executor/layers/linear.py"
LOADER, ROPE = "vllm/model_executor/model_loader/utils.py", "vllm/model_executor/layers/rotary_embedding/base.py"

# What is described: "parameters" of a function, "fields" of a class with annotations, "members" of an enum, "strings"
# of a function, its "doc", a "value", "calls" of a method in a function, and "attributes" that a method gives to self.
WANTED = [
    *((BACKEND, f"AttentionBackend.{name}", "parameters") for name in (
        "get_name", "get_impl_cls", "get_builder_cls", "get_supported_kernel_block_sizes", "get_preferred_block_size",
        "get_supported_head_sizes", "supports_compute_capability", "supports_sink", "supports_sliding_window",
        "supports_kv_connector", "validate_configuration", "supported_kv_cache_layouts", "customize_spec",
    )),
    (BACKEND, "AttentionBackend", "fields"),
    (BACKEND, "AttentionBackend.validate_configuration", "strings"),
    (BACKEND, "AttentionMetadata", "fields"),
    (BACKEND, "CommonAttentionMetadata", "fields"),
    (BACKEND, "AttentionCGSupport", "members"),
    (BACKEND, "AttentionType", "members"),
    *((BACKEND, f"AttentionMetadataBuilder.{name}", "parameters") for name in (
        "__init__", "build", "build_for_cudagraph_capture", "_init_reorder_batch_threshold",
    )),
    (BACKEND, "AttentionMetadataBuilder", "fields"),
    *((BACKEND, f"AttentionImpl.{name}", "parameters") for name in ("__init__", "forward")),
    (BACKEND, "AttentionImplBase.process_weights_after_loading", "parameters"),
    (LAYER, "unified_kv_cache_update", "calls do_kv_cache_update"),
    (LAYER, "unified_attention_with_output", "calls forward"),
    (LAYER, "Attention.__init__", "calls impl_cls"),
    (INTERFACE, "KVCacheSpec", "fields"),
    (INTERFACE, "AttentionSpec", "fields"),
    (INTERFACE, "FullAttentionSpec", "fields"),
    (INTERFACE, "SinkFullAttentionSpec", "fields"),
    (INTERFACE, "AttentionSpec.state_content_size_bytes", "doc"),
    (INTERFACE, "compute_layer_kv_cache_shape_bytes", "doc"),
    (LAYOUT, "KVCacheLayout", "members"),
    (REGISTRY, "register_backend", "parameters"),
    (REGISTRY, "AttentionBackendEnum.is_overridden", "parameters"),
    (REGISTRY, "AttentionBackendEnum.get_path", "parameters"),
    (REGISTRY, "AttentionBackendEnum.CUSTOM", "value"),
    (PARALLEL, "get_tensor_model_parallel_rank", "parameters"),
    (PARALLEL, "get_tensor_model_parallel_world_size", "parameters"),
    (CONFIG, "get_current_vllm_config_or_none", "parameters"),
    (CONFIG, "VllmConfig.additional_config", "value"),
    (CONFIG, "VllmConfig.num_speculative_tokens", "parameters"),
    (CONFIG, "VllmConfig.use_v2_model_runner", "parameters"),
    (MODEL, "ModelConfig.max_model_len", "value"),
    (MODEL, "ModelConfig.is_hybrid", "parameters"),
    (SCHEDULER, "SchedulerConfig.max_num_batched_tokens", "value"),
    (SCHEDULER, "SchedulerConfig.max_num_seqs", "value"),
    (CACHE, "CacheConfig.block_size", "value"),
    (DRAFTS, "SpeculativeConfig.method", "value"),
    (DRAFTS, "SpeculativeConfig.parallel_drafting", "value"),
    (SPECULATOR, "StandaloneARSpeculator._prefill", "calls _build_attn_metadata"),
    (DRAFTS, "NgramGPUTypes", "value"),
    (STATE, "DefaultModelState.prepare_attn", "calls build_attn_metadata"),
    (PLUGINS, "DEFAULT_PLUGINS_GROUP", "value"),
    (LAYER, "Attention.__init__", "attributes impl"),
    (LAYER, "Attention.process_weights_after_loading", "calls process_weights_after_loading"),
    (LOADER, "process_weights_after_loading", "calls process_weights_after_loading"),
    (LINEAR, "QKVParallelLinear.__init__", "attributes num_heads num_kv_heads head_size v_head_size"),
    (LINEAR, "QKVParallelLinear._get_shard_offset_mapping", "strings"),
    (LINEAR, "UnquantizedLinearMethod.create_weights", "calls register_parameter"),
    (ROPE, "RotaryEmbeddingBase.__init__", "attributes cos_sin_cache is_neox_style"),
    (ROPE, "RotaryEmbeddingBase._compute_cos_sin_cache", "calls cat"),
    (MODEL, "ModelConfig.hf_text_config", "value"),
    (DEVICE, "DeviceConfig.device", "value"),
]  # fmt: skip


def _body(node: ast.AST) -> Iterator[ast.AST]:
    """Statements of a module, class or function, those under ``if`` and ``try`` included."""
    for statement in getattr(node, "body", []):
        yield statement
        if isinstance(statement, ast.If | ast.Try):
            yield from _body(statement)


def _named(node: ast.AST, name: str) -> ast.AST | None:
    for statement in _body(node):
        targets = [getattr(statement, "name", None)]
        if isinstance(statement, ast.Assign):
            targets += [getattr(target, "id", None) for target in statement.targets]
        elif isinstance(statement, ast.AnnAssign):
            targets.append(getattr(statement.target, "id", None))
        if name in targets:
            return statement
    return None


def parameters(function: Any) -> list[str]:
    """Names of a function's parameters, with ``=`` behind those that have a default."""
    given = function.args
    names = [x.arg for x in (*given.posonlyargs, *given.args)]
    required = len(names) - len(given.defaults)
    described = [name + "=" * (i >= required) for i, name in enumerate(names)]
    described += [f"*{given.vararg.arg}"] if given.vararg else []
    described += [x.arg + "=" * (d is not None) for x, d in zip(given.kwonlyargs, given.kw_defaults, strict=True)]
    return described + ([f"**{given.kwarg.arg}"] if given.kwarg else [])


def _calls(function: ast.AST, name: str) -> list[list[str]]:
    calls = []
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and name in (getattr(node.func, "attr", None), getattr(node.func, "id", None)):
            keywords = [f"{x.arg}=" if x.arg else f"**{ast.unparse(x.value)}" for x in node.keywords]
            calls.append([*map(ast.unparse, node.args), *keywords])
    return calls


def _describe(node: Any, kind: str) -> Any:
    if kind == "parameters":
        return parameters(node)
    if kind == "fields":
        return [x.target.id for x in node.body if isinstance(x, ast.AnnAssign)] + [
            target.id for x in node.body if isinstance(x, ast.Assign) for target in x.targets
        ]
    if kind == "members":
        return {x.targets[0].id: ast.unparse(x.value) for x in node.body if isinstance(x, ast.Assign)}
    if kind == "strings":
        return sorted({x.value for x in ast.walk(node) if isinstance(x, ast.Constant) and isinstance(x.value, str)})
    if kind == "doc":
        return ast.get_docstring(node)
    if kind == "value":
        return ast.unparse(node.value)
    if kind.startswith("attributes "):
        assigned = {ast.unparse(x) for x in ast.walk(node) if isinstance(getattr(x, "ctx", None), ast.Store)}
        return [name for name in kind.split()[1:] if f"self.{name}" in assigned]
    return _calls(node, kind.removeprefix("calls "))


@lru_cache
def _parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def describe(folder: Path) -> dict[str, Any]:
    """Description of the vLLM in a folder; None for what it does not have."""
    found: dict[str, Any] = {}
    for file, dotted, kind in WANTED:
        path = folder / file
        node: ast.AST | None = _parsed(path) if path.is_file() else None
        for name in dotted.split("."):
            node = None if node is None else _named(node, name)
        found[f"{file}: {dotted}, {kind}"] = None if node is None else _describe(node, kind)
    return found


def recorded(file: str, dotted: str, kind: str) -> Any:
    return json.loads(RECORD.read_text())["signatures"][f"{file}: {dotted}, {kind}"]


def moved(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """A sentence for each signature that is not what it was."""
    return [f"{name} was {value}, is {new.get(name)}" for name, value in old.items() if new.get(name) != value]


if __name__ == "__main__":
    source = Path(sys.argv[1])
    version = next(source.glob("vllm-*.dist-info")).name.split("-")[1]
    signatures = describe(source)
    if missing := [name for name, value in signatures.items() if value is None]:
        sys.exit(f"not in {source}: {missing}")
    RECORD.write_text(json.dumps({"vllm": version.removesuffix(".dist"), "signatures": signatures}, indent=1) + "\n")
