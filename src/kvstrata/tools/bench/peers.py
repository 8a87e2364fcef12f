"""Other libraries as optional contenders: registered per op, built with a case, listed with a reason if absent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from .case import Absent, Bench
from .clock import Call

Factory = Callable[..., Call]
F = TypeVar("F", bound=Factory)
PEERS: dict[str, dict[str, Factory]] = {}


def peer(op: str, name: str) -> Callable[[F], F]:
    """Register a factory: it imports its library, takes the arguments of `attach` and returns the contender.

    >>> @peer("store", "flashinfer")
    ... def flashinfer(inputs):
    ...     import flashinfer
    ...     return lambda i: flashinfer.append_paged_kv_cache(*inputs[i])
    """

    def register(factory: F) -> F:
        PEERS.setdefault(op, {})[name] = factory
        return factory

    return register


def attach(bench: Bench, op: str, *inputs: Any) -> None:
    """Add every peer of `op` to the bench, or to `absent` with its exception: a broken one affects no others."""
    for name, factory in PEERS.get(op, {}).items():
        try:
            bench.contenders[name] = factory(*inputs)
        except (ImportError, Absent) as reason:
            bench.absent[name] = str(reason)
        except Exception as error:
            bench.absent[name] = f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
