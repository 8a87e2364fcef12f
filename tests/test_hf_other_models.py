"""Models that are not what their config or the cache expects: fewer layers, K of other sizes, compiled as a whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from transformers import (
    AutoModelForCausalLM,
    BartConfig,
    LlamaConfig,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
)

from hf_model import SIZES, SMALL, greedy, make, prompt
from kvstrata.hf import StrataCache

KINDS = [dict(budget=1.0), dict(SMALL), dict(SMALL, capture=True), dict(format="K8V8", max_tokens=128)]
IDS = ["16 bit", "compressed", "captured", "one format"]


@pytest.mark.filterwarnings("ignore:StrataCache. decode steps run eagerly")
@pytest.mark.parametrize("options", KINDS, ids=IDS)
@pytest.mark.parametrize("name", ["pruned", "bart"])
def test_a_model_with_fewer_layers_than_its_config(name: str, options: dict[str, Any]) -> None:
    """Layers cut off by hand, and BART's decoder, whose config counts the layers of the encoder."""
    if name == "bart":
        heads = dict(decoder_attention_heads=2, encoder_attention_heads=2, decoder_ffn_dim=64, encoder_ffn_dim=64)
        own = dict(encoder_layers=3, decoder_layers=1, is_decoder=True, vocab_size=128, d_model=64)
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(BartConfig(**own, **heads, eos_token_id=None)).eval()
    else:
        model = make("llama")
        del model.model.layers[1:]
    cache = StrataCache(model.config, **options)
    own = dict(disable_compile=True) if "format" in options else {}
    tokens = greedy(model, prompt(2, 40), cache, new=24, **own)
    assert cache.get_seq_length() == 63
    if options.get("budget") == 1.0:
        assert torch.equal(tokens, greedy(model, prompt(2, 40), new=24))
    if "format" not in options:
        cache.tiered.check()
        assert [cache.tiered.length(0, layer) for layer in range(2)] == [63, 0]
    if options.get("capture"):
        reasons = dict(pruned="the model does not use all layers of its config")
        assert cache.decoding == f"eager: {reasons.get(name, 'BartForCausalLM.forward takes no position_ids')}"


@pytest.mark.parametrize("options", KINDS, ids=IDS)
@pytest.mark.parametrize("size", [dict(head_dim=64), dict(num_key_value_heads=1)], ids=str)
def test_k_of_another_model(size: dict[str, int], options: dict[str, Any]) -> None:
    """A step read and wrote beyond the rows; the cache goes on with its own model."""
    model = make("llama")
    cache = StrataCache(model.config, **options)
    other = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES | dict(head_dim=32) | size)).eval()
    with torch.no_grad():
        model(prompt(1, 40), past_key_values=cache)
        for new in (1, 5, 30):
            with pytest.raises(ValueError, match="past_key_values: expected K of 2 heads of 32 as before, got"):
                other(input_ids=prompt(1, new), past_key_values=cache)
        expected = StrataCache(model.config, **options)
        model(prompt(1, 40), past_key_values=expected)
        given, wanted = (model(input_ids=prompt(1, 1), past_key_values=x).logits for x in (cache, expected))
    assert torch.equal(given, wanted)


@pytest.mark.parametrize("how", ["torch.compile(model)", "model.compile()", "torch.compile(model) before the cache"])
def test_steps_of_a_compiled_model_are_one_graph(how: str) -> None:
    """With ``fullgraph=True``, by name and by position; a prompt of the plain model comes before."""
    model, ids = make("llama"), prompt(2, 40)
    expected = greedy(model, ids, StrataCache(model.config, **SMALL), new=5)
    options: dict[str, Any] = dict(backend="eager", fullgraph=True)
    step: Any = torch.compile(model, **options) if "before" in how else model
    cache, text = StrataCache(model.config, **SMALL), ids
    try:
        with torch.no_grad():
            out = model(ids, past_key_values=cache)
            if how == "torch.compile(model)":
                step = torch.compile(model, **options)
            elif how == "model.compile()":
                model.compile(**options)
            for number in range(5):
                new = out.logits[:, -1:].argmax(-1)
                text = torch.cat([text, new], 1)
                out = step(new, past_key_values=cache) if number % 2 else step(input_ids=new, past_key_values=cache)
    finally:
        torch._dynamo.reset()
    assert torch.equal(text, expected)


def test_decoding_tells_why_the_last_step_was_eager() -> None:
    model = make("llama")
    cache = StrataCache(model.config, **SMALL, capture=True)
    new = dict(input_ids=prompt(1, 1), past_key_values=cache)

    def step(**options: Any) -> str:
        with torch.no_grad():
            model(**new, **options)
        return cache.decoding

    with torch.no_grad():
        model(prompt(1, 40), past_key_values=cache)
    assert step() == "run as if captured"
    assert step(output_hidden_states=True) == "eager: output_hidden_states given"
    assert step() == "run as if captured"
    model(**new)
    assert cache.decoding == "eager: gradients are enabled"
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        model(**new)
    assert cache.decoding == "eager: autocast is on"
    with torch.no_grad():
        model(inputs_embeds=torch.zeros(1, 1, 64), past_key_values=cache)
        assert cache.decoding == "eager: inputs_embeds are given"
        model(input_ids=prompt(1, 1).int(), past_key_values=cache)
        assert cache.decoding == "eager: input_ids are not int64"
        model(prompt(1, 1), past_key_values=cache)  # by position
    assert cache.decoding == "run as if captured"


def test_decoding_names_the_reason_of_the_outer_model() -> None:
    """Models of images and text give embeddings to their text model, which says nothing to the caller."""
    text = SIZES | dict(hidden_size=128, rope_parameters=dict(rope_type="default", mrope_section=[4, 6, 6]))
    image = dict(depth=1, embed_dim=32, hidden_size=128, num_heads=2)
    model = Qwen2VLForConditionalGeneration(Qwen2VLConfig(text_config=text, vision_config=image)).eval()
    cache = StrataCache(model.config, **SMALL, capture=True)
    greedy(model, prompt(1, 40), cache, new=4)
    assert cache.decoding == "eager: position_ids are not [rows, 1]"


def test_recurrent_layers_are_plain() -> None:
    """transformers gives all layers of RecurrentGemma a window, though most have no attention."""
    from transformers import RecurrentGemmaConfig

    sizes = dict(SIZES, num_key_value_heads=1, num_hidden_layers=3)
    config = RecurrentGemmaConfig(**sizes, lru_width=64, attention_window_size=256, head_dim=32)
    model = AutoModelForCausalLM.from_config(config).eval()
    cache = StrataCache(model.config, budget=0.5)
    model(prompt(1, 40), past_key_values=cache)
    assert cache.plain_layers == {0: "a recurrent layer", 1: "a recurrent layer"}
    assert cache.window_layers == {2: 256}
