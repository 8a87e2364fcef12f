"""The metadata adaptors: what engines copy before a replay, in one launch or one by one."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from conftest import HAS_GPU
from kvstrata.replay import PrecomputedMetadata, fused_copy_replay_data, metadata, switch
from replay_model import DEVICE, ints

INT = torch.int32


def fa_style(batch: int, width: int, most: int = 8, most_width: int = 32) -> dict:
    names = ("input_ids", "out_loc", "cu_seqlens_k", "positions", "seq_lens")
    src = {f"src_{name}": ints(batch + (name == "cu_seqlens_k"), seed=i) for i, name in enumerate(names)}
    dst = {f"dst_{name}": torch.full((most + 1,), 99, dtype=INT, device=DEVICE) for name in names}
    src["src_page_table"] = ints(batch, width, seed=9)
    dst["dst_page_table"] = torch.full((most, most_width), 99, dtype=INT, device=DEVICE)
    return src | dst | dict(batch_size=batch, max_seqlen_k=width)


@pytest.mark.parametrize("fused", [True, False])
def test_fused_copy_replay_data(fused: bool) -> None:
    first = fa_style(1, 1)
    buffers = {name: t for name, t in first.items() if name.startswith("dst_")}
    for batch, width in itertools.product((8, 3, 1, 0), (32, 5, 0)):
        arguments = fa_style(batch, width) | buffers
        for buffer in buffers.values():
            buffer.fill_(99)
        fused_copy_replay_data(**arguments, fused=fused)
        for name, buffer in buffers.items():
            src = arguments[name.replace("dst_", "src_")]
            want = torch.full_like(buffer, 99)
            want[tuple(slice(0, n) for n in src.shape)] = src
            assert torch.equal(buffer, want), (name, batch, width)


@pytest.mark.parametrize("fused", [True, False])
def test_fused_copy_takes_slices_of_larger_sources(fused: bool) -> None:
    arguments = fa_style(6, 20)
    arguments |= dict(batch_size=4, max_seqlen_k=7)
    fused_copy_replay_data(**arguments, fused=fused)
    assert torch.equal(arguments["dst_page_table"][:4, :7], arguments["src_page_table"][:4, :7])
    assert (arguments["dst_page_table"][4:] == 99).all()
    assert (arguments["dst_page_table"][:, 7:] == 99).all()
    assert torch.equal(arguments["dst_cu_seqlens_k"][:5], arguments["src_cu_seqlens_k"][:5])
    assert (arguments["dst_cu_seqlens_k"][5:] == 99).all()
    with pytest.raises(ValueError, match="src_input_ids: expected at least 7 rows"):
        fused_copy_replay_data(**(arguments | dict(batch_size=7)))
    with pytest.raises(ValueError, match="max_seqlen_k: expected at most 20 columns, got 21"):
        fused_copy_replay_data(**(arguments | dict(max_seqlen_k=21)))


def nsa_style(batch: int, width: int, optional: tuple[str, ...], buffers: bool) -> PrecomputedMetadata:
    def make(*shape: int, seed: int) -> torch.Tensor:
        return torch.full(shape, 99, dtype=INT, device=DEVICE) if buffers else ints(*shape, seed=seed)

    out = PrecomputedMetadata(
        make(batch, seed=0),
        make(batch + 1, seed=1),
        make(batch, width, seed=2),
        make(batch, seed=3),
        make(batch + 1, seed=4),
    )
    shapes = dict(seqlens_expanded=(2 * batch,), real_page_table=(batch, width // 2), flashmla_metadata=(16, 8))
    for i, name in enumerate(optional):
        setattr(out, name, make(*shapes[name], seed=5 + i))
    return out


@pytest.mark.parametrize("fused", [True, False])
def test_precomputed_metadata_with_every_choice_of_fields(fused: bool) -> None:
    names = ("seqlens_expanded", "real_page_table", "flashmla_metadata")
    buffers = nsa_style(8, 32, names, True)
    for count in range(4):
        for optional in itertools.combinations(names, count):
            step = nsa_style(5, 20, optional, False)
            fields = [name for name in vars(buffers) if not name.startswith("_")]
            for name in fields:
                getattr(buffers, name).fill_(99)
            for _ in range(2):
                buffers.copy_from(step, fused=fused)
            for name in fields:
                got, src = getattr(buffers, name), getattr(step, name)
                want = torch.full_like(got, 99)
                if src is not None and "cu_seqlens" in name:
                    want[1 : len(src)] = src[1:]
                elif src is not None:
                    want[tuple(slice(0, n) for n in src.shape)] = src
                assert torch.equal(got, want), (name, optional)
    with pytest.raises(ValueError, match="flashmla_metadata: expected None as in the buffers"):
        nsa_style(8, 32, names[:2], True).copy_from(step)


def test_environment_sets_the_default_of_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    backends = []
    plan_of = metadata._plan_of
    monkeypatch.setattr(metadata, "_plan_of", lambda *given: backends.append(given[-1]) or plan_of(*given))
    for flag in (True, False):
        monkeypatch.setattr(switch, "FUSED", flag)
        fused_copy_replay_data(**fa_style(3, 4))
        fused_copy_replay_data(**fa_style(3, 4), fused=not flag)
    assert backends == ["auto", "reference", "reference", "auto"]


def test_plans_of_the_adaptors_are_few() -> None:
    for _ in range(metadata.REMEMBERED + 5):
        fused_copy_replay_data(**fa_style(3, 4), fused=True)
    assert len(metadata._plans) <= metadata.REMEMBERED


@pytest.fixture
def two_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, where ``auto`` is the reference, Triton's kernel under the interpreter is what fused copies run."""
    if not HAS_GPU:
        monkeypatch.setattr(metadata, "backend_of", lambda fused: "triton" if fused else "reference")


