"""The commands `eval`, `advise`, `calibrate` and `drift`. Heavy imports wait until a command runs."""

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
NEEDLE_ROOM = 64  # tokens for the answer to a needle


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
        typer.Option(help="Compare tiers with single formats of this mean width of codes, in bits; repeatable."),
    ] = None,
    packed: Annotated[
        list[str] | None,
        typer.Option(
            help="Compare packed pages of this format, with a 16-bit tail, with tiers of the same bytes. Use --chunk 64"
            " (a page): pages then give the figures of decoding token by token."
        ),
    ] = None,
    calibration: Annotated[
        Path | None, typer.Option(help="File of kvstrata calibrate: also run with it; --packed only with it.")
    ] = None,
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
    device: ui.DeviceOption = ui.Device.auto,
    dtype: ui.DtypeOption = None,
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
    results: ui.ResultsOption = Path("results"),
    revision: ui.RevisionOption = None,
    as_json: ui.JsonOption = False,
) -> None:
    """Measure the quality of a compressed cache, and of its peers at the same bytes.

    The first half of each stretch of text is a prompt, the rest is decoded through the cache: perplexity, KL and top-1
    agreement with 16 bit, and needles in a haystack. A run that was stopped continues where it was; rows of another
    revision are measured again.

    Example: kvstrata eval --quick

    Example: kvstrata eval --model ./my-model --text notes.txt --budget 0.25 --budget 0.2 --tokens 4096

    Example: kvstrata eval --model model.gguf --text tempfile --budget 0.25 --tokens 1024 --settle-every 16

    Example: kvstrata eval --bits 2.5 --bits 3 --tokens 1024 --chunk 64 --stretches 8

    Example: kvstrata eval --packed K4V4 --calibration calibration.safetensors --tokens 1024 --chunk 64
    """
    ui.require(LIBRARIES, "hf", "this")
    from kvstrata.tools.bench.machine import describe

    from . import arguments, contenders, plot, quality, render, sizes, texts
    from . import model as models
    from . import results as saved
    from .packed import at_bytes, by_weights, check_packed

    console = ui.console(as_json)
    chosen = text or list(texts.DEFAULT[:1] if quick else texts.DEFAULT)
    budgets = budget or ([0.5, 0.25, 0.2] if quick else [0.5, 0.35, 0.25, 0.2])
    lengths = tokens or ([1024] if quick else [1024, 4096])
    needle_lengths = [512] if quick else [1024, 2048]
    chunk = chunk or (64 if quick else 32)
    with ui.usage_errors():
        if not save:
            ui.check_out(out)
        torch_device = ui.device_of(device)
        machine = describe(torch_device, revision)
        path = results / machine["slug"] / "quality.json" if save else out
        lists = [entry.split(",") for entry in tiers or []]
        arguments.check_cache(budgets, policy or [], lists)
        for name in packed or []:
            check_packed(name)
        calibrated, file_digest = arguments.load_calibration(calibration)
        widths = [contender for width in bits or [] for contender in contenders.at_bits(width, peers, calibrated)]
        corpus = texts.load(chosen)
        state = saved.load(path) if path.exists() else None
        net, tokenizer = arguments.load_model(model, torch_device, ui.dtype_of(dtype), console, calibrated)
        if max_tokens is not None and max_tokens < max(lengths):
            raise ValueError(f"--max-tokens: expected at least the {max(lengths)} of --tokens, got {max_tokens}")
        lengths = arguments.lengths_of(net, lengths, given=bool(tokens), console=console)
        needle_lengths = [n for n in needle_lengths if models.fits(net, n + NEEDLE_ROOM)]
        shape = sizes.sizes_of(net)
        weights = by_weights(net, shape) if packed else []
        if widths and shape.tiers is None:
            raise ValueError("--bits: expected a model with full attention, got one with sliding windows only")
        pages = contenders.small_pages(settle_every) | ({} if max_tokens is None else {"max_tokens": max_tokens})
        if not (widths or packed):
            budgets = arguments.budgets_of(net, budgets, lists, pages, given=bool(budget), console=console)
    digests = {"model": models.digest(net)} | {f"text {key}": texts.digest(content) for key, content in corpus.items()}
    name = models.name_of(model) + (f" in {dtype}" if dtype else "")
    if state is None or (state.model, state.texts) != (name, list(corpus)):
        if state is not None:
            ui.usage_error(
                f"--out: expected a new file, or results of {name} on {', '.join(corpus)},"
                f" {path} has those of {state.model} on {', '.join(state.texts)}"
            )
        state = saved.Quality(machine, name, list(corpus))
    if changed := [key for key, value in digests.items() if state.digests.get(key, value) != value]:
        ui.usage_error(f"--out: expected a new file, or results of the same {changed[0]}, {path} has those of another")
    state.machine, state.digests = machine, digests
    if peers and not (widths or packed):
        state.note_absent(contenders.absent(shape))
    with ui.progress_bars(console) as bar:
        for length in lengths:
            with ui.usage_errors():
                ids = models.encode(tokenizer, corpus, length, stretches).to(torch_device)
                at_equal_bytes = [
                    x for name in packed or [] for x in at_bytes(name, shape, length, weights, calibrated)
                ]
            wanted = [*widths, *at_equal_bytes] or contenders.at_budgets(
                shape, budgets, policy or ["importance"], lists, length, peers, pages, calibrated
            )
            prompt = 0 if widths or at_equal_bytes else length // 2  # a width holds at every length
            task = bar.add_task(f"{length} tokens", total=(len(wanted) + 1) * (length - prompt))
            with ui.usage_errors():
                quality.run(
                    net,
                    ids,
                    wanted,
                    state,
                    prompt=prompt,
                    chunk=chunk,
                    calibration=file_digest,
                    after=lambda: saved.save(state, path),
                    tick=partial(_tick, bar, task, prompt, chunk),
                )
            bar.update(task, completed=(len(wanted) + 1) * (length - prompt))
        if needles and not (widths or packed):
            depths = [0.5] if quick else [0.1, 0.5, 0.9]
            if max_tokens is not None:
                pages["max_tokens"] = max(max_tokens, *(n + NEEDLE_ROOM for n in needle_lengths))
            ours = [
                one
                for b in budgets
                for one in contenders.at_budget(b, policy or ["importance"], lists, pages, calibrated)
            ]
            total = (len(ours) + 1) * len(needle_lengths) * len(depths)
            task = bar.add_task("needles", total=total)
            with ui.usage_errors():
                quality.run_needles(
                    net,
                    tokenizer,
                    next(iter(corpus.values())),
                    ours,
                    state,
                    lengths=needle_lengths,
                    depths=depths,
                    asked=2 if quick else 4,
                    calibration=file_digest,
                    after=lambda: saved.save(state, path),
                    tick=lambda name, n: bar.advance(task),
                )
            bar.update(task, completed=total)
    saved.save(state, path)
    if as_json:
        sys.stdout.write(saved.dumps(state))
    console.print(render.table(state, {}).terminal())
    if state.needles:
        console.print(render.table(state, {"table": "needles"}).terminal())
    console.print(f"Saved: {path}")
    if importlib.util.find_spec("matplotlib") is None:
        console.print("No plot: it needs matplotlib, pip install 'kvstrata[bench]'")
    else:
        console.print(f"Plot: {plot.plot(state, path.with_suffix('.png'))}")


