"""Check that a `StrataCache` can compress a model, from the source code of its attention.

The K and V of a compressed layer are not tensors, so a model has to pass the result of `update` to transformers'
attention interface and do nothing else with it:

    key_states, value_states = past_key_values.update(key_states, value_states, self.layer_idx)
    attention_interface = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, ...)
    attn_output, attn_weights = attention_interface(self, query_states, key_states, value_states, attention_mask, ...)

The source is parsed before the first token, not imported. A model whose source cannot be found is accepted here;
`attention.Pending` raises when such a model reads K or V.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import warnings
from collections.abc import Iterator
from os import PathLike
from typing import Any

import torch
from transformers.cache_utils import DynamicLayer, LinearAttentionAndFullAttentionLayer

from kvstrata.cache.tiered_cache import DTYPES
from kvstrata.quant.calibration import Calibration

REGISTRY = "ALL_ATTENTION_FUNCTIONS"
# Keyword arguments of an attention function that a compressed layer handles or that do not change the scores.
KNOWN = {"query", "key", "value", "attention_mask", "position_ids", "is_causal", "sliding_window", "scaling", "softcap"}
KNOWN |= {"s_aux", "dropout", "output_attentions"}
VARIES = -1


def check(
    config: Any, attention: str, user: str = "a StrataCache can compress", instead: str = "a DynamicCache works"
) -> None:
    """Raise ValueError for a model that cannot be compressed; ``attention`` is "sdpa" or "eager".

    ``user`` and ``instead`` are words of the message: for whom, and what works.
    """
    text = config.get_text_config(decoder=True)
    reason = None
    if config.is_encoder_decoder or getattr(text, "is_encoder_decoder", False):
        reason, instead = "it is an encoder-decoder model", "an EncoderDecoderCache of DynamicCaches works"
    elif getattr(text, "add_cross_attention", False):
        reason = "its layers have cross-attention"
    else:
        module = type(text).__module__
        source = _source(module)
        reason = None if source is None else _refusal(source, attention)
        if source is not None and module.startswith("transformers.") and not _uses_cache(source):
            reason = "its layers give no K and V to a cache"
    if reason:
        raise ValueError(
            f"config: expected a model that {user}, got {text.model_type!r}: {reason}"
            f"{'' if reason.endswith('to a cache') else f'; {instead}'}"
        )


def size(config: Any, name: str) -> Any:
    """A size from a text config; None if it is absent, `VARIES` if layers have different ones."""
    try:
        return getattr(config, name, None)
    except RuntimeError:  # heterogeneous configs raise
        return VARIES


def slides(config: Any, place: int, layer: Any) -> bool:
    """True if a layer of a DynamicCache only serves attention with a sliding window."""
    types = getattr(config, "layer_types", None)
    if types is None:
        is_sliding = getattr(config, "attention_chunk_size", None) is None and not _other_block(config, place)
    else:
        is_sliding = types[place] == "sliding_attention"
    return is_sliding and type(layer).__name__ == "DynamicSlidingWindowLayer"


def _other_block(config: Any, place: int) -> str:
    """Kind of a layer that has no attention, though transformers gives all of the model's a window (RecurrentGemma)."""
    blocks = getattr(config, "layers_block_type", None) or ()
    return blocks[place] if place < len(blocks) and blocks[place] != "attention" else ""


def why_plain(config: Any, place: int, layer: Any) -> str:
    """Kind of a DynamicCache layer that is not compressed, in words."""
    if getattr(config, "layer_types", None) is None and (block := _other_block(config, place)):
        return f"a {block} layer"
    window = getattr(layer, "sliding_window", None)
    if not window:
        return type(layer).__name__
    types = getattr(config, "layer_types", None)
    kind = types[place] if types is not None and place < len(types) else "sliding_attention"
    return f"chunked attention of {window}" if kind == "chunked_attention" else f"sliding window of {window}"


def context(config: Any) -> int | None:
    """Tokens that a text config allows a text to have; None where it does not say."""
    tokens = size(config, "max_position_embeddings")
    return tokens if type(tokens) is int and tokens > 0 else None


def plain_layers(layers: list[Any], text: Any) -> dict[int, str]:
    """Layers of a DynamicCache that cannot be compressed, each with the reason; ``text`` is the model's config."""
    shares = bool(getattr(text, "num_kv_shared_layers", None))
    reasons = {}
    for place, layer in enumerate(layers):
        if type(layer) is not DynamicLayer:
            reasons[place] = why_plain(text, place, layer)
        elif shares:
            reasons[place] = "the model shares K and V between layers"
    return reasons


