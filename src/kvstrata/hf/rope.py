"""RoPE of a model: frequencies from its configuration, pairs of channels from its code."""

from __future__ import annotations

import ast
import inspect
import operator
import sys
import textwrap
from functools import lru_cache
from typing import Any

import torch

_OPERATORS: dict[type[ast.AST], Any] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mod: operator.mod,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda item, items: item in items,
    ast.NotIn: lambda item, items: item not in items,
}


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
    if _turns_back(type(config)):
        radians = -radians
    return radians.tolist() if 2 * len(radians) <= head_dim else None


def _turns_back(kind: type) -> bool:
    """True if the model of a configuration class rotates by negative angles (NanoChat)."""
    scope = vars(sys.modules.get(kind.__module__.replace(".configuration_", ".modeling_"), object))
    half = scope.get("rotate_half")
    return callable(half) and float(half(torch.arange(1.0, 9.0, device="cpu"))[0]) > 0


def layer_frequencies(module: torch.nn.Module, config: Any, head_dim: int, kind: str) -> tuple[float, ...]:
    """`frequencies` of one layer, empty if its attention module does not rotate K or if they are unknown."""
    return tuple(frequencies(config, head_dim, kind) or ()) if applies(module) else ()


def applies(module: torch.nn.Module) -> bool:
    """False if an attention module leaves out RoPE: its forward does so under conditions on its attributes.

    Some models have RoPE only in some layers (Cohere 2, EXAONE 4, SmolLM3, Llama 4), or only in some sizes (Granite 4).
    """
    kind: Any = type(module)
    places = _conditions(kind)
    known = {"self": module, "position_embeddings": _position_embeddings(module)}
    return not places or any(all(_holds(test, known) for test in tests) for tests in places)


def _position_embeddings(module: Any) -> object:
    """None if the model passes none to this layer, otherwise something else."""
    config, place = getattr(module, "config", None), getattr(module, "layer_idx", None)
    thetas = getattr(config, "layer_rope_theta", None)
    if thetas and isinstance(place, int) and place < len(thetas) and not thetas[place]:
        return None
    has_rope = getattr(config, "position_embedding_type", None) in ("rope", "rotary", None)
    return (None, None) if has_rope else None


def _holds(test: ast.expr, known: dict[str, object]) -> bool:
    try:
        return bool(_value(test, known))
    except (AttributeError, TypeError, KeyError, IndexError):
        return True


def _value(node: ast.AST, known: dict[str, object]) -> Any:
    """The value of an expression without calls."""
    match node:
        case ast.Constant():
            return node.value
        case ast.Name():
            return known[node.id]
        case ast.Attribute():
            return getattr(_value(node.value, known), node.attr)
        case ast.Subscript():
            return _value(node.value, known)[_value(node.slice, known)]
        case ast.Tuple() | ast.List():
            return [_value(item, known) for item in node.elts]
        case ast.UnaryOp(op=ast.Not()):
            return not _value(node.operand, known)
        case ast.BoolOp():
            combine = all if isinstance(node.op, ast.And) else any
            return combine(_value(item, known) for item in node.values)
        case ast.Compare(ops=[kind], comparators=[right]):
            return _OPERATORS[type(kind)](_value(node.left, known), _value(right, known))
        case ast.BinOp():
            return _OPERATORS[type(node.op)](_value(node.left, known), _value(node.right, known))
    raise TypeError(f"cannot evaluate {ast.unparse(node)}")


@lru_cache(maxsize=64)
def _conditions(kind: Any) -> tuple[tuple[ast.expr, ...], ...]:
    """For each call that rotates Q and K in the forward of an attention class, the conditions under which it runs.

    Only conditions on attributes of the module are kept, without calls.
    """
    try:
        forward = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(kind.forward))))
    except (AttributeError, OSError, TypeError, SyntaxError):
        return ()
    places = []
    waiting: list[tuple[ast.AST, tuple[ast.expr, ...]]] = [(forward, ())]
    while waiting:
        node, tests = waiting.pop()
        if isinstance(node, ast.Call) and "rot" in ast.unparse(node.func).lower():
            places.append(tests)
        if isinstance(node, ast.If):
            otherwise = ast.UnaryOp(ast.Not(), node.test)
            for part, test in ((node.body, node.test), (node.orelse, otherwise)):
                waiting += [(child, (*tests, *_known(test))) for child in part]
        else:
            waiting += [(child, tests) for child in ast.iter_child_nodes(node)]
    return tuple(places)


def _known(test: ast.expr) -> list[ast.expr]:
    """A condition on attributes of the module; nothing for others."""
    nodes = list(ast.walk(test))
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    if names - {"self", "position_embeddings"} or any(isinstance(node, ast.Call) for node in nodes):
        return []
    return [test]


@lru_cache(maxsize=64)
def _pairing(kind: Any) -> bool | None:
    half = _rotate_half(kind)
    if half is not None:
        turned = half(torch.arange(1.0, 9.0, device="cpu")).abs().tolist()
        return {5.0: False, 2.0: True}.get(turned[0])
    found = {_pairing_of(function) for function in _applied(kind)} - {None}
    return found.pop() if len(found) == 1 else None


def interleaved(module: torch.nn.Module) -> bool | None:
    """True if the model's RoPE pairs channels (2 i, 2 i + 1), False for (i, i + n), None if that is unknown."""
    kind: Any = type(module)
    return _pairing(kind)


def _applied(kind: Any) -> list[Any]:
    """The functions of its file that rotate Q and K in an attention class."""
    scope = vars(sys.modules.get(kind.__module__, object))
    return [scope[name] for name in _names(kind.forward) if "rot" in name and callable(scope.get(name))]


def _rotate_half(kind: Any) -> Any:
    """The ``rotate_half`` that an attention class or its model uses; None if there is none.

    A file with several models has several: the one that the class's forward calls counts.
    """
    halves = {name for function in _applied(kind) for name in _names(function) if name.startswith("rotate_half")}
    scope = vars(sys.modules.get(kind.__module__, object))
    return scope.get(halves.pop() if len(halves) == 1 else "rotate_half")


def _pairing_of(function: Any) -> bool | None:
    """`interleaved` of a function that takes Q, K and cos and sin, or complex numbers (GPT-OSS, Llama 4)."""
    try:
        names = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return None
    angle = torch.full((1, 1, 8), 0.5, device="cpu")
    tries = [{"cos": x.cos(), "sin": x.sin()} for x in (angle[..., :4], angle)]
    tries += [{"freqs_cis": torch.polar(torch.ones_like(angle[..., :4]), angle[..., :4])}]
    row = torch.zeros(1, 1, 1, 8, device="cpu")
    row[..., 0] = 1.0
    for given in tries:
        if not set(given) <= set(names):
            continue
        try:
            turned = function(row, row, **given)[1]
        except (RuntimeError, TypeError, IndexError):
            continue
        other = turned.flatten().abs()[1:].nonzero().flatten().tolist()  # where the first channel goes
        return {(3,): False, (0,): True}.get(tuple(other))
    return None


def _names(function: Any) -> tuple[str, ...]:
    """Names that a Python function refers to."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return () if code is None else code.co_names
