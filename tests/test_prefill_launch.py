"""prefill/launch.py: launches that go past Triton's search for a kernel have the arguments of those that do not."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvstrata import prefill_attention
from kvstrata.attention.prefill import launch as prefill_launch
from kvstrata.attention.prefill import triton as prefill_triton
from kvstrata.attention.prefill.tiles import Config
from kvstrata.call_cache import CAPACITY, Bounded
from prefill_model import DEVICE


class Recorder:
    """A kernel of Triton's as prefill/launch.py sees one: what it, and what it gives back, are launched with."""

    def __init__(self, kernel: object) -> None:
        self.arg_names: list[str] = kernel.arg_names  # type: ignore[attr-defined]
        self.calls: list[tuple[bool, tuple]] = []  # whether by name, and all arguments in the kernel's order

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., object]:
        def call(*args: object, **named: object) -> object:
            constants = [named[name] for name in self.arg_names if name in named]
            self.calls.append((bool(named), (grid, *args, *constants)))
            return self

        return call


def recorded(monkeypatch: pytest.MonkeyPatch, config: Config) -> Recorder:
    name = "specialized_kernel" if config.specialize else "prefill_kernel"
    module = pytest.importorskip("kvstrata.attention.prefill.gluon") if config.specialize else prefill_triton
    kernel = Recorder(getattr(module, name))
    monkeypatch.setattr(module, name, kernel)
    monkeypatch.setattr(prefill_triton, "config_of", lambda *_: config)
    monkeypatch.setattr(prefill_triton, "_plans", Bounded())
    return kernel


def plain(x: Any, names: dict[int, str]) -> object:
    """An argument of a launch: of a tensor its name, of a descriptor its fields."""
    if isinstance(x, torch.Tensor):
        return names[x.data_ptr()]
    if hasattr(x, "base"):
        return type(x).__name__, {name: plain(value, names) for name, value in vars(x).items()}
    return x


LAUNCHED = [Config(64, 64, 4, 2), Config(64, 64, 4, 2, specialize=True)]


