"""First prompts of layers with a sliding window that are stored in groups, against layers stored one by one."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from transformers import AutoModelForCausalLM, DynamicCache, Gemma2Config, Gemma3TextConfig, MistralConfig

from hf_model import SIZES, greedy, prompt, sharpen
from kvstrata.hf import StrataCache, prompts, weights, window, window_prompts, window_rings, window_step, window_warmup
from kvstrata.hf.calibrate import calibrate
from kvstrata.hf.guard import Guard, WindowGuard
from kvstrata.hf.rope import frequencies
from kvstrata.hf.window import WindowLayer
from kvstrata.hf.window_rings import WindowRings

LAYERS, W = 5, 48
SMALL = dict(budget=0.3, recent_tokens=16, page_tokens=16)
SLIDING, FULL = "sliding_attention", "full_attention"
FAMILIES: dict[str, Any] = {
    "mistral": lambda sizes: MistralConfig(**sizes, head_dim=32, sliding_window=W),
    "gemma3": lambda sizes: Gemma3TextConfig(
        **sizes, head_dim=32, sliding_window=W, layer_types=[SLIDING, SLIDING, FULL, SLIDING, FULL]
    ),
    "gemma2": lambda sizes: Gemma2Config(**sizes, head_dim=32, sliding_window=W, attn_logit_softcapping=2.0),
}
WINDOWS = {"mistral": 5, "gemma3": 3, "gemma2": 3}


@pytest.fixture(autouse=True)
def short_windows_without_guard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(window, "LEAST", 32)
    for kind in (Guard, WindowGuard):
        monkeypatch.setattr(kind, "begin", lambda *given: None)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def where(request: pytest.FixtureRequest) -> str:
    """Device of a test that runs on a CPU and, where there is one, on a GPU."""
    return request.param


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Layers of each group that was stored."""
    sizes: list[int] = []
    finish = window_prompts.Group.finish
    monkeypatch.setattr(
        window_prompts.Group, "finish", lambda self, *given: (sizes.append(len(self.layers)), finish(self, *given))[1]
    )
    return sizes


def make(name: str, where: str = "cpu", **sizes: int) -> Any:
    torch.manual_seed(0)
    config = FAMILIES[name](SIZES | dict(num_hidden_layers=LAYERS) | sizes)
    eager = "eager" if name == "gemma2" else "sdpa"
    return sharpen(AutoModelForCausalLM.from_config(config, attn_implementation=eager).eval()).to(where)


def one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(window_prompts, "group_of", lambda *given: 1)


MASKS = {"none": (), "left": ((1, 0, 9), (2, 0, 70)), "right": ((0, 90, None), (1, 0, 5), (1, 99, None))}


def fill(model: Any, padding: str, columns: int, **options: Any) -> StrataCache:
    """Prompt of three rows; ``padding`` names `MASKS`."""
    where = model.device
    mask = torch.ones(3, columns, dtype=torch.long, device=where)
    for row, begin, end in MASKS[padding]:
        mask[row, begin:end] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    cache = StrataCache(model.config, **SMALL | options)
    with torch.no_grad():
        model(prompt(3, columns).to(where), attention_mask=mask, position_ids=positions, past_key_values=cache)
    return cache


def windows(cache: StrataCache) -> list[WindowLayer]:
    return [layer for layer in cache.layers if isinstance(layer, WindowLayer)]


def everything(cache: StrataCache) -> list[Any]:
    """Tensors and numbers of all windows."""
    return [x for layer in windows(cache) for x in (*layer.tensors().values(), layer.table, layer.numbers())]


def same(ours: StrataCache, wanted: StrataCache) -> None:
    for a, b in zip(everything(ours), everything(wanted), strict=True):
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


