"""What `kvstrata eval` and `advise` are made of, on a tiny random model; the commands are in test_eval_command.py, what
SmolLM2 makes of it in test_quality.py, marked slow."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from transformers import DynamicCache, LlamaConfig

from eval_model import Letters, model, tokens
from hf_model import SIZES
from hf_zoo import tiny_model
from kvstrata.cache import TieredCache
from kvstrata.cache.policy import plan
from kvstrata.cache.policy.prices import SQNR_DB
from kvstrata.hf import StrataCache
from kvstrata.layout import Format
from kvstrata.quant import reference as quant
from kvstrata.quant.calibration import Calibration, LayerCalibration
from kvstrata.tools import publish
from kvstrata.tools.eval import (
    advise,
    bits,
    contenders,
    measure,
    needle,
    plot,
    quality,
    render,
    results,
    rounding,
    sensitivity,
    texts,
)
from kvstrata.tools.eval.kivi import KiviCache, dequantize_groups, quantize_groups
from kvstrata.tools.eval.sizes import sizes_of

OPTIONS = dict(tiers=["K4V4", "K2V2"], recent_tokens=12, sink_tokens=4, page_tokens=16, settle_every=16)


def test_decoding_in_chunks_equals_one_forward() -> None:
    net, ids = model(), tokens(70, rows=2)
    whole = net(ids).logits.float().log_softmax(-1)[:, :-1]
    expected = -whole.gather(-1, ids[:, 1:, None]).squeeze(-1)
    for prompt, chunk in ((0, 70), (0, 16), (33, 16), (40, 1)):
        scores, exact = measure.decode(net, ids, DynamicCache(config=net.config), prompt=prompt, chunk=chunk, keep=True)
        assert sum(scores.count) == 69 - max(prompt - 1, 0)
        got = torch.tensor([sum(row) for row in scores.nll])
        torch.testing.assert_close(got, expected[:, max(prompt - 1, 0) :].sum(-1), rtol=1e-4, atol=1e-3)
        again, _ = measure.decode(net, ids, DynamicCache(config=net.config), prompt=prompt, chunk=chunk, exact=exact)
        assert abs(sum(map(sum, again.kl))) < 0.05  # of fp16 log-probabilities
        assert sum(map(sum, again.agree)) == 2 * sum(scores.count)


def test_a_budget_of_one_equals_16_bit() -> None:
    net, ids = model(), tokens(60)
    exact = results.Quality({}, "tiny", ["text"])
    quality.run(net, ids, [contenders.strata(1.0, **OPTIONS)], exact, prompt=20, chunk=20)
    first, ours = exact.rows
    assert first.kind == "exact"
    assert ours.loss(first)[0] == pytest.approx(0, abs=1e-4)
    assert ours.agreement == 1


@pytest.mark.filterwarnings("ignore::kvstrata.hf.guard.BudgetWarning")
def test_fewer_bits_cost_more() -> None:
    net, ids = model(), tokens(400)
    state = results.Quality({}, "tiny", ["text"])
    options = dict(policy="uniform", recent_tokens=12, sink_tokens=4, page_tokens=16)
    wanted = [contenders.bits(w, f"{w}", tiers=[f"K{w}V{w}"], **options) for w in (8, 4, 3, 2)]
    quality.run(net, ids, wanted, state, prompt=200, chunk=50)
    kl = [row.mean_kl for row in state.rows[1:]]
    assert kl[0] < kl[1] < kl[2] < kl[3]
    assert kl[3] > 1e-3


@pytest.mark.parametrize("options", [{}, dict(recent_tokens=20, sink_tokens=4, page_tokens=16)])
@pytest.mark.parametrize("dim", [64, 128])
def test_default_tiers_follow_the_budget(dim: int, options: dict) -> None:
    """The smaller the fraction, the smaller the lowest tier, so that the fraction counts from 2,048 tokens on."""
    lowest = []
    for budget in (0.6, 0.5, 0.35, 0.3, 0.25, 0.2):
        cache = TieredCache(30, 3, dim, budget=budget, max_tokens=4096, **options)
        assert budget < 0.25 or cache.budget.floor_tokens <= 2048
        lowest.append(cache.formats[-1].page_bytes)
    assert lowest == sorted(lowest, reverse=True)
    assert len(set(lowest)) >= 3


def test_tiers_that_are_named_or_not() -> None:
    sizes = dict(layers=30, kv_heads=3, head_dim=64)

    def names(**given) -> list[str]:
        return [f.name for f in TieredCache(**sizes, **given).formats[1:]]

    assert names(budget=0.4) == ["K8V8", "K8V4", "K4V4"]
    assert names(budget=0.8) == ["K8V8"]
    assert names(budget=0.5, tiers=["K3V3"]) == ["K3V3"]
    assert names(budget_bytes=10**9) == names(budget=None) == names(budget=1.0) == ["K4V4", "K3V3", "K2V2"]
    net = model()
    for budget in (0.5, 0.25):
        cache = StrataCache(net.config, budget=budget, max_tokens=1024, **contenders.small_pages())
        cache.build(torch.zeros(1, 2, 1, 64))
        assert [f.name for f in cache.tiered.formats[1:]] == contenders.tiers_at(budget, sizes_of(net), 1024)


def test_room_for_more_tokens_fills_whole_pages() -> None:
    """A few tokens less, where they would take a page of their own at the model's precision."""
    assert plan.whole_pages(64, 68, 64) == 60
    assert plan.whole_pages(8, 24, 16) == 8
    assert plan.whole_pages(16, 32, 16) == 16
    assert plan.whole_pages(3, 31, 64) == 3  # in the page that is there
    assert plan.whole_pages(1, 32, 16) == 1


