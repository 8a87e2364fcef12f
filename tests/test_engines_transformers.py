"""Continuous batching of transformers over packed pages, token by token against `generate`."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import transformers
from transformers import (
    AutoModelForCausalLM,
    ContinuousBatchingConfig,
    Gemma2Config,
    GenerationConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
)

from hf_model import SIZES, scaled

try:
    from kvstrata.engines import transformers as engine
except ImportError as error:
    pytest.skip(str(error), allow_module_level=True)

from kvstrata.engines.transformers import PackedAllocator, PackedSlidingAllocator, Step, packed_batching
from kvstrata.hf.rope import frequencies
from kvstrata.hf.weights import calibration_of
from kvstrata.quant.calibration import Calibration, LayerCalibration

OSS = dict(num_local_experts=2, num_experts_per_tok=1, rope_parameters=dict(rope_type="default", rope_theta=10000.0))
CONFIGS = {
    "llama": lambda: LlamaConfig(**SIZES, head_dim=64),
    "mistral": lambda: MistralConfig(**SIZES, head_dim=64, sliding_window=20),
    "gemma2": lambda: Gemma2Config(**SIZES, head_dim=64, sliding_window=16, attn_logit_softcapping=2.0),
    "gpt-oss": lambda: GptOssConfig(
        **SIZES, **OSS, head_dim=64, sliding_window=16, layer_types=["sliding_attention", "full_attention"]
    ),
}
PROMPTS = [
    torch.randint(2, 128, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (9, 1, 40, 100, 64)
]
NEW = 8


def make(name: str) -> Any:
    torch.manual_seed(0)
    eager = name in ("gemma2", "gpt-oss")
    model = AutoModelForCausalLM.from_config(CONFIGS[name](), attn_implementation="eager" if eager else "sdpa").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0 if parameter.dim() > 1 else 1.0)
            if parameter.dim() == 1 and not parameter.any():
                parameter.normal_()
    return model


def batch(model: Any, prompts: list[list[int]], new: int = NEW, **options: Any) -> list[list[int]]:
    """Tokens of `generate_batch` with blocks of 16 tokens and chunks of up to 48, in the order of the prompts."""
    greedy = GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0)
    sizes = dict(page_size=16, num_blocks=64, max_batch_tokens=48) | options
    cb = ContinuousBatchingConfig(**sizes)
    out = model.generate_batch(prompts, generation_config=greedy, continuous_batching_config=cb)
    assert not [request.error for request in out.values() if request.error]
    return [request.generated_tokens for request in out.values()]


@torch.no_grad()
def gap(model: Any, prompt: list[int], tokens: list[int]) -> float:
    """How far the logits of generated tokens are from the best ones of a plain forward, of the logits' deviation."""
    logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    own = logits.gather(1, torch.tensor(tokens).unsqueeze(1)).squeeze(1)
    return float(((logits.max(1).values - own) / logits.std(1)).max())


@pytest.fixture(autouse=True)
def steps(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, bool, bool]]:
    """(has a decode part, has a prefill part, has transformers' block table) of every step; no garbage collection."""
    seen: list[tuple[bool, bool, bool]] = []
    init = Step.__init__

    def watched(self: Step, allocator: Any, starts: Any, options: Any) -> None:
        init(self, allocator, starts, options)
        table = options.get("block_table") is not None
        seen.append((bool(self.batch.decodes), bool(self.batch.prefills), table))

    monkeypatch.setattr(Step, "__init__", watched)
    monkeypatch.setattr(engine.continuous_api.gc, "collect", lambda: 0)  # a second for each manager
    return seen


@pytest.mark.parametrize("name", CONFIGS)
def test_tokens_are_those_of_generate(name: str, steps: list[tuple[bool, bool, bool]]) -> None:
    """Prompt chunks mixed with decodes, beyond the window: at K8V8 every token is the best one, or within rounding."""
    model = make(name)
    expected = [
        model.generate(torch.tensor([p]), max_new_tokens=NEW, do_sample=False)[0, len(p) :].tolist() for p in PROMPTS
    ]
    with packed_batching(model, "K8V8"):
        given = batch(model, PROMPTS)
    assert [len(tokens) for tokens in given] == [NEW] * len(PROMPTS)
    gaps = [gap(model, prompt, tokens) for prompt, tokens in zip(PROMPTS, given, strict=True)]
    assert max(gaps) < 0.05, gaps
    same = sum(a == b for x, y in zip(given, expected, strict=True) for a, b in zip(x, y, strict=True))
    assert same >= 0.75 * NEW * len(PROMPTS), f"{same} tokens agree, a near tie changes those behind it"
    assert any(decode and prefill for decode, prefill, _ in steps), "no step had both decodes and prompts"
    assert any(table for _, _, table in steps) == (name == "llama")


