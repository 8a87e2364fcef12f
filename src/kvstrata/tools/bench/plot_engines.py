"""Figure of engines: tokens per second of each contender, one panel per case, relative to the baseline. Needs
matplotlib."""

from __future__ import annotations

from pathlib import Path

from kvstrata.tools.plot import panels

from .results import Report


def plot(report: Report, path: Path) -> Path:
    """Draw a bar per measured contender, labelled with its speed-up over the baseline; the suffix is the format."""
    cases = [case for case in report.cases if any(row.us for row in case.rows)]
    with panels(path, max(len(cases), 1), 3.2, 3.0, {"font.size": 8}) as (figure, all_axes):
        for axes, case in zip(all_axes, cases, strict=False):
            rows = [row for row in case.rows if row.us][::-1]
            rates = [1e6 / row.us.median for row in rows if row.us]
            colours = ["0.6" if row.kind in ("baseline", "peer") else "tab:blue" for row in rows]
            bars = axes.barh([row.name for row in rows], rates, color=colours)
            ratios = [f"{row.vs_baseline.ratio:.2f}x" if row.vs_baseline else "" for row in rows]
            axes.bar_label(bars, ratios, padding=2)
            axes.set(title=case.name, xlabel="tokens/s", xlim=(0, 1.2 * max(rates)))
        figure.suptitle(f"{report.op} on {report.machine['name']}")
    return path
