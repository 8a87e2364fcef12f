"""A request saved and loaded, and the files that are refused."""

from __future__ import annotations

import json
import math
import random
import struct

import pytest
import torch

from cache_model import fingerprint, make, rows, same
from kvstrata.cache import BudgetExceeded


def saved(tmp_path, **options) -> tuple:
    cache = make(layers=2, max_requests=2, **options)
    for layer in range(2):
        cache.append(layer, *rows(300, seed=layer))
        cache.update_importance(layer, torch.rand(1, 2, 300))
    path = tmp_path / "prefix.safetensors"
    cache.save(path)
    return cache, path


def test_loaded_request_equals_the_saved_one(tmp_path) -> None:
    cache, path = saved(tmp_path)
    twin = cache.load(path)
    other = make(layers=2, max_requests=1, max_tokens=40000, budget=0.4)  # positions of 4 bytes, and room for them
    other.load(path)
    for target, request in ((cache, twin), (other, 0)):
        target.check()
        for layer in range(2):
            for a, b in zip(cache.gather(layer, 0), target.gather(layer, request), strict=True):
                assert torch.equal(a, b)
            assert torch.equal(cache.importance(layer), target.importance(layer, request))
    other.append(0, *rows(50))
    other.check()


def test_a_file_contains_no_dropped_tokens(tmp_path) -> None:
    cache, path = saved(tmp_path, budget=None)
    secret = torch.full((5, 2, 64), 12345.0)
    cache.append(0, secret, secret)
    cache.crop(0, 300)
    cache.save(path)
    assert struct.pack("<f", 12345.0) not in path.read_bytes()


def test_load_settles_into_a_smaller_budget(tmp_path) -> None:
    _, path = saved(tmp_path, budget=0.5)
    small = make(layers=2, max_requests=2, budget=0.22)
    small.load(path)
    small.check()
    tiny = make(layers=2, max_requests=2, budget=0.01)
    before = fingerprint(tiny)
    with pytest.raises(BudgetExceeded):
        tiny.load(path)
    tiny.check()
    assert same(before, fingerprint(tiny))


@pytest.mark.parametrize(
    "options",
    [
        dict(heads=1),
        dict(dim=32),
        dict(layers=1),
        dict(page_tokens=32),
        dict(tiers=("K4V4", "K2V2")),
        dict(dtype=torch.float16),
        dict(importance="ema"),
        dict(max_tokens=299),
    ],
)
def test_a_file_of_a_different_cache_is_refused(tmp_path, options: dict) -> None:
    _, path = saved(tmp_path)
    other = make(**(dict(layers=2, max_requests=2) | options))
    with pytest.raises(ValueError, match="path: expected a request that this cache can hold"):
        other.load(path)
    other.check()
    assert other.requests == ()


def test_other_files_are_refused(tmp_path) -> None:
    from safetensors.torch import save_file

    cache = make(layers=2, max_requests=2)
    path = tmp_path / "x"
    for content in (b"", b"\0" * 7, b"\xff" * 64, b"\x80\x04K\x01.", b"PK\x03\x04" + b"\0" * 100):
        path.write_bytes(content)
        with pytest.raises(ValueError, match="path: expected a request"):
            cache.load(path)
    save_file({"weight": torch.zeros(3)}, path)
    with pytest.raises(ValueError, match=r"kind: expected 'kvstrata\.cache', got None"):
        cache.load(path)
    with pytest.raises(ValueError, match=r"path: expected a request .* it is a folder"):
        cache.load(tmp_path)
    with pytest.raises(FileNotFoundError):
        cache.load(tmp_path / "nowhere")


def rewritten(path, change) -> None:
    """Rewrite a file with other tensors and metadata and a matching digest."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    from kvstrata.cache.ops.files import digest

    with safe_open(path, framework="pt") as file:
        metadata, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    change(metadata, tensors)
    save_file(tensors, path, metadata=metadata | {"digest": digest(tensors)})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m, t: m.update(version="2"), "version: expected 1, got '2'"),
        (lambda m, t: m.update(meaning="[]"), "meaning"),
        (lambda m, t: m.update(meaning="{"), "not a complete"),
        (lambda m, t: t.pop("count"), "count: missing"),
        (lambda m, t: t["count"].add_(1), "count"),
        (lambda m, t: t["count"].neg_(), "count"),
        (lambda m, t: t["length"].fill_(1 << 40), "length"),
        (lambda m, t: t["position.0"].fill_(1), "position"),
        (lambda m, t: t["position.0"].fill_(-1), "position"),
        (lambda m, t: t["importance.0"].fill_(math.nan), "importance"),
        (lambda m, t: t["centre"].fill_(math.inf), "centre"),
        (lambda m, t: t["centred"].fill_(0), "centred"),
        (lambda m, t: t["reported"].fill_(301), "reported"),
        (lambda m, t: t["pages.3"].fill_(255), "pages.3: expected finite scales"),
        (lambda m, t: t["pages.0"][-1, -4:].fill_(255), "pages.0: expected zeros where there is no token"),
        (lambda m, t: t.update({"pages.3": t["pages.3"][1:].clone()}), "pages.3: expected"),
        (lambda m, t: t.update({"centre": t["centre"].double()}), "centre: expected torch.float32"),
    ],
)
def test_a_hostile_file_is_refused(tmp_path, change, message: str) -> None:
    cache, path = saved(tmp_path)
    rewritten(path, change)
    before = fingerprint(cache)
    with pytest.raises(ValueError, match=message):
        cache.load(path)
    assert same(before, fingerprint(cache))


def test_damaged_files_are_refused(tmp_path) -> None:
    """Truncations, flipped bytes and fuzzed headers: a ValueError, or the file as it was."""
    cache, path = saved(tmp_path)
    raw = path.read_bytes()
    header = 8 + struct.unpack("<Q", raw[:8])[0]
    chance = random.Random(0)
    before = fingerprint(cache)
    broken = [raw[: chance.randrange(len(raw))] for _ in range(15)] + [raw + b"x"]
    for low, high, times in ((0, 8, 10), (8, header, 80), (header, len(raw), 20)):
        for _ in range(times):
            data = bytearray(raw)
            data[chance.randrange(low, high)] ^= 1 << chance.randrange(8)
            broken.append(bytes(data))
    parsed = json.loads(raw[8:header])
    for name in list(parsed):
        if name == "__metadata__":
            continue
        for entry in ({"data_offsets": [0, 1 << 62]}, {"shape": [1 << 40, 1 << 40]}, {"dtype": "F64"}, {"shape": [-1]}):
            text = json.dumps(parsed | {name: parsed[name] | entry}).encode()
            broken.append(struct.pack("<Q", len(text)) + text + raw[header:])
    broken.append(struct.pack("<Q", 1 << 62) + raw[8:])
    refused = []
    for data in broken:
        path.write_bytes(data)
        try:
            cache.free_request(cache.load(path))
        except ValueError as error:
            refused.append(str(error))
    assert all(message.startswith("path: expected a request") for message in refused)
    # A bit flipped in "settings" means nothing, and metadata is written in any order: more or fewer of them hit it.
    assert len(refused) >= 0.9 * len(broken)
    cache.pool.trim()
    assert same(before[2:6], fingerprint(cache)[2:6])