@pytest.mark.parametrize("heads_first", [False, True], ids=["tokens first", "heads first"])
@pytest.mark.parametrize("config", LAUNCHED, ids=["pointers", "descriptors"])
def test_a_repeated_launch_has_the_arguments_of_a_first(
    config: Config, heads_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second call, with other tensors that look alike, goes past Triton's own search for the kernel.

    Either order in memory goes to the same kernel as it is, with no copy.
    """
    kernel, sinks, seen, kept = recorded(monkeypatch, config), torch.zeros(4, device=DEVICE), [], []
    for _ in range(2):
        shape = (3, 2, 4, 70, 64) if heads_first else (3, 2, 70, 4, 64)
        q, k, v = (x.transpose(1, 2) if heads_first else x for x in torch.randn(shape, device=DEVICE).half())
        out, lse, _ = prefill_attention(q, k, v, sinks=sinks, return_lse=True, backend="triton")
        kept.append((q, k, v, out, lse))  # so that no address comes back
        tensors = dict(q=q, k=k, v=v, out=out, lse=lse, sinks=sinks)
        seen.append([plain(x, {x.data_ptr(): name for name, x in tensors.items()}) for x in kernel.calls[-1][1]])
    assert [named for named, _ in kernel.calls] == [True, False]
    watched = [weakref.ref(tensor) for tensors in kept for tensor in tensors]
    kernel.calls.clear()
    del q, k, v, out, lse, kept, tensors
    gc.collect()
    assert all(tensor() is None for tensor in watched), "what is remembered keeps memory"
    assert len(seen[0]) == 1 + len(kernel.arg_names)
    assert seen[0] == seen[1]
    if config.specialize:
        name, fields = seen[0][1]
        assert name == "TensorDescriptor"
        assert fields["shape"] == [2, 4, 70, 64]
        assert fields["strides"] == ([17920, 4480, 64, 1] if heads_first else [17920, 64, 256, 1])


def test_a_new_signature_is_planned_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengths, strides, options, the alignment of an address: each may want another kernel."""
    kernel = recorded(monkeypatch, LAUNCHED[0])
    q, k, v = torch.randn(3, 1, 20, 4, 64, device=DEVICE).half()
    whole = torch.randn(1, 20, 4, 72, device=DEVICE).half()
    ways: list[tuple[tuple, dict]] = [
        ((q, k, v), {}),
        ((q[:, :19], k, v), {}),
        ((q, k[:, :, :2], v[:, :, :2]), {}),
        ((whole[..., :64], k, v), {}),
        ((whole[..., 1:65], k, v), {}),
        ((q, k, v), dict(causal=False)),
        ((q, k, v), dict(sliding_window=5)),
        ((q, k, v), dict(softcap=5.0)),
        ((q, k, v), dict(scale=1.0)),
        ((q, k, v), dict(sinks=torch.zeros(4, device=DEVICE))),
        ((q, k, v), dict(return_lse=True)),
    ]
    for tensors, options in ways:
        prefill_attention(*tensors, backend="triton", **options)
    assert len(prefill_triton._plans) == len(ways)
    for tensors, options in ways:
        prefill_attention(*tensors, backend="triton", **options)
    assert len(prefill_triton._plans) == len(ways)
    assert len(kernel.calls) == 2 * len(ways)


class Kernel(Recorder):
    """With parameters: a tensor, a descriptor, a number that Triton looks at, one that it does not, a float and a
    constant."""

    def __init__(self) -> None:
        super().__init__(SimpleNamespace(arg_names=["x", "block", "n", "free", "factor", "SIZE"]))
        self.params = [SimpleNamespace(do_not_specialize=name == "free") for name in self.arg_names]


def block(rows: int) -> SimpleNamespace:
    """A descriptor, as far as it is looked at."""
    return SimpleNamespace(block_shape=[rows, 64], base=torch.zeros(rows, 64))


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    monkeypatch.setattr(prefill_launch, "_launched", Bounded())
    monkeypatch.setattr(prefill_launch, "_free", {})
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    return Kernel()


def test_a_launch_reuses_the_kernel_of_the_same_signature(kernel: Kernel) -> None:
    x, y = torch.zeros(2, 64)
    for tensor, free, factor, grid in ((x, 1, 0.5, (1, 1, 1)), (y, 1, 0.25, (2, 1, 1)), (y, 70, 0.5, (2, 3, 1))):
        prefill_launch.launch(kernel, grid, (tensor, block(8), 16, free, factor), dict(SIZE=64), num_warps=4)
    assert [named for named, _ in kernel.calls] == [True, False, False]
    assert [args[0] for _, args in kernel.calls] == [(1, 1, 1), (2, 1, 1), (2, 3, 1)]
    assert [args[3:] for _, args in kernel.calls] == [(16, 1, 0.5, 64), (16, 1, 0.25, 64), (16, 70, 0.5, 64)]


@pytest.mark.parametrize(
    "other",
    [
        dict(x=torch.zeros(64).half()),
        dict(x=torch.zeros(65)[1:]),
        dict(block=16),
        dict(n=17),
        dict(n=1),
        dict(free=1 << 31),
        dict(SIZE=32),
        dict(warps=8),
        dict(device=1),
    ],
    ids=["dtype", "alignment", "block", "number", "one", "64 bits", "constant", "option", "device"],
)
def test_a_launch_with_a_new_signature_goes_to_triton(
    kernel: Kernel, other: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for way in ({}, other):
        given = dict(x=torch.zeros(64), block=8, n=16, free=1, SIZE=64, warps=4, device=0) | way
        monkeypatch.setattr(torch.cuda, "current_device", lambda given=given: given["device"])
        args = (given["x"], block(given["block"]), given["n"], given["free"], 0.5)
        prefill_launch.launch(kernel, (1, 1, 1), args, dict(SIZE=given["SIZE"]), num_warps=given["warps"])
    assert [named for named, _ in kernel.calls] == [True, True]


def test_a_full_cache_starts_over() -> None:
    cache: Bounded[int] = Bounded()
    for i in range(CAPACITY):
        cache[i,] = i
    assert len(cache) == CAPACITY
    cache[CAPACITY,] = CAPACITY
    assert cache == {(CAPACITY,): CAPACITY}