def kinds_of(layers: list[Any], text: Any) -> list[str]:
    """Kinds of a model's layers for `Calibration.check_kinds`, from the layers of a DynamicCache."""
    full = DynamicLayer, LinearAttentionAndFullAttentionLayer
    kinds = ["layer" if type(layer) in full else "" for layer in layers]
    kinds = ["window" if slides(text, place, layers[place]) else kind for place, kind in enumerate(kinds)]
    return kinds + [""] * ((size(text, "num_hidden_layers") or 0) - len(layers))


def misfit(key: torch.Tensor, value: torch.Tensor, shape: tuple[int, int] | None) -> str | None:
    """Reason why K and V of a layer, ``[rows, kv_heads, n, D]``, cannot be compressed, or None.

    ``shape`` is (kv_heads, D) of other layers.
    """
    dim = key.shape[-1]
    if key.shape != value.shape:
        return f"K and V of different shapes, {tuple(key.shape[1::2])} and {tuple(value.shape[1::2])}"
    if dim % 16 or not 32 <= dim <= 256:
        return f"head_dim {dim}, not a multiple of 16 from 32 to 256"
    if shape not in (None, (key.shape[1], dim)):
        return f"{key.shape[1]} heads of {dim}, other layers have {shape}"
    return None


def check_shape(key: torch.Tensor, heads: int, dim: int) -> None:
    """Raise ValueError for K ``[rows, kv_heads, n, D]`` of another model than the one whose tokens a cache has."""
    if key.shape[1] != heads or key.shape[3] != dim:
        raise ValueError(
            f"past_key_values: expected K of {heads} heads of {dim} as before, got {key.shape[1]} of {key.shape[3]};"
            " a cache belongs to one model, and reset() empties it for another"
        )


def check_dtype(dtype: torch.dtype) -> None:
    """Raise ValueError for a model or cache in a dtype whose rows cannot be stored."""
    if dtype not in DTYPES:
        raise ValueError(f"dtype: expected one of {DTYPES}, got {dtype!r}")


def rows_of(name: str, indices: torch.Tensor, rows: int) -> list[int]:
    """Rows that an argument names, int64 ``[n]`` or a bool mask ``[rows]``; IndexError for one that does not exist.

    ``rows`` is 0 if no layer is compressed; then transformers' own layers check.
    """
    if not rows:
        return []
    if indices.dtype == torch.bool:
        if len(indices) != rows:
            raise IndexError(f"{name}: expected a mask of {rows} rows, got {len(indices)}")
        return [int(row) for row in indices.nonzero()]
    chosen: list[int] = indices.tolist()
    for row in chosen:
        if not 0 <= row < rows:
            raise IndexError(f"{name}: expected rows from 0 to {rows - 1}, got {row}")
    return chosen


def warn_if_useless(cache: Any) -> None:
    """Warn if no layer of a cache is compressed."""
    if len(cache.plain_layers) == len(cache.layers):
        reasons = ", ".join(sorted(set(cache.plain_layers.values())))
        warnings.warn(f"StrataCache compresses no layer of this model: {reasons}", stacklevel=4)


