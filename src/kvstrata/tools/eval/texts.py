"""Texts that come with every Python, so that a default measurement needs no download and no extra licence.

Rules were chosen on the first three; the others were held out.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import os
from pathlib import Path

DEFAULT = ("topics", "inspect", "prose")
HELD_OUT = ("topics-later", "argparse", "typing", "tempfile")
SOURCES = {"inspect": 0, "argparse": 12_000, "typing": 20_000, "tempfile": 3_000}  # modules, from this character on


def text(name: str) -> str:
    if name in ("topics", "topics-later"):
        from pydoc_data import topics

        whole = "\n\n".join(topics.topics[key] for key in sorted(topics.topics))
        return whole if name == "topics" else whole[60_000:]
    if name == "prose":
        return _prose()
    if name in SOURCES:
        return inspect.getsource(importlib.import_module(name))[SOURCES[name] :]
    raise ValueError(f"text: expected one of {DEFAULT + HELD_OUT}, got {name!r}")


def _prose() -> str:
    """Docstrings: English with little code. First those of modules, then the longer ones inside other modules."""
    modules = "statistics unittest argparse random doctest difflib optparse"
    inside = "threading subprocess shutil smtplib os statistics logging/__init__ textwrap unittest/case unittest/mock"
    inside += " optparse tarfile codecs contextlib tempfile"
    docs = [importlib.import_module(name).__doc__ or "" for name in modules.split()]
    return "\n\n".join([*filter(None, docs)] + [doc for name in inside.split() for doc in _docstrings(name)])


def _docstrings(name: str) -> list[str]:
    """Docstrings of at least 200 characters of the classes and functions of a standard-library module."""
    tree = ast.parse((Path(os.__file__).parent / f"{name}.py").read_text(encoding="utf-8"))
    docs = [ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, (ast.ClassDef, ast.FunctionDef))]
    return [doc for doc in docs if doc and len(doc) >= 200]


def load(names_or_paths: list[str]) -> dict[str, str]:
    """Texts by name; anything that is not a known name is a file."""
    by_name = {}
    for item in names_or_paths:
        if item in DEFAULT + HELD_OUT:
            by_name[item] = text(item)
        elif Path(item).is_file():
            by_name[Path(item).stem] = Path(item).read_text(encoding="utf-8", errors="replace")
        else:
            raise ValueError(f"text: expected a file or one of {DEFAULT + HELD_OUT}, got {item!r}")
    return by_name
