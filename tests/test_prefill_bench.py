"""The choice of a kernel by shape, and the benchmark: its cases, its checks, its tables and figures."""

from __future__ import annotations

from dataclasses import asdict

import pytest
import torch

from kvstrata import prefill_attention
from kvstrata.attention.prefill import configs as prefill_configs
from kvstrata.attention.prefill.configs import TABLE, default_of, nearest
from kvstrata.attention.prefill.job import PrefillJob
from kvstrata.tools.bench import results, runner
from kvstrata.tools.bench.attention import suffix_attention
from kvstrata.tools.bench.cases import prefill as cases
from kvstrata.tools.bench.stats import summary
from kvstrata.tools.publish import figures, render_document

CPU = torch.device("cpu")
MANY = ["kvstrata", "flash", "cuda", "cudnn"]


def test_nearest_config_is_found_by_shape() -> None:
    for key, config in TABLE.items():
        assert nearest(*key) == config
    assert nearest(64, 700, True, False) == TABLE[64, 512, True, False]
    assert nearest(64, 800, True, False) == TABLE[64, 1024, True, False]
    assert nearest(64, 100_000, True, True) == TABLE[64, 512, True, True]  # few tiles before a near length
    assert nearest(128, 0, False, True) == nearest(128, 128, False, True)
    assert nearest(96, 4096, False, False) == nearest(128, 4096, False, False)
    assert nearest(256, 4096, False, False) == default_of(256, True)


def test_prefill_cu_where_it_was_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """The three cases of the benchmark in which it was, and lengths around them; neighbours stay as they were."""
    monkeypatch.setattr(prefill_configs, "processors_of", lambda device: (132, True))

    def first(batch: int, length: int, dim: int, causal: bool) -> bool:
        q = torch.empty(batch, length, 16, dim, dtype=torch.float16, device="meta")
        scale: tuple = (dim**-0.5, None, None, None, False)
        return prefill_configs.cuda_first(PrefillJob(q, q, q, None, None, length, length, causal, *scale))

    assert first(8, 128, 64, True)
    assert first(8, 128, 128, True)
    assert first(8, 256, 128, True)
    assert first(8, 100, 64, True)
    assert first(4, 150, 64, True)
    assert first(8, 200, 128, True)
    for batch, length, dim, causal in (
        (8, 128, 64, False), (8, 256, 64, True), (2, 512, 64, True), (8, 128, 128, False), (8, 256, 128, False),
        (4, 512, 128, True), (4, 2048, 128, True), (1, 2048, 128, True), (1, 64, 128, True), (32, 128, 128, True),
    ):  # fmt: skip
        assert not first(batch, length, dim, causal), (batch, length, dim, causal)


def test_ideas_differ_in_one_thing() -> None:
    tiles = cases.ideas()
    tile = asdict(tiles.pop("v3"))
    changed = {
        name: {field for field, value in asdict(other).items() if value != tile[field]} for name, other in tiles.items()
    }
    assert changed == {"copies not overlapped": {"stages"}, "two KV warps": {"warps", "kv_warps", "resident"}}


def test_suffix_attention_equals_dense_attention() -> None:
    """Earlier keys and those of the chunk, each attended to by itself, then one: as aligned to the last key."""
    q, (k, v) = torch.randn(1, 4, 20, 64), torch.randn(2, 1, 4, 90, 64)
    q[0, 1] *= 20  # one part may have all the weight

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, is_causal=causal)

    want = prefill_attention(*(x.transpose(1, 2) for x in (q, k, v)))
    torch.testing.assert_close(suffix_attention(attend, q, k, v).transpose(1, 2), want)


