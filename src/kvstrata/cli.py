"""The command line: one function per command, here or in its own module. Commands import what they need when run."""

from __future__ import annotations

import importlib.util
import json
import sys
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from kvstrata.eval.cli import advise, evaluate
from kvstrata.hf.cli import generate
from kvstrata.tune.cli import tune, warmup

if TYPE_CHECKING:
    import torch
    from rich.console import Console

app = typer.Typer(
    name="kvstrata",
    help="The KV-cache layer of LLM inference: measure it, report it, see what runs here.",
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
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show it and exit.")
    ] = False,
) -> None:
    pass


class Device(str, Enum):
    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


Results = Annotated[Path, typer.Option("--results", help="Folder of results, one subfolder per machine.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]


@app.command()
def bench(
    op: Annotated[str, typer.Argument(help="What to measure: decode, quantize, replay, settle or store.")],
    quick: Annotated[bool, typer.Option("--quick", help="Fewer cases and samples: a look, not evidence.")] = False,
    save: Annotated[bool, typer.Option("--save", help="Write RESULTS/<machine>/<op>.json.")] = False,
    device: Annotated[Device, typer.Option(help="Where to run; auto takes a GPU if there is one.")] = Device.auto,
    only: Annotated[str, typer.Option(metavar="GLOB", help="Only cases whose name matches.")] = "*",
    as_json: AsJson = False,
    results: Results = Path("results"),
    against: Annotated[
        Path | None, typer.Option(metavar="FILE", help="An earlier result; exit 1 if a case got slower beyond noise.")
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Revision to record outside a git checkout.")] = None,
) -> None:
    """Check, then time, our kernels against their peers.

    Every contender is checked on the very inputs that are timed; one that is wrong gets no speed, and if it is ours
    the exit code is 1. Samples are cold (cache flushed), interleaved, and given with a 95 % interval.

    Example: kvstrata bench store --quick

    Example: kvstrata bench store --only '*fp16*' --against results/nvidia-h200/store.json
    """
    from kvstrata.bench import cases
    from kvstrata.bench.machine import describe
    from kvstrata.bench.render import terminal, verdict
    from kvstrata.bench.results import compare, dumps, load
    from kvstrata.bench.results import save as write
    from kvstrata.bench.runner import run, select

    say = _console(stderr=as_json)
    if save and only != "*":
        _refuse("--save with --only would replace the whole result by a part of it; leave one of them out")
    if importlib.util.find_spec("scipy") is None:
        _refuse("bench needs scipy for its statistics: pip install 'kvstrata[bench]'")
    try:
        module = cases.find(op)
        where = _device(device)
        chosen = select(module.cases(where, quick), only)
        before = load(against) if against else None
        there = results / describe(where)["slug"] / f"{op}.json"
        if save and quick and there.exists() and not load(there).method["quick"]:
            _refuse(f"--save with --quick would replace the full result in {there}; leave one of them out")
    except (LookupError, ValueError, OSError) as error:
        _refuse(str(error))
    if where.type == "cpu" and device is Device.auto:
        say.print("No GPU here: this times the CPU path, and says nothing about a GPU.")
    keep = (lambda report: write(report, results)) if save else (lambda report: None)
    report = run(chosen, where, quick, only, revision=revision, after_case=keep)
    if as_json:
        sys.stdout.write(dumps(report))
    say.print(terminal(report))
    say.print(getattr(module, "summary", verdict)(report), markup=False, highlight=False)
    if save:
        say.print(f"Saved: {results / report.machine['slug'] / op}.json", highlight=False)
    slower = []
    if before:
        try:
            slower = compare(before, report)
        except ValueError as error:
            _refuse(str(error))
        say.print("\n".join(["Slower than before:", *map(str, slower)] if slower else ["No case got slower."]))
    if report.failures or slower:
        raise typer.Exit(1)


@app.command()
def report(
    documents: Annotated[
        list[Path] | None, typer.Argument(help="Markdown files; README.md and docs/**/*.md if none is named.")
    ] = None,
    results: Results = Path("results"),
    figures: Annotated[Path, typer.Option(help="Folder for the figures.")] = Path("docs/figures"),
    check: Annotated[bool, typer.Option("--check", help="Change nothing; exit 1 if a table is out of date.")] = False,
) -> None:
    """Render the tables in the documents, and the figures, from saved results.

    A table stands between <!-- kvstrata:store --> and <!-- /kvstrata:store -->; the first marker may carry options:
    rows=GLOB contenders=GLOB columns=us,tb_s,speedup pivot=us on=nvidia-h200.

    Example: kvstrata report

    Example: kvstrata report --check docs/store.md
    """
    from kvstrata.bench import publish

    changed = []
    try:
        reports = publish.load_all(results)
        for path in documents or [p for p in (Path("README.md"), *sorted(Path("docs").glob("**/*.md"))) if p.exists()]:
            text = path.read_text(encoding="utf-8")
            try:
                fresh = publish.render_document(text, reports)
            except (LookupError, ValueError) as error:
                raise ValueError(f"{path}: {error}") from error
            if fresh != text:
                changed.append(path)
                if not check:
                    path.write_text(fresh, encoding="utf-8")
        if not check:
            changed += publish.figures(reports, figures)
    except (LookupError, ValueError, OSError) as error:
        _refuse(str(error))
    for path in changed:
        typer.echo(f"{'out of date' if check else 'written'}: {path}")
    if check and changed:
        raise typer.Exit(1)


@app.command()
def info(as_json: AsJson = False) -> None:
    """Show versions, the device, which backends run here and why others do not, and the cache folder.

    Example: kvstrata info --json
    """
    from kvstrata.bench import cases
    from kvstrata.bench.machine import describe
    from kvstrata.jit import cache_folder
    from kvstrata.store.op import BACKENDS, missing

    where = _device(Device.auto)
    facts: dict[str, Any] = {
        **describe(where),
        "backends": {name: missing(name, where) for name in BACKENDS if name != "auto"},
        "benchmarks": cases.names(),
        "cache": str(cache_folder()),
    }
    if as_json:
        typer.echo(json.dumps(facts, indent=1))
        return
    facts["backends"] = {name: reason or "available" for name, reason in facts["backends"].items()}
    facts["benchmarks"] = ", ".join(facts["benchmarks"])
    for key, value in facts.items():
        lines = value.items() if isinstance(value, dict) else [("", value)]
        for name, entry in lines:
            typer.echo(f"{key:12} {f'{name} ' if name else ''}{'-' if entry is None else entry}")


app.command()(generate)
app.command("eval")(evaluate)
app.command()(advise)
app.command()(tune)
app.command()(warmup)


def _device(wanted: Device) -> torch.device:
    import torch

    if wanted is Device.cuda and not torch.cuda.is_available():
        raise ValueError("--device cuda: torch sees no CUDA device")
    gpu = torch.cuda.is_available() and wanted is not Device.cpu
    return torch.device("cuda", torch.cuda.current_device()) if gpu else torch.device("cpu")


def _console(stderr: bool) -> Console:
    from rich.console import Console

    console = Console(stderr=stderr)
    return console if console.is_terminal else Console(stderr=stderr, width=200)


def _refuse(message: str) -> NoReturn:
    typer.echo(f"kvstrata: {message}", err=True)
    raise typer.Exit(2)
