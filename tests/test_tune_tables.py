"""Tables that `auto` reads: nearest shapes, what is refused, what kernels make of them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

optuna = pytest.importorskip("optuna")


import ahead  # noqa: E402
from kvstrata.attention.decode import cuda as decode_cuda  # noqa: E402
from kvstrata.attention.decode import stages  # noqa: E402
from kvstrata.jit import tuned  # noqa: E402
from kvstrata.layout import Format  # noqa: E402
from kvstrata.store import cuda as store_cuda  # noqa: E402
from kvstrata.tools.tune import problems, results, search, tables  # noqa: E402
from tune_toy import entry, put  # noqa: E402

CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("own_cache")


def test_lookup_uses_the_nearest_shape_within_the_limit(own_cache: Path) -> None:
    few, many = entry("few", {"a": 1}, tokens=16, vector="x"), entry("many", None, tokens=4096, vector="x")
    put(own_cache / "tables", "nvidia-test", op=[few, many, entry("other", {"a": 3}, tokens=20, vector="y")])

    def found(tokens: int, vector: str = "x", gpu: str = "NVIDIA Test") -> dict | None:
        return tuned.lookup("op", gpu, {"tokens": tokens, "vector": vector})

    assert found(16) == found(20) == found(60) == {"a": 1}
    assert found(20, "y") == {"a": 3}
    assert tuned.nearest("op", "nvidia-test", {"tokens": 3000, "vector": "x"})["case"] == "many"
    assert found(3000) is None, "there the default was best"
    assert found(65) is None, "further than a factor of four from 16"
    assert found(16, "z") is None
    assert found(16, gpu="NVIDIA Other") is None
    assert tuned.lookup("another", "NVIDIA Test", {"tokens": 16, "vector": "x"}) is None
    assert tuned.distance({"a": 8, "b": 3}, {"a": 2, "b": 6}) == 3
    assert tuned.distance({"a": 8}, {"b": 8}) == float("inf")


def test_the_users_table_comes_first_and_is_read_once(
    own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuned, "SHIPPED", tmp_path / "shipped")
    shape = {"tokens": 16}
    put(tmp_path / "shipped", "g", store=[entry("a", {"x": 1}, **shape)], decode=[entry("a", {"x": 2}, **shape)])
    assert tuned.lookup("store", "G", shape) == {"x": 1}
    put(own_cache / "tables", "g", store=[entry("a", {"x": 5}, **shape)])
    assert tuned.lookup("store", "G", shape) == {"x": 5}
    assert tuned.lookup("decode", "G", shape) == {"x": 2}
    monkeypatch.setattr(tuned, "read", lambda path: pytest.fail("read again"))
    assert tuned.lookup("store", "G", shape) == {"x": 5}
    tuned.table.cache_clear()
    assert tuned.lookup("store", "G", shape) == {"x": 5}


@pytest.mark.parametrize(
    "text", ["", "[]", '{"schema": 9}', '{"schema": 1, "ops": {}}', '{"schema": 2, "ops": {"store": [{"case": "a"}]}}']
)
def test_a_damaged_table_is_ignored(own_cache: Path, text: str) -> None:
    put(own_cache / "tables", "g")
    (own_cache / "tables" / "g.json").write_text(text)
    with pytest.warns(UserWarning, match=r"g\.json: not a tuned table"):
        assert tuned.lookup("store", "G", {"tokens": 1}) is None


def test_winners_become_a_table(own_cache: Path) -> None:
    def tuning(case: str, choice: dict | None) -> results.Tuning:
        row = SimpleNamespace(case=case, shape={"tokens": 8}, choice=choice, top=[{"x": 1}])
        return SimpleNamespace(machine={"slug": "nvidia-test", "name": "NVIDIA Test"}, rows=[row])

    folder = own_cache / "tables"
    tables.save("store", tuning("b", {"x": 1}), "sm_90", folder)
    tables.save("decode", tuning("c", None), "sm_90", folder)
    path = tables.save("store", tuning("a", {"x": 2}), "sm_90", folder)
    tables.save("store", tuning("b", {"x": 3}), "sm_90", folder)
    there = tuned.read(path)
    assert [(e["case"], e["choice"]) for e in there["store"]] == [("a", {"x": 2}), ("b", {"x": 3})]
    assert there["decode"][0]["choice"] is None
    assert tuned.lookup("store", "NVIDIA Test", {"tokens": 8}) == {"x": 2}
    assert tables.arch_of(path) == "sm_90"


def test_shipped_tables_can_be_read_and_run() -> None:
    for path in tuned.SHIPPED.glob("*.json"):
        for op, entries in tuned.read(path).items():
            known = {p.case: p for p in problems.find(op, tables.arch_of(path), CPU, "cuda")}
            for found in entries:
                problem = known[found["case"]]
                assert found["shape"] == problem.shape
                assert 1 <= len(found["top"]) <= search.TOP
                assert all(problem.invalid(choice) is None for choice in found["top"])


class Launched(SimpleNamespace):
    """Configuration that a plan would launch."""

    def __init__(self, kernel: object, grid: object, block: int, params: bytes, **options: object) -> None:
        super().__init__(entry=kernel, grid=grid, block=block)

    def __call__(self, stream: int) -> None:
        pass


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU named NVIDIA Test that compiles and launches nothing."""
    fake = SimpleNamespace(
        arch_of=lambda device: "sm_90", load=lambda source, entry, arch: entry, Launch=Launched,
        bind_context=lambda device: None,
    )  # fmt: skip
    properties = SimpleNamespace(
        name="NVIDIA Test", multi_processor_count=4, shared_memory_per_multiprocessor=228 << 10
    )
    for module in (store_cuda, decode_cuda):
        monkeypatch.setattr(module, "jit", fake)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA Test")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)