def outcome(copy: Any, buffers: list[torch.Tensor], fused: bool) -> Any:
    """Error, or bytes of the buffers; they are as they were before if there is one."""
    for buffer in buffers:
        buffer.fill_(99)
    try:
        copy(fused)
    except (ValueError, TypeError) as error:
        assert all(bool((buffer == 99).all()) for buffer in buffers), "written before it was refused"
        return type(error), str(error)
    return [buffer.tolist() for buffer in buffers]


def changed(tensor: torch.Tensor, change: str) -> Any:
    """One thing about a source that may not fit its buffer."""
    changes = {
        "int64": lambda: tensor.long(),
        "float32": lambda: tensor.float(),
        "row": lambda: tensor.unsqueeze(0),
        "flat": lambda: tensor.reshape(-1),
        "scalar": lambda: tensor.reshape(-1)[:1].reshape(()),
        "double": lambda: torch.cat([tensor, tensor, tensor]),
        "shorter": lambda: tensor[:-1],
        "every other": lambda: tensor[::2],
        "list": lambda: tensor.tolist(),
        "meta": lambda: tensor.to("meta"),
        "": lambda: tensor,
    }
    return changes[change]()


CHANGES = ("int64", "float32", "row", "flat", "scalar", "double", "shorter", "every other", "list", "meta", "")
FA_SOURCES = tuple(f"src_{name}" for name in metadata.NAMES)


def test_fused_and_unfused_accept_and_refuse_the_same(two_ways: None) -> None:
    """FA-style: the same error, or the same bytes, whatever one argument looks like."""

    @settings(max_examples=300 if HAS_GPU else 40, deadline=None)
    @given(st.sampled_from(FA_SOURCES), st.sampled_from(CHANGES), st.integers(-2, 5), st.integers(-2, 7), st.booleans())
    @example("src_input_ids", "", 4, -1, False)
    @example("src_page_table", "flat", 4, 6, False)
    @example("src_positions", "int64", 4, 6, False)
    @example("src_seq_lens", "double", 9, 6, False)
    @example("src_out_loc", "", 4, 6, True)
    def run(name: str, change: str, batch: int, columns: int, shared: bool) -> None:
        arguments = fa_style(4, 6, most=6, most_width=8) | dict(batch_size=batch, max_seqlen_k=columns)
        arguments[name] = changed(arguments[name], change)
        if shared:
            arguments["dst_positions"] = arguments["dst_out_loc"][2:]
        buffers = [arguments[f"dst_{each}"] for each in metadata.NAMES]
        one, other = (
            outcome(lambda fused: fused_copy_replay_data(**arguments, fused=fused), buffers, fused)
            for fused in (True, False)
        )
        assert one == other

    run()


def test_fused_and_unfused_precomputed_metadata_agree(two_ways: None) -> None:
    names = ("seqlens_expanded", "real_page_table", "flashmla_metadata")
    fields = list(vars(nsa_style(1, 2, names, True)))

    @settings(max_examples=300 if HAS_GPU else 25, deadline=None)
    @given(st.sampled_from(fields), st.sampled_from(CHANGES), st.booleans())
    @example("cu_seqlens_k", "scalar", False)
    @example("page_indices", "int64", False)
    @example("cache_seqlens", "list", True)
    def run(name: str, change: str, of_buffers: bool) -> None:
        buffers, step = nsa_style(5, 8, names, True), nsa_style(4, 6, names, False)
        written = [getattr(buffers, each) for each in fields]
        owner = buffers if of_buffers else step
        if change != "meta" or not of_buffers:
            setattr(owner, name, changed(getattr(owner, name), change))
        one, other = (outcome(lambda fused: buffers.copy_from(step, fused), written, fused) for fused in (True, False))
        assert one == other

    run()
    with pytest.raises(TypeError, match="step: expected a PrecomputedMetadata, got dict"):
        nsa_style(5, 8, names, True).copy_from({})


@pytest.mark.parametrize("fused", [True, False])
def test_refused_arguments_are_named(fused: bool) -> None:
    refused = {
        "max_seqlen_k: expected at least 0, got -1": dict(max_seqlen_k=-1),
        "batch_size: expected at least 0, got -1": dict(batch_size=-1),
        r"src_page_table: expected 2 dimensions \[batch, columns\], got shape \[4\]": dict(src_page_table=ints(4)),
        r"src_seq_lens: expected 1 dimension, got shape \[4, 1\]": dict(src_seq_lens=ints(4, 1)),
        r"src_out_loc: expected at most \[2\], the shape of dst_out_loc, got \[4\]": dict(dst_out_loc=ints(2)),
        "dst_page_table: expected a tensor, got NoneType": dict(dst_page_table=None),
        "src_positions: expected torch.int32 as dst_positions has, got torch.int64": dict(src_positions=ints(4).long()),
        "batch_size: expected an int, got float": dict(batch_size=4.0),
    }
    for message, change in refused.items():
        arguments = fa_style(4, 6) | change
        with pytest.raises((ValueError, TypeError), match=message):
            fused_copy_replay_data(**arguments, fused=fused)
