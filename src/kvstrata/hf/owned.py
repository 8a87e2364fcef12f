"""A layer knows the cache it belongs to without keeping it alive, so that ``del cache`` frees the memory at once."""

from __future__ import annotations

from typing import Any, Generic, TypeVar
from weakref import ref

import torch

from . import attention

T = TypeVar("T")


class Copied:
    """Base of objects with tensors that are written in and outside inference mode, also when copied in that mode."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        with torch.inference_mode(False):
            vars(self).update({name: _ordinary(x) for name, x in state.items()})


def _ordinary(x: Any) -> Any:
    """``x``, as a tensor that can be written outside inference mode if it is none."""
    return x.clone() if isinstance(x, torch.Tensor) and x.is_inference() else x


class Owned(Copied, Generic[T]):
    """Base of layers: ``owner`` is their cache. Copies and pickles do not contain it; the copied cache sets it."""

    _owner: ref[T]

    @property
    def owner(self) -> T:
        owner = self._owner()
        if owner is None:
            raise ReferenceError("past_key_values: expected a layer of a cache, got one whose cache no longer exists")
        return owner

    @owner.setter
    def owner(self, owner: T) -> None:
        self._owner = ref(owner)

    def __getstate__(self) -> dict[str, Any]:
        return {name: x for name, x in vars(self).items() if name != "_owner"}


def adopt(cache: Any, state: dict[str, Any]) -> None:
    """Set the state of a copied or unpickled cache, and the owner of its layers; calls of models are routed to it."""
    Copied.__setstate__(cache, state)
    for layer in cache.layers:
        if isinstance(layer, Owned):
            layer.owner = cache
    attention.connect(cache)
