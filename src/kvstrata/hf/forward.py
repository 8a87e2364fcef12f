"""Runs decode steps of a model's forward as one CUDA graph, by wrapping the call of the model.

While a `StrataCache` is alive, `PreTrainedModel.__call__` checks ``past_key_values`` (`call`). A forward with one new
token in every row of a StrataCache takes the fast path; everything else calls the module as usual:

    call ──▶ host: room for the token in all layers (steps.py) ──▶ graph replay ──▶ copies of the outputs

`generate` has no hook between its preparations and the forward, and the CUDA graphs of its own compilation run no host
code, so a StrataCache does not use them. The first step runs eagerly as a warm-up, and so does a step after rows or
tables changed; the next one is captured, which takes about as long as an eager step. A prompt drops the graph, so
changes of the model between two prompts (an adapter, a hook) take effect. A graph keeps alive what it reads: weights,
the scratch memory of its plan, the page tables. It is captured again when one of them was replaced.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import lru_cache
from typing import Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary, ref

import torch
from torch.distributed.tensor import DTensor
from transformers.utils import ModelOutput

import kvstrata

PLAIN = {"input_ids", "position_ids", "attention_mask", "past_key_values", "use_cache", "return_dict"}
TRANSFORMERS_HOOKS = "transformers.utils.output_capturing"  # hooks that collect outputs which steps do not return
NEEDED = PLAIN - {"return_dict"}  # parameters that a forward must take
# Attributes of modules that do not count positions from 0: after the padding index (RoBERTa), or after images.
OTHER_POSITIONS = ("create_position_ids_from_input_ids", "rope_deltas")
Module = torch.nn.Module
_counting: WeakKeyDictionary[Module, bool] = WeakKeyDictionary()
_plain_call = Module.__call__


class Ahead(Protocol):
    """The part of a cache's steps that forwards use; ``ahead`` is True in `forward`."""

    ahead: bool
    plan: Any  # the plan that the graph of a step reads

    def has_plan(self, plan: Any) -> bool: ...

    def forward(self) -> AbstractContextManager[None]: ...


class Owner(Protocol):
    """The part of a `StrataCache` that its forwards use."""

    @property
    def steps(self) -> Ahead: ...

    @property
    def eager_only(self) -> str | None: ...

    @property
    def rows(self) -> int: ...

    def get_seq_length(self) -> int: ...

    def matches(self, mask: torch.Tensor) -> bool: ...

    def advance(self) -> None: ...

    def end_step(self) -> None: ...


class Inputs(NamedTuple):
    """Arguments of a forward that is a step."""

    ids: torch.Tensor  # int64 [rows, 1]
    positions: torch.Tensor  # int64 [rows, 1]
    options: tuple[tuple[str, Any], ...]  # the rest, constant from step to step


