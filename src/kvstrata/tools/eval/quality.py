"""The quality table: every contender over the same texts, saved after each, so that a stopped run can continue."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from . import contenders, measure, needle
from .contenders import Contender
from .results import Needle, Quality, Row, plain
from .sizes import sizes_of


def run(
    model: Any,
    ids: torch.Tensor,
    wanted: Sequence[Contender],
    state: Quality,
    *,
    prompt: int,
    chunk: int,
    exact: measure.Exact | None = None,
    calibration: str = "",
    after: Callable[[], None] = lambda: None,
    tick: Callable[[str, int], None] = lambda name, tokens: None,
) -> measure.Exact | None:
    """Measure rows that are missing, of another revision or of another calibration; returns the exact predictions.

    ``calibration`` is the digest of the file that calibrated contenders use.

    ``after`` is called after each row, ``tick`` while it is measured.
    """
    rows, tokens = ids.shape
    if rows % len(state.texts):
        raise ValueError(f"ids: expected as many rows of each of {len(state.texts)} texts, got {rows}")
    setting = (tokens, prompt, chunk, rows // len(state.texts))
    exact_contender, full = contenders.exact(), sizes_of(model).full_bytes(rows, tokens)

    def add(contender: Contender, scores: measure.Scores, size: int, tiers: dict[str, int]) -> None:
        name, kind, budget, options = contender.name, contender.kind, contender.budget, plain(contender.options)
        sums = (scores.nll, scores.kl, scores.agree, scores.count)
        row = Row(name, kind, tokens, prompt, chunk, budget, options, size, full, *sums, tiers, setting[3])
        row.measured, row.calibration = state.provenance, calibration if contender.calibrated else ""
        state.keep(row)
        after()

    def is_missing(contender: Contender) -> bool:
        row = state.row(contender, setting)
        return row is None or not state.is_current(row, calibration if contender.calibrated else "")

    missing = [contender for contender in wanted if is_missing(contender)]
    if exact is None and (missing or is_missing(exact_contender)):
        scores, exact = measure.decode(
            model,
            ids,
            exact_contender.make(model.config, rows, tokens),
            prompt=prompt,
            chunk=chunk,
            keep=True,
            after=lambda n: tick(exact_contender.name, n),
        )
        if is_missing(exact_contender):
            add(exact_contender, scores, full, {})
    for contender in missing:
        try:
            cache = contender.make(model.config, rows, tokens)
            scores, _ = measure.decode(
                model,
                ids,
                cache,
                prompt=prompt,
                chunk=chunk,
                exact=exact,
                after=lambda n, c=contender: tick(c.name, n),  # type: ignore[misc]
            )
        except Exception as error:  # a peer's own bug is reported in the table
            if contender.kind != "peer":
                raise
            if state.row(contender, setting) is None:
                state.absent[contender.name] = f"{type(error).__name__}: {error}".splitlines()[0]
            continue
        tiers = cache.memory().tokens if hasattr(cache, "memory") else {}
        state.absent.pop(contender.name, None)
        add(contender, scores, contender.size(cache), tiers)
    return exact


def run_needles(
    model: Any,
    tokenizer: Any,
    haystack: str,
    wanted: Sequence[Contender],
    state: Quality,
    *,
    lengths: Sequence[int],
    depths: Sequence[float],
    asked: int,
    calibration: str = "",
    after: Callable[[], None] = lambda: None,
    tick: Callable[[str, int], None] = lambda name, tokens: None,
) -> None:
    """Measure the needles of every contender, length and depth that are missing, or of another revision, calibration
    or options."""
    for contender in [contenders.exact(), *wanted]:
        options, digest = plain(contender.options), calibration if contender.calibrated else ""
        for tokens in lengths:
            for depth in depths:
                key = (contender.name, contender.budget, tokens, depth)
                old = [n for n in state.needles if (n.name, n.budget, n.tokens, n.depth) == key]
                if any(state.is_current(n, digest) and n.options == options for n in old):
                    continue
                hits, logprob = 0, 0.0
                for seed in range(asked):
                    task = needle.task(tokenizer, haystack, tokens, depth, seed)
                    cache = contender.make(model.config, 1, tokens + 64)
                    hit, answer_logprob = needle.ask(model, task, cache)
                    hits, logprob = hits + hit, logprob + answer_logprob / asked
                found = (contender.name, contender.kind, contender.budget, tokens, depth, hits, asked, logprob)
                state.needles = [n for n in state.needles if n not in old]
                state.needles.append(Needle(*found, state.provenance, options, digest))
                tick(contender.name, tokens)
                after()
