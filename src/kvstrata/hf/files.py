"""A `StrataCache` as one safetensors file: no pickle, versioned, fully checked before it is used.

    row.<r>.<name>            tensors of a request, as in cache/ops/files.py
    tokens                    uint8 [rows, columns], 0 for padding
    mass.<layer>              float32, mass of decode steps that is not in importance yet
    plain.<layer>.keys, values   layers that are not compressed
    window.<layer>.<name>     layers with a sliding window: packed pages, 16-bit tail, balance

The metadata holds the shape of the model, the arguments of both caches, the counters of each layer, the number of
observed steps and a digest of all tensors. A model of another shape is refused; weights are not compared.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from transformers import PreTrainedConfig
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from kvstrata.cache import TieredCache
from kvstrata.cache.ops.files import Refused, digest, put, taken, validate, want
from kvstrata.quant.calibration import Calibration

from . import support
from .hybrid import HybridLayer
from .layer import StrataLayer
from .mass import MassLedger
from .window import WindowLayer

KIND = "kvstrata.strata_cache"
VERSION = 2
SHAPE = (
    "model_type",
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "layer_types",
    "sliding_window",
    "rope_parameters",
)


class SavedCache(Protocol):
    """The part of a `StrataCache` that is saved in a file."""

    options: dict[str, Any]
    dtype: torch.dtype | None
    max_batch: int | None
    max_tokens: int | None
    importance_queries: int
    layers: list[Any]
    plain_layers: dict[int, str]
    calibration: Calibration | None

    def _adopt(self, tiered: TieredCache, real: np.ndarray) -> None: ...

    def _keep_plain(self, place: int, reason: str) -> DynamicLayer: ...


Loaded = TypeVar("Loaded", bound=SavedCache)


def model_shape(config: PreTrainedConfig) -> dict[str, Any]:
    """Fields of a text config that must agree between the model that saves and the one that loads."""
    text = config.get_text_config(decoder=True)
    return json.loads(json.dumps({name: support.size(text, name) for name in SHAPE}, default=str))


def save(
    path: str | PathLike[str],
    cache: SavedCache,
    config: PreTrainedConfig,
    tiered: TieredCache | None,
    real: np.ndarray,
) -> None:
    """Write a cache of a model with ``config``; ``real`` is bool ``[rows, columns]``, False for padding."""
    from safetensors.torch import save_file

    if not Path(path).parent.is_dir():
        raise FileNotFoundError(f"path: expected a file in a folder that exists, got {str(path)!r}")
    tensors = {"tokens": torch.from_numpy(real.astype(np.uint8))}
    if tiered is not None:
        for row in range(len(real)):
            tensors |= {f"row.{row}.{name}": x for name, x in taken(tiered, row).items()}
    layers = [_layer(cache, place, tensors) for place in range(len(cache.layers))]
    tensors = {name: x.detach().cpu().contiguous().clone() for name, x in tensors.items()}
    arguments = cache.options | {
        "dtype": _name(cache.dtype),
        "max_batch": cache.max_batch,
        "max_tokens": cache.max_tokens,
        "importance_queries": cache.importance_queries,
    }
    tiered_arguments = None
    if tiered is not None:
        given = {name: value for name, value in tiered._arguments.items() if name != "device"}
        # Each row includes its balance and centres, whether from a calibration or not.
        own = {"dtype": _name(tiered.dtype), "calibration": None, "balance": tiered.balance is not None}
        tiered_arguments = given | own
    metadata = {
        "kind": KIND,
        "version": str(VERSION),
        "model": json.dumps(model_shape(config)),
        "arguments": json.dumps(arguments),
        "tiered": json.dumps(tiered_arguments),
        "layers": json.dumps(layers),
        "steps": json.dumps(0 if tiered is None else tiered.reports.steps),
        "digest": digest(tensors),
    }
    save_file(tensors, path, metadata=metadata)


def _name(dtype: torch.dtype | None) -> str | None:
    return None if dtype is None else str(dtype).removeprefix("torch.")


def _layer(cache: SavedCache, place: int, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Counters of a layer; its tensors are added to ``tensors``."""
    layer = cache.layers[place]
    if isinstance(layer, StrataLayer) and not isinstance(layer, HybridLayer):
        queries = 0
        if layer.ledger is not None and layer.ledger.mass is not None:
            tensors[f"mass.{place}"], queries = layer.ledger.mass, layer.ledger.queries
        dtype = _name(layer.dtype) if layer.is_initialized else None
        return {"columns": layer.columns, "queries": queries, "dtype": dtype}
    if isinstance(layer, WindowLayer):
        tensors |= {f"window.{place}.{name}": x for name, x in layer.tensors().items()}
        return layer.numbers()
    if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
        raise NotImplementedError(
            f"save: expected layers of full or sliding-window attention, layer {place} is a {type(layer).__name__}"
        )
    if layer.is_initialized:
        tensors[f"plain.{place}.keys"], tensors[f"plain.{place}.values"] = layer.keys, layer.values
    return {"plain": cache.plain_layers[place], "length": layer.get_seq_length()}


def load(
    make: Callable[..., Loaded],
    config: PreTrainedConfig,
    path: str | PathLike[str],
    device: torch.device | str,
    more: dict[str, Any],
) -> Loaded:
    """Read a cache that `save` wrote; ``make`` is its class and takes ``more`` beside the arguments in the file.

    Raises ValueError for any other file or model.
    """
    try:
        metadata, tensors = _read(path)
        return _restore(partial(make, **more), config, metadata, tensors, torch.device(device))
    except Refused as error:
        raise ValueError(f"path: expected a StrataCache of this model, {str(path)!r} is not: {error}") from error


