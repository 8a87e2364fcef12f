"""Operators of the packed attention ops: ``kvstrata::<name>``, and ``kvstrata::<name>_into``, which writes to ``out``.

Both take the tensors of a call, four fields of the format, the options and the backend, in this order. Calls that are
not traced skip the dispatcher.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from kvstrata.checks import check_tensor
from kvstrata.layout import Format
from kvstrata.layout.blocks import check_format

Result = tuple[torch.Tensor, torch.Tensor | None]
FORMAT = "str format, int head_dim, int page_tokens, bool rotate"


class Operators(NamedTuple):
    """Operators of one op; ``required``: tensors of a call that may not be None."""

    library: torch.library.Library
    name: str
    tensors: type[Any]  # NamedTuples
    options: type[Any]
    required: int

    def register(self, schema: str, run: Callable[..., Result], check: Callable[..., object]) -> Operators:
        """Define both with ``schema``, without the closing bracket; ``run`` and ``check`` as in `packed_decode.op`."""
        end = len(self.tensors._fields)

        def parse(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
            name, head_dim, page_tokens, rotate = arguments[end : end + 4]
            fmt = Format.parse(name, head_dim, page_tokens, rotate=rotate)
            return self.tensors(*arguments[:end]), fmt, self.options(*arguments[end + 4 : -1]), arguments[-1]

        def empty(q: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
            return q.new_empty(shape, dtype=torch.float32)

        def operator(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
            out, lse = run(*parse(arguments))
            return out, empty(out, (0,)) if lse is None else lse  # if not requested

        def into(*arguments: Any) -> torch.Tensor:
            out, lse = run(*parse(arguments[:-1]), out=arguments[-1])
            return empty(out, (0,)) if lse is None else lse

        def fake(*arguments: Any, out: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
            tensors, fmt, options, _ = parse(arguments)
            check(tensors, fmt, options, out, address=False)
            q = tensors.q
            return q.new_empty(q.shape), empty(q, q.shape[:2] if options.return_lse else (0,))

        self.library.define(f"{self.name}{schema}) -> (Tensor out, Tensor lse)")
        self.library.define(f"{self.name}_into{schema}, Tensor(b!) out) -> Tensor lse")
        self.library.impl(self.name, operator, "CompositeExplicitAutograd")
        self.library.impl(f"{self.name}_into", into, "CompositeExplicitAutograd")
        names = (f"kvstrata::{self.name}", f"kvstrata::{self.name}_into")
        torch.library.register_fake(names[0], fake, lib=self.library)
        torch.library.register_fake(names[1], lambda *given: fake(*given[:-1], out=given[-1])[1], lib=self.library)
        return self

    def call(self, tensors: Any, fmt: Format, options: Any, backend: str, out: torch.Tensor | None) -> Result:
        """Call the operator that fits."""
        check_format(fmt)
        for name, x in zip(tensors._fields[: self.required], tensors, strict=False):
            check_tensor(name, x)
        given = (fmt.name, fmt.head_dim, fmt.page_tokens, fmt.rotate, *options, backend)
        if out is None:
            return getattr(torch.ops.kvstrata, self.name)(*tensors, *given)
        return out, getattr(torch.ops.kvstrata, f"{self.name}_into")(*tensors, *given, out)
