"""A layer knows the cache it belongs to without keeping it alive, so that ``del cache`` frees the memory at once."""

from __future__ import annotations

from typing import Any, Generic, TypeVar
from weakref import ref

T = TypeVar("T")


class Owned(Generic[T]):
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
    """Set the state of a copied or unpickled cache, and the owner of its layers."""
    vars(cache).update(state)
    for layer in cache.layers:
        if isinstance(layer, Owned):
            layer.owner = cache
