"""A long decode whose attention moves, shortened: the error stays where it was, and the budget holds at every step."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvstrata.tools import publish
from kvstrata.tools.cli import app
from kvstrata.tools.eval import drift

SHORT = drift.Setting(steps=600, turns=4)


@pytest.fixture(scope="module")
def row() -> drift.Row:
    return drift.run(SHORT)


def test_error_of_the_last_quarter_does_not_grow(row: drift.Row) -> None:
    """Not even for subjects that come back after their tokens were demoted."""
    assert len(row.error) == len(row.tiers) == 4
    assert row.error[-1] < 1.2 * row.error[0]
    assert max(row.error) < 1.2 * row.error[0]
    assert max(row.highest) < 1.3 * row.highest[0]
    assert 0.02 < min(row.error) < max(row.highest) < 0.5  # it is measured, and it is an answer


def test_bytes_and_tiers_stay_where_they_are(row: drift.Row) -> None:
    assert row.within
    assert row.fraction[-1] <= SHORT.budget
    for shares in row.tiers:
        assert sum(shares.values()) == pytest.approx(1)
        assert shares["K16V16"] < 0.1
    wide = [sum(share for name, share in shares.items() if name[:2] in ("K8", "K4")) for shares in row.tiers]
    assert wide[-1] > 0.5 * wide[1]  # once past the floor, new tokens are not starved by old ones


def test_a_run_is_kept_and_rendered(row: drift.Row, tmp_path: Path) -> None:
    machine = {"name": "a CPU", "slug": "cpu-test", "revision": "0123456789abc", "date": "2026-01-02T03:04Z"}
    path = tmp_path / "cpu-test" / "drift.json"
    drift.save(drift.Drift(machine, [row]), path)
    [kept] = publish.load_all(tmp_path)
    assert isinstance(kept, drift.Drift)
    assert kept.rows[0].setting == row.setting
    assert kept.rows[0].error == pytest.approx(row.error, rel=1e-3)
    text = publish.render_document("<!-- kvstrata:drift on=cpu-test -->\n<!-- /kvstrata:drift -->", [kept])
    assert text.count("| importance, mean |") == 4
    assert "600 steps after 512 tokens, budget 0.3, on a CPU, revision 0123456789" in text
    assert not publish.figures([kept], tmp_path)
    path.write_text(path.read_text().replace('"schema": 1', '"schema": 0'))
    with pytest.raises(ValueError, match="not a result of kvstrata drift"):
        drift.load(path)


def test_drift_command_writes_results_and_rejects_unknown_policies(tmp_path: Path) -> None:
    out = tmp_path / "drift.json"
    made = CliRunner().invoke(app, ["drift", "--steps", "160", "--policy", "uniform", "--out", str(out)])
    assert made.exit_code == 0, made.output
    assert drift.load(out).rows[0].name == "uniform"
    wrong = CliRunner().invoke(app, ["drift", "--policy", "newest"])
    assert wrong.exit_code == 2
    assert "policy: expected one of mean, ema, recency, uniform, got 'newest'" in wrong.output


def test_invalid_settings_raise() -> None:
    with pytest.raises(ValueError, match="steps: expected at least 160, got 100"):
        drift.Setting(steps=100)
    with pytest.raises(ValueError, match="turns: expected a multiple of 4, got 6"):
        drift.Setting(turns=6)