def test_low_bit_formats_exceed_the_tolerance() -> None:
    """So a wrong block or a wrong position would be seen, too."""
    model = make("llama")
    with packed_batching(model, "K2V2"):
        given = batch(model, PROMPTS)
    assert max(gap(model, *pair) for pair in zip(PROMPTS, given, strict=True)) > 0.25


def test_a_small_pool_preempts_and_block_tables_change_nothing(steps: list[tuple[bool, bool, bool]]) -> None:
    model, sizes = make("llama"), dict(max_batch_tokens=256)  # prompts as a whole: chunks read rounded tokens
    with packed_batching(model, "K4V4"):
        expected = batch(model, PROMPTS, **sizes)
        assert any(table for _, _, table in steps)
        del steps[:]
        # 96 tokens at 16 bit: not all requests at once
        assert batch(model, PROMPTS, **sizes, num_blocks=6, max_blocks_per_request=0) == expected
    assert steps
    assert not any(table for _, _, table in steps)


def test_a_shared_prefix_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """One request after the other, the prefix as one chunk: its blocks are those of the first request."""
    matched = []
    search = engine.cb_cache.PagedAttentionCache.search_prefix_match

    def watched(self: Any, *args: Any) -> int:
        matched.append(search(self, *args))
        return matched[-1]

    monkeypatch.setattr(engine.cb_cache.PagedAttentionCache, "search_prefix_match", watched)
    model, prefix = make("llama"), PROMPTS[3][:64]
    prompts = [prefix + PROMPTS[0], prefix + PROMPTS[2]]
    sizes = dict(max_batch_tokens=64, max_requests_per_batch=1)
    with packed_batching(model, "K4V4"):
        shared = batch(model, prompts, **sizes)
        assert max(matched) == 64, "no prefix was found"
        assert batch(model, prompts, **sizes, allow_block_sharing=False) == shared


def test_bytes_of_blocks_are_those_of_the_format() -> None:
    model = make("gpt-oss")
    sizes = ContinuousBatchingConfig(page_size=16, num_blocks=64, max_batch_tokens=48)

    def cache() -> Any:
        return model.init_continuous_batching(continuous_batching_config=sizes)._create_batch_processor().cache

    plain = cache()
    model.config._attn_implementation = "eager"
    with packed_batching(model, "K4V4"):
        packed = cache()
    kinds = {name: type(allocator) for name, allocator in packed.cache_allocators.items()}
    assert kinds == {"full_attention": PackedAllocator, "sliding_attention": PackedSlidingAllocator}
    for kind, allocator in packed.cache_allocators.items():
        assert allocator.bytes_per_block == plain.cache_allocators[kind].bytes_per_block * 68 // (64 * 8)  # float32
        assert not isinstance(plain.cache_allocators[kind], PackedAllocator)
    assert packed.max_tokens_read > 6 * plain.max_tokens_read


def test_calibration_file_is_applied_and_checked(tmp_path: Any) -> None:
    """Balance and centre of a file are taken off and put back; a file of another model is refused."""
    model = make("llama")
    balance = torch.ones(2, 64)
    balance[:, ::2] = 4.0
    layers = tuple(LayerCalibration(balance, torch.randn(2, 64)) for _ in range(2))
    Calibration(layers).save(tmp_path / "own.safetensors")
    with packed_batching(model, "K8V8", calibration=str(tmp_path / "own.safetensors")):
        given = batch(model, PROMPTS)
    assert max(gap(model, *pair) for pair in zip(PROMPTS, given, strict=True)) < 0.1
    four = [LayerCalibration(torch.ones(4, 64))] * 2
    for other, message in (
        (Calibration(layers[:1]), "expected one of a model with 2 layers, got one with 1"),
        (Calibration(four), "expected 2 KV heads and head_dim 64 in layer 0, got one with 4 and 64"),
        (Calibration(layers[:1], windows=layers[:1]), "expected a file that says which layers have a sliding window"),
    ):
        other.save(tmp_path / "other.safetensors")
        with (
            pytest.raises(ValueError, match=f"calibration: {message}"),
            packed_batching(model, "K8V8", calibration=str(tmp_path / "other.safetensors")),
        ):
            pass


