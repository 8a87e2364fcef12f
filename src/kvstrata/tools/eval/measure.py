"""Perplexity from decoding through a cache, and how far its predictions are from the exact ones.

    prompt tokens ──one forward──▶ the cache settles ──▶ chunk ──▶ chunk ──▶ ..      each chunk attends to the cache
                                                         as └─ predicts ─┘              it is, then is appended

A chunk of one token is decoding as in a server. Longer chunks see their own tokens exactly, as if up to a chunk
more tokens were recent, and are many times faster; with a chunk of `settle_every` tokens both settle alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch


class Predictions(NamedTuple):
    """Predictions of one chunk: log-probabilities in fp16 ``[rows, chunk, vocabulary]``, and the first choices
    ``[rows, chunk]``, which fp16 cannot always tell apart."""

    logprobs: torch.Tensor
    first: torch.Tensor

    @classmethod
    def of(cls, logprobs: torch.Tensor) -> Predictions:
        return cls(logprobs.half(), logprobs.argmax(-1))


Exact = list[Predictions]


@dataclass
class Scores:
    """Scores of one run: lists ``[row][chunk]`` of sums over the chunk's predictions."""

    nll: list[list[float]]
    kl: list[list[float]]
    agree: list[list[int]]
    count: list[int]  # number of predictions in each chunk


def spans(tokens: int, prompt: int, chunk: int) -> Iterator[tuple[int, int]]:
    """Start and end of the prompt, if any, and of each chunk."""
    start = 0
    if prompt:
        yield 0, prompt
        start = prompt
    while start < tokens:
        yield start, min(start + chunk, tokens)
        start += chunk


@torch.no_grad()
def decode(
    model: Any,
    ids: torch.Tensor,
    cache: Any,
    *,
    prompt: int = 0,
    chunk: int = 64,
    exact: Exact | None = None,
    keep: bool = False,
    after: Callable[[int], None] | None = None,
) -> tuple[Scores, Exact | None]:
    """Run ``ids [rows, tokens]`` through the model with a transformers cache; predictions after the prompt count.

    KL and agreement are relative to ``exact``; with ``keep`` this run's own predictions are returned. ``after`` is
    called with the number of tokens done.
    """
    rows, tokens = ids.shape
    if not 0 <= prompt < tokens:
        raise ValueError(f"prompt: expected 0 to {tokens - 1}, fewer than the text's tokens, got {prompt}")
    scores = Scores([[] for _ in range(rows)], [[] for _ in range(rows)], [[] for _ in range(rows)], [])
    kept: Exact = []
    edge: torch.Tensor | None = None
    index = 0
    for start, end in spans(tokens, prompt, chunk):
        only_last = bool(prompt) and start == 0
        logits = model(
            ids[:, start:end], past_key_values=cache, use_cache=True, logits_to_keep=1 if only_last else 0
        ).logits
        own = logits.float().log_softmax(-1)
        if only_last:
            edge = own
            continue
        # The first token of a chunk is predicted by the previous chunk.
        predictions = own[:, :-1] if edge is None else torch.cat([edge, own[:, :-1]], 1)
        edge = own[:, -1:]
        if not predictions.shape[1]:  # a first chunk of one token predicts nothing
            continue
        targets = ids[:, end - predictions.shape[1] : end]
        nll = -predictions.gather(-1, targets.unsqueeze(-1)).squeeze(-1).sum(-1)
        scores.count.append(targets.shape[1])
        if keep:
            if predictions.isnan().any():
                raise ValueError(f"model: expected finite logits, got NaN by token {end}; another --dtype may help")
            kept.append(Predictions.of(predictions))
        for row in range(rows):
            scores.nll[row].append(float(nll[row]))
            if exact is not None:
                truth = exact[index].logprobs[row].float().log_softmax(-1)  # fp16 does not sum to 1
                scores.kl[row].append(float((truth.exp() * (truth - predictions[row])).sum()))
                scores.agree[row].append(int((exact[index].first[row] == predictions[row].argmax(-1)).sum()))
        index += 1
        if after:
            after(end)
    return scores, kept if keep else None
