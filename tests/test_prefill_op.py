"""kvstrata::prefill_attention: the registered operator, fake tensors, torch.compile, and the way around it in eager."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

import kvstrata
from conftest import HAS_GPU
from kvstrata.attention.prefill import op as prefill

DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
BACKEND = "auto" if HAS_GPU else "reference"


def rows(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def inputs(queries: int = 5, keys: int = 9, batch: int = 2) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return rows(batch, queries, 4, 64), rows(batch, keys, 2, 64, seed=1), rows(batch, keys, 2, 64, seed=2)


def ends(*lengths: int) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int().to(DEVICE)


CALLS = {
    "dense": ((), {}),
    "lse, sinks, options": ((), dict(return_lse=True, scale=0.2, softcap=5.0, sliding_window=3)),
    "not causal": ((), dict(causal=False)),
    "ragged": ((7, 11), dict(return_lse=True)),
}


def call_of(name: str) -> tuple[tuple[torch.Tensor, ...], dict]:
    lengths, options = CALLS[name]
    q, k, v = inputs()
    if lengths:
        q, k, v = rows(10, 4, 64), rows(18, 2, 64, seed=1), rows(18, 2, 64, seed=2)
        options = options | dict(cu_seqlens_q=ends(3, 7), cu_seqlens_k=ends(*lengths), max_seqlen_q=7, max_seqlen_k=11)
    if "sinks" in name:
        options = options | dict(sinks=rows(4, seed=3))
    return (q, k, v), options | dict(backend=BACKEND)


@pytest.mark.parametrize("name", CALLS)
def test_prefill_attention_passes_opcheck(name: str) -> None:
    tensors, options = call_of(name)
    torch.library.opcheck(torch.ops.kvstrata.prefill_attention.default, tensors, options)


@pytest.mark.parametrize("name", CALLS)
def test_the_operator_gives_what_the_function_gives(name: str) -> None:
    tensors, options = call_of(name)
    out, lse = torch.ops.kvstrata.prefill_attention(*tensors, **options)
    want = kvstrata.prefill_attention(*tensors, **options)
    if options.get("return_lse"):
        assert torch.equal(out, want.out)
        assert torch.equal(lse, want.lse)
    else:
        assert torch.equal(out, want)
        assert lse.numel() == 0


def test_compiles_as_one_graph() -> None:
    """Lengths are symbols: one graph for all of them, with the named tuple inside."""
    graphs = 0

    def count(graph: torch.fx.GraphModule, example: list) -> object:
        nonlocal graphs
        graphs += 1
        assert torch.ops.kvstrata.prefill_attention in [node.target for node in graph.graph.nodes]
        return graph.forward

    @torch.compile(fullgraph=True, backend=count, dynamic=True)
    def step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        result = kvstrata.prefill_attention(q * 2, k, v, return_lse=True, backend=BACKEND)
        return result.out + 1, result.lse

    for queries, keys in ((5, 9), (6, 12), (7, 30)):
        q, k, v = inputs(queries, keys)
        want = kvstrata.prefill_attention(q * 2, k, v, return_lse=True, backend=BACKEND)
        out, lse = step(q, k, v)
        torch.testing.assert_close(out, want.out + 1)
        torch.testing.assert_close(lse, want.lse)
    assert graphs == 1


def test_compiles_ragged_through_autograd() -> None:
    """By AOT autograd, from inputs that require gradients: forward only, none flow back."""
    (q, k, v), options = call_of("ragged")
    want = kvstrata.prefill_attention(q, k, v, **options)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> kvstrata.AttentionOutput:
        return kvstrata.prefill_attention(q, k, v, **options)

    result = step(q.requires_grad_(), k, v)
    assert type(result) is kvstrata.AttentionOutput
    assert torch.equal(result.out, want.out)
    assert not result.out.requires_grad
    assert result.mass is None


def test_fake_tensors_are_checked() -> None:
    q, k, v = inputs()
    with FakeTensorMode() as mode:
        q, k, v = (mode.from_tensor(x) for x in (q, k, v))
        result = kvstrata.prefill_attention(q, k, v, return_lse=True)
        assert (result.out.shape, result.out.dtype) == (q.shape, q.dtype)
        assert (result.lse.shape, result.lse.dtype) == (q.shape[:3], torch.float32)
        assert isinstance(kvstrata.prefill_attention(q, k, v), torch.Tensor)
        with pytest.raises(ValueError, match=r"k: expected \[batch, seq, heads, dim\] with heads that divide q's 4"):
            kvstrata.prefill_attention(q, k.transpose(1, 2), v.transpose(1, 2))


def test_which_calls_go_through_the_dispatcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain tensors do not, also when a call like it was seen; under a dispatch mode and as a subclass they do."""
    seen: list[bool] = []
    attend = prefill._attend

    def watched(*given: object) -> object:
        seen.append(len(given) == 4)  # as the operator calls it
        return attend(*given)

    monkeypatch.setattr(prefill, "_attend", watched)
    q, k, v = inputs()
    for _ in range(2):
        kvstrata.prefill_attention(q, k, v)
    assert seen == [False, False]
    with FlopCounterMode(display=False):
        kvstrata.prefill_attention(q, k, v, causal=True, backend=BACKEND, scale=0.5)
    kvstrata.prefill_attention(torch.nn.Parameter(q), k, v, scale=0.5)
    assert seen == [False, False, True, True]
    kvstrata.prefill_attention(q, k, v)
    assert seen[-1] is False
