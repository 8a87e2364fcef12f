"""Compiles what a layer with a sliding window needs: at its first prompt, or ahead of time."""

from __future__ import annotations

from typing import Any

import torch

from kvstrata import backends, jit
from kvstrata.attention.packed_warmup import kernels_needed
from kvstrata.layout import Format

from .attention import AttentionCall
from .balance import ENOUGH, SINKS
from .logits import Logits
from .window_counts import Geometry, StepSlots
from .window_prompts import Group
from .window_step import read, store


def load_kernels(
    form: Format, heads: int, kv_heads: int, dtype: torch.dtype, device: torch.device, progress: bool | None = None
) -> None:
    """Compile and load the CUDA C++ kernels of prompts and steps in parallel; nothing to do on a CPU."""
    if backends.resolve("auto", device) == "cuda":
        wanted = kernels_needed(form, heads, kv_heads, dtype, windowed=True, arch=jit.arch_of(device))
        jit.load_ahead(wanted, device, progress)


@torch.no_grad()
def warm_up(layer: Any, model: Any, heads: int, shape: tuple[int, int, int], progress: bool | None = None) -> None:
    """Store a prompt and run a step of ``model`` in rings like those of ``layer``, an empty `WindowLayer`.

    ``shape``: rows, KV heads and head_dim. Raises what storing raises; the layer is not changed.
    """
    rows, kv_heads, dim = shape
    trial = type(layer)(*layer.arguments)
    tokens = max(trial.recent_tokens, SINKS + ENOUGH) + 1
    row = torch.linspace(-1, 1, dim, dtype=torch.float32, device=model.device).to(model.dtype)
    query, key = (row.expand(rows, tokens, n, dim).contiguous().transpose(1, 2) for n in (heads, kv_heads))
    if trial.misfit(key, key):
        return
    trial.lazy_initialization(key, key)
    load_kernels(trial.format, heads, kv_heads, trial.dtype, trial.device, progress)
    logits = Logits(dim**-0.5, getattr(layer.owner._text, "attn_logit_softcapping", None), None)
    call = AttentionCall(query, key, key, None, None, lambda q, k, v, mask: q, logits, model)
    rings = Group(trial, trial.setting(call), None)
    rings.open(1)
    rings.put(trial, call, trial.given())
    rings.finish(model, None)
    slots = StepSlots(Geometry(trial.sliding_window, trial.recent_tokens, trial.ring, rows), trial.device)
    slots.fill(rings.counts)
    query, key = query[:, :, :1], key[:, :, :1]
    read(rings, slots, query, store(rings, slots, query, key, key), logits)