class Forward:
    """Steps of one cache, eager, captured, or compiled and captured.

    Args:
        capture: True captures, False does not, None does on a CUDA device.
        compile: let inductor compile the model's forward before it is captured.
    """

    def __init__(self, capture: bool | None = None, compile: bool = False) -> None:
        self.capture, self.compile = capture, compile
        self.refusal: str | None = None  # why steps are eager, once known
        self.warm: set[Any] = set()  # settings for which an eager step has run
        self.drop()

    def __reduce__(self) -> tuple[Any, ...]:
        return Forward, (self.capture, self.compile)

    def drop(self) -> None:
        """Drop the graph; the next step captures another."""
        self.runner: kvstrata.GraphRunner | None = None
        self.captured_as: Any = None
        self.weights: list[torch.Tensor] = []  # parameters and buffers that the graph reads
        self.addresses: tuple[int, ...] = ()
        self.plan: kvstrata.DecodePlan | None = None  # the plan whose scratch memory it reads
        self.kind: type[ModelOutput] | None = None  # class of the outputs

    def describe(self, device: torch.device) -> str:
        """Mode of decode steps in a few words."""
        if self.refusal is not None:
            return f"eager: {self.refusal}"
        words = ["compiled"] if self.compile else []
        if self.capture or (self.capture is None and device.type == "cuda"):
            words.append("captured as a CUDA graph" if device.type == "cuda" else "run as if captured")
        return " and ".join(words) or "eager"

    def __call__(self, owner: Owner, model: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Output of ``model(*args, **kwargs)``, by the fast path if the call is a step."""
        inputs = None if self.refusal is not None else self._inputs(owner, model, args, kwargs)
        if inputs is None:
            return _plain_call(model, *args, **kwargs)
        owner.advance()
        with owner.steps.forward():
            outputs = self._run(owner, model, inputs)
        owner.end_step()
        return outputs

    def _inputs(self, owner: Owner, model: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Inputs | None:
        """Inputs if the call is a step of all rows; None if it is something else or must be eager."""
        ids, positions, mask = (kwargs.get(name) for name in ("input_ids", "position_ids", "attention_mask"))
        if args or not isinstance(ids, torch.Tensor) or ids.shape != (owner.rows, 1) or ids.dtype != torch.int64:
            return None
        if not self._wanted(model, ids.device) or not owner.get_seq_length():
            return None
        kind: Any = type(model)
        if reason := owner.eager_only or (None if _takes_steps(kind) else f"{kind.__name__}.forward"):
            self._refuse(reason)
            return None
        if torch.is_grad_enabled() or model.training or kwargs.get("return_dict") is False:
            return None
        if torch.is_autocast_enabled(ids.device.type):  # casts of weights do not outlive the context
            return None
        rest = {name: x for name, x in kwargs.items() if name not in PLAIN and x is not None and x is not False}
        if any(name != "logits_to_keep" or type(x) is not int for name, x in rest.items()):
            return None
        if mask is not None and not owner.matches(mask):
            return None
        if positions is None and mask is None and _counts_columns(model):
            positions = torch.full_like(ids, owner.get_seq_length())
        if not isinstance(positions, torch.Tensor) or positions.dim() != 2 or positions.shape[1] != 1:
            return None
        return Inputs(ids, positions.to(ids.dtype).expand_as(ids).contiguous(), tuple(sorted(rest.items())))

    def _wanted(self, model: Module, device: torch.device) -> bool:
        if self.capture or self.compile or (self.capture is None and device.type == "cuda"):
            return True
        return hasattr(model.forward, "_torchdynamo_orig_callable")  # a compiled forward then has no graph break

    def _run(self, owner: Owner, model: Module, inputs: Inputs) -> Any:
        device = inputs.ids.device
        if not (self.capture or (self.capture is None and device.type == "cuda")):
            return self._forward(owner, model, *inputs)
        setting = (ref(model), len(inputs.ids), device, inputs.options)
        if setting not in self.warm or not owner.steps.has_plan(owner.steps.plan):  # plans cannot be made in a capture
            self.warm.add(setting)
            return self._forward(owner, model, *inputs)
        if not self._holds(owner, setting):
            self.drop()
            if reason := _not_captured(model, device):
                self._refuse(reason)
                return self._forward(owner, model, *inputs)
            try:
                self._capture(owner, model, inputs)
            except RuntimeError as error:
                self.drop()
                self._refuse(f"the forward cannot be captured ({error})")
                return self._forward(owner, model, *inputs)
            self.captured_as = setting
        assert self.runner is not None
        tensors = self.runner(ids=inputs.ids, positions=inputs.positions)
        assert self.kind is not None
        return self.kind(**{name: x.clone() for name, x in tensors.items()}, past_key_values=owner)

    def _capture(self, owner: Owner, model: Module, inputs: Inputs) -> None:
        def step(ids: torch.Tensor, positions: torch.Tensor) -> dict[str, torch.Tensor]:
            outputs = self._forward(owner, model, ids, positions, inputs.options)
            self.kind = type(outputs)
            tensors = {name: x for name, x in outputs.items() if isinstance(x, torch.Tensor)}
            if others := [n for n, x in outputs.items() if n not in tensors and x is not owner and x is not None]:
                raise RuntimeError(f"outputs that are not tensors: {', '.join(others)}")
            return tensors

        rows, device = len(inputs.ids), inputs.ids.device
        with torch.inference_mode(False), torch.no_grad():
            buffers = dict.fromkeys(("ids", "positions"), ((rows, 1), torch.int64))
            runner = kvstrata.GraphRunner(step, buffers, [rows], device=device, warmup=0, progress=False)
        self.runner = runner.capture()
        self.weights, self.plan = [*model.parameters(), *model.buffers()], owner.steps.plan
        self.addresses = tuple(map(torch.Tensor.data_ptr, self.weights))

    def _holds(self, owner: Owner, setting: Any) -> bool:
        """True if the graph was captured for this setting, and everything it reads is still at its address."""
        if self.captured_as != setting or not owner.steps.has_plan(self.plan):
            return False
        return tuple(map(torch.Tensor.data_ptr, self.weights)) == self.addresses

    def _forward(
        self, owner: Owner, model: Module, ids: torch.Tensor, positions: torch.Tensor, options: Any
    ) -> ModelOutput:
        """The model's forward of a step; it gets a 4-D mask that hides nothing, so that the model builds none."""
        mask = torch.ones(len(ids), 1, 1, 1, dtype=torch.bool, device=ids.device)
        given = dict(input_ids=ids, position_ids=positions, attention_mask=mask, use_cache=True, return_dict=True)
        run = self._compiled() if self.compile else _plain_call
        return run(model, **given, past_key_values=owner, **dict(options))

    @staticmethod
    @lru_cache(maxsize=1)
    def _compiled() -> Callable[..., ModelOutput]:
        return torch.compile(_call_plainly, fullgraph=True, dynamic=False)

    def _refuse(self, reason: str) -> None:
        self.refusal = reason
        if self.capture or self.compile or "captured" in reason:
            warnings.warn(f"StrataCache: decode steps run eagerly, {reason}", stacklevel=2)


def _call_plainly(model: Module, **kwargs: Any) -> ModelOutput:
    return _plain_call(model, **kwargs)


@lru_cache(maxsize=64)
def _takes_steps(kind: Any) -> bool:
    """True if a model's forward has the parameters that a step passes."""
    parameters = inspect.signature(kind.forward).parameters.values()
    takes_any = any(x.kind == inspect.Parameter.VAR_KEYWORD for x in parameters)
    named = {x.name for x in parameters}
    return named >= NEEDED - {"use_cache"} and (takes_any or "return_dict" in named)


def _counts_columns(model: Module) -> bool:
    """True if the default position of a new token is the number of columns before it."""
    if model not in _counting:
        _counting[model] = not any(hasattr(module, name) for module in model.modules() for name in OTHER_POSITIONS)
    return _counting[model]


def _not_captured(model: Module, device: torch.device) -> str | None:
    """Reason why replaying a graph would not be equivalent to the model's forward, or None."""
    if others := {str(x.device) for x in model.parameters()} - {str(device)}:
        return f"weights are on {', '.join(sorted(others))}, tokens on {device}"
    if any(isinstance(x, DTensor) for x in model.parameters()):
        return "weights are distributed"
    for name, module in model.named_modules():
        hooks = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
        if any(getattr(hook, "__module__", "") != TRANSFORMERS_HOOKS for hook in hooks):
            return f"{name or type(model).__name__} has hooks, which replays would not call"
    return None


def call(self: Module, *args: Any, **kwargs: Any) -> Any:
    """`PreTrainedModel.__call__` while a StrataCache is alive."""
    owner: Any = kwargs.get("past_key_values")
    forward = getattr(owner, "forward", None)
    if not isinstance(forward, Forward) or owner.steps.ahead or torch.compiler.is_compiling():
        return _plain_call(self, *args, **kwargs)
    return forward(owner, self, args, kwargs)
