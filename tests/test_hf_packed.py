"""`StrataCache(format=...)`: packed pages as a transformers cache."""

from __future__ import annotations

import copy
import io
import warnings

import pytest
import torch

pytest.importorskip("transformers")
from transformers import DynamicCache

from hf_model import greedy, make, prompt
from kvstrata.hf import StrataCache, packed_layer
from kvstrata.hf.packed import PackedCache
from kvstrata.hf.packed_op import Layer
from kvstrata.quant.calibration import Calibration, LayerCalibration

PAGES = dict(page_tokens=16, max_tokens=160)


def packed(model, format: str = "K8V8", **options) -> PackedCache:
    return StrataCache(model.config, format=format, **PAGES | options)


def padded(columns: int = 40) -> tuple[torch.Tensor, torch.Tensor]:
    ids, mask = prompt(3, columns), torch.ones(3, columns, dtype=torch.long)
    mask[1, :9] = 0
    mask[2, : columns - 1] = 0  # a single token
    return ids, mask


@torch.no_grad()
def forwards(model, cache, ids: torch.Tensor, sizes: tuple[int, ...], mask: torch.Tensor | None = None) -> torch.Tensor:
    """Logits of all columns, given in forwards of these sizes."""
    parts, end = [], 0
    for size in sizes:
        start, end = end, end + size
        given = {} if mask is None else dict(attention_mask=mask[:, :end])
        if mask is not None:
            given["position_ids"] = (mask[:, :end].cumsum(1) - 1).clamp(min=0)[:, start:]
        parts.append(model(input_ids=ids[:, start:end], past_key_values=cache, **given).logits)
    assert end == ids.shape[1]
    return torch.cat(parts, 1)


def error(given: torch.Tensor, expected: torch.Tensor, real: torch.Tensor | None = None) -> float:
    """Relative error of logits, those of padding left out."""
    difference, expected = given - expected, expected.clone()
    if real is not None:
        difference, expected = difference[real], expected[real]
    assert bool(difference.isfinite().all())
    return float(difference.norm() / expected.norm())


@pytest.mark.parametrize("name", ["llama", "llama-mqa", "qwen2", "qwen3", "gemma2", "gpt-oss"])
def test_logits_are_those_of_a_dynamic_cache(name: str) -> None:
    """A prompt is exact, a prompt behind it and steps are as near as the format; padding in all rows but one."""
    model, (ids, mask) = make(name), padded(72)
    sizes, real = (40, 20, *[1] * 12), mask.bool()
    expected = forwards(model, DynamicCache(config=model.config), ids, sizes, mask)
    wide, narrow = (forwards(model, packed(model, format), ids, sizes, mask) for format in ("K8V8", "K4V4"))
    first = real.clone()
    first[:, 40:] = False
    assert error(wide, expected, first) < 1e-5
    assert error(wide, expected, real) < 0.02
    assert error(wide, expected, real) < 0.5 * error(narrow, expected, real) < 0.25


@pytest.mark.parametrize(("name", "capture"), [("llama", False), ("llama", True), ("gpt-oss", False)])
def test_a_first_prompt_of_one_token_is_exact(name: str, capture: bool) -> None:
    """With and without a mask, padding in one row, and after all columns were removed; the next token is a step."""
    model, ids = make(name), prompt(2, 2)
    some = torch.tensor([[1, 1], [0, 1]])
    for mask in (None, torch.ones_like(ids), some):
        expected = forwards(model, DynamicCache(config=model.config), ids, (1, 1), mask)
        cache = packed(model, "K2V2", capture=capture)
        for _ in range(2):
            given = forwards(model, cache, ids, (1, 1), mask)
            real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
            first = real.clone()
            first[:, 1] = False
            assert error(given, expected, first) < 1e-5
            assert error(given, expected, real) > 1e-3
            cache.crop(-2)


