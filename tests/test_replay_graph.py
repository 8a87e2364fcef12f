"""GraphRunner: on the CPU the same logic without graphs, on a GPU with them."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch

import kvstrata
from conftest import HAS_GPU
from kvstrata.replay import GraphRunner
from kvstrata.tools.bench.cases.replay import cases
from replay_model import DEVICE, ints

gpu = pytest.mark.gpu
INT = torch.int32


def step_of(pool: torch.Tensor):
    """A decode step in miniature: writes a row by slot (skipping slot -1), reads rows through a table up to a
    length."""

    def step(ids, slots, lengths, offsets, table):
        keep = slots >= 0
        at = torch.where(keep, slots, 0).long()
        pool.index_put_((at,), torch.where(keep, ids.float(), pool[at]))
        columns = torch.arange(table.shape[1], device=table.device)
        live = columns < lengths[:, None]
        read = torch.where(live, pool[torch.where(live, table, 0).long()], 0)
        return read.sum(1), {"span": offsets.diff()}

    return step


def inputs_of(step: int, most: int, width: int) -> dict[str, torch.Tensor]:
    """Requests whose number, lengths and pages change from step to step; slots of their own."""
    generator = torch.Generator().manual_seed(step)
    batch = int(torch.randint(0, most + 1, (), generator=generator))
    lengths = torch.randint(1, width + 1, (batch,), generator=generator)
    wide = int(torch.randint(int(lengths.max()) if batch else 0, width + 1, (), generator=generator))
    return dict(
        ids=torch.randint(1, 1000, (batch,), generator=generator).to(INT),
        slots=(1 + torch.randperm(200, generator=generator)[:batch]).to(INT),
        lengths=lengths.to(INT),
        offsets=torch.cat([torch.zeros(1), lengths.cumsum(0)]).to(INT),
        table=torch.randint(0, 256, (batch, wide), generator=generator).to(INT),
    )


def runner_of(
    pool: torch.Tensor, staging: str, most: int = 16, width: int = 12, fused: bool | None = None
) -> GraphRunner:
    shapes = dict(ids=(most,), slots=(most,), lengths=(most,), offsets=(most + 1,), table=(most, width))
    return GraphRunner(
        step_of(pool),
        {name: (shape, INT) for name, shape in shapes.items()},
        [1, 2, 4, 8, most],
        fill={"slots": -1, "offsets": "last"},
        staging=staging,
        fused=fused,
        watch=[pool],
        device=DEVICE,
    )


@pytest.mark.parametrize("staging", ["copy", "graph", "host"])
def test_many_replays_equal_eager(staging: str) -> None:
    """Lengths, pages, widths and batches of every kind: nothing of a step is left in the next (vllm#44868), padding
    rows write nowhere (vllm#43810, #37442)."""
    replays_equal_eager(staging, 2000 if HAS_GPU else 200)


@pytest.mark.parametrize("staging", ["copy", "graph"])
def test_replays_of_unfused_copies_equal_eager(staging: str) -> None:
    replays_equal_eager(staging, 500 if HAS_GPU else 25, fused=False)


def replays_equal_eager(staging: str, steps: int, fused: bool | None = None) -> None:
    pool, plain = torch.zeros(256, device=DEVICE), torch.zeros(256, device=DEVICE)
    runner, eager = runner_of(pool, staging, fused=fused).capture(), step_of(plain)
    assert (pool == 0).all(), "capturing wrote"
    for step in range(steps):
        given = inputs_of(step, 16, 12)
        here = {name: t.to(DEVICE) for name, t in given.items()}
        out, more = runner(**(given if staging == "host" else here))
        want, want_more = eager(**here)
        assert torch.equal(out, want), step
        if len(given["ids"]):
            assert torch.equal(more["span"], want_more["span"]), step
        assert torch.equal(pool, plain), step


@pytest.mark.parametrize("staging", ["copy", "graph", "host"])
def test_no_part_of_a_step_is_stale(staging: str) -> None:
    """One input after the other changes, the rest stays: each is seen by the next replay (vllm#44868)."""
    pool, plain = (torch.arange(256, device=DEVICE, dtype=torch.float32) for _ in range(2))
    runner, eager = runner_of(pool, staging).capture(), step_of(plain)
    given = next(c for c in (inputs_of(step, 16, 12) for step in range(100)) if len(c["ids"]) == 6)
    changes = {name: t.flip(0) for name, t in given.items() if name != "offsets"}
    changes["offsets"] = torch.arange(0, 70, 10).to(INT)
    before = None
    for name in [None, *changes]:
        given = {**given, name: changes[name]} if name else given
        here = {key: t.to(DEVICE) for key, t in given.items()}
        out, more = runner(**(given if staging == "host" else here))
        want, want_more = eager(**here)
        assert torch.equal(out, want), name
        assert torch.equal(more["span"], want_more["span"]), name
        assert torch.equal(pool, plain), name
        now = [out.clone(), more["span"].clone(), pool.clone()]
        assert before is None or not all(map(torch.equal, before, now)), f"{name} changes nothing"
        before = now


@pytest.mark.parametrize("staging", ["copy", "graph", "host"])
def test_padding_does_not_change_the_cache(staging: str) -> None:
    """Batches that shrink within one captured size: of the cache only the slots of live rows change, neither the last
    one, for which -1 was taken (vllm#43810), nor those of rows that were live before (#37442)."""
    most, heads, dim, pages, page = 8, 2, 64, 10, 16

    def step(x, slots, lengths, table):
        row = x[:, None, None].expand(-1, heads, dim).contiguous() + 1  # padding rows are not zero
        kvstrata.store_kv(row, row + 1, *cache, slots)
        return kvstrata.decode_attention(row[:, None], kvstrata.PagedCache(*cache, table, lengths))[:, 0, 0, 0]

    dtype = torch.float16 if HAS_GPU else torch.float32
    cache = tuple(torch.zeros(2, pages, page, heads, dim, dtype=dtype, device=DEVICE))
    shapes = dict(x=((most,), dtype), slots=((most,), INT), lengths=((most,), INT), table=((most, 1), INT))
    runner = GraphRunner(step, shapes, [most], fill={"slots": -1}, staging=staging, watch=cache, device=DEVICE)
    runner.capture()
    assert all((part == 0).all() for part in cache), "capturing wrote"
    for number, batch in enumerate((8, 5, 1, 0, 3, 8, 2)):
        for part in cache:
            part.fill_(77)
        slots = (torch.arange(batch) * page + number).to(INT)
        given = dict(x=torch.full((batch,), number, dtype=dtype), slots=slots,
                     lengths=torch.full((batch,), number + 1, dtype=INT),
                     table=torch.arange(batch).to(INT)[:, None])  # fmt: skip
        out = runner(**{name: t if staging == "host" else t.to(DEVICE) for name, t in given.items()})
        assert out.isfinite().all()
        for part, value in zip(cache, (number + 1, number + 2), strict=True):
            want = torch.full_like(part, 77)
            want.view(-1, heads, dim)[slots.long().to(DEVICE)] = value
            assert torch.equal(part, want), batch


@pytest.mark.parametrize("staging", ["copy", "graph", "host"])
def test_padding_rows_hold_the_fill(staging: str) -> None:
    """Rows and columns that a step does not bring, after one that had them all (vllm#44868)."""
    runner = runner_of(torch.zeros(256, device=DEVICE), staging).capture()
    where = "cpu" if staging == "host" else DEVICE
    full = dict(ids=ints(8, device=where), slots=ints(8, device=where) % 200, lengths=ints(8, device=where) % 12,
                offsets=ints(9, device=where), table=ints(8, 12, device=where) % 256)  # fmt: skip
    runner(**full)
    assert torch.equal(runner.buffers["table"][:8].to(where), full["table"])
    for buffer in runner.buffers.values():
        buffer.fill_(77)
    cases = (inputs_of(step, 16, 12) for step in range(100))
    given = next(c for c in cases if len(c["ids"]) == 5 and c["table"].shape[1] < 12)
    batch, size = 5, 8
    runner(**{name: t.to(where) for name, t in given.items()})
    live = {name: buffer.cpu() for name, buffer in runner.buffers.items()}
    for name, t in given.items():
        assert torch.equal(live[name][tuple(slice(0, n) for n in t.shape)], t), name
    assert (live["slots"][batch:size] == -1).all()
    assert (live["lengths"][batch:size] == 0).all()
    assert (live["offsets"][batch:][: size - batch + 1] == given["offsets"][-1]).all()
    assert (live["table"][:size, given["table"].shape[1] :] == 0).all()
    assert (live["slots"][size:] == 77).all(), "rows of larger sizes are not touched"


def test_errors_of_the_runner() -> None:
    pool = torch.zeros(256, device=DEVICE)
    runner = runner_of(pool, "copy")
    given = {name: t.to(DEVICE) for name, t in inputs_of(3, 16, 12).items()}
    with pytest.raises(RuntimeError, match=r"expected capture\(\) before the first call"):
        runner(**given)
    runner.capture()
    with pytest.raises(ValueError, match=r"batch: expected 0 to 16, the largest size that was captured, got 17"):
        runner.replay(17)
    with pytest.raises(ValueError, match=r"inputs: expected .* \['table'\] not given"):
        runner(**{name: t for name, t in given.items() if name != "table"})
    with pytest.raises(ValueError, match=r"inputs: expected .* got \['more'\] too"):
        runner(**given, more=pool)
    with pytest.raises(ValueError, match="inputs: expected one batch, got"):
        runner(**{**given, "ids": given["ids"][:1]})
    pool.data = torch.zeros(256, device=DEVICE)
    with pytest.raises(RuntimeError, match=r"watch\[0\]: expected address .* as when it was captured"):
        runner(**given)
    runner.capture()
    runner(**given)
    for wrong, message in (
        (dict(sizes=[]), "sizes: expected"),
        (dict(staging="fast"), "staging: expected one of"),
        (dict(sizes=[0, 1]), "sizes: expected at least one size of at least 1"),
        (dict(sizes=[64]), r"x: expected 64 rows, .* got shape \[8\]"),
        (dict(fill={"y": 0}), "fill: expected names"),
        (dict(inputs={}), "inputs: expected at least one"),
        (dict(device=None), "device: expected one"),
    ):
        arguments = dict(step=lambda x: x, inputs={"x": ((8,), INT)}, sizes=[8], device=DEVICE) | wrong
        with pytest.raises(ValueError, match=message):
            GraphRunner(**arguments)


@pytest.mark.parametrize("sizes", [8, None, "8", [1, 2.5], [True, 8], ["8"], [[8]]])
def test_sizes_are_a_list_of_ints(sizes: Any) -> None:
    with pytest.raises(TypeError, match="sizes: expected a list of ints"):
        GraphRunner(lambda x: x, {"x": ((8,), INT)}, sizes, device=DEVICE)


def test_sizes_of_any_integers() -> None:
    for sizes in (range(1, 5), (n for n in (4, 2, 3, 1, 4)), np.arange(1, 5), torch.arange(1, 5)):
        assert GraphRunner(lambda x: x, {"x": ((4,), INT)}, sizes, device=DEVICE).sizes == [1, 2, 3, 4]


@pytest.mark.parametrize("rows", [1, 3, 6, 7, 8])
@pytest.mark.parametrize("given", [True, False])
def test_a_buffer_has_the_largest_size_or_one_more(rows: int, given: bool) -> None:
    """A longer one was taken for offsets: of sizes 1, 2, 4 and 8 rows, 4 rows in gave 5 out and 7 gave 8."""
    buffer = torch.zeros(rows, 2, dtype=INT, device=DEVICE) if given else ((rows, 2), INT)
    with pytest.raises(ValueError, match=rf"ids: expected 4 rows, the largest .* or 5 .* got shape \[{rows}, 2\]"):
        GraphRunner(lambda ids: ids, {"ids": buffer}, [1, 2, 4], device=DEVICE)
    if given and rows > 4:
        GraphRunner(lambda ids: ids, {"ids": buffer[:4]}, [1, 2, 4])


@pytest.mark.parametrize("staging", ["copy", "graph", "host"])
def test_rows_and_offsets_at_every_batch(staging: str) -> None:
    buffers = {"ids": ((4,), INT), "offsets": ((5,), INT)}
    runner = GraphRunner(lambda ids, offsets: (ids * 2, offsets.diff()), buffers, [1, 2, 4],
                         fill={"offsets": "last"}, staging=staging, device=DEVICE).capture()  # fmt: skip
    where = "cpu" if staging == "host" else DEVICE
    for batch in (4, 3, 2, 1, 0):
        ids = torch.arange(1, batch + 1, dtype=INT, device=where)
        out, spans = runner(ids=ids, offsets=torch.arange(batch + 1, dtype=INT, device=where) * 3)
        assert out.tolist() == (ids * 2).tolist()
        assert spans.tolist() == [3] * batch


BAD_INPUTS = {
    "list": (lambda t: t.tolist(), TypeError, "expected a tensor, got list"),
    "none": (lambda t: None, TypeError, "expected a tensor, got NoneType"),
    "array": (lambda t: t.cpu().numpy(), TypeError, "expected a tensor, got ndarray"),
    "scalar": (lambda t: t.sum(), ValueError, r"expected 2 dimensions.* got \[\]"),
    "rank": (lambda t: t[:, 0], ValueError, r"expected 2 dimensions .* got \[3\]"),
    "width": (lambda t: t.repeat(1, 5), ValueError, r"expected at most \[.*, 12\], .* got \[3, 20\]"),
    "dtype": (lambda t: t.long(), TypeError, r"expected torch.int32 .* got torch.int64; \.to\(torch.int32\) converts"),
    "device": (lambda t: t.to("meta"), ValueError, "expected a tensor on .* got one on meta"),
}


@pytest.mark.parametrize("staging", ["copy", "graph", "host"])
@pytest.mark.parametrize("name", BAD_INPUTS)
def test_a_bad_input_is_named(name: str, staging: str) -> None:
    """After good calls too; nothing of the bad one is left."""
    change, error, message = BAD_INPUTS[name]
    runner = runner_of(torch.zeros(256, device=DEVICE), staging).capture()
    where = "cpu" if staging == "host" else DEVICE
    given = {key: torch.ones(3, dtype=INT, device=where) for key in ("ids", "slots", "lengths")}
    given |= dict(offsets=torch.arange(4, dtype=INT, device=where), table=torch.ones(3, 4, dtype=INT, device=where))
    for calls in (0, 3):
        for _ in range(calls):
            runner(**given)
        with pytest.raises(error, match=f"^table: {message}") as caught:
            runner(**{**given, "table": change(given["table"])})
        assert not re.search(r"src\[|dst\[|cast=", str(caught.value))
    assert runner(**given)[0].tolist() == [1, 1, 1]


def test_a_name_that_is_no_input() -> None:
    runner = GraphRunner(lambda ids, table: ids, {"ids": ((4,), INT), "table": ((4, 2), INT)}, [4], device=DEVICE)
    ids, table = ints(3, device=DEVICE), ints(3, 2, device=DEVICE)
    for given, message in (
        (dict(ids=ids, tabel=table), r"got \['tabel'\] and \['table'\] not given"),
        (dict(ids=ids, table=table, tabel=table), r"got \['tabel'\] too"),
        (dict(ids=ids), r"\['table'\] not given"),
    ):
        with pytest.raises(ValueError, match=rf"inputs: expected \['ids', 'table'\], {message}$"):
            runner.capture()(**given)


def test_memory_that_does_not_fit_is_named() -> None:
    runner = runner_of(torch.zeros(256, device=DEVICE), "copy").capture()
    given = {name: t.to(DEVICE) for name, t in inputs_of(3, 16, 12).items()}
    given["ids"] = runner.buffers["slots"][: len(given["ids"])]
    with pytest.raises(ValueError, match=r"^ids: expected memory that no copy writes, got some of slots's buffer"):
        runner(**given)
    with pytest.raises(TypeError, match=r"watch: expected a list of tensors, got one tensor of shape \[4\]"):
        GraphRunner(lambda x: x, {"x": ((4,), INT)}, [4], watch=torch.zeros(4), device=DEVICE)
    cube = GraphRunner(lambda x: x, {"x": ((4, 2, 3), INT)}, [4], staging="host", device=DEVICE).capture()
    with pytest.raises(ValueError, match=r"^x: expected shape \[batch, 2, 3\], got \[4, 1, 3\]"):
        cube(x=torch.zeros(4, 1, 3, dtype=INT))


def test_outputs_are_cut_in_any_container() -> None:
    runner = GraphRunner(lambda x: {"a": [x, (x + 1, None)], "b": x.sum()}, {"x": ((4, 2), INT)}, [4], device=DEVICE)
    out = runner.capture()(x=torch.ones(3, 2, dtype=INT, device=DEVICE))
    assert out["a"][0].shape == out["a"][1][0].shape == (3, 2)
    assert out["a"][1][1] is None
    assert int(out["b"]) == 6


def test_the_runners_buffers_are_one_allocation() -> None:
    runner = runner_of(torch.zeros(256, device=DEVICE), "copy")
    assert len({t.untyped_storage().data_ptr() for t in runner.buffers.values()}) == 1
    assert all(t.data_ptr() % 64 == 0 for t in runner.buffers.values())


@gpu
def test_a_step_that_cannot_be_captured_is_explained() -> None:
    runner = GraphRunner(lambda x: x * x.sum().item(), {"x": ((4,), torch.float32)}, [4], device=DEVICE)
    stream = torch.cuda.current_stream()
    with pytest.raises(RuntimeError, match=r"size 4 cannot be captured.*\.item\(\)"):
        runner.capture()
    assert torch.cuda.current_stream() == stream
    assert torch.rand(8, device=DEVICE).sum().item() > 0  # torch is as it was, its random numbers too


@gpu
def test_captured_sizes_share_a_memory_pool() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        return (x[:, None] * torch.ones(1 << 20, device=x.device)).sum(1)

    runner = GraphRunner(step, {"x": ((16,), torch.float32)}, [1, 2, 4, 8, 16], device=DEVICE).capture()
    assert sum(runner.memory.values()) < 3 * 16 * (1 << 22), runner.memory


@pytest.mark.parametrize("staging", ["copy", "graph", "host"])
def test_a_decode_loop_as_one_graph(staging: str) -> None:
    """store_kv, decode_attention and the next rows from its output, replayed with each staging, against eager."""
    most, heads, dim, pages, page, batch = 8, 2, 64, 64, 16, 5
    dtype = torch.float16 if HAS_GPU else torch.float32

    def step_with(k_cache: torch.Tensor, v_cache: torch.Tensor):
        def step(x, slots, lengths, table):
            row = (x[:, None, None] * torch.linspace(0.5, 1, dim, device=x.device)).expand(-1, heads, -1)
            row = row.to(dtype).contiguous()
            kvstrata.store_kv(row, row + 1, k_cache, v_cache, slots)
            cache = kvstrata.PagedCache(k_cache, v_cache, table, lengths)
            return kvstrata.decode_attention(row[:, None], cache).float().mean((1, 2, 3))

        return step

    ours, theirs = (tuple(torch.zeros(2, pages, page, heads, dim, device=DEVICE, dtype=dtype)) for _ in range(2))
    shapes = dict(x=((most,), torch.float32), slots=((most,), INT), lengths=((most,), INT), table=((most, 4), INT))
    runner = GraphRunner(
        step_with(*ours), shapes, [2, 4, most], fill={"slots": -1}, staging=staging, watch=ours, device=DEVICE
    ).capture()
    assert all((cache == 0).all() for cache in ours), "capturing wrote"
    eager = step_with(*theirs)
    x = plain = torch.linspace(-1, 1, batch)
    table = (torch.arange(batch)[:, None] * 4 + torch.arange(4)).to(INT)
    for step in range(40):
        slots = (torch.arange(batch) * 4 * page + step).to(INT)
        given = dict(x=x, slots=slots, lengths=torch.full((batch,), step + 1, dtype=INT), table=table)
        here = {name: t if staging == "host" else t.to(DEVICE) for name, t in given.items()}
        x = runner(**here).clone().cpu() * 0.5
        plain = eager(**{n: t.to(DEVICE) for n, t in {**given, "x": plain}.items()}).cpu() * 0.5
        # Padding may change how a sequence is split, so sums differ in the last bits of the dtype.
        torch.testing.assert_close(x, plain, rtol=0, atol=4 * torch.finfo(dtype).eps)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=8 * torch.finfo(dtype).eps)


def test_the_benchmarked_calls_are_correct() -> None:
    """Every contender of the benchmark on its own inputs, and a wrong one is found out."""
    for case in cases(torch.device("cpu"), True):
        bench = case.build(torch.device("cpu"))
        for (name, call), i in itertools.product(bench.contenders.items(), range(case.sets)):
            bench.poison(name, i)
            bench.check(name, i, call(i))
        bench.poison("none", 0)
        with pytest.raises(AssertionError, match="is wrong"):
            bench.check("none", 0, None)


UNFUSED = """
import json
import torch
from kvstrata.replay import GraphRunner, graph

plans = []

class Recorded(graph.CopyPlan):
    def __init__(self, *given, backend="auto", **options):
        super().__init__(*given, backend=backend, **options)
        plans.append((backend, len(self._groups)))

graph.CopyPlan = Recorded
device = "cuda" if torch.cuda.is_available() else "cpu"
for staging in ("copy", "graph"):
    runner = GraphRunner(lambda x: x + 1, {"x": ((2,), torch.int32)}, [2], staging=staging, device=device).capture()
    assert runner(x=torch.ones(2, dtype=torch.int32, device=device)).tolist() == [2, 2]
print(json.dumps(plans))
"""


def test_the_environment_variable_applies_to_the_runner() -> None:
    """In a fresh process: the copies before the replay, and those that are the first nodes of the graph."""
    env = os.environ | {"KVSTRATA_FUSED_COPY": "0"}
    done = subprocess.run([sys.executable, "-c", UNFUSED], env=env, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [["reference", 0], ["reference", 0]]


def test_host_staging_refuses_fused_false() -> None:
    with pytest.raises(ValueError, match='fused: expected None or True with staging="host"'):
        runner_of(torch.zeros(256, device=DEVICE), "host", fused=False)