def sizes(text: Any) -> tuple[int | None, int | None, int | None]:
    """Query heads, KV heads and head_dim from a config; head_dim is None if `misfit` would refuse it."""
    heads = size(text, "num_attention_heads")
    dim = size(text, "head_dim") or (heads and getattr(text, "hidden_size", 0) // heads)
    fits = type(dim) is int and dim % 16 == 0 and 32 <= dim <= 256
    return heads, size(text, "num_key_value_heads") or heads, dim if fits else None


def _source(configuration: str) -> str | None:
    """Source code of the modeling module that belongs to a configuration module, with its part for text; or None."""
    package, _, name = configuration.rpartition(".")
    if not name.startswith("configuration_"):
        return None
    parts = []
    for suffix in ("", "_text"):  # BLIP has a module of its own for text
        try:
            spec = importlib.util.find_spec(f"{package}.modeling_{name.removeprefix('configuration_')}{suffix}")
            parts.append(spec.loader.get_source(spec.name) if spec and spec.loader else None)  # type: ignore[attr-defined]
        except (ImportError, AttributeError, OSError):
            continue
    return "\n".join(part for part in parts if part) or None


@functools.lru_cache(maxsize=8)
def _uses_cache(source: str) -> bool:
    """True if a modeling module gives K and V to a cache anywhere."""
    return any(isinstance(node, ast.Call) and _is_update(node) for node in ast.walk(ast.parse(source)))


@functools.lru_cache(maxsize=8)
def _refusal(source: str, attention: str) -> str | None:
    """Reason why a modeling module's attention cannot be compressed, or None."""
    for owner in ast.parse(source).body:
        if isinstance(owner, ast.ClassDef):
            for function in owner.body:
                if isinstance(function, ast.FunctionDef) and (reason := _refused(function, attention)):
                    return f"{owner.name}.{function.name} {reason}"
    return None


def _refused(function: ast.FunctionDef, attention: str) -> str | None:
    nodes = list(ast.walk(function))
    updates = [node for node in nodes if isinstance(node, ast.Call) and _is_update(node)]
    if not updates:
        return None
    by_value: dict[ast.AST, ast.expr] = {node.value: node.targets[0] for node in nodes if isinstance(node, ast.Assign)}
    names = set()
    for update in updates:
        target = by_value.get(update)
        if not isinstance(target, ast.Tuple) or not all(isinstance(name, ast.Name) for name in target.elts):
            return "does not take K and V from the cache as a pair"
        names |= {name.id for name in target.elts if isinstance(name, ast.Name)}
    lookups = list(_lookups(nodes))
    calls = [
        node
        for node in nodes
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in dict(lookups)
    ]
    if not calls:
        return "does not use transformers' attention interface"
    if attention == "eager" and not any(by_method for _, by_method in lookups):
        return 'looks its attention up only where it is not "eager"; model.set_attn_implementation("sdpa") changes it'
    for call in calls:
        if reason := _refused_call(call, names):
            return reason
    last = max(update.lineno for update in updates)
    for node in nodes:
        if isinstance(node, ast.Assign) and "attention_mask" in _computed(node):
            return "makes its own mask in each layer"
        if getattr(node, "lineno", 0) > last and (reason := _refused_use(node, names)):
            return reason
    return None


def _is_update(call: ast.Call) -> bool:
    """True for ``past_key_values.update(key, value, layer)``, whatever the name of the cache."""
    if not isinstance(call.func, ast.Attribute) or call.func.attr != "update":
        return False
    cache = ast.unparse(call.func.value)
    return len(call.args) + len(call.keywords) >= 3 and "past" in cache and "cross_attention" not in cache


def _lookups(nodes: list[ast.AST]) -> Iterator[tuple[str, bool]]:
    """Names that attention functions are assigned to, with True if looked up by `get_interface`."""
    for node in nodes:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            for part in ast.walk(node.value):
                if isinstance(part, ast.Attribute | ast.Subscript) and ast.unparse(part.value) == REGISTRY:
                    yield ast.unparse(target), isinstance(part, ast.Attribute)


def _refused_call(call: ast.Call, names: set[str]) -> str | None:
    by_name = {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}
    given = call.args[2:4] or [by_name[name] for name in ("key", "value") if name in by_name]
    if len(given) != 2 or not {ast.unparse(x) for x in given} <= names:
        return "computes other tensors from the K and V of the cache"
    unknown = sorted(by_name.keys() - KNOWN)
    return f"gives its attention function {', '.join(unknown)}" if unknown else None


def _refused_use(node: ast.AST, names: set[str]) -> str | None:
    """Reason why a use of K or V after `update` cannot be compressed, or None."""
    if isinstance(node, ast.Attribute | ast.Subscript) and ast.unparse(node.value) in names:
        return f"reads {ast.unparse(node)} after the cache"
    if isinstance(node, ast.Assign) and (changed := _computed(node) & names):
        return f"computes {', '.join(sorted(changed))} again after the cache"
    return None


def _computed(node: ast.Assign) -> set[str]:
    """Names assigned by a statement, unless it only copies another name."""
    if isinstance(node.value, ast.Name):
        return set()
    return {part.id for target in node.targets for part in ast.walk(target) if isinstance(part, ast.Name)}


def calibration_of(given: Any) -> Calibration | None:
    """The calibration that a user gave: one, the path of its file, or None; raises TypeError for anything else."""
    if given is None or isinstance(given, Calibration):
        return given
    if not isinstance(given, str | PathLike):
        raise TypeError(f"calibration: expected a Calibration or the path of its file, got {type(given).__name__}")
    return Calibration.load(given)
