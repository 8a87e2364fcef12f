"""The page: the contents of results/ as sections of figures and tables; self-contained HTML, or Markdown."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from kvstrata import __version__
from kvstrata.tools import publish
from kvstrata.tools.bench import render
from kvstrata.tools.bench.results import Against, Report, Row
from kvstrata.tools.eval import plot as quality_plot
from kvstrata.tools.eval import render as quality_render
from kvstrata.tools.eval.results import Quality
from kvstrata.tools.profile import profile
from kvstrata.tools.profile import tables as profile_tables
from kvstrata.tools.render import Grid

from . import figures, history

HERE = Path(__file__).parent
OURS = ("case", "us", "interval", "tb_s", "of_peak", "less_floor", "of_copy", "speedup", "vs_peer", "host")
ALL = ("case", "contender", "us", "interval", "p95", "tb_s", "tflop_s", "of_peak", "speedup", "significance")


@dataclass(frozen=True)
class Figure:
    title: str
    svg: str
    tall: bool = False


@dataclass
class Section:
    """One result on one machine; `folded` tables are collapsed initially."""

    title: str
    machine: str
    anchor: str
    caption: str
    lead: list[str] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)
    tables: list[Grid] = field(default_factory=list)
    folded: list[Grid] = field(default_factory=list)


@dataclass
class Content:
    overview: Grid
    sections: list[Section]
    environment: list[Grid]


def collect(results: Path) -> Content:
    """Everything under `<results>/<machine>/`; LookupError if there is nothing."""
    reports = publish.load_all(results)
    profiles = [profile.load(path) for path in sorted(results.glob("*/profile_*.json"))]
    if not reports and not profiles:
        raise LookupError(f"no results under {results}: run kvstrata bench store --save")
    sections, measured = [], []
    for report in reports:
        if isinstance(report, Report):
            measured.append(report)
            own = [p for p in profiles if (p.op, p.machine["slug"]) == (report.op, report.machine["slug"])]
            sections.append(_bench(report, own, results))
        elif isinstance(report, Quality):
            sections.append(_quality(report))
        else:
            kind = publish.kind_of(report.op)
            section = _section(report.op, report.machine, kind.caption(report))
            section.tables = [replace(kind.table(report, {}), title="")]
            sections.append(section)
    known = {(report.op, report.machine["slug"]) for report in measured}
    for other in profiles:
        if (other.op, other.machine["slug"]) not in known:
            section = _section(f"profile of {other.op}", other.machine, profile_tables.caption(other))
            section.tables = [profile_tables.kernels(other)]
            sections.append(section)
    return Content(_overview(measured), sections, _environment([each.machine for each in (*reports, *profiles)]))


def _section(title: str, machine: dict[str, object], caption: str) -> Section:
    name = str(machine["name"])
    anchor = re.sub(r"[^a-z0-9]+", "-", f"{title}-{machine['slug']}".lower()).strip("-")
    return Section(title, name, anchor, caption)


def _bench(report: Report, profiles: Sequence[profile.Profile], results: Path) -> Section:
    section = _section(report.op, report.machine, render.caption(report))
    versions = history.points(results / report.machine["slug"] / f"{report.op}.json")
    drawn = (
        ("Roofline: bandwidth over bytes", figures.roofline(report, f"{section.anchor}-roofline")),
        ("Speed-up, with 95 % intervals", figures.speedups(report, f"{section.anchor}-speed")),
        ("History: our slowest cases", figures.history(versions, f"{section.anchor}-history")),
    )
    section.figures = [Figure(title, svg, title.startswith("Speed-up")) for title, svg in drawn if svg]
    section.lead = [*report.failures] or _lead(report)
    section.tables = [_table(report, OURS, lambda row: row.kind == "ours", "Ours")]
    section.tables += [profile_tables.kernels(each) for each in profiles]
    everything = _table(report, ALL, lambda row: True, "Every contender, and the probes")
    everything.notes = render.notes(report)
    section.folded = [everything, _history_table(versions)]
    return section


def _lead(report: Report) -> list[str]:
    """The largest case as text."""
    rows = [(case, row) for case in report.cases if (row := case.row("ours"))]
    if not rows:
        return []
    case, row = max(rows, key=lambda pair: pair[0].bytes)
    parts = [f"{case.name}: {row.us.median:.2f} us" if row.us else case.name]
    if row.of_peak is not None:
        parts.append(f"{100 * row.of_peak:.0f} % of a copy's bandwidth")
    for against in (row.vs_baseline, row.vs_peer):
        if against:
            parts.append(f"{against.ratio:.2f} times as fast as {against.name} [{against.lo:.2f}, {against.hi:.2f}]")
    return [", ".join(dict.fromkeys(parts)) + ".", *_summary(report)]


def _against_others(report: Report) -> list[Against]:
    """Ours against the fastest other contender, peers and baseline, in each case that has any."""
    closest = []
    for row in (case.row("ours") for case in report.cases):
        others = [against for against in (row.vs_baseline, row.vs_peer) if against] if row else []
        closest += [min(others, key=lambda against: against.ratio)] if others else []
    return closest


def _summary(report: Report) -> list[str]:
    """Number of cases faster than the best other contender, as a sentence."""
    comparisons = _against_others(report)
    if not comparisons:
        return []
    ahead, behind = sum(against.lo > 1 for against in comparisons), sum(against.hi < 1 for against in comparisons)
    slowest, fastest = min(x.ratio for x in comparisons), max(x.ratio for x in comparisons)
    return [
        f"Of {len(comparisons)} cases, {ahead} are faster than the best other contender beyond noise, {behind} slower: "
        f"{slowest:.2f} to {fastest:.2f} times as fast."
    ]


def _table(report: Report, columns: Sequence[str], wanted: Callable[[Row], bool], title: str) -> Grid:
    """Table of the ``wanted`` rows with columns of `bench.render`."""
    pairs = [(case, row) for case in report.cases for row in case.rows if wanted(row)]
    return Grid(title, *render.grid(pairs, columns, 1), labels=2 if "contender" in columns else 1)


def _history_table(versions: Sequence[history.Point]) -> Grid:
    rows = [
        [point.revision, point.date, f"{len(point.us)}", "" if point.speedup is None else f"{point.speedup:.2f}x"]
        for point in reversed(versions)
    ]
    return Grid("History", ["revision", "measured", "cases", "speed-up over the baseline, geometric mean"], rows)


def _quality(quality: Quality) -> Section:
    section = _section(quality.op, quality.machine, quality_render.caption(quality))
    header, rows = quality_render.budgets(quality, {})
    section.tables = [Grid("Bytes and loss", header, rows, labels=2)]
    if quality.needles:
        header, rows = quality_render.needles(quality, {})
        section.folded = [Grid("Needles in a haystack", header, rows, labels=2)]
    drawn = quality_plot.plot(quality, io.StringIO()).getvalue()
    section.figures = [Figure("Quality against bytes", figures.inline(drawn, f"{section.anchor}-plot"))]
    return section


def _overview(reports: Sequence[Report]) -> Grid:
    """One line per op: the case that moves the most bytes, and the number of cases in which ours is fastest."""
    header = ["op", "machine", "case", "us", "of a copy", "over the baseline", "over the best peer", "ahead in"]
    rows = []
    for report in reports:
        ours = [(case, row) for case in report.cases if (row := case.row("ours"))]
        if not ours:
            continue
        case, row = max(ours, key=lambda pair: pair[0].bytes)
        cells = [render.COLUMNS[name][1](case, row) for name in ("us", "of_peak", "speedup", "vs_peer")]
        comparisons = _against_others(report)
        cells.append(f"{sum(against.lo > 1 for against in comparisons)} of {len(comparisons)}" if comparisons else "")
        rows.append([report.op, report.machine["name"], case.name, *cells])
    return Grid("At a glance: the largest case of each op", header, rows, labels=3)


def _environment(machines: Sequence[dict[str, object]]) -> list[Grid]:
    """One table per machine, from its newest description."""
    newest: dict[str, dict[str, object]] = {}
    for machine in sorted(machines, key=lambda machine: str(machine["date"])):
        newest[str(machine["slug"])] = machine
    grids = []
    for machine in newest.values():
        rows = []
        for key, value in machine.items():
            if isinstance(value, dict):
                rows += [[f"{key}: {name}", "-" if entry is None else f"{entry}"] for name, entry in value.items()]
            else:
                rows.append([key, "-" if value is None else f"{value}"])
        grids.append(Grid(str(machine["name"]), ["", ""], rows, labels=2))
    return grids


def html(content: Content) -> str:
    """One self-contained file: no scripts, no network."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=FileSystemLoader(HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["svg"] = Markup  # our own SVG from matplotlib, whose text is escaped
    style = Markup((HERE / "style.css").read_text(encoding="utf-8"))
    return environment.get_template("page.html.j2").render(content=content, style=style, version=__version__)


def markdown(content: Content) -> str:
    """Tables of the page as Markdown, without figures."""
    parts = ["# kvstrata: results", f"## {content.overview.title}", content.overview.markdown()]
    for section in content.sections:
        parts += [f"## {section.title} on {section.machine}", section.caption + ".", *section.lead]
        for table in (*section.tables, *section.folded):
            parts += ([f"### {table.title}"] if table.title else []) + [table.markdown()]
    parts.append("## Environment")
    for grid in content.environment:
        parts += [f"### {grid.title}", grid.markdown()]
    return "\n\n".join(parts) + "\n"
