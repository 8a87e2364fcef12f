"""Texts that come with every Python, so that a default measurement needs no download and no extra licence.

Rules were chosen on the first three; the others were held out.
"""

from __future__ import annotations

import ast
import hashlib
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


def digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def load(names_or_paths: list[str]) -> dict[str, str]:
    """Texts by name; what is no known name is a file, named by its stem or, if several have that, with its folder.

    ValueError where there is no file, for one that is no text, and for two of one name.
    """
    by_name: dict[str, str] = {}
    stems = [Path(item).stem for item in names_or_paths]
    for item, name in zip(names_or_paths, stems, strict=True):
        is_known, path = item in DEFAULT + HELD_OUT, Path(item).resolve()
        if not is_known and not path.is_file():
            raise ValueError(f"text: expected a file or one of {DEFAULT + HELD_OUT}, got {item!r}")
        if not is_known and stems.count(name) > 1:
            name = f"{path.parent.name}/{path.name}"
        if name in by_name:
            raise ValueError(f"text: expected texts with names of their own, got {item!r} and another {name!r}")
        try:
            by_name[name] = text(item) if is_known else path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            where = f"{error.reason} at byte {error.start}"
            raise ValueError(f"text: expected a text file in UTF-8, got {item!r} ({where})") from error
    return by_name
