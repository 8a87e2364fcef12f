"""Routes attention calls of transformers models to compressed layers.

A model passes K and V to the cache, then looks up its attention function by `config._attn_implementation`. While a
`StrataCache` is alive, the lookup returns that function wrapped in `_call`, which dispatches on the type of K:

    update(k, v) ──▶ Pending ──▶ lookup ──▶ _call ──▶ the layer: prompt or decode step
                     tensors ──▶ lookup ──▶ _call ──▶ the original function, same arguments

Neither the config nor the registries of attention and mask functions are changed, so other caches, masks, compiled
graphs and continuous batching behave as without kvstrata. Calls of models are routed through forward.py for as long.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, NoReturn, Protocol

import torch
from torch._dynamo.eval_frame import OptimizedModule
from torch.utils._pytree import tree_leaves
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel

from . import forward
from .logits import Logits

BASES = ("sdpa", "eager")  # their masks are tensors [rows, 1, queries, columns]
REFUSED = ("position_bias", "cu_seq_lens_q", "cu_seq_lens_k", "block_table", "indices", "block_indices")
Attend = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]
# query, key, value, mask -> output: the model's own attention with all other arguments bound
ModelAttention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
# query, mask, model_attention, logits -> output: attention of another layer over K and V that are already stored
AttendShared = Callable[[torch.Tensor, torch.Tensor | None, ModelAttention, Logits], torch.Tensor]


class AttentionCall(NamedTuple):
    """Arguments of one attention call of a model, with K and V of the new tokens.

    query: ``[rows, heads, queries, D]``.
    key, value: ``[rows, kv_heads, queries, D]``.
    mask: ``[rows, 1, queries, columns]`` or None.
    positions: the model's ``position_ids``, None if it does not pass them to its attention.
    model_attention: the model's own attention.
    module: the model's attention layer.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None
    positions: torch.Tensor | None
    model_attention: ModelAttention
    logits: Logits
    module: torch.nn.Module


class CompressedLayer(Protocol):
    """A layer that stores K and V and attends to all it holds; ``attend_shared`` serves layers that share them."""

    attend_shared: AttendShared | None

    def step(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        logits: Logits,
    ) -> torch.Tensor: ...

    def attend(self, call: AttentionCall) -> torch.Tensor: ...


class Pending:
    """New rows of K or V between `update` and `attend`; any use as a tensor raises an error."""

    __slots__ = ("attend_shared", "is_stored", "layer", "rows")

    def __init__(self, layer: CompressedLayer, rows: torch.Tensor) -> None:
        self.layer, self.rows = layer, rows
        self.attend_shared: AttendShared | None = None  # set if other layers share this K, which is then stored already
        self.is_stored = False

    def to(self, device: torch.device) -> Pending:
        """Return self: layers that share K and V call it."""
        return self if device == self.rows.device else self._refuse(f".to({device})")

    def _refuse(self, use: str) -> NoReturn:
        raise RuntimeError(
            "past_key_values: expected a model that hands K and V from the cache to transformers' attention interface,"
            f" got one that reads them itself ({use}); a StrataCache cannot compress it, a DynamicCache works"
        )

    def __getattr__(self, name: str) -> NoReturn:
        self._refuse(f".{name}")

    def __getitem__(self, index: Any) -> NoReturn:
        self._refuse("an index")

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        given = tree_leaves((args, kwargs))
        next(x for x in given if isinstance(x, cls))._refuse(getattr(function, "__name__", "a torch function"))


class Ready:
    """Counterpart of `Pending` that dynamo can trace, for decode steps made of operators only (packed pages)."""

    def __init__(self, layer: CompressedLayer, rows: torch.Tensor) -> None:
        self.layer, self.rows = layer, rows


def check_implementation(config: PreTrainedConfig) -> str:
    """Attention implementation of a text model's config; raises ValueError if its masks are not tensors."""
    name = config._attn_implementation or "eager"
    if name not in BASES:
        raise ValueError(
            f'config: expected a model with attention "sdpa" or "eager", got {name!r};'
            ' model.set_attn_implementation("sdpa") changes it'
        )
    return name


