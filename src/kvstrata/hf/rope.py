"""RoPE frequencies of a model, from its configuration."""

from __future__ import annotations

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
