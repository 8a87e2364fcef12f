"""Bugs that other projects had and that no other test of ours would notice.

int32 offsets: test_far_offsets.py.
Rows that a kernel skips (vllm#37442): fresh memory is NaN, and no result comes from it.
Strides and scales of padded pages (vllm#49716, #50702, flashinfer#527): K and V in one pool, every page in use.
Misalignment (vllm#41257, #45466): pages at odd addresses.
Out of range (flash-attention#2711, flashinfer#320, #3740): a length that the table has no pages for.
Stale graph metadata (vllm#44868): a plan from before the cache took other slabs, settled and was compacted.
Pinned-buffer race (TensorRT-LLM#15546, Megatron-LM#5715): appends behind a busy stream, all given to them overwritten.
Double free (sglang#4593, #22819): a request that was freed, and its pages under another owner.
HF quantised cache (transformers#48700, #45510): reset; a decode step that reads no row back.
Pickle (vllm#14228, #12055, sglang#11909): nothing of ours unpickles, and what a pickle wants done is not done.
"""

from __future__ import annotations

import ast
import pickle
from pathlib import Path

import pytest
import torch

import kvstrata
import prefill_model
from cache_model import fingerprint, same
from cache_model import make as make_cache
from conftest import HAS_GPU
from decode_model import BACKENDS, DEVICE, Case, case_of, check
from emulator import CUDA, EMULATED, on
from kvstrata import DecodePlan, PagedCache, TieredCache, decode_attention, prefill_attention_cached
from kvstrata.attention.decode import cuda as decode_cuda
from kvstrata.attention.decode import op
from kvstrata.attention.decode.source import Source

HALF = torch.bfloat16 if HAS_GPU else torch.float32


# Rows that a kernel skips


