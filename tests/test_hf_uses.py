"""What users of caches do, on tiny models: the tokens of a `StrataCache` that compresses nothing are DynamicCache's."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from torch import nn
from torch._dynamo.testing import CompileCounter
from transformers import AutoModelForCausalLM, DynamicCache

from hf_model import FAMILIES, SMALL, greedy, make, prompt
from kvstrata.hf import StrataCache

WINDOWS = ["gemma2", "gemma3", "gpt-oss", "qwen2-mixed"]  # windows of 16 tokens: softcap, RoPE by layer, sinks, biases


def padded(columns: int, padding: int) -> dict[str, torch.Tensor]:
    """Two rows, the second padded on the left."""
    mask = torch.ones(2, columns, dtype=torch.long)
    mask[1, :padding] = 0
    return dict(input_ids=prompt(2, columns) * mask, attention_mask=mask)


def check(model: Any, run: Callable[[Any], torch.Tensor], **options: Any) -> StrataCache:
    """Compare the tokens of two caches, which are given to ``run``."""
    expected, cache = run(DynamicCache(config=model.config)), StrataCache(model.config, budget=1.0, **options)
    assert torch.equal(run(cache), expected)
    return cache


@pytest.mark.parametrize("name", WINDOWS)
def test_windows_beyond_their_length(name: str) -> None:
    """Chunks, left padding past the first chunks, then steps: four windows of text."""
    model, given = make(name), padded(50, 34)
    options = dict(max_new_tokens=16, do_sample=False, prefill_chunk_size=15)
    cache = check(model, lambda cache: model.generate(**given, **options, past_key_values=cache))
    assert "sliding window of 16" in repr(cache)
    assert cache.memory().kinds["plain_layers"] == 2 * 15 * 2 * 2 * 32 * 4 + 8  # rows, tokens, heads, K and V, D, bytes


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_beams_that_return_several(name: str) -> None:
    model, given = make(name), padded(30, 9)
    options = dict(num_beams=3, num_return_sequences=2, max_new_tokens=10, do_sample=False)
    check(model, lambda cache: model.generate(**given, **options, past_key_values=cache))


@pytest.mark.parametrize("name", ["llama", "gpt-oss"])
@pytest.mark.parametrize("seed", [0, 5], ids=["the same model", "another one"])
def test_assisted_decoding_equals_dynamic_cache(name: str, seed: int) -> None:
    """Drafts of the same model are taken, those of another are taken back."""
    model, assistant = make(name), make(name, seed=seed)
    options = dict(new=12, assistant_model=assistant)
    check(model, lambda cache: greedy(model, prompt(1, 30), cache, **options))


@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
def test_prompt_lookup_equals_dynamic_cache(name: str) -> None:
    model, ids = make(name), torch.cat([prompt(1, 20)] * 2, 1)
    check(model, lambda cache: greedy(model, ids, cache, new=12, prompt_lookup_num_tokens=4))


@pytest.mark.parametrize("name", ["gemma3", "gpt-oss"])
def test_turns_beyond_the_window(name: str) -> None:
    model = make(name)

    def turns(cache: Any) -> torch.Tensor:
        text = prompt(2, 20)
        for turn in range(3):
            text = torch.cat([greedy(model, text, cache, new=6), prompt(2, 4 + 13 * turn, seed=turn)], 1)
        return greedy(model, text, cache, new=4)

    check(model, turns)


def test_a_prefix_that_two_texts_share() -> None:
    model, ids = make("gemma3"), prompt(1, 30)
    cache = StrataCache(model.config, budget=1.0)
    with torch.no_grad():
        model(ids, past_key_values=cache)
    for tail in (prompt(1, 5, seed=4), prompt(1, 20, seed=5)):
        text = torch.cat([ids, tail], 1)
        assert torch.equal(greedy(model, text, copy.deepcopy(cache), new=8), greedy(model, text, new=8))


def test_streamed_tokens_equal_dynamic_cache() -> None:
    model = make("llama")

    class Streamer:
        def __init__(self) -> None:
            self.tokens: list[int] = []
            self.calls = 0

        def put(self, tokens: torch.Tensor) -> None:
            self.tokens += tokens.flatten().tolist()
            self.calls += 1

        def end(self) -> None:
            self.calls += 100

    def run(cache: Any) -> torch.Tensor:
        streamer = Streamer()
        out = greedy(model, prompt(1, 20), cache, new=8, streamer=streamer)
        assert streamer.tokens == out[0].tolist()
        assert streamer.calls == 109
        return out

    check(model, run)


def test_text_generation_pipeline_equals_dynamic_cache() -> None:
    tokenizers = pytest.importorskip("tokenizers")
    from transformers import PreTrainedTokenizerFast, pipeline

    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{i}": i for i in range(128)}, unk_token="w1"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    names = dict(pad_token="w0", eos_token="w127", padding_side="left")
    model, tokenizer = make("llama"), PreTrainedTokenizerFast(tokenizer_object=words, **names)
    generate = pipeline("text-generation", model=model, tokenizer=tokenizer)
    texts = [" ".join(f"w{i}" for i in row) for row in prompt(2, 30).tolist()]
    texts[1] = texts[1].rsplit(" ", 12)[0]  # shorter: padded
    options = dict(max_new_tokens=8, do_sample=False, batch_size=2, return_full_text=False)
    cache = StrataCache(model.config, budget=1.0)
    given = generate(texts, **options, past_key_values=cache)
    assert given == generate(texts, **options)
    assert [cache.tiered.length(row) for row in range(2)] == [37, 25]


def test_compiled_forward_gives_the_same_tokens() -> None:
    """Dynamo leaves its graph for the cache and comes back, at a prompt and at steps; its backend does not matter."""
    model, given = make("llama"), padded(30, 9)

    def tokens() -> torch.Tensor:
        cache = StrataCache(model.config, **SMALL)
        return model.generate(**given, max_new_tokens=4, do_sample=False, past_key_values=cache)

    expected, counter = tokens(), CompileCounter()
    model.forward = torch.compile(model.forward, backend=counter)  # `generate` of a compiled module calls the plain one
    try:
        assert torch.equal(tokens(), expected)
    finally:
        torch._dynamo.reset()
    assert counter.frame_count > 1


class Adapter(nn.Module):
    """A linear layer with a low-rank update, as PEFT puts in the place of ``q_proj`` and ``k_proj``."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base
        self.down = nn.Linear(base.in_features, 4, bias=False)
        self.up = nn.Linear(4, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x) + 4 * self.up(self.down(x))


