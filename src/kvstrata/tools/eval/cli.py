"""`kvstrata eval`, `advise`, `calibrate` and `drift`. Everything heavy is imported when a command runs."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvstrata.tools import terminal as ui

if TYPE_CHECKING:
    import torch
    from rich.console import Console
    from rich.progress import Progress

    from .advise import Advice
    from .sensitivity import Sensitivity

Model = Annotated[
    str | None, typer.Option(help="Folder, .gguf file or hub id; SmolLM2-135M from its wheel by default.")
]
Texts = Annotated[
    list[str] | None,
    typer.Option("--text", help="A text file, or the name of a text that comes with Python; repeatable."),
]
Chunk = Annotated[int, typer.Option(min=1, help="Tokens decoded at a time; 1 is what a server does, but is slow.")]
LIBRARIES = ("transformers", "numpy")


def evaluate(
    model: Model = None,
    text: Texts = None,
    budget: Annotated[list[float] | None, typer.Option(help="Fraction of 16 bit; repeatable.")] = None,
    tokens: Annotated[list[int] | None, typer.Option(min=4, help="Length of the text; repeatable.")] = None,
    policy: Annotated[
        list[str] | None, typer.Option(help="importance (default), recency or uniform; repeatable.")
    ] = None,
    tiers: Annotated[list[str] | None, typer.Option(help="Formats, widest first: K4V4,K3V2,K2V2; repeatable.")] = None,
    bits: Annotated[
        list[float] | None,
        typer.Option(help="Compare tiers with one format at this mean width of codes instead of bytes; repeatable."),
    ] = None,
    packed: Annotated[
        list[str] | None,
        typer.Option(help="Compare packed pages of this format, with a 16-bit tail, with tiers of as many bytes."),
    ] = None,
    calibration: Annotated[Path | None, typer.Option(help="File of kvstrata calibrate: also run with it.")] = None,
    chunk: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens decoded at a time: 32, with --quick 64; 1 is what a server does."),
    ] = None,
    settle_every: Annotated[
        int, typer.Option(min=1, help="Tokens between two settlings, which stay at 16 bit until the next one.")
    ] = 1,
    max_tokens: Annotated[
        int | None, typer.Option(min=64, help="Length for tables and the choice of tiers; default: the text's.")
    ] = None,
    stretches: Annotated[
        int, typer.Option(min=1, help="Stretches of --tokens from each text, as one batch, for narrower intervals.")
    ] = 1,
    device: ui.Where = ui.Device.auto,
    dtype: ui.Precision = None,
    needles: Annotated[bool, typer.Option(help="Also run needles in a haystack.")] = True,
    peers: Annotated[
        bool,
        typer.Option(help="Also run KIVI-style and transformers' quantised caches; with --bits, simulated rounding."),
    ] = True,
    quick: Annotated[bool, typer.Option("--quick", help="One text, one length: a first look, not evidence.")] = False,
    out: Annotated[Path, typer.Option(help="JSON to write or continue; the plot is written next to it.")] = Path(
        "quality.json"
    ),
    save: Annotated[bool, typer.Option("--save", help="Write RESULTS/<machine>/quality.json instead.")] = False,
    results: ui.Results = Path("results"),
    revision: ui.Revision = None,
    as_json: ui.AsJson = False,
) -> None:
    """Measure the quality of a compressed cache, and of its peers at the same bytes.

    The first half of each stretch of text is a prompt, the rest is decoded through the cache: perplexity, KL and top-1
    agreement with 16 bit, and needles in a haystack. A stopped run continues; rows of another revision are measured
    again.

    Example: kvstrata eval --quick

    Example: kvstrata eval --model ./my-model --text notes.txt --budget 0.25 --budget 0.2 --tokens 4096

    Example: kvstrata eval --model model.gguf --text tempfile --budget 0.25 --tokens 1024 --settle-every 16

    Example: kvstrata eval --bits 2.5 --bits 3 --tokens 1024 --chunk 64 --stretches 8

    Example: kvstrata eval --packed K4V4 --calibration calibration.safetensors --tokens 1024 --chunk 64
    """
    ui.need(LIBRARIES, "hf", "this")
    from kvstrata.quant.calibration import Calibration
    from kvstrata.tools.bench.machine import describe

    from . import contenders as known
    from . import model as models
    from . import plot, quality, render, texts
    from . import results as kept
    from .packed import at_bytes, check_packed

    say = ui.console(as_json)
    chosen = text or list(texts.DEFAULT[:1] if quick else texts.DEFAULT)
    budgets = budget or ([0.5, 0.25, 0.2] if quick else [0.5, 0.35, 0.25, 0.2])
    lengths = tokens or ([1024] if quick else [1024, 4096])
    chunk = chunk or (64 if quick else 32)
    with ui.refusing():
        where = ui.device_of(device)
        machine = describe(where, revision)
        path = results / machine["slug"] / "quality.json" if save else out
        lists = [entry.split(",") for entry in tiers or []]
        _check(budgets, policy or [], lists)
        for name in packed or []:
            check_packed(name)
        given = None if calibration is None else Calibration.load(calibration)
        widths = [contender for width in bits or [] for contender in known.at_bits(width, peers, given)]
        words = texts.load(chosen)
        state = kept.load(path) if path.exists() else None
        loaded, tokenizer = _loaded(model, where, ui.dtype_of(dtype), say)
    name = models.name_of(model) + (f" in {dtype}" if dtype else "")
    if state is None or (state.model, state.texts) != (name, list(words)):
        if state is not None:
            ui.refuse(
                f"--out: expected a new file, or results of {name} on {', '.join(words)},"
                f" {path} has those of {state.model} on {', '.join(state.texts)}"
            )
        state = kept.Quality(machine, name, list(words))
    state.machine = machine
    pages = known.fitting(settle_every) | ({} if max_tokens is None else {"max_tokens": max_tokens})
    if peers and not (widths or packed):
        state.note_absent(known.absent())
    with ui.progress_bars(say) as bar:
        for length in lengths:
            with ui.refusing():
                ids = models.encode(tokenizer, words, length, stretches).to(where)
            packed_contenders = [one for name in packed or [] for one in at_bytes(name, loaded.config, length, given)]
            wanted = [*widths, *packed_contenders] or known.at_budgets(
                loaded.config, budgets, policy or ["importance"], lists, length, peers, pages, given
            )
            prompt = 0 if widths or packed_contenders else length // 2  # a width holds at every length
            task = bar.add_task(f"{length} tokens", total=(len(wanted) + 1) * (length - prompt))
            quality.run(
                loaded,
                ids,
                wanted,
                state,
                prompt=prompt,
                chunk=chunk,
                after=lambda: kept.save(state, path),
                tick=partial(_tick, bar, task, prompt, chunk),
            )
            bar.update(task, completed=(len(wanted) + 1) * (length - prompt))
        if needles and not (widths or packed):
            sizes = [512] if quick else [1024, 2048]
            depths = [0.5] if quick else [0.1, 0.5, 0.9]
            ours = [known.strata(b, **pages) for b in budgets]
            task = bar.add_task("needles", total=(len(ours) + 1) * len(sizes) * len(depths))
            quality.run_needles(
                loaded,
                tokenizer,
                next(iter(words.values())),
                ours,
                state,
                lengths=sizes,
                depths=depths,
                asked=2 if quick else 4,
                after=lambda: kept.save(state, path),
                tick=lambda name, n: bar.advance(task),
            )
            bar.update(task, completed=(len(ours) + 1) * len(sizes) * len(depths))
    kept.save(state, path)
    if as_json:
        sys.stdout.write(kept.dumps(state))
    say.print(render.table(state, {}).terminal())
    if state.needles:
        say.print(render.table(state, {"table": "needles"}).terminal())
    say.print(f"Saved: {path}")
    if importlib.util.find_spec("matplotlib") is None:
        say.print("No plot: it needs matplotlib, pip install 'kvstrata[bench]'")
    else:
        say.print(f"Plot: {plot.plot(state, path.with_suffix('.png'))}")


def advise(
    model: Model = None,
    text: Texts = None,
    kl: Annotated[float, typer.Option("--kl", help="Upper bound of the mean KL from 16 bit, in nats.")] = 0.02,
    tokens: Annotated[int, typer.Option(min=4, help="Length of the text.")] = 2048,
    chunk: Chunk = 64,
    calibration: Annotated[
        Path | None, typer.Option(help="File of kvstrata calibrate; the configuration then refers to it.")
    ] = None,
    device: ui.Where = ui.Device.auto,
    dtype: ui.Precision = None,
    out: Annotated[Path, typer.Option(help="The configuration to write.")] = Path("kvstrata.json"),
    as_json: ui.AsJson = False,
) -> None:
    """Find the formats and the smallest budget that preserve the predictions of your model on your text.

    Measures how much each layer suffers from codes in K and in V, selects the tiers accordingly, then searches for the
    smallest budget with a KL below the bound. The file holds the arguments of a cache: StrataCache.from_file(config,
    file).

    Example: kvstrata advise --text notes.txt --kl 0.02

    Example: kvstrata advise --model ./my-model --text notes.txt --calibration calibration.safetensors --json
    """
    ui.need(LIBRARIES, "hf", "this")
    from kvstrata.quant.calibration import Calibration

    from . import advise as advice
    from . import contenders as known
    from . import model as models
    from . import sensitivity, texts

    if not kl > 0:
        ui.refuse(f"--kl: expected a positive number of nats, got {kl:g}")
    say = ui.console(as_json)
    with ui.refusing():
        where, precision = ui.device_of(device), ui.dtype_of(dtype)
        words = texts.load(text or list(texts.DEFAULT[:1]))
        by_file = {} if calibration is None else {"calibration": str(calibration)}
        given = None if calibration is None else Calibration.load(calibration)
        loaded, tokenizer = _loaded(model, where, precision, say)
        ids = models.encode(tokenizer, words, tokens).to(where)
    with ui.progress_bars(say) as bar:
        layers = loaded.config.get_text_config(decoder=True).num_hidden_layers
        task = bar.add_task("sensitivity", total=2 * layers)
        measured = sensitivity.measure_sensitivity(
            loaded, ids[:, : min(tokens, 256)], given, tick=lambda name, done: bar.update(task, completed=done)
        )
        task = bar.add_task("budget", total=6)
        advised = advice.advise(
            loaded,
            ids,
            measured,
            kl,
            prompt=tokens // 2,
            chunk=chunk,
            tick=lambda step: bar.advance(task),
            **known.fitting(room=16) | by_file,
        )
    if as_json:
        typer.echo(json.dumps(_advised(advised, measured, kl), indent=1))
    worst = sorted(range(len(measured.k)), key=lambda i: -measured.k[i] - measured.v[i])[:5]
    say.print(f"K costs {measured.ratio:.1f} times as much as V at {measured.bits} bits: {advised.family}.")
    for place in worst:
        say.print(f"  layer {place}: KL {measured.k[place]:.4f} by K, {measured.v[place]:.4f} by V")
    for step in advised.steps:
        mark = "kept" if step.fits else "not kept"
        say.print(f"  budget {step.budget:g}: {step.fraction:.3f} of 16 bit, KL {step.kl:.4f}, {mark}")
    if advised.arguments is None:
        ui.refuse(
            f"--kl: expected a bound that some budget keeps, got {kl}; the largest tried is {advised.steps[0].budget}"
        )
    advice.write(advised, out)
    say.print(f"Written: {out} (StrataCache.from_file(model.config, {str(out)!r}))")


def calibrate(
    model: Model = None,
    text: Texts = None,
    tokens: Annotated[int, typer.Option(min=16, help="Tokens of each text.")] = 512,
    sensitivity: Annotated[
        bool, typer.Option(help="Also measure what rounding K or V of each layer costs: two forwards per layer.")
    ] = False,
    device: ui.Where = ui.Device.auto,
    dtype: ui.Precision = None,
    out: Annotated[Path, typer.Option(help="The file to write.")] = Path("calibration.safetensors"),
    as_json: ui.AsJson = False,
) -> None:
    """Compute the balance and the centres of a model's K, for StrataCache(..., calibration=FILE).

    Runs one forward over some text. A cache with the file does not estimate them from each prompt: equal rows that
    pass through the same tiers then have equal codes, whatever else a request or a batch holds.

    Example: kvstrata calibrate --text notes.txt --out calibration.safetensors

    Example: kvstrata calibrate --model ./model.gguf --text notes.txt --sensitivity
    """
    ui.need(LIBRARIES, "hf", "this")
    from dataclasses import replace

    from kvstrata.hf.calibrate import calibrate as calibrate_model

    from . import model as models
    from . import sensitivity as sides
    from . import texts

    say = ui.console(as_json)
    with ui.refusing():
        where = ui.device_of(device)
        words = texts.load(text or list(texts.DEFAULT[:1]))
        loaded, tokenizer = _loaded(model, where, ui.dtype_of(dtype), say)
        ids = models.encode(tokenizer, words, tokens).to(where)
    name = models.name_of(model)
    with ui.progress_bars(say) as bar, ui.refusing():
        task = bar.add_task("balance and centres", total=1)
        calibration = calibrate_model(loaded, ids, Path(name).name)
        bar.update(task, completed=1)
        if sensitivity:
            task = bar.add_task("sensitivity", total=2 * len(calibration.layers))
            measured = sides.measure_sensitivity(
                loaded, ids[:1, :256], calibration, tick=lambda name, done: bar.update(task, completed=done)
            )
            compressed = [i for i, x in enumerate(measured.k) if x or measured.v[i]]
            if len(compressed) == len(calibration.layers):
                k, v = ([side[i] for i in compressed] for side in (measured.k, measured.v))
                calibration = replace(calibration, k_sensitivity=k, v_sensitivity=v, bits=measured.bits)
        calibration.save(out)
    balances = [layer.balance for layer in calibration.layers if layer.balance is not None]
    spread = [float(x.amax() / x.amin()) for x in balances]
    if as_json:
        layers = [{"layer": i, "balance": x} for i, x in enumerate(spread)]
        typer.echo(json.dumps({"out": str(out), "model": name, "layers": layers}, indent=1))
    for place in sorted(range(len(spread)), key=lambda i: -spread[i])[:4]:
        say.print(f"  layer {place}: the balance spans a factor of {spread[place]:g}")
    say.print(f"Written: {out} (StrataCache(model.config, calibration={str(out)!r}))")


def drift(
    steps: Annotated[int, typer.Option(min=160, help="Tokens decoded, with one query each.")] = 10_000,
    budget: Annotated[float, typer.Option(help="Fraction of 16 bit.")] = 0.3,
    policy: Annotated[
        list[str] | None,
        typer.Option(help="mean and ema (importance), recency, uniform; mean, ema and uniform by default."),
    ] = None,
    out: Annotated[Path, typer.Option(help="JSON to write.")] = Path("drift.json"),
    save: Annotated[bool, typer.Option("--save", help="Write RESULTS/<machine>/drift.json instead.")] = False,
    results: ui.Results = Path("results"),
    revision: ui.Revision = None,
    as_json: ui.AsJson = False,
) -> None:
    """Decode a long synthetic text with shifting attention, and compare the error of its quarters.

    Tokens are never promoted, so a token that is demoted now and attended to later stays demoted. The error relative to
    exact attention, the bytes and the shares of tiers show whether that adds up. Needs no model.

    Example: kvstrata drift --steps 2000

    Example: kvstrata drift --budget 0.25 --policy mean --policy uniform
    """
    from kvstrata.tools.bench.machine import describe

    from . import drift as runs

    say = ui.console(as_json)
    state = runs.Drift(describe("cpu", revision))
    path = results / state.machine["slug"] / "drift.json" if save else out
    with ui.refusing():
        wanted = [runs.Setting(steps=steps, budget=budget, **runs.choice(name)) for name in policy or runs.DEFAULT]
        for setting in wanted:
            runs.make_cache(setting)
    with ui.progress_bars(say) as bar:
        for setting in wanted:
            task = bar.add_task(f"{setting.policy}, {setting.importance}", total=steps)
            state.rows.append(runs.run(setting, lambda step, task=task: bar.update(task, completed=step + 1)))  # type: ignore[misc]
    runs.save(state, path)
    if as_json:
        sys.stdout.write(runs.dumps(state))
    say.print(runs.table(state).terminal())
    say.print(f"Saved: {path}")
    if not all(row.within for row in state.rows):
        ui.refuse("the budget did not hold at every step")


def _advised(advised: Advice, measured: Sensitivity, bound: float) -> dict[str, Any]:
    """Advice as plain data: ``configuration`` is the content of the file; a step that did not fit has no KL."""
    steps = [asdict(step) | {"kl": step.kl if math.isfinite(step.kl) else None} for step in advised.steps]
    sensitivity = {**asdict(measured), "ratio": measured.ratio, "family": advised.family}
    return {"configuration": advised.arguments, "bound": bound, "sensitivity": sensitivity, "steps": steps}


def _check(budgets: list[float], policies: list[str], tiers: list[list[str]]) -> None:
    """Check arguments before a model is loaded; ValueError names one that no cache would accept."""
    from kvstrata.cache import TieredCache
    from kvstrata.cache.policy.budget import check_budget

    for budget in budgets:
        check_budget(budget, None)
    for policy in policies:
        TieredCache(1, 1, 64, budget=None, policy=policy)
    for names in tiers:
        TieredCache(1, 1, 64, budget=None, tiers=names)


def _tick(bar: Progress, task: Any, prompt: int, chunk: int, name: str, done: int) -> None:
    bar.update(task, description=name, advance=min(chunk, done - prompt))


def _loaded(model: str | None, where: torch.device, dtype: torch.dtype | None, say: Console) -> tuple[Any, Any]:
    """Model and tokenizer, checked to run over a `StrataCache`."""
    from . import model as models

    say.print(f"Loading {model or 'SmolLM2-135M'} ..")
    loaded, tokenizer = models.load(model, where, dtype)
    models.check_compressible(loaded)
    if hint := ui.numba_hint(where):
        say.print(hint, markup=False, soft_wrap=True)
    return loaded, tokenizer
