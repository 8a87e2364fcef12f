"""What is noted of compiled kernels: found again only for the same code, compiler and architecture, and true."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import ahead
import gates
from kvstrata import jit
from kvstrata.attention.decode import cuda as decode_cuda

pytest.importorskip("cuda.core")
SOURCE = decode_cuda.FOLDER / "rows.cu"


def refuse(*arguments: object, **options: object) -> None:
    raise AssertionError("compiled")


def test_a_kernel_is_noted_as_the_compiler_sees_it() -> None:
    """Of one that compiles quickly; a note that is not there is no failure."""
    noted = gates._known().get(gates.key_of("usage", SOURCE, "rows", "sm_90"))
    assert noted is None or jit.Usage(**noted) == jit.usage(SOURCE, "rows", arch="sm_90")


def test_a_kernel_is_noted_as_triton_sees_it() -> None:
    types = {f"{name}_ptr": "*i32" for name in ("length", "cu_q", "cu_k")}
    given = ("kvstrata.attention.packed_prefill.triton", "sums_kernel", 90, types, {"BLOCK": 128}, {"num_warps": 4})
    assert ahead.call("ahead:compile_kernel", *given) == ahead.call("ahead:compile_anew", *given)


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of one's own."""
    monkeypatch.setattr(gates, "FILE", tmp_path / "kernel_usage.json")
    monkeypatch.delenv(gates.RECORD, raising=False)
    gates._known.cache_clear()
    yield gates.FILE
    gates._known.cache_clear()


def test_a_noted_kernel_is_not_compiled(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    used = jit.Usage(20, 0, 0, 0)
    monkeypatch.setattr(jit, "usage", lambda *arguments, **options: used)
    assert gates.usage(SOURCE, "rows", arch="sm_90") == used
    assert not file.exists(), "tests write nothing"
    gates._known.cache_clear()
    monkeypatch.setenv(gates.RECORD, str(file))
    assert gates.usage(SOURCE, "rows", arch="sm_90") == gates.usage(SOURCE, "rows", arch="sm_80") == used
    assert [key.split(" ", 1)[1] for key in json.loads(file.read_text())] == [
        "rows.cu rows sm_80: usage",
        "rows.cu rows sm_90: usage",
    ]
    gates._known.cache_clear()
    monkeypatch.setattr(jit, "usage", refuse)
    assert gates.usage(SOURCE, "rows", arch="sm_90") == used
    with pytest.raises(AssertionError, match="compiled"):
        gates.usage(SOURCE, "rows", arch="sm_89")


def test_whatever_changes_the_code_changes_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, header = tmp_path / "a.cu", tmp_path / "a.cuh"
    keys = []

    def note(entry: str = "f<1>", arch: str = "sm_90", what: str = "usage", *more: str) -> None:
        gates._headers.cache_clear()
        keys.append(gates.key_of(what, source, entry, arch, *more))

    source.write_text("one")
    header.write_text("one")
    note()
    source.write_text("  one // alike\n\n")
    header.write_text("/* as\nbefore */ one")
    note()
    assert keys.pop() == keys[0], "comments are no code"
    note("f<2>")
    note(arch="sm_80")
    note("f<1>", "sm_90", "bytes")
    note("f<1>", "sm_90", "usage", "another search")
    source.write_text("two")
    note()
    header.write_text("two")
    note()
    monkeypatch.setattr(gates, "_compiler", lambda: "another version")
    note()
    assert len(set(keys)) == len(keys) == 8
    gates._headers.cache_clear()


def test_strings_are_code() -> None:
    assert gates.code_of('a = "//b"; // c\n#if /* d */ 1\n  x = \'"\'; // "') == 'a = "//b";\n#if 1\nx = \'"\';'


def test_nothing_is_known_of_another_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """NVRTC of a toolkit has no version that says which build it is."""

    def version(name: str) -> str:
        raise gates.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(gates.metadata, "version", version)
    monkeypatch.setattr(gates, "_compiler", gates._compiler.__wrapped__)
    assert gates.key_of("usage", SOURCE, "rows", "sm_90") not in gates._known()
