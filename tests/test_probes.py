"""Projections whose weights cannot be read: adapters, quantised layers and others, called with random inputs."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
from transformers import AutoModelForCausalLM

from kvstrata.hf import weights
from test_projections import CONFIGS, LowRank, biased


class Halves(torch.nn.Linear):
    """A layer of int8 weights and scales, as of a quantised model; returns its bias too."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__(linear.in_features, linear.out_features)
        self.scale = linear.weight.abs().amax(1, keepdim=True) / 127
        self.weight = torch.nn.Parameter((linear.weight / self.scale).round().to(torch.int8), requires_grad=False)
        self.bias = linear.bias

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return torch.nn.functional.linear(x, self.weight * self.scale, self.bias), None


@pytest.mark.parametrize("name", CONFIGS)
@torch.no_grad()
def test_adapters_count(name: str) -> None:
    """Balance and centre of an adapted layer are about those of one that has the adapter merged."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(CONFIGS[name])).eval()
    attention = next(x for x in model.modules() if type(x).__name__.endswith("Attention"))
    kv_heads, rope = (2, [0.1 * i for i in range(1, 5)]) if name in ("llama", "phi3") else (4, ())
    merged = copy.deepcopy(attention)
    for child in [x for x in dir(attention) if x in ("c_attn", "query_key_value", "qkv_proj", "q_proj", "k_proj")]:
        base = getattr(attention, child)
        if child != "q_proj":
            rows = base.weight.mT if name == "gpt2" else base.weight
            rows *= torch.randn(len(rows), 1).mul(4).exp2()
        adapted = LowRank(base, 64 if child == "k_proj" else None).eval()
        setattr(attention, child, adapted)
        plain, (weight, bias) = torch.nn.Linear(64, len(adapted.merged()[1])), adapted.merged()
        plain.weight.copy_(weight)
        plain.bias.copy_(bias)
        setattr(merged, child, plain)
    expected = weights.calibration_of(merged, kv_heads, 16, rope)
    own = weights.calibration_of(attention, kv_heads, 16, rope)
    off = (own.balance.log2() - expected.balance.log2()).abs()
    assert off.max() <= 1
    assert off.mean() < 0.1, "rounded the other way, here and there"
    assert expected.balance.log2().std() > 0.5
    same = own.balance == expected.balance
    torch.testing.assert_close(own.centre[same], expected.centre[same], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("scope", [torch.no_grad, torch.inference_mode])
def test_quantised_weights_are_probed(scope: Any) -> None:
    """And not kept: a layer that is not read may change in any way."""
    attention = biased().eval()
    rope = [10000.0 ** (-i / 8) for i in range(8)]
    plain = weights.calibration_of(attention, 2, 16, rope)
    hooked: list[Any] = []
    for name in ("q_proj", "k_proj"):
        setattr(attention, name, Halves(getattr(attention, name)).eval())
        getattr(attention, name).register_forward_hook(lambda *args: hooked.append(args))
    state = torch.get_rng_state()
    with scope():
        own = weights.calibration_of(attention, 2, 16, rope)
        assert (own.balance.log2() - plain.balance.log2()).abs().mean() < 0.1
        assert torch.equal(own.centre * own.balance, plain.centre * plain.balance), "the bias is known"
        attention.k_proj.scale *= torch.where(torch.arange(32) % 16 < 4, 4096, 1).view(-1, 1)
        own = weights.calibration_of(attention, 2, 16, rope)
    assert (own.balance[:, :4].log2() - plain.balance[:, :4].log2()).mean() > 1
    assert not hooked
    assert torch.equal(state, torch.get_rng_state())


class Adapted(torch.nn.Linear):
    """A linear layer that adds something in its forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * torch.linspace(-4, 4, self.out_features).exp2()


@torch.no_grad()
def test_layers_with_a_forward_of_their_own_are_probed() -> None:
    attention, other = biased().eval(), biased().eval()
    attention.k_proj.__class__ = Adapted
    factor = torch.linspace(-4, 4, 32).exp2()
    other.k_proj.weight *= factor.unsqueeze(1)
    rope = [10000.0 ** (-i / 8) for i in range(8)]
    for linear in (attention.k_proj, other.k_proj):
        linear.bias.zero_()
    own, expected = (weights.balance_of(x, 2, 16, rope, False).log2() for x in (attention, other))
    assert (own - expected).abs().mean() < 0.15
    assert not torch.equal(own, weights.balance_of(biased(), 2, 16, rope, False).log2())
    attention.train()  # not called then: its weight is the best guess
    torch.manual_seed(0)
    plain = torch.nn.Linear(64, 32)
    plain.weight, plain.bias, attention.k_proj = attention.k_proj.weight, attention.k_proj.bias, attention.k_proj
    guess = weights.balance_of(attention, 2, 16, rope, False)
    attention.k_proj = plain
    assert torch.equal(guess, weights.balance_of(attention, 2, 16, rope, False))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("known", [None, torch.float32, torch.float16])
