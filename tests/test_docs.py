"""Documents: Python blocks of README.md and docs/ run, links exist, tables match the results, examples run."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCKS = [
    pytest.param(block, id=f"{path.name}-{i}")
    for path in DOCUMENTS
    for i, block in enumerate(re.findall(r"```python\n(.*?)```", path.read_text(), re.DOTALL))
]


def _given(block: str) -> dict[str, object]:
    """The model and the prompt that a block about transformers takes for granted, tiny and random."""
    if "model." not in block or "model =" in block:
        return {}
    pytest.importorskip("transformers")
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = dict(vocab_size=128, hidden_size=64, intermediate_size=64, num_hidden_layers=2, head_dim=64)
    heads = dict(num_attention_heads=4, num_key_value_heads=2, eos_token_id=None)
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads)).eval()
    ids = torch.randint(2, 128, (1, 400))
    return {"model": model, "inputs": {"input_ids": ids, "attention_mask": torch.ones_like(ids)}}


@pytest.mark.parametrize("block", BLOCKS)
def test_python_block_runs(block: str) -> None:
    if "kvstrata.engines.transformers" in block:
        pytest.importorskip("transformers.generation.continuous_batching.cache_allocators")  # transformers 5.19
    exec(compile(block, "document", "exec"), _given(block))


LINKS = [(path, link) for path in DOCUMENTS for link in re.findall(r"\]\((?!http)([^)#]+)", path.read_text())]


@pytest.mark.parametrize(("path", "link"), LINKS, ids=lambda x: getattr(x, "name", x))
def test_relative_links_exist(path: Path, link: str) -> None:
    assert (path.parent / link).exists()


def anchors(path: Path) -> set[str]:
    """Anchors of a document's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_anchors_exist(path: Path) -> None:
    links = re.findall(r"\]\((?!http)([^)#]*\.md)?#([^)]+)\)", path.read_text())
    missing = [
        f"{file}#{anchor}" for file, anchor in links if anchor not in anchors(path.parent / file if file else path)
    ]
    assert not missing


def test_tables_are_those_of_the_results(monkeypatch: pytest.MonkeyPatch) -> None:
    from typer.testing import CliRunner

    from kvstrata.tools.cli import app

    monkeypatch.chdir(ROOT)
    done = CliRunner().invoke(app, ["report", "--check"])
    assert done.exit_code == 0, done.output


@pytest.mark.gpu
@pytest.mark.parametrize("example", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.name)
def test_example_runs(example: Path) -> None:
    done = subprocess.run([sys.executable, str(example)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
