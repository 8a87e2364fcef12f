"""Rows of Q and K in fused projections, against the K that a model computes and the Q that its attention receives."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

pytest.importorskip("transformers")
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    HunYuanDenseV1Config,
    LlamaConfig,
    Olmo2Config,
    PersimmonConfig,
    Phi3Config,
    Qwen3Config,
    SmolLM3Config,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvstrata.hf import projections, weights

SIZES = dict(vocab_size=32, hidden_size=64, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4)
CONFIGS = {
    "llama": LlamaConfig(**SIZES, num_key_value_heads=2, attention_bias=True),
    "gpt2": GPT2Config(vocab_size=32, n_embd=64, n_layer=1, n_head=4, n_positions=64, bos_token_id=0, eos_token_id=0),
    "gpt-neox": GPTNeoXConfig(**SIZES, rotary_pct=0.5),
    "phi3": Phi3Config(**SIZES, num_key_value_heads=2, pad_token_id=0, bos_token_id=0, eos_token_id=0),
}


@pytest.mark.parametrize("name", CONFIGS)
@torch.no_grad()
def test_rows_are_those_of_the_model(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(CONFIGS[name]), attn_implementation="sdpa").eval()
    for parameter in model.parameters():
        parameter.normal_(std=0.3)
    received: dict[str, Any] = {}
    attend = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def recording(module: Any, query: Any, key: Any, *args: Any, **kwargs: Any) -> Any:
        received.update(module=module, query=query, key=key)
        return attend(module, query, key, *args, **kwargs)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "recording", recording)
    model.config._attn_implementation = "recording"
    attention = next(x for x in model.modules() if type(x).__name__.endswith("Attention"))
    attention.register_forward_pre_hook(
        lambda module, args, kwargs: received.update(hidden=args[0] if args else kwargs["hidden_states"]),
        with_kwargs=True,
    )
    model(torch.arange(12).unsqueeze(0), use_cache=False)
    kv_heads, dim = received["key"].shape[1], received["key"].shape[3]
    own = projections.of_q_and_k(received["module"], kv_heads, dim)
    assert own is not None
    for (weight, bias, _), states in zip(own, (received["query"], received["key"]), strict=True):
        rows = torch.nn.functional.linear(received["hidden"], weight, bias).unflatten(-1, (-1, dim)).transpose(1, 2)
        torch.testing.assert_close(rows.norm(dim=-1), states.norm(dim=-1), rtol=1e-4, atol=1e-4)  # RoPE keeps norms
        torch.testing.assert_close(rows[:, :, 0], states[:, :, 0], rtol=1e-4, atol=1e-4)  # position 0 is not rotated
    rope, turned = ([], None) if name == "gpt2" else ([0.1] * (dim // 2), False)
    assert weights.balance_of(received["module"], kv_heads, dim, rope, turned) is not None
    centre = weights.centre_of(received["module"], kv_heads, dim, rope, bool(turned))
    assert (centre is None) == (own[1].bias is None)


NOTHING = projections.Projection(), projections.Projection()


def test_wrapped_projections_are_unknown_in_training() -> None:
    model = AutoModelForCausalLM.from_config(CONFIGS["phi3"])
    assert model.training
    attention = model.model.layers[0].self_attn
    attention.qkv_proj = torch.nn.Sequential(attention.qkv_proj)
    assert projections.of_q_and_k(attention, 2, 16) == NOTHING
    assert projections.of_q_and_k(model.model.layers[0].mlp, 2, 16) == NOTHING


class LowRank(torch.nn.Module):
    """An adapter as those of PEFT: a frozen layer and the product of two small ones, with a bias."""

    def __init__(self, base: Any, in_features: int | None = None) -> None:
        super().__init__()
        self.base_layer, rows = base, base(torch.zeros(1, 64)).shape[1]
        self.a, self.b = torch.nn.Linear(64, 4, bias=False), torch.nn.Linear(4, rows)
        self.b.weight.data.mul_(8)
        if in_features is not None:
            self.in_features = in_features

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x) + self.b(self.a(x))

    def merged(self) -> tuple[torch.Tensor, torch.Tensor]:
        own = self.base_layer(torch.cat([torch.zeros(1, 64), torch.eye(64)])) + self.b(torch.zeros(1, 4))
        return (own[1:] - own[0]).mT + self.b.weight @ self.a.weight, own[0]


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@torch.no_grad()
def test_a_change_of_any_head_is_noticed(name: str) -> None:
    kind, rope = ("llama", [0.1] * 8) if name == "llama" else (name, ())
    model = AutoModelForCausalLM.from_config(copy.deepcopy(CONFIGS[kind])).eval()
    attention = next(x for x in model.modules() if type(x).__name__.endswith("Attention"))
    linear, kv_heads = (attention.k_proj, 2) if name == "llama" else (attention.c_attn, 4)
    rows = linear.weight.data if name == "llama" else linear.weight.data.mT[64:128]
    for row in range(len(rows)):
        before = weights.balance_of(attention, kv_heads, 16, rope, None if name == "gpt2" else False)
        rows[row] *= 1000
        assert not torch.equal(
            before, weights.balance_of(attention, kv_heads, 16, rope, None if name == "gpt2" else False)
        )
        rows[row] /= 1000


CHANGES = {
    "data.copy_": lambda x, new: x.data.copy_(new),
    "data +=": lambda x, new: x.data.add_(new - x),
    "copy_": lambda x, new: x.copy_(new),
    "data =": lambda x, new: setattr(x, "data", new.clone()),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("what", ["weight", "bias"])
@torch.no_grad()
def test_a_balance_follows_its_weights(change: str, what: str) -> None:
    attention, other = biased(), biased()
    if what == "weight":
        attention.k_proj.bias.zero_()
        other.k_proj.bias.zero_()
    new = getattr(other.k_proj, what).roll(5, 0)
    getattr(other.k_proj, what).copy_(new)
    rope = [10000.0 ** (-i / 8) for i in range(8)]
    before = weights.balance_of(attention, 2, 16, rope, False)
    CHANGES[change](getattr(attention.k_proj, what), new)
    after = weights.balance_of(attention, 2, 16, rope, False)
    assert torch.equal(after, weights.balance_of(other, 2, 16, rope, False))
    assert not torch.equal(after, before)


@torch.no_grad()
def test_a_balance_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    attention = biased()
    first = weights.balance_of(attention, 2, 16, [0.1] * 8, False)
    monkeypatch.setattr(projections, "of_q_and_k", None)
    assert weights.balance_of(attention, 2, 16, [0.1] * 8, False) is first


NORMED = {
    "qwen3": lambda: Qwen3Config(**SIZES, num_key_value_heads=2, head_dim=16),
    "gemma3": lambda: Gemma3TextConfig(**SIZES, num_key_value_heads=2, head_dim=16),  # its gain is 1 + weight
    "olmo2": lambda: Olmo2Config(**SIZES, num_key_value_heads=2, pad_token_id=0),  # one norm of all heads
    "cohere": lambda: CohereConfig(**SIZES, num_key_value_heads=2, use_qk_norm=True),  # a layer norm, a row per head
    "persimmon": lambda: PersimmonConfig(**SIZES, qk_layernorm=True),  # with a shift; its projection is fused
    "hunyuan": lambda: HunYuanDenseV1Config(**SIZES, num_key_value_heads=2, head_dim=16),  # after RoPE
}


@pytest.mark.parametrize("name", NORMED)
@torch.no_grad()
def test_norms_are_those_of_the_model(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gain and shift from two probes against rows that the model normalises; what precedes the norm is random."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(NORMED[name]()).eval()
    for parameter in model.parameters():
        parameter.normal_(std=0.5)
    attention = next(x for x in model.modules() if type(x).__name__.endswith("Attention"))
    for norm, known in zip(projections.norms(attention), projections.of_q_and_k(attention, 2, 16), strict=True):
        gain, shift, is_whole = known.norm
        rows = torch.randn(500, *norm.weight.shape)
        expected = norm(rows)
        if name == "cohere" or name == "persimmon":
            rows = rows - rows.mean(-1, keepdim=True)
        own = rows / rows.square().mean(-1, keepdim=True).sqrt() * gain.view_as(norm.weight)
        own = own if shift is None else own + shift.view_as(norm.weight)
        torch.testing.assert_close(own, expected, rtol=1e-4, atol=1e-4)
        assert is_whole == (name == "olmo2")
        assert (shift is None) == (name != "persimmon")


@torch.no_grad()
def test_norms_share_the_energy_of_their_heads() -> None:
    """Balances against rows that random inputs give: row norms count relative to their head, gains as they are."""
    torch.manual_seed(0)
    for name in ("qwen3", "olmo2", "hunyuan", "gemma3"):
        attention = next(
            x
            for x in AutoModelForCausalLM.from_config(NORMED[name]()).modules()
            if type(x).__name__.endswith("Attention")
        )
        for parameter in attention.parameters():
            parameter.normal_()
        attention.k_proj.weight[5:9] *= 8
        attention.k_proj.weight[16:] *= 100  # of the second head: its norm undoes that, unless it is one of all heads
        norm, seen = projections.norms(attention), []
        norm[1].weight[3] = 30.0
        for linear, own in zip((attention.q_proj, attention.k_proj), norm, strict=True):
            rows = linear(torch.randn(4000, SIZES["hidden_size"]))
            rows = own(rows) if name == "olmo2" else own(rows.unflatten(-1, (-1, 16))).flatten(1)
            seen.append(rows.square().mean(0).view(2, -1, 16).mean(1))
        q, k = seen
        power = (k / q).log2() / 4
        expected = power - power.mean(-1, keepdim=True)
        given = weights.balance_of(attention, 2, 16, (), None)
        assert (given.log2() - expected).abs().max() < 0.8, name  # half by rounding
        assert given.log2().std() > 0.5


def test_norms_of_unknown_kinds_leave_nothing() -> None:
    """Not applied to heads, no parameter, not a norm, not finite."""
    model = AutoModelForCausalLM.from_config(CONFIGS["llama"])
    attention = model.model.layers[0].self_attn
    broken = torch.nn.LayerNorm(16)
    broken.weight.data[0] = float("nan")
    for norm in (torch.nn.LayerNorm(24), torch.nn.Identity(), torch.nn.Linear(16, 16), broken, Scale(16)):
        attention.k_norm = norm
        q, k = projections.of_q_and_k(attention, 2, 16)
        assert q.weight is not None
        assert k == projections.Projection(), norm
        assert weights.calibration_of(attention, 2, 16, [0.1] * 8).shape is None
    attention.k_norm = torch.nn.LayerNorm(3 * 16)  # of three heads
    assert weights.calibration_of(attention, 2, 16, [0.1] * 8).shape is None


class Scale(torch.nn.Module):
    """A parameter per channel, without dividing by anything."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


