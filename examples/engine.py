"""A small engine: requests come and go, and every decode step of all of them is one replay of one graph.

    python examples/engine.py

The batch has a fixed number of places, the requests of the cache; an empty place is a request without tokens. The host
makes room for the tokens of a step (`TieredCache.advance`, which settles when the budget asks for it) and replays; the
graph writes K and V, attends over all tiers, and picks the next tokens (`kvstrata.hf.step`, to be rewritten for a model
of another kind). Two layers of every step, in turns, add the attention mass of their tokens to importance, by which the
cache settles. Empty places are padding: nothing is written.
"""

from __future__ import annotations

import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import kvstrata
from kvstrata.hf.step import decode_step


class Engine:
    """Greedy decoding of up to ``places`` requests at a time."""

    def __init__(self, model: LlamaForCausalLM, places: int, budget: float | None = 0.25, **options) -> None:
        config, self.model, self.places = model.config, model, places
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.cache = kvstrata.TieredCache(
            config.num_hidden_layers, kv_heads, config.head_dim, budget=budget, dtype=model.dtype, device=model.device,
            max_requests=places, rope=model.model.rotary_emb.inv_freq, **options,
        )  # fmt: skip
        self.free = [self.cache.add_request() for _ in range(places)]
        self.plan = kvstrata.DecodePlan(self.cache, heads, observe=0 if budget is None else 2)
        buffers = dict.fromkeys(("ids", "positions", "requests"), ((places,), torch.int32))
        self.runner = kvstrata.GraphRunner(
            self.step, buffers, sizes=[places], fill={"requests": -1}, device=model.device
        ).capture()
        self.last: dict[int, int] = {}  # the newest token of each request, which is not in the cache yet

    def step(self, ids: torch.Tensor, positions: torch.Tensor, requests: torch.Tensor) -> torch.Tensor:
        """The next token of every place; what the graph holds."""
        return decode_step(self.model, self.cache, self.plan, ids, positions, requests)

    def start(self, prompt: torch.Tensor) -> int:
        """A prompt ``[tokens]`` into a free place; its first new token is `last` of it."""
        done = self.model(prompt.unsqueeze(0), use_cache=True, logits_to_keep=1)
        request = self.free[-1]
        try:
            for number, layer in enumerate(done.past_key_values.layers):
                k, v = (x[0].transpose(0, 1) for x in (layer.keys, layer.values))
                self.cache.append(number, k, v, [request])
        except kvstrata.BudgetExceeded:
            self.cache.crop(request, 0)
            raise
        self.free.pop()
        self.last[request] = int(done.logits[0, -1].argmax())
        return request

    def decode(self) -> dict[int, int]:
        """One more token of every request."""
        ids, positions, requests = torch.zeros(3, self.places, dtype=torch.int32)
        requests.fill_(-1)
        for request, token in self.last.items():
            ids[request], positions[request], requests[request] = token, self.cache.length(request), request
        self.cache.advance(list(self.last))
        given = dict(ids=ids, positions=positions, requests=requests)
        tokens = self.runner(**{name: x.to(self.model.device) for name, x in given.items()}).tolist()
        self.last = {request: tokens[request] for request in self.last}
        return dict(self.last)

    def finish(self, request: int) -> None:
        self.cache.crop(request, 0)
        self.free.append(request)
        del self.last[request]


@torch.inference_mode()
def serve(engine: Engine, prompts: list[torch.Tensor], tokens: int) -> list[list[int]]:
    """So many new tokens for every prompt; those that find no place wait for one."""
    waiting, running = list(range(len(prompts))), {}
    outputs: list[list[int]] = [[] for _ in prompts]
    while waiting or running:
        while waiting and engine.free:
            number = waiting.pop(0)
            request = engine.start(prompts[number])
            running[request] = number
            outputs[number].append(engine.last[request])
        for request in [request for request, number in running.items() if len(outputs[number]) >= tokens]:
            engine.finish(request)
            del running[request]
        for request, token in engine.decode().items():
            outputs[running[request]].append(token)
    return outputs


def small_model(device: str, dtype: torch.dtype) -> LlamaForCausalLM:
    """Random weights: what it says means nothing, how it is served is the same."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        head_dim=64, vocab_size=512, initializer_range=0.3,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval().to(device, dtype)


def main(tokens: int) -> None:
    device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    engine = Engine(small_model(device, dtype), places=4, recent_tokens=32, page_tokens=16, max_tokens=2048)
    prompts = [torch.randint(0, 512, (length,), device=device) for length in (700, 90, 400, 15, 1000, 250)]
    outputs = serve(engine, prompts, tokens)
    for prompt, new in zip(prompts, outputs, strict=True):
        print(f"{len(prompt):5} tokens + {len(new)}: {' '.join(map(str, new[:8]))} ..")
    engine.cache.check()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 64)