def test_each_layer_gets_its_own_part_of_a_calibration_with_windows(tmp_path: Any) -> None:
    """A file has layers in two lists, models number them in one."""
    model = make("gpt-oss")
    window, full = (LayerCalibration(torch.full((2, 64), factor), torch.randn(2, 64)) for factor in (2.0, 4.0))
    path = str(tmp_path / "own.safetensors")
    Calibration([full], windows=[window], kinds=["window", "layer"]).save(path)
    sizes = ContinuousBatchingConfig(page_size=16, num_blocks=64, max_batch_tokens=48)
    used = {}
    with packed_batching(model, "K8V8", calibration=path):
        given = batch(model, PROMPTS)
        cache = model.init_continuous_batching(continuous_batching_config=sizes)._create_batch_processor().cache
        for allocator in cache.cache_allocators.values():
            for number in allocator.layer_indices:
                layer = allocator.layer(number, model.model.layers[number].self_attn, 4, 0.125, {})
                used[number] = layer.calibration.balance.unique().tolist()
    assert used == {0: [2.0], 1: [4.0]}
    assert max(gap(model, *pair) for pair in zip(PROMPTS, given, strict=True)) < 0.1


@pytest.mark.parametrize("left_out", [[], [0, 1], [1]], ids=["no file", "an empty file", "a file with one layer"])
def test_layers_without_a_calibration_use_the_weights(
    left_out: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    """Pairs of K scaled by up to 30 and of Q by as much the other way cost nothing at K4V4."""
    model = scaled(make("llama"))
    prompts = [p for p in PROMPTS if len(p) > 8]
    path = None
    if left_out:
        given = [LayerCalibration() if i in left_out else of_weights(model, i) for i in range(2)]
        path = str(tmp_path / "some.safetensors")
        Calibration(given).save(path)

    def most() -> float:
        with packed_batching(model, "K4V4", calibration=path):
            given = batch(model, prompts)
        return max(gap(model, *pair) for pair in zip(prompts, given, strict=True))

    assert most() < 0.3
    if not left_out:
        monkeypatch.setattr(engine, "calibration_of", lambda *args: LayerCalibration())
        assert most() > 1.0, "the model is not hard"


def of_weights(model: Any, layer: int) -> LayerCalibration:
    rope = frequencies(model.config, 64)
    return calibration_of(model.model.layers[layer].self_attn, 2, 64, rope or ())


def test_other_models_and_later_calls_are_unaffected() -> None:
    model, other = make("llama"), make("llama")
    with packed_batching(model, "K2V2"):
        elsewhere = batch(other, PROMPTS)
        with pytest.raises(NotImplementedError, match="attention: expected a batch of generate_batch"):
            model(torch.tensor(PROMPTS[2:3]))
    assert model.config._attn_implementation == "sdpa"
    assert batch(model, PROMPTS) == elsewhere
    with pytest.raises(RuntimeError, match="boom"), packed_batching(model):
        raise RuntimeError("boom")
    assert model.config._attn_implementation == "sdpa"


def test_unsupported_formats_models_and_calls_raise() -> None:
    model = make("llama")
    with (
        pytest.raises(ValueError, match="format: expected K and V of 8, 4, 3 or 2 bits such as 'K4V4', got '16'"),
        packed_batching(model, "16"),
    ):
        pass
    small = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES, head_dim=48))
    with pytest.raises(ValueError, match="head_dim: expected one of"), packed_batching(small):
        pass
    sizes = ContinuousBatchingConfig(page_size=24, num_blocks=8, max_batch_tokens=48)
    with packed_batching(model), pytest.raises(ValueError, match=r"page_size: expected one of .* got 24"):
        model.init_continuous_batching(continuous_batching_config=sizes)._create_batch_processor()


@pytest.mark.parametrize("kind", ["GPTJ", "Falcon", "DeepseekV3"])
def test_models_with_attention_of_their_own_are_refused(kind: str) -> None:
    """transformers batches GPT-J without its cache, and every token of it was wrong."""
    from types import SimpleNamespace

    config = getattr(transformers, f"{kind}Config")()
    model: Any = SimpleNamespace(config=config)
    with (
        pytest.raises(ValueError, match=f"expected a model that packed_batching serves, got .*{kind}Attention"),
        packed_batching(model),
    ):
        pass
