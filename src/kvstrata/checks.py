"""Argument checks that packages share; errors name the argument, what was expected and what was given."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import numpy as np
import torch

from kvstrata.layout.format import MAX_TIERS, Format


def fail(argument: str, expected: str, given: object, error: type[Exception] = ValueError) -> NoReturn:
    """Raise ``error``, naming the argument, what was expected and what was given."""
    raise error(f"{argument}: expected {expected}, got {given}")


def check_int(name: str, value: Any, low: int, high: int | None = None) -> int:
    if isinstance(value, np.generic):
        value = value.item()
    if type(value) is not int or value < low or (high is not None and value > high):
        wanted = f"an int of at least {low}" if high is None else f"an int from {low} to {high}"
        raise ValueError(f"{name}: expected {wanted}, got {value!r}")
    return value


def check_device(device: torch.device | str) -> torch.device:
    """A device by name; ValueError for what torch does not know, or where no tensor has memory."""
    try:
        known = torch.device(device)
    except (RuntimeError, TypeError):
        known = None
    if known is None or known.type == "meta":
        raise ValueError(f"device: expected one that torch knows, such as 'cpu' or 'cuda', got {device!r}")
    return known


def check_number(name: str, value: float, wanted: str, within: Callable[[float], bool]) -> None:
    if not isinstance(value, (int, float)) or not within(value):
        raise ValueError(f"{name}: expected a number in {wanted}, got {value!r}")


def check_rope(rope: Sequence[float] | torch.Tensor | None, head_dim: int) -> tuple[float, ...]:
    """RoPE angle per position of each channel pair, in radians; empty if K is not rotated."""
    if rope is None:
        return ()
    try:
        angles = tuple(float(x) for x in rope)
    except (TypeError, ValueError):
        raise ValueError(f"rope: expected a row of numbers such as a model's inv_freq, got {rope!r}") from None
    if len(angles) > head_dim // 2:
        raise ValueError(f"rope: expected up to {head_dim // 2} numbers, head_dim / 2, got {len(angles)}")
    for angle in angles:
        check_number("rope", angle, "(-inf, inf)", math.isfinite)
    return angles


def whole_numbers(name: str, values: Sequence[int]) -> list[int]:
    """Convert a sequence or a 1-D tensor to a list of ints; ValueError if it holds anything else."""
    try:
        return [operator.index(value) for value in values]
    except TypeError:
        raise ValueError(f"{name}: expected whole numbers, got {values!r}") from None


def check_tensor(name: str, x: torch.Tensor) -> None:
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name}: expected a tensor, got {type(x).__name__}")


def check_names(names: Sequence[str]) -> None:
    """Raise ValueError for a list of tiers in which a name is not a format, naming it."""
    if not isinstance(names, Sequence) or isinstance(names, str):
        raise ValueError(f"tiers: expected a list of formats such as ['K4V4', 'K2V2'], got {names!r}")
    for name in names:
        try:
            Format.parse(str(name), 64)
        except ValueError as error:
            raise ValueError(f"tiers: expected formats such as 'K4V2', got {name!r} ({error})") from None


def check_tiers(formats: Sequence[Format], names: Sequence[str]) -> None:
    """Raise ValueError unless ``formats`` (the plain one, then those of ``names``) get narrower from tier to tier."""
    for better, worse in itertools.pairwise(formats):
        if worse.plain or worse.k_bits > better.k_bits or worse.v_bits > better.v_bits:
            raise ValueError(
                "tiers: expected none that is wider than the one before, for K or for V,"
                f" got {worse.name} after {better.name} in {tuple(names)}"
            )
    if len(formats) == 1:
        raise ValueError("tiers: expected at least one format, got none")
    if len(formats) > MAX_TIERS:
        raise ValueError(f"tiers: expected at most {MAX_TIERS - 1} formats beside plain rows, got {len(names)}")
