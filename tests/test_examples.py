"""The examples run, and the engine says what the model says."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch

FOLDER = Path(__file__).parents[1] / "examples"


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def prompts(device: str) -> list[torch.Tensor]:
    return [torch.randint(0, 512, (n,), device=device) for n in (40, 3, 77, 16, 25)]


def test_engine_tokens_equal_the_models() -> None:
    """Greedy, with nothing compressed: token by token what `generate` gives each prompt alone. Places are fewer than
    prompts, so some wait, and one is empty at the end."""
    pytest.importorskip("transformers")
    engine = example("engine")
    model, given = engine.small_model("cpu", torch.float32), prompts("cpu")
    mine = engine.Engine(model, places=2, budget=None, page_tokens=16, max_tokens=256)
    found = engine.serve(mine, given, 12)
    assert not any(map(mine.cache.length, mine.cache.requests))
    for prompt, new in zip(given, found, strict=True):
        ids = prompt.unsqueeze(0)
        options = dict(max_new_tokens=12, min_new_tokens=12, do_sample=False, pad_token_id=0, eos_token_id=None)
        want = model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, len(prompt) :]
        assert new == want.tolist()


@pytest.mark.parametrize("budget", [None, 0.3])
@pytest.mark.gpu
def test_captured_engine_tokens_equal_eager_ones(budget: float | None) -> None:
    engine = example("engine")
    model, given = engine.small_model("cuda", torch.bfloat16), prompts("cuda")
    found = []
    for captured in (True, False):
        mine = engine.Engine(
            model, places=2, budget=budget, recent_tokens=16, sink_tokens=0, page_tokens=16, max_tokens=256
        )
        if not captured:
            mine.runner = mine.step
        found.append(engine.serve(mine, given, 80))
        mine.cache.check()
    assert found[0] == found[1]


def test_the_engine_runs_as_a_script(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    example("engine").main(20)
    assert capsys.readouterr().out.count("+ 20:") == 6


@pytest.mark.gpu
def test_a_store_overlapping_attention() -> None:
    example("overlap_store")