def advise(
    model: Model = None,
    text: Texts = None,
    kl: Annotated[float, typer.Option("--kl", help="Upper bound of the mean KL from 16 bit, in nats.")] = 0.02,
    tokens: Annotated[
        int | None, typer.Option(min=4, help="Length of the text: 2048, or the model's context if that is shorter.")
    ] = None,
    chunk: Chunk = 64,
    calibration: Annotated[
        Path | None, typer.Option(help="File of kvstrata calibrate; the configuration then refers to it.")
    ] = None,
    device: ui.DeviceOption = ui.Device.auto,
    dtype: ui.DtypeOption = None,
    out: Annotated[Path, typer.Option(help="The configuration to write.")] = Path("kvstrata.json"),
    as_json: ui.JsonOption = False,
) -> None:
    """Find the formats and the smallest budget that preserve the predictions of your model on your text.

    Measures how much each layer suffers from codes in K and in V, selects the tiers accordingly, then searches for the
    smallest budget from 0.15 to 0.6 with a KL below the bound, in five bisections. The file holds the arguments of a
    cache: StrataCache.from_file(config, file).

    Example: kvstrata advise --text notes.txt --kl 0.02

    Example: kvstrata advise --model ./my-model --text notes.txt --calibration calibration.safetensors --json
    """
    ui.require(LIBRARIES, "hf", "this")
    from . import advise as advice
    from . import arguments, contenders, sensitivity, texts
    from . import model as models

    if not kl > 0:
        ui.usage_error(f"--kl: expected a positive number of nats, got {kl:g}")
    pages = contenders.small_pages(room=16)
    kept = pages["recent_tokens"] + pages["sink_tokens"] + pages["settle_every"]
    if tokens is not None and tokens // 2 <= kept:
        ui.usage_error(
            f"--tokens: expected at least {2 * kept + 2}, half of them a prompt longer than the {kept} tokens that a"
            f" cache keeps at 16 bit, got {tokens}"
        )
    console = ui.console(as_json)
    with ui.usage_errors():
        ui.check_out(out)
        torch_device, torch_dtype = ui.device_of(device), ui.dtype_of(dtype)
        corpus = texts.load(text or list(texts.DEFAULT[:1]))
        by_file = {} if calibration is None else {"calibration": str(calibration.absolute())}
        calibrated, _ = arguments.load_calibration(calibration)
        net, tokenizer = arguments.load_model(model, torch_device, torch_dtype, console, calibrated)
        (tokens,) = arguments.lengths_of(net, [tokens or 2048], tokens is not None, console)
        ids = models.encode(tokenizer, corpus, tokens).to(torch_device)
    with ui.progress_bars(console) as bar, ui.usage_errors():
        layers = net.config.get_text_config(decoder=True).num_hidden_layers
        task = bar.add_task("sensitivity", total=2 * layers)
        measured = sensitivity.measure_sensitivity(
            net, ids[:, : min(tokens, 256)], calibrated, tick=lambda name, done: bar.update(task, completed=done)
        )
        task = bar.add_task("budget", total=6)
        advised = advice.advise(
            net,
            ids,
            measured,
            kl,
            prompt=tokens // 2,
            chunk=chunk,
            tick=lambda step: bar.advance(task),
            **pages | by_file,
        )
    if as_json:
        typer.echo(json.dumps(_advised(advised, measured, kl), indent=1))
    worst = sorted(range(len(measured.k)), key=lambda i: -measured.k[i] - measured.v[i])[:5]
    console.print(f"K costs {measured.ratio:.1f} times as much as V at {measured.bits} bits: {advised.family}.")
    for place in worst:
        console.print(f"  layer {place}: KL {measured.k[place]:.4f} by K, {measured.v[place]:.4f} by V")
    for step in advised.steps:
        mark = "kept" if step.fits else "not kept"
        if step.holds_from:
            mark += f": the text is too short, the budget holds from {step.holds_from:,} tokens on"
        console.print(f"  budget {step.budget:g}: {step.fraction:.3f} of 16 bit, KL {step.kl:.4f}, {mark}")
    if advised.arguments is None and advised.steps[0].holds_from:
        ui.usage_error(
            f"--tokens: expected at least {advised.steps[0].holds_from}, from where on the largest budget tried holds,"
            f" {advised.steps[0].budget}, got {tokens}"
        )
    if advised.arguments is None:
        ui.usage_error(
            f"--kl: expected a bound that some budget keeps, got {kl}; the largest tried is {advised.steps[0].budget}"
        )
    with ui.usage_errors():
        advice.write(advised, out)
    console.print(f"Written: {out} (StrataCache.from_file(model.config, {str(out)!r}))")


