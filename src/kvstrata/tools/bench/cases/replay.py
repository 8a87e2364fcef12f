"""The replay benchmark: a decode step's metadata into the buffers of a captured graph, by every method in the notes.

``fa`` are the six copies of FA-style metadata, ``nsa`` the eight of NSA-style, both into buffers of 256 rows and 8,192
columns. ``vectors`` are copies of one size into buffers of that size: one, two, and the note's seven of 32 elements.
Cases named ``-graph`` capture each contender first and time the device alone. In the others every contender is called
from Python, and its host time is measured as well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from kvstrata import backends, jit
from kvstrata.replay import CopyPlan, HostStage, PrecomputedMetadata, fused_copy_replay_data
from kvstrata.replay.graph import gc_disabled
from kvstrata.tools.bench import Bench, Case, sets_for
from kvstrata.tools.bench.clock import Call
from kvstrata.tools.bench.probes import EMPTY

ROWS, COLUMNS = 256, 8192
POISON = 0xA5
FA = ("input_ids", "out_loc", "cu_seqlens_k", "positions", "seq_lens", "page_table")
NSA = (
    "cache_seqlens", "cu_seqlens_k", "page_indices", "nsa_cache_seqlens", "nsa_cu_seqlens_k", "seqlens_expanded",
    "real_page_table", "flashmla_metadata",
)  # fmt: skip
TABLES = {"page_table": 1, "page_indices": 1, "real_page_table": 64}  # ratio of the page table's columns to theirs
OFFSETS = ("cu_seqlens_k", "nsa_cu_seqlens_k")


@dataclass(frozen=True)
class Style:
    """Copies of a step: ``fa`` or ``nsa`` for a batch and columns of its page table, or ``rows`` vectors of a size."""

    kind: str
    rows: int
    columns: int

    @property
    def case(self) -> str:
        return f"{self.kind}-{self.rows}x{self.columns}"

    @property
    def names(self) -> tuple[str, ...]:
        if self.kind == "vectors":
            return tuple(f"vector {i}" for i in range(self.rows))
        return FA if self.kind == "fa" else NSA

    @property
    def room(self) -> Style:
        return self if self.kind == "vectors" else Style(self.kind, ROWS, COLUMNS)

    @property
    def params(self) -> dict[str, Any]:
        if self.kind == "vectors":
            return {"style": self.kind, "copies": self.rows, "elements": self.columns}
        return {"style": self.kind, "bs": self.rows, "columns": self.columns}


def shape_of(name: str, style: Style) -> tuple[int, ...]:
    if style.kind == "vectors":
        return (style.columns,)
    if name in TABLES:
        return style.rows, max(style.columns // TABLES[name], 1)
    if name == "flashmla_metadata":
        return 132, 8
    return (style.rows + (name in OFFSETS),)


def shapes_of(style: Style) -> list[tuple[int, ...]]:
    return [shape_of(name, style) for name in style.names]


def bytes_of(style: Style) -> int:
    """Bytes read and written."""
    return 2 * 4 * sum(torch.Size(shape).numel() for shape in shapes_of(style))


class Inputs:
    """One input set: a step's metadata on the device and on the host, and buffers."""

    def __init__(self, style: Style, device: torch.device, seed: int, room: Style | None = None) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.style, self.device, self.names = style.kind, device, style.names
        self.rows, self.columns = style.columns if style.kind == "vectors" else style.rows, style.columns
        self.on_host = [torch.randint(0, 1 << 30, shape, generator=generator).int() for shape in shapes_of(style)]
        if style.kind == "nsa":  # offsets begin with a zero that is not copied
            for name, tensor in zip(self.names, self.on_host, strict=True):
                if name in OFFSETS:
                    tensor[0] = 0
        self.src = [tensor.to(device) for tensor in self.on_host]
        self.dst = [torch.zeros(s, dtype=torch.int32, device=device) for s in shapes_of(room or style.room)]
        self.views = [d[tuple(slice(0, n) for n in s.shape)] for d, s in zip(self.dst, self.src, strict=True)]

    def poison(self) -> None:
        for name, buffer in zip(self.names, self.dst, strict=True):
            buffer.view(torch.uint8).fill_(POISON)
            if self.style == "nsa" and name in OFFSETS:
                buffer[0] = 0

    def assert_copied(self) -> None:
        """Compare every byte of the buffers: the step in the corner, poison everywhere else."""
        for name, source, buffer in zip(self.names, self.src, self.dst, strict=True):
            want = torch.full_like(buffer.view(torch.uint8), POISON).view(torch.int32)
            want[tuple(slice(0, n) for n in source.shape)] = source
            assert torch.equal(buffer, want), f"{name} is wrong"


