"""`kvstrata.hf` on tiny random models: against DynamicCache where nothing is compressed, against a cache that
dequantises where something is, and row by row against single runs where a batch is padded."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig

import kvstrata
from hf_model import EXACT, FAMILIES, SIZES, SMALL, dequantising, greedy, make, prompt
from kvstrata.cache import BudgetExceeded
from kvstrata.hf import StrataCache, mass
from kvstrata.hf.logits import Logits
from kvstrata.hf.mass import prompt_mass


@pytest.fixture
def reference(monkeypatch):
    """Run something over a cache that dequantises."""

    def run(job):
        with monkeypatch.context() as patch:
            patch.setattr(kvstrata, "decode_attention", dequantising)
            return job()

    return run


# Nothing compressed: DynamicCache


@pytest.mark.parametrize("name", FAMILIES)
def test_budget_one_is_dynamic_cache(name: str) -> None:
    model, ids = make(name), prompt(2, 40)
    expected = greedy(model, ids)
    cache = StrataCache(model.config, budget=1.0)
    assert torch.equal(greedy(model, ids, cache), expected)
    cache.tiered.check()
    assert cache.get_seq_length() == 63
    assert torch.equal(greedy(model, ids), expected), "the model is not what it was for other caches"


def test_sampling_is_dynamic_cache() -> None:
    model, ids = make("llama"), prompt(2, 30)
    runs = []
    for cache in (None, StrataCache(model.config, budget=None)):
        torch.manual_seed(7)
        runs.append(model.generate(ids, past_key_values=cache, max_new_tokens=20, do_sample=True, top_k=20))
    assert torch.equal(*runs)


def test_compiled_model() -> None:
    """Dynamo leaves its graph for the cache and comes back; the backend does not matter to that."""
    model, ids = make("llama"), prompt(2, 30)
    mask = torch.ones_like(ids)
    mask[1, :9] = 0
    expected = greedy(model, ids, StrataCache(model.config, **SMALL), attention_mask=mask, new=8)
    model.forward = torch.compile(model.forward, backend="eager")
    assert torch.equal(greedy(model, ids, StrataCache(model.config, **SMALL), attention_mask=mask, new=8), expected)
    torch._dynamo.reset()


def test_several_turns_on_one_cache() -> None:
    model = make("qwen3")
    caches = DynamicCache(config=model.config), StrataCache(model.config, budget=1.0)
    texts = [prompt(1, 30), prompt(1, 30)]
    for turn in range(3):
        texts = [greedy(model, text, cache, new=12) for text, cache in zip(texts, caches, strict=True)]
        assert torch.equal(*texts)
        texts = [torch.cat([text, prompt(1, 5 + 20 * turn, seed=turn)], 1) for text in texts]


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt-oss", "qwen2-mixed"])
def test_chunked_prefill(name: str) -> None:
    model, ids = make(name), prompt(2, 50)
    cache = StrataCache(model.config, budget=1.0)
    assert torch.equal(greedy(model, ids, cache, prefill_chunk_size=20), greedy(model, ids))


@pytest.mark.parametrize("padding", ["left", "right"])
def test_padding_without_compression(padding: str) -> None:
    """A forward over padded rows, then a decode step; logits as DynamicCache gives them, pads not stored."""
    model, ids = make("llama"), prompt(3, 30)
    lengths = [30, 7, 19]
    columns = torch.arange(30)
    mask = torch.stack([columns < n if padding == "right" else columns >= 30 - n for n in lengths]).long()
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    step = dict(
        input_ids=prompt(3, 2, seed=5),
        attention_mask=torch.cat([mask, torch.ones(3, 2, dtype=torch.long)], 1),
        position_ids=torch.tensor(lengths).unsqueeze(1) + torch.arange(2),
    )
    logits = []
    cache = StrataCache(model.config, budget=1.0)
    with torch.no_grad():
        for past in (DynamicCache(config=model.config), cache):
            first = model(ids, attention_mask=mask, position_ids=positions, past_key_values=past).logits
            logits.append((first[mask.bool()], model(**step, past_key_values=past).logits))
    for expected, given in zip(*logits, strict=True):
        torch.testing.assert_close(given, expected, atol=1e-5, rtol=1e-4)
    assert [cache.tiered.length(row) for row in range(3)] == [n + 2 for n in lengths]


# Compressed: a cache that dequantises


@pytest.mark.parametrize("name", FAMILIES)
def test_decode_equals_dequantising(name: str, reference) -> None:
    """As long as both hold the same. A K at the edge of a level may fall to either side of it, which is a row of its
    own from then on: no more than one row in a hundred, and no more to see of it than of a level."""
    model, ids = make(name), prompt(2, 60)
    following = prompt(2, 60, seed=2)

    def run() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        cache = StrataCache(model.config, **EXACT)
        with torch.no_grad():
            logits, held = [model(ids, past_key_values=cache).logits[:, -1:]], []
            for some in following.split([1, 1, 3, 1, 8, 1, 16, 20, *[1] * 9], 1):
                held.append(contents(cache.tiered))
                logits.append(model(some, past_key_values=cache).logits)
        counts = cache.tiered.memory().tokens
        assert sum(counts.values()) > counts["K32V32"] > 0, "nothing was compressed"
        cache.tiered.check()
        return logits, held

    (given, mine), (expected, theirs) = run(), reference(run)
    apart = [((x - y).abs().amax(1) > 1e-3).float().mean() for x, y in zip(mine, theirs, strict=True)]
    same = 1 + sum(bool(x == 0) for x in apart)
    torch.testing.assert_close(torch.cat(given[:same], 1), torch.cat(expected[:same], 1), atol=2e-4, rtol=1e-3)
    assert sum(x.shape[1] for x in given[:same]) >= 50, "of 61"
    torch.testing.assert_close(torch.cat(given, 1), torch.cat(expected, 1), atol=2e-3, rtol=1e-2)
    assert max(apart) < 0.01


def contents(cache: kvstrata.TieredCache) -> torch.Tensor:
    """All rows that it holds."""
    rows = [x for layer in range(cache.layers) for r in cache.requests for x in cache.gather(layer, r)[:2]]
    return torch.cat([x.flatten(0, 1) for x in rows])


def test_beams_equal_dequantising(reference) -> None:
    model, ids = make("llama"), prompt(2, 50)

    def tokens() -> torch.Tensor:
        return greedy(model, ids, StrataCache(model.config, **EXACT), num_beams=3, num_return_sequences=2, new=40)

    assert torch.equal(tokens(), reference(tokens))


def test_beams_without_compression() -> None:
    model, ids = make("qwen2-mixed"), prompt(2, 30)
    mask = torch.ones_like(ids)
    mask[1, :9] = 0
    options = dict(num_beams=3, new=30, attention_mask=mask)
    assert torch.equal(
        greedy(model, ids, StrataCache(model.config, budget=1.0), **options), greedy(model, ids, **options)
    )


@pytest.mark.parametrize("how", ["assistant", "lookup"])
@pytest.mark.parametrize("name", ["llama", "qwen2-mixed"])
def test_assisted_decoding(name: str, how: str, reference) -> None:
    model = make(name)
    ids = prompt(1, 20).repeat(1, 3)
    options = dict(prompt_lookup_num_tokens=4) if how == "lookup" else dict(assistant_model=make(name, seed=3))
    assert torch.equal(
        greedy(model, ids, StrataCache(model.config, budget=1.0), new=30, **options), greedy(model, ids, new=30)
    )

    def tokens() -> torch.Tensor:
        return greedy(model, ids, StrataCache(model.config, **EXACT), new=40, **options)

    assert torch.equal(tokens(), reference(tokens))


def test_crop_then_go_on(reference) -> None:
    """Rejected tokens leave no trace in what is read afterwards, padded rows included."""
    model, ids = make("llama"), prompt(2, 70)
    mask = torch.ones(2, 70, dtype=torch.long)
    mask[1, :25] = 0

    def logits(rejected: int) -> torch.Tensor:
        cache = StrataCache(model.config, **EXACT, policy="recency")
        with torch.no_grad():
            model(ids, attention_mask=mask, past_key_values=cache)
            if rejected:
                more = torch.cat([mask, torch.ones(2, rejected, dtype=torch.long)], 1)
                model(prompt(2, rejected, seed=9), attention_mask=more, past_key_values=cache)
                cache.crop(-rejected)
            assert cache.get_seq_length() == 70
            assert [cache.tiered.length(row, 1) for row in (0, 1)] == [70, 45]
            more = torch.cat([mask, torch.ones(2, 1, dtype=torch.long)], 1)
            return model(prompt(2, 1, seed=4), attention_mask=more, past_key_values=cache).logits

    torch.testing.assert_close(logits(3), reference(lambda: logits(3)), atol=2e-4, rtol=1e-3)
    torch.testing.assert_close(logits(3), logits(0), atol=2e-4, rtol=1e-3)
    cache = StrataCache(model.config)
    with pytest.raises(ValueError, match="tokens_to_remove"):
        cache.crop(3)


def test_padded_batch_equals_single_runs() -> None:
    model, lengths = make("llama"), [80, 33, 57]
    rows = [prompt(1, n, seed=n) for n in lengths]
    ids = torch.cat([torch.nn.functional.pad(row, (80 - row.shape[1], 0)) for row in rows])
    mask = (ids != 0).long()
    cache = StrataCache(model.config, **SMALL)
    batch = greedy(model, ids, cache, attention_mask=mask, new=40)
    for row, alone in enumerate(rows):
        own = StrataCache(model.config, **SMALL)
        assert torch.equal(greedy(model, alone, own, new=40)[0, -40:], batch[row, -40:])
        assert cache.tiered.length(row) == own.tiered.length(0) == lengths[row] + 39
        for layer in range(2):
            assert torch.equal(cache.tiered.tier_map(layer, row), own.tiered.tier_map(layer))
    cache.tiered.check()


def test_evicting_prompt_in_chunks(reference) -> None:
    model, ids = make("llama"), prompt(2, 90)

    def logits() -> torch.Tensor:
        cache = StrataCache(model.config, **EXACT | dict(budget=0.08), evict=True)
        with torch.no_grad():
            made = [model(some, past_key_values=cache).logits for some in ids.split([30, 40, 18, 1, 1], 1)]
        assert cache.tiered.gather(0)[0].shape[1] < 90
        return torch.cat(made, 1)

    torch.testing.assert_close(logits(), reference(logits), atol=2e-4, rtol=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_cuda_agrees_with_cpu(dtype: torch.dtype) -> None:
    """A random model of SmolLM2's shape, less deep: logits of prompt and decode steps through the fused path."""
    torch.manual_seed(0)
    shape = dict(hidden_size=576, intermediate_size=1536, num_attention_heads=9, num_key_value_heads=3, head_dim=64)
    config = LlamaConfig(**SIZES | shape | dict(num_hidden_layers=4))
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    ids, following = prompt(2, 500), prompt(2, 24, seed=2)

    def logits(device: str) -> torch.Tensor:
        model.to(device)
        options = dict(policy="recency", recent_tokens=32, page_tokens=16, tiers=["K4V4", "K3V3", "K2V2"])
        cache = StrataCache(model.config, budget=0.3, dtype=dtype, **options)
        with torch.no_grad():
            made = [model(ids.to(device), past_key_values=cache).logits[:, -1:]]
            for some in following.to(device).split([1, 1, 4, 1, 8, 1, *[1] * 8], 1):
                made.append(model(some, past_key_values=cache).logits)
        assert cache.tiered.memory().tokens["K2V2"] > 0
        return torch.cat(made, 1).cpu()

    expected, given = logits("cpu"), logits("cuda")
    # Queries and outputs are rounded to the cache's dtype on both sides; codes may differ where K was at an edge.
    assert (given - expected).abs().max() <= 16 * torch.finfo(dtype).eps * expected.std()