def calibrate(
    model: Model = None,
    text: Texts = None,
    tokens: Annotated[
        int | None, typer.Option(min=16, help="Tokens of each text: 512, or the model's context if that is shorter.")
    ] = None,
    sensitivity: Annotated[
        bool,
        typer.Option(
            help="Also measure what rounding K or V of each layer of full attention costs, over the first 256 tokens of"
            " the first text: two forwards per layer."
        ),
    ] = False,
    only_sensitivity: Annotated[
        bool,
        typer.Option(
            "--only-sensitivity",
            help="Like --sensitivity, and leave out balance, centres and mean queries: a StrataCache with a budget"
            " estimates them from each prompt, which is more precise than another text.",
        ),
    ] = False,
    device: ui.DeviceOption = ui.Device.auto,
    dtype: ui.DtypeOption = None,
    out: Annotated[Path, typer.Option(help="The file to write.")] = Path("calibration.safetensors"),
    as_json: ui.JsonOption = False,
) -> None:
    """Compute the balance and the centres of a model's K, for StrataCache, vLLM and packed_batching.

    Runs one forward over some text. The file is the argument calibration= of StrataCache (with a budget or format=) and
    packed_batching, and the option calibration of the vLLM plug-in. A cache with it does not estimate balance and
    centres from each prompt or the weights: a token's codes then depend only on its own row and the tiers it has passed
    through, not on the rest of the request or batch. With --only-sensitivity it does, and the file has no
    effect elsewhere than on a StrataCache with a budget.

    Example: kvstrata calibrate --text notes.txt --out calibration.safetensors

    Example: kvstrata calibrate --model ./model.gguf --text notes.txt --sensitivity

    Example: kvstrata calibrate --text notes.txt --only-sensitivity --out layers.safetensors
    """
    ui.require(LIBRARIES, "hf", "this")
    from dataclasses import replace

    from kvstrata.hf.calibrate import calibrate as calibrate_model

    from . import arguments, texts
    from . import model as models
    from . import sensitivity as sides

    console = ui.console(as_json)
    with ui.usage_errors():
        ui.check_out(out)
        torch_device = ui.device_of(device)
        corpus = texts.load(text or list(texts.DEFAULT[:1]))
        net, tokenizer = arguments.load_model(model, torch_device, ui.dtype_of(dtype), console)
        (tokens,) = arguments.lengths_of(net, [tokens or 512], tokens is not None, console)
        ids = models.encode(tokenizer, corpus, tokens).to(torch_device)
    name = models.name_of(model)
    with ui.progress_bars(console) as bar, ui.usage_errors():
        task = bar.add_task("balance and centres", total=1)
        calibration = calibrate_model(net, ids, Path(name).name)
        bar.update(task, completed=1)
        if only_sensitivity and not calibration.layers:
            raise ValueError("--only-sensitivity: expected a model with layers of full attention, got one without")
        if sensitivity and not calibration.layers:
            console.print("No sensitivities: only layers of full attention are measured, and this model has none.")
        elif sensitivity or only_sensitivity:
            task = bar.add_task("sensitivity", total=2 * len(calibration.layers))
            measured = sides.measure_sensitivity(
                net, ids[:1, :256], calibration, tick=lambda name, done: bar.update(task, completed=done)
            )
            if len(measured.compressed) == len(calibration.layers):
                k, v = ([side[i] for i in measured.compressed] for side in (measured.k, measured.v))
                calibration = replace(calibration, k_sensitivity=k, v_sensitivity=v, bits=measured.bits)
                if only_sensitivity:
                    calibration = calibration.only_sensitivity()
            elif only_sensitivity:
                raise ValueError("--only-sensitivity: expected K and V of one shape in all layers, got others")
            else:
                console.print("No sensitivities: layers have K and V of different shapes, and some are not compressed.")
        calibration.save(out)
    balances = {number: layer.balance for number, layer in enumerate(calibration.of_model(len(calibration.kinds)))}
    spread = {number: float(x.amax() / x.amin()) for number, x in balances.items() if x is not None}
    if as_json:
        layers = [{"layer": number, "balance": x} for number, x in spread.items()]
        typer.echo(json.dumps({"out": str(out), "model": name, "layers": layers}, indent=1))
    for layer in sorted(spread, key=lambda number: -spread[number])[:4]:
        console.print(f"  layer {layer}: the balance spans a factor of {spread[layer]:g}")
    console.print(f"Written: {out} (StrataCache(model.config, calibration={str(out)!r}))")