@pytest.fixture
def spoilt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that was not written is NaN, or the largest integer."""
    for name in ("empty", "empty_like"):
        original = getattr(torch, name)

        def make(*args: object, original=original, **options: object) -> torch.Tensor:
            x = original(*args, **options)
            return x.fill_(
                torch.nan if x.is_floating_point() else 1 if x.dtype == torch.bool else torch.iinfo(x.dtype).max
            )

        monkeypatch.setattr(torch, name, make)


@on(*BACKENDS, EMULATED)
@pytest.mark.usefixtures("spoilt")
def test_decode_of_padding_rows_in_poisoned_memory(backend: str) -> None:
    """Requests of length 0 between others, longer than their queries and shorter, in tiers and in plain pages."""
    dtype = torch.bfloat16 if backend == "cuda" else HALF
    check(case_of([0, 40, 0, 2], q_len=3, dtype=dtype, tiers=("K4V4",)), backend)
    if backend == "numba":
        return  # plain pages are the reference's
    k, v = torch.randn(2, 6, 16, 2, 64).to(dtype).to(DEVICE)
    table = torch.tensor([[0, 0], [3, 5], [0, 0], [1, 0]], dtype=torch.int32, device=DEVICE)
    lengths = torch.tensor([0, 25, 0, 2], dtype=torch.int32, device=DEVICE)
    q = torch.randn(4, 3, 4, 64).to(dtype).to(DEVICE)
    check(Case(PagedCache(k, v, table, lengths), q, [0, 1, 2, 3], lengths.tolist()), backend)


@pytest.mark.parametrize("name", ["reference", "triton", CUDA])
@pytest.mark.usefixtures("spoilt")
def test_prefill_of_rows_without_keys_in_poisoned_memory(name: str) -> None:
    prefill_model.check(prefill_model.case_of([(3, 0), (5, 9), (20, 9), (0, 4)]), name, ragged=True)
    prefill_model.check(prefill_model.case_of([(7, 3)] * 2), name)
    if name != "cuda":
        cache = make_cache(budget=None, max_requests=2, device=DEVICE)
        cache.append(0, *torch.randn(2, 5, 2, 64, device=DEVICE), requests=[0, 1], seq_lens=[5, 0])
        q = torch.randn(2, 7, 4, 64, device=DEVICE)  # two queries of request 0 stand before its first token
        out = prefill_attention_cached(q, cache, backend=name)
        assert out[0, 2:].isfinite().all()
        assert (out[0, :2] == 0).all()
        assert (out[1] == 0).all()


# Pages: strides, scales, addresses


@on("reference", "triton", EMULATED, CUDA)
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_k_and_v_in_one_full_pool(backend: str, layout: str, fp8: bool) -> None:
    """[pages, 2, ..], V before K, every row of every page in use; scales of heads that are not side by side."""
    if backend == "cuda" and fp8:
        pytest.skip("fp8 is Triton's")
    dtype = torch.float16 if backend == "cuda" else HALF
    inner = (16, 2) if layout == "NHD" else (2, 16)
    pool = torch.full((5, 2, *inner, 64), torch.nan).to(torch.float8_e4m3fn if fp8 else dtype).to(DEVICE)
    v_cache, k_cache = pool[:, 0], pool[:, 1]
    scales = torch.tensor([[0.02, 0.05], [0.04, 0.01]], device=DEVICE)
    names = ("k_scale", "v_scale") if fp8 else ()
    table = torch.tensor([[4, 0, 2], [1, 3, 7]], dtype=torch.int32, device=DEVICE)
    pages = torch.cat([table[0], table[1, :2]])
    slot_mapping = (pages[:, None] * 16 + torch.arange(16, device=DEVICE)).flatten()
    k, v = torch.randn(2, 80, 2, 64).to(dtype).to(DEVICE)
    kvstrata.store_kv(k, v, k_cache, v_cache, slot_mapping, layout=layout, **dict(zip(names, scales, strict=False)))
    assert pool.float().isfinite().all(), "the pool is not full"
    lengths = torch.tensor([48, 32], dtype=torch.int32, device=DEVICE)
    beside = torch.stack([scales, torch.full_like(scales, 9.0)], 2)[..., 0]
    cache = PagedCache(k_cache, v_cache, table, lengths, layout=layout, **dict(zip(names, beside, strict=False)))
    check(Case(cache, torch.randn(2, 2, 4, 64).to(dtype).to(DEVICE), [0, 1], [48, 32]), backend)


@on("reference", "triton", EMULATED, CUDA)
def test_pages_at_odd_addresses(backend: str) -> None:
    """Bases and strides that are multiples of one element only: right, or refused by name."""
    dtype = torch.float16 if backend == "cuda" else HALF
    near = torch.randn(2, 4, 16, 2, 80).to(dtype).to(DEVICE)
    k, v = (torch.empty(4 * 16 * 2 * 83 + 1, dtype=dtype, device=DEVICE)[1:].view(4, 16, 2, 83)[..., :80] for _ in "kv")
    k.copy_(near[0])
    v.copy_(near[1])
    table = torch.tensor([[2, 0], [3, 1]], dtype=torch.int32, device=DEVICE)
    lengths = torch.tensor([20, 32], dtype=torch.int32, device=DEVICE)
    cache, q = PagedCache(k, v, table, lengths), torch.randn(2, 1, 4, 80).to(dtype).to(DEVICE)
    if backend == "cuda":
        with pytest.raises(RuntimeError, match="expected rows at multiples of 16 bytes"):
            decode_attention(q, cache, backend="cuda")
    else:
        check(Case(cache, q, [0, 1], [20, 32]), backend)


@on(EMULATED, CUDA)
def test_a_length_past_the_table_writes_nothing_outside(backend: str) -> None:
    """It may give any result, as `PagedCache` says; memory behind the work list is not its to write."""
    k, v = torch.randn(2, 2, 16, 1, 64).half().to(DEVICE)
    table = torch.zeros(2, 2, dtype=torch.int32, device=DEVICE)
    cache = PagedCache(k, v, table, torch.tensor([160, 20], dtype=torch.int32, device=DEVICE))
    q = torch.zeros(2, 1, 1, 64, dtype=torch.float16, device=DEVICE)
    source = Source.of(op._job(q, cache, 0, None, None, None, None, None, False, False))
    step = decode_cuda.WorkPlan(source, (0, 1), 1, 1, 1)
    step.stages = torch.full((1, step.capacity + 64, 4), -7, dtype=torch.int32, device=DEVICE)
    step._worklist = step._make_worklist(source)
    step.update()
    assert (step.stages[:, : step.capacity] != -7).any()
    assert (step.stages[:, step.capacity :] == -7).all()


# Metadata that is older than the cache


@on(EMULATED, CUDA)
def test_a_plan_follows_a_cache_that_moves(backend: str) -> None:
    """Made, and on a GPU captured, in few slabs; run after the cache took many, settled, freed and was compacted."""
    options = dict(recent_tokens=16, page_tokens=16, tiers=("K4V4", "K2V2"), dtype=torch.bfloat16, slab_bytes=1 << 14)
    cache = TieredCache(1, 2, 64, budget=0.4, device=DEVICE, max_requests=3, max_tokens=400, **options)

    def grow(lengths: list[int]) -> None:
        rows = torch.randn(2, sum(lengths), 2, 64).bfloat16().to(DEVICE)
        cache.append(0, *rows, requests=[0, 1, 2], seq_lens=lengths)

    grow([5, 9, 3])
    slabs = int(cache.pool.allocated.sum())
    step, q = DecodePlan(cache, 4, requests=[0, 2]), torch.randn(2, 1, 4, 64).bfloat16().to(DEVICE)

    def run() -> torch.Tensor:
        step.update()
        return decode_attention(q, cache, requests=[0, 2], plan=step, backend=backend)

    out, graph = run(), None
    if HAS_GPU:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = run()
    for lengths in ([150, 200, 90], [60, 1, 100]):
        grow(lengths)
        cache.settle()
    cache.free_request(1)
    cache.compact()
    cache.crop(2, 170)
    assert int(cache.pool.allocated.sum()) > slabs + 2
    if graph is None:
        out = run()
    else:
        graph.replay()
    assert torch.equal(out, decode_attention(q, cache, requests=[0, 2], backend=backend))
    check(Case(cache, q, [0, 2], [215, 170]), backend)


def test_appends_behind_a_busy_stream() -> None:
    """The host runs ahead and overwrites what it gave: rows, lists of requests and of lengths, freed requests."""
    cache = TieredCache(
        2, 2, 64, budget=None, dtype=HALF, device=DEVICE, page_tokens=16, max_requests=3, max_tokens=400
    )
    held: dict[int, list[torch.Tensor]] = {}
    steps = [[17, 1, 5], [1, 1, 1], [0, 33, 2], [1, 1, 1], [40, 0, 16], [1, 1, 1]] * 2
    for number, lengths in enumerate(steps):
        if HAS_GPU and number % 3 == 0:
            torch.cuda._sleep(50_000_000)
        if number == 7:
            cache.free_request(1)
            held[1] = []
        given, requests = torch.randn(2, sum(lengths), 2, 64).to(HALF), [0, 1, 2]
        rows, sizes = given.clone().to(DEVICE), list(lengths)
        cache.append(1, rows[0], rows[1], requests=requests, seq_lens=sizes)
        for request, part in enumerate(given.split(lengths, 1)):
            held.setdefault(request, []).append(part)
        rows.fill_(torch.nan)
        requests[:], sizes[:] = [9, 9, 9], [9, 9, 9]
    for request, parts in held.items():
        want = torch.cat(parts, 1).transpose(1, 2)
        for got, rows in zip(cache.gather(1, request), want, strict=False):
            assert torch.equal(got.cpu(), rows), request
    cache.check()


# Owners


def test_a_freed_request_leaves_no_tokens() -> None:
    """Freed twice, read or appended to after: refused, while its pages are another's already."""
    cache = make_cache(max_requests=2, budget=None)
    first, second = cache.add_request(), cache.add_request()
    cache.append(0, *torch.randn(2, 40, 2, 64), requests=[first])
    cache.free_request(first)
    k, v = torch.randn(2, 40, 2, 64)
    cache.append(0, k, v, requests=[second])
    before = fingerprint(cache)
    q = torch.randn(1, 1, 2, 64)
    for call in (
        lambda: cache.free_request(first),
        lambda: cache.gather(0, first),
        lambda: cache.fork(first),
        lambda: cache.crop(first, 3),
        lambda: decode_attention(q, cache, requests=[first]),
    ):
        with pytest.raises(ValueError, match="request"):
            call()
    assert same(before, fingerprint(cache))
    assert torch.equal(cache.gather(0, second)[0], k.transpose(0, 1))
    cache.check()