def _sliced(inputs: Sequence[Inputs]) -> Call:
    """One slice and one ``.copy_`` per tensor, as in engines."""

    def run(i: int) -> None:
        one = inputs[i]
        rows = one.rows
        for name, d, s in zip(one.names, one.dst, one.src, strict=True):
            if name in TABLES:
                d[:rows, : s.shape[1]].copy_(s)
            elif name == "flashmla_metadata":
                d.copy_(s)
            else:
                d[: rows + (name in OFFSETS)].copy_(s)

    return run


def _pre_sliced(inputs: Sequence[Inputs]) -> Call:
    def run(i: int) -> None:
        for view, source in zip(inputs[i].views, inputs[i].src, strict=True):
            view.copy_(source)

    return run


def _cat(inputs: Sequence[Inputs]) -> Call:
    """The note's flattening: all sources are copied into one buffer, and out of it again."""
    flat = torch.empty(sum(s.numel() for s in inputs[0].src), dtype=torch.int32, device=inputs[0].device)

    def run(i: int) -> None:
        flat.copy_(torch.cat([s.view(-1) for s in inputs[i].src]))
        offset = 0
        for view in inputs[i].views:
            view.copy_(flat[offset : offset + view.numel()].view(view.shape))
            offset += view.numel()

    return run


def _streams(inputs: Sequence[Inputs]) -> Call:
    """One stream per copy."""
    streams = [torch.cuda.Stream(inputs[0].device) for _ in inputs[0].views]

    def run(i: int) -> None:
        here = torch.cuda.current_stream(inputs[i].device)
        for stream, view, source in zip(streams, inputs[i].views, inputs[i].src, strict=True):
            stream.wait_stream(here)
            with torch.cuda.stream(stream):
                view.copy_(source)
        for stream in streams:
            here.wait_stream(stream)

    return run


def _plan(inputs: Sequence[Inputs], backend: str) -> Call:
    plans = [CopyPlan(one.dst, backend=backend) for one in inputs]
    return lambda i: plans[i].run(inputs[i].src)


def _adaptor(inputs: Sequence[Inputs]) -> Call:
    """Copy with `fused_copy_replay_data` or `PrecomputedMetadata.copy_from`."""
    if inputs[0].style == "nsa":
        buffers = [PrecomputedMetadata(**dict(zip(one.names, one.dst, strict=True))) for one in inputs]
        steps = [PrecomputedMetadata(**dict(zip(one.names, one.src, strict=True))) for one in inputs]
        return lambda i: buffers[i].copy_from(steps[i], fused=True)

    def arguments(one: Inputs) -> dict[str, Any]:
        src = {f"src_{name}": t for name, t in zip(one.names, one.src, strict=True)}
        dst = {f"dst_{name}": t for name, t in zip(one.names, one.dst, strict=True)}
        return src | dst | dict(batch_size=one.rows, max_seqlen_k=one.columns)

    prepared = [arguments(one) for one in inputs]
    return lambda i: fused_copy_replay_data(**prepared[i], fused=True)


def _captured(body: Callable[[], None]) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with gc_disabled(), torch.cuda.graph(graph):
        body()
    return graph