@pytest.mark.parametrize(
    ("name", "capture"), [("llama", False), ("llama", True), ("gemma2", False), ("gpt-oss", False)]
)
@pytest.mark.parametrize("size", [1, 3])
def test_first_tokens_behind_padding_are_exact(name: str, capture: bool, size: int) -> None:
    """Of a row whose first forward has only padding, in a step or a short chunk, whatever tokens other rows have."""
    model, ids = make(name), prompt(3, 20 + 4 * size)
    mask = torch.ones_like(ids)
    mask[1, :20] = 0
    mask[2, : 20 + size] = 0
    sizes = (20, *[size] * 4)
    expected = forwards(model, DynamicCache(config=model.config), ids, sizes, mask)
    cache = packed(model, "K2V2", capture=capture)
    for _ in range(2):
        given = forwards(model, cache, ids, sizes, mask)
        for row in (1, 2):
            first = torch.zeros_like(mask, dtype=torch.bool)
            first[row, 20 + (row - 1) * size :][:size] = True
            assert error(given, expected, first) < 1e-5
            later = mask.bool() & ~first
            later[:row], later[row + 1 :] = False, False
            assert error(given, expected, later) > 1e-3
        cache.reset()


@pytest.mark.parametrize("capture", [False, True])
def test_first_tokens_after_a_crop_are_exact(device: torch.device, capture: bool) -> None:
    """The step of a row that has lost all of its tokens is no replay of the graph, which knows of no such row."""
    model, ids = make("llama").to(device), prompt(2, 40).to(device)
    mask = torch.ones_like(ids)
    mask[1, :30] = 0
    expected = forwards(model, DynamicCache(), ids, (20, *[1] * 20), mask)[1, 30]
    cache = packed(model, "K2V2", capture=capture)
    for _ in range(2):
        forwards(model, cache, ids[:, :36], (20, *[1] * 16), mask[:, :36])
        assert (cache.forward.runner is not None) == capture
        cache.crop(-6)
        assert not cache.state.all_begun
        given = dict(attention_mask=mask[:, :31], position_ids=torch.tensor([[30], [0]], device=device))
        with torch.no_grad():
            torch.testing.assert_close(
                model(ids[:, 30:31], past_key_values=cache, **given).logits[1, 0], expected, rtol=1e-4, atol=1e-4
            )
        assert cache.state.all_begun
        assert cache.forward.runner is None
        cache.crop(-31)


@pytest.mark.parametrize("options", [dict(), dict(num_beams=3), dict(prompt_lookup_num_tokens=4)])
def test_generate_finds_texts_as_likely_as_with_a_dynamic_cache(options: dict) -> None:
    """Left padding; greedy, by beams and by drafts. Texts may differ where two are equally likely."""
    model, ids = make("llama"), prompt(2, 40)
    mask = torch.ones_like(ids)
    mask[1, :9] = 0
    if "prompt_lookup_num_tokens" in options:
        ids, mask = ids[:1].repeat(1, 2), torch.ones(1, 80, dtype=torch.long)
    cache = packed(model, max_batch=6)
    scores = []
    for past in (cache, None):
        texts = greedy(model, ids, past, new=12, attention_mask=mask, **options)
        whole = torch.cat([mask, torch.ones(len(ids), 12, dtype=torch.long)], 1)
        positions = (whole.cumsum(1) - 1).clamp(min=0)
        with torch.no_grad():
            logits = model(texts, attention_mask=whole, position_ids=positions).logits.log_softmax(-1)
        scores.append(logits[:, ids.shape[1] - 1 : -1].gather(2, texts[:, ids.shape[1] :, None]).sum((1, 2)))
    torch.testing.assert_close(*scores, rtol=0, atol=0.3)
    assert type(cache) is PackedCache
    assert cache.get_seq_length() == ids.shape[1] + 11


