"""The vllm benchmark without vLLM: sizes, what becomes of an engine's words, and the parts of its child."""

from __future__ import annotations

import json
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from kvstrata.engines import packed
from kvstrata.engines.batch import Batch, DecodePart
from kvstrata.engines.options import Options
from kvstrata.engines.packed import PackedLayer
from kvstrata.tools import child, publish
from kvstrata.tools.bench import runner, vllm_check, vllm_child, vllm_engine
from kvstrata.tools.bench.cases import vllm as bench
from kvstrata.tools.bench.render import table
from kvstrata.tools.bench.results import dumps, loads

PROBE = [{"first": 4, "second": {"7": -0.5, "8": -1.0, "9": -2.5}}]


def told(us, probe=PROBE):
    cases = {shape.name: [us, us + 1.0, us + 2.0] for shape in bench.SHAPES}
    told = {"vllm": "0.32.0", "cases": cases, "errors": {}, "cache_tokens": 1000, "start_s": 9.0, "probe": probe}
    return told | {"eager": PROBE, "error": 0.004, "compared": 64}


def test_largest_batches_fill_the_same_bytes():
    largest = next(shape for shape in bench.SHAPES if shape.batch is None)
    sizes = {engine: bench.batch_of(largest, engine) for engine in bench.ENGINES}
    assert sizes[bench.BASELINE] == 15
    assert sizes[bench.PEER] == 30
    assert sizes["K4V4"] == 58
    for engine, batch in sizes.items():
        used = batch * bench.token_bytes(engine) * largest.tokens
        assert 0.93 * bench.LARGEST < used <= 1.01 * bench.LARGEST
        assert used < bench.CACHE
    assert 16 * bench.token_bytes(bench.BASELINE) * 32768 < bench.CACHE


def test_cases_without_a_gpu_raise():
    with pytest.raises(LookupError, match="expected a CUDA device"):
        bench.cases(torch.device("cpu"), False)


@pytest.fixture
def ran(monkeypatch):
    """A run whose engines say what the test gives them."""

    def run(by_engine, quick=False):
        monkeypatch.setattr(bench, "measure", lambda engine, shapes: by_engine[engine])
        monkeypatch.setattr(runner, "copy_bandwidth", lambda timer: {"tb_s": 4.0})
        monkeypatch.setattr(runner, "floor", lambda timer: {"us": 1.0, "kernel": "none"})
        chosen = [bench.case_of(shape) for shape in bench.SHAPES]
        saved = []
        report = bench.run(chosen, torch.device("cpu"), quick, after_case=lambda r: saved.append(len(r.cases[0].rows)))
        assert saved == list(range(1, len(saved) + 1))  # after every engine
        return report

    return run


def test_engine_results_become_report_rows(ran, tmp_path):
    answers = dict.fromkeys(bench.ENGINES, (told(100.0), None))
    answers["K4V4"] = (told(50.0), None)
    wrong = [{"first": 4, "second": {"1": -0.5, "2": -1.0, "3": -2.5}}]
    answers["K2V2"] = (told(40.0, wrong), None)
    answers["K4V2"] = ({}, "took more than 150 s")
    late = told(100.0)
    del late["cases"]["prompt-32768"]
    late["errors"]["prompt-32768"] = "no time was left"
    answers["K8V8"] = (late, None)
    report = ran(answers)
    by_name = {case.name: {row.name: row for row in case.rows} for case in report.cases}
    rows = by_name["B32-8192"]
    assert rows["K4V4"].vs_baseline.ratio == pytest.approx(101 / 51)
    assert rows["K4V4"].vs_peer.name == bench.PEER
    assert "with CUDA graphs: logprobs are inf from" in rows["K2V2"].error
    assert rows["K4V2"].error == "took more than 150 s"
    assert by_name["prompt-32768"]["K8V8"].error == "no time was left"
    assert report.machine["versions"]["vllm"] == "0.32.0"
    assert report.failures
    again = loads(dumps(report), "here")
    shown = str(table(again, bench.TABLE).document())
    assert "| largest-32768 | K4V4 | 58 | 2.96 | 19,608 |" in shown  # 58 requests, 51 us a token
    assert "| 1,000 |" in shown
    assert "samples in turn" in shown
    (figure,) = publish.figures([again], tmp_path)
    assert figure.name.startswith("vllm-")
    assert "largest-32768" in figure.read_text()  # in a comment of each text


