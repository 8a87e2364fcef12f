"""prefill_attention: every backend against a float64 model of it (prefill_model.py)."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import HAS_GPU
from kvstrata import prefill_attention
from kvstrata.attention.prefill import op as prefill
from kvstrata.attention.prefill import triton as prefill_triton
from kvstrata.attention.prefill.job import PrefillJob
from kvstrata.attention.prefill.tiles import Config
from prefill_model import BACKENDS, DEVICE, DTYPES, HALF, INTERPRETED, Case, case_of, check, relative_error

each_backend = pytest.mark.parametrize("backend", BACKENDS)


def few(backend: str, chosen: bool) -> None:
    """Under the interpreter, where a program takes milliseconds, only the chosen ones."""
    if backend == "triton" and INTERPRETED and not chosen:
        pytest.skip("one kind is enough under the interpreter")


@pytest.fixture(autouse=True)
def runs_or_skips(request: pytest.FixtureRequest) -> None:
    """A backend may leave a kind of job to another one, and says why."""
    if getattr(request.node, "callspec", None) and request.node.callspec.params.get("backend") == "cuda":
        original = prefill._choose

        def choose(backend: str, job: PrefillJob) -> str:
            if reason := prefill.missing(backend, job):
                pytest.skip(reason)
            return original(backend, job)

        request.getfixturevalue("monkeypatch").setattr(prefill, "_choose", choose)


# The seven cases that the work began with: (batch, heads, length, head_dim), causal or not.
SEVEN = {
    "one head": ([(64, 64)], dict(heads=1, dim=64, causal=False)),
    "small": ([(128, 128)] * 2, dict(heads=2, kv_heads=2, dim=64, causal=False)),
    "causal": ([(128, 128)] * 2, dict(heads=2, kv_heads=2, dim=64)),
    "the shape of the note": ([(512, 512)] * 2, dict(heads=8, kv_heads=8, dim=64, causal=False)),
    "the same, causal": ([(512, 512)] * 2, dict(heads=8, kv_heads=8, dim=64)),
    "not a multiple of a tile": ([(509, 509)], dict(heads=4, kv_heads=4, dim=64)),
    "large scores": ([(256, 256)], dict(heads=2, kv_heads=2, dim=64, loud=30.0)),
}


@each_backend
@pytest.mark.parametrize("name", SEVEN)
def test_seven_reference_cases_stay_within_one_percent(backend: str, name: str) -> None:
    lengths, options = SEVEN[name]
    few(backend, name in ("one head", "causal", "large scores"))
    case = case_of(lengths, **options)
    check(case, backend)
    for (out, _), (want, _) in zip(case.dense(backend), case.expected(), strict=True):
        assert relative_error(out, want) <= 1e-2  # the note's bound, whatever plain torch in float16 gives


@each_backend
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [64, 96, 128, 256])
@pytest.mark.parametrize("causal", [True, False])
def test_head_dims_and_dtypes(backend: str, dim: int, dtype: torch.dtype, causal: bool) -> None:
    few(backend, (dim in (96, 256)) == causal)
    check(case_of([(37, 53)], dim=dim, dtype=dtype, causal=causal), backend)


@each_backend
@pytest.mark.parametrize(
    "lengths", [(1, 1), (1, 40), (40, 1), (17, 16), (16, 17), (15, 33), (33, 15), (31, 65)], ids=str
)
@pytest.mark.parametrize("causal", [True, False])
def test_odd_lengths_equal_the_model(backend: str, lengths: tuple[int, int], causal: bool) -> None:
    """More queries than keys: the first ones see nothing when causal."""
    few(backend, causal or lengths in ((1, 1), (1, 40), (16, 17)))
    check(case_of([lengths], causal=causal), backend)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["triton", "cuda"])
@pytest.mark.parametrize("dim", [64, 96, 128, 256])
@pytest.mark.parametrize("queries", [1, 63, 64, 65, 127, 129, 200, 257])
def test_lengths_around_tile_sizes_equal_the_model(backend: str, queries: int, dim: int) -> None:
    for keys in (1, 31, 63, 64, 65, 127, 128, 129, 191, 255, 257, 400):
        for causal in (True, False):
            check(case_of([(queries, keys)], dim=dim, causal=causal), backend)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["triton", "cuda"])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("length", [128, 256, 512, 1024, 2048, 4100])
def test_lengths_of_the_config_table_equal_the_model(backend: str, length: int, causal: bool, dim: int) -> None:
    for dtype in (torch.float16, torch.bfloat16):
        check(case_of([(length, length)], heads=4, kv_heads=2, dim=dim, dtype=dtype, causal=causal), backend)


@each_backend
@pytest.mark.parametrize("group", [1, 2, 3, 4, 8, 16])
def test_query_heads_per_kv_head(backend: str, group: int) -> None:
    few(backend, group in (1, 3))
    check(case_of([(20, 20)], heads=2 * group, kv_heads=2), backend)
    check(case_of([(5, 30)], heads=group, kv_heads=1), backend)


@each_backend
@pytest.mark.parametrize("window", [1, 2, 15, 16, 17, 40, 1000])
def test_sliding_window_equals_the_model(backend: str, window: int) -> None:
    few(backend, window in (1, 17, 40))
    check(case_of([(50, 70)], sliding_window=window), backend)
    check(case_of([(40, 40)], sliding_window=window, heads=1), backend)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["triton", "cuda"])
@pytest.mark.parametrize("window", [1, 64, 100, 128, 500])
def test_window_over_many_blocks(backend: str, window: int) -> None:
    for dim in (64, 128):
        check(case_of([(700, 900)], sliding_window=window, dim=dim), backend)


@each_backend
@pytest.mark.parametrize(
    "options",
    [dict(softcap=2.0), dict(scale=0.4), dict(softcap=20.0, sliding_window=9), dict(softcap=5.0, causal=False)],
    ids=str,
)
def test_score_options_equal_the_model(backend: str, options: dict) -> None:
    check(case_of([(35, 41)], **options), backend)


@each_backend
def test_sink_logits_take_weight_from_keys(backend: str) -> None:
    sinks = torch.tensor([-torch.inf, 0.0, 4.0, 30.0], device=DEVICE)
    check(case_of([(25, 18)], heads=4, kv_heads=2, sinks=sinks), backend)
    check(case_of([(18, 25)], heads=4, kv_heads=2, sinks=sinks, sliding_window=4, softcap=8.0), backend)
    case = case_of([(3, 1)], heads=4, sinks=sinks)
    ((out, lse),) = case.dense(backend)
    assert (out[:, :2] == 0).all()
    torch.testing.assert_close(lse[:, 0], sinks)


@each_backend
def test_queries_that_see_no_key(backend: str) -> None:
    check(case_of([(5, 0)]), backend)
    check(case_of([(5, 0)], causal=False), backend)
    check(case_of([(0, 9)]), backend)
    ((out, lse),) = case_of([(20, 3)]).dense(backend)
    assert (out[:, :17] == 0).all()
    assert (lse[:, :17] == -torch.inf).all()
    assert prefill_attention(*torch.zeros(3, 0, 4, 2, 64, device=DEVICE), backend=backend).shape == (0, 4, 2, 64)


@each_backend
def test_one_key_is_its_value(backend: str) -> None:
    q, (k, v) = torch.randn(1, 40, 3, 64).to(HALF).to(DEVICE), torch.randn(2, 1, 1, 3, 64).to(HALF).to(DEVICE)
    out = prefill_attention(q, k, v, causal=False, backend=backend)
    torch.testing.assert_close(out, v.expand_as(out), rtol=0, atol=0)


@each_backend
@pytest.mark.parametrize("causal", [True, False])
def test_equal_huge_scores_average(backend: str, causal: bool) -> None:
    """Scores of tens of thousands, all equal: means of the values, and nothing overflows."""
    k = torch.full((1, 40, 1, 64), 100.0, dtype=HALF, device=DEVICE)
    v = torch.randn(1, 40, 1, 64).to(HALF).to(DEVICE)
    out, lse, _ = prefill_attention(k, k, v, causal=causal, return_lse=True, backend=backend)
    count = torch.arange(1, 41, device=DEVICE).view(-1, 1, 1) if causal else 40
    want = (v.float().cumsum(1) if causal else v.float().sum(1, keepdim=True)) / count
    torch.testing.assert_close(out.float(), want.expand_as(v), rtol=0, atol=2e-3)
    assert lse.min() > 7.9e4


@each_backend
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_large_scores_keep_full_precision(backend: str, sign: float) -> None:
    """One key takes all the weight; scores of thousands, also all of them negative."""
    case = case_of([(30, 30)], loud=3.0)
    q, k, v = case.sequences[0]
    k = sign * k.abs() * 20
    q = q.abs() * 3
    case = Case([(q, k, v)], {})
    ((out, lse),), ((want, sums),) = case.dense(backend), case.expected()
    assert (sums.abs() > 100).all()
    assert relative_error(out, want) <= 2e-3  # nothing but rounding: float32 scores, weights of 16 bits
    torch.testing.assert_close(lse.double(), sums, rtol=1e-6, atol=0)


@each_backend
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("causal", [True, False])
def test_scores_of_minus_inf(backend: str, causal: bool, dim: int) -> None:
    """Such a key has no weight; a query without any other is one that sees no key. Neither reaches other rows."""
    few(backend, (dim == 64) == causal)
    size = 40 if INTERPRETED else 300
    case = case_of([(size, size)] * 2, heads=4, kv_heads=2, dim=dim, causal=causal)
    for q, k, _ in case.sequences:
        q[..., 0], k[..., 0] = q[..., 0].abs() + 0.5, k[..., 0].abs() + 0.5
    (q, k, _), (_, others, _) = case.sequences
    q[3, [0, 7, size - 1], 0] = -torch.inf  # queries, of one head
    k[0, : size * 2 // 3, 0] = -torch.inf  # whole blocks that nobody masks, of one KV head
    others[1, ::3, 0] = -torch.inf  # keys here and there
    check(case, backend)
    ((out, lse), _) = case.dense(backend)
    nothing = [0, 7, size - 1]
    assert (out[3, nothing] == 0).all()
    assert (lse[3, nothing] == -torch.inf).all()
    sinks = torch.tensor([-torch.inf, 0.0, 4.0, -3.0], device=DEVICE)
    check(Case(case.sequences, {**case.options, "sinks": sinks}), backend)
    check(Case(case.sequences, {**case.options, "softcap": 5.0}), backend)  # -inf is a score of -5 then


@each_backend
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_a_nan_score_affects_only_its_query(backend: str, value: float, causal: bool) -> None:
    """+inf or NaN among the scores of a query: NaN is what it gets, as from torch, and no other row or head."""
    few(backend, causal == (value == -torch.inf))
    size = 40 if INTERPRETED else 300
    case = case_of([(size, size)], heads=4, kv_heads=2, causal=causal)
    (q, k, v) = case.sequences[0]
    k[..., 0] = torch.where(torch.arange(size, device=DEVICE) % 2 == 0, 1.0, -1.0)
    ((want, sums),) = case.dense(backend)
    bad = q.clone()
    bad[2, [9, 17], 0] = value
    spoilt = torch.zeros(4, size, dtype=torch.bool, device=DEVICE)
    spoilt[2, [9, 17]] = True
    ((out, lse),) = Case([(bad, k, v)], case.options).dense(backend)
    assert out[spoilt].isnan().all()
    assert lse[spoilt].isnan().all()
    torch.testing.assert_close(out[~spoilt], want[~spoilt], rtol=0, atol=0)
    torch.testing.assert_close(lse[~spoilt], sums[~spoilt], rtol=0, atol=0)


@each_backend
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_memory_around_is_never_read(backend: str, value: float) -> None:
    """Views into memory full of NaN and inf: rows before and after, other heads, the rest of a row."""
    few(backend, value != value)
    case = case_of([(21, 37)] * 2, heads=4, kv_heads=2)
    q, k, v = case.batch()

    def inside(x: torch.Tensor) -> torch.Tensor:
        room = torch.full((x.shape[0] + 2, x.shape[1] + 70, x.shape[2] + 2, x.shape[3] + 16), value, dtype=x.dtype)
        view = room.to(DEVICE)[1:-1, 3:-67, 1:-1, 8:-8]
        return view.copy_(x)

    for causal in (True, False):
        want = prefill_attention(q, k, v, causal=causal, backend=backend)
        got = prefill_attention(inside(q), inside(k), inside(v), causal=causal, backend=backend)
        torch.testing.assert_close(got, want, rtol=0, atol=0)


@each_backend
def test_strided_inputs_equal_contiguous_ones(backend: str) -> None:
    """Strided inputs: a fused projection, both memory orders, an expanded head; out is contiguous."""
    q, k, v = torch.randn(2, 30, 8, 64).to(HALF).to(DEVICE).split([4, 2, 2], 2)
    want = prefill_attention(q.contiguous(), k.contiguous(), v.contiguous(), backend=backend)
    got = prefill_attention(q, k, v, backend=backend)
    torch.testing.assert_close(got, want, rtol=0, atol=0)
    heads_first = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    got = prefill_attention(*heads_first, backend=backend)
    torch.testing.assert_close(got, want, rtol=0, atol=0)
    assert got.is_contiguous()
    one = k[:, :, :1].expand(-1, -1, 2, -1)
    torch.testing.assert_close(
        prefill_attention(q, one, v, backend=backend), prefill_attention(q, one.contiguous(), v, backend=backend)
    )
    odd = torch.randn(2, 30, 4, 65).to(HALF).to(DEVICE)[..., 1:]  # not 16-byte aligned
    torch.testing.assert_close(
        prefill_attention(odd, k, v, backend=backend), prefill_attention(odd.contiguous(), k, v, backend=backend)
    )


@each_backend
@pytest.mark.parametrize("options", [{}, dict(causal=False), dict(sliding_window=6, softcap=4.0)], ids=str)
def test_ragged_batch_equals_the_model(backend: str, options: dict) -> None:
    """Empty sequences, single tokens, sequences without keys, chunks after a prefix; NaN around them."""
    lengths = [(0, 0), (5, 5), (1, 30), (0, 7), (33, 40), (3, 0), (20, 9)]
    check(case_of(lengths, **options), backend, ragged=True)


@each_backend
def test_ragged_with_given_lengths(backend: str) -> None:
    """Upper bounds are enough; all empty is fine."""
    check(case_of([(5, 9), (20, 20)]), backend, ragged=True, max_seqlen_q=50, max_seqlen_k=90)
    check(case_of([(0, 0), (0, 0)]), backend, ragged=True)


@each_backend
def test_ragged_equals_dense(backend: str) -> None:
    """Both ways give the same numbers."""
    case = case_of([(24, 24)] * 3, heads=4, kv_heads=2)
    for (a, b), (c, d) in zip(case.dense(backend), case.ragged(backend), strict=True):
        torch.testing.assert_close(a, c, rtol=0, atol=1e-3)
        torch.testing.assert_close(b, d)


@each_backend
@settings(max_examples=60 if HAS_GPU else 8)
@given(data=st.data())
def test_random_cases_equal_the_model(backend: str, data: st.DataObject) -> None:
    most = 40 if INTERPRETED else 300
    sizes = st.integers(0, most) | st.sampled_from([1, 15, 16, 17, 32, 33])
    count = data.draw(st.integers(1, 3))
    lengths = [(data.draw(sizes), data.draw(sizes)) for _ in range(count)]
    kv_heads, group = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 3))
    options: dict = dict(causal=data.draw(st.booleans()))
    if options["causal"]:
        options["sliding_window"] = data.draw(st.none() | st.integers(1, most + 5))
    options["softcap"] = data.draw(st.none() | st.floats(1.0, 50.0))
    if data.draw(st.booleans()):
        options["sinks"] = torch.randn(kv_heads * group, device=DEVICE)
    dim, dtype = data.draw(st.sampled_from([64, 96, 128])), data.draw(st.sampled_from(DTYPES))
    case = case_of(lengths, heads=kv_heads * group, kv_heads=kv_heads, dim=dim, dtype=dtype, **options)
    ragged = count > 1 and len(set(lengths)) > 1
    check(case, backend, ragged=ragged)


def test_long_sequences_stay_within_memory() -> None:
    """8k by 8k in blocks of queries: no matrix of all scores."""
    q, k, v = torch.randn(3, 1, 8192, 1, 64)
    out = prefill_attention(q, k, v, backend="reference")
    want = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True)
    torch.testing.assert_close(out, want.transpose(1, 2), rtol=1e-4, atol=1e-5)


VARIANTS = [
    Config(16, 32, 4, 1),
    Config(32, 16, 4, 1, order=1),
    Config(16, 16, 4, 1, order=2),
]
if HAS_GPU:
    VARIANTS = [
        *(Config(m, n, 4 if m == 64 else 8, 2, order=o) for m, n, o in ((64, 32, 0), (64, 128, 1), (128, 64, 2))),
        Config(64, 64, 4, 2, registers=128),
    ]
    if torch.cuda.get_device_capability()[0] == 9:
        VARIANTS += [Config(64 * n, 128, 4, 2, specialize=True, order=n % 2) for n in (1, 2)]
        VARIANTS += [Config(128, 128, 4, 2, specialize=True, pingpong=True), Config(192, 64, 4, 4, specialize=True)]
        VARIANTS += [Config(64, 64, 4, 3, specialize=True, registers=96)]
        VARIANTS += [Config(192, 64, 4, 2, specialize=True, pingpong=True)]


@pytest.mark.parametrize("config", VARIANTS, ids=lambda config: "-".join(map(str, config)))
@pytest.mark.parametrize("causal", [True, False])
def test_every_triton_config_equals_the_model(config: Config, causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every way that a table may name, on tiles that overhang."""
    monkeypatch.setattr(prefill_triton, "config_of", lambda *_: config)
    size = 1 if INTERPRETED else 7
    check(case_of([(35 * size, 51 * size)] * 2, heads=4, kv_heads=2, dim=96, causal=causal), "triton")
    if not causal or HAS_GPU:
        check(case_of([(32 * size, 64 * size)], causal=causal), "triton")
    if HAS_GPU:
        sinks = torch.tensor([1.0, 5.0], device=DEVICE)
        for dim in (64, 128):
            for queries, keys in ((1, 1), (64, 64), (130, 1000), (1024, 1024), (511, 513)):
                check(case_of([(queries, keys)], dim=dim, causal=causal, sinks=sinks), "triton")


