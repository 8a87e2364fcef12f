"""Docstrings: what a public one has to state, that its example runs, and that every docstring stands alone.

The layout is Google's. A summary line, ``Args:`` with every parameter, ``Returns``, ``Raises``, ``Example:``, in that
order. ``Returns`` and ``Raises`` are sections or paragraphs that begin with the word. Mutation and CUDA-graph capture
are stated in a sentence of the body or of an argument.
"""

from __future__ import annotations

import ast
import doctest
import importlib
import inspect
import re
from collections.abc import Container, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import kvstrata

SOURCE = Path(kvstrata.__file__).parent
SHAPE = re.compile(r"\[[^\]\n]*[A-Za-z1][^\]\n]*\]")  # ``[B, q_len, Hq, D]``
STATEMENTS = {
    "mutation": re.compile(
        r"[Mm]utate[sd]|in place|[Ww]rites to|(nothing|cache) is (modified|changed)|not (modified|changed)|read-only",
        re.I,
    ),
    "capture": re.compile(r"graph capture|be captured|captured in|read at replay|at every replay"),
}
SECTIONS = ("Args", "Returns", "Raises", "Example")

# A value type has no effects to state; NamedTuples and exceptions check nothing.
EXEMPT = {
    "AttentionOutput": {"Args", "Raises", "mutation", "capture"},
    "BudgetExceeded": {"Args", "Raises", "mutation", "capture"},
    "Format": {"mutation", "capture"},
    "PlainRows": {"Args", "Raises", "mutation", "capture"},
    "replay.Bound": {"Args", "Raises", "mutation", "capture"},
    "replay.PrecomputedMetadata": {"Args", "Raises", "mutation", "capture"},
}


def public_names() -> list[str]:
    """Exports of kvstrata, and of kvstrata.hf and kvstrata.replay with their package in front."""
    names = [name for name in kvstrata.__all__ if name != "__version__"]
    for package in ("hf", "replay"):
        exported = importlib.import_module(f"kvstrata.{package}").__all__
        names += [f"{package}.{name}" for name in exported if name not in names]
    return names


def resolve(name: str) -> Any:
    if name.startswith("hf."):
        pytest.importorskip("transformers")
    *package, last = name.split(".")
    return getattr(importlib.import_module(".".join(["kvstrata", *package])), last)


def parameters(function: Any) -> list[inspect.Parameter]:
    given = inspect.signature(function).parameters.values()
    return [p for p in given if p.name not in ("self", "cls") and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]


def touches_tensors(function: Any) -> bool:
    signature = inspect.signature(function)
    return any(
        "Tensor" in str(note) for note in (*(p.annotation for p in parameters(function)), signature.return_annotation)
    )


def section_starts(doc: str) -> dict[str, int]:
    """Offset of each section, which begins a line."""
    found = ((section, re.search(rf"^{section}(:$| )", doc, re.MULTILINE)) for section in SECTIONS)
    return {section: match.start() for section, match in found if match}


def undocumented(function: Any, doc: str) -> list[str]:
    """Parameters that no line of ``Args:`` names; ``k, v:`` names two."""
    args = re.search(r"^Args:\n((?:    .*\n|\n)*)", doc + "\n", re.MULTILINE)
    entries = re.findall(r"^    ([\w, .]+):", args.group(1), re.MULTILINE) if args else []
    named = {name.strip() for entry in entries for name in entry.split(",")}
    return [p.name for p in parameters(function) if p.name not in named and "..." not in named]


def lacks(target: Any, doc: str, exempt: Container[str] = ()) -> list[str]:
    """Parts of a public docstring that are missing or misplaced."""
    starts = section_starts(doc)
    required = ["Example", "Raises", *(["Args"] if parameters(target) else ())]
    if inspect.isfunction(target) and inspect.signature(target).return_annotation not in (None, "None"):
        required.append("Returns")
    missing = [section for section in required if section not in starts and section not in exempt]
    missing += [
        statement for statement, pattern in STATEMENTS.items() if statement not in exempt and not pattern.search(doc)
    ]
    if touches_tensors(target) and not SHAPE.search(doc[: starts.get("Example")]):
        missing.append("shapes")
    if "Args" not in exempt:
        missing += [f"argument {name}" for name in undocumented(target, doc)]
    if list(starts) != sorted(starts, key=starts.__getitem__):
        missing.append(f"sections in the order {SECTIONS}")
    return missing


