"""What a captured step of a `StrataCache` reads by address lives as long as its graph, and stays where it was.

On a CPU nothing is captured, so a `GraphRunner` that is strict stands for one that is: it notes what the step read when
it was captured, refuses what no capture allows, and looks before every replay whether all of it is still there.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from weakref import ref

import pytest
import torch

pytest.importorskip("transformers")

from hf_model import SMALL, greedy, make, prompt
from kvstrata.attention.decode import plan as plans
from kvstrata.hf import StrataCache, forward
from test_hf_rows import long_model


def tensors_of(thing: object) -> dict[str, torch.Tensor]:
    """Tensors among the attributes of an object."""
    return {name: x for name, x in vars(thing).items() if isinstance(x, torch.Tensor)}


class StrictRunner(forward.kvstrata.GraphRunner):
    """A runner on the CPU that behaves where a CUDA graph would be wrong."""

    graphs = replays = 0
    capturing = False

    def capture(self) -> StrictRunner:
        type(self).graphs += 1
        super().capture()
        cells = dict(zip(self.step.__code__.co_freevars, (x.cell_contents for x in self.step.__closure__), strict=True))
        self.owner, self.model = cells["owner"], cells["model"]
        self.plan = ref(self.owner.steps.plan)
        self.read = [(ref(x), x.data_ptr()) for x in self._tensors()]
        return self

    def _tensors(self) -> list[torch.Tensor]:
        tiered, observation = self.owner.tiered, self.owner.steps.plan.observation
        held = [tiered, tiered.reports, tiered.buckets, tiered.pool, *([] if observation is None else [observation])]
        tensors = [x for thing in held for x in tensors_of(thing).values()]
        return [*tensors, *self.buffers.values(), *self.model.parameters(), *self.model.buffers()]

    def replay(self, batch: int):
        type(self).replays += 1
        assert self.plan() is not None, "the scratch of the plan was freed"
        assert self.plan() is self.owner.steps.plan, "the graph reads by another plan"
        assert self.plan().requests == self.owner.tiered.requests
        for tensor, address in self.read:
            assert tensor() is not None, "a tensor was freed"
            assert tensor().data_ptr() == address, "a tensor has moved"
        with self.strictly():
            outputs = super().replay(batch)
        self.previous = outputs
        return outputs

    @contextmanager
    def strictly(self) -> Iterator[None]:
        StrictRunner.capturing = True
        try:
            yield
        finally:
            StrictRunner.capturing = False


@pytest.fixture(autouse=True)
def strict(monkeypatch: pytest.MonkeyPatch) -> type[StrictRunner]:
    """Steps run by strict runners, and no plan is made in a capture: its tables would be uploaded there."""
    monkeypatch.setattr(forward.kvstrata, "GraphRunner", StrictRunner)
    make_plan = plans.DecodePlan.__init__

    def made(self, *args, **kwargs) -> None:
        assert not StrictRunner.capturing, "a plan was made in a capture"
        make_plan(self, *args, **kwargs)

    monkeypatch.setattr(plans.DecodePlan, "__init__", made)
    StrictRunner.graphs = StrictRunner.replays = 0
    return StrictRunner


def steps(model, cache: StrataCache, ids: torch.Tensor, number: int) -> torch.Tensor:
    return torch.cat([model(input_ids=ids[:, :1], past_key_values=cache).logits for _ in range(number)])


@torch.no_grad()
def test_removed_and_restored_rows(strict: type[StrictRunner]) -> None:
    """The plan of two rows is gone after a step of one, so the graph that read by it is, too."""
    model, ids, logits = make("llama"), prompt(2, 50), []
    for capture in (False, True):
        cache = StrataCache(model.config, **SMALL, capture=capture, max_batch=2)
        model(ids, past_key_values=cache)
        out = [steps(model, cache, ids, 3)]
        for number in (1, 2, 0):  # steps of one row: eager, captured, none
            cache.batch_select_indices(torch.tensor([1]))
            out += [steps(model, cache, ids[:1], number)] if number else []
            cache.batch_repeat_interleave(2)
            gc.collect()
            out.append(steps(model, cache, ids, 3))
            cache.reorder_cache(torch.tensor([1, 0]))
            out.append(steps(model, cache, ids, 2))
        logits.append(torch.cat(out))
    assert torch.equal(*logits)
    assert strict.graphs >= 3


def test_grown_tables_are_captured_again(strict: type[StrictRunner]) -> None:
    model, ids = long_model(100), prompt(2, 80)
    runs = []
    for capture in (False, True):
        cache = StrataCache(model.config, **SMALL, capture=capture)
        runs.append(greedy(model, ids, cache, attention_mask=torch.ones_like(ids), new=40))
        assert cache.tiered.max_tokens > 100
    assert torch.equal(*runs)
    assert strict.graphs == 2
    assert strict.replays == 39 - 2, "one eager step before each capture"


@torch.no_grad()
def test_other_operations_between_captured_steps(strict: type[StrictRunner]) -> None:
    """Tokens of assisted decoding, crops, a second cache of the same model, prompts, a reset."""
    model, ids = make("llama"), prompt(2, 60)
    logits = []
    for capture in (False, True):
        cache, other = (StrataCache(model.config, **SMALL, capture=capture) for _ in range(2))
        model(ids, past_key_values=cache)
        out = [steps(model, cache, ids, 3)]
        model(ids[:, :30], past_key_values=other)
        out += [steps(model, x, ids, 2) for x in (other, cache, other, cache)]
        out.append(model(ids[:, :3], past_key_values=cache).logits.flatten(0, 1))
        out.append(steps(model, cache, ids, 2).flatten(0, 1))
        cache.crop(-4)
        twin = copy.deepcopy(cache)
        out += [steps(model, x, ids, 3).flatten(0, 1) for x in (cache, twin)]
        model(ids[:, :40], past_key_values=cache)
        out.append(steps(model, cache, ids, 12).flatten(0, 1))
        cache.reset()
        model(ids[:1], past_key_values=cache)
        out.append(steps(model, cache, ids[:1], 3).flatten(0, 1))
        logits.append(torch.cat([x.reshape(-1, x.shape[-1]) for x in out]))
    assert torch.equal(*logits)
    assert strict.replays > 12


@torch.no_grad()
def test_outputs_are_owned_by_the_caller(strict: type[StrictRunner]) -> None:
    """What a step returned does not change with the next one, nor do the inputs have to stay."""
    model, ids = make("llama"), prompt(2, 50)
    cache = StrataCache(model.config, **SMALL, capture=True)
    model(ids, past_key_values=cache)
    kept, copies = [], []
    for number in range(5):
        token = ids[:, number : number + 1].clone()
        kept.append(model(input_ids=token, past_key_values=cache).logits)
        token.fill_(0)
        copies.append(kept[-1].clone())
    assert strict.replays == 4
    for a, b in zip(kept, copies, strict=True):
        assert torch.equal(a, b)
    runner = cache.forward.runner
    assert runner is not None
    shared = {x.untyped_storage().data_ptr() for x in runner.previous.values()}
    assert kept[-1].untyped_storage().data_ptr() not in shared


@torch.no_grad()
def test_buffers_of_the_model_are_watched(strict: type[StrictRunner]) -> None:
    model, ids = make("llama"), prompt(1, 40)
    cache = StrataCache(model.config, **SMALL, capture=True)
    model(ids, past_key_values=cache)
    steps(model, cache, ids, 3)
    rotary = model.model.rotary_emb
    rotary.inv_freq.data = rotary.inv_freq.clone()
    steps(model, cache, ids, 2)
    assert strict.graphs == 2


@torch.no_grad()
@pytest.mark.parametrize("where", ["forward_hook", "forward_pre_hook"])
def test_hooks_are_called_at_every_step(where: str, strict: type[StrictRunner]) -> None:
    model, ids, calls = make("llama"), prompt(1, 40), []
    cache = StrataCache(model.config, **SMALL, capture=True)
    model(ids, past_key_values=cache)
    handle = getattr(model.model.layers[1], f"register_{where}")(lambda *args: calls.append(1))
    with pytest.warns(UserWarning, match=r"eagerly, model.layers.1 has hooks, which replays would not call"):
        steps(model, cache, ids, 4)
    handle.remove()
    assert len(calls) == 4
    assert strict.graphs == 0


@torch.no_grad()
def test_hidden_states_of_another_call_do_not_stop_captures(strict: type[StrictRunner]) -> None:
    """transformers leaves hooks of its own behind, which do nothing where no such output is asked for."""
    model, ids = make("llama"), prompt(1, 40)
    cache = StrataCache(model.config, **SMALL, capture=True)
    model(ids, past_key_values=cache, output_hidden_states=True)
    assert any(module._forward_hooks for module in model.modules())
    steps(model, cache, ids, 3)
    assert strict.replays == 2
    assert len(model(input_ids=ids[:, :1], past_key_values=cache, output_hidden_states=True).hidden_states) == 3


@torch.no_grad()
def test_autocast_runs_eagerly(strict: type[StrictRunner]) -> None:
    """Its casts of weights are freed with the context, and a graph would still read them."""
    model, ids = make("llama"), prompt(1, 40)
    cache = StrataCache(model.config, **SMALL, capture=True)
    model(ids, past_key_values=cache)
    with torch.autocast("cpu", torch.bfloat16):
        steps(model, cache, ids, 3)
    assert strict.graphs == 0
    steps(model, cache, ids, 3)
    assert strict.graphs == 1


@torch.no_grad()
def test_padding_that_moved_is_not_a_step(strict: type[StrictRunner]) -> None:
    """As many tokens as before, other ones: refused, as in an eager step."""
    model, ids = make("llama"), prompt(2, 40)
    mask = torch.ones_like(ids)
    mask[1, :9] = 0
    cache = StrataCache(model.config, **SMALL, capture=True)
    model(ids, attention_mask=mask, past_key_values=cache)
    more = torch.cat([mask, torch.ones(2, 1, dtype=torch.long)], 1)
    assert cache.matches(more)
    assert cache.matches(more.bool())
    moved = more.clone()
    moved[1, 8], moved[1, 9] = 1, 0
    assert not cache.matches(moved)
    with pytest.raises(NotImplementedError, match="attention_mask"):
        model(input_ids=ids[:, :1], attention_mask=moved, past_key_values=cache)
    for _ in range(45):  # beyond the columns that were uploaded
        positions = more.sum(1, keepdim=True) - 1
        model(input_ids=ids[:, :1], attention_mask=more, position_ids=positions, past_key_values=cache)
        more = torch.cat([more, torch.ones(2, 1, dtype=torch.long)], 1)
    assert strict.replays == 44
    cache.crop(-55)  # into the padded columns
    assert cache.matches(more[:, :31])
    assert not cache.matches(torch.ones(2, 31))