@pytest.mark.parametrize("columns", [6, 40], ids=["balance of weights", "balance of the prompt"])
def test_adapted_projections_equal_dynamic_cache(columns: int) -> None:
    """Weights behind an adapter tell nothing of K; a compressed cache does without them."""
    model = make("qwen2")
    plain = greedy(model, prompt(2, columns), new=8)
    torch.manual_seed(1)
    for layer in model.model.layers:
        for name in ("q_proj", "k_proj", "v_proj"):
            setattr(layer.self_attn, name, Adapter(getattr(layer.self_attn, name)))
    check(model, lambda cache: greedy(model, prompt(2, columns), cache, new=8))
    assert not torch.equal(greedy(model, prompt(2, columns), new=8), plain)
    cache = StrataCache(model.config, **dict(SMALL, recent_tokens=4))
    greedy(model, prompt(2, columns), cache, new=24)
    cache.tiered.check()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama", "gpt-oss"])
def test_half_precision_equals_dynamic_cache(name: str, dtype: torch.dtype) -> None:
    model, given = make(name).to(dtype), padded(30, 9)
    options = dict(max_new_tokens=10, do_sample=False)
    cache = check(model, lambda cache: model.generate(**given, **options, past_key_values=cache))
    assert cache.tiered.dtype == dtype


@pytest.mark.filterwarnings("ignore:recent_tokens")
def test_modules_that_accelerate_moves() -> None:
    """Hooks of a device map that bring weights in and out around each module."""
    accelerate = pytest.importorskip("accelerate")
    model, ids = make("llama"), prompt(2, 30)
    expected = greedy(model, ids, new=6)
    offloaded = accelerate.cpu_offload(copy.deepcopy(model), torch.device("cpu"))
    assert torch.equal(greedy(offloaded, ids, StrataCache(model.config, budget=1.0), new=6), expected)
    for columns in (5, 30):  # a short prompt is balanced by the weights
        for options in (SMALL, dict(format="K4V4", max_tokens=64)):
            ids, caches = prompt(2, columns), [StrataCache(model.config, **options) for _ in range(2)]
            assert torch.equal(greedy(offloaded, ids, caches[0], new=6), greedy(model, ids, caches[1], new=6))


def interrupted(model: Any, cache: Any, ids: torch.Tensor) -> None:
    """A forward that is interrupted after the first layer."""

    def interrupt(*given: Any) -> None:
        raise KeyboardInterrupt

    hook = model.model.layers[0].mlp.register_forward_hook(interrupt)
    with torch.no_grad(), pytest.raises(KeyboardInterrupt):
        model(ids, past_key_values=cache)
    hook.remove()