def _check(
    base: str,
    module: torch.nn.Module,
    queries: int,
    mask: torch.Tensor | None,
    options: dict[str, Any],
    window: int | None = None,
) -> None:
    """Raise for everything that a compressed layer would ignore; `StrataCache._tokens_among` checks the mask."""
    if base not in BASES:
        raise NotImplementedError(
            f'attention: expected "sdpa" or "eager" with a StrataCache, got {base!r};'
            ' model.set_attn_implementation("sdpa") changes it'
        )
    for name in REFUSED:
        if options.get(name) is not None:
            raise NotImplementedError(f"{name}: expected None with a StrataCache, got {type(options[name])}")
    causal = options.get("is_causal")
    if causal is None:
        causal = getattr(module, "is_causal", True)
    if mask is None and queries > 1 and (base == "eager" or not causal):
        raise NotImplementedError("is_causal: expected causal attention with a StrataCache, got a bidirectional one")
    if options.get("sliding_window") not in (None, window):
        raise NotImplementedError(
            f"sliding_window: expected {window} in this layer of the cache, got {options['sliding_window']}"
        )
    config = getattr(module, "config", None)
    if options.get("dropout") or options.get("output_attentions") or getattr(config, "output_attentions", False):
        raise NotImplementedError(
            "dropout, output_attentions: expected neither with a StrataCache; model.eval() turns dropout off, and the"
            " weights of packed tokens are not returned"
        )
    if base == "sdpa" and (options.get("softcap") is not None or options.get("s_aux") is not None):
        raise NotImplementedError(
            'softcap, s_aux: expected None with sdpa, which ignores them; model.set_attn_implementation("eager")'
        )


@torch.compiler.disable  # graph break: the cache runs eagerly
def _attend(
    base: str,
    function: Attend,
    module: torch.nn.Module,
    query: torch.Tensor,
    key: Pending,
    value: Pending,
    attention_mask: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    _check(base, module, query.shape[2], attention_mask, options, getattr(key.layer, "sliding_window", None))

    def model_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        return function(module, q, k, v, mask, **options)[0]

    logits = _logits(query, options)
    if key.attend_shared is not None:
        return key.attend_shared(query, attention_mask, model_attention, logits), None
    if key.is_stored:
        key._refuse("in a second layer")
    layer, positions = key.layer, options.get("position_ids")
    out = layer.attend(
        AttentionCall(query, key.rows, value.rows, attention_mask, positions, model_attention, logits, module)
    )
    key.is_stored, key.attend_shared, layer.attend_shared = True, layer.attend_shared, None
    return out, None


def _logits(query: torch.Tensor, options: dict[str, Any]) -> Logits:
    scale = options.get("scaling") or query.shape[-1] ** -0.5
    return Logits(scale, options.get("softcap"), options.get("s_aux"))


def _step(
    base: str,
    module: torch.nn.Module,
    query: torch.Tensor,
    key: Ready,
    value: Ready,
    attention_mask: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of one layer in a step made of operators only; traced by dynamo."""
    _check(base, module, query.shape[2], attention_mask, options, getattr(key.layer, "sliding_window", None))
    return key.layer.step(query, key.rows, value.rows, attention_mask, _logits(query, options)), None


def _call(base: str, function: Attend, *args: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    key = args[2] if len(args) > 2 else options.get("key")
    if isinstance(key, Ready):
        return _step(base, *args, **options)
    if isinstance(key, Pending):
        return _attend(base, function, *args, **options)
    return function(*args, **options)


def _behind_call(base: str, function: Attend) -> Attend:
    if isinstance(function, partial) and function.func is _call:
        return function
    return partial(_call, base, function)


_get_interface = AttentionInterface.get_interface
_getitem = AttentionInterface.__getitem__  # inherited


def _get_interface_behind_call(self: AttentionInterface, attn_implementation: str, default: Attend) -> Attend:
    return _behind_call(attn_implementation or "eager", _get_interface(self, attn_implementation, default))


def _getitem_behind_call(self: AttentionInterface, key: str) -> Attend:
    return _behind_call(key, _getitem(self, key))


_users: weakref.WeakSet[Any] = weakref.WeakSet()
_lock = threading.RLock()  # reentrant: a finalizer may run while it is held


def connect(cache: Any) -> None:
    """Wrap attention lookups in `_call` and model calls in `forward.call` for as long as ``cache`` is alive."""
    if cache in _users:
        return
    with _lock:
        weakref.finalize(cache, _disconnect).atexit = False
        _users.add(cache)
        AttentionInterface.get_interface = _get_interface_behind_call
        AttentionInterface.__getitem__ = _getitem_behind_call
        PreTrainedModel.__call__ = forward.call
        OptimizedModule.__call__ = forward.optimized_call  # type: ignore[method-assign]


def _disconnect() -> None:
    with _lock:
        if any(True for _ in _users):  # len() also counts dead references
            return
        if AttentionInterface.get_interface is _get_interface_behind_call:
            AttentionInterface.get_interface = _get_interface
        if vars(AttentionInterface).get("__getitem__") is _getitem_behind_call:
            del AttentionInterface.__getitem__
        if vars(PreTrainedModel).get("__call__") is forward.call:
            del PreTrainedModel.__call__
        if vars(OptimizedModule).get("__call__") is forward.optimized_call:
            OptimizedModule.__call__ = forward._optimized_call  # type: ignore[method-assign]
