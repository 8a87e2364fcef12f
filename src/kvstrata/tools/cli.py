"""The command line: one function per command, here or in its own module. Commands import lazily."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from . import terminal as ui
from .commands import check, info, profile, report
from .eval.cli import advise, calibrate, drift, evaluate
from .generate.cli import generate
from .tune.cli import tune, warmup

if TYPE_CHECKING:
    from rich.console import Console

    from .bench.results import Report

app = typer.Typer(
    name="kvstrata",
    help="The KV-cache layer of LLM inference: try it on a model, check and measure its kernels, see what runs here.",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
)


def _print_version(requested: bool) -> None:
    if requested:
        from kvstrata import __version__

        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


def bench(
    op: Annotated[
        str,
        typer.Argument(help="Op: decode, hf, packed, prefill, quantize, replay, serve, settle, step, store or vllm."),
    ],
    quick: Annotated[
        bool, typer.Option("--quick", help="Fewer cases and samples: a quick look, not evidence.")
    ] = False,
    save: Annotated[
        bool,
        typer.Option("--save", help="Write RESULTS/<machine>/<op>.json; with --only, replace or add these cases."),
    ] = False,
    device: ui.DeviceOption = ui.Device.auto,
    only: Annotated[str, typer.Option(metavar="GLOB", help="Only cases whose name matches.")] = "*",
    as_json: ui.JsonOption = False,
    results: ui.ResultsOption = Path("results"),
    against: Annotated[
        str | None,
        typer.Option(metavar="REV_OR_FILE", help="An earlier result; exit 1 if a case got slower beyond noise."),
    ] = None,
    from_file: Annotated[
        Path | None, typer.Option("--from", metavar="FILE", help="Measure nothing; use this file as the new result.")
    ] = None,
    revision: ui.RevisionOption = None,
) -> None:
    """Check, then time, our kernels and their peers.

    Every contender is checked on the inputs that are timed; one that is wrong gets no speed, and if it is ours
    the exit code is 1. Samples are cold (caches flushed) and interleaved, and come with a 95 % interval.

    --against compares our rows with an earlier result on the same machine: a file, or RESULTS/<machine>/<op>.json at a
    git revision. A case got slower if the intervals of its medians do not overlap, the medians differ by more than
    2 % and a rank test of the samples gives p < 0.05; then the exit code is 1.

    Example: kvstrata bench store --quick

    Example: kvstrata bench store --only '*fp16*' --against HEAD

    Example: kvstrata bench store --from new.json --against results/nvidia-h200/store.json
    """
    from . import git
    from .bench import cases
    from .bench.machine import describe
    from .bench.render import table, verdict
    from .bench.results import Report, dumps, load, loads, merge
    from .bench.results import save as write
    from .bench.runner import run, select

    console = ui.console(stderr=as_json)
    if save and from_file:
        ui.usage_error("--save with --from would write what was measured elsewhere; copy the file instead")
    ui.require(["scipy"], "bench", "bench")
    with ui.usage_errors():
        module = cases.find(op)
        if from_file:
            measured = load(from_file)
        else:
            torch_device = ui.device_of(device)
            chosen = select(module.cases(torch_device, quick), only)
            saved_path = results / describe(torch_device)["slug"] / f"{op}.json"
            saved_report = load(saved_path) if save and only != "*" and saved_path.exists() else None
            if save and only != "*" and saved_report is None:
                ui.usage_error(
                    f"--save with --only replaces cases of a saved result, and there is no {saved_path}; omit --only"
                )
            if saved_report is not None:  # fail now: an error after the measurement would lose it
                method = saved_report.method | {"quick": quick}
                merge(saved_report, Report(op, describe(torch_device, revision), method, {}, {}))
            if save and quick and saved_path.exists() and not load(saved_path).method["quick"]:
                ui.usage_error(
                    f"--save with --quick would replace the full result in {saved_path}; leave one of them out"
                )
        slug = measured.machine["slug"] if from_file else describe(torch_device)["slug"]
        before = git.read_earlier(against, results / slug / f"{op}.json", loads) if against else None
    if not from_file:
        if torch_device.type == "cpu" and device is ui.Device.auto:
            console.print("No GPU here: this times the CPU path, and says nothing about a GPU.")

        def keep(report: Report) -> None:
            if save:
                write(report if saved_report is None else merge(saved_report, report), results)

        measured = getattr(module, "run", run)(chosen, torch_device, quick, only, revision=revision, after_case=keep)
    if as_json:
        sys.stdout.write(dumps(measured))
    console.print(table(measured, getattr(module, "TABLE", {})).terminal())
    console.print(getattr(module, "summary", verdict)(measured), markup=False)
    if save:
        console.print(f"Saved: {results / measured.machine['slug'] / op}.json")
    slower = _compare(before, measured, console) if before else False
    if measured.failures or slower:
        raise typer.Exit(1)


def _compare(before: Report, after: Report, console: Console) -> bool:
    """Compare our rows with an earlier result; returns True if one got slower."""
    from .bench import regress

    with ui.usage_errors():
        compared = regress.outcomes(before, after)
    console.print(regress.table(compared, before, after).terminal())
    slower = [o for o in compared if o.verdict == "slower"]
    lines = [f"{o.case}: {o.name}" for o in slower]
    console.print("\n".join(["Slower than before:", *lines] if slower else ["No case got slower."]))
    return bool(slower)


def _register(command: Callable[..., Any], name: str | None = None) -> None:
    """Register a command. Its docstring is its help, one line per paragraph, wrapped at the terminal's width."""
    paragraphs = inspect.cleandoc(command.__doc__ or "").split("\n\n")
    app.command(name, help="\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs))(command)


_register(generate)
_register(evaluate, "eval")
_register(advise)
_register(calibrate)
_register(drift)
_register(bench)
_register(check)
_register(profile)
_register(report)
_register(tune)
_register(warmup)
_register(info)