def test_mean_code_bits_are_as_requested() -> None:
    net, ids = model(), tokens(600)
    for wanted in (2.5, 3.0, 3.5):
        options = OPTIONS | dict(tiers=["K4V4", "K3V2", "K2V2"], recent_tokens=11)  # 15 and the next token fill a page
        cache = bits.BitsCache(net.config, wanted, **options, max_tokens=600)
        measure.decode(net, ids, cache, prompt=300, chunk=50)
        assert wanted - 0.15 < bits.mean_bits(cache.tiered) <= wanted + 0.25  # whole pages
        cache.tiered.check()


@pytest.mark.parametrize("width", [2, 3, 4, 8])
def test_kivi_groups_round_trip_within_half_a_step(width: int) -> None:
    x = torch.randn(2, 3, 64, 96)
    block = quantize_groups(x, width, 32)
    assert block.nbytes == x.numel() * width // 8 + x.numel() // 32 * 4
    step = (x.unflatten(-1, (-1, 32)).amax(-1) - x.unflatten(-1, (-1, 32)).amin(-1)) / (2**width - 1)
    error = (dequantize_groups(block, 32) - x).unflatten(-1, (-1, 32)).abs().amax(-1)
    assert bool((error <= 0.51 * step + 4e-3).all())


def test_the_baseline_keeps_order_and_counts_its_bytes() -> None:
    net, ids = model(), tokens(300)
    cache = KiviCache(net.config, 8, 8, group=32, residual=32)
    scores, _ = measure.decode(net, ids, cache, prompt=100, chunk=40)
    exact, _ = measure.decode(net, ids, DynamicCache(config=net.config), prompt=100, chunk=40)
    assert sum(scores.nll[0]) == pytest.approx(sum(exact.nll[0]), rel=0.02)
    assert cache.get_seq_length() == 300
    layer = cache.layers[0]
    old, recent = layer.quantised, 300 - layer.quantised
    assert 32 <= recent < 64
    per_token = 2 * 2 * (64 + 64 // 32 * 4)  # K and V, two heads: codes, and scale and zero of a group
    assert layer.nbytes == old * per_token + recent * 2 * 2 * 64 * 2


def test_a_baseline_fits_its_budget() -> None:
    net, ids = model(), tokens(512)
    for budget in (0.5, 0.35, 0.25):
        found = contenders.kivi(budget, sizes_of(net), 512)
        assert found
        for contender in found:
            cache = contender.make(net.config, 1, 512)
            measure.decode(net, ids, cache, prompt=500, chunk=12)
            assert contender.size(cache) <= (budget + 0.02) * sizes_of(net).full_bytes(1, 512)
    assert contenders.kivi(0.05, sizes_of(net), 512) == []
    groups = [[c.options["group"] for c in contenders.kivi(0.25, sizes_of(net), n)] for n in (1024, 2048)]
    assert groups == [[32], [32, 64]]  # the longer text affords wider codes in large groups


def test_held_bytes_count_a_float32_model_as_16_bit() -> None:
    net, ids = model(), tokens(40)
    cache = DynamicCache(config=net.config)
    measure.decode(net, ids, cache, chunk=40)
    assert contenders.tensor_bytes(cache) == sizes_of(net).full_bytes(1, 40)


def test_saved_results_are_continued(tmp_path: Path) -> None:
    net, ids = model(), tokens(120)
    state = results.Quality({"name": "x", "date": "2026-01-01", "revision": None}, "tiny", ["text"])
    wanted = [contenders.strata(0.5, **OPTIONS), contenders.strata(0.3, **OPTIONS)]
    saved: list[int] = []

    def after() -> None:
        results.save(state, tmp_path / "quality.json")
        saved.append(len(state.rows))

    quality.run(net, ids, wanted[:1], state, prompt=60, chunk=20, after=after)
    text = (tmp_path / "quality.json").read_text()
    assert '"recent_tokens"' in text
    assert '"sink_tokens"' in text
    older = text.replace('"recent_tokens"', '"window"').replace('"sink_tokens"', '"sinks"')
    (tmp_path / "quality.json").write_text(older)  # names of options before they were renamed
    again = results.load(tmp_path / "quality.json")
    assert [row.name for row in again.rows] == ["16 bit", "kvstrata"]
    assert again.rows[1].perplexity(0) == pytest.approx(state.rows[1].perplexity(0), rel=1e-4)
    ran: list[str] = []
    quality.run(net, ids, wanted, again, prompt=60, chunk=20, tick=lambda name, n: ran.append(name))
    assert [row.budget for row in again.rows] == [None, 0.5, 0.3]
    assert ran.count("kvstrata") == 3  # one contender of three chunks, the other was there
    (tmp_path / "quality.json").write_text('{"schema": 9}')
    with pytest.raises(ValueError, match="not a result of kvstrata eval"):
        results.load(tmp_path / "quality.json")


def test_rows_of_another_revision_are_measured_again() -> None:
    net, ids = model(), tokens(120)
    machine = {"name": "x", "date": "2026-01-01T00:00Z", "revision": "a" * 40}
    state = results.Quality(machine, "tiny", ["text"])
    half, third = contenders.strata(0.5, **OPTIONS), contenders.strata(0.3, **OPTIONS)
    depth = {"lengths": [220], "depths": [0.5], "asked": 1}
    quality.run(net, ids, [half, third], state, prompt=60, chunk=20)
    quality.run_needles(net, Letters(), "hay " * 200, [half], state, **depth)

    ran: list[str] = []
    state.machine = machine | {"date": "2026-01-02T00:00Z"}  # the same revision: the run continues
    quality.run(net, ids, [half, third], state, prompt=60, chunk=20, tick=lambda name, n: ran.append(name))
    quality.run_needles(net, Letters(), "hay " * 200, [half], state, **depth, tick=lambda name, n: ran.append(name))
    assert ran == []

    state.machine = machine | {"date": "2026-01-03T00:00Z", "revision": "b" * 40}
    quality.run(net, ids, [half], state, prompt=60, chunk=20, tick=lambda name, n: ran.append(name))
    quality.run_needles(net, Letters(), "hay " * 200, [half], state, **depth, tick=lambda name, n: ran.append(name))
    assert ran.count("16 bit") == ran.count("kvstrata") == 4  # three chunks and a needle each
    old, new = "revision aaaaaaaaaa, 2026-01-01", "revision bbbbbbbbbb, 2026-01-03"
    assert [(row.budget, row.measured) for row in state.rows] == [(None, new), (0.5, new), (0.3, old)]
    assert [needle.measured for needle in state.needles] == [new, new]
    assert "revisions bbbbbbbbbb, aaaaaaaaaa, 2026-01-01 to 2026-01-03" in render.table(state, {}).document()
    assert new in render.table(state, {"table": "needles"}).document()


def test_a_failing_peer_is_reported_and_the_rest_runs() -> None:
    def broken(config: object, rows: int, length: int) -> object:
        raise RuntimeError("no kernel for 3 bits\nand more")

    state = results.Quality({"name": "x", "date": "2026-01-01", "revision": None}, "tiny", ["text"])
    wanted = [
        contenders.Contender("theirs 3 bit", "peer", broken, contenders.tensor_bytes),
        contenders.strata(0.5, **OPTIONS),
    ]
    quality.run(model(), tokens(120), wanted, state, prompt=60, chunk=20)
    assert [row.name for row in state.rows] == ["16 bit", "kvstrata"]
    assert "theirs 3 bit absent: RuntimeError: no kernel for 3 bits" in render.caption(state)
    ours = contenders.Contender("ours", "ours", broken, contenders.tensor_bytes)
    with pytest.raises(RuntimeError, match="no kernel"):
        quality.run(model(), tokens(120), [ours], state, prompt=60, chunk=20)


def test_tables_select_rows_and_plot_is_written(tmp_path: Path) -> None:
    net, ids = model(), tokens(120, rows=2)
    state = results.Quality({"name": "x", "date": "2026-01-01", "revision": None}, "tiny", ["a", "b"])
    quality.run(net, ids, [contenders.strata(0.5, **OPTIONS)], state, prompt=60, chunk=20)
    quality.run_needles(
        net, Letters(), "hay " * 200, [contenders.strata(0.5, **OPTIONS)], state, lengths=[220], depths=[0.5], asked=1
    )
    table = render.table(state, {"table": "budgets", "names": "kv*"}).document()
    assert "| 60 after 60 | kvstrata | 0.5 |" in table
    assert "16 bit |" not in table.splitlines()[2]
    assert "depth 0.5" in render.table(state, {"table": "needles"}).document()
    with pytest.raises(ValueError, match="table 'x'"):
        render.table(state, {"table": "x"}).document()
    pytest.importorskip("matplotlib")
    assert plot.plot(state, tmp_path / "q.png").stat().st_size > 1000


def test_peers_are_absent_only_where_they_have_no_rows() -> None:
    row = results.Row("theirs 4 bit", "peer", 8, 4, 4, None, {}, 100, 100, [[4.0]], [[]], [[]], [4])
    state = results.Quality({}, "tiny", ["text"], {"theirs 3 bit": "no kernel"}, [row])
    state.note_absent({"theirs": "not installed", "others": "not installed"})
    assert state.absent == {"theirs 3 bit": "no kernel", "others": "not installed"}


def test_pairs_are_of_one_width_and_read_the_same_chunks() -> None:
    """Four chunks of 10 tokens: a KL lower by 2 in each is 0.2 a token, for certain."""

    def row(name: str, kind: str, kl: float, chunk: int = 10) -> results.Row:
        sums = [[kl, kl, kl, kl], [2 * kl, 0.0, kl, kl]]
        return results.Row(name, kind, 40, 0, chunk, None, {}, 1, 2, sums, sums, [[9] * 4] * 2, [10] * 4)

    rows = [row("tiers, 3 bits", "ours", 1.0), row("uniform K4V2, 3 bits", "variant", 3.0)]
    rows += [row("uniform K2V2, 2 bits", "variant", 9.0), row("uniform K3V3, 3 bits", "variant", 9.0, chunk=20)]
    state = results.Quality({"name": "x", "date": "2026-01-01", "revision": None}, "tiny", ["a", "b"], {}, rows)
    _, lines = render.pairs(state, {})
    ((width, against, a, b, both),) = lines
    assert (width, against, a) == ("tiers, 3 bits", "uniform K4V2", "-200.0 [-200.0, -200.0]")
    assert b.startswith("-200.0 [-3")
    assert both.startswith("-200.0 [-2")
    header, same = render.pairs(state, {"what": "nll"})
    assert (header[2], same) == ("nll, a", lines)
    with pytest.raises(ValueError, match="what 'loss'"):
        render.pairs(state, {"what": "loss"})
    assert rows[1].difference(rows[0], "kl", 0)[0] == pytest.approx(0.2)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_rounding_has_the_error_of_its_width(bits: int) -> None:
    """Rounded rows equal the packed rows of `test_quantize.py`; sink, recent and newest tokens are exact."""
    x = torch.randn(4000, 64, generator=torch.Generator().manual_seed(0))
    noise = (rounding.round_rows(x, bits, 1.0) - x).square().sum() / x.square().sum()
    assert -10 * math.log10(float(noise)) == pytest.approx(SQNR_DB[bits], abs=0.3)
    cache = rounding.RoundedCache(model().config, bits, bits, recent_tokens=7, sink_tokens=4)
    k, v = torch.randn(2, 1, 1, 40, 64, generator=torch.Generator().manual_seed(1))
    for start in (0, 20):
        got = cache.update(k[..., start : start + 20, :], v[..., start : start + 20, :], 0)
        for out, exact in zip(got, (k, v), strict=True):
            same = (out == exact[..., : start + 20, :]).all(-1).flatten().tolist()
            assert same == [i < 4 or i >= start - 7 for i in range(start + 20)]
    centre = k[..., :20, :].mean(-2, keepdim=True)
    want_k = rounding.round_rows(k[..., 4:13, :] - centre, bits, quant.K_GAIN[bits]) + centre
    want_v = rounding.round_rows(v[..., 4:13, :], bits, quant.V_GAIN[bits])
    for out, want in zip(got, (want_k, want_v), strict=True):
        torch.testing.assert_close(out[..., 4:13, :], want)
    # Through the bytes of a page it is the same, but for scales of fp16.
    format = Format(bits, bits, 64, 16)
    rows_k, rows_v = k[0, 0, :16], v[0, 0, :16]
    page = quant.quantize_page(rows_k, rows_v, format, centre[0, 0])
    stored = quant.restore(*quant.dequantize_page(page, format), format, centre[0, 0])
    want_k = rounding.round_rows(rows_k - centre[0, 0], bits, quant.K_GAIN[bits]) + centre[0, 0]
    for out, want in zip(stored, (want_k, rounding.round_rows(rows_v, bits, quant.V_GAIN[bits])), strict=True):
        torch.testing.assert_close(out, want, rtol=2e-3, atol=2e-3)
    for is_k, x in ((True, k), (False, v)):
        shift = x.mean(-2, keepdim=True) if is_k else 0.0
        want = rounding.round_rows(x - shift, bits, (quant.K_GAIN if is_k else quant.V_GAIN)[bits]) + shift
        got_x = sensitivity.round_trip(x, bits, is_k)
        assert torch.equal(got_x[..., :4, :], x[..., :4, :])
        torch.testing.assert_close(got_x[..., 4:, :], want[..., 4:, :], rtol=2e-3, atol=2e-3)
    assert contenders.layer_bytes(cache) == 4 * 64 * 11 + 29 * (64 * bits // 4 + 4)
    mixed = LlamaConfig(**SIZES)
    mixed.layer_types = ["full_attention", "sliding_attention"]
    with pytest.raises(ValueError, match="full attention only, got sliding_attention"):
        rounding.RoundedCache(mixed, bits, bits, recent_tokens=7, sink_tokens=4)


def test_a_needle_is_where_it_should_be() -> None:
    hay = "0123456789" * 60
    given = needle.task(Letters(), hay, 400, 0.5, seed=3)
    text = "".join(chr(int(i)) if int(i) >= 32 else "?" for i in given.ids)
    assert len(given.ids) == 400
    assert len(given.answer) == 5
    net = model()
    found, logprob = needle.ask(net, given, DynamicCache(config=net.config))
    assert isinstance(found, bool)
    assert math.isfinite(logprob)
    assert logprob < 0
    with pytest.raises(ValueError, match="depth"):
        needle.task(Letters(), text, 400, 1.5, seed=0)


def test_sensitivity_finds_the_layer_that_matters() -> None:
    net = model()
    with torch.no_grad():
        net.model.layers[1].self_attn.o_proj.weight.zero_()  # what this layer attends to goes nowhere
    found = sensitivity.measure_sensitivity(net, tokens(64))
    assert 0 <= found.k[1] < 1e-5
    assert 0 <= found.v[1] < 1e-5
    assert found.v[0] > 1e-3
    assert found.compressed == [0, 1]


def test_sensitivities_of_layers_that_matter_little_are_not_negative() -> None:
    """Exact predictions are kept in fp16, where they do not sum to 1."""
    for seed in range(4):
        net = model(seed)
        with torch.no_grad():
            for layer in net.model.layers:
                layer.self_attn.o_proj.weight.mul_(1e-4)
        found = sensitivity.measure_sensitivity(net, tokens(64))
        assert all(0 <= kl < 1e-5 for kl in found.k + found.v)


def test_sensitivity_of_hybrid_layers() -> None:
    net = tiny_model("falcon_h1", "sdpa")
    found = sensitivity.measure_sensitivity(net, tokens(64))
    assert found.compressed == [0, 1]
    assert min(found.k + found.v) > 1e-4
    with pytest.raises(ValueError, match="calibration: expected 2 layers"):
        sensitivity.measure_sensitivity(net, tokens(64), Calibration([LayerCalibration()]))


def test_advice_keeps_its_bound_and_loads(tmp_path: Path) -> None:
    net, ids = model(), tokens(400)
    found = sensitivity.Sensitivity(2, [1.0], [0.1])
    options = dict(recent_tokens=12, sink_tokens=4, page_tokens=16, settle_every=16)
    loose = advise.advise(net, ids, found, 0.5, prompt=200, chunk=50, steps=3, **options)
    assert loose.family == "K over V"
    assert loose.arguments is not None
    kept = [step for step in loose.steps if step.fits]
    assert loose.arguments["budget"] == min(step.budget for step in kept)
    assert all(step.kl <= 0.5 for step in kept)
    advise.write(loose, tmp_path / "advice.json")
    assert json.loads((tmp_path / "advice.json").read_text()) == loose.arguments
    cache = StrataCache.from_file(net.config, tmp_path / "advice.json", max_tokens=400)
    measure.decode(net, ids, cache, prompt=200, chunk=50)
    assert cache.memory().fraction <= loose.arguments["budget"] + 0.01
    none = advise.advise(net, ids, found, 1e-9, prompt=200, chunk=50, **options)
    assert none.arguments is None
    with pytest.raises(ValueError, match="keeps the bound"):
        advise.write(none, tmp_path / "none.json")
    with pytest.raises(ValueError, match="bound: expected"):
        advise.advise(net, ids, found, 0.0, prompt=200, chunk=50)


def test_default_texts_exist() -> None:
    for name in texts.DEFAULT + texts.HELD_OUT:
        assert len(texts.text(name)) > 10_000, name
    with pytest.raises(ValueError, match="text: expected"):
        texts.load(["no such file"])


def test_texts_of_one_stem_are_all_kept(tmp_path: Path) -> None:
    files = [tmp_path / folder / name for folder, name in (("a", "notes.txt"), ("b", "notes.txt"), ("b", "more.md"))]
    for number, file in enumerate(files):
        file.parent.mkdir(exist_ok=True)
        file.write_text(f"text {number}")
    one, two, more = map(str, files)
    assert texts.load([one, two, more]) == {"a/notes.txt": "text 0", "b/notes.txt": "text 1", "more": "text 2"}
    own = tmp_path / "a" / "typing.txt"
    own.write_text("of my own")
    assert texts.load(["typing", str(own)]) == {"typing": texts.text("typing"), "a/typing.txt": "of my own"}
    for same in ([one, more, str(tmp_path / "b" / ".." / "a" / "notes.txt")], ["typing", "typing"]):
        with pytest.raises(ValueError, match="text: expected texts with names of their own"):
            texts.load(same)


def test_other_texts_have_a_file_and_a_table_of_their_own(tmp_path: Path) -> None:
    for name, text in (("quality", "topics"), ("quality_long", "argparse")):
        machine = dict(slug="cpu-x", name="x", date="2026-01-01")
        row = results.Row("16 bit", "exact", 8, 4, 4, None, {}, 100, 100, [[4.0]], [[]], [[]], [4])
        results.save(results.Quality(machine, "toy", [text], rows=[row]), tmp_path / "cpu-x" / f"{name}.json")
    marked = "<!-- kvstrata:quality_long -->\n<!-- /kvstrata:quality_long -->\n"
    table = publish.render_document(marked, publish.load_all(tmp_path))
    assert "argparse" in table
    assert "topics" not in table
    assert results.load(tmp_path / "cpu-x" / "quality.json").op == "quality"
