"""The tree: packages import one way, and no module imports itself by way of others, lazily or for type checkers."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvstrata

ROOT = Path(kvstrata.__file__).parent
# A package may import those before it; the modules that serve all are below.
ORDER = ("layout", "quant", "store", "cache", "attention", "hf", "engines", "tools")
SHARED = {"jit", "backends", "call_cache", "checks"}


def modules() -> dict[str, Path]:
    """Every module of the package by its name without ``kvstrata.``."""
    paths = {}
    for path in ROOT.rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        paths[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return paths


MODULES = modules()


def imports(name: str, path: Path) -> Iterator[str]:
    """Modules of the package that a module imports, wherever in its text."""
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            targets = [alias.name.removeprefix("kvstrata.") for alias in node.names if "kvstrata" in alias.name]
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                base = ".".join([*package[: len(package) - node.level + 1], *filter(None, [node.module])])
            elif node.module and node.module.split(".")[0] == "kvstrata":
                base = node.module.removeprefix("kvstrata").removeprefix(".")
            else:
                continue
            full = [f"{base}.{alias.name}".removeprefix(".") for alias in node.names]
            targets = [one if one in MODULES else base for one in full]
        else:
            continue
        yield from (target for target in targets if target in MODULES and target not in ("", name))


GRAPH = {name: set(imports(name, path)) for name, path in MODULES.items()}


def circles() -> list[list[str]]:
    """Strongly connected groups of more than one module (Tarjan)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    groups = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in sorted(GRAPH[name]):
            if other not in index:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], index[other])
        if low[name] == index[name]:
            group = [stack.pop()]
            while group[-1] != name:
                group.append(stack.pop())
            if len(group) > 1:
                groups.append(sorted(group))

    for name in sorted(GRAPH):
        if name not in index:
            visit(name)
    return groups


def test_no_import_circles() -> None:
    assert not circles()


@pytest.mark.parametrize("package", ORDER)
def test_packages_import_one_way(package: str) -> None:
    may = {*ORDER[: ORDER.index(package) + 1], *SHARED, ""}
    if package == "tools":
        may.add("replay")
    wrong = {
        f"{name} imports {other}"
        for name, others in GRAPH.items()
        if name.split(".")[0] == package
        for other in others
        if other.split(".")[0] not in may
    }
    assert not wrong


def test_replay_and_jit_import_no_stage() -> None:
    for package in ("replay", "jit"):
        used = {
            other.split(".")[0] for name, others in GRAPH.items() if name.split(".")[0] == package for other in others
        }
        assert used <= {package, *SHARED}