# Rows


def test_rows_are_selected_and_repeated() -> None:
    model, ids = make("qwen2-mixed"), prompt(3, 40)
    cache = StrataCache(model.config, **SMALL, max_batch=6)
    with torch.no_grad():
        model(ids, past_key_values=cache)
        before = [cache.tiered.gather(0, row)[0] for row in range(3)]
        cache.batch_select_indices(torch.tensor([2, 0]))
        cache.batch_repeat_interleave(3)
        for row, source in enumerate([2, 2, 2, 0, 0, 0]):
            assert torch.equal(cache.tiered.gather(0, row)[0], before[source])
        logits = model(ids[[2, 2, 2, 0, 0, 0], :1], past_key_values=cache).logits
        torch.testing.assert_close(logits[0], logits[2])
        cache.tiered.check()
        with pytest.raises(ValueError, match="max_batch: expected at least 12"):
            cache.batch_repeat_interleave(2)
        with pytest.raises(ValueError, match="6 rows as before, got 2"):
            model(ids[:2], past_key_values=cache)
        cache.reset()
        assert cache.get_seq_length() == 0
        model(ids[:2], past_key_values=cache)
    assert cache.tiered.requests == (0, 1)


# Layers that are not compressed


def test_plain_layers_are_reported() -> None:
    model = make("gemma3")
    cache = StrataCache(model.config, **SMALL)
    assert cache.plain_layers == {0: "sliding window of 16"}
    assert "layer 0 plain: sliding window of 16" in repr(cache)
    greedy(model, prompt(1, 60), cache)
    memory = cache.memory()
    assert memory.kinds["plain_layers"] >= 2 * 15 * 2 * 32 * 4
    assert memory.total == cache.tiered.memory().total + memory.kinds["plain_layers"] <= memory.allowed


