"""The tree: packages import one way, and no module imports itself by way of others, lazily or for type checkers."""

from __future__ import annotations

import ast
import functools
from collections.abc import Container, Iterator, Mapping
from pathlib import Path

import pytest

import kvstrata

ROOT = Path(kvstrata.__file__).parent
# A package may import those before it; the modules that serve all are below.
ORDER = ("layout", "quant", "store", "cache", "attention", "hf", "engines", "tools")
SHARED = {"jit", "backends", "call_cache", "checks", "loops", "region_numba", "threads"}
REPLAYS = {"hf", "tools"}  # may also use replay, which imports no stage


def modules() -> dict[str, Path]:
    """Every module of the package by its name without ``kvstrata.``."""
    paths = {}
    for path in ROOT.rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        paths[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return paths


MODULES = modules()


def imports(name: str, text: str, is_package: bool, known: Container[str] = MODULES) -> Iterator[str]:
    """Modules of the package that a module imports, wherever in its text.

    ``import kvstrata`` imports what the module then uses of it: ``kvstrata.store_kv`` is in store.
    """
    package = name.split(".") if is_package else name.split(".")[:-1]
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            targets = [alias.name.removeprefix("kvstrata.") for alias in node.names if "kvstrata" in alias.name]
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "kvstrata":
            targets = [kvstrata._STAGE_OF.get(node.attr, node.attr)]
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                base = ".".join([*package[: len(package) - node.level + 1], *filter(None, [node.module])])
            elif node.module and node.module.split(".")[0] == "kvstrata":
                base = node.module.removeprefix("kvstrata").removeprefix(".")
            else:
                continue
            full = [f"{base}.{alias.name}".removeprefix(".") for alias in node.names]
            targets = [kvstrata._STAGE_OF.get(one, one) for one in full] if not base else full
            targets = [one if one in known else base for one in targets]
        else:
            continue
        yield from (target for target in targets if target in known and target not in ("", name))


@functools.cache
def graph() -> dict[str, set[str]]:
    """What every module imports; read when a test asks, not by each worker that collects the tests."""
    return {name: set(imports(name, path.read_text(), path.name == "__init__.py")) for name, path in MODULES.items()}


def circles(tree: Mapping[str, set[str]]) -> list[list[str]]:
    """Strongly connected components of more than one module (Tarjan)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    components = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in sorted(tree[name]):
            if other not in index:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], index[other])
        if low[name] == index[name]:
            component = [stack.pop()]
            while component[-1] != name:
                component.append(stack.pop())
            if len(component) > 1:
                components.append(sorted(component))

    for name in sorted(tree):
        if name not in index:
            visit(name)
    return components


def test_no_import_circles() -> None:
    assert not circles(graph())


def not_allowed(package: str, tree: Mapping[str, set[str]]) -> set[str]:
    """Imports of a package that its place in `ORDER` does not allow."""
    may = {*ORDER[: ORDER.index(package) + 1], *SHARED, ""}
    if package in REPLAYS:
        may.add("replay")
    return {
        f"{name} imports {other}"
        for name, others in tree.items()
        if name.split(".")[0] == package
        for other in others
        if other.split(".")[0] not in may
    }


@pytest.mark.parametrize("package", ORDER)
def test_packages_import_one_way(package: str) -> None:
    assert not not_allowed(package, graph())


def test_replay_and_jit_import_no_stage() -> None:
    for package in ("replay", "jit"):
        used = {
            other.split(".")[0] for name, others in graph().items() if name.split(".")[0] == package for other in others
        }
        assert used <= {package, *SHARED}


def test_every_package_is_in_the_import_order() -> None:
    """A new package is checked only once it is listed."""
    assert {name.split(".")[0] for name in MODULES} == {*ORDER, *SHARED, "replay", "", "__main__"}


# The checks above have to be able to fail.


@pytest.mark.parametrize(
    "text",
    [
        "from ..attention import decode",
        "from kvstrata.attention.decode import op",
        "import kvstrata.attention.decode.op",
        "def f():\n    from kvstrata.attention import decode",
        "if TYPE_CHECKING:\n    from ..attention.decode import op",
        "import kvstrata\nkvstrata.decode_attention",
        "from kvstrata import decode_attention",
    ],
)
def test_imports_are_detected_anywhere_in_a_file(text: str) -> None:
    changed = graph() | {"cache.state": set(imports("cache.state", text, is_package=False))}
    assert not_allowed("cache", changed)


def test_import_circles_are_detected() -> None:
    ring = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": {"e"}, "e": {"d"}, "f": {"a"}}
    assert sorted(circles(ring)) == [["a", "b", "c"], ["d", "e"]]