@torch.no_grad()
def test_norms_after_quantised_weights_give_a_balance() -> None:
    """Rows are taken to be alike; the gain is known."""
    attention = AutoModelForCausalLM.from_config(NORMED["qwen3"]()).model.layers[0].self_attn
    attention.k_norm.weight[3] = attention.k_norm.weight[11] = 64.0  # a RoPE pair
    for name in ("q_proj", "k_proj"):
        linear = getattr(attention, name)
        linear.weight = torch.nn.Parameter(linear.weight.to(torch.int8), requires_grad=False)
    own = weights.calibration_of(attention, 2, 16, [0.1] * 8)
    expected = torch.ones(2, 16)
    expected[:, [3, 11]] = 8.0
    assert own.centre is None
    assert torch.equal(own.balance / own.balance[0, 0], expected)


class Packed(torch.nn.Linear):
    """A quantised layer that has a bias and no ``weight``."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__(linear.in_features, linear.out_features)
        del self.weight
        self.bias = linear.bias


QUANTISED = {
    "bytes": lambda x: torch.nn.Parameter(x.to(torch.int8), requires_grad=False),
    "8 bit": lambda x: torch.nn.Parameter(x.to(torch.float8_e4m3fn), requires_grad=False),
    "wrapper": lambda x: torch.nn.Parameter(TwoTensor(x, x)),
    "meta": lambda x: torch.nn.Parameter(x.to("meta")),
    "none": None,
}


@pytest.mark.parametrize("kind", QUANTISED)
@pytest.mark.parametrize("scope", [torch.no_grad, torch.inference_mode])
@torch.no_grad()
def test_quantised_weights_leave_the_bias(kind: str, scope: Any) -> None:
    """The centre is that of plain weights; without a balance it is not divided."""
    torch.manual_seed(0)
    attention = AutoModelForCausalLM.from_config(CONFIGS["llama"]).model.layers[0].self_attn
    attention.k_proj.bias.normal_()
    attention.k_proj.weight[:16] *= 64
    rope = [10000.0 ** (-i / 8) for i in range(8)]
    plain = weights.calibration_of(attention, 2, 16, rope)
    assert plain.balance is not None
    assert plain.centre is not None
    change = QUANTISED[kind]
    for name in ("q_proj", "k_proj"):
        linear = getattr(attention, name)
        if change is None:
            setattr(attention, name, Packed(linear))
        else:
            linear.weight = change(linear.weight.detach())
    with scope():
        own = weights.calibration_of(attention, 2, 16, rope)
    assert own.balance is None
    assert torch.equal(own.centre, plain.centre * plain.balance)


@torch.no_grad()
def biased(config: Any = CONFIGS["llama"]) -> torch.nn.Module:
    """Attention with rows of unlike sizes and a large bias of K."""
    torch.manual_seed(0)
    attention = AutoModelForCausalLM.from_config(config).model.layers[0].self_attn
    attention.k_proj.weight *= torch.randn(32, 1).mul(2).exp()
    attention.k_proj.bias.normal_(std=20)
    return attention


def test_a_layer_without_rope_is_calibrated_without_it() -> None:
    """One of four layers of SmolLM3; its bias is the same at all positions."""
    sizes = SIZES | dict(num_key_value_heads=2, attention_bias=True, pad_token_id=0)
    attention, other = (biased(SmolLM3Config(**sizes, no_rope_layers=[x])) for x in (0, 1))
    rope = [10000.0 ** (-i / 8) for i in range(8)]
    own, plain = (weights.calibration_of(attention, 2, 16, given) for given in (rope, []))
    turned = weights.calibration_of(other, 2, 16, rope)
    assert torch.equal(own.balance, plain.balance)
    assert torch.equal(own.centre * own.balance, attention.k_proj.bias.view(2, 16))
    assert not torch.equal(own.balance, turned.balance)


def test_pairs_that_are_unknown_give_no_calibration() -> None:
    for given in (weights.balance_of, weights.centre_of):
        assert given(biased(), 2, 16, [0.1] * 8, None) is None
        assert given(biased(), 2, 16, [], None) is not None


def test_a_balance_is_kept_with_its_rope() -> None:
    """Other frequencies or pairs of the same module, against those of a module that was not asked before."""
    rope, attention = [10000.0 ** (-i / 8) for i in range(8)], biased()
    asked = [(rope, False), (rope, True), (rope[:4], False), ([0.3] * 8, False)]
    own = [weights.balance_of(attention, 2, 16, *given) for given in asked]
    assert len({tuple(x.flatten().tolist()) for x in own}) == len(asked)
    for given, x in zip(asked, own, strict=True):
        assert torch.equal(x, weights.balance_of(biased(), 2, 16, *given))


def test_weights_that_are_not_finite_give_no_calibration() -> None:
    attention = AutoModelForCausalLM.from_config(CONFIGS["llama"]).model.layers[0].self_attn
    with torch.no_grad():
        attention.k_proj.weight[0, 0] = float("nan")
        attention.k_proj.bias[0] = float("inf")
    assert weights.calibration_of(attention, 2, 16, [0.1] * 8).shape is None


@torch.no_grad()
def test_offloaded_weights_are_fetched() -> None:
    """accelerate's hooks leave weights on the meta device between forwards of a module."""
    accelerate = pytest.importorskip("accelerate")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS["llama"])
    attention = model.model.layers[0].self_attn
    attention.k_proj.bias.normal_()
    attention.k_proj.weight[:16] *= 64
    plain = weights.calibration_of(attention, 2, 16, [0.1] * 8)
    other = copy.deepcopy(model)
    accelerate.cpu_offload(other, torch.device("cpu"))
    attention = other.model.layers[0].self_attn
    assert attention.k_proj.weight.is_meta
    own = weights.calibration_of(attention, 2, 16, [0.1] * 8)
    assert torch.equal(own.balance, plain.balance)
    assert torch.equal(own.centre, plain.centre)
    assert attention.k_proj.weight.is_meta, "they take memory now"
    other = copy.deepcopy(model).eval()
    for name in ("q_proj", "k_proj"):
        setattr(other.model.layers[0].self_attn, name, LowRank(getattr(other.model.layers[0].self_attn, name)).eval())
        getattr(other.model.layers[0].self_attn, name).b.weight.zero_()
        getattr(other.model.layers[0].self_attn, name).b.bias.zero_()
    accelerate.cpu_offload(other, torch.device("cpu"))
    attention = other.model.layers[0].self_attn
    assert all(x.is_meta for x in attention.parameters())
    own = weights.calibration_of(attention, 2, 16, [0.1] * 8)
    assert (own.balance.log2() - plain.balance.log2()).abs().mean() < 0.15
