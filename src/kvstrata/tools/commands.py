"""The commands `profile`, `check`, `report` and `info`. Heavy imports wait until a command runs."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from . import terminal as ui

if TYPE_CHECKING:
    from .profile.profile import Profile

TOOL_UNAVAILABLE = 3  # exit code: the tool that a command needs is missing or lacks permission


Op = Annotated[str, typer.Argument(help="Op: decode, packed, prefill, quantize, replay, settle, step or store.")]


def profile(
    op: Op,
    case: Annotated[
        list[str] | None, typer.Option(metavar="GLOB", help="Bench cases, or CASE:CONTENDER; repeatable.")
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(metavar="REV_OR_FILE", help="Earlier profile to compare with: a file or a git revision."),
    ] = None,
    compare: Annotated[
        tuple[str, str] | None, typer.Option(metavar="A B", help="Compare two files or two contenders, B against A.")
    ] = None,
    gate: Annotated[
        list[str] | None,
        typer.Option(metavar="LIMIT", help="Condition that must hold, such as 'l2_hit>=+8'; repeatable."),
    ] = None,
    save: Annotated[
        bool, typer.Option("--save", help="Write RESULTS/<machine>/profile_<op>.json and docs/profiles/<op>.md.")
    ] = False,
    out: Annotated[Path, typer.Option(help="Summary to write, next to its JSON; --save overrides it.")] = Path(
        "profile_summary.md"
    ),
    minutes: Annotated[
        float, typer.Option(min=0.01, help="Time limit for all cases; cases not done by then are listed.")
    ] = 15.0,
    as_json: ui.JsonOption = False,
    results: ui.ResultsOption = Path("results"),
    revision: ui.RevisionOption = None,
) -> None:
    """Find what bounds a kernel: Nsight Compute on bench cases.

    Reports L2 hits, DRAM, tensor cores, issue slots, occupancy, registers, bank conflicts and stall reasons for one
    launch of each of our kernels, with caches flushed. Writes a summary to profile_summary.md, and its JSON next to it.

    A gate with a signed number limits the change against --against or --compare: percentage points for shares,
    percent for the rest; without a sign it limits the value. Exit code 1: a gate was missed, or a case could not be
    profiled; 3: no ncu, or no permission to read the counters, in which case only times, registers and shared memory
    are reported.

    Example: kvstrata profile store

    Example: kvstrata profile decode --case 'K4V4*' --against HEAD~5 --gate 'dram>=-2' --gate 'registers<=128'

    Example: kvstrata profile store --case 8x128-fp16-8192 --compare cuda_direct cuda_staged

    Example: kvstrata profile store --compare old.json new.json --gate 'l2_hit>=+8' --gate 'dram<=-10'
    """
    from . import git
    from .profile import profile as profiles
    from .profile import tables
    from .profile.ncu import NcuError
    from .results import write

    console = ui.console(stderr=as_json)
    without_counters = False
    try:
        gates = [profiles.gate_of(text) for text in gate or []]
        if against and compare:
            raise ValueError("--against and --compare exclude each other: both name what to compare with")
        before: Profile | None = None
        if compare and all(Path(name).is_file() for name in compare):
            before, after = (profiles.load(Path(name)) for name in compare)
        elif compare:
            if missing := [name for name in compare if name.endswith(".json") and not Path(name).is_file()]:
                raise ValueError(f"--compare: expected two files or two contenders, there is no file {missing[0]}")
            before = _profile_cases(op, case or [], compare[0], revision, 30 * minutes)
            after = _profile_cases(op, case or [], compare[1], revision, 30 * minutes)
        else:
            after = _profile_cases(op, case or [], None, revision, 60 * minutes)
            without_counters = not after.tool.startswith("ncu")
        if against:
            before = git.read_earlier(against, results / after.machine["slug"] / f"profile_{op}.json", profiles.loads)
        changes = profiles.changes(before, after) if before else []
        missed = profiles.missed_gates(gates, after, changes)
    except NcuError as error:
        typer.echo(f"kvstrata: {error}", err=True)
        raise typer.Exit(TOOL_UNAVAILABLE) from error
    except (LookupError, ValueError, OSError) as error:
        ui.usage_error(ui.text_of(error))
    title = f"{' against '.join(reversed(compare)) if compare else f'against {against}'}"
    compared = tables.comparison(changes, title) if before else None
    if as_json:
        result = {"profile": json.loads(profiles.dumps(after)), "missed": missed}
        result["changes"] = [{**asdict(change), "change": change.shown} for change in changes]
        typer.echo(json.dumps(result, indent=1))
    console.print(tables.kernels(after).terminal())
    if compared:
        console.print(compared.terminal())
    for line in missed:
        console.print(f"Missed: {line}", markup=False)
    data, text = out.with_suffix(".json"), out
    if save:
        data, text = results / after.machine["slug"] / f"profile_{op}.json", Path("docs/profiles") / f"{op}.md"
    for path in (profiles.save(after, data), write(text, tables.summary(after, compared, missed))):
        console.print(f"Written: {path}", markup=False, soft_wrap=True)
    if without_counters:
        raise typer.Exit(TOOL_UNAVAILABLE)
    if missed or after.failed:
        raise typer.Exit(1)


def check(
    op: Op,
    tools: Annotated[
        str, typer.Option(help="Tools of compute-sanitizer, comma-separated; none skips them.")
    ] = "memcheck,racecheck,initcheck,synccheck",
    quick: Annotated[bool, typer.Option("--quick", help="Fewer trials: a first look, not evidence.")] = False,
    device: ui.DeviceOption = ui.Device.auto,
    seed: Annotated[int, typer.Option(help="Seed of the first trial; a failure reports its seed.")] = 0,
    minutes: Annotated[
        float, typer.Option(min=0.01, help="Time limit of a sweep or a tool; exceeding it is a failure.")
    ] = 7.0,
    save: Annotated[
        bool, typer.Option("--save", help="Save the outcome in RESULTS/<machine>/check.json, including failures.")
    ] = False,
    results: ui.ResultsOption = Path("results"),
    revision: ui.RevisionOption = None,
    as_json: ui.JsonOption = False,
) -> None:
    """Check that an op is correct on this machine. Exit code 1 if any check fails.

    First, every kernel of ours in the quick cases of bench, with their own checks; then random small trials of every
    backend that runs here, against plain torch, for a few seconds each; then some of these under the tools of
    compute-sanitizer. On a GPU, sweeps and tools run in parallel.
    Without a GPU the CPU backends are checked, and the sanitizer is skipped.

    Example: kvstrata check store

    Example: kvstrata check decode --quick --tools memcheck,racecheck

    Example: kvstrata check prefill --tools none

    Example: kvstrata check decode --quick --save

    Example: kvstrata check replay --device cpu --json
    """
    from .bench import cases
    from .bench.machine import describe
    from .check import check as checks
    from .check import results as check_results
    from .render import Grid

    console = ui.console(stderr=as_json)
    requested = [tool for tool in tools.split(",") if tool and tool != "none"]
    if unknown := [tool for tool in requested if tool not in check_results.TOOLS]:
        ui.usage_error(f"--tools: expected some of {', '.join(check_results.TOOLS)}, or none, got {unknown[0]!r}")
    with ui.usage_errors():
        cases.find(op)
        torch_device = ui.device_of(device)
    with ui.spinner(f"check {op}") as tick:
        steps = checks.run(op, torch_device, requested, quick, seed, tick, 60 * minutes)
    failed = any(step.errors for step in steps)
    if as_json:
        typer.echo(json.dumps({"op": op, "device": str(torch_device), "passed": not failed, "steps": [
            {**asdict(step), "verdict": step.verdict} for step in steps
        ]}, indent=1))  # fmt: skip
    rows = [[s.name, s.verdict, "" if s.skipped else f"{s.done}", f"{s.seconds:.1f}" if s.done else ""] for s in steps]
    notes = [f"{step.name}: {error}" for step in steps for error in step.errors]
    notes += [f"{step.name} skipped: {step.skipped}" for step in steps if step.skipped]
    header = ["", "verdict", "checked", "seconds"]
    console.print(Grid(f"check {op} on {torch_device}", header, rows, notes, labels=2).terminal())
    console.print(f"Correctness: {'FAILED' if failed else 'PASSED'}")
    if save:
        checked = check_results.Checked(op, describe(torch_device, revision), quick, seed, requested, steps)
        with ui.usage_errors():
            path = check_results.save(checked, results)
        console.print(f"Saved: {path}", markup=False, soft_wrap=True)
    if failed:
        raise typer.Exit(1)


def report(
    documents: Annotated[
        list[Path] | None, typer.Argument(help="Markdown files; README.md and docs/**/*.md by default.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE.html", help="Write one self-contained page instead.")
    ] = None,
    markdown: Annotated[
        Path | None, typer.Option(metavar="FILE.md", help="Write the tables of the page as Markdown.")
    ] = None,
    results: ui.ResultsOption = Path("results"),
    figures: Annotated[Path, typer.Option(help="Folder for the figures.")] = Path("docs/figures"),
    check: Annotated[bool, typer.Option("--check", help="Change nothing; exit 1 if a table is out of date.")] = False,
    as_json: ui.JsonOption = False,
) -> None:
    """Render saved results: as one self-contained page, or as the tables and figures of the documents.

    --out writes a self-contained page without network access or scripts: every op with its peers, intervals, a
    roofline, speed-ups, its history in git, profiles and the environment.

    Without --out and --markdown the documents are updated. A table is between <!-- kvstrata:store -->
    and <!-- /kvstrata:store -->; the first marker may have options: rows=GLOB contenders=GLOB columns=us,tb_s,speedup
    pivot=us on=nvidia-h200.

    Example: kvstrata report --out report.html

    Example: kvstrata report

    Example: kvstrata report --check docs/store.md
    """
    if out or markdown:
        if documents or check:
            ui.usage_error("--out and --markdown write a separate page: leave out documents and --check")
        written = _write_page(results, out, markdown)
        stale: list[Path] = []
    else:
        written, stale = _update_documents(documents, results, figures, check)
    if as_json:
        typer.echo(json.dumps({"written": [str(path) for path in written], "stale": [str(path) for path in stale]}))
    else:
        if not written and not stale:
            typer.echo("Nothing to bring up to date.")
        for path in written:
            typer.echo(f"written: {path}")
        for path in stale:
            typer.echo(f"out of date: {path}")
    if stale:
        raise typer.Exit(1)


def info(as_json: ui.JsonOption = False) -> None:
    """Show versions, the device and its limits, the backends of each op and why some cannot run, tools,
    cache folders and tuned tables.

    Example: kvstrata info

    Example: kvstrata info --json
    """
    from . import info as environment

    facts = environment.facts(ui.device_of(ui.Device.auto))
    typer.echo(json.dumps(facts, indent=1) if as_json else "\n".join(environment.lines(facts)))


def _update_documents(
    documents: list[Path] | None, results: Path, figures: Path, check: bool
) -> tuple[list[Path], list[Path]]:
    """Update documents and figures; returns the files written or, with `check`, those out of date."""
    from . import publish

    changed = []
    with ui.usage_errors():
        reports = publish.load_all(results)
        for path in documents or [p for p in (Path("README.md"), *sorted(Path("docs").glob("**/*.md"))) if p.exists()]:
            text = path.read_text(encoding="utf-8")
            try:
                fresh = publish.render_document(text, reports)
            except (LookupError, ValueError) as error:
                raise ValueError(f"{path}: {ui.text_of(error)}") from error
            if fresh != text:
                changed.append(path)
                if not check:
                    path.write_text(fresh, encoding="utf-8")
        if not check:
            changed += publish.figures(reports, figures)
    return ([], changed) if check else (changed, [])


def _write_page(results: Path, out: Path | None, markdown: Path | None) -> list[Path]:
    ui.require(("matplotlib", "jinja2", "scipy"), "bench", "the page")
    from .report import page
    from .results import write

    with ui.usage_errors():
        content = page.collect(results)
        return [write(path, text(content)) for path, text in ((out, page.html), (markdown, page.markdown)) if path]


def _profile_cases(op: str, globs: list[str], contender: str | None, revision: str | None, seconds: float) -> Profile:
    """Profile the matching cases with ncu or, if the counters cannot be read, with torch's profiler."""
    from .bench import cases
    from .bench.machine import describe
    from .profile import ncu
    from .profile import profile as profiles

    cases.find(op)
    torch_device = ui.device_of(ui.Device.auto)
    if torch_device.type != "cuda":
        ncu.find()  # report a missing ncu first
        raise ncu.NcuError("profile needs a CUDA device: torch sees none here")
    names, end = profiles.choose(op, globs, torch_device), time.monotonic() + seconds
    sizes = {name: case.bytes for name, case in cases.by_name(op, torch_device).items()}
    machine = describe(torch_device, revision)
    with ui.spinner(f"profile {op}") as tick:
        try:
            counted = profiles.take(op, names, machine, sizes, contender, tick, seconds)
            reason = "" if counted.cases else "; ".join(dict.fromkeys(counted.failed.values()))
        except ncu.NcuError as error:
            reason = str(error)
        if not reason:
            return counted
        tick("without counters")
        left = end - time.monotonic()
        traced = profiles.take(op, names, machine, sizes, contender, tick, left, counters=False)
    if not traced.cases:
        raise ncu.NcuError(reason)
    typer.echo(f"kvstrata: {reason}", err=True)
    traced.failed["counters"] = reason
    return traced