@pytest.mark.gpu
@pytest.mark.sanitizer
@pytest.mark.parametrize(
    "config", [Config(128, 128, 4, 2, specialize=True), Config(64, 64, 4, 3)], ids=["roles", "one"]
)
def test_triton_kernels_run_under_sanitizers(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    if config.specialize and os.environ.get("SANITIZER_TOOL") == "initcheck":
        pytest.skip("initcheck does not see what TMA writes")
    monkeypatch.setattr(prefill_triton, "config_of", lambda *_: config)
    check(case_of([(130, 200)]), "triton")
    torch.cuda.synchronize()


def test_auto_backend_equals_the_model() -> None:
    check(case_of([(20, 30)]), "auto")


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["auto", "triton", "cuda"])
@pytest.mark.parametrize("ragged", [False, True])
def test_replay_reads_new_inputs(backend: str, ragged: bool) -> None:
    """A replay reads what is in the inputs then."""
    q, k, v = torch.randn(3, 2, 100, 4, 64, device=DEVICE).to(HALF)
    more: dict = {}
    if ragged:
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))
        ends = torch.tensor([0, 100, 200], dtype=torch.int32, device=DEVICE)
        more = dict(cu_seqlens_q=ends, cu_seqlens_k=ends, max_seqlen_q=100, max_seqlen_k=100)
    prefill_attention(q, k, v, backend=backend, **more)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = prefill_attention(q, k, v, backend=backend, **more)
    q.normal_()
    graph.replay()
    torch.testing.assert_close(out, prefill_attention(q, k, v, backend=backend, **more), rtol=0, atol=0)
