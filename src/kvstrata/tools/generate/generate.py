"""`kvstrata generate`: a real model's text over a compressed cache, and its cost compared with the 16-bit one."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.table import Table
from transformers import DynamicCache, TextStreamer

from kvstrata.cache.policy.budget import Memory
from kvstrata.hf.cache import StrataCache
from kvstrata.tools.eval.contenders import full_bytes, reported_bytes

SEGMENT = 8  # tokens that a text is continued by before the next one continues
OnText = Callable[[str], None]  # gets the text, part by part
OnToken = Callable[[Sequence[float]], None]  # receives the times of all tokens so far, at every token
WARM_TOKENS = 256  # tokens of the warm-up prompt: enough to settle with the default recent_tokens


@dataclass(frozen=True)
class Run:
    """One generated text, with the seconds to the first token and those of all later tokens."""

    name: str
    prompt: int
    tokens: list[int]
    first: float
    rest: float
    cache: StrataCache | None  # None: 16 bit

    @property
    def speed(self) -> float | None:
        """Decoded tokens per second; None for a text of one token."""
        return (len(self.tokens) - 1) / self.rest if len(self.tokens) > 1 else None


class _Clock(TextStreamer):
    """Streamer that forwards text and records the time of each token across the segments of a text."""

    def __init__(self, tokenizer: Any, on_text: OnText | None = None, on_token: OnToken | None = None) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.on_text, self.on_token = on_text, on_token
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        if not self.next_tokens_are_prompt:
            self.times.append(time.perf_counter())
            if self.on_token:
                self.on_token(self.times)
        super().put(value)

    def end(self) -> None:
        """Called by generate at the end of a segment; `finish` ends the text."""
        self.next_tokens_are_prompt = True

    def finish(self) -> None:
        super().end()

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        if self.on_text:
            self.on_text(text + ("\n" if stream_end else ""))


class _Writer:
    """Greedy generation over one cache, segment by segment; only its own segments are timed."""

    def __init__(self, model: Any, ids: torch.Tensor, cache: StrataCache | None, clock: _Clock) -> None:
        self.model, self.cache, self.clock = model, cache, clock
        self.kv_cache = DynamicCache(config=model.config) if cache is None else cache
        self.ids, self.prompt = ids.to(model.device), ids.shape[1]
        self.first = self.rest = 0.0
        stop_ids = model.generation_config.eos_token_id
        self.stop_ids = set(stop_ids if isinstance(stop_ids, list) else [stop_ids])
        self.done = False

    def write(self, new: int) -> None:
        """Generate up to ``new`` more tokens."""
        written = len(self.clock.times)
        start = time.perf_counter()
        self.ids = self.model.generate(
            self.ids,
            attention_mask=torch.ones_like(self.ids),
            past_key_values=self.kv_cache,
            max_new_tokens=new,
            do_sample=False,
            streamer=self.clock,
        )
        times = self.clock.times[written:]
        if not written:
            self.first = times[0] - start
            start = times[0]
        self.rest += times[-1] - start
        self.done = int(self.ids[0, -1]) in self.stop_ids

    def finish(self) -> Run:
        self.clock.finish()
        name = "16 bit"
        if self.cache is not None:
            options = self.cache.options
            name = f"{options['budget_bytes']:,} bytes" if "budget_bytes" in options else f"budget {options['budget']}"
        return Run(name, self.prompt, self.ids[0, self.prompt :].tolist(), self.first, self.rest, self.cache)


def encode(tokenizer: Any, prompt: str, raw: bool) -> torch.Tensor:
    """Token ids ``[1, n]``: as a user's message if the model has a chat template, else as it is."""
    if not raw and tokenizer.chat_template:
        messages = [{"role": "user", "content": prompt}]
        prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return tokenizer(prompt, return_tensors="pt", add_special_tokens=False).input_ids
    return tokenizer(prompt, return_tensors="pt").input_ids


def run(
    model: Any,
    tokenizer: Any,
    ids: torch.Tensor,
    new: int,
    caches: Sequence[StrataCache | None],
    on_text: OnText | None = None,
    on_token: OnToken | None = None,
) -> list[Run]:
    """Greedy texts after ``ids``, one over each cache (None: 16 bit), the first streamed to ``say``.

    ``tick`` gets the times of its tokens so far, at every token.

    Several texts alternate, a few tokens at a time, so that other load on the machine slows all of them equally.
    """
    clocks = [_Clock(tokenizer, on_text, on_token), *(_Clock(tokenizer) for _ in caches[1:])]
    writers = [_Writer(model, ids, cache, clock) for cache, clock in zip(caches, clocks, strict=True)]
    segment = SEGMENT if len(writers) > 1 else new
    for begin in range(0, new, segment):
        for writer in writers:
            if not writer.done:
                writer.write(min(segment, new - begin))
    return [writer.finish() for writer in writers]


