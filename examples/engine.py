"""A small engine: requests come and go, and every decode step of all of them is one replay of one graph.

    python examples/engine.py

The batch has a fixed number of places, the requests of the cache; an empty place is a request without tokens. The host
makes room for the tokens of a step (`TieredCache.advance`, which settles when the budget asks for it) and replays; the
graph writes K and V, attends over all tiers, and picks the next tokens (`kvstrata.hf.step`, to be rewritten for a model
of another kind). Two layers of every step, in turns, add the attention mass of their tokens to importance, by which the
cache settles. Empty places are padding: nothing is written.

The host runs one step ahead of the device: a step takes the tokens of the step before where they are, in device memory,
and the host reads them while the next step runs. So what `advance` takes on the host costs no time.
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
        kvstrata.warmup(self.cache, heads)
        self.free = [self.cache.add_request() for _ in range(places)]
        self.plan = kvstrata.DecodePlan(self.cache, heads, observe=0 if budget is None else 2)
        buffers = dict.fromkeys(("ids", "positions", "requests"), ((places,), torch.int32))
        self.runner = kvstrata.GraphRunner(
            self.step, buffers, sizes=[places], fill={"requests": -1}, device=model.device
        ).capture()
        self.tokens = torch.zeros(places, dtype=torch.int32, device=model.device)  # the newest of each request
        self.running: set[int] = set()
        self.queued: tuple[list[int], torch.Tensor, torch.cuda.Event | None] | None = None  # a step not read yet

    def step(self, ids: torch.Tensor, positions: torch.Tensor, requests: torch.Tensor) -> torch.Tensor:
        """The next token of every place; what the graph holds."""
        return decode_step(self.model, self.cache, self.plan, ids, positions, requests)

    def start(self, prompt: torch.Tensor) -> tuple[int, int]:
        """A prompt ``[tokens]`` into a free place; returns it and the first new token."""
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
        self.running.add(request)
        self.tokens[request] = done.logits[0, -1].argmax()
        return request, int(self.tokens[request])

    def decode(self) -> dict[int, int]:
        """Queue one more token of every request; returns those of the step before."""
        if not self.running:
            return self.read()
        requests, positions = torch.full((2, self.places), -1, dtype=torch.int32)
        for request in self.running:
            requests[request], positions[request] = request, self.cache.length(request)
        self.cache.advance(sorted(self.running))
        given = dict(positions=positions, requests=requests)
        on_device = {name: x.to(self.model.device, non_blocking=True) for name, x in given.items()}
        self.tokens.copy_(self.runner(ids=self.tokens, **on_device))
        before = self.read()
        host, event = torch.empty(self.places, dtype=torch.int32, pin_memory=self.tokens.is_cuda), None
        host.copy_(self.tokens, non_blocking=True)
        if self.tokens.is_cuda:
            event = torch.cuda.Event()
            event.record()
        self.queued = (sorted(self.running), host, event)
        return before

    def read(self) -> dict[int, int]:
        """The tokens of the step that was queued last; waits for it."""
        if self.queued is None:
            return {}
        (requests, host, event), self.queued = self.queued, None
        if event is not None:
            event.synchronize()
        return {request: int(host[request]) for request in requests}

    def finish(self, request: int) -> None:
        self.cache.crop(request, 0)
        self.running.remove(request)
        self.free.append(request)


@torch.inference_mode()
def serve(engine: Engine, prompts: list[torch.Tensor], tokens: int) -> list[list[int]]:
    """So many new tokens for every prompt; those that find no place wait for one."""
    waiting, running = list(range(len(prompts))), {}
    outputs: list[list[int]] = [[] for _ in prompts]
    queued = [0] * len(prompts)  # tokens requested
    while waiting or running:
        while waiting and engine.free:
            number = waiting.pop(0)
            request, first = engine.start(prompts[number])
            running[request] = number
            outputs[number].append(first)
            queued[number] = 1
        for request in engine.running:
            queued[running[request]] += 1
        for request, token in engine.decode().items():
            outputs[running[request]].append(token)
        done = [request for request in engine.running if queued[running[request]] >= tokens]
        if done:  # their last tokens are on the way
            for request, token in engine.read().items():
                outputs[running[request]].append(token)
            for request in done:
                engine.finish(request)
                del running[request]
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
