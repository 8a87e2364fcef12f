"""Runs decode steps of a model's forward as one CUDA graph, by wrapping the call of the model.

While a `StrataCache` is alive, `PreTrainedModel.__call__` checks ``past_key_values`` (`call`), and so does what
``torch.compile(model)`` returns. A forward with one new token in every row of a StrataCache takes the fast path;
everything else calls the module as usual:

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
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import lru_cache
from typing import Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary, ref

import torch
from torch._dynamo.eval_frame import OptimizedModule
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.cache_utils import LinearAttentionCacheLayerMixin
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
_optimized_call = OptimizedModule.__call__


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

    @property
    def is_even(self) -> bool: ...

    def get_seq_length(self) -> int: ...

    def matches(self, mask: torch.Tensor) -> bool: ...

    def advance(self) -> None: ...

    def end_step(self) -> None: ...

    def end_forward(self) -> None: ...

    interrupted: bool

    def stored(self) -> list[Any]: ...

    def reset(self) -> None: ...


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
        self.eager: str | None = None  # why the last step was
        self.depth = 0  # models whose forward is running, one in the other
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
        if reason := self.refusal or self.eager:
            return f"eager: {reason}"
        words = ["compiled"] if self.compile else []
        if self.captures_on(device):
            words.append("captured as a CUDA graph" if device.type == "cuda" else "run as if captured")
        return " and ".join(words) or "eager"

    def captures_on(self, device: torch.device) -> bool:
        """True if steps on this device are captured, or run as if they were."""
        return bool(self.capture) or (self.capture is None and device.type == "cuda")

    def load_kernels(self, device: torch.device) -> None:
        """Compile and load what captured steps need besides the layers' kernels: copies of their inputs."""
        if device.type == "cuda" and self.captures_on(device):
            into, given = ([torch.zeros(1, 1, dtype=torch.int64, device=device) for _ in range(2)] for _ in range(2))
            kvstrata.CopyPlan(into, given, fill=0).run()

    def __call__(self, owner: Owner, entry: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The output of ``entry(*args, **kwargs)``, a model or what torch.compile made of it; steps the fast way."""
        if owner.interrupted and not self.depth:
            raise RuntimeError(
                "past_key_values: expected a cache whose last forward was complete, got one that was interrupted after"
                " some layers had stored their tokens; call reset() and repeat the prompt"
            )
        inputs = None
        if self.refusal is None and (given := _by_name(_model(entry), args, kwargs)) is not None:
            inputs = self._inputs(owner, entry, given)
        if inputs is None:
            before = None if self.depth else owner.stored()
            self.depth += 1
            try:
                outputs = _run_plainly(entry, *args, **kwargs)
                owner.end_forward()
            except BaseException:
                if before is not None:
                    _note_failure(owner, before)
                raise
            finally:
                self.depth -= 1
            return outputs
        owner.advance()
        with owner.steps.forward():
            outputs = self._run(owner, entry, inputs)
        owner.end_step()
        return outputs

    def _inputs(self, owner: Owner, entry: Module, given: dict[str, Any]) -> Inputs | None:
        """Inputs of a step of all rows; None if the call is something else, or has to be eager: ``eager`` says why."""
        tokens = given.get("input_ids") if given.get("inputs_embeds") is None else given["inputs_embeds"]
        if not isinstance(tokens, torch.Tensor) or tokens.shape[:2] != (owner.rows, 1):
            return None
        model = _model(entry)
        if not self._wanted(entry, tokens.device) or not owner.get_seq_length():
            return None
        kind: Any = type(model)
        if reason := owner.eager_only or _takes_no_steps(kind):
            self._refuse(reason)
            return None
        reason = _not_a_step(owner, model, given)
        ids, positions, mask = (given.get(name) for name in ("input_ids", "position_ids", "attention_mask"))
        if reason is None and positions is None and mask is None and _counts_columns(model):
            positions = torch.full_like(tokens, owner.get_seq_length())
        if not isinstance(positions, torch.Tensor) or positions.dim() != 2 or positions.shape[1] != 1:
            reason = reason or "position_ids are not [rows, 1]"
        if reason is None or not self.depth:  # what an inner model is given says nothing to the caller
            self.eager = reason
        if reason is not None:
            return None
        assert ids is not None
        assert positions is not None
        options = tuple(sorted(_options(given).items()))
        return Inputs(ids, positions.to(ids.dtype).expand_as(ids).contiguous(), options)

    def _wanted(self, entry: Module, device: torch.device) -> bool:
        if self.compile or self.captures_on(device):
            return True
        if isinstance(entry, OptimizedModule) or entry._compiled_call_impl is not None:
            return True
        return hasattr(entry.forward, "_torchdynamo_orig_callable")  # a compiled forward stays in its graph

    def _run(self, owner: Owner, entry: Module, inputs: Inputs) -> Any:
        device = inputs.ids.device
        if not self.captures_on(device):
            return self._forward(owner, entry, *inputs)
        setting = (ref(entry), len(inputs.ids), device, inputs.options)
        if setting not in self.warm or not owner.steps.has_plan(owner.steps.plan):  # plans cannot be made in a capture
            self.warm.add(setting)
            return self._forward(owner, entry, *inputs)
        if not self._holds(owner, setting):
            self.drop()
            if reason := _not_captured(_model(entry), device):
                self._refuse(reason)
                return self._forward(owner, entry, *inputs)
            try:
                self._capture(owner, entry, inputs)
            except RuntimeError as error:
                self.drop()
                self._refuse(f"the forward cannot be captured ({error})")
                return self._forward(owner, entry, *inputs)
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
        self, owner: Owner, entry: Module, ids: torch.Tensor, positions: torch.Tensor, options: Any
    ) -> ModelOutput:
        """The model's forward of a step; it gets a 4-D mask that hides nothing, so that the model builds none."""
        mask = torch.ones(len(ids), 1, 1, 1, dtype=torch.bool, device=ids.device)
        given = dict(input_ids=ids, position_ids=positions, attention_mask=mask, use_cache=True, return_dict=True)
        run = self._compiled() if self.compile and not isinstance(entry, OptimizedModule) else _run_plainly
        return run(entry, **given, past_key_values=owner, **dict(options))

    @staticmethod
    @lru_cache(maxsize=1)
    def _compiled() -> Callable[..., ModelOutput]:
        return torch.compile(_call_plainly, fullgraph=True, dynamic=False)

    def _refuse(self, reason: str) -> None:
        self.refusal = reason
        if self.capture or self.compile or "captured" in reason:
            warnings.warn(f"StrataCache: decode steps run eagerly, {reason}", stacklevel=2)


def columns_of(layers: Iterable[Any]) -> list[Any]:
    """Columns of each layer; what layers with other states hold is unlike anything, since it cannot be compared."""
    return [object() if isinstance(x, LinearAttentionCacheLayerMixin) else x.get_seq_length() for x in layers]


def _note_failure(owner: Owner, before: list[Any]) -> None:
    """Mark a cache of which some layers stored the tokens of a forward that failed; empty it if none ever did."""
    after = owner.stored()
    if after != before:
        owner.interrupted = True
    elif not any(after) and not owner.get_seq_length():
        owner.reset()


def _call_plainly(model: Module, **kwargs: Any) -> ModelOutput:
    return _plain_call(model, **kwargs)


def _model(entry: Module) -> Module:
    """The model behind what ``torch.compile(model)`` returns, or the model itself."""
    return entry._orig_mod if isinstance(entry, OptimizedModule) else entry


def _run_plainly(entry: Module, *args: Any, **kwargs: Any) -> Any:
    """Call a model, or what torch.compile made of it, as if there were no StrataCache."""
    if isinstance(entry, OptimizedModule):
        return _optimized_call(entry, *args, **kwargs)
    return _plain_call(entry, *args, **kwargs)


def _by_name(model: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any] | None:
    """Arguments of a forward by name: ``input_ids`` may come first without one; None for other calls."""
    if not args:
        return kwargs
    kind: Any = type(model)
    if len(args) > 1 or "input_ids" in kwargs or _first_parameter(kind) != "input_ids":
        return None
    return kwargs | {"input_ids": args[0]}


@lru_cache(maxsize=64)
def _first_parameter(kind: Any) -> str:
    return next(iter([*inspect.signature(kind.forward).parameters][1:]), "")


def _options(given: dict[str, Any]) -> dict[str, Any]:
    """Arguments of a forward beyond those of every step, without those that say nothing."""
    return {name: x for name, x in given.items() if name not in PLAIN and x is not None and x is not False}


def _not_a_step(owner: Owner, model: Module, given: dict[str, Any]) -> str | None:
    """Reason why a forward of one new token of every row has to be eager, or None."""
    ids, mask = given.get("input_ids"), given.get("attention_mask")
    if given.get("inputs_embeds") is not None:
        return "inputs_embeds are given"
    if ids is None or ids.dtype != torch.int64:
        return "input_ids are not int64"
    if torch.is_grad_enabled():
        return "gradients are enabled"
    if model.training:
        return "the model is in training mode"
    if torch.is_autocast_enabled(ids.device.type):  # casts of weights do not outlive the context
        return "autocast is on"
    if given.get("return_dict") is False:
        return "return_dict=False"
    others = [name for name, x in _options(given).items() if name != "logits_to_keep" or type(x) is not int]
    if others:
        return f"{', '.join(sorted(others))} given"
    if not owner.is_even:
        return "the model does not use all layers of its config"
    if mask is not None and not owner.matches(mask):
        return "attention_mask is not that of earlier calls with a token more"
    return None


@lru_cache(maxsize=64)
def _takes_no_steps(kind: Any) -> str | None:
    """Argument of a step that a model's forward does not take, in words; None if it takes all of them."""
    parameters = inspect.signature(kind.forward).parameters.values()
    named = {x.name for x in parameters}
    missing = NEEDED - {"use_cache"} - named
    if not any(x.kind == inspect.Parameter.VAR_KEYWORD for x in parameters):
        missing |= {"return_dict"} - named
    return f"{kind.__name__}.forward takes no {', '.join(sorted(missing))}" if missing else None


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


def optimized_call(self: Any, *args: Any, **kwargs: Any) -> Any:
    """`OptimizedModule.__call__` while a StrataCache is alive: a call of what ``torch.compile(model)`` returned."""
    owner: Any = kwargs.get("past_key_values")
    forward = getattr(owner, "forward", None)
    if not isinstance(forward, Forward) or owner.steps.ahead or not isinstance(self._orig_mod, PreTrainedModel):
        return _optimized_call(self, *args, **kwargs)
    return forward(owner, self, args, kwargs)
