"""Texts that every Python brings along, so that a default measurement needs no download and no licence of its own.

The first three are the ones that rules were chosen on; the last three were held out from that.
"""

from __future__ import annotations

import inspect
from pathlib import Path

DEFAULT = ("topics", "inspect", "prose")
HELD_OUT = ("topics-later", "argparse", "typing")


def text(name: str) -> str:
    """One of the texts by name."""
    if name in ("topics", "topics-later"):
        from pydoc_data import topics

        whole = "\n\n".join(topics.topics[key] for key in sorted(topics.topics))
        return whole if name == "topics" else whole[60_000:]
    if name == "prose":
        return _prose()
    if name == "inspect":
        return inspect.getsource(inspect)
    if name == "argparse":
        import argparse

        return inspect.getsource(argparse)[12_000:]
    if name == "typing":
        import typing

        return inspect.getsource(typing)[20_000:]
    raise ValueError(f"text: expected one of {DEFAULT + HELD_OUT}, got {name!r}")


def _prose() -> str:
    """Docstrings of modules: English with little code."""
    import argparse
    import difflib
    import doctest
    import optparse
    import random
    import statistics
    import unittest

    modules = (statistics, unittest, argparse, random, doctest, difflib, optparse)
    return "\n\n".join(module.__doc__ for module in modules if module.__doc__)


def load(names_or_paths: list[str]) -> dict[str, str]:
    """Texts by name; what is no known name is a file."""
    found = {}
    for item in names_or_paths:
        if item in DEFAULT + HELD_OUT:
            found[item] = text(item)
        elif Path(item).is_file():
            found[Path(item).stem] = Path(item).read_text(encoding="utf-8", errors="replace")
        else:
            raise ValueError(f"text: expected a file or one of {DEFAULT + HELD_OUT}, got {item!r}")
    return found
