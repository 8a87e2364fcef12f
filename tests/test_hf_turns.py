"""Later prompts of a `StrataCache` over packed pages, `kvstrata.hf.turns`, as on a GPU: against those that unpack."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from transformers import AutoModelForCausalLM, Gemma2Config, GptOssConfig, LlamaConfig

from hf_model import EXACT, SIZES, prompt, sharpen
from kvstrata import prefill_attention_cached
from kvstrata.attention import cache_warmup
from kvstrata.attention.prefill_cached import staging_triton
from kvstrata.attention.prefill_cached import triton as cached_triton
from kvstrata.cache.ops import inspect
from kvstrata.hf import StrataCache, mass_triton, turns
from kvstrata.hf.layer import StrataLayer

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="float32 on a CPU; on a GPU later prompts are so")
ONE = SIZES | dict(num_hidden_layers=1)
FULL = ONE | dict(layer_types=["full_attention"], sliding_window=16)
CONFIGS = {
    "llama": lambda: LlamaConfig(**ONE, head_dim=64),
    "mqa": lambda: LlamaConfig(**ONE | dict(num_key_value_heads=1), head_dim=96),
    "two layers": lambda: LlamaConfig(**SIZES, head_dim=64),
    "softcap": lambda: Gemma2Config(**FULL, head_dim=64, query_pre_attn_scalar=24, attn_logit_softcapping=2.0),
    "sinks": lambda: GptOssConfig(
        **FULL,
        head_dim=64,
        num_local_experts=2,
        num_experts_per_tok=1,
        rope_parameters=dict(rope_type="default", rope_theta=10000.0),
    ),
}


def make(kind: str) -> Any:
    torch.manual_seed(0)
    eager = "eager" if kind in ("softcap", "sinks") else "sdpa"
    model = AutoModelForCausalLM.from_config(CONFIGS[kind](), attn_implementation=eager).eval()
    return sharpen(model)


class Seen:
    """What the layers of a run store: the mass of every prompt, in order; and how many prompts read packed pages."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, backend: str | None) -> None:
        self.mass: list[torch.Tensor | None] = []
        self.over_pages = 0
        store, attend = StrataLayer._store, turns.attend

        def storing(layer: StrataLayer, key: Any, value: Any, real: Any, mass: torch.Tensor | None) -> None:
            self.mass.append(mass)
            store(layer, key, value, real, mass)

        def attending(*given: Any) -> Any:
            self.over_pages += 1
            out, mass = attend(*given)
            assert out.isfinite().all()
            return out, mass

        monkeypatch.setattr(StrataLayer, "_store", storing)
        monkeypatch.setattr(turns, "attend", attending)
        monkeypatch.setattr(turns, "supports", lambda query, cache: backend is not None)
        monkeypatch.setattr(turns, "prefill_attention_cached", partial(prefill_attention_cached, backend=backend))


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of chunks, outputs and sums start as NaN, positions as 1."""
    empty = torch.empty

    def poisoned_empty(*args: Any, **options: Any) -> torch.Tensor:
        x = empty(*args, **options)
        if x.dtype == torch.int32:
            x.fill_(1)
        return x.fill_(torch.nan) if x.is_floating_point() and x.dtype.itemsize > 1 else x

    monkeypatch.setattr(torch, "empty", poisoned_empty)


def run(model: Any, mask: torch.Tensor, ends: list[int], **options: Any) -> tuple[list[torch.Tensor], StrataCache]:
    """Logits of the tokens of all turns, which end at these columns."""
    ids, cache, logits, start = prompt(*mask.shape), StrataCache(model.config, **EXACT | options), [], 0
    with torch.no_grad():
        for end in ends:
            out = model(ids[:, start:end], attention_mask=mask[:, :end], past_key_values=cache)
            logits.append(out.logits[mask[:, start:end].bool()])
            start = end
    return logits, cache


def compare(kind: str, mask: torch.Tensor, ends: list[int], later: int, backend: str, **options: Any) -> None:
    """Logits, mass and importance of both ways, where so many prompts are later ones and no steps."""
    model, runs = make(kind), []
    for name in (None, backend):
        with pytest.MonkeyPatch.context() as patched:
            seen = Seen(patched, name)
            logits, cache = run(model, mask, ends, **options)
            runs.append((logits, cache, seen))
    (want, wanted, plain), (got, cache, seen) = runs
    assert plain.over_pages == 0
    assert seen.over_pages == later
    assert len(seen.mass) == len(plain.mass)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)
    for a, b in zip(seen.mass, plain.mass, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
    for row in range(len(mask)):
        given = inspect.importance(cache.tiered, 0, row), inspect.importance(wanted.tiered, 0, row)
        torch.testing.assert_close(*given, rtol=1e-3, atol=1e-4)
    cache.tiered.check()


def padded(columns: int, *rows: slice) -> torch.Tensor:
    """Rows of tokens, with padding in one slice of each but the first."""
    mask = torch.ones(len(rows) + 1, columns, dtype=torch.long)
    for row, where in enumerate(rows):
        mask[row + 1, where] = 0
    return mask


@pytest.mark.parametrize(
    ("mask", "later", "backend"),
    [
        pytest.param(padded(95), 2, "reference", id="even"),
        pytest.param(padded(95, slice(0, 7)), 2, "triton", id="left"),
        pytest.param(padded(95, slice(0, 45), slice(71, 80)), 3, "triton", id="later"),
    ],
)
def test_turns_equal_those_over_unpacked_rows(mask: torch.Tensor, later: int, backend: str) -> None:
    """Over a past that has settled, a few tokens alone between turns; a row that begins in the second, and padding."""
    compare("llama", mask, [40, 70, 74, 95], later, backend)


@pytest.mark.parametrize("kind", ["mqa", "softcap", "sinks"])
def test_turns_of_other_models_equal_unpacked_rows(kind: str) -> None:
    compare(kind, padded(80, slice(0, 9)), [40, 60, 80], 2, "reference")


def test_several_chunks_and_few_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of K and V, and of K alone, which a row does not fill; every third query is asked."""
    monkeypatch.setattr(cached_triton, "STAGED", 4 * 256 * 64 * 4)  # bytes of 256 rows of K
    chunks = []
    key_chunks = staging_triton.key_chunks
    monkeypatch.setattr(staging_triton, "key_chunks", lambda *job: (chunks.append(1) or x for x in key_chunks(*job)))
    compare("llama", padded(270, slice(0, 180)), [240, 270], 1, "triton", importance_queries=10)
    assert len(chunks) == 2


