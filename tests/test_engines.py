"""Options of an engine: formats, bytes of a block, heads of a rank, names of layers."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys

import pytest
import torch

from conftest import HAS_GPU
from kvstrata import Format
from kvstrata.engines.options import BLOCK_SIZES, HEAD_DIMS, Options, heads_of_rank, layer_index

DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
FORMATS = ("K8V8", "K8V4", "K4V4", "K4V2", "K3V3", "K2V2")


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_bytes_of_a_token_do_not_depend_on_the_block(name, head_dim):
    options = Options(name)
    for block_size in BLOCK_SIZES:
        fmt = options.format_of(head_dim, block_size)
        assert block_size % fmt.page_tokens == 0
        assert fmt.block_bytes(block_size, 3) == 3 * block_size * options.bytes_per_token(head_dim)
        assert block_size * fmt.bytes_per_token % 16 == 0  # strides of blocks and heads


def test_block_of_64_is_one_page():
    assert Options("K4V4").format_of(128, 64) == Format.parse("K4V4", 128, 64)
    assert Options("K4V4").bytes_per_token(128) * 3.7 < 2 * 2 * 128  # 3.7 times the tokens of bfloat16


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (None, "additional_config: expected"),
        ({}, "additional_config: expected"),
        ({"kvstrata": "K4V4"}, "additional_config: expected"),
        ({"kvstrata": {}}, "additional_config: expected"),
        ({"kvstrata": {"format": "K16V16"}}, "kvstrata.format: expected a quantised format"),
        ({"kvstrata": {"format": "int4"}}, "kvstrata.format: expected K and V of 8, 4, 3 or 2 bits"),
        ({"kvstrata": {"format": "K5V4"}}, "such as 'K4V4', got 'K5V4'"),
        ({"kvstrata": {"format": 4}}, "kvstrata.format: expected K and V of 8, 4, 3 or 2 bits such as 'K4V4', got 4"),
        ({"kvstrata": {"format": "K4V4", "tails": 1}}, "got 'tails'"),
        ({"kvstrata": {"format": "K4V4", "tail": 64}}, "kvstrata.tail: expected true or false, got 64"),
        ({"kvstrata": {"format": "K4V4", "calibration": 3}}, "kvstrata.calibration: expected the path"),
    ],
)
def test_wrong_options_are_named_in_the_error(config, message):
    with pytest.raises((ValueError, TypeError), match=message):
        Options.parse(config)


def test_options_are_parsed():
    given = {"kvstrata": {"format": "K8V4", "calibration": "a.safetensors"}, "other": 1}
    assert Options.parse(given) == Options("K8V4", "a.safetensors")


@pytest.mark.parametrize(("head_dim", "block_size"), [(80, 64), (128, 48), (128, 8), (128, 512)])
def test_unsupported_sizes_are_named(head_dim, block_size):
    with pytest.raises(ValueError, match="head_dim" if head_dim == 80 else "block_size"):
        Options("K4V4").format_of(head_dim, block_size)


def test_heads_of_a_rank():
    assert [heads_of_rank(8, 2, rank, 4) for rank in range(4)] == [slice(2 * r, 2 * r + 2) for r in range(4)]
    assert [heads_of_rank(2, 1, rank, 4).start for rank in range(4)] == [0, 0, 1, 1]
    for total, local, ranks in ((8, 4, 4), (6, 1, 4), (3, 1, 2)):
        with pytest.raises(ValueError, match="calibration: expected"):
            heads_of_rank(total, local, 0, ranks)


def test_layer_index_is_the_only_number_in_the_name():
    assert layer_index("model.layers.13.self_attn.attn") == 13
    assert layer_index("layers.0") == 0
    for name in ("model.attn", "model.layers.1.experts.2.attn"):
        with pytest.raises(ValueError, match="one number"):
            layer_index(name)


def test_importing_without_vllm_says_what_to_install():
    if importlib.util.find_spec("vllm") is not None:
        pytest.skip("vLLM is installed")
    code = "import kvstrata.engines, sys; assert 'vllm' not in sys.modules; import kvstrata.engines.vllm"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "ImportError: kvstrata.engines.vllm needs vLLM 0.32" in result.stderr
    code = "from kvstrata.engines import register_vllm; register_vllm()"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "pip install 'kvstrata[vllm]'" in result.stderr


def test_options_survive_json():
    assert Options.parse(json.loads('{"kvstrata": {"format": "K4V4"}}')) == Options("K4V4")
