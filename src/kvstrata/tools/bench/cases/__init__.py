"""The benchmarks by name: a module `cases/<op>.py` has `cases(device, quick) -> list[Case]`.

It may also have `summary(report) -> str`, the lines printed below its table; `TABLE`, the options of that table; and
`run`, with the signature of `runner.run`, if its contenders are not calls in this process.
"""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType
from typing import Any


def names() -> list[str]:
    """The ops that can be measured."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def find(op: str) -> ModuleType:
    """Benchmark module of an op; LookupError lists the ops."""
    if op not in names():
        raise LookupError(f"no benchmark named {op!r}; there are: {', '.join(names()) or 'none yet'}")
    return importlib.import_module(f"{__name__}.{op}")


def by_name(op: str, device: Any) -> dict[str, Any]:
    """All cases of an op on a device by name, the quick ones first."""
    return {case.name: case for quick in (True, False) for case in find(op).cases(device, quick)}