@pytest.mark.parametrize("name", list(FAMILIES))
@pytest.mark.parametrize("padding", list(MASKS))
@pytest.mark.parametrize("options", [{}, {"balance": False}, {"budget": 0.6, "dtype": torch.float32}], ids=str)
def test_groups_are_stored_bit_for_bit_as_one_by_one(
    name: str, padding: str, options: dict[str, Any], where: str, groups: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All layers, then layers that are no more than two in a group."""
    model, made = make(name, where), []
    for most in (None, 2, 1):
        if most is not None:
            monkeypatch.setattr(window_prompts, "group_of", lambda left, *given, most=most: min(left, most))
        made.append(fill(model, padding, 130, **options))
    total = WINDOWS[name]
    assert groups == [total, *([2] * (total // 2) + [1] * (total % 2)), *[1] * total]
    same(made[0], made[2])
    same(made[1], made[2])
    assert all(layer.rows == 3 for layer in windows(made[0]))


@pytest.mark.parametrize("columns", [1, 3, 15, 16, 17, 30, W, 100])
@pytest.mark.parametrize("padding", ["none", "left"])
def test_prompts_of_any_length(columns: int, padding: str, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer tokens than the tail, none in a row, few enough for the balance of the weights."""
    model = make("mistral", where)
    ours = fill(model, padding, columns)
    one_by_one(monkeypatch)
    same(ours, fill(model, padding, columns))


def test_short_prompts_balance_each_layer_by_its_own_weights(where: str) -> None:
    model = make("mistral", where)
    for i, layer in enumerate(model.model.layers):
        layer.self_attn.k_proj.weight.data[i::7] *= 64
    rope = frequencies(model.config, 32, SLIDING)
    own = [weights.balance_of(layer.self_attn, 2, 32, rope, False) for layer in model.model.layers]
    assert len({tuple(x.flatten().tolist()) for x in own}) == LAYERS
    for layer, expected in zip(windows(fill(model, "none", 12)), own, strict=True):
        assert torch.equal(layer.calibration.balance, expected.expand(3, -1, -1))


def test_prompts_balance_only_heads_that_gain_much(where: str) -> None:
    """The pages of all tokens have one format."""
    model = make("mistral", where)
    for layer in model.model.layers:
        layer.self_attn.k_proj.weight.data.view(2, 32, -1)[0, [15, 31]] *= 3  # a pair of the first head, a little
        layer.self_attn.k_proj.weight.data.view(2, 32, -1)[1, [15, 31]] *= 64
    for layer in windows(fill(model, "none", 130)):
        assert (layer.calibration.balance[:, 0] == 1).all()
        assert (layer.calibration.balance[:, 1, 15] > 1).all()


def test_rows_for_the_centre_are_kept_although_the_window_is_shorter(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make("mistral", where, max_position_embeddings=2048)
    stored: list[int] = []
    fix = window.RowCalibration.fix_centres
    monkeypatch.setattr(
        window.RowCalibration,
        "fix_centres",
        lambda self, *given: (stored.append(given[1].shape[2]), fix(self, *given))[1],
    )
    ours = fill(model, "none", 1100)
    assert stored == [1024]
    one_by_one(monkeypatch)
    same(ours, fill(model, "none", 1100))


def test_a_calibration_is_adopted_by_every_layer_of_a_group(where: str, groups: list[int]) -> None:
    model = make("gemma3", where)
    made = calibrate(model, prompt(1, 90, seed=7).to(where))
    cache = fill(model, "left", 130, calibration=made)
    assert groups == [3]
    for layer, given in zip(windows(cache), made.windows, strict=True):
        assert torch.equal(layer.calibration.balance[1].cpu(), given.balance.cpu())
        assert torch.equal(layer.calibration.centre[2].cpu(), given.centre.cpu())


def test_a_mask_that_is_changed_in_place_is_read_again(where: str) -> None:
    """Layers of one forward share what the first of them read, forwards do not."""
    model, ids = make("mistral", where), prompt(1, 60).to(where)
    column = torch.arange(60, device=where)
    causal = (column <= column.view(-1, 1)) & (column > column.view(-1, 1) - W)
    mask = causal[None, None].clone()
    cache = StrataCache(model.config, **SMALL)
    for padding in (0, 5):
        mask[..., :padding] = False
        cache.reset()
        with torch.no_grad():
            model(ids, attention_mask=mask, past_key_values=cache)
        assert {tuple(layer.counts.lengths) for layer in windows(cache)} == {(60 - padding,)}


def test_large_centre_tables_are_made_in_parts(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make("mistral", where)
    ours = fill(model, "left", 130)
    monkeypatch.setattr("kvstrata.hf.window_rows.VALUES", 1)
    same(ours, fill(model, "left", 130))


def test_a_group_does_not_read_what_the_model_wrote_later(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that is compiled with CUDA graphs writes to its memory again."""
    model = make("mistral", where)
    one_by_one(monkeypatch)
    wanted = fill(model, "left", 130)
    monkeypatch.setattr(window_prompts, "group_of", prompts.group_of)
    put = window_prompts.Group.put

    def overwritten(self: Any, layer: Any, call: Any, given: Any) -> None:
        put(self, layer, call, given)
        for x in (call.query, call.key, call.value):
            x.fill_(torch.nan)

    monkeypatch.setattr(window_prompts.Group, "put", overwritten)
    same(fill(model, "left", 130), wanted)


@pytest.mark.parametrize("name", list(FAMILIES))
def test_layers_of_a_group_go_their_own_ways_afterwards(name: str, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps, a second prompt, crops, other rows, copies and a reset."""
    model, out = make(name, where), []
    for grouped in (True, False):
        if not grouped:
            one_by_one(monkeypatch)
        cache = StrataCache(model.config, **SMALL, max_batch=4, capture=False)
        tokens = greedy(model, prompt(2, 90).to(where), cache, new=30)
        cache.crop(-3)
        cache.reorder_cache(torch.tensor([1, 0]))
        twin = copy.deepcopy(cache)
        tokens = greedy(model, torch.cat([tokens[[1, 0]][:, :-4], prompt(2, 60, seed=3).to(where)], 1), cache, new=5)
        cache.batch_repeat_interleave(2)
        tokens = greedy(model, tokens.repeat_interleave(2, 0), cache, new=5)
        state = everything(cache)
        cache.reset()
        first = greedy(model, prompt(2, 90).to(where), cache, new=5)
        out.append((tokens, state, everything(twin), first, everything(cache)))
    for a, b in zip(*out, strict=True):
        pairs = zip(a, b, strict=True) if isinstance(a, list) else [(a, b)]
        assert all(torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y for x, y in pairs)


def test_models_without_their_last_layers_and_forwards_by_hand(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last layer of the config never comes: the end of the forward stores, or the next use of the cache."""
    model = make("mistral", where)
    whole = fill(model, "none", 100)
    del model.model.layers[3:]
    cut = fill(model, "none", 100)
    assert [layer.pages.numel() > 0 for layer in windows(cut)] == [True, True, True, False, False]
    monkeypatch.setattr(StrataCache, "end_forward", lambda self: None)
    by_hand = {
        "memory": lambda cache: cache.memory(),
        "copy": copy.deepcopy,
        "crop": lambda cache: cache.crop(0),
        "rows": lambda cache: cache.reorder_cache(torch.tensor([0, 1, 2])),
        "save": lambda cache: cache.save(tmp_path / "cut.safetensors"),
    }
    for use in by_hand.values():
        cache = fill(model, "none", 100)
        assert not windows(cache)[0].pages.numel()
        use(cache)
        for ours, expected in zip(windows(cache)[:3], windows(whole), strict=False):
            assert torch.equal(ours.pages, expected.pages)
    cache, ids = fill(model, "none", 100, budget=0.6, dtype=torch.float32), prompt(3, 100).to(where)
    ids = torch.cat([ids, prompt(3, 20, seed=5).to(where)], 1)
    with torch.no_grad():
        given = model(ids[:, 100:], past_key_values=cache).logits
        expected = model(ids, past_key_values=DynamicCache(config=model.config)).logits[:, 100:]
    assert (given - expected).norm() < 0.02 * expected.norm()


def test_a_group_that_cannot_be_stored_is_reported_until_reset(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make("mistral", where)
    cache, ids = StrataCache(model.config, **SMALL), prompt(1, 100).to(where)

    def fails(self: Any, *given: Any) -> None:
        raise torch.OutOfMemoryError("as asked for")

    for cut in (False, True):
        if cut:
            del model.model.layers[3:]
        with monkeypatch.context() as patched, torch.no_grad():
            patched.setattr(WindowRings, "_pack", fails)
            with pytest.raises(torch.OutOfMemoryError):
                model(ids, past_key_values=cache)
        with torch.no_grad(), pytest.raises(RuntimeError, match="one that was interrupted"):
            model(ids, past_key_values=cache)
        cache.reset()
        with torch.no_grad():
            model(ids, past_key_values=cache)
        assert windows(cache)[0].pages.any()
        cache.reset()


def test_a_group_that_is_lost_after_its_forward_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make("mistral")
    del model.model.layers[3:]
    monkeypatch.setattr(StrataCache, "end_forward", lambda self: None)
    cache, ids = fill(model, "none", 100), prompt(3, 5)

    def fails(self: Any, *given: Any) -> None:
        raise torch.OutOfMemoryError("as asked for")

    with monkeypatch.context() as patched:
        patched.setattr(WindowRings, "_pack", fails)
        with pytest.raises(torch.OutOfMemoryError):
            cache.memory()
    for use in (lambda: cache.memory(), lambda: model(ids, past_key_values=cache), lambda: copy.deepcopy(cache)):
        with pytest.raises(RuntimeError, match=r"whose prompt could not be stored \(as asked for\); reset\(\)"):
            use()
    cache.reset()
    with torch.no_grad():
        model(ids, past_key_values=cache)
    assert cache.memory().total


def test_a_layer_with_more_heads_is_in_a_group_of_its_own(
    where: str, groups: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make("mistral", where)
    other = model.model.layers[2].self_attn
    other.num_key_value_groups = 1
    other.k_proj, other.v_proj = (torch.nn.Linear(64, 128, bias=False, device=where) for _ in range(2))
    monkeypatch.setattr(window_prompts, "group_of", lambda left, *given: left)
    ours = fill(model, "left", 130)
    assert groups == [2, 1, 2]
    one_by_one(monkeypatch)
    same(ours, fill(model, "left", 130))
    assert [layer.pages.shape[1] for layer in windows(ours)] == [2, 2, 4, 2, 2]


@pytest.mark.parametrize("plain", [0, 2, 4])
def test_a_layer_that_is_left_plain_leaves_the_others_in_groups(
    plain: int, groups: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever it is, the first and the last of the others are known as such."""
    misfit = WindowLayer.misfit
    monkeypatch.setattr(
        WindowLayer, "misfit", lambda self, *given: "its shape" if self.index == plain else misfit(self, *given)
    )
    monkeypatch.setattr(window_prompts, "group_of", lambda left, *given: left)
    cache = fill(make("mistral"), "left", 100)
    assert list(cache.plain_layers) == [plain]
    assert groups in ([4], [2, 2], [3, 1])
    assert all(layer.pages.any() for layer in windows(cache))


def test_longer_chunks_of_queries_give_the_same_output(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks are an order of work: queries of a prompt and of a later turn, on a GPU as many as fill it."""
    model, ids = make("gemma3", where), prompt(2, 300).to(where)
    out = []
    for each in (16, 1 << 14):
        monkeypatch.setattr(window.masks, "QUERIES", each)
        monkeypatch.setattr(window, "GPU_QUERIES", each)
        monkeypatch.setattr(window.masks.chunks, "__defaults__", (each,))
        cache = StrataCache(model.config, **SMALL)
        with torch.no_grad():
            parts = [model(ids[:, part], past_key_values=cache).logits for part in (slice(200), slice(200, 300))]
        out.append(torch.cat(parts, 1))
    assert (out[0] - out[1]).norm() < 1e-3 * out[1].norm()


def test_warmup_asks_for_the_kernels_of_the_first_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once ahead of time and once in each first prompt; the cache stays empty, and slots have one dtype."""
    asked: list[Any] = []
    slots: set[torch.dtype] = set()

    def load_ahead(wanted: Any, *given: Any) -> None:
        asked.append(wanted)

    def stored(*given: Any, store: Any) -> None:
        slots.add(given[3].dtype)
        store(*given)

    monkeypatch.setattr(window_warmup, "backends", SimpleNamespace(resolve=lambda *given: "cuda"))
    monkeypatch.setattr(window_warmup, "jit", SimpleNamespace(arch_of=lambda device: "sm_90", load_ahead=load_ahead))
    for module in (window_rings, window_step):
        monkeypatch.setattr(module, "store_packed", partial(stored, store=module.store_packed))
    for name in ("mistral", "gemma2"):
        model = make(name).half()
        cache = StrataCache(model.config, **SMALL)
        cache.warmup(model, rows=2, progress=False)
        assert cache.get_seq_length() == 0
        assert not any(layer.is_initialized for layer in windows(cache))
        greedy(model, prompt(2, 60), cache, new=3)
        assert len(asked) == 1 + WINDOWS[name]
        assert all(x == asked[0] for x in asked)
        assert any("quantize_prompt" in entry for _, entry in asked[0])
        assert any("decode_packed" in entry for _, entry in asked[0])
        asked.clear()
    assert slots == {torch.int32}


def test_warmup_without_sizes_or_with_others_does_nothing() -> None:
    """A head_dim that cannot be packed, and heads that the config does not tell."""
    torch.manual_seed(0)
    sizes = SIZES | dict(hidden_size=80)
    model = AutoModelForCausalLM.from_config(MistralConfig(**sizes, head_dim=20, sliding_window=W)).eval()
    cache = StrataCache(model.config, **SMALL)
    cache.warmup(model)
    with torch.no_grad():
        model(prompt(1, 60), past_key_values=cache)
    assert not windows(cache)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 3])
def test_nothing_is_compiled_after_warmup(rows: int, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With an empty disk cache, on a GPU: prompts of any length, in groups and alone, and steps."""
    import triton

    from kvstrata.jit import compiler

    later: list[str] = []

    def note(*given: Any, **options: Any) -> None:
        later.append(str(options.get("repr") or given))

    model = make("mistral", "cuda", max_position_embeddings=4096).bfloat16()
    StrataCache(model.config, **SMALL).warmup(model, rows=rows, progress=False)
    monkeypatch.setattr(compiler, "_run_nvrtc", lambda *arguments: pytest.fail(f"compiled later: {arguments[1]}"))
    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", note)
    for columns in (40, 1500):
        for most in (None, 1):
            if most:
                one_by_one(monkeypatch)
            cache = StrataCache(model.config, **SMALL)
            greedy(model, prompt(rows, columns).cuda(), cache, new=5)
    assert not later