@torch.no_grad()
def test_probes_have_the_dtype_of_the_model(dtype: torch.dtype, known: torch.dtype | None) -> None:
    """Which its configuration may not know."""
    attention = biased().eval()
    expected = weights.balance_of(attention, 2, 16, [0.1] * 8, False)
    for name in ("q_proj", "k_proj"):
        setattr(attention, name, torch.nn.Sequential(getattr(attention, name)).eval())
    attention.config = copy.deepcopy(attention.config)
    attention.to(dtype).config.dtype = known
    own = weights.balance_of(attention, 2, 16, [0.1] * 8, False)
    assert (own.log2() - expected.log2()).abs().mean() < 0.15


class Flat(torch.nn.Module):
    """A layer that takes rows without a batch and quantises them by their largest value, as int8 ones do."""

    def __init__(self, linear: torch.nn.Module) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert x.dim() == 2
        scale = x.abs().amax(1, keepdim=True) / 127
        return self.linear((x / scale).round() * scale)


@torch.no_grad()
def test_layers_that_take_only_rows_are_probed() -> None:
    attention = biased().eval()
    plain = weights.calibration_of(attention, 2, 16, [0.1] * 8)
    for name in ("q_proj", "k_proj"):
        setattr(attention, name, Flat(getattr(attention, name)).eval())
    own = weights.calibration_of(attention, 2, 16, [0.1] * 8)
    assert (own.balance.log2() - plain.balance.log2()).abs().mean() < 0.15
    torch.testing.assert_close(own.centre * own.balance, plain.centre * plain.balance, rtol=1e-4, atol=1e-3)


class Hidden(torch.nn.Module):
    """A layer whose weights are no tensors of the module, as those of torch.ao.quantization."""

    def __init__(self, linear: torch.nn.Module) -> None:
        super().__init__()
        self.packed, self.calls = [linear], 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.packed[0](x)


@torch.no_grad()
def test_layers_without_tensors_are_probed_once_each() -> None:
    attention = biased().eval()
    plain = weights.calibration_of(attention, 2, 16, [0.1] * 8)
    for name in ("q_proj", "k_proj"):
        setattr(attention, name, Hidden(getattr(attention, name)).eval())
    own = weights.calibration_of(attention, 2, 16, [0.1] * 8)
    assert (own.balance.log2() - plain.balance.log2()).abs().mean() < 0.15
    torch.testing.assert_close(own.centre * own.balance, plain.centre * plain.balance)
    assert (attention.q_proj.calls, attention.k_proj.calls) == (1, 1)


@torch.no_grad()
def test_a_child_in_training_is_not_called() -> None:
    attention = biased().eval()
    attention.k_proj = torch.nn.Sequential(attention.k_proj, torch.nn.Dropout(0.1)).eval()
    assert weights.balance_of(attention, 2, 16, [0.1] * 8, False) is not None
    attention.k_proj[1].train()
    assert weights.balance_of(attention, 2, 16, [0.1] * 8, False) is None


BROKEN = {
    "raises": lambda self, x: {}[0],
    "shape": lambda self, x: x[..., :31],
    "rows": lambda self, x: torch.nn.functional.linear(x[..., 1:, :], self.weight.float()),
    "infinite": lambda self, x: torch.nn.functional.linear(x, self.weight.float()) / 0,
    "text": lambda self, x: "rows",
    "8 bit": lambda self, x: torch.nn.functional.linear(x, self.weight.float()).to(torch.float8_e4m3fn),
}


@pytest.mark.parametrize("kind", BROKEN)
@torch.no_grad()
def test_forwards_that_fail_tell_nothing(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    attention = biased().eval()
    attention.k_proj = Halves(attention.k_proj).eval()
    assert weights.balance_of(attention, 2, 16, [0.1] * 8, False) is not None
    monkeypatch.setattr(Halves, "forward", BROKEN[kind])
    assert weights.balance_of(attention, 2, 16, [0.1] * 8, False) is None
    assert weights.centre_of(attention, 2, 16, [0.1] * 8, False) is not None  # its bias