def _replays(inputs: Sequence[Inputs]) -> dict[str, Call]:
    """Graphs with the copies as a node: from fixed addresses, from pinned memory, and one without copies."""
    plans = [CopyPlan(one.dst, one.src, backend="cuda") for one in inputs]
    stages = [HostStage(one.dst) for one in inputs]
    nodes = [stage.node() for stage in stages]
    in_graph = [_captured(plan.run) for plan in plans]
    staged = [_captured(node) for node in nodes]
    kernel = jit.load(EMPTY, "empty")
    empty = _captured(lambda: kernel.launch(grid=1, block=32))
    shapes = [[tuple(s.shape) for s in one.src] for one in inputs]

    def host_staged(i: int) -> None:
        stages[i].write(inputs[i].on_host)
        staged[i].replay()

    def in_place(i: int) -> None:
        stages[i].views()  # the next slot already holds this step: it was written twice
        stages[i].commit(shapes[i])
        staged[i].replay()

    for i in range(len(inputs)):  # fill both slots
        host_staged(i)
        host_staged(i)
    return {
        "in graph": lambda i: in_graph[i].replay(),
        "host-staged": host_staged,
        "host-staged, in place": in_place,
        "empty graph": lambda i: empty.replay(),
    }


def build(style: Style, sets: int, graph: bool, device: torch.device) -> Bench:
    inputs = [Inputs(style, device, seed) for seed in range(sets)]
    contenders: dict[str, Call] = {
        "kvstrata": _plan(inputs, "auto"),
        "sliced": _sliced(inputs),
        "pre-sliced": _pre_sliced(inputs),
        "foreach": lambda i: torch._foreach_copy_(inputs[i].views, inputs[i].src),
        "cat": _cat(inputs),
    }
    bench = Bench(
        contenders=contenders,
        poison=lambda name, i: inputs[i].poison(),
        check=lambda name, i, out: inputs[i].assert_copied(),
        ours="kvstrata",
        baseline="sliced",
    )
    variants: dict[str, Call] = {} if style.kind == "vectors" else {"adaptor": _adaptor(inputs)}
    if device.type != "cuda":
        bench.absent["streams"] = bench.absent["triton"] = "needs a CUDA device"
    else:
        contenders["streams"] = _streams(inputs)
        if reason := backends.missing("triton", device):
            bench.absent["triton"] = reason
        else:
            variants["triton"] = _plan(inputs, "triton")
        if reason := backends.missing("cuda", device):
            bench.absent["in graph"] = reason
        elif not graph:
            replays = _replays(inputs)
            bench.host["empty graph"] = replays.pop("empty graph")
            bound = [CopyPlan(one.dst, one.src, backend="cuda") for one in inputs]
            for plan in bound:
                plan.run()  # its parameters do not change from here on
            replays["bare launch"] = lambda i: bound[i]._groups[0].go()
            variants |= replays
    contenders.update(variants)
    bench.variants.update(variants)
    if not graph:
        bench.host |= contenders
    return bench


VECTORS = [Style("vectors", copies, 32) for copies in (1, 2, 7)]


def cases(device: torch.device, quick: bool) -> list[Case]:
    cuda = device.type == "cuda"
    styles = [Style("fa", n, width) for n in (1, 16, 64, 256) for width in (16, 512, 4096, 8192)]
    styles += [Style("nsa", n, width) for n in (1, 16, 64, 256) for width in (16, 4096)]
    styles += VECTORS
    if quick or not cuda:
        styles = [Style("fa", 64, 4096), Style("nsa", 64, 512), VECTORS[2]]
    all_cases = []
    for style in styles:
        moved = bytes_of(style)
        sets = sets_for(moved, device, memory=1 << 30)
        for graph in (False, True) if cuda else (False,):
            name = f"{style.case}{'-graph' if graph else ''}"
            make = partial(build, style, sets, graph)
            all_cases.append(Case("replay", name, style.params, moved, make, sets=sets, graph=graph))
    return all_cases