def test_a_stale_output_is_noticed() -> None:
    """A replay that writes nothing leaves the poison, which the second check finds."""
    bench = cases.build(cases.Shape(1, 2, 128, 64, True), 1, CPU)
    kept = bench.contenders["kvstrata"](0)
    assert runner.verify(bench, {"kvstrata": lambda i: kept}, 1) == {}
    assert "error is nan" in runner.verify(bench, {"kvstrata": lambda i: kept}, 1)["kvstrata"]
    assert runner.verify(bench, bench.contenders, 1) == {}


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch) -> results.Report:
    """All cases of a GPU, with times made up: every contender of a case 10 % slower than the one before."""
    monkeypatch.setattr("kvstrata.tools.bench.case.cache_bytes", lambda device: 60 << 20)
    measured = []
    for case in cases.cases(torch.device("cuda"), False):
        names = {"ideas": [*cases.ideas(), "v2"], "tiers": ["kvstrata", "unpack then flash", "unpack then cudnn"]}
        result = results.CaseResult(case.name, case.params, case.bytes, case.flops, case.sets, case.graph)
        for i, name in enumerate([*names.get(case.params["kind"], MANY), "copy", "empty"]):
            us = [10.0 * 1.1**i + 0.01 * (n % 3) for n in range(9)]
            kind = "ours" if i == 0 else "baseline" if name in ("flash", "v2", "unpack then flash") else "peer"
            kind = "probe" if name in runner.PROBES else kind
            result.rows.append(results.Row(name, kind, us=summary(us), samples=us))
        runner._rate(result, case, 4.0)
        measured.append(result)
    machine = {"slug": "nvidia-h200", "name": "NVIDIA H200", "versions": {"torch": "2"}, "date": "2026-01-01"}
    return results.Report(
        "prefill", machine, {"quick": False}, {"tb_s": 4.0}, {"us": 2.0, "kernel": "empty.cu"}, measured
    )


def test_every_length_is_there(report: results.Report) -> None:
    shapes = {(c.params["kind"], c.params["D"], c.params["T"]) for c in report.cases if "T" in c.params}
    for dim in (64, 128):
        for length in (128, 256, 512, 1024, 2048, 8192):
            assert {("full", dim, length), ("causal", dim, length)} <= shapes
    assert len({case.name for case in report.cases}) == len(report.cases)


DOCUMENT = """
<!-- kvstrata:prefill rows=full-*,causal-* contenders=kvstrata,cudnn pivot=tflop_s -->
<!-- /kvstrata:prefill -->
<!-- kvstrata:prefill rows=ideas-full-B2-* contenders="v*,copies *" columns=case,contender,us,speedup -->
<!-- /kvstrata:prefill -->
<!-- kvstrata:prefill targets="tiers-K4V4-32256+512: gpu unpack then flash / gpu kvstrata >= 1.2" -->
<!-- /kvstrata:prefill -->
"""


def test_document_tables_have_rates_ratios_and_targets(report: results.Report) -> None:
    text = render_document(DOCUMENT, [report])
    flops = 4 * 2 * 8 * 512 * 512 * 64
    assert f"| full-B2-H8-S512-D64 | {flops / 10.01e6:.1f} | {flops / 13.32e6:.1f} |" in text
    slower = "1.21x [1.21, 1.21]"
    assert "| ideas-full-B2-H8-S512-D64 | v3 | 10.01 | 1.33x [1.33, 1.33] |" in text
    assert f"| ideas-full-B2-H8-S512-D64 | copies not overlapped | 11.01 | {slower} |" in text
    assert "| 11.01 / 10.01 | >= 1.2 | 1.10 |" in text
    assert "missed" in text


def test_figures_show_operations(report: results.Report, tmp_path) -> None:
    pytest.importorskip("matplotlib")
    written = figures([report], tmp_path)
    wanted = {f"prefill-nvidia-h200-{kind}-{dim}.svg" for kind in ("full", "causal") for dim in (64, 128)}
    assert {path.name for path in written} == wanted
    for path in written:
        text, (kind, dim) = path.read_text(), path.stem.rsplit("-", 2)[1:]
        assert f"prefill on NVIDIA H200: {kind}, D {dim}" in text
        assert "TFLOP/s" in text
        assert "cudnn" in text
        assert "copy" not in text