def warm_up(model: Any, tokenizer: Any, ids: torch.Tensor, caches: Sequence[StrataCache | None]) -> bool:
    """Generate a short text over each cache, then empty it: touches memory and compiles numba loops that are not yet
    compiled on this machine. Returns whether any was compiled."""
    before = _compilations()
    run(model, tokenizer, ids[:, :WARM_TOKENS], 2, caches)
    for cache in caches:
        if cache is not None:
            if cache.memory().tokens:  # none in tiers, if all layers have windows
                cache.tiered.gather(0)  # reads codes, as settling will
            cache.reset()
    return _compilations() > before


def _compilations() -> int:
    """Number of loops compiled so far that numba's disk cache did not have."""
    return sum(
        sum(loop.stats.cache_misses.values())
        for name, module in list(sys.modules.items())
        if name.startswith("kvstrata.") and "numba" in name
        for loop in vars(module).values()
        if hasattr(loop, "stats")
    )


def first_difference(ours: list[int], theirs: list[int]) -> int | None:
    """Index of the first token that differs, or None."""
    common = min(len(ours), len(theirs))
    differ = (i for i in range(common) if ours[i] != theirs[i])
    return next(differ, None if len(ours) == len(theirs) else common)


def table(ours: Run, plain: Run | None, tokenizer: Any) -> Table:
    """Table of the measurements and of the first difference between the texts; float32 counts as 16 bit."""
    assert ours.cache is not None
    memory, sizes = ours.cache.memory(), (reported_bytes(ours.cache), full_bytes(ours.cache))
    runs = [run for run in (ours, plain) if run]
    result = Table("", *(run.name for run in runs))
    result.add_row("prompt + new tokens", *(f"{run.prompt} + {len(run.tokens)}" for run in runs))
    result.add_row("to the first token", *(f"{run.first:.2f} s" for run in runs))
    result.add_row("decode", *("-" if run.speed is None else f"{run.speed:.2f} tokens/s" for run in runs))
    result.add_row("decode steps", *(_steps(run) for run in runs))
    result.add_row("cache", *(f"{size / 1e6:.2f} MB" for size in sizes[: len(runs)]))
    result.add_row("of 16 bit", *(f"{share:.3f}" for share in (sizes[0] / sizes[1], 1.0)[: len(runs)]))
    tiers = ", ".join(f"{name} {share:.0%}" for name, share in _tiers(memory).items())
    result.add_row("tokens by tier", tiers or "-", *["all at 16 bit"] * bool(plain))
    if ours.cache.plain_layers:
        result.add_row("layers not compressed", f"{len(ours.cache.plain_layers)} of {len(ours.cache.layers)}")
    if plain:
        index = first_difference(ours.tokens, plain.tokens)
        if index:
            result.add_row("the same up to", repr(tokenizer.decode(ours.tokens[max(index - 8, 0) : index])))
        words = ("the same text", "") if index is None else (_token_text(run.tokens, index, tokenizer) for run in runs)
        result.add_row("first difference", *words)
    return result


def _steps(run: Run) -> str:
    return "eager" if run.cache is None else run.cache.decoding


def facts(ours: Run, plain: Run | None, tokenizer: Any) -> dict[str, Any]:
    """Measurements as plain data. ``tiers``: share of the tokens in each; ``compare``: None without ``plain``."""
    assert ours.cache is not None
    memory, size, full = ours.cache.memory(), reported_bytes(ours.cache), full_bytes(ours.cache)

    def facts_of(run: Run) -> dict[str, Any]:
        text = tokenizer.decode(run.tokens, skip_special_tokens=True)
        seconds = {"first_token_s": run.first, "tokens_per_s": run.speed}
        return {"text": text, "prompt_tokens": run.prompt, "new_tokens": len(run.tokens), **seconds}

    result = {
        "budget": ours.cache.options.get("budget"),
        "budget_bytes": ours.cache.options.get("budget_bytes"),
        **facts_of(ours),
        "cache_bytes": size,
        "full_bytes": full,
        "fraction": size / full,
        "decoding": _steps(ours),
        "tiers": _tiers(memory),
        "plain_layers": sorted(ours.cache.plain_layers),
        "note": floor_note(ours),
        "compare": None,
    }
    if plain:
        index = first_difference(ours.tokens, plain.tokens)
        result["compare"] = facts_of(plain) | {"first_difference": None if index is None else index + 1}
    return result


def _tiers(memory: Memory) -> dict[str, float]:
    """Share of the tokens in each non-empty tier."""
    total = sum(memory.tokens.values())
    return {name: count / total for name, count in memory.tokens.items() if count}


def floor_note(run: Run) -> str | None:
    """Explanation of why a short text exceeds its budget; None if it does not."""
    assert run.cache is not None
    memory = run.cache.memory()
    if not memory.tokens:
        return None
    budget, floor = run.cache.tiered.budget.amount, run.cache.tiered.budget.floor_tokens
    if not isinstance(budget, float) or memory.fraction <= budget or run.cache.tiered.length(0) >= floor:
        return None
    return (
        f"A short text: the budget of {budget:g} holds from {floor:,} tokens on. Before that recent 16-bit tokens,"
        " whole pages and tables weigh more; --context FILE makes the text longer."
    )


def _token_text(tokens: list[int], index: int, tokenizer: Any) -> str:
    return f"token {index + 1}: {tokenizer.decode(tokens[index : index + 6])!r}"
