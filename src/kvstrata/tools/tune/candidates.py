"""The choices of a problem that can be measured: valid for the shape, compiled, and within the limits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from kvstrata.jit.tuned import Choice

from . import gates
from .compiler import Compiler
from .gates import Limits, Needs, Profile, Rejected
from .problems import Problem
from .space import key

STATIC = ("divisibility", "shared memory", "registers", "spills", "occupancy", "does not compile")


class Candidates:
    """Enumerates the space once and checks the resource usage of compiled choices."""

    def __init__(self, problem: Problem, compiler: Compiler, limits: Limits) -> None:
        self.problem, self.compiler, self.limits = problem, compiler, limits
        every = list(problem.space)
        self.size = len(every)
        self.valid = {key(choice): choice for choice in every if problem.invalid(choice) is None}
        self._kernels: dict[str, list[Needs]] = {}
        self._rejected: dict[str, Rejected] = {}

    def __len__(self) -> int:
        """Number of valid choices that are not known to exceed the limits."""
        return len(self.valid.keys() - self._rejected.keys())

    def untried(self, seen: Collection[str]) -> list[Choice]:
        """Choices that are not in ``seen`` and not known to exceed the limits."""
        return [c for name, c in self.valid.items() if name not in seen and name not in self._rejected]

    def compiled(self, choice: Choice) -> bool:
        """True if `profile` returns without waiting for another process."""
        return all(self.compiler.is_ready(kernel) for kernel in self.kernels(choice))

    def kernels(self, choice: Choice) -> list[Needs]:
        name = key(choice)
        if name not in self._kernels:
            self._kernels[name] = self.problem.kernels(choice)
        return self._kernels[name]

    def passes(self, choice: Choice) -> bool:
        try:
            self.profile(choice)
        except Rejected:
            return False
        return True

    def profile(self, choice: Choice, seconds: float | None = None) -> Profile:
        """Resource usage of the kernels; Rejected outside the limits, TimeoutError if not compiled in `seconds`."""
        name, compiler = key(choice), self.compiler
        if name in self._rejected:
            raise self._rejected[name]
        try:
            if reason := self.problem.invalid(choice):
                raise Rejected("divisibility", reason)
            return gates.check(self.kernels(choice), lambda k: compiler.usage(k, seconds), compiler.arch, self.limits)
        except Rejected as error:
            self._rejected[name] = error
            raise

    def counts(self) -> Counter[str]:
        """Number of choices rejected before a launch, by reason."""
        known = Counter(error.kind for name, error in self._rejected.items() if name in self.valid)
        return known + Counter({"divisibility": self.size - len(self.valid)})