def _read(path: str | PathLike[str]) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Metadata and tensors of a file whose header is ours and whose digest matches."""
    from safetensors import SafetensorError, safe_open

    want(not Path(path).is_dir(), "it is a folder")
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            header = file.metadata() or {}
            want(header.get("kind") == KIND, f"kind: expected {KIND!r}, got {header.get('kind')!r}")
            want(header.get("version") == str(VERSION), f"version: expected {VERSION}, got {header.get('version')!r}")
            metadata = {name: json.loads(header[name]) for name in ("model", "arguments", "tiered", "layers")}
            metadata["steps"] = json.loads(header.get("steps", "0"))  # not in older files
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, KeyError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise Refused(f"not a complete safetensors file ({error})") from error
    want(header.get("digest") == digest(tensors), "the digest differs: the file is damaged")
    return metadata, tensors


def _restore(
    make: Callable[..., Loaded],
    config: PreTrainedConfig,
    metadata: dict[str, Any],
    tensors: dict[str, torch.Tensor],
    device: torch.device,
) -> Loaded:
    for name, value in model_shape(config).items():
        saved = metadata["model"].get(name)
        want(saved == value, f"{name}: expected {value!r} as in the model, got {saved!r}")
    arguments = metadata["arguments"]
    cache = make(config, **arguments | {"dtype": _dtype(arguments["dtype"])})
    tokens = tensors.get("tokens")
    if tokens is None or tokens.dtype != torch.uint8 or tokens.dim() != 2:
        raise Refused("tokens: expected uint8 [rows, columns]")
    want(len(metadata["layers"]) == len(cache.layers), f"layers: expected {len(cache.layers)}")
    tiered = None
    if metadata["tiered"] is not None:
        given = metadata["tiered"]
        own = {"dtype": _dtype(given["dtype"]), "device": device, "calibration": cache.calibration}  # of later rows
        tiered = TieredCache(**given | own)
        for row, columns in enumerate(tokens):
            prefix = f"row.{row}."
            parts = {name.removeprefix(prefix): x for name, x in tensors.items() if name.startswith(prefix)}
            validate(tiered, parts)
            want((parts["length"] <= int(columns.sum())).all(), f"{prefix}length: expected up to its tokens")
            put(tiered, row, parts)
        steps = metadata["steps"]
        want(type(steps) is int and 0 <= steps < 2**31, f"steps: expected 0 to {2**31 - 1}, got {steps!r}")
        tiered.reports.set_steps(steps)
        cache._adopt(tiered, tokens.numpy().astype(bool))
    for place, numbers in enumerate(metadata["layers"]):
        if "plain" in numbers:
            _restore_plain(cache, place, numbers, tensors, device)
        elif "window" in numbers:
            _restore_window(cache.layers[place], place, numbers, tensors, device)
        elif numbers["dtype"] is not None:
            if tiered is None:
                raise Refused(f"layer {place}: expected one without tokens, since no request was saved")
            want(numbers["columns"] == tokens.shape[1], f"layer {place}: expected {tokens.shape[1]} columns")
            _restore_compressed(cache.layers[place], place, numbers, tensors.get(f"mass.{place}"), tiered)
    return cache


def _dtype(name: str | None) -> torch.dtype | None:
    dtype = getattr(torch, name) if name in ("float32", "float16", "bfloat16") else None
    want(name is None or dtype is not None, f"dtype: expected a floating-point type, got {name!r}")
    return dtype


def _restore_plain(
    cache: SavedCache, place: int, numbers: dict[str, Any], tensors: dict[str, torch.Tensor], device: torch.device
) -> None:
    if place not in cache.plain_layers:
        cache._keep_plain(place, numbers["plain"])
    keys, values = (tensors.get(f"plain.{place}.{name}") for name in ("keys", "values"))
    if keys is not None and values is not None:
        layer, keys, values = cache.layers[place], keys.to(device), values.to(device)
        layer.lazy_initialization(keys, values)
        layer.keys, layer.values = keys, values
        if isinstance(layer, DynamicSlidingWindowLayer):
            layer.cumulative_length = numbers["length"]


def _restore_window(
    layer: Any, place: int, numbers: dict[str, Any], tensors: dict[str, torch.Tensor], device: torch.device
) -> None:
    want(isinstance(layer, WindowLayer), f"layer {place}: expected one without a compressed window")
    want(numbers["window"] == layer.sliding_window, f"layer {place}: expected a window of {layer.sliding_window}")
    prefix = f"window.{place}."
    try:
        layer.restore(
            numbers, {n.removeprefix(prefix): x.to(device) for n, x in tensors.items() if n.startswith(prefix)}
        )
    except (KeyError, ValueError) as error:
        raise Refused(f"layer {place}: expected the tensors of a window ({error})") from error


def _restore_compressed(
    layer: Any, place: int, numbers: dict[str, Any], mass: torch.Tensor | None, tiered: TieredCache
) -> None:
    want(isinstance(layer, StrataLayer), f"layer {place}: expected one that is not compressed")
    layer.dtype, layer.device, layer.is_initialized = _dtype(numbers["dtype"]), tiered.device, True
    layer.columns = numbers["columns"]
    if mass is not None:
        layer.ledger = MassLedger(tiered, layer.index)
        layer.ledger.mass, layer.ledger.queries = mass.to(tiered.device), numbers["queries"]
