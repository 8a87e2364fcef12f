"""A needle in a haystack: one odd sentence somewhere in a long text, and a question about it at the end.

A needle counts as found if every token of the answer is the model's first choice, given the tokens before it. A needle
that a small model does not find at 16 bit says nothing about a cache, so tables include the exact cache, and the
log-probability of the answer, which reacts before the count does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

NEEDLE = "\n\nNote: the access code of the {place} archive is {code}.\n\n"
QUESTION = "\n\nNote again: the access code of the {place} archive is"
PLACES = ("Oslo", "Lima", "Cairo", "Quito", "Hanoi", "Turin", "Perth", "Dakar")


@dataclass(frozen=True)
class Task:
    """Token ids of a haystack with its question ``[tokens]``, and of the answer."""

    ids: torch.Tensor
    answer: torch.Tensor
    tokens: int
    depth: float


def task(tokenizer: Any, haystack: str, tokens: int, depth: float, seed: int) -> Task:
    """Haystack of about ``tokens`` tokens with the needle at ``depth`` (0: start, 1: end)."""
    if not 0 <= depth <= 1:
        raise ValueError(f"depth: expected 0 to 1, got {depth!r}")
    generator = torch.Generator().manual_seed(seed)
    code = str(int(torch.randint(1000, 10_000, (), generator=generator)))
    place = PLACES[seed % len(PLACES)]

    def encode(text: str) -> torch.Tensor:
        return tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids[0]

    needle, question = encode(NEEDLE.format(place=place, code=code)), encode(QUESTION.format(place=place))
    answer = encode(QUESTION.format(place=place) + f" {code}")[len(question) :]
    hay = encode(haystack[: 40 * tokens])[: tokens - len(needle) - len(question)]
    index = int(depth * len(hay))
    return Task(torch.cat([hay[:index], needle, hay[index:], question]), answer, tokens, depth)


@torch.no_grad()
def ask(model: Any, given: Task, cache: Any, chunk: int = 64) -> tuple[bool, float]:
    """Ask for the needle: returns whether the answer was correct, and its log-probability.

    All but the last ``chunk`` tokens are a prompt; the question and the answer are decoded through the cache.
    """
    ids, answer = given.ids.unsqueeze(0).to(model.device), given.answer.to(model.device)
    prompt = max(ids.shape[1] - chunk, 1)
    model(ids[:, :prompt], past_key_values=cache, use_cache=True, logits_to_keep=1)
    rest = torch.cat([ids[:, prompt:], answer.unsqueeze(0)], 1)
    logits = model(rest, past_key_values=cache, use_cache=True).logits[0, -len(answer) - 1 : -1]
    logprobs = logits.float().log_softmax(-1)
    hit = bool((logprobs.argmax(-1) == answer).all())
    return hit, float(logprobs.gather(-1, answer.unsqueeze(-1)).sum())
