"""Attention mass of prompts, `kvstrata.hf.mass`, against an ordinary softmax."""

from __future__ import annotations

import itertools

import pytest
import torch

pytest.importorskip("transformers")
from hf_model import EXACT, make, prompt
from kvstrata.hf import StrataCache, mass
from kvstrata.hf.logits import Logits
from kvstrata.hf.mass import prompt_mass

BY = ["torch", "numba", "triton"]


def use(by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mass by torch, by numba's loops in chunks of a few queries and on two threads, or by Triton."""
    monkeypatch.setattr(mass, "_by_triton", lambda query: by == "triton")
    if by == "triton":
        if torch.cuda.is_available():
            pytest.skip("of the interpreter; on a GPU there is a test of its own")
        from kvstrata.hf import mass_triton

        monkeypatch.setattr(mass_triton, "SPAN", 64)
        return
    if by == "torch":
        monkeypatch.setattr(mass, "_numba", lambda: None)
        return
    pytest.importorskip("numba")
    from kvstrata.hf import mass_numba

    monkeypatch.setattr(mass_numba, "SCORES", 50)  # 7 queries that see 13 columns
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)


def chosen_by(head: int, group: int, queries: int, limit: int) -> list[tuple[torch.Tensor, range]]:
    """Queries that a head of a group samples, and the range that they represent: all, or newest and older ones."""
    newest = range(queries - min(64, limit // 2), queries)
    parts = []
    for of in [range(queries)] if queries <= limit or not newest else [newest, range(newest.start)]:
        stride = 1 if of is newest else -(-len(of) // (limit - (len(newest) if queries > limit else 0)))
        last = of.stop - 1 - int(head / group * stride)
        own = torch.arange(last, -1, -stride)[: len(of) // stride]
        assert own.min() >= of.start
        parts.append((own, of))
    return parts


@pytest.mark.parametrize("by", BY)
def test_a_query_that_sees_nothing_gives_no_mass(by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither it nor padding with values that are not finite reaches the mass of others."""
    use(by, monkeypatch)
    q, k = torch.randn(1, 2, 4, 16), torch.randn(1, 1, 4, 16)
    q[:, :, 0] = torch.nan
    is_token = torch.tensor([[False, True, True, True]])
    position = torch.tensor([[-1, 0, 1, 2]])
    column = torch.tensor([[[-1, -1, 1, 2]]])  # the token of query 1 is gone
    given = prompt_mass(q, k, position, column, is_token, Logits(0.3), 4)
    torch.testing.assert_close(given.sum(), torch.tensor(4.0))
    assert not given[..., :2].any()


@pytest.mark.parametrize("padding", [False, True])
def test_mass_does_not_depend_on_the_chunk_size(padding: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    use("torch", monkeypatch)
    q, k = torch.randn(2, 4, 50, 16), torch.randn(2, 2, 70, 16)
    column = torch.arange(70).repeat(2, 1)
    if padding:
        column[1] = torch.cat([torch.full((25,), -1), torch.arange(45)])
    given = []
    for size in (1, 3, 64):
        monkeypatch.setattr(mass, "CHUNK", size)
        given.append(prompt_mass(q, k, column[:, 20:], column.unsqueeze(1), column[:, 20:] >= 0, Logits(0.3), 17))
    assert given[0].any()
    for other in given[1:]:
        torch.testing.assert_close(other, given[0])


@pytest.mark.parametrize("by", BY)
def test_prompt_mass_is_that_of_softmax(by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use(by, monkeypatch)
    torch.manual_seed(0)
    q, k, sinks = torch.randn(2, 6, 9, 16), torch.randn(2, 2, 13, 16), torch.randn(6)
    query_position = torch.arange(9).repeat(2, 1) + 4
    query_position[1] = torch.tensor([-1, -1, 4, 5, 6, 7, 8, 9, 10])
    earlier = torch.stack([torch.randperm(4) for _ in range(4)]).view(2, 2, 4)
    column_position = torch.cat([earlier, query_position.unsqueeze(1).expand(-1, 2, -1)], 2)
    column_position[torch.rand(2, 2, 13) < 0.3] = -1
    visible = (column_position >= 0).unsqueeze(2) & (column_position.unsqueeze(2) <= query_position[:, None, :, None])
    is_token = query_position >= 0
    scores = 1.5 * torch.tanh(q @ k.repeat_interleave(3, 1).mT * 0.3 / 1.5)
    scores = scores.masked_fill(~visible.repeat_interleave(3, 1), -torch.inf)
    weights = torch.cat([scores, sinks.view(1, 6, 1, 1).expand(2, -1, 9, 1)], -1).softmax(-1)[..., :13]
    expected = (weights * is_token[:, None, :, None]).unflatten(1, (2, 3)).sum((2, 3))
    given = prompt_mass(q, k, query_position, column_position, is_token, Logits(0.3, 1.5, sinks), 9)
    torch.testing.assert_close(given, expected)
    # Each sampled query represents its neighbours.
    sampled = prompt_mass(q, k, query_position, torch.zeros(2, 1, 13, dtype=torch.long), is_token, Logits(0.3), 4)
    torch.testing.assert_close(sampled.sum(2), torch.tensor([[27.0, 27.0], [21.0, 21.0]]))


@pytest.mark.parametrize("limit", [50, 20])
@pytest.mark.parametrize("padding", [0, 7])
@pytest.mark.parametrize("by", BY)
def test_prompt_mass_in_chunks_is_that_of_softmax(
    limit: int, padding: int, by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several chunks of queries behind older tokens: each looks only at columns up to its own. All of them,
    or the newest 10 and every fourth of the others, of which the second head takes those in between."""
    use(by, monkeypatch)
    torch.manual_seed(0)
    q, k = torch.randn(1, 2, 50, 16), torch.randn(1, 1, 60, 16)
    is_token = torch.arange(50).unsqueeze(0) >= padding
    query_position = 10 + is_token.cumsum(1) - 1
    column_position = torch.cat([torch.arange(10).unsqueeze(0), query_position.masked_fill(~is_token, -1)], 1)
    seen = (column_position >= 0) & (column_position <= query_position[0, :, None])
    weights = (q @ k.mT * 0.3).masked_fill(~seen, -torch.inf).softmax(-1)
    expected = torch.zeros(60)
    for head in range(2):
        for sampled, of in chosen_by(head, 2, 50, limit):
            part = is_token[0, sampled]
            tokens = int(is_token[0, of].sum())
            expected += (weights[0, head, sampled] * part[:, None]).sum(0) * tokens / int(part.sum())
    given = prompt_mass(q, k, query_position, column_position.unsqueeze(1), is_token, Logits(0.3), limit)
    torch.testing.assert_close(given[0, 0], expected)


def test_importance_comes_from_attention() -> None:
    """One query's mass after a prompt and steps: what the cache holds sums to what was given."""
    model = make("llama")
    cache = StrataCache(model.config, **EXACT)
    with torch.no_grad():
        model(prompt(1, 50), past_key_values=cache)
        for token in prompt(1, 20, seed=3).split(1, 1):
            model(token, past_key_values=cache)
        for layer in cache.layers:
            layer.flush()
    tiered = cache.tiered
    assert tiered.reports.numbers[0].tolist() == [[70, 70], [70, 70]]
    sums = tiered.buckets.snapshot(1, [0]).importance.view(-1).sum()
    torch.testing.assert_close(sums, torch.tensor(70.0 * 4), rtol=1e-4, atol=0)


SHAPES = [(1, 1, 1, 4, 1, 64), (2, 129, 129, 20, 3, 64), (1, 100, 65, 33, 16, 80), (2, 150, 140, 82, 2, 64)]
SHAPES += [pytest.param(2, 5000, 4100, 512, 4, 128, marks=pytest.mark.gpu)]


@pytest.mark.parametrize(("rows", "columns", "queries", "limit", "group", "dim"), SHAPES)
def test_mass_in_triton_is_that_of_softmax(
    rows: int, columns: int, queries: int, limit: int, group: int, dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Strided rows as models have them, several ranges of columns, queries and columns that fill no tile."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu":
        use("triton", monkeypatch)
    torch.manual_seed(0)
    q = torch.randn(rows, queries, 2 * group, dim, dtype=torch.float16).transpose(1, 2)
    k = torch.randn(rows, columns, 2, 2 * dim, dtype=torch.float16).transpose(1, 2)[..., :dim]
    wanted = torch.zeros(rows, 2, columns)
    scores = q.float() @ k.float().repeat_interleave(group, 1).mT * 0.2
    seen = torch.arange(columns) <= (columns - queries + torch.arange(queries))[:, None]
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    for head in range(group):
        for chosen, of in chosen_by(head, group, queries, limit):
            wanted += weights[:, head::group, chosen].sum(2) * (len(of) / len(chosen))
    position, q, k = torch.arange(columns, device=device).expand(rows, -1), q.to(device), k.to(device)
    given = [
        prompt_mass(
            q, k, position[:, columns - queries :], position.unsqueeze(1), position[:, :queries] >= 0, Logits(0.2),
            limit, in_order,
        )
        for in_order in (True, False)
    ]  # fmt: skip
    torch.testing.assert_close(given[0].cpu(), wanted, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(given[1], given[0])
    for by in ("numba", "torch") if device.type == "cpu" else ():
        use(by, monkeypatch)
        found = prompt_mass(
            q,
            k,
            position[:, columns - queries :],
            position.unsqueeze(1),
            position[:, :queries] >= 0,
            Logits(0.2),
            limit,
        )
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-4)


def test_scratch_of_the_loops_is_used_again_in_any_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    """A first prompt under inference mode, a shorter and a longer one outside; beyond the limit nothing is kept."""
    pytest.importorskip("numba")
    from kvstrata.hf import mass_numba

    use("numba", monkeypatch)
    monkeypatch.setattr(mass_numba, "SCORES", 1000)
    monkeypatch.setattr(mass_numba, "KEPT", 4000)
    monkeypatch.setattr(mass_numba, "_own", mass_numba._Scratch())
    kept = []
    for columns, mode in ((30, True), (20, False), (40, False), (100, True), (30, False)):
        torch.manual_seed(0)
        q, k = torch.randn(1, 4, columns, 32), torch.randn(1, 2, columns, 32)
        position = torch.arange(columns)[None]
        with torch.inference_mode(mode):
            found = prompt_mass(q, k, position, position.unsqueeze(1), position >= 0, Logits(0.2), 128)
        seen = (q @ k.repeat_interleave(2, 1).mT * 0.2).masked_fill(
            torch.ones(columns, columns).triu(1) > 0, -torch.inf
        )
        torch.testing.assert_close(found, seen.softmax(-1).unflatten(1, (2, 2)).sum((2, 3)), rtol=1e-4, atol=1e-5)
        kept.append(None if mass_numba._own.kept is None else len(mass_numba._own.kept))
    assert kept == [2760, 2760, 3280, None, 2760]


@pytest.mark.parametrize("tokens", [slice(0, 150), slice(0, 70), slice(90, 150), slice(3, 3)])
def test_weights_sum_to_the_tokens_of_a_row(tokens: slice) -> None:
    """Also if the newest queries, or those before, are padding, which has no weight."""
    is_token = torch.zeros(2, 150, dtype=torch.bool)
    is_token[0, tokens], is_token[1] = True, True
    for limit, group in itertools.product((300, 150, 70, 40, 1), (1, 3)):
        samples = mass.samples_of(150, limit)
        assert sum(x.size for x in samples) <= limit
        assert sum(x.end - x.begin for x in samples) == 150
        weights = mass.weights_of(is_token, samples, group)
        for sample, weight in zip(samples, weights, strict=True):
            flags = sample.of(is_token, group)
            assert weight.shape == flags.shape == (2, sample.size, group)
            assert not weight[~flags].any()
            wanted = is_token[:, sample.begin : sample.end].sum(1)[:, None] * flags.any(1)
            torch.testing.assert_close(weight.sum(1), wanted.float())
            assert (wanted[1] == sample.end - sample.begin).all()


CHOICES = [(150, 40, 3), (150, 150, 4), (1000, 70, 7), (64, 9, 1), (9, 1, 5)]


@pytest.mark.parametrize(("queries", "limit", "group"), CHOICES)
def test_heads_of_a_group_sample_other_queries(queries: int, limit: int, group: int) -> None:
    """Of one head they are evenly spaced; together they are spread over a stride, as far as it goes."""
    number = torch.arange(queries)
    for sample in mass.samples_of(queries, limit):
        chosen = sample.of(number[None], group)[0]
        assert sample.begin <= chosen.min()
        assert chosen.max() == sample.end - 1
        assert (chosen.diff(dim=0) == sample.stride).all()
        assert len(chosen[-1].unique()) == min(sample.stride, group)
        query = number.view(1, 1, -1, 1) + 1000 * torch.arange(2 * group).view(1, -1, 1, 1)
        taken = sample.of_query(query, group).unflatten(1, (2, group))
        assert torch.equal(taken[0, ..., 0] % 1000, chosen.T.expand(2, -1, -1))
        assert torch.equal(taken[0, :, :, 0, 0] // 1000, torch.arange(2 * group).view(2, group))


def test_mass_kernels_compile_without_spills() -> None:
    from ahead import compile_triton

    numbers = dict.fromkeys(("sampled", "first", "every", "columns", "span"), "i32")
    types = dict(q_ptr="*bf16", k_ptr="*bf16", place_ptr="*i32", column_place_ptr="*i32", lse_ptr="*fp32")
    types |= dict(weight_ptr="*fp32", out_ptr="*fp32", factor="fp32", softcap="fp32", weight="fp32") | numbers
    sizes = dict(KV_HEADS=8, GROUP=4, DIM=128, WIDE=128, BLOCK_M=64, BLOCK_N=64, CAPPED=False, PLACED=True)
    for kernel in ("lse_kernel", "mass_kernel"):
        used = compile_triton("kvstrata.hf.mass_triton", kernel, 90, types, sizes, num_warps=4, num_stages=2)
        assert used["STACK"] == used["LOCAL"] == 0
        assert used["REG"] <= 168


def test_kernels_of_the_mass_are_loaded_by_warmup(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mass, "_by_triton", lambda query: True)
    shapes = []
    monkeypatch.setattr(
        mass, "triton_mass", lambda q, queries, key, logits, limit: shapes.append((*q.shape, key.shape[1]))
    )
    model = make("llama")
    StrataCache(model.config, budget=0.5).warmup(model, progress=False)
    StrataCache(model.config, budget=1.0).warmup(model, progress=False)
    assert shapes == [(1, 4, 64, 32, 2)]