def test_head_dim_that_does_not_fit() -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES, head_dim=24)).eval()
    cache, ids = StrataCache(model.config, budget=0.25), prompt(1, 30)
    with pytest.warns(UserWarning, match="compresses no layer"):
        tokens = greedy(model, ids, cache)
    assert torch.equal(tokens, greedy(model, ids))
    assert cache.plain_layers[1] == "head_dim 24, not a multiple of 16 from 32 to 256"
    assert cache.memory().total == cache.memory().full > 0


def test_memory_keeps_to_the_budget() -> None:
    model = make("llama")
    cache = StrataCache(model.config, **SMALL)
    greedy(model, prompt(2, 700), cache, new=8)
    memory = cache.memory()
    assert cache.tiered.dtype == torch.float16
    assert memory.full == 2 * 707 * 2 * 2 * 2 * 32 * 2  # rows, tokens, layers, heads, K and V, D, bytes of 16 bit
    assert memory.total <= memory.allowed <= 0.5 * memory.full


# The mass of prompts


def use_loops(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mass by numba's loops, in chunks of a few queries and on two threads, or by torch."""
    if not compiled:
        monkeypatch.setattr(mass, "_numba", lambda: None)
        return
    pytest.importorskip("numba")
    from kvstrata.hf import mass_numba

    monkeypatch.setattr(mass_numba, "SCORES", 1000)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_query_that_sees_nothing_gives_no_mass(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither it nor padding with values that are not finite reaches the mass of others."""
    use_loops(compiled, monkeypatch)
    q, k = torch.randn(1, 2, 4, 16), torch.randn(1, 1, 4, 16)
    q[:, :, 0] = torch.nan
    asking = torch.tensor([[False, True, True, True]])
    position = torch.tensor([[-1, 0, 1, 2]])
    column = torch.tensor([[[-1, -1, 1, 2]]])  # the token of query 1 is gone
    given = prompt_mass(q, k, position, column, asking, Logits(0.3), 4)
    torch.testing.assert_close(given.sum(), torch.tensor(4.0))
    assert not given[..., :2].any()


@pytest.mark.parametrize("compiled", [False, True])
def test_prompt_mass_is_that_of_softmax(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    use_loops(compiled, monkeypatch)
    torch.manual_seed(0)
    q, k, sinks = torch.randn(2, 6, 9, 16), torch.randn(2, 2, 13, 16), torch.randn(6)
    query_position = torch.arange(9).repeat(2, 1) + 4
    query_position[1] = torch.tensor([-1, -1, 0, 1, 2, 3, 4, 5, 6])
    column_position = torch.stack([torch.randperm(13) for _ in range(4)]).view(2, 2, 13)
    column_position[torch.rand(2, 2, 13) < 0.3] = -1
    visible = (column_position >= 0).unsqueeze(2) & (column_position.unsqueeze(2) <= query_position[:, None, :, None])
    asking = query_position >= 0
    scores = 1.5 * torch.tanh(q @ k.repeat_interleave(3, 1).mT * 0.3 / 1.5)
    scores = scores.masked_fill(~visible.repeat_interleave(3, 1), -torch.inf)
    weights = torch.cat([scores, sinks.view(1, 6, 1, 1).expand(2, -1, 9, 1)], -1).softmax(-1)[..., :13]
    expected = (weights * asking[:, None, :, None]).unflatten(1, (2, 3)).sum((2, 3))
    given = prompt_mass(q, k, query_position, column_position, asking, Logits(0.3, 1.5, sinks), 9)
    torch.testing.assert_close(given, expected)
    # Of a part of the queries, each stands for its neighbours.
    some = prompt_mass(q, k, query_position, torch.zeros(2, 1, 13, dtype=torch.long), asking, Logits(0.3), 4)
    torch.testing.assert_close(some.sum(2), torch.tensor([[27.0, 27.0], [21.0, 21.0]]))


@pytest.mark.parametrize("limit", [50, 20])
@pytest.mark.parametrize("padding", [0, 7])
@pytest.mark.parametrize("compiled", [False, True])
def test_prompt_mass_in_chunks(limit: int, padding: int, compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several chunks of queries behind older tokens: each looks only at columns up to its own, all or every third."""
    use_loops(compiled, monkeypatch)
    torch.manual_seed(0)
    q, k = torch.randn(1, 2, 50, 16), torch.randn(1, 1, 60, 16)
    asking = torch.arange(50).unsqueeze(0) >= padding
    query_position = 10 + asking.cumsum(1) - 1
    column_position = torch.cat([torch.arange(10).unsqueeze(0), query_position.masked_fill(~asking, -1)], 1)
    seen = (column_position >= 0) & (column_position <= query_position[0, :, None])
    weights = (q @ k.mT * 0.3).masked_fill(~seen, -torch.inf).softmax(-1)
    sampled = torch.arange(49, -1, -50 // limit)
    part = asking[0, sampled]
    expected = (weights[:, :, sampled] * part[:, None]).sum((1, 2)) * int(asking.sum()) / int(part.sum())
    given = prompt_mass(q, k, query_position, column_position.unsqueeze(1), asking, Logits(0.3), limit)
    torch.testing.assert_close(given[0], expected)


def test_importance_comes_from_attention() -> None:
    """One query's mass after a prompt and steps: what the cache holds sums to what was given."""
    model = make("llama")
    cache = StrataCache(model.config, **EXACT)
    with torch.no_grad():
        model(prompt(1, 50), past_key_values=cache)
        for token in prompt(1, 20, seed=3).split(1, 1):
            model(token, past_key_values=cache)
        for layer in cache.layers:
            layer.flush()
    tiered = cache.tiered
    assert tiered._queries[0].tolist() == [70, 70]
    sums = tiered.buckets.snapshot(1, [0]).importance.view(-1).sum()
    torch.testing.assert_close(sums, torch.tensor(70.0 * 4), rtol=1e-4, atol=0)


# Errors


def test_errors_name_what_is_wrong(tmp_path: Path) -> None:
    model, ids = make("llama"), prompt(1, 20)
    config = model.config
    with pytest.raises(TypeError, match="windows: expected an option"):
        StrataCache(config, windows=3)
    with pytest.raises(TypeError, match=r"max_requests: expected to be left out.*max_batch="):
        StrataCache(config, max_requests=3)
    with pytest.raises(TypeError, match=r"config: expected the model's, model\.config, got LlamaForCausalLM"):
        StrataCache(model)
    for name, value in (("max_batch", 0), ("max_batch", "a"), ("importance_queries", "a"), ("max_tokens", 0)):
        with pytest.raises(ValueError, match=f"{name}: expected an int of at least 1, got {value!r}"):
            StrataCache(config, **{name: value})
    with pytest.raises(ValueError, match=r"dtype: expected one of .* got 'float16'"):
        StrataCache(config, dtype="float16")
    with pytest.raises(ValueError, match="recent_tokens: expected an int"):
        StrataCache(config, recent_tokens=0)
    with pytest.raises(ValueError, match="budget: expected a fraction"):
        StrataCache(config, budget=2.0)
    with pytest.raises(ValueError, match=r"budget: expected a fraction .* bytes are budget_bytes"):
        StrataCache(config, 10**9)
    with pytest.raises(ValueError, match=r"budget: expected to be left out, since budget_bytes is given, got 0\.25"):
        StrataCache(config, budget=0.25, budget_bytes=10**9)
    with pytest.raises(ValueError, match=r"budget: expected more than 0\.\d+, which K2V2 of 32"):
        StrataCache(config, budget=0.1)
    with pytest.raises(ValueError, match=r"budget_bytes: expected at least \d+ for tables and slabs, got 1000$"):
        StrataCache(config, budget_bytes=1000)
    with pytest.raises(BudgetExceeded):
        greedy(
            model,
            prompt(1, 300),
            StrataCache(config, budget_bytes=100_000, page_tokens=16, max_tokens=512, recent_tokens=200),
        )
    strange = copy.deepcopy(config)
    strange._attn_implementation_internal = "flash_attention_2"
    with pytest.raises(ValueError, match='"sdpa" or "eager", got \'flash_attention_2\''):
        StrataCache(strange)
    with torch.no_grad(), pytest.raises(NotImplementedError, match="attention_mask: expected causal order"):
        model(ids, attention_mask=torch.ones(1, 1, 20, 20, dtype=torch.bool), past_key_values=StrataCache(config))


def test_arguments_from_a_file(tmp_path: Path) -> None:
    model = make("llama")
    path = tmp_path / "advice.json"
    path.write_text(json.dumps(dict(budget=0.4, tiers=["K4V2", "K2V2"], recent_tokens=32)))
    cache = StrataCache.from_file(model.config, path, recent_tokens=48)
    assert cache.options == dict(budget=0.4, tiers=["K4V2", "K2V2"], recent_tokens=48)
    cache = StrataCache.from_file(model.config, path, budget_bytes=10**8)
    assert cache.options == dict(budget_bytes=10**8, tiers=["K4V2", "K2V2"], recent_tokens=32)
    assert "budget_bytes=100000000" in repr(cache)
    path.write_text("[1]")
    with pytest.raises(ValueError, match="a JSON object"):
        StrataCache.from_file(model.config, path)
    path.write_text("{budget")
    with pytest.raises(ValueError, match=r"path: expected a JSON object of arguments in .*advice\.json, got"):
        StrataCache.from_file(model.config, path)


# Tensor parallel


def test_two_ranks_write_what_one_does(tmp_path: Path) -> None:
    """Under torchrun with tp_plan="auto" each rank keeps its own heads.

    By recency: with importance the heads of a rank share its bytes, so that another number of ranks chooses otherwise.
    """
    model, ids = make("llama"), prompt(2, 50)
    model.save_pretrained(tmp_path)
    torch.save(ids, tmp_path / "ids.pt")
    caches = [dict(budget=1.0), dict(EXACT, policy="recency")]
    alone = [greedy(model, ids, StrataCache(model.config, **options)) for options in caches]
    script = Path(__file__).parent / "hf_ranks.py"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    env = os.environ | dict(CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1")
    done = subprocess.run([*torchrun, str(script), str(tmp_path)], capture_output=True, text=True, timeout=300, env=env)
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        made = torch.load(tmp_path / f"rank{rank}.pt")
        assert made["kv_heads"] == [1, 1], "a rank holds more than its own heads"
        for expected, given in zip(alone, made["tokens"], strict=True):
            assert torch.equal(given, expected)


@pytest.mark.slow
def test_small_real_model() -> None:
    """SmolLM2, where it is installed: nothing compressed gives DynamicCache's text."""
    from kvstrata.tools.eval.model import default_folder, load

    try:
        default_folder()
    except LookupError as error:
        pytest.skip(str(error))
    model, tokenizer = load(None)
    ids = tokenizer("The first ten prime numbers are", return_tensors="pt").input_ids
    assert torch.equal(greedy(model, ids, StrataCache(model.config, budget=1.0)), greedy(model, ids))
