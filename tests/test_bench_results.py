"""Results of bench: saved, compared, rendered and plotted."""

import json
from dataclasses import replace

import pytest
import torch

import toy
from kvstrata.tools.bench import Timer, probes, render, results, runner
from kvstrata.tools.bench.cases import decode
from kvstrata.tools.bench.plot import MEMORY, View, groups, plot
from kvstrata.tools.bench.results import CaseResult, Report, Row
from kvstrata.tools.bench.stats import summary
from kvstrata.tools.render import inject

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def report():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "copy_bandwidth", lambda timer: probes.copy_bandwidth(timer, 1 << 16, rounds=5))
        return runner.run(toy.cases(CPU, True), CPU, True, timer=Timer("cpu", flush_bytes=1 << 12))


def test_results_survive_the_file(report, tmp_path):
    path = results.save(report, tmp_path)
    assert path == tmp_path / report.machine["slug"] / "toy.json"
    assert list(path.parent.iterdir()) == [path]
    text = path.read_text()
    again = results.load(path)
    assert results.dumps(again) == text
    assert list(json.loads(text)) == ["schema", "op", "machine", "method", "peak", "floor", "cases"]
    assert '"samples": [' in text
    assert max(len(line.split(",")) for line in text.splitlines()) > 5  # samples on one line
    assert again.cases[0].rows[0].samples == [round(x, 2) for x in report.cases[0].rows[0].samples]


def test_cases_of_a_saved_result_are_replaced_and_added(report):
    before = replace(report, cases=report.cases[:1])
    again = replace(report, cases=[replace(case, bytes=7) for case in report.cases[:2]])
    merged = results.merge(before, again)
    assert [case.name for case in merged.cases] == [case.name for case in report.cases[:2]]
    assert {case.bytes for case in merged.cases} == {7}
    assert all(case.measured for case in merged.cases)
    with pytest.raises(ValueError, match="expected the op of the saved result, toy"):
        results.merge(before, replace(again, op="other"))


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"schema": 99}', '{"schema": 1, "cases": [{}]}'])
def test_other_files_are_refused(tmp_path, content):
    path = tmp_path / "x.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"x\.json: not a kvstrata result"):
        results.load(path)


def test_a_failed_write_leaves_the_old_file(report, tmp_path, monkeypatch):
    path = results.save(report, tmp_path)
    before = path.read_bytes()
    monkeypatch.setattr(results, "dumps", lambda report: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        results.save(report, tmp_path)
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


def test_markdown_selects_rows_and_columns(report):
    options = {"rows": "*-64", "contenders": "ours,naive", "columns": "contender,us,speedup"}
    lines = render.table(report, options).document().splitlines()
    assert lines[0] == "| contender | us | vs baseline |"
    assert [line.split(" | ")[0] for line in lines[2:4]] == ["| ours", "| naive"]
    assert lines[4] == ""
    assert "elsewhere absent" not in lines[5]  # a chosen part has the caption; the whole table has the notes too
    assert "elsewhere absent" in render.table(report, {}).document()
    pivot = render.table(report, {"pivot": "us", "contenders": "ours*"}).document().splitlines()
    assert pivot[0] == "| case (us) | ours | ours-too |"
    assert len(pivot) == 2 + 2 + 2
    with pytest.raises(ValueError, match="column 'nothing'"):
        render.table(report, {"columns": "nothing"}).document()


def test_inject_fills_every_block_and_keeps_the_rest():
    other = "<!-- kvstrata:storex -->x<!-- /kvstrata:storex -->"
    text = f"a\n<!-- kvstrata:store pivot=us -->\nold\n<!-- /kvstrata:store -->\nb\n{other}"
    once = inject(text, "kvstrata:store", lambda options: f"new {options}", {"pivot"})
    assert "new {'pivot': 'us'}" in once
    assert "old" not in once
    assert once.endswith(f"b\n{other}")
    assert inject(once, "kvstrata:store", lambda options: f"new {options}", {"pivot"}) == once
    with pytest.raises(ValueError, match="0 opening"):
        inject(text, "kvstrata:other", "t", ())
    with pytest.raises(ValueError, match="1 opening and 0 closing"):
        inject("<!-- kvstrata:store -->", "kvstrata:store", "t", ())
    with pytest.raises(ValueError, match="marker option 'colour'"):
        inject(text.replace("pivot", "colour"), "kvstrata:store", lambda options: "t", {"pivot"})


@pytest.mark.parametrize(("y", "suffix"), [("tb_s", ".svg"), ("us", ".png"), ("tflop_s", ".svg")])
def test_plot_writes_a_figure(report, tmp_path, y, suffix):
    ((name, cases),) = groups(report, View()).items()
    assert name == "fp32"
    path = plot(report, cases, tmp_path / "deep" / f"f{suffix}", View(y=y))
    first = path.read_bytes()
    assert len(first) > 5000
    assert plot(report, cases, path, View(y=y)).read_bytes() == first


def test_plot_of_times_over_memory_has_one_line_per_context(tmp_path):
    """A line for each context, points where its cases are in bytes, and the fastest peer at 16 bit."""

    def case(kind: str, tokens: int, share: float, us: float) -> CaseResult:
        params = {"kind": kind, "B": 2, "heads": 8, "kv_heads": 4, "head_dim": 64, "T": tokens}
        rows = [Row("kvstrata", "ours", us=summary([us])), Row("other", "peer", us=summary([7.0]))]
        return CaseResult(kind, params, int(share * 4 * 2 * 4 * 64 * tokens), 0, 1, True, rows=rows)

    cases = [case("16bit", 1024, 1.0, 9.0), case("mixed", 1024, 0.25, 3.0), case("mixed", 2048, 0.25, 5.0)]
    report = Report("decode", {"name": "GPU", "slug": "gpu"}, {}, {"tb_s": 4.0}, {}, cases)
    ((name, drawn),) = groups(report, View(MEMORY, by="T")).items()
    assert name == "memory-2-8-4-64"
    assert [case.name for case in drawn] == ["mixed", "mixed", "16bit"]
    text = plot(report, drawn, tmp_path / "f.svg", View(MEMORY, "us", by="T")).read_text()
    assert "share of 16 bit" in text
    assert "T 2048" in text


@pytest.mark.parametrize(
    ("tiers", "budget"), [(decode.NARROW, 0.2), (decode.WIDE, 0.4), (decode.EIGHT, 0.5), (("K8V8",), 0.75), ((), 1.0)]
)
def test_mixes_have_the_bytes_of_their_budget(tiers, budget):
    shape = decode.Shape(32, 16384)
    share = decode.bytes_of(shape, tiers, budget) / decode.bytes_of(shape, (), 1.0)
    assert share == pytest.approx(budget, abs=0.005)
    assert int(decode.counts_of(shape, tiers, budget)[0, 0].sum()) == shape.tokens
