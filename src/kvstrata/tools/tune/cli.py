"""The commands `tune` and `warmup`."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvstrata.tools import terminal as ui

if TYPE_CHECKING:
    import torch
    from rich.progress import Progress

    from .gates import Limits
    from .problems import Problem
    from .results import Gate, Tuning

TOY_FLUSH = 4 << 20  # bytes flushed before a sample on a CPU
SIMULATED = 200  # simulated experiments per noise and factor
NOISE = (0.02, 0.05)  # of simulated samples, relative


def tune(
    op: Annotated[str, typer.Argument(help="Op to tune: decode, prefill or store.")],
    trials: Annotated[
        int | None, typer.Option(min=1, help="Trials per case, those of other processes and earlier runs included.")
    ] = None,
    minutes: Annotated[
        float | None, typer.Option(min=0.01, help="Time for the whole command; 5 if --trials is not given.")
    ] = None,
    only: Annotated[str, typer.Option(metavar="GLOB", help="Only cases whose name matches.")] = "*",
    storage: Annotated[
        str | None,
        typer.Option(metavar="FILE_OR_URL", help="Storage of the studies: a journal file, or sqlite:///tune.db."),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the newest study, or join a process that works on it.")
    ] = False,
    device: ui.DeviceOption = ui.Device.auto,
    backend: Annotated[str, typer.Option(help="cuda, or reference: a toy problem of store, to try it out.")] = "cuda",
    gates: Annotated[
        str,
        typer.Option(
            metavar="PRESET",
            help="Limits of compiled kernels: hardware; portable: 48 KB of shared memory, 96 registers; portable-50: "
            "also half of the warps resident.",
        ),
    ] = "hardware",
    shared_cap: Annotated[
        int | None, typer.Option(metavar="BYTES", help="Limit of shared memory per block; 49152 runs on every GPU.")
    ] = None,
    max_registers: Annotated[int | None, typer.Option(min=16, max=255, help="Limit of registers per thread.")] = None,
    min_occupancy: Annotated[float | None, typer.Option(min=0, max=1, help="Minimum occupancy.")] = None,
    profile: Annotated[
        bool | None,
        typer.Option(
            "--profile/--no-profile",
            help="Run Nsight Compute on winners and equally fast trials; default with --save, if ncu is available.",
        ),
    ] = None,
    aa: Annotated[
        int | None, typer.Option("--aa", metavar="N", min=1, help="Test the gate with N experiments; no search.")
    ] = None,
    save: Annotated[
        bool,
        typer.Option("--save", help="Write RESULTS/<machine>/tune_<op>[_<gates>].json (or gate.json), and the table."),
    ] = False,
    results: ui.ResultsOption = Path("results"),
    tables: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder of the table; by default --save writes it to the cache folder."),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the sampler.")] = None,
    revision: ui.RevisionOption = None,
    as_json: ui.JsonOption = False,
) -> None:
    """Search for the fastest configuration of a kernel, and keep it only if it is significantly faster.

    A configuration is rejected before any launch if its compiled code spills, needs too much shared memory or too many
    registers, or leaves too few warps resident; then if its output is wrong; then if 40 samples do not show 5 %; and it
    wins only if 100 more are faster beyond noise. Winners go to a table that backend="auto" reads from then on.

    A study may be killed and resumed, and several processes, GPUs or hosts may share it.

    Example: kvstrata tune store --minutes 2 --save

    Example: kvstrata tune prefill --gates portable --trials 100 --save

    Example: kvstrata tune decode --only 'mixed*' --trials 60 --storage sqlite:///tune.db --resume

    Example: kvstrata tune store --backend reference --device cpu --trials 4

    Example: kvstrata tune store --aa 200 --save
    """
    started = time.monotonic()
    ui.require(("optuna", "scipy"), "tune", "tune")
    from kvstrata.jit import cache_folder
    from kvstrata.jit.tuned import user_folder
    from kvstrata.tools.bench.machine import describe
    from kvstrata.tools.bench.runner import select

    from . import problems, render
    from .gates import HARDWARE, PRESETS
    from .results import dumps
    from .search import Settings

    console = ui.console(stderr=as_json)
    if save and only != "*" and aa is None:
        ui.usage_error("--save with --only would replace the whole result; --tables DIR writes the table alone")

    def keep(result: Tuning | Gate) -> list[Path]:
        own = save and limits == PRESETS[HARDWARE]  # tables for `auto` are limited by the hardware only
        folder = tables or (user_folder() if own else None)
        return list(_save(op, result, arch, results if save else None, folder if backend == "cuda" else None))

    with ui.usage_errors((RuntimeError,)):
        problems.check(op)
        torch_device, arch = _device_and_arch(device, backend)
        chosen = select(problems.find(op, arch, torch_device, backend), only, "case")
        limits = _limits(gates, shared_cap, max_registers, min_occupancy)
        if trials is None and minutes is None and aa is None:
            minutes = 5.0
        settings = Settings(trials, None if minutes is None else 60 * minutes, limits=limits)
        if aa is not None:
            result: Tuning | Gate = _experiment(chosen, torch_device, aa, revision, started, settings.seconds)
        else:
            from .session import Session

            machine = describe(torch_device, revision)
            session = Session(
                op=op,
                problems=chosen,
                device=torch_device,
                arch=arch,
                backend=backend,
                gates=gates,
                settings=settings,
                machine=machine,
                storage=storage or cache_folder() / "tune" / f"{machine['slug']}.journal",
                flush_bytes=TOY_FLUSH if torch_device.type == "cpu" else None,
                resume=resume,
                seed=seed,
                profile=_use_ncu(profile, save, backend),
            )
            with _progress() as progress:
                result = session.run(started, progress, keep)
    if as_json:
        sys.stdout.write(dumps(result))
    shown = ["rates"] if aa is not None else ["speed", "configurations" if gates == HARDWARE else "limits", "rejected"]
    for number, name in enumerate(shown):
        table = render.table(result, {"table": name})
        console.print((replace(table, title=name) if number else table).terminal())
    for note in render.notes(result):
        console.print(note, markup=False)
    for path in keep(result):
        console.print(f"Saved: {path}", markup=False, soft_wrap=True)


def warmup(
    op: Annotated[
        str | None, typer.Argument(help="cache, decode, packed, prefill, replay or store; by default all but packed.")
    ] = None,
    arch: Annotated[str | None, typer.Option(help="Architecture to compile for, such as sm_90; no GPU needed.")] = None,
    gpu: Annotated[
        str | None, typer.Option(help="GPU of the table, such as nvidia-h200; all of the architecture by default.")
    ] = None,
    head_dim: Annotated[list[int], typer.Option(help="Head size of caches; repeat for several.")] = [64, 128],  # noqa: B006
    heads: Annotated[int, typer.Option(min=1, help="Query heads that read a cache.")] = 32,
    kv_heads: Annotated[int, typer.Option(min=1, help="KV heads of a cache.")] = 8,
    dtype: Annotated[str, typer.Option(help="Dtype of the model: bfloat16, float16 or float32.")] = "bfloat16",
    budget: Annotated[float, typer.Option(help="Budget of a cache, as a fraction of 16 bit.")] = 0.25,
    tiers: Annotated[str | None, typer.Option(help="Tiers of a cache, such as K8V4,K4V3; None: by budget.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Maximum tokens of a request in a cache.")] = 32768,
    page_format: Annotated[str, typer.Option("--format", help="Format of packed pages.")] = "K4V4",
    page_tokens: Annotated[int, typer.Option(help="Tokens of a packed page: 16, 32 or 64.")] = 16,
    jobs: Annotated[int | None, typer.Option(min=0, help="Processes; 0 compiles in this one.")] = None,
    as_json: ui.JsonOption = False,
) -> None:
    """Compile kernels ahead of time: the top five of each entry of the tuned table, the defaults, those of a cache.

    Cubins go to the cache folder, so a first call does not wait. In an image build, name the architecture. ``cache``
    covers the first prompt, settling and decode step of a `TieredCache` of these sizes; `kvstrata.warmup` does this for
    an existing cache. ``packed`` covers stores into packed pages of one format and decode steps over them.

    Example: kvstrata warmup

    Example: kvstrata warmup cache --head-dim 128 --heads 32 --kv-heads 8 --budget 0.25

    Example: kvstrata warmup packed --format K8V4 --page-tokens 32 --head-dim 128

    Example: kvstrata warmup decode --arch sm_90 --gpu nvidia-h200
    """
    from kvstrata import jit
    from kvstrata.jit.tuned import slug

    from . import problems
    from . import warmup as ahead  # `warmup` is this command

    if reason := jit.missing():
        ui.usage_error(f"warmup: {reason}")
    import torch

    names = sorted([*problems.names(), "cache", "packed", "replay"])
    if op is not None and op not in names:
        ui.usage_error(f"nothing to compile for {op!r}; there are: {', '.join(names)}")
    if arch is None:
        if not torch.cuda.is_available():
            ui.usage_error("no GPU here: name the architecture, as in kvstrata warmup --arch sm_90")
        arch, gpu = jit.arch_of(), gpu or slug(torch.cuda.get_device_name())
    if not arch.startswith("sm_") or not arch[3:].isdigit():
        ui.usage_error(f"--arch: expected a name such as sm_90, got {arch!r}")
    start = time.monotonic()
    result = ahead.Warmed(arch, ahead.tables_for(arch, gpu))
    wanted = ahead.kernels([name for name in problems.names() if op in (None, name)], arch, result.tables)
    if op in (None, "replay"):
        wanted += ahead.replay_kernels()
    if op in (None, "cache", "packed"):
        with ui.usage_errors():
            if heads % kv_heads:
                raise ValueError(f"--heads: expected a multiple of {kv_heads}, got {heads}")
            torch_dtype, formats = ui.dtype_of(dtype), None if tiers is None else tuple(tiers.split(","))
            assert torch_dtype is not None
            for dim in head_dim:
                if op == "packed":
                    wanted += ahead.packed_kernels(page_format, dim, heads, kv_heads, torch_dtype, page_tokens, arch)
                    continue
                sizes = ahead.CacheSizes(dim, heads, kv_heads, torch_dtype, budget, formats, max_tokens=max_tokens)
                wanted += ahead.cache_kernels(sizes, arch, result.tables)
        wanted = list({(kernel.source, kernel.entry): kernel for kernel in wanted}.values())
    with _progress() as progress:
        task = progress.add_task(f"compiling for {arch}", total=len(wanted), best="")
        for _ in ahead.compile_all(wanted, jobs, result):
            progress.advance(task)
    if as_json:
        typer.echo(
            json.dumps({**asdict(result), "cache": str(jit.cache_folder()), "seconds": time.monotonic() - start})
        )
    else:
        known = ", ".join(result.tables) or "none"
        elapsed = f"{time.monotonic() - start:.1f} s"
        typer.echo(f"{result.kernels} kernels for {arch} in {jit.cache_folder()} (tables: {known}), {elapsed}")
        for entry, why in result.failed.items():
            typer.echo(f"failed: {entry}: {why.splitlines()[0]}", err=True)
    if result.failed:
        raise typer.Exit(1)


def _device_and_arch(device: ui.Device, backend: str) -> tuple[torch.device, str]:
    """Device, and the architecture to compile for (``none`` for the reference)."""
    from kvstrata import jit

    if backend not in ("cuda", "reference"):
        raise ValueError(f"--backend: expected cuda or reference, got {backend!r}")
    torch_device = ui.device_of(device)
    if backend == "reference":
        return torch_device, "none"
    if torch_device.type != "cuda":
        raise ValueError("no GPU here: --backend reference --device cpu tunes a toy problem")
    if reason := jit.missing():
        raise ValueError(f"--backend cuda: {reason}")
    return torch_device, jit.arch_of(torch_device)


def _use_ncu(requested: bool | None, save: bool, backend: str) -> bool:
    """True if Nsight Compute is used; ValueError if it is requested but not installed."""
    from kvstrata.tools import child

    if backend != "cuda" or requested is False:
        return False
    installed = child.find_tool("ncu") is not None
    if requested and not installed:
        raise ValueError("--profile: ncu is not on the PATH; it comes with the CUDA toolkit")
    return installed and (save or requested is True)


def _limits(preset: str, shared: int | None, registers: int | None, occupancy: float | None) -> Limits:
    """Limits of a preset, with individual overrides."""
    from .gates import PRESETS

    if preset not in PRESETS:
        raise ValueError(f"--gates: expected one of {', '.join(PRESETS)}, got {preset!r}")
    given = {"shared": shared, "registers": registers, "occupancy": occupancy}
    return replace(PRESETS[preset], **{name: value for name, value in given.items() if value is not None})  # type: ignore[arg-type]


def _experiment(
    chosen: list[Problem],
    torch_device: torch.device,
    n: int,
    revision: str | None,
    started: float,
    seconds: float | None,
) -> Gate:
    """A/A and A/B on the longest of the cases, and simulated (with a GPU, in separate processes)."""
    import multiprocessing
    import os
    from concurrent.futures import ProcessPoolExecutor

    from kvstrata.tools.bench.machine import describe
    from kvstrata.tools.bench.timer import Timer

    from . import decide, experiment
    from .results import GATE, Gate

    problem = max(chosen, key=lambda problem: int(problem.shape["tokens"]))
    timer = Timer(torch_device, TOY_FLUSH if torch_device.type == "cpu" else None)
    method = {"quick": decide.QUICK, "confirm": decide.CONFIRM, "case": problem.case}
    gate = Gate(GATE, describe(torch_device, revision), method)
    simulations = [(noise, factor, SIMULATED) for noise in NOISE for factor in experiment.FACTORS]
    jobs = min(len(simulations), os.cpu_count() or 1)
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool, _progress() as progress:
        in_parallel = torch_device.type == "cuda" and jobs > 1
        running = [pool.submit(experiment.simulated, *each) for each in simulations] if in_parallel else []
        for left, factor in zip(range(len(experiment.FACTORS), 0, -1), experiment.FACTORS, strict=True):
            task, now = progress.add_task(f"{problem.case} {factor:g}x", total=n, best=""), time.monotonic()
            end = math.inf if seconds is None else now + (started + seconds - now) / left
            step = partial(progress.advance, task)
            gate.rows.append(experiment.on_device(problem, timer, factor, n, step, end))
        gate.rows += [each.result() for each in running] or [experiment.simulated(*each) for each in simulations]
    return gate


def _save(op: str, result: Tuning | Gate, arch: str, results: Path | None, tables: Path | None) -> Iterator[Path]:
    """Write the result, and the table that `auto` reads."""
    from . import tables as table
    from .results import Tuning
    from .results import save as write

    if results is not None:
        yield write(result, results)
    if isinstance(result, Tuning) and tables is not None:
        yield table.save(op, result, arch, tables)


def _progress() -> Progress:
    from rich.console import Console

    return ui.progress_bars(Console(stderr=True), "{task.fields[best]}", transient=True)
