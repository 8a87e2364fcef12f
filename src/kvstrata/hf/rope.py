"""How far a model's RoPE turns K from one position to the next, from its configuration."""

from __future__ import annotations

from typing import Any

import torch


def frequencies(config: Any, head_dim: int) -> list[float] | None:
    """Radians a position for the first channels of K's heads, by pairs, in layers of full attention; None where the
    model has no RoPE, or one that is not known. One that changes with the length is taken as it begins."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    given = getattr(config, "rope_parameters", None)
    if not given:
        return None
    kind = "full_attention" if "full_attention" in given else None
    mine = given[kind] if kind else given
    if not mine:  # only layers with a sliding window are turned
        return None
    name, theta = mine.get("rope_type", "default"), mine.get("rope_theta")
    if name in ROPE_INIT_FUNCTIONS:
        found = ROPE_INIT_FUNCTIONS[name](config, torch.device("cpu"), **{"layer_type": kind} if kind else {})[0]
    elif name == "default" and theta:
        dim = int(head_dim * mine.get("partial_rotary_factor", 1.0))
        found = theta ** -(torch.arange(0, dim, 2, dtype=torch.float32, device="cpu") / dim)
    else:
        return None
    return found.tolist() if 2 * len(found) <= head_dim else None