# transformers, files


def test_reset_leaves_nothing_of_the_text_before() -> None:
    pytest.importorskip("transformers")
    from hf_model import SMALL, greedy, make, prompt
    from kvstrata.hf import StrataCache

    model = make("qwen2-mixed")
    used, fresh = (StrataCache(model.config, **SMALL, max_batch=4) for _ in range(2))
    greedy(model, prompt(3, 90), used, new=20)
    used.reset()
    ids = prompt(2, 70, seed=8)
    assert torch.equal(greedy(model, ids, used), greedy(model, ids, fresh))
    assert used.memory() == fresh.memory()
    for row in range(2):
        for a, b in zip(used.tiered.gather(0, row), fresh.tiered.gather(0, row), strict=True):
            assert torch.equal(a, b)
        a, b = (cache.tiered.buckets.snapshot(0, [row]) for cache in (used, fresh))
        assert torch.equal(a.tier, b.tier)
        assert torch.equal(a.importance, b.importance)


def test_a_decode_step_reads_no_row_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not those of earlier tokens, neither by `gather` nor by the way of settling, while nothing settles."""
    pytest.importorskip("transformers")
    from hf_model import EXACT, make, prompt
    from kvstrata.hf import StrataCache

    model = make("llama")
    cache = StrataCache(model.config, **EXACT | dict(budget=0.6))
    with torch.no_grad():
        model(prompt(2, 80), past_key_values=cache)
        assert cache.tiered.memory().tokens["K32V32"] < 2 * 2 * 2 * 80, "nothing was compressed"

        def refuse(*args: object, **options: object) -> None:
            raise AssertionError("rows were dequantised")

        monkeypatch.setattr(TieredCache, "gather", refuse)
        monkeypatch.setattr(type(cache.tiered.buckets), "read", refuse)
        monkeypatch.setattr(type(cache.tiered), "settle", lambda *args, **options: None)
        for token in prompt(2, 3, seed=4).split(1, 1):
            model(token, past_key_values=cache)
    assert cache.get_seq_length() == 83


class Payload:
    """Unpickled, it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_sources_never_unpickle_or_eval(tmp_path: Path) -> None:
    modules = {"pickle", "cPickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
    calls = {"torch.load", "np.load", "numpy.load", "eval", "exec", "yaml.load", "pd.read_pickle"}
    sources = list(Path(kvstrata.__file__).parent.rglob("*.py"))
    assert len(sources) > 100
    for source in sources:
        for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name.split(".")[0] for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
                names = [node.module.split(".")[0]]
            assert not modules & set(names), f"{source.name}:{getattr(node, 'lineno', 0)} imports {names}"
            if isinstance(node, ast.Call):
                assert ast.unparse(node.func) not in calls, f"{source.name}:{node.lineno} {ast.unparse(node.func)}"
    touched, path = tmp_path / "touched", tmp_path / "request"
    cache = make_cache(max_requests=1)
    pickle.loads(pickle.dumps(Payload(touched)))
    assert touched.exists(), "the payload does nothing"
    touched.unlink()
    for write in (lambda: path.write_bytes(pickle.dumps(Payload(touched))), lambda: torch.save(Payload(touched), path)):
        write()
        with pytest.raises(ValueError, match="path: expected a request"):
            cache.load(path)
    assert not touched.exists()