@pytest.mark.parametrize("sizes", [(24, *[1] * 16), (24, 16), (24, 2, 7, 7), (3, 37), (24, 1, 15), (17, 23)])
def test_columns_may_come_in_any_parts(sizes: tuple[int, ...]) -> None:
    """Pages end up the same, whatever padding is among the new columns: bytes depend on tokens alone."""
    model, ids = make("llama"), prompt(3, 40)
    mask = torch.ones_like(ids)
    mask[1, :30] = 0
    mask[2, 26:33] = 0  # between tokens
    mask[2, 38:] = 0
    expected = forwards(model, DynamicCache(), ids, (40,), mask)
    cache = packed(model)
    given = forwards(model, cache, ids, sizes, mask)
    assert error(given, expected, mask.bool()) < 0.02
    assert cache.state.seq_lens.tolist() == mask.sum(1).tolist()
    whole = packed(model)
    forwards(model, whole, ids, (40,), mask)
    first, other = whole.layers[0].pages, cache.layers[0].pages  # K and V of the first layer depend on nothing before
    assert torch.equal(first, other)
    assert torch.equal(whole.state.real, cache.state.real)


def test_a_padded_row_is_that_of_a_single_run() -> None:
    model, (ids, mask) = make("llama"), padded()
    batch = forwards(model, packed(model), ids, (30, *[1] * 10), mask)
    for row in range(3):
        start = 40 - int(mask[row].sum())
        first, some = min(start, 29), slice(row, row + 1)  # a token that came in a step does so here
        alone = forwards(model, packed(model), ids[some, first:], (30 - first, *[1] * 10), mask[some, first:])
        torch.testing.assert_close(batch[some, start:], alone[:, start - first :], rtol=1e-3, atol=1e-3)


def test_crop_removes_columns() -> None:
    """Of tokens and of padding; what follows is as if they had not been."""
    model, ids = make("llama"), prompt(2, 40)
    mask = torch.ones_like(ids)
    mask[1, 33:36] = 0
    cache, other = packed(model, "K4V4"), packed(model, "K4V4")
    forwards(model, cache, ids, (30, 10), mask)
    cache.crop(0)
    assert cache.state.seq_lens.tolist() == [40, 37]
    cache.crop(-8)
    assert cache.state.seq_lens.tolist() == [32, 32]
    assert cache.get_seq_length() == 32
    forwards(model, other, ids[:, :32], (30, 2))
    with torch.no_grad():
        a, b = (model(ids[:, :1], past_key_values=x).logits for x in (cache, other))
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="tokens_to_remove"):
        cache.crop(3)


def test_rows_are_reordered_repeated_and_selected() -> None:
    model, (ids, mask) = make("llama"), padded()
    cache, token = packed(model, "K4V4", max_batch=6), prompt(6, 1, seed=5)
    forwards(model, cache, ids, (40,), mask)

    def step(cache, ids: torch.Tensor) -> torch.Tensor:
        mask = torch.cat([cache.state.real[:, :40], torch.ones(len(ids), 1, dtype=torch.bool)], 1)
        given = dict(attention_mask=mask, position_ids=cache.state.seq_lens[:, None])
        with torch.no_grad():
            return model(ids, past_key_values=copy.deepcopy(cache), **given).logits

    expected = [step(cache, token[i : i + 1].expand(3, -1)) for i in range(6)]  # of every row with every token
    pointers = [layer.pages.data_ptr() for layer in cache.layers]
    cache.reorder_cache(torch.tensor([1, 0, 1]))
    given = step(cache, token[:3])
    for i, row in enumerate([1, 0, 1]):
        torch.testing.assert_close(given[i], expected[i][row], rtol=1e-4, atol=1e-4)
    cache.batch_repeat_interleave(2)
    given = step(cache, token)
    for i, row in enumerate([1, 1, 0, 0, 1, 1]):
        torch.testing.assert_close(given[i], expected[i][row], rtol=1e-4, atol=1e-4)
    cache.batch_select_indices(torch.tensor([False, False, True, False, True, False]))
    given = step(cache, token[:2])
    for i, row in enumerate([0, 1]):
        torch.testing.assert_close(given[i], expected[i][row], rtol=1e-4, atol=1e-4)
    assert [layer.pages.data_ptr() for layer in cache.layers] == pointers
    with pytest.raises(ValueError, match="max_batch: expected at least 8 rows, got 6"):
        cache.batch_repeat_interleave(4)
    with pytest.raises(IndexError, match="beam_idx: expected rows from 0 to 1, got 2"):
        cache.reorder_cache(torch.tensor([0, 2]))


