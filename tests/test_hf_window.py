"""Sliding-window layers of a `StrataCache`: packed rings that follow DynamicCache beyond the window."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from transformers import AutoModelForCausalLM, DynamicCache, Llama4TextConfig, MistralConfig

from hf_model import FAMILIES, SIZES, greedy, prompt
from kvstrata.hf import StrataCache, window, window_step
from kvstrata.hf.calibrate import calibrate
from kvstrata.hf.guard import BudgetWarning
from kvstrata.hf.window import WindowLayer
from kvstrata.quant.calibration import LayerCalibration
from test_hard_models import scaled

W = 48
NAMES = ["mistral-window", "gemma2", "gemma3", "gpt-oss", "qwen2-mixed"]
SMALL = dict(recent_tokens=16, page_tokens=16)
WIDE = dict(SMALL, budget=0.6, dtype=torch.float32)  # K8V8
IDS = prompt(3, 130)
MASK = torch.ones_like(IDS)
MASK[1, :9], MASK[2, :70] = 0, 0
# Prompts longer than the window and shorter, steps, a few tokens at a time; row 2 begins in the second prompt.
ENDS = (60, 61, 62, 65, 90, *range(91, 110), 126, 127, 128, 129, 130)


@pytest.fixture(autouse=True)
def short_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(window, "LEAST", 32)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def where(request: pytest.FixtureRequest) -> str:
    """Device of a test that runs on a CPU and, where there is one, on a GPU."""
    return request.param


def make(name: str, where: str = "cpu") -> Any:
    torch.manual_seed(0)
    config = MistralConfig(**SIZES, head_dim=32) if name == "mistral-window" else FAMILIES[name]()
    config.sliding_window = W
    eager = name in ("gemma2", "gpt-oss")
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager" if eager else "sdpa").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4.0 if parameter.dim() > 1 else 1.0)
            if parameter.dim() == 1 and not parameter.any():
                parameter.normal_()
    if where == "cuda" and name == "gpt-oss":
        model.set_experts_implementation("batched_mm")  # its default waits for the GPU in float32
    return model.to(where)


@torch.no_grad()
def logits(model: Any, cache: Any, ends: tuple[int, ...] = ENDS) -> torch.Tensor:
    """Of all tokens, ``[tokens, vocabulary]``."""
    out, begin = [], 0
    for end in ends:
        ids, mask = IDS[:, begin:end].to(model.device), MASK[:, :end].to(model.device)
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, begin:]
        given = model(ids, attention_mask=mask, position_ids=positions, past_key_values=cache).logits
        out.append(given[mask[:, begin:].bool()])
        begin = end
    return torch.cat(out)


def error(given: torch.Tensor, expected: torch.Tensor) -> float:
    return float((given - expected).norm() / expected.norm())


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_close_to_dynamic_cache(name: str, where: str) -> None:
    """Beyond the window, with left padding, steps and chunks; at K8V8 an error of rounding."""
    model = make(name, where)
    cache = StrataCache(model.config, **WIDE)
    expected = logits(model, DynamicCache(config=model.config))
    assert error(logits(model, cache), expected) < 0.013
    assert len(cache.window_layers) == (2 if name == "mistral-window" else 1)
    assert not cache.plain_layers


def test_wrong_windows_and_low_bits_exceed_the_tolerance(monkeypatch: pytest.MonkeyPatch) -> None:
    """One token more or less in the window is more than the error allowed above."""
    model = make("mistral-window")
    expected = logits(model, DynamicCache(config=model.config))
    decode = window_step.decode_packed
    for by in (-1, 1):

        def other(*args: Any, sliding_window: int, by: int = by, **kwargs: Any) -> Any:
            return decode(*args, sliding_window=sliding_window + by, **kwargs)

        monkeypatch.setattr(window_step, "decode_packed", other)
        assert error(logits(model, StrataCache(model.config, **WIDE)), expected) > 0.026
    monkeypatch.setattr(window_step, "decode_packed", decode)
    few = StrataCache(model.config, **SMALL, budget=0.23, tiers=["K2V2"])
    assert error(logits(model, few), expected) > 0.05


def test_scaled_pairs_cost_nothing(where: str) -> None:
    """A model with the same function and large channels of K, at K4V4."""
    easy, errors = make("mistral-window"), []
    hard = scaled(easy)
    for model in (easy.to(where), hard.to(where)):
        cache = StrataCache(model.config, **SMALL, budget=0.3)
        errors.append(error(logits(model, cache), logits(model, DynamicCache(config=model.config))))
        assert cache.layers[0].format.name == "K4V4"
    assert errors[1] < 1.15 * errors[0]
    without = StrataCache(model.config, **SMALL, budget=0.3, balance=False)
    assert error(logits(model, without), logits(model, DynamicCache(config=model.config))) > 2 * errors[0]


@pytest.mark.filterwarnings("default::kvstrata.hf.guard.BudgetWarning")
def test_a_format_that_is_too_narrow_for_a_window_gives_one_warning(where: str) -> None:
    hard = scaled(make("mistral-window")).to(where)

    def warned(mask: torch.Tensor = MASK, **options: Any) -> list[str]:
        cache = StrataCache(hard.config, **SMALL | options)
        with warnings.catch_warnings(record=True) as caught, torch.no_grad():
            warnings.simplefilter("always")
            for _ in range(2):
                hard(IDS.to(where), attention_mask=mask.to(where), past_key_values=cache)
                cache.reset()
        return [str(w.message) for w in caught if issubclass(w.category, BudgetWarning)]

    assert warned(budget=0.3) == []
    (found,) = warned(budget=0.3, balance=False)
    assert "budget=0.3 is too small for this model: estimated attention error" in found
    assert "a sliding window in K4V4; try budget=" in found
    advised = float(found.split("try budget=")[1])
    assert 0.3 < advised <= 1
    assert warned(budget=advised, balance=False) == []
    short = MASK.clone()
    short[:, 60:] = 0
    assert warned(short, budget=0.29, balance=False) == [], "too short for an estimate"


@pytest.mark.filterwarnings("default::kvstrata.hf.guard.BudgetWarning")
def test_a_long_turn_after_a_short_one_is_checked(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    hard = scaled(make("mistral-window")).to(where)

    def talk(mask: torch.Tensor | None = None, **options: Any) -> int:
        cache, begin = StrataCache(hard.config, **SMALL | options), 0
        with warnings.catch_warnings(record=True) as caught, torch.no_grad():
            warnings.simplefilter("always")
            for end in (20, 60, 130):
                seen = None if mask is None else mask[:, :end].to(where)
                hard(IDS[:, begin:end].to(where), attention_mask=seen, past_key_values=cache)
                assert cache.window_guard is None
                begin = end
        return sum(issubclass(w.category, BudgetWarning) for w in caught)

    assert talk(budget=0.3) == 0
    assert talk(budget=0.3, balance=False) == 1
    monkeypatch.setattr(window.WindowGuard, "add", None)
    assert talk(budget=0.3, balance=False) == 0
    monkeypatch.undo()
    monkeypatch.setattr(window, "LEAST", 32)
    assert talk(MASK, budget=0.29, balance=False) == 1


@pytest.mark.parametrize("begin", [0, 30])
@torch.no_grad()
def test_nothing_is_stored_if_the_warning_is_an_error(begin: int) -> None:
    """In the only layer with a window, which is also the only one that is compressed: the turn can be tried again."""
    hard = scaled(make("mistral-window"))
    del hard.model.layers[1:]
    hard.config.num_hidden_layers = 1
    cache, other = (StrataCache(hard.config, **SMALL, budget=0.3, balance=False) for _ in range(2))
    if begin:
        hard(IDS[:, :begin], past_key_values=cache)
    with warnings.catch_warnings():
        warnings.simplefilter("error", BudgetWarning)
        with pytest.raises(BudgetWarning):
            hard(IDS[:, begin:], past_key_values=cache)
    assert cache.get_seq_length() == begin
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BudgetWarning)
        if begin:
            hard(IDS[:, :begin], past_key_values=other)
        for each in (cache, other):
            hard(IDS[:, begin:], past_key_values=each)
            found.append(hard(IDS[:, :1], past_key_values=each).logits)
    assert cache.layers[0].counts.lengths == [131] * 3
    assert torch.equal(*found)


@pytest.mark.filterwarnings("default::kvstrata.hf.guard.BudgetWarning")
def test_every_first_prompt_is_checked_until_one_is_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt that fails does not count, a model without its last layers does; calibrations are told apart."""

    def warned(model: Any, **options: Any) -> int:
        cache = StrataCache(model.config, **SMALL | dict(budget=0.3) | options)
        with warnings.catch_warnings(record=True) as caught, torch.no_grad():
            warnings.simplefilter("always")
            model(IDS, past_key_values=cache)
        return sum(issubclass(w.category, BudgetWarning) for w in caught)

    hard = scaled(make("mistral-window"))
    with monkeypatch.context() as patched:
        patched.setattr(hard.model.layers[1], "forward", lambda *args, **kwargs: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            warned(hard, balance=False)
    assert [warned(hard, balance=False) for _ in range(2)] == [1, 0]
    cut = scaled(make("mistral-window"))
    del cut.model.layers[1:]
    assert [warned(cut, balance=False) for _ in range(2)] == [1, 0]
    hard = scaled(make("mistral-window"))
    good, shape = calibrate(hard, IDS), (SIZES["num_key_value_heads"], 32)
    poor = replace(good, windows=[LayerCalibration(torch.ones(shape))] * 2)
    assert good.fingerprint == poor.fingerprint, "there are only windows"
    assert [warned(hard, calibration=given) for given in (good, poor, poor)] == [0, 1, 0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("options", [dict(budget=0.6), dict(format="K8V8", max_tokens=256)], ids=["budget", "format"])
def test_the_default_dtype_of_torch_does_not_matter(dtype: torch.dtype, options: dict[str, Any]) -> None:
    """Engines set it while they run; the guard is part of it, and layers with windows and without."""
    model = make("gemma3")
    model.config.sliding_window = W
    expected = logits(model, StrataCache(model.config, **options))
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(dtype)
        found = logits(model, StrataCache(model.config, **options))
    finally:
        torch.set_default_dtype(before)
    torch.testing.assert_close(found, expected, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("name", ["mistral-window", "gemma3"])
def test_a_dtype_without_rows_is_refused_by_name(name: str) -> None:
    model = make(name).double()
    for options in (dict(budget=0.6), dict(format="K8V8", max_tokens=256)):
        if name == "gemma3" or "budget" in options:  # format= leaves windows to transformers
            with pytest.raises(ValueError, match=r"dtype: expected one of .*float32\), got torch.float64"):
                logits(model, StrataCache(model.config, **options))


def test_bytes_are_those_of_a_window(where: str) -> None:
    model = make("mistral-window", where)
    cache, taken = StrataCache(model.config, **SMALL, budget=0.25), []
    with torch.no_grad():
        for turn in range(6):
            model(prompt(2, 64, seed=turn).to(where), past_key_values=cache)
            taken.append(cache.memory())
    assert {memory.kinds["window_layers"] for memory in taken} == {taken[0].total}
    assert taken[-1].full == 2 * 2 * (W - 1) * 2 * 4 * 32  # layers, rows, tokens, heads, K and V of 16 bit, D
    assert {tuple(layer.pages.shape) for layer in cache.layers} == {(2 * 5, 2, cache.layers[0].format.page_bytes)}
    assert cache.get_seq_length() == 384
    assert repr(cache) == "StrataCache(0 layers and 2 of sliding windows, budget=0.25)"


def test_one_format_by_the_budget() -> None:
    names = {f: window.choose_format(f, 128, 64) for f in (0.6, 0.45, 0.3, 0.25, 0.15, 0.1)}
    assert [None if x is None else x.name for x in names.values()] == ["K8V8", "K8V4", "K4V4", "K4V3", "K2V2", None]


def test_rows_are_reordered_repeated_and_selected(where: str) -> None:
    model = make("gemma3", where)
    cache = StrataCache(model.config, **WIDE, max_batch=6)
    logits(model, cache, ENDS[:9])
    layer = next(layer for layer in cache.layers if isinstance(layer, WindowLayer))
    k, v = layer.past(W - 1, torch.float32)
    cache.reorder_cache(torch.tensor([1, 0, 1]))
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([0, 3, 5]))
    rows = [1, 0, 1]
    assert all(torch.equal(given, x[rows]) for given, x in zip(layer.past(W - 1, torch.float32), (k, v), strict=True))
    cache.reset()
    with torch.no_grad():
        assert torch.isfinite(model(IDS[:2, :60].to(where), past_key_values=cache).logits).all()


@pytest.mark.parametrize("name", ["mistral-window", "gemma3"])
def test_files_and_copies_continue(name: str, tmp_path: Path, where: str) -> None:
    model, ids = make(name, where), prompt(2, 70).to(where)
    cache = StrataCache(model.config, **SMALL, budget=0.3)
    tokens = greedy(model, ids, cache, new=5)
    cache.save(tmp_path / "a.safetensors")
    twins = [StrataCache.load(model.config, tmp_path / "a.safetensors", where), copy.deepcopy(cache)]
    expected = greedy(model, tokens, cache, new=20)
    assert all(torch.equal(greedy(model, tokens, twin, new=20), expected) for twin in twins)
    model.config.sliding_window = W + 16
    with pytest.raises(ValueError, match="expected a StrataCache of this model"):
        StrataCache.load(model.config, tmp_path / "a.safetensors")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("given", [dict(capture=True), dict(compile=True)], ids=["captured", "compiled"])
def test_steps_are_those_of_eager_forwards(name: str, given: dict[str, bool], where: str) -> None:
    """Captured steps across the edges of tail and window, with padded rows, a crop and other rows in between."""
    if given.get("compile") and (where == "cpu" or name != "gemma3"):
        pytest.skip("minutes of compiling; test_compiled_steps_have_no_graph_break has more")
    model, runs = make(name, where), []
    for options in (dict(capture=False), given):
        cache = StrataCache(model.config, **SMALL, budget=0.3, max_batch=4, **options)
        out = [logits(model, cache)]
        cache.crop(-7)
        cache.reorder_cache(torch.tensor([2, 1, 1], device=where))
        with torch.no_grad():
            for column in range(123, 140):
                mask = torch.cat([MASK[[2, 1, 1]], torch.ones(3, 10, dtype=torch.long)], 1)[:, : column + 1].to(where)
                positions = (mask.cumsum(1) - 1)[:, -1:]
                ids = prompt(3, 1, seed=column).to(where)
                step = model(ids, attention_mask=mask, position_ids=positions, past_key_values=cache)
                out.append(step.logits[:, 0])
        runs.append(torch.cat(out))
        words = dict(capture=" as a CUDA graph" if where == "cuda" else " as if captured", compile="compiled")
        assert all(words[key] in f" {cache.decoding}" for key in options if options[key]), cache.decoding
    if "compile" in given:
        torch.testing.assert_close(*runs, rtol=0.01, atol=0.01)
    else:
        assert torch.equal(*runs)


@torch.no_grad()
@pytest.mark.parametrize("name", ["gemma3", "mistral-window"])
def test_compiled_steps_have_no_graph_break(name: str, where: str) -> None:
    model, ids = make(name, where), prompt(2, 80).to(where)
    runs = []
    for options in (dict(capture=False), dict(compile=True, capture=False)):
        cache = StrataCache(model.config, **SMALL, budget=0.3, **options)
        out = [model(ids[:, :60], past_key_values=cache).logits[:, -1]]
        out += [model(ids[:, i : i + 1], past_key_values=cache).logits[:, 0] for i in range(60, 80)]
        runs.append(torch.stack(out))
    assert cache.decoding == "compiled"
    torch.testing.assert_close(*runs, rtol=1e-3, atol=1e-3)


def _out_of_memory(*_: Any) -> None:
    raise RuntimeError("out of memory")


@pytest.mark.parametrize("name", ["gemma3", "mistral-window"])
def test_a_step_that_fails_changes_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model fails behind its window layers; the same step again gives what it would have given."""
    model, ids = make(name), prompt(2, 80)
    caches = [StrataCache(model.config, **SMALL, budget=0.3, capture=capture) for capture in (False, True)]
    with torch.no_grad():
        for cache in caches:
            model(ids[:, :70], past_key_values=cache)
            model(ids[:, 70:71], past_key_values=cache)
        with monkeypatch.context() as patched:
            patched.setattr(model.lm_head, "forward", _out_of_memory)
            with pytest.raises(RuntimeError, match="out of memory"):
                model(ids[:, 71:72], past_key_values=caches[1])
        assert caches[1].get_seq_length() == 71
        for i in range(71, 80):
            expected, given = (model(ids[:, i : i + 1], past_key_values=cache).logits for cache in caches)
            if name == "mistral-window":  # undoing a step of tiers may settle at another length
                assert torch.equal(given, expected)
        ends = [cache.layers[0] for cache in caches]
        assert all(torch.equal(*(getattr(layer, x) for layer in ends)) for x in ("pages", "tail_k", "tail_v"))


def test_crop_rolls_back_tokens(where: str) -> None:
    model, ids = make("mistral-window", where), prompt(2, 120).to(where)
    cache = StrataCache(model.config, **WIDE)
    with torch.no_grad():
        model(ids[:, :80], past_key_values=cache)
        first = [model(ids[:, i : i + 1], past_key_values=cache).logits for i in range(80, 100)]
        cache.crop(-20)
        assert cache.get_seq_length() == 80
        again = [model(ids[:, i : i + 1], past_key_values=cache).logits for i in range(80, 100)]
        torch.testing.assert_close(again, first, atol=0.1, rtol=0.01)  # tokens that were packed stay packed
        model(prompt(2, 80, seed=3).to(where), past_key_values=cache)
        with pytest.raises(RuntimeError, match=r"crop: expected at most (\d+) columns .* got 90") as refused:
            cache.crop(-90)
        assert cache.get_seq_length() == 180
        most = int(str(refused.value).split("at most ")[1].split()[0])
        assert most >= window.MARGIN
        with pytest.raises(RuntimeError, match=f"at most {most} .* got {most + 1}"):
            cache.crop(-most - 1)
        cache.crop(-5)
        with pytest.raises(RuntimeError, match=f"at most {most - 5} .* got {most - 4}"):
            cache.crop(4 - most)
        cache.crop(5 - most)
        with pytest.raises(RuntimeError, match=r"at most 0 .* got 1"):
            cache.crop(-1)
    assert cache.get_seq_length() == 180 - most


@torch.no_grad()
def test_crop_after_a_step_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step has overwritten a page slot that its counters do not mention: no query may need it after a crop."""
    model, ids = make("mistral-window"), prompt(1, 150)
    expected = model(ids, use_cache=False).logits
    cache = StrataCache(model.config, **WIDE, capture=True)
    for begin, end in ((0, 140), (140, 141)):
        model(ids[:, begin:end], past_key_values=cache)
    with monkeypatch.context() as patched:
        patched.setattr(model.lm_head, "forward", _out_of_memory)
        with pytest.raises(RuntimeError, match="out of memory"):
            model(ids[:, 141:142], past_key_values=cache)
    layer = cache.layers[0]
    oldest = layer.counts.written_to[0] + 1 - layer.ring  # with the step that failed
    most = 141 - (oldest + W - 1)
    assert most >= window.MARGIN
    with pytest.raises(RuntimeError, match=f"crop: expected at most {most} columns"):
        cache.crop(-most - 1)
    cache.crop(-most)
    begin = cache.get_seq_length()
    assert error(model(ids[:, begin : begin + 1], past_key_values=cache).logits, expected[:, begin : begin + 1]) < 0.02


@torch.no_grad()
@pytest.mark.parametrize("capture", [False, True])
@pytest.mark.parametrize("name", ["gemma3", "mistral-window"])
def test_padding_behind_tokens_is_refused_while_a_query_may_see_it(name: str, capture: bool) -> None:
    """Also in the middle of a chunk of tokens; padding before the window changes nothing."""
    model, ids = make(name), prompt(2, 100)
    mask = torch.ones_like(ids)
    mask[1, 20:23] = 0
    positions = mask.cumsum(1) - 1
    expected = model(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
    refused = r"expected padding on the left .* row 1 with tokens behind"
    for begin, end in ((0, 22 + W - 1), (18, 30)):
        cache = StrataCache(model.config, **WIDE, capture=capture)
        if begin:
            model(ids[:, :begin], past_key_values=cache)
        given = dict(attention_mask=mask[:, :end], position_ids=positions[:, begin:end])
        with pytest.raises(NotImplementedError, match=refused):
            model(ids[:, begin:end], **given, past_key_values=cache)
    cache, begin = StrataCache(model.config, **WIDE, capture=capture), 0
    for end in (22 + W, *range(23 + W, 101)):
        given = dict(attention_mask=mask[:, :end], position_ids=positions[:, begin:end])
        out = model(ids[:, begin:end], **given, past_key_values=cache).logits[:, -1]
        begin = end
        assert error(out, expected[:, end - 1]) < 0.03


@pytest.mark.parametrize("name", ["gemma3", "mistral-window"])
@pytest.mark.parametrize("how", ["copy", "pickle", "file"])
def test_copies_made_in_inference_mode_are_written_outside_of_it(name: str, how: str, tmp_path: Path) -> None:
    model, ids = make(name), prompt(2, 70)
    cache = StrataCache(model.config, **SMALL, budget=0.3)
    with torch.no_grad():
        model(ids, past_key_values=cache)
    cache.save(tmp_path / "a.safetensors")
    with torch.inference_mode():
        if how == "file":
            twin = StrataCache.load(model.config, tmp_path / "a.safetensors")
        else:
            twin = copy.deepcopy(cache) if how == "copy" else pickle.loads(pickle.dumps(cache))
    with torch.no_grad():
        expected, given = (
            torch.cat([model(ids[:, i : i + 1], past_key_values=x).logits for i in range(20)]) for x in (cache, twin)
        )
    assert torch.equal(given, expected)


@torch.no_grad()
def test_the_first_forward_of_a_copy_may_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if it is the only cache: the copy knows that its layers have stored tokens."""
    model, ids = make("mistral-window"), prompt(1, 70)
    cache = StrataCache(model.config, **SMALL, budget=0.3)
    model(ids, past_key_values=cache)
    data = pickle.dumps(cache)
    del cache
    gc.collect()
    cache = pickle.loads(data)
    with monkeypatch.context() as patched:
        patched.setattr(model.lm_head, "forward", _out_of_memory)
        with pytest.raises(RuntimeError, match="out of memory"):
            model(ids[:, :5], past_key_values=cache)
    with pytest.raises(RuntimeError, match="got one that was interrupted"):
        model(ids[:, :5], past_key_values=cache)


@torch.no_grad()
def test_padding_of_a_prompt_in_inference_mode() -> None:
    """Its copy on the device serves a later prompt with gradients."""
    model, ids = make("gemma3"), prompt(2, 60)
    cache = StrataCache(model.config, **SMALL, budget=0.3)
    mask = torch.ones_like(ids)
    mask[1, :50] = 0
    for begin, end, mode in ((0, 20, torch.inference_mode), (20, 40, torch.enable_grad), (40, 60, torch.no_grad)):
        positions = (mask[:, :end].cumsum(1) - 1).clamp(min=0)[:, begin:]
        with mode():
            out = model(ids[:, begin:end], attention_mask=mask[:, :end], position_ids=positions, past_key_values=cache)
        assert torch.isfinite(out.logits).all()


@torch.no_grad()
def test_the_tail_stays_finite_after_a_crop() -> None:
    """Values near the largest of float16 may be larger when they are unpacked for the 16-bit tail."""
    model, ids = make("mistral-window"), prompt(2, 81)
    for layer in model.model.layers:
        layer.self_attn.v_proj.weight.mul_(1e5)
    cache = StrataCache(model.config, **SMALL, budget=0.3)
    model(ids[:, :80], past_key_values=cache)
    cache.crop(-20)
    model(ids[:, 60:61], past_key_values=cache)
    assert cache.layers[0].tail_v.abs().max() == torch.finfo(torch.float16).max


@torch.no_grad()
def test_layers_on_different_devices_have_their_own_slots() -> None:
    model, ids = make("mistral-window"), prompt(2, 60)
    cache = StrataCache(model.config, **SMALL, budget=0.3)
    model(ids, past_key_values=cache)
    first, second = cache.layers
    second.device = torch.device("meta")
    for layer in (first, second):
        layer.begin_step()
        assert layer.slots.device.device == layer.device


def test_prompt_lookup_equals_dynamic_cache(where: str) -> None:
    """At K8V8 the tokens of this model are those of DynamicCache, with drafts that are taken back."""
    model, ids = make("gemma3", where), torch.cat([prompt(1, 40, seed=4)] * 2, 1).to(where)
    options = dict(prompt_lookup_num_tokens=5, new=16)
    assert torch.equal(greedy(model, ids, StrataCache(model.config, **WIDE), **options), greedy(model, ids, **options))


def test_errors_instead_of_wrong_windows(where: str) -> None:
    model, ids = make("mistral-window", where), prompt(2, 60).to(where)
    cache, mask = StrataCache(model.config, **WIDE), torch.ones(2, 60, dtype=torch.long, device=where)
    mask[1, 50:] = 0
    with torch.no_grad():
        model(ids, attention_mask=mask, past_key_values=cache)
        after = torch.cat([mask, torch.ones(2, 1, dtype=torch.long, device=where)], 1)
        with pytest.raises(NotImplementedError, match=r"expected padding on the left .* got row 1"):
            model(ids[:, :1], attention_mask=after, past_key_values=cache)
        other = torch.ones(1, 1, 60, 60, dtype=torch.bool, device=where).tril()
        with pytest.raises(NotImplementedError, match="attention_mask: expected causal order"):
            model(ids, attention_mask=other, past_key_values=StrataCache(model.config, **WIDE))
        cache.reset()
        model(prompt(3, 20).to(where), past_key_values=cache)
        with pytest.raises(ValueError, match="3 rows as before, got 2"):
            model(ids, past_key_values=cache)


def test_which_windows_are_left_to_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make("gemma3")
    assert StrataCache(model.config, budget=1.0).plain_layers == {0: f"sliding window of {W}"}
    assert StrataCache(model.config, budget_bytes=1 << 22).plain_layers == {0: f"sliding window of {W}"}
    monkeypatch.setattr(window, "LEAST", 256)
    assert StrataCache(model.config).plain_layers == {0: f"sliding window of {W}"}
    chunked = Llama4TextConfig(**SIZES, head_dim=32, attention_chunk_size=512, num_local_experts=2)
    chunked._attn_implementation = "sdpa"
    with pytest.warns(UserWarning, match="compresses no layer of this model: chunked attention of 512"):
        cache = StrataCache(chunked)
    assert not cache.window_layers
    assert set(cache.plain_layers.values()) == {"chunked attention of 512"}
