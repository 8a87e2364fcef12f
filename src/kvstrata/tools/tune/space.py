"""Search spaces: named parameters with a few values each, some conditional on others.

Spaces are plain data, declared next to their kernels (`store/space.py`, `attention/decode/space.py`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvstrata.jit.tuned import Choice, Value

if TYPE_CHECKING:
    import optuna


@dataclass(frozen=True)
class Space:
    """`choices`: the values of each parameter. `when`: a parameter that only applies if another has certain values.

    >>> Space({"kernel": ("direct", "bulk"), "rows": (1, 2)}, {"rows": ("kernel", ("bulk",))})
    """

    choices: Mapping[str, tuple[Value, ...]]
    when: Mapping[str, tuple[str, tuple[Value, ...]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        seen: list[str] = []
        for name, values in self.choices.items():
            if not values or len(set(values)) < len(values):
                raise ValueError(f"{name}: expected distinct values, got {values}")
            if name in self.when and self.when[name][0] not in seen:
                raise ValueError(f"when: expected {self.when[name][0]!r} before {name!r}")
            seen.append(name)
        if unknown := self.when.keys() - self.choices.keys():
            raise ValueError(f"when: expected names of parameters, got {min(unknown)!r}")

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __iter__(self) -> Iterator[Choice]:
        return self._from({}, list(self.choices))

    def suggest(self, trial: optuna.Trial) -> Choice:
        choice: Choice = {}
        for name, values in self.choices.items():
            if self.applies(name, choice):
                choice[name] = trial.suggest_categorical(name, values)
        return choice

    def has(self, choice: Choice) -> bool:
        return any(choice == other for other in self)

    def applies(self, name: str, choice: Choice) -> bool:
        """True if a parameter applies, given the values chosen so far."""
        other, values = self.when.get(name, (None, ()))
        return other is None or choice.get(other) in values

    def _from(self, choice: Choice, names: list[str]) -> Iterator[Choice]:
        if not names:
            yield choice
        elif self.applies(names[0], choice):
            for value in self.choices[names[0]]:
                yield from self._from({**choice, names[0]: value}, names[1:])
        else:
            yield from self._from(choice, names[1:])


def key(choice: Choice) -> str:
    """A choice as JSON with sorted keys, to compare choices."""
    return json.dumps(choice, sort_keys=True)


def show(choice: Choice | None) -> str:
    return "default" if choice is None else " ".join(f"{name}={value}" for name, value in choice.items())
