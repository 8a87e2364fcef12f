"""Compiled loops over several threads: every unit once, with the arguments that were given."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from kvstrata import threads

pytest.importorskip("numba")

from kvstrata import region_numba
from kvstrata.loops import exact


@exact
def note(table, column, weight, by, out, first, last):
    """Add to each unit's entry what the arguments give for it."""
    for unit in range(first, last):
        out[unit] += table[unit, column] * weight + by[unit]


@pytest.mark.parametrize("how", ["openmp", "pool"])
@pytest.mark.parametrize(("units", "count"), [(1, 4), (3, 2), (5, 8), (1000, 3), (0, 2)])
def test_every_unit_runs_once(how: str, units: int, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    team, used = threads.openmp(), []
    if how == "openmp" and team is None:
        pytest.skip("torch has no OpenMP here")
    monkeypatch.setattr(
        threads, "openmp", lambda: None if how == "pool" else lambda *given: used.append(given[2]) or team(*given)
    )
    table = np.arange(4 * max(units, 1), dtype=np.float32).reshape(-1, 4)
    by = np.arange(2 * units, dtype=np.float64)[::2]  # not contiguous
    out = np.zeros(units, np.float32)
    threads.share_out(note, (table, 2, np.float32(0.5), by, out), units, count)
    assert np.array_equal(out, table[:units, 2] * np.float32(0.5) + by)
    several = min(units, count)
    assert used == ([several] if how == "openmp" and several > 1 else [])


def test_other_numbers_are_refused() -> None:
    """As an integer a float would lose its fraction."""
    out = np.zeros(4, np.float32)
    with pytest.raises(TypeError, match=r"arguments: expected arrays, integers and float32 numbers, got 0\.5"):
        region_numba.region(note, (np.zeros((4, 1), np.float32), 0, 0.5, out, out), 4, 1)


AGAIN = """
import torch, numpy as np
from kvstrata import region_numba, threads
from kvstrata.hf import mass_numba
import kvstrata.loops as loops

scores, one, by = np.zeros((8, 4), np.float32), np.ones(8, np.int64), np.empty(8, np.float32)
arguments = (scores, one, one, one[:0], np.ones(8, np.float32), np.float32(0), scores[0, :0], 0, by)
region_numba.region(mass_numba._weigh, arguments, 8, 2)
print(loops._CALLBACKS[0]._cache_hits)
"""


def test_a_later_process_finds_the_function_on_disk() -> None:
    """The key of an entry is the same in every process, although the function has a closure."""
    hits = [
        subprocess.run([sys.executable, "-c", AGAIN], capture_output=True, text=True, check=True).stdout for _ in "12"
    ]
    assert hits[1].strip() == "1"
