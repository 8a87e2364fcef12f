"""The turns of a model's RoPE as `StrataCache` hands them on."""

from __future__ import annotations

import ast
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import transformers
from transformers import AutoModelForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_zoo import tiny_config, tiny_model
from kvstrata.hf import StrataCache, rope
from kvstrata.hf.calibrate import calibrate
from kvstrata.hf.rope import frequencies, layer_frequencies
from kvstrata.hf.weights import calibration_of
from kvstrata.quant.rope import pair_channels

SMALL = dict(hidden_size=128, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2)
SMALL |= dict(vocab_size=64, max_position_embeddings=8192)
YARN = dict(rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=2048)
LLAMA3 = dict(rope_type="llama3", rope_theta=5e5, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
LLAMA3 |= dict(original_max_position_embeddings=1024)
LONG = dict(rope_type="longrope", rope_theta=1e4, short_factor=[1.0 + i for i in range(32)], long_factor=[2.0] * 32)
LONG |= dict(original_max_position_embeddings=4096, factor=2.0)


def llama(**options: Any) -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL | options)).eval()


@pytest.mark.parametrize(
    "given",
    [
        dict(rope_type="default", rope_theta=1e5),
        dict(rope_type="linear", rope_theta=1e4, factor=2.0),
        dict(rope_type="dynamic", rope_theta=1e4, factor=2.0),
        YARN,
        LLAMA3,
        LONG,
    ],
    ids=lambda given: given["rope_type"],
)
def test_frequencies_equal_the_models(given: dict[str, Any]) -> None:
    net = llama(rope_parameters=given)
    radians = frequencies(net.config, 64)
    assert radians is not None
    torch.testing.assert_close(torch.tensor(radians), net.model.rotary_emb.inv_freq)


def test_frequencies_of_partial_rotation() -> None:
    rope = dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.25)
    config = transformers.GPTNeoXConfig(**{k: v for k, v in SMALL.items() if k != "num_key_value_heads"})
    config.rope_parameters = rope
    net = transformers.GPTNeoXForCausalLM(config)
    radians = frequencies(net.config, 64)
    assert radians is not None
    torch.testing.assert_close(torch.tensor(radians), net.gpt_neox.rotary_emb.inv_freq)
    assert len(radians) == 8


def test_frequencies_are_those_of_full_attention() -> None:
    config = transformers.Gemma3TextConfig(
        **SMALL | dict(num_hidden_layers=6, head_dim=64),
        rope_parameters={
            "full_attention": dict(rope_type="linear", rope_theta=1e6, factor=8.0),
            "sliding_attention": dict(rope_type="default", rope_theta=1e4),
        },
    )
    radians = frequencies(config, 64)
    assert radians is not None
    assert radians[0] == pytest.approx(1 / 8)
    assert radians[-1] == pytest.approx(1e6 ** -(62 / 64) / 8)


def test_models_without_known_rope() -> None:
    assert frequencies(transformers.GPT2Config(), 64) is None
    config = llama().config
    assert frequencies(config, 32) is not None
    config.rope_parameters = dict(rope_type="spiral", rope_theta=1e4)
    assert frequencies(config, 64) is None
    config.rope_parameters = dict(LLAMA3)
    assert frequencies(config, 32) is None  # of another head dim: more pairs than the head has


@torch.no_grad()
def test_a_strata_cache_uses_the_models_rope() -> None:
    """K that a model turns has a centre that is not its mean; nobody else may say how it is turned."""
    torch.manual_seed(0)
    net = llama(rope_parameters=dict(rope_type="default", rope_theta=1e4))
    for layer in net.model.layers:
        layer.self_attn.k_proj.weight.mul_(0.1)
        layer.self_attn.k_proj.bias = torch.nn.Parameter(torch.randn(128))
    ids = torch.randint(0, 64, (1, 200))
    cache = StrataCache(net.config, budget=0.25, recent_tokens=16, page_tokens=16)
    net(ids, past_key_values=cache, use_cache=True)
    exact = net(torch.randint(0, 64, (1, 2048)), use_cache=True).past_key_values.layers[0].keys[0]
    assert cache.tiered.rope == pytest.approx(net.model.rotary_emb.inv_freq.tolist())
    centre, far = cache.tiered.centre[0, 0], exact.mean(1)
    assert float((centre - far).norm()) < 0.3 * float((exact[:, :200].mean(1) - far).norm())
    for name, given in (("rope", [1.0]), ("interleaved", True)):
        with pytest.raises(TypeError, match=f"{name}: expected to be left out, since the model determines it"):
            StrataCache(net.config, **{name: given})


