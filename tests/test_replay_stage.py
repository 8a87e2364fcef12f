"""HostStage: steps that the host writes ahead, in order and nothing of one left in the next."""

from __future__ import annotations

import pytest
import torch

from kvstrata.replay import HostStage
from replay_model import DEVICE, ints

gpu = pytest.mark.gpu
INT = torch.int32


class TestHostStage:
    def test_steps_of_any_shape_arrive_in_order(self) -> None:
        """One write, one scatter, hundreds of times, with shapes that change, narrow tables and buffers left out."""
        dst = [
            torch.empty(9, dtype=INT, device=DEVICE),
            torch.empty(8, 24, dtype=INT, device=DEVICE),
            torch.empty(8, 2, 3, dtype=torch.int64, device=DEVICE),
            torch.empty(9, dtype=INT, device=DEVICE),
        ]
        stage = HostStage(dst, fill=[-1, 0, None, "last"])
        scatter = stage.node()
        for step in range(300):
            rows, width = step * 5 % 9, step * 7 % 25
            src = [
                ints(rows, seed=step, device="cpu"),
                ints(rows, width, seed=step, device="cpu"),
                ints(rows, 2, 3, seed=step, device="cpu").long(),
                ints(rows + 1, seed=step, device="cpu"),
            ]
            for buffer in dst:
                buffer.fill_(99)
            left_out = step % 4
            stage.write([None if i == left_out else t for i, t in enumerate(src)])
            scatter()
            got = [t.cpu() for t in dst]
            for i, (buffer, source) in enumerate(zip(got, src, strict=True)):
                if i == left_out:
                    assert (buffer == 99).all(), (step, i)
                    continue
                want = torch.full_like(buffer, [-1, 0, 99, int(source[-1]) if i == 3 else 0][i])
                want[tuple(slice(0, n) for n in source.shape)] = source
                assert torch.equal(buffer, want), (step, i)

    def test_host_runs_one_step_ahead_and_no_further(self) -> None:
        """A slot is not written while it is still to be read: the bug of TensorRT-LLM#15546."""
        dst = torch.zeros(4, dtype=INT, device=DEVICE)
        stage = HostStage([dst])
        scatter = stage.node()
        stage.write([torch.full((4,), 1, dtype=INT)])
        stage.write([torch.full((4,), 2, dtype=INT)])
        with pytest.raises(RuntimeError, match="expected a replay after every write, got 2 writes and 0 steps"):
            stage.write([torch.full((4,), 3, dtype=INT)])
        for want in (1, 2, 2):  # the last one finds nothing new
            scatter()
            assert (dst == want).all()
        stage.write([torch.full((4,), 3, dtype=INT)])
        scatter()
        assert (dst == 3).all()

    def test_views_save_the_copy(self) -> None:
        dst = torch.zeros(4, 6, dtype=INT, device=DEVICE)
        stage = HostStage([dst], fill=-1)
        scatter = stage.node()
        for step in range(5):
            (area,) = stage.views()
            area[:2, :3] = step
            stage.commit([(2, 3)])
            scatter()
            assert (dst[:2, :3] == step).all()
            assert (dst[2:] == -1).all()
            assert (dst[:, 3:] == -1).all()

    def test_bad_input_is_named(self) -> None:
        dst = [torch.zeros(4, dtype=INT, device=DEVICE), torch.zeros(4, 2, 3, dtype=INT, device=DEVICE)]
        stage = HostStage(dst)
        with pytest.raises(ValueError, match="dst: expected at least one"):
            HostStage([])
        with pytest.raises(ValueError, match="src: expected 2 tensors"):
            stage.write([None])
        with pytest.raises(ValueError, match=r"src\[0\]: expected at most \[4\]"):
            stage.write([torch.zeros(5, dtype=INT), None])
        with pytest.raises(TypeError, match=r"src\[0\]: expected torch.int32"):
            stage.write([torch.zeros(4), None])
        with pytest.raises(ValueError, match=r"shapes\[1\]: expected \[rows"):
            stage.write([None, torch.zeros(4, 1, 3, dtype=INT)])
        with pytest.raises(ValueError, match=r"dst\[0\]: expected a part of the stage's buffer"):
            stage.node([dst[0][1:], dst[1]])

    @gpu
    def test_the_host_fills_while_the_gpu_runs(self) -> None:
        """Long steps, a host that is always ahead, slots overwritten with the next step as soon as that is allowed, and
        a source that is overwritten behind every replay (TensorRT-LLM#15546)."""
        dst = torch.zeros(64, 512, dtype=INT, device=DEVICE)
        seen = torch.zeros(200, dtype=INT, device=DEVICE)
        at = torch.zeros(1, dtype=torch.int64, device=DEVICE)
        stage = HostStage([dst], fill=0)
        scatter = stage.node()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            scatter()
            torch.cuda._sleep(200_000)
            seen.index_copy_(0, at, dst.amin().reshape(1))
            at.add_(1)
        source = torch.empty(64, 512, dtype=INT).pin_memory()
        for step in range(200):
            stage.write([source.fill_(step + 1)])
            graph.replay()
            source.fill_(-1)
        assert seen.tolist() == list(range(1, 201))


@gpu
@pytest.mark.sanitizer
def test_staged_under_the_sanitizer() -> None:
    stage = TestHostStage()
    stage.test_host_runs_one_step_ahead_and_no_further()
    stage.test_views_save_the_copy()
    torch.cuda.synchronize()


BAD = {
    "stage of a tensor": (lambda d: HostStage(d[1]), TypeError, "dst: expected a list of tensors, got one tensor"),
    "write of a tensor": (lambda d: HostStage(d).write(torch.zeros(2, 8)), TypeError, "src: expected a list of"),
    "node of a tensor": (lambda d: HostStage(d).node(d[1][:2]), TypeError, "dst: expected a list of tensors"),
    "write dtype": (lambda d: HostStage(d[:1]).write([torch.zeros(3)]), TypeError, r"src\[0\]: .*; \.to\(torch.int32"),
    "commit a number": (lambda d: HostStage(d[:1]).commit([3]), TypeError, r"shapes\[0\]: expected a shape .* got 3"),
    "commit no list": (lambda d: HostStage(d[:1]).commit(3), TypeError, "shapes: expected a list with a shape"),
    "commit a half": (lambda d: HostStage(d[:1]).commit([(0.5,)]), TypeError, r"shapes\[0\]: .* got \(0.5,\)"),
    "commit less": (lambda d: HostStage(d[:1]).commit([(-1,)]), ValueError, r"shapes\[0\]: expected at most \[8\]"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_are_named(name: str) -> None:
    call, error, message = BAD[name]
    with pytest.raises(error, match=message):
        call([torch.zeros(8, dtype=INT, device=DEVICE), torch.zeros(8, 16, dtype=INT, device=DEVICE)])