def test_newest_and_evenly_spaced_queries_of_a_long_turn() -> None:
    compare("llama", padded(270, slice(0, 60), slice(200, 270)), [100, 270], 1, "reference", importance_queries=80)


@pytest.mark.parametrize("options", [dict(budget=None), dict(policy="recency"), dict(budget=0.4, evict=True)], ids=str)
def test_turns_with_other_policies_equal_unpacked_rows(options: dict) -> None:
    """Without mass, and with heads that hold different positions."""
    compare("llama", padded(95, slice(0, 7)), [40, 70, 95], 2, "reference", **options)


def test_kernels_are_loaded_by_warmup(monkeypatch: pytest.MonkeyPatch) -> None:
    """A turn over a cache of the same formats, whose tokens are not the caller's."""
    seen, model = Seen(monkeypatch, "reference"), make("mqa")
    asked = []
    put_mass = mass_triton.put_mass
    monkeypatch.setattr(mass_triton, "put_mass", lambda out, *rest: (asked.append(out.shape), put_mass(out, *rest)))
    cache = StrataCache(model.config, **EXACT)
    monkeypatch.setattr(cache_warmup, "TRIAL_TOKENS", 80)
    cache.warmup(model, progress=False)
    assert seen.over_pages == 1
    assert set(asked) == {(1, 82 + 64, 1)}
    assert cache.get_seq_length() == 0


def test_chunked_prefill_reads_packed_pages_after_the_first_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """generate with `prefill_chunk_size`: all chunks but the first read packed pages."""
    model, ids, mask = make("two layers"), prompt(2, 90), padded(90, slice(0, 30))
    options = dict(attention_mask=mask, max_new_tokens=6, do_sample=False, prefill_chunk_size=25)
    texts = []
    for name in (None, "reference"):
        with monkeypatch.context() as patched:
            seen = Seen(patched, name)
            texts.append(model.generate(ids, past_key_values=StrataCache(model.config, **EXACT), **options))
        assert seen.over_pages == (0 if name is None else 2 * 2)  # the last is short: a step of several tokens
    assert torch.equal(*texts)
    assert texts[0].shape == (2, 96)