def test_first_tokens_that_differ_are_not_compared():
    assert bench.logprob_error(PROBE, PROBE) is None
    other = [{"first": 5, "second": PROBE[0]["second"]}]
    assert bench.logprob_error(PROBE, other) == "no prompt has the first token of the reference"
    near = [{"first": 4, "second": {"7": -0.9, "8": -1.0, "9": -4.0}}]
    assert bench.logprob_error(PROBE, near) is None


def test_low_bit_engines_are_compared_with_float32():
    rounded = [{"first": 4, "second": {"1": -0.5, "2": -1.0, "3": -2.5}}]
    good = told(1.0, rounded) | {"eager": rounded}
    assert bench.find_error("K2V2", PROBE, good) is None
    assert "from those of the reference" in bench.find_error("K8V8", PROBE, good)
    assert "attention is 3.0e-02 from float32" in bench.find_error("K2V2", PROBE, good | {"error": 0.03})
    assert "attention is nan" in bench.find_error("K2V2", PROBE, good | {"error": float("nan")})
    assert "no attention was compared" in bench.find_error("K2V2", PROBE, good | {"compared": 0})
    assert bench.find_error(bench.PEER, PROBE, {"probe": PROBE}) is None


@pytest.mark.parametrize("wrong", [False, True])
def test_attention_of_an_engine_is_compared(monkeypatch, wrong):
    options = Options("K4V4")
    layer = PackedLayer(options, 4, 2, 64, 0.125)
    cache = torch.zeros(4, 2, 64, options.bytes_per_token(64), dtype=torch.uint8)
    k, v = torch.randn(2, 70, 2, 64).bfloat16()
    layer.store(k, v, cache, torch.arange(64, 134))
    part = DecodePart(
        2, torch.tensor([[1, 2], [1, 0]], dtype=torch.int32), torch.tensor([70, 33], dtype=torch.int32), None, None
    )
    out = torch.full((3, 4, 64), torch.nan, dtype=torch.bfloat16)
    q = torch.randn(3, 4, 64).bfloat16()
    true = packed.decode_packed

    def decode(*args, **options):
        true(*args, **options)
        if wrong and "backend" not in options:
            options["out"].mul_(1.1)

    monkeypatch.setattr(packed, "decode_packed", decode)
    with vllm_check.compare_with_reference() as worst:
        layer.attend(q, k[:3], v[:3], cache, Batch((part,)), out)
    assert worst.calls == 1
    assert (worst.error > bench.ERROR) == wrong
    assert out[:2].isfinite().all()
    assert out[2].isnan().all()


def test_errors_of_nan_are_infinite():
    worst = vllm_check.Worst()
    worst.add(torch.tensor([torch.nan]), torch.ones(1))
    worst.add(torch.ones(1), torch.ones(1))
    assert worst.error == float("inf")


def test_graphs_are_off_inside_the_context():
    runner = SimpleNamespace(cudagraph_manager=SimpleNamespace(_graphs_captured=True))
    with vllm_check.without_graphs(runner):
        assert not runner.cudagraph_manager._graphs_captured
    assert runner.cudagraph_manager._graphs_captured


def test_the_output_of_a_child_process_is_parsed(monkeypatch):
    spoken = f"noise\n{bench.MARK}{json.dumps({'vllm': 'x'})}\nmore noise"
    monkeypatch.setattr(child, "run", lambda command, seconds: (spoken, 0))
    assert bench.measure("K4V4", bench.SHAPES) == ({"vllm": "x"}, None)
    monkeypatch.setattr(child, "run", lambda command, seconds: ("a\nb\nc\nd", 1))
    assert bench.measure("K4V4", bench.SHAPES) == ({}, "exit code 1: b / c / d")

    def late(command, seconds):
        raise child.Timeout("took long")

    monkeypatch.setattr(child, "run", late)
    assert bench.measure("K4V4", bench.SHAPES) == ({}, "took long")


