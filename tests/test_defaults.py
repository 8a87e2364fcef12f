"""torch's default dtype and device change nothing: what is computed is float32, where the arguments are.

Also calls with little to do or with lengths that are none: an empty batch, half a token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from cache_model import make, rows
from decode_model import DEVICE
from kvstrata import PagedCache, TieredCache, decode_attention, prefill_attention, prefill_attention_cached
from kvstrata.attention.decode import parts
from kvstrata.hf.logits import Logits
from kvstrata.hf.mass import prompt_mass
from kvstrata.layout import fragments, hadamard, unpack

each_backend = pytest.mark.parametrize("backend", ["auto", "reference"])
each_kind = pytest.mark.parametrize("kind", ["tiered", "paged"])
Call = Callable[[], tuple[torch.Tensor, ...]]


def forget_tables() -> None:
    """Clear the plans of earlier calls, so that the next call makes new ones."""
    tables = [parts._turn, parts._slots, unpack._plan, unpack.dims, fragments.places, fragments.sources]
    for table in tables:
        table.cache_clear()


@pytest.fixture(params=[torch.bfloat16, torch.float16, torch.float64, torch.device("meta")], ids=str)
def under(request: pytest.FixtureRequest) -> Iterator[Callable[[Call], tuple[torch.Tensor, ...]]]:
    """Makes a call while another dtype or device is the default."""
    dtype = torch.get_default_dtype()

    def run(call: Call) -> tuple[torch.Tensor, ...]:
        forget_tables()
        if isinstance(request.param, torch.device):
            with request.param:
                return call()
        torch.set_default_dtype(request.param)
        try:
            return call()
        finally:
            torch.set_default_dtype(dtype)

    yield run
    torch.set_default_dtype(dtype)
    forget_tables()


def filled(kind: str) -> TieredCache | PagedCache:
    if kind == "tiered":
        cache = make(dim=32, budget=0.5, tiers=("K4V3", "K3V2"), device=DEVICE)
        k, v = rows(200, dim=32)
        cache.append(0, k.to(DEVICE), v.to(DEVICE))
        return cache
    k, v = torch.stack(rows(4 * 16, dim=32)).to(DEVICE).unflatten(1, (4, 16))
    table = torch.tensor([[2, 0, 1]], dtype=torch.int32, device=DEVICE)
    return PagedCache(k, v, table, torch.tensor([40], dtype=torch.int32, device=DEVICE))


def queries(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(DEVICE)


def same(got: tuple[torch.Tensor, ...], want: tuple[torch.Tensor, ...]) -> None:
    for x, y in zip(got, want, strict=True):
        if x is y is None:
            continue
        assert x.dtype == torch.float32
        torch.testing.assert_close(x, y)


@each_backend
@each_kind
@pytest.mark.parametrize("q_len", [1, 3])
def test_decode_ignores_default_dtype_and_device(under: Callable, kind: str, backend: str, q_len: int) -> None:
    cache, q = filled(kind), queries(1, q_len, 4, 32)

    def call() -> tuple[torch.Tensor, ...]:
        return decode_attention(q, cache, return_lse=True, return_mass=True, backend=backend)

    got = under(call)
    forget_tables()
    same(got, call())


@each_kind
def test_cached_prefill_ignores_default_dtype_and_device(under: Callable, kind: str) -> None:
    cache, q = filled(kind), queries(1, 20, 4, 32)

    def call() -> tuple[torch.Tensor, ...]:
        return prefill_attention_cached(q, cache, return_lse=True)

    got = under(call)
    forget_tables()
    same(got, call())


def test_prefill_ignores_default_dtype_and_device(under: Callable) -> None:
    q, (k, v) = queries(1, 20, 4, 64), queries(2, 1, 50, 2, 64)

    def call() -> tuple[torch.Tensor, ...]:
        return prefill_attention(q, k, v, return_lse=True, backend="reference")

    same(under(call), call())


def test_prompt_mass_ignores_default_dtype_and_device(under: Callable) -> None:
    query, key = queries(1, 4, 20, 32), queries(1, 2, 20, 32)
    position = torch.arange(20, device=DEVICE)[None]
    is_token = torch.ones(1, 20, dtype=torch.bool, device=DEVICE)

    def call() -> tuple[torch.Tensor, ...]:
        return (prompt_mass(query, key, position, position[None], is_token, Logits(0.2), 8),)

    same(under(call), call())


@pytest.mark.parametrize("dim", [64, 80])
def test_hadamard_ignores_default_dtype_and_device(under: Callable, dim: int) -> None:
    same(under(lambda: (hadamard(dim, DEVICE),)), (hadamard(dim, DEVICE),))


@each_backend
@each_kind
@pytest.mark.parametrize(
    "options", [{}, {"sliding_window": 8}, {"sinks": torch.zeros(4)}], ids=["plain", "window", "sinks"]
)
@pytest.mark.parametrize("q_len", [1, 3])
def test_decode_of_an_empty_batch_returns_empty_tensors(kind: str, backend: str, options: dict, q_len: int) -> None:
    cache = filled(kind)
    options = {name: x.to(DEVICE) if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    out, lse, mass = decode_attention(
        queries(0, q_len, 4, 32), cache, requests=[], return_lse=True, return_mass=True, backend=backend, **options
    )
    longest = cache.max_length if isinstance(cache, PagedCache) else 0
    assert (out.shape, lse.shape, mass.shape) == ((0, q_len, 4, 32), (0, q_len, 4), (0, 2, longest))
    assert out.dtype == lse.dtype == mass.dtype == torch.float32


@each_kind
def test_prefill_of_an_empty_batch_returns_empty_tensors(kind: str) -> None:
    out, lse, _ = prefill_attention_cached(queries(0, 5, 4, 32), filled(kind), requests=[], return_lse=True)
    assert (out.shape, lse.shape) == ((0, 5, 4, 32), (0, 5, 4))
    assert out.dtype == lse.dtype == torch.float32


@pytest.mark.parametrize("lengths", [[20.5], [20.0], ["20"], torch.tensor([20.0]), 20])
def test_lengths_are_whole_numbers(lengths: object) -> None:
    with pytest.raises(ValueError, match="lengths: expected whole numbers, got"):
        prefill_attention_cached(queries(20, 4, 32), filled("tiered"), lengths=lengths)


def test_lengths_may_be_a_tensor() -> None:
    q, cache = queries(20, 4, 32), filled("tiered")
    same(
        (prefill_attention_cached(q, cache, lengths=torch.tensor([20])),),
        (prefill_attention_cached(q, cache, lengths=[20]),),
    )
