"""The metadata adaptors: what engines copy before a replay, in one launch or one by one."""

from __future__ import annotations

import itertools

import pytest
import torch

from kvstrata.replay import PrecomputedMetadata, fused_copy_replay_data, metadata
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


def test_the_environment_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    planned = []
    plan_of = metadata._plan_of
    monkeypatch.setattr(metadata, "_plan_of", lambda dst: planned.append(1) or plan_of(dst))
    for flag, runs in ((True, 1), (False, 1)):
        monkeypatch.setattr(metadata, "FUSED", flag)
        fused_copy_replay_data(**fa_style(3, 4))
        assert len(planned) == runs


def test_plans_of_the_adaptors_are_few() -> None:
    for _ in range(metadata.REMEMBERED + 5):
        fused_copy_replay_data(**fa_style(3, 4), fused=True)
    assert len(metadata._plans) <= metadata.REMEMBERED