ROTATING = [
    "afmoe", "cohere", "cohere2", "exaone4", "gemma3_text", "glm", "gpt_oss", "gpt2", "gpt_neox", "llama",
    "llama4_text", "ministral", "nanochat", "phi3", "qwen3", "smollm3",
]  # fmt: skip


@pytest.mark.parametrize("model_type", [*ROTATING, "granitemoehybrid rope", "granitemoehybrid nope"])
@torch.no_grad()
def test_pairs_and_layers_without_rope_are_those_of_the_model(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One token, repeated: K of a layer differs between positions only by what its RoPE turns.

    Where a layer has RoPE, K turned back by the frequencies and pairs that are found is the same at all positions.
    """
    if model_type.startswith("granite"):
        config = tiny_config("granitemoehybrid")
        config.layer_types, config.position_embedding_type = ["full_attention"] * 2, model_type.split()[1]
        model = AutoModelForCausalLM.from_config(config).eval()
    else:
        model = tiny_model(model_type, "eager" if model_type == "gpt_oss" else "sdpa")
    if model_type == "smollm3":
        for place, layer in enumerate(model.model.layers):
            layer.self_attn.use_rope = place == 1
    keys: dict[int, tuple[Any, torch.Tensor]] = {}
    attend = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def recording(module: Any, query: Any, key: Any, *args: Any, **kwargs: Any) -> Any:
        keys[module.layer_idx] = module, key[0]
        return attend(module, query, key, *args, **kwargs)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "recording", recording)
    model.config._attn_implementation = "recording"
    text = model.config.get_text_config(decoder=True)
    if model_type == "gpt_oss":  # its sinks make the outputs of positions differ
        model.model.layers[0].self_attn.o_proj = Nothing()
    model(torch.full((1, 9), 7), use_cache=False)
    assert keys
    for place, (module, k) in keys.items():
        kind = (getattr(text, "layer_types", None) or ["full_attention"] * 9)[place]
        angles = layer_frequencies(module, text, k.shape[2], kind)
        moves = float((k[:, 8] - k[:, 0]).norm() / k[:, 0].norm()) > 1e-3
        if model_type == "gpt2":  # positions are part of the input
            assert (moves, angles) == (True, ())
            continue
        assert bool(angles) == moves, (place, type(module).__name__)
        if not angles:
            continue
        interleaved = rope.interleaved(module)
        assert interleaved is not None
        back = k.clone()
        one, two = pair_channels(len(angles), interleaved=interleaved)
        turn = torch.arange(9).unsqueeze(1) * torch.tensor(angles)
        back[..., one] = k[..., one] * turn.cos() + k[..., two] * turn.sin()
        back[..., two] = k[..., two] * turn.cos() - k[..., one] * turn.sin()
        torch.testing.assert_close(back, back[:, :1].expand_as(back), rtol=1e-3, atol=1e-3 * float(k.abs().max()))


class Nothing(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.zeros(*x.shape[:-1], 128)


class Attention(torch.nn.Module):
    """RoPE under a condition on an argument."""

    def forward(self, x: Any, position_embeddings: Any, past_key_values: Any) -> Any:
        if past_key_values is not None or len(x) == self.length:
            x = apply_rotary_pos_emb(x)  # noqa: F821
        return x


def test_conditions_on_arguments_count_as_met() -> None:
    assert rope.applies(Attention())
    assert rope.applies(torch.nn.Linear(1, 1))


class Late(torch.nn.Module):
    def __init__(self, **attributes: Any) -> None:
        super().__init__()
        self.__dict__ |= attributes

    def forward(self, x: Any, position_embeddings: Any) -> Any:
        if self.early:
            x = x + 1
        elif self.late == "yes" and position_embeddings is not None:
            x = self.rotate(x)
        return x


@pytest.mark.parametrize(
    ("attributes", "applies"),
    [
        (dict(early=False, late="yes"), True),
        (dict(early=True, late="yes"), False),
        (dict(early=False, late="no"), False),
        (dict(early=False), True),  # the attribute is missing
        (dict(early=False, late="yes", config=SimpleNamespace(position_embedding_type="nope")), False),
        (dict(early=False, late="yes", config=SimpleNamespace(position_embedding_type="rope")), True),
        (dict(early=False, late="yes", layer_idx=1, config=SimpleNamespace(layer_rope_theta=[1e4, 0])), False),
        (dict(early=False, late="yes", layer_idx=0, config=SimpleNamespace(layer_rope_theta=[1e4, 0])), True),
    ],
)
def test_conditions_on_attributes_decide(attributes: dict[str, Any], applies: bool) -> None:
    assert rope.applies(Late(**attributes)) == applies


@pytest.mark.parametrize(
    "test",
    [
        "self.none is None", "self.place is not None", "not self.place", "self.place == 3", "self.place != 3",
        "self.place < 3", "self.place <= 3", "self.place > 2", "self.place >= 4", "self.kind in ('a', 'b')",
        "self.kind not in ['a', 'b']", "self.none is None and self.place", "self.none or self.place == 4",
        "(self.place + 1) % 4", "(self.place - 3) % 4", "self.rotates[self.place]", "self.rotates[0]", "False",
    ],
)  # fmt: skip
def test_conditions_have_the_value_that_python_gives_them(test: str) -> None:
    module = SimpleNamespace(none=None, place=3, kind="a", rotates=[0, 1, 1, 1])
    assert rope._holds(ast.parse(test, mode="eval").body, {"self": module}) == bool(eval(test, {"self": module}))


@pytest.mark.parametrize(
    "test", ["self.late", "self.rotates[9]", "self.place.late", "1 < self.place < 5", "-self.zero"]
)
def test_conditions_without_a_known_value_count_as_met(test: str) -> None:
    assert rope._holds(ast.parse(test, mode="eval").body, {"self": SimpleNamespace(place=3, zero=0, rotates=[])})


def test_channels_that_are_not_rotated_are_balanced_one_by_one() -> None:
    """From a prompt, a calibration, and the weights; SmolLM3's second layer has RoPE, the first has none."""
    model = tiny_model("smollm3", "sdpa")
    model.config.num_hidden_layers = 2
    text, ids = model.config, torch.randint(2, 100, (1, 80), generator=torch.Generator().manual_seed(1))
    s = 30.0 ** torch.linspace(-1, 1, 32)[torch.randperm(32, generator=torch.Generator().manual_seed(2))]
    for place, layer in enumerate(model.model.layers):
        attention = layer.self_attn
        attention.use_rope = place == 1
        attention.k_proj.weight.data *= s.repeat(2).unsqueeze(1)
        attention.q_proj.weight.data /= s.repeat(4).unsqueeze(1)
    cache = StrataCache(text, budget=0.5, recent_tokens=16, max_tokens=256)
    made = calibrate(model, ids)
    with torch.no_grad():
        model(ids, past_key_values=cache)
    weights = [calibration_of(layer.self_attn, 2, 32, frequencies(text, 32)) for layer in model.model.layers]
    by_prompt = cache.tiered.balance[0].float().exp2().cpu()
    for first, second in (by_prompt, [x.balance for x in made.layers], [x.balance for x in weights]):
        assert torch.equal(second[:, :16], second[:, 16:])
        alone = (first / s).log2()
        assert alone.std() < 0.5
        assert not torch.equal(first[:, :16], first[:, 16:])