def test_a_forward_that_fails_half_way_is_undone() -> None:
    model, ids = make("llama"), prompt(2, 30)
    broken, whole = packed(model), packed(model)
    for cache in (broken, whole):
        forwards(model, cache, ids, (30,))
    hook = model.model.layers[1].register_forward_pre_hook(lambda *args: 1 / 0)
    with torch.no_grad(), pytest.raises(ZeroDivisionError):
        model(ids[:, :3], past_key_values=broken)
    hook.remove()
    a, b = (forwards(model, cache, ids[:, :1], (1,)) for cache in (broken, whole))
    assert torch.equal(a, b)
    assert broken.get_seq_length() == 31
    assert broken.state.seq_lens.tolist() == [31, 31]


def test_errors_name_the_argument() -> None:
    model, ids = make("llama"), prompt(2, 30)
    for name, value in dict(budget=0.25, budget_bytes=1000, tiers=["K4V4"], recent_tokens=16, dtype=None).items():
        with pytest.raises(TypeError, match=f"{name}: expected to be left out with format='K4V4', got"):
            StrataCache(model.config, format="K4V4", **{name: value})
    with pytest.raises(TypeError, match=r"budget: expected to be left out with format='K4V4', got 0\.5"):
        StrataCache(model.config, 0.5, format="K4V4")
    for bad in ("K5V4", "int4", 4):
        with pytest.raises((ValueError, TypeError)):
            StrataCache(model.config, format=bad)
    with pytest.raises(ValueError, match="page_tokens"):
        StrataCache(model.config, format="K4V4", page_tokens=24)
    with pytest.raises(TypeError, match="config"):
        StrataCache("llama", format="K4V4")
    short = packed(model, max_tokens=31)  # whole pages: 32
    forwards(model, short, ids, (30,))
    with pytest.raises(ValueError, match="max_tokens: expected at least 33, which the batch has now, got 32"):
        forwards(model, short, ids[:, :3], (3,))
    forwards(model, short, ids[:, :2], (1, 1))
    with pytest.raises(ValueError, match="past_key_values: expected 2 rows as before, got 1"):
        forwards(model, packed_with(model, ids), ids[:1, :1], (1,))
    calibration = Calibration([LayerCalibration(torch.ones(3, 32))] * 2)
    with pytest.raises(ValueError, match="calibration"):
        forwards(model, packed(model, calibration=calibration), ids, (30,))


def packed_with(model, ids: torch.Tensor, mask: torch.Tensor | None = None, **options) -> PackedCache:
    cache = packed(model, **options)
    forwards(model, cache, ids, (ids.shape[1],), mask)
    return cache


def test_masks_of_another_kind_are_refused() -> None:
    model, (ids, mask) = make("llama"), padded(30)
    cache = packed_with(model, ids, mask)
    more = torch.cat([mask, torch.ones(3, 1, dtype=torch.long)], 1)
    assert cache.matches(more)
    more[0, 3] = 0
    assert not cache.matches(more)
    with torch.no_grad(), pytest.raises(NotImplementedError, match="attention_mask"):
        model(ids[:, :1], attention_mask=more, past_key_values=cache)
    with torch.no_grad(), pytest.raises(NotImplementedError, match="position_ids"):
        model(ids, position_ids=torch.arange(30)[None] % 10, past_key_values=packed(model))
    assert cache.get_seq_length() == 30


def test_copies_and_pickles_are_independent() -> None:
    model, ids = make("llama"), prompt(2, 30)
    cache = packed_with(model, ids)
    file = io.BytesIO()
    torch.save(cache, file)
    file.seek(0)
    twins = [copy.copy(cache), copy.deepcopy(cache), torch.load(file, weights_only=False)]
    expected = forwards(model, cache, ids[:, :3], (1, 1, 1))
    for twin in twins:
        assert twin.get_seq_length() == 30
        assert torch.equal(forwards(model, twin, ids[:, :3], (1, 1, 1)), expected)