KINDS = [dict(budget=0.5), dict(budget=1.0), dict(format="K8V8", max_tokens=256)]


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt-oss"])
@pytest.mark.parametrize("options", KINDS, ids=["0.5", "1.0", "K8V8"])
@pytest.mark.parametrize("columns", [1, 60])
def test_after_an_interrupted_prompt(name: str, options: dict, columns: int) -> None:
    """Some layers have its tokens: the next forward says so, and `reset` is a way out. Packed layers alone undo it."""
    model, ids = make(name), prompt(1, 60)
    cache, other = StrataCache(model.config, **options), StrataCache(model.config, **options)
    interrupted(model, cache, ids)
    if "format" not in options or name != "llama":
        with torch.no_grad(), pytest.raises(RuntimeError, match=r"a cache whose last forward was complete.* reset\(\)"):
            model(ids[:, :columns], past_key_values=cache)
        with pytest.raises(RuntimeError, match="complete"):
            greedy(model, ids, copy.deepcopy(cache))
        cache.reset()
    assert torch.equal(greedy(model, ids, cache), greedy(model, ids, other))


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt-oss"])
@pytest.mark.parametrize("options", KINDS, ids=["0.5", "1.0", "K8V8"])
def test_after_a_refused_turn(name: str, options: dict) -> None:
    """Nothing is stored where the first layer refuses; where others have stored before, the next forward says so."""
    model, ids = make(name), prompt(2, 20)
    cache, other = StrataCache(model.config, **options), StrataCache(model.config, **options)
    runs = [greedy(model, ids, x, new=12) for x in (cache, other)]
    turn = torch.cat([runs[0], prompt(2, 6, seed=9)], 1)
    ones, bad = torch.ones_like(turn), torch.ones_like(turn)
    bad[0, 25] = 0
    with pytest.raises(NotImplementedError, match="attention_mask"):
        greedy(model, turn, cache, attention_mask=bad)
    if name == "llama":
        again = greedy(model, turn, cache, attention_mask=ones)
        assert torch.equal(again, greedy(model, turn, other, attention_mask=ones))
    else:
        with pytest.raises(RuntimeError, match="a cache whose last forward was complete"):
            greedy(model, turn, cache, attention_mask=ones)


@pytest.mark.parametrize("options", KINDS, ids=["0.5", "1.0", "K8V8"])
def test_a_refused_first_prompt_leaves_an_empty_cache(options: dict) -> None:
    model = make("llama")
    cache = StrataCache(model.config, **options)
    mask = torch.ones(1, 1, 9, 9, dtype=torch.bool)  # not causal
    with torch.no_grad(), pytest.raises(NotImplementedError):
        model(prompt(1, 9), past_key_values=cache, attention_mask=mask)
    ids = prompt(2, 30)
    assert torch.equal(greedy(model, ids, cache), greedy(model, ids, StrataCache(model.config, **options)))


@pytest.mark.parametrize("options", KINDS, ids=["0.5", "1.0", "K8V8"])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_caches_are_freed_without_garbage_collection(name: str, options: dict) -> None:
    model, alive = make(name), []
    gc.collect()
    gc.disable()
    try:
        for _ in range(2):
            cache = StrataCache(model.config, **options)
            greedy(model, prompt(1, 40), cache, new=4)
            copied = copy.deepcopy(cache)
            greedy(model, prompt(1, 50), copied, new=4)
            alive += [weakref.ref(cache), weakref.ref(copied)]
            del cache, copied
        assert [x() for x in alive] == [None] * 4
    finally:
        gc.enable()


@pytest.mark.parametrize("options", KINDS, ids=["0.5", "1.0", "K8V8"])
@pytest.mark.parametrize("name", ["llama", "gemma3-window"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_generates_tokens(name: str, options: dict, dtype: torch.dtype) -> None:
    """Rotary embeddings make K float32 where V has autocast's dtype; tails and pages keep their own."""
    model = make("llama" if name == "llama" else "gemma3")
    if name != "llama":
        model.config.sliding_window = 256
        model = AutoModelForCausalLM.from_config(model.config, attn_implementation="sdpa").eval()
    cache = StrataCache(model.config, **(options | ({"max_tokens": 512} if "format" in options else {})))
    with torch.autocast("cpu", dtype=dtype):
        tokens = greedy(model, prompt(2, 300), cache, new=6)
    assert tokens.shape[1] == 306


def test_attentions_asked_for_by_the_config_are_refused() -> None:
    model = make("llama")
    model.set_attn_implementation("eager")
    model.config.output_attentions = True
    with torch.no_grad(), pytest.raises(NotImplementedError, match="output_attentions: expected neither"):
        model(prompt(1, 9), past_key_values=StrataCache(model.config))


def test_layers_on_several_devices_are_refused() -> None:
    """With a device_map over GPUs; a meta tensor stands for the second one."""
    cache = StrataCache(make("llama").config, **SMALL)
    rows = torch.randn(1, 2, 40, 32)
    cache.update(rows, rows, 1)
    with pytest.raises(NotImplementedError, match=r"device_map: expected .* one device, got layer 0 on meta .* on cpu"):
        cache.update(rows.to("meta"), rows.to("meta"), 0)


def test_every_family_is_named() -> None:
    """`repr` tells which layers are left to transformers, and why."""
    for name in FAMILIES:
        cache = StrataCache(make(name).config, budget=0.5)
        assert cache._compressed + len(cache.plain_layers) + len(cache.window_layers) == len(cache.layers)
        assert (cache.eager_only is None) == (cache._compressed == len(cache.layers))
        assert all(f"layer {place} plain: {why}" in repr(cache) for place, why in cache.plain_layers.items())
