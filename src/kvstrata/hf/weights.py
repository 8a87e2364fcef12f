"""Balance and centre of an attention module's K, from the weights of its projections."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch

from kvstrata.quant import weights
from kvstrata.quant.calibration import LayerCalibration
from kvstrata.quant.projection import Projection, is_plain

from . import projections
from . import rope as rope_of

SAMPLED = 16  # values of each row and column of a weight that are compared to notice a change

Projections = tuple[Projection, Projection]  # of Q and K

_balances: WeakKeyDictionary[torch.nn.Module, tuple[Any, torch.Tensor, torch.Tensor | None]] = WeakKeyDictionary()


def calibration_of(module: torch.nn.Module, kv_heads: int, dim: int, rope: Sequence[float]) -> LayerCalibration:
    """Balance and centre of an attention module, as far as its weights determine them.

    ``rope``: radians per position of K's rotated channel pairs, empty for none.
    """
    own = None if projections.are_plain(module) else projections.of_q_and_k(module, kv_heads, dim)
    turned = rope_of.interleaved(module)
    balance = balance_of(module, kv_heads, dim, rope, turned, own)
    centre = centre_of(module, kv_heads, dim, rope, turned, own)
    if balance is not None and centre is not None:
        centre = centre / balance.to(centre.device)
    return LayerCalibration(balance, centre)


def balance_of(
    module: torch.nn.Module,
    kv_heads: int,
    dim: int,
    rope: Sequence[float],
    is_interleaved: bool | None,
    own: Projections | None = None,
) -> torch.Tensor | None:
    """Balance ``[kv_heads, D]`` of an attention module, or None if its weights do not determine it.

    ``rope`` and ``is_interleaved`` are those of the model; ``own``: the module's projections, if they were probed.
    Otherwise cached per module until its weights change.
    """
    rope = rope if rope_of.applies(module) else ()
    if rope and is_interleaved is None:
        return None

    def compute() -> torch.Tensor | None:
        of_q_and_k = own or projections.of_q_and_k(module, kv_heads, dim)
        return weights.balance_from_weights(*of_q_and_k, kv_heads, dim, rope, bool(is_interleaved))

    layers = [*projections.linears(module), *projections.norms(module)]
    given = [getattr(layer, name, None) for layer in layers for name in ("weight", "bias")]
    tensors = [x for x in given if isinstance(x, torch.Tensor)]
    if not projections.are_plain(module) or any(x.is_inference() for x in tensors):  # those have no version counter
        return compute()
    versions = ((id(x), x.data_ptr() if is_plain(x) else 0, x._version) for x in tensors)
    key = (kv_heads, dim, tuple(rope), is_interleaved, *map(type, layers), *versions)
    sample, known = _sample(tensors), _balances.get(module)
    if known is None or known[0] != key or not torch.equal(known[1], sample):
        with torch.inference_mode(False), torch.no_grad():
            known = _balances[module] = key, sample, compute()
    return known[2]


@torch.no_grad()
def _sample(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Values from all rows and columns of some tensors: changes through ``.data`` do not count as new versions."""
    known = [x for x in tensors if is_plain(x)]
    parts = [x[:, :: max(1, x.shape[1] // SAMPLED)] for x in known if x.dim() == 2]
    parts += [x[:: max(1, len(x) // SAMPLED)] for x in known if x.dim() == 2]
    parts += [x for x in known if x.dim() != 2]
    return torch.cat([x.flatten().float() for x in parts]) if parts else torch.empty(0, device="cpu")


@torch.no_grad()
def centre_of(
    module: torch.nn.Module,
    kv_heads: int,
    dim: int,
    rope: Sequence[float],
    is_interleaved: bool | None,
    own: Projections | None = None,
) -> torch.Tensor | None:
    """Centre ``[kv_heads, D]`` of K, not divided by a balance; None if the weights do not determine it.

    Arguments are those of `balance_of`.
    """
    rope = rope if rope_of.applies(module) else ()
    if rope and is_interleaved is None:
        return None
    _, k = own or projections.of_q_and_k(module, kv_heads, dim)
    return weights.centre_from_weights(k, kv_heads, dim, rope, bool(is_interleaved))