@pytest.mark.usefixtures("pretend")
def test_auto_of_store_reads_the_table(own_cache: Path) -> None:
    from kvstrata.tools.bench.cases.store import KINDS
    from kvstrata.tools.tune.problems.store import task_of

    task, slot_mapping = task_of(KINDS[0], 256), torch.zeros(256, dtype=torch.int32)

    def entry_for(backend: str, bits: int = 0) -> str:
        return store_cuda.plan(task, slot_mapping, bits, backend, False).entry

    default = entry_for("cuda")
    shape = store_cuda.features(store_cuda.shape_of(task, 0))
    put(own_cache / "tables", "nvidia-test", store=[entry("a", {"kernel": "staged", "threads": 64, "per": 2}, **shape)])
    assert entry_for("cuda") == default.replace("store_direct", "store_staged").replace("512, 1>", "64, 2>")
    assert entry_for("cuda_direct") == default, "a named kernel is that kernel"
    assert entry_for("cuda", bits=2) != entry_for("cuda")
    assert "store_direct" in entry_for("cuda", bits=2), "vectors of two bytes are another shape"
    put(own_cache / "tables", "nvidia-test", store=[entry("a", {"kernel": "bulk", "rows": 4}, **shape)])
    assert entry_for("cuda").startswith("store_bulk<1, 2048, 2048, 1, int, 4>")
    put(own_cache / "tables", "nvidia-test", store=[entry("a", {"kernel": "bulk", "rows": 32}, **shape)])
    assert entry_for("cuda") == default, "64 KB do not fit: a table is no way around the checks"


@pytest.mark.usefixtures("pretend")
def test_auto_of_decode_reads_the_table(own_cache: Path) -> None:
    formats = tuple(Format.parse(name, 128, 64) for name in ("K16V16", "K4V4"))
    source = SimpleNamespace(
        table=torch.zeros(2, 4, 2, 16, dtype=torch.int32), counts=torch.zeros(2, 4, 2, dtype=torch.int32),
        formats=formats, rows=(0, 0, 0, 0), page_tokens=64, slabs=None, units=1,
    )  # fmt: skip

    def plan(**options: int) -> decode_cuda.WorkPlan:
        return decode_cuda.WorkPlan(source, (0, 1), 4, 16, 1, **options)

    assert plan().cut == stages.cut_of(formats, 4, "sm_90")
    choice = {"warps": 2, "resident": 8, "width": 1, "waves": 3, "combine": 8}
    shape = stages.features(formats, False, 8, 1024, 4)
    put(own_cache / "tables", "nvidia-test", decode=[entry("a", choice, **shape)])
    tuned_plan = plan()
    assert tuned_plan.cut == stages.Cut(**choice)
    assert (tuned_plan.warps, tuned_plan.grid, tuned_plan.chunks) == (2, 16, 96)
    assert plan(fixed_split=64).cut == stages.cut_of(formats, 4, "sm_90"), "the same in every batch"
    put(own_cache / "tables", "nvidia-test", decode=[entry("a", {**choice, "warps": 64}, **shape)])
    assert plan().cut == stages.cut_of(formats, 4, "sm_90"), "no multiprocessor has that much shared memory"


