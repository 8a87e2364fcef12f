"""The command line: one function per command, here or in its own module. Commands import lazily."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .commands import check, info, profile, report
from .eval.cli import advise, calibrate, drift, evaluate
from .generate.cli import generate
from .terminal import AsJson, Device, Results, Revision, Where, console, device_of, need, refuse, refusing
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


def _version(wanted: bool) -> None:
    if wanted:
        from kvstrata import __version__

        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


def bench(
    op: Annotated[
        str,
        typer.Argument(help="Op: decode, hf, packed, prefill, quantize, replay, serve, settle, step, store or vllm."),
    ],
    quick: Annotated[bool, typer.Option("--quick", help="Fewer cases and samples: a look, not evidence.")] = False,
    save: Annotated[
        bool, typer.Option("--save", help="Write RESULTS/<machine>/<op>.json; with --only, replace only these cases.")
    ] = False,
    device: Where = Device.auto,
    only: Annotated[str, typer.Option(metavar="GLOB", help="Only cases whose name matches.")] = "*",
    as_json: AsJson = False,
    results: Results = Path("results"),
    against: Annotated[
        str | None,
        typer.Option(metavar="REV_OR_FILE", help="An earlier result; exit 1 if a case got slower beyond noise."),
    ] = None,
    saved: Annotated[
        Path | None, typer.Option("--from", metavar="FILE", help="Measure nothing; use this file as the new result.")
    ] = None,
    revision: Revision = None,
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

    say = console(stderr=as_json)
    if save and saved:
        refuse("--save with --from would write what was measured elsewhere; copy the file instead")
    need(["scipy"], "bench", "bench")
    with refusing():
        module = cases.find(op)
        if saved:
            taken = load(saved)
        else:
            where = device_of(device)
            chosen = select(module.cases(where, quick), only)
            there = results / describe(where)["slug"] / f"{op}.json"
            whole = load(there) if save and only != "*" and there.exists() else None
            if save and only != "*" and whole is None:
                refuse(
                    f"--save with --only replaces cases of a saved result, and there is no {there}; leave out --only"
                )
            if whole is not None:  # an error after the measurement would lose it
                merge(whole, Report(op, describe(where, revision), whole.method | {"quick": quick}, {}, {}))
            if save and quick and there.exists() and not load(there).method["quick"]:
                refuse(f"--save with --quick would replace the full result in {there}; leave one of them out")
        slug = taken.machine["slug"] if saved else describe(where)["slug"]
        before = git.earlier(against, results / slug / f"{op}.json", loads) if against else None
    if not saved:
        if where.type == "cpu" and device is Device.auto:
            say.print("No GPU here: this times the CPU path, and says nothing about a GPU.")

        def keep(report: Report) -> None:
            if save:
                write(report if whole is None else merge(whole, report), results)

        taken = getattr(module, "run", run)(chosen, where, quick, only, revision=revision, after_case=keep)
    if as_json:
        sys.stdout.write(dumps(taken))
    say.print(table(taken, getattr(module, "TABLE", {})).terminal())
    say.print(getattr(module, "summary", verdict)(taken), markup=False)
    if save:
        say.print(f"Saved: {results / taken.machine['slug'] / op}.json")
    slower = _judge(before, taken, say) if before else False
    if taken.failures or slower:
        raise typer.Exit(1)


def _judge(before: Report, after: Report, say: Console) -> bool:
    """Compare our rows with an earlier result; returns True if one got slower."""
    from .bench import regress

    with refusing():
        compared = regress.outcomes(before, after)
    say.print(regress.table(compared, before, after).terminal())
    slower = [o for o in compared if o.verdict == "slower"]
    lines = [f"{o.case}: {o.name}" for o in slower]
    say.print("\n".join(["Slower than before:", *lines] if slower else ["No case got slower."]))
    return bool(slower)


def _add(command: Callable[..., Any], name: str | None = None) -> None:
    """Register a command. Its docstring is its help, one line per paragraph, wrapped at the terminal's width."""
    paragraphs = inspect.cleandoc(command.__doc__ or "").split("\n\n")
    app.command(name, help="\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs))(command)


_add(generate)
_add(evaluate, "eval")
_add(advise)
_add(calibrate)
_add(drift)
_add(bench)
_add(check)
_add(profile)
_add(report)
_add(tune)
_add(warmup)
_add(info)