@pytest.mark.parametrize("name", public_names())
def test_public_docstring_is_complete(name: str) -> None:
    target = resolve(name)
    missing = lacks(target, inspect.getdoc(target) or "", EXEMPT.get(name, ()))
    assert not missing, f"{name}: its docstring lacks {', '.join(missing)}"


@pytest.mark.parametrize(
    ("cut", "part"),
    [
        (r"^Raises:(\n    .*)*", "Raises"),
        (r"^Returns:(\n    .*)*", "Returns"),
        (r"^Example:(\n    .*)*", "Example"),
        (r"\[[^\]\n]*\]", "shapes"),
        (r"^    q: ", "argument q"),
        (r"[Mm]utate\w*", "mutation"),
        (r"graph capture|read at replay", "capture"),
        (r"^Example:", f"sections in the order {SECTIONS}"),
    ],
)
def test_a_part_that_is_missing_is_seen(cut: str, part: str) -> None:
    doc = inspect.getdoc(kvstrata.decode_packed) or ""
    doc = doc.replace("CUDA-graph capture", "graph capture")
    assert not lacks(kvstrata.decode_packed, doc)
    changed = re.sub(cut, "", doc, flags=re.MULTILINE)
    if part.startswith("sections"):
        changed = "Example:\n    >>> 1\n\n" + changed
    assert part in lacks(kvstrata.decode_packed, changed)


def public_methods(owner: type) -> Iterator[tuple[str, Any]]:
    for cls in owner.__mro__:
        if cls.__module__.startswith("kvstrata."):
            for name, member in vars(cls).items():
                function = getattr(member, "__func__", member)
                if not name.startswith("_") and inspect.isfunction(function):
                    yield name, function


@pytest.mark.parametrize("name", [name for name in public_names() if name.split(".")[-1][0].isupper()])
def test_public_methods_are_documented(name: str) -> None:
    """A method says shapes where tensors come or go, and what it raises where it takes arguments."""
    missing = []
    for method, function in public_methods(resolve(name)):
        doc = function.__doc__ or ""
        if not doc:
            missing.append(f"{method}: docstring")
        elif touches_tensors(function) and not SHAPE.search(doc):
            missing.append(f"{method}: shapes")
        elif parameters(function) and not re.search(r"\bRaises\b|Error\b|BudgetExceeded", doc):
            missing.append(f"{method}: errors")
    assert not missing


@pytest.mark.parametrize("name", public_names())
def test_example_of_docstring_runs(name: str) -> None:
    target = resolve(name)
    exported = {public: getattr(kvstrata, public) for public in kvstrata.__all__}
    shown = exported | {"torch": torch, "kvstrata": kvstrata, name.split(".")[-1]: target}
    tests = doctest.DocTestFinder(recurse=inspect.isclass(target)).find(target, name, globs=shown)
    assert any(test.examples for test in tests), f"{name} shows no example"
    torch.manual_seed(0)  # an example with a random model could otherwise end at its end-of-text token
    runner = doctest.DocTestRunner()
    for test in tests:
        runner.run(test)
    assert runner.failures == 0


# A docstring that begins so ends a sentence that was never begun, or makes a riddle of a noun.
FRAGMENT = re.compile(r"(Of|The same|What|Where|Whether|How|Which|Who|Whose|Whom|Why|When|Those|Its)\b")


def docstrings(path: Path) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            doc = ast.get_docstring(node)
            if doc:
                yield getattr(node, "lineno", 1), doc


def test_docstrings_stand_alone() -> None:
    fragments = [
        f"{path.relative_to(SOURCE)}:{line}: {doc.splitlines()[0]}"
        for path in sorted(SOURCE.rglob("*.py"))
        for line, doc in docstrings(path)
        if FRAGMENT.match(doc)
    ]
    assert not fragments, "\n".join(fragments)


@pytest.mark.parametrize(
    ("doc", "starts"),
    [
        ("Adds.\n\nArgs:\n    x: one.\n\nRaises ValueError.\n\nExample:\n    >>> 1", ["Args", "Raises", "Example"]),
        ("Adds.\n\nRaises:\n    ValueError: no.\n", ["Raises"]),
        ("Adds. Raises ValueError.", []),
    ],
)
def test_sections_begin_a_line(doc: str, starts: list[str]) -> None:
    assert list(section_starts(doc)) == starts


def test_undocumented_parameters_are_seen() -> None:
    def function(a: int, b: int, c: int) -> None: ...

    assert undocumented(function, "Adds.\n\nArgs:\n    a, b: numbers.\n\nRaises ValueError.") == ["c"]
    assert undocumented(function, "Adds.") == ["a", "b", "c"]