def test_auto_of_prefill_reads_the_table(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvstrata.attention.prefill import configs
    from kvstrata.attention.prefill.job import PrefillJob
    from kvstrata.attention.prefill.tiles import Tile

    monkeypatch.setattr(configs, "_name_of", lambda device: "NVIDIA Test")
    monkeypatch.setattr(configs, "processors_of", lambda device: (132, True))

    def job(length: int, dim: int = 64, causal: bool = True) -> PrefillJob:
        q = torch.empty(4, length, 16, dim, dtype=torch.float16, device="meta")
        return PrefillJob(q, q, q, None, None, length, length, causal, 0.1, None, None, None, False)

    def table(**choice: object) -> None:
        put(own_cache / "tables", "nvidia-test", prefill=[entry("a", choice, **configs.features(64, 512, True, 256))])

    untuned = configs.config_of(job(512), 132, True)
    assert not configs.cuda_first(job(512))
    assert configs.tuned_tile(job(512)) is None
    table(kernel="gluon", block_m=128, block_n=64, stages=3, registers=0, pingpong=1)
    assert configs.config_of(job(512), 132, True) == configs.Config(128, 64, 4, 3, specialize=True, pingpong=True)
    assert configs.config_of(job(600), 132, True).specialize, "near enough"
    assert configs.config_of(job(512, causal=False), 132, True) == configs.nearest(64, 512, False, False)
    assert configs.config_of(job(512, dim=128), 132, True) == configs.nearest(128, 512, True, False)
    assert configs.config_of(job(16384), 132, True) == configs.nearest(64, 16384, True, False), "too far"
    table(kernel="triton", block_m=128, block_n=64, stages=2, order=2, registers=0)
    assert configs.config_of(job(512), 132, True) == configs.Config(128, 64, 8, 2, order=2)
    table(kernel="cuda", block_m=64, block_n=64, stages=2, kv_warps=2, resident=2)
    assert configs.cuda_first(job(512))
    assert configs.tuned_tile(job(512)) == Tile(64, 64, 64, 8, 2, 2, 2)
    table(kernel="gluon", block_m=128, block_n=128, stages=40, registers=0, pingpong=1)
    assert configs.config_of(job(512), 132, True) == untuned, "more shared memory than there is"


def test_choices_of_prefill_are_its_configurations() -> None:
    from kvstrata.attention.prefill.configs import TABLE
    from kvstrata.attention.prefill.tiles import FEW, PORTABLE, choice_of, invalid, of_choice

    found = [(key[0], config) for key, config in TABLE.items() if config is not None]
    found += [(dim, tile) for tiles in (PORTABLE, FEW) for dim, tile in tiles.items() if dim in (64, 128)]
    for dim, config in found:
        choice = choice_of(config)
        assert of_choice(choice, dim) == config
        assert invalid(choice, dim) is None
    for problem in problems.find("prefill", "sm_90", CPU, "cuda"):
        assert problem.space.has(problem.default)


def test_kernels_of_triton_are_compiled_ahead() -> None:
    """By their own launch, without a GPU: registers and shared memory of either kernel, and what is wrong with one."""
    from kvstrata.attention.prefill.space import SOURCE

    problem = next(p for p in problems.find("prefill", "sm_90", CPU, "cuda") if p.case == "causal-B4-H16-S512-D64")
    sizes = dict(block_m=64, block_n=64, stages=2, registers=168)
    choices = [{"kernel": "triton", **sizes, "order": 0}, {"kernel": "gluon", **sizes, "pingpong": 0}]
    entries = [kernel.entry for choice in choices for kernel in problem.kernels(choice)]
    entries.append(entries[0].replace("[64, 64, 4, 2", "[48, 64, 4, 2"))
    assert entries[2] != entries[0]
    for kernel in entries[:2]:
        used = ahead.call("kvstrata.tools.tune.compiler:build", str(SOURCE), kernel, "sm_90")
        assert 40 <= used["registers"] <= 168
        assert used["spill_bytes"] == 0
        assert used["shared_bytes"] >= 2 * 64 * 64 * (1 + 2 * 2)  # queries, two stages of keys and values
    with pytest.raises(AssertionError, match=r"CompileError: CompilationError"):
        ahead.call("kvstrata.tools.tune.compiler:build", str(SOURCE), entries[2], "sm_90")
