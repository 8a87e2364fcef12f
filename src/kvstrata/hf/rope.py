"""RoPE of a model: frequencies from its configuration, pairs of channels from its code."""

from __future__ import annotations

import inspect
import sys
from functools import lru_cache
from typing import Any

import torch


def frequencies(config: Any, head_dim: int, kind: str = "full_attention") -> list[float] | None:
    """Radians per position of K's rotated channel pairs in layers of a kind, as in ``config.layer_types``.

    None if the model has no RoPE, or one of an unknown type. For a RoPE that depends on the length, the initial values.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    given = getattr(config, "rope_parameters", None)
    if not given:
        return None
    by_kind = kind in given
    parameters = given[kind] if by_kind else given
    if not parameters:  # only layers of another kind have RoPE
        return None
    name, theta = parameters.get("rope_type", "default"), parameters.get("rope_theta")
    if name in ROPE_INIT_FUNCTIONS:
        radians = ROPE_INIT_FUNCTIONS[name](config, torch.device("cpu"), **{"layer_type": kind} if by_kind else {})[0]
    elif name == "default" and theta:
        dim = int(head_dim * parameters.get("partial_rotary_factor", 1.0))
        radians = theta ** -(torch.arange(0, dim, 2, dtype=torch.float32, device="cpu") / dim)
    else:
        return None
    return radians.tolist() if 2 * len(radians) <= head_dim else None


def applies(module: torch.nn.Module) -> bool:
    """False if an attention module says that it leaves out RoPE (SmolLM3, Llama 4)."""
    return bool(getattr(module, "use_rope", True))


def interleaved(module: torch.nn.Module) -> bool | None:
    """True if the model's RoPE pairs channels (2 i, 2 i + 1), False for (i, i + n), None if that is unknown."""
    return _interleaved(_rotate_half(type(module)))


def _rotate_half(kind: Any) -> Any:
    """The ``rotate_half`` that an attention class or its model uses; None if there is none.

    A file with several models has several: the one that the class's forward calls counts.
    """
    scope = vars(sys.modules.get(kind.__module__, object))
    applied = [scope[name] for name in _names(kind.forward) if "rot" in name and callable(scope.get(name))]
    halves = {name for function in applied for name in _names(function) if name.startswith("rotate_half")}
    return scope.get(halves.pop() if len(halves) == 1 else "rotate_half")


def _names(function: Any) -> tuple[str, ...]:
    """Names that a Python function refers to."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return () if code is None else code.co_names


@lru_cache(maxsize=64)
def _interleaved(function: Any) -> bool | None:
    if function is None:
        return None
    turned = function(torch.arange(1.0, 9.0, device="cpu")).abs().tolist()
    return {5.0: False, 2.0: True}.get(turned[0])