@pytest.mark.parametrize("format", ["K4V4", "K8V8"])
def test_cache_is_filled_with_pages(format):
    options = Options(format)
    shape = (150, 2, 64, options.bytes_per_token(64))
    caches = [torch.zeros(shape, dtype=torch.uint8) for _ in range(2)]
    runner = SimpleNamespace(kv_caches=caches, model_config=SimpleNamespace(get_head_size=lambda: 64))
    llm = SimpleNamespace(
        llm_engine=SimpleNamespace(
            model_executor=SimpleNamespace(driver_worker=SimpleNamespace(worker=SimpleNamespace(model_runner=runner)))
        )
    )
    vllm_child.fill(llm, "CUSTOM", format)
    layer = PackedLayer(options, 2, 2, 64, 1.0)
    assert torch.equal(caches[0][0], caches[1][64])
    assert all(block.any() for block in caches[0])
    from kvstrata.quant import reference

    pages, fmt = layer.pages(caches[0])
    k, v = reference.restore(*reference.dequantize_page(pages[149].view(2, 1, -1), fmt), fmt)
    assert 0.9 < k.std() < 1.1
    assert 0.9 < v.std() < 1.1


def test_other_caches_are_filled_too():
    plain = torch.zeros(3, 2, 16, 128, dtype=torch.bfloat16)
    assert 0.9 < vllm_child.blocks_like(plain, "FLASH_ATTN", None, 64).float().std() < 1.1
    fp8 = torch.zeros(3, 2, 16, 128, dtype=torch.uint8)
    assert 0.9 < vllm_child.blocks_like(fp8, "FLASH_ATTN", "fp8", 64).view(torch.float8_e4m3fn).float().std() < 1.1


class FakeEngine:
    """Requests that give a token a step, from the second step on."""

    def __init__(self, slots):
        self.running, self.slots, self.steps = {}, slots, 0

    def add_request(self, name, prompt, sampling):
        assert prompt["prompt_token_ids"][0] == vllm_engine.FILLED
        self.running[name] = len(prompt["prompt_token_ids"])

    def step(self):
        self.steps += 1
        names = list(self.running)[: self.slots] if self.steps > 1 else []
        return [SimpleNamespace(request_id=name, outputs=[SimpleNamespace(token_ids=[1])]) for name in names]

    def abort_request(self, names):
        for name in names:
            del self.running[name]

    def has_unfinished_requests(self):
        return bool(self.running)


def test_steps_count_their_tokens(monkeypatch):
    module = ModuleType("vllm")
    module.SamplingParams = SimpleNamespace
    monkeypatch.setitem(sys.modules, "vllm", module)
    engine = FakeEngine(4)
    samples = vllm_child.steps(SimpleNamespace(llm_engine=engine), 4, 2048)
    assert len(samples) == vllm_child.GROUPS
    assert min(samples) > 0
    assert engine.steps < vllm_child.GROWTH
    assert not engine.running
    with pytest.raises(RuntimeError, match="3 of 4 requests with 2048 tokens run at once"):
        vllm_child.steps(SimpleNamespace(llm_engine=FakeEngine(3)), 4, 2048)


def test_prompts_leave_room_for_their_token(monkeypatch):
    module = ModuleType("vllm")
    module.SamplingParams = SimpleNamespace
    monkeypatch.setitem(sys.modules, "vllm", module)
    given = []
    llm = SimpleNamespace(
        generate=lambda rows, sampling, use_tqdm: given.extend(
            (len(r["prompt_token_ids"]), sampling.max_tokens) for r in rows
        )
    )
    assert len(vllm_child.prompts(llm, 2, 100)) == 2
    assert all(length + more <= 100 for length, more in given)


def test_cases_of_a_late_engine_are_kept(monkeypatch):
    def late(command, seconds):
        raise child.Timeout("took more than 1 s and was killed", f"noise\n{bench.MARK}{json.dumps({'vllm': 'x'})}\n")

    monkeypatch.setattr(child, "run", late)
    assert bench.measure(bench.OURS, []) == ({"vllm": "x"}, None)
