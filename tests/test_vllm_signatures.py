"""Signatures of vLLM that our backend relies on: our classes against the record, the installed vLLM against it."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import json
from pathlib import Path

import pytest

import kvstrata
import vllm_signatures as signatures
import vllm_standin

ENGINES = Path(kvstrata.__file__).parent / "engines"
TREE, RULES = (ast.parse((ENGINES / name).read_text()) for name in ("vllm.py", "vllm_config.py"))
CLASSES = {node.name: node for node in TREE.body if isinstance(node, ast.ClassDef)}
BASES = {
    "KvstrataBackend": ("AttentionBackend",),
    "KvstrataBuilder": ("AttentionMetadataBuilder",),
    "KvstrataImpl": ("AttentionImpl", "AttentionImplBase"),
}
OWN = ("_calibrate", "_calibrate_by_weights", "_allocate", "_slots", "do_kv_cache_update")  # not of a base class
OURS = [
    (cls, method)
    for cls in BASES
    for method in CLASSES[cls].body
    if isinstance(method, ast.FunctionDef) and method.name not in OWN
]


@pytest.mark.parametrize(("cls", "method"), OURS, ids=lambda x: getattr(x, "name", x))
def test_our_methods_accept_vllms_arguments(cls, method):
    described = json.loads(signatures.RECORD.read_text())["signatures"]
    keys = [f"{signatures.BACKEND}: {base}.{method.name}, parameters" for base in BASES[cls]]
    theirs = next((described[key] for key in keys if key in described), None)
    assert theirs is not None, f"{cls}.{method.name}: add it to tests/vllm_signatures.py, and record it"
    ours = signatures.parameters(method)
    if "**kwargs" in ours and "*args" in ours:
        return
    assert ours[: len(theirs)] == theirs
    assert all(x.endswith("=") or x.startswith("*") for x in ours[len(theirs) :])


def test_calls_of_vllm_fit_our_methods():
    methods = {method.name: method for method in CLASSES["KvstrataImpl"].body if isinstance(method, ast.FunctionDef)}
    for function, call, ours in (
        ("unified_kv_cache_update", "do_kv_cache_update", "do_kv_cache_update"),
        ("unified_attention_with_output", "forward", "forward"),
        ("Attention.__init__", "impl_cls", "__init__"),
    ):
        (given,) = signatures.recorded(signatures.LAYER, function, f"calls {call}")
        names = [x.rstrip("=") for x in signatures.parameters(methods[ours])[1:]]
        positional = [x for x in given if not x.endswith("=") and not x.startswith("**")]
        keywords = [x.rstrip("=") for x in given if x.endswith("=")]
        assert len(positional) <= len(names)
        assert set(keywords) <= set(names[len(positional) :])
        if call == "do_kv_cache_update":
            assert len(positional) == len(names)


def test_imported_names_are_recorded():
    described = " ".join(json.loads(signatures.RECORD.read_text())["signatures"])
    imported = [
        alias.name
        for node in ast.walk(TREE)
        if isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").startswith("vllm")
        for alias in node.names
    ]
    assert len(imported) > 10
    assert not [name for name in imported if name not in described]
    assert "vllm" not in {
        (node.module or "").split(".")[0] for node in ast.walk(RULES) if isinstance(node, ast.ImportFrom)
    }


def test_fields_that_are_read_are_recorded():
    builder = CLASSES["KvstrataBuilder"]
    read = {
        x.attr for x in ast.walk(builder) if isinstance(x, ast.Attribute) and getattr(x.value, "id", "") == "common"
    }
    assert len(read) > 7
    assert read <= set(signatures.recorded(signatures.BACKEND, "CommonAttentionMetadata", "fields"))
    fields = {*signatures.recorded(signatures.INTERFACE, "AttentionSpec", "fields")}
    assert {"head_size", "head_size_v", "dtype", "state_content_bytes", "tokens_per_state"} <= fields
    fields = {*signatures.recorded(signatures.INTERFACE, "FullAttentionSpec", "fields")}
    assert {"attention_chunk_size", "non_causal"} <= fields
    assert "sink_len" in signatures.recorded(signatures.INTERFACE, "SinkFullAttentionSpec", "fields")
    names = " ".join(json.loads(signatures.RECORD.read_text())["signatures"])
    nodes = [*ast.walk(TREE), *ast.walk(RULES)]
    config = {x.attr for x in nodes if isinstance(x, ast.Attribute) and ast.unparse(x.value).endswith("config")}
    config |= {x.attr for x in nodes if isinstance(x, ast.Attribute) and ast.unparse(x.value) == "drafts"}
    config -= {f"{name}_config" for name in ("model", "scheduler", "speculative", "cache", "device")}
    assert {"additional_config", "max_model_len", "max_num_seqs", "num_speculative_tokens"} <= config
    assert not [name for name in config if f".{name}, " not in names]
    (given,) = signatures.recorded(signatures.STATE, "DefaultModelState.prepare_attn", "calls build_attn_metadata")
    assert "req_idx=" in given
    # A draft model's first step: device lengths have a token more than the bounds that it passes (`slots_ahead`).
    given = signatures.recorded(signatures.SPECULATOR, "StandaloneARSpeculator._prefill", "calls _build_attn_metadata")
    assert any({"step=", "seq_lens_cpu_upper_bound="} <= {*call} for call in given)


def test_block_shape_is_as_recorded():
    text = signatures.recorded(signatures.INTERFACE, "compute_layer_kv_cache_shape_bytes", "doc")
    assert "``(B, H, N, C)`` where C is in bytes" in text


def test_refusals_cover_vllms_reasons():
    spoken = signatures.recorded(signatures.BACKEND, "AttentionBackend.validate_configuration", "strings")
    with vllm_standin.engine() as engine:
        assert set(engine.ours.REFUSALS) <= set(spoken)


def test_entry_point_and_extra():
    text = (Path(__file__).parent.parent / "pyproject.toml").read_text()
    group = signatures.recorded(signatures.PLUGINS, "DEFAULT_PLUGINS_GROUP", "value").strip("'\"")
    assert f'[project.entry-points."{group}"]\nkvstrata = "kvstrata.engines:register_vllm"' in text
    minor = json.loads(signatures.RECORD.read_text())["vllm"].rsplit(".", 1)[0]
    assert f'vllm = ["vllm=={minor}.*"]' in text


def test_a_moved_signature_is_named():
    old = json.loads(signatures.RECORD.read_text())["signatures"]
    new = dict(old)
    key = f"{signatures.BACKEND}: AttentionImpl.forward, parameters"
    new[key] = [*old[key], "cascade"]
    (sentence,) = signatures.moved(old, new)
    assert "AttentionImpl.forward" in sentence
    assert "cascade" in sentence


def test_installed_vllm_has_the_recorded_signatures():
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        pytest.skip("vLLM is not installed")
    record = json.loads(signatures.RECORD.read_text())
    moved = signatures.moved(record["signatures"], signatures.describe(Path(spec.origin).parent.parent))
    version = importlib.metadata.version("vllm")
    assert not moved, f"vLLM {version} differs from {record['vllm']}: " + "; ".join(moved)