def test_memory_counts_all_tensors_and_repr_names_the_format() -> None:
    model, (ids, mask) = make("llama"), padded(40)
    cache = packed(model, "K4V2")
    assert repr(cache) == "StrataCache(2 layers, format='K4V2', max_tokens=160)"
    assert cache.memory().total == 0
    forwards(model, cache, ids, (40,), mask)
    memory = cache.memory()
    held = [layer.pages for layer in cache.layers] + [x for x in vars(cache.state).values() if torch.is_tensor(x)]
    held += [x for layer in cache.layers for x in layer.calibration if x is not None]
    assert memory.total == sum(x.nbytes for x in held)
    assert memory.tokens == {"K4V2": (40 + 31 + 1) * 2 * 2}
    page = cache.fmt.page_bytes
    assert memory.tiers == {"K4V2": (3 + 2 + 1) * 2 * 2 * page}
    assert memory.slab_slack + memory.tiers["K4V2"] == memory.kinds["pages"] == 3 * 10 * 2 * 2 * page
    assert cache.decoding == "eager"
    cache.reset()
    assert cache.memory().total == cache.get_seq_length() == 0
    assert torch.equal(greedy(model, ids[:1], cache), greedy(model, ids[:1]))
    cache.warmup(model)


def test_layers_that_cannot_be_packed_stay_plain() -> None:
    model, ids = make("qwen2-mixed"), prompt(2, 40)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cache = packed(model)
        assert torch.equal(greedy(model, ids, cache), greedy(model, ids))
    assert cache.plain_layers == {1: "sliding window of 16"}
    assert cache.memory().kinds["plain_layers"] > 0
    assert not cache.is_compileable


def test_calibration_from_the_biases_of_a_model(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large biases of K, as Qwen2.5 has: 4 bits of K need the balance and the centre; a file gives the same."""
    model, ids = make("qwen2"), prompt(2, 50)
    with torch.no_grad():
        for layer in model.model.layers:
            bias = layer.self_attn.k_proj.bias.zero_().view(2, 32)
            bias[:, [14, 15, 30, 31]] = torch.tensor([-16.0, 16.0, 16.0, -16.0])  # channels that RoPE hardly turns
    sizes = (40, *[1] * 10)
    expected = forwards(model, DynamicCache(), ids, sizes)
    cache = packed(model, "K4V8")
    given = forwards(model, cache, ids, sizes)
    layers = [LayerCalibration(*layer.calibration) for layer in cache.layers]
    assert all(layer.balance is not None and layer.centre is not None for layer in layers)
    Calibration(layers).save(tmp_path / "calibration.safetensors")
    read = packed(model, "K4V8", calibration=tmp_path / "calibration.safetensors")
    assert torch.equal(forwards(model, read, ids, sizes), given)
    monkeypatch.setattr("kvstrata.hf.packed_layer.PackedLayer._calibrate", lambda *args: Layer())
    without = forwards(model, packed(model, "K4V8"), ids, sizes)
    assert error(given, expected) < 0.5 * error(without, expected)


def test_the_host_reads_columns_once_per_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers get the number of columns from the host: reading it from the device would synchronise."""
    model = make("llama")
    cache = StrataCache(model.config, format="K4V4", max_tokens=256, page_tokens=16)
    starts = []
    packed = packed_layer.strata_packed
    monkeypatch.setattr(
        packed_layer, "strata_packed", lambda *args, **given: (starts.append(given["start"]), packed(*args, **given))[1]
    )
    with torch.no_grad():
        for queries in (40, 30, 3, 1):
            model(prompt(2, queries), past_key_values=cache)
    assert starts == [0, 0, 40, 40, 70, 70, 73, 73]


def test_a_balance_by_weights_is_computed_once() -> None:
    from kvstrata.hf import weights

    module = make("llama").model.layers[0].self_attn
    first = weights.balance_of(module, 2, 32, (), None)
    assert weights.balance_of(module, 2, 32, (), None) is first
    with torch.no_grad():
        module.k_proj.weight[:16] *= 64
    after = weights.balance_of(module, 2, 32, (), None)
    assert not torch.equal(after, first)