def drift(
    steps: Annotated[int, typer.Option(min=160, help="Tokens decoded, with one query each.")] = 10_000,
    budget: Annotated[float, typer.Option(help="Fraction of 16 bit.")] = 0.3,
    policy: Annotated[
        list[str] | None,
        typer.Option(help="mean and ema (importance), recency, uniform; mean, ema and uniform by default."),
    ] = None,
    out: Annotated[Path, typer.Option(help="JSON to write.")] = Path("drift.json"),
    save: Annotated[bool, typer.Option("--save", help="Write RESULTS/<machine>/drift.json instead.")] = False,
    results: ui.ResultsOption = Path("results"),
    revision: ui.RevisionOption = None,
    as_json: ui.JsonOption = False,
) -> None:
    """Decode a long synthetic text with shifting attention, and compare the error of its quarters.

    Tokens are never promoted, so a token that is demoted now and attended to later stays demoted. The error relative to
    exact attention, the bytes and the shares of tiers show whether that adds up. Needs no model.

    Example: kvstrata drift --steps 2000

    Example: kvstrata drift --budget 0.25 --policy mean --policy uniform
    """
    from kvstrata.tools.bench.machine import describe

    from . import drift as runs

    console = ui.console(as_json)
    state = runs.Drift(describe("cpu", revision))
    path = results / state.machine["slug"] / "drift.json" if save else out
    with ui.usage_errors():
        wanted = [runs.Setting(steps=steps, budget=budget, **runs.choice(name)) for name in policy or runs.DEFAULT]
        for setting in wanted:
            runs.make_cache(setting)
    with ui.progress_bars(console) as bar:
        for setting in wanted:
            task = bar.add_task(f"{setting.policy}, {setting.importance}", total=steps)
            state.rows.append(runs.run(setting, lambda step, task=task: bar.update(task, completed=step + 1)))  # type: ignore[misc]
    runs.save(state, path)
    if as_json:
        sys.stdout.write(runs.dumps(state))
    console.print(runs.table(state).terminal())
    console.print(f"Saved: {path}")
    if not all(row.within for row in state.rows):
        ui.usage_error("the budget did not hold at every step")


def _advised(advised: Advice, measured: Sensitivity, bound: float) -> dict[str, Any]:
    """Advice as plain data: ``configuration`` is the content of the file; a budget too small has no KL."""
    steps = [asdict(step) | {"kl": step.kl if math.isfinite(step.kl) else None} for step in advised.steps]
    sensitivity = {**asdict(measured), "ratio": measured.ratio, "family": advised.family}
    return {"configuration": advised.arguments, "bound": bound, "sensitivity": sensitivity, "steps": steps}


def _tick(bar: Progress, task: Any, prompt: int, chunk: int, name: str, done: int) -> None:
    bar.update(task, description=name, advance=min(chunk, done - prompt))
