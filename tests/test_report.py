"""The page of results: complete, self-contained, valid, the same twice; and whole in a browser where there is one."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from kvstrata.tools import publish
from kvstrata.tools.bench import render
from kvstrata.tools.bench.plot import View, groups
from kvstrata.tools.bench.results import Against, CaseResult, Report, Row, load
from kvstrata.tools.bench.stats import summary
from kvstrata.tools.cli import app
from kvstrata.tools.profile import ncu, profile
from kvstrata.tools.report import figures, history, page

pytest.importorskip("matplotlib")
ROOT = Path(__file__).parent.parent
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome-headless-shell")
VOID = {"meta", "br", "hr", "img", "input", "link", "use", "path", "rect"}


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> Path:
    """The results of this repository, as far as they are not large, with a profile and a case whose name is nasty."""
    folder = tmp_path_factory.mktemp("results")
    for path in ROOT.glob("results/*/*.json"):
        (folder / path.parent.name).mkdir(exist_ok=True)
        data = json.loads(path.read_text())
        if "cases" in data:
            data["cases"] = data["cases"][:5]
        (folder / path.parent.name / path.name).write_text(json.dumps(data))
    store = json.loads((folder / "nvidia-h200" / "store.json").read_text())
    store["cases"][0]["name"] = "<script>alert(1)</script>&"
    store["cases"][1]["rows"][0] |= {"correct": False, "error": "off by one", "us": None}
    (folder / "nvidia-h200" / "store.json").write_text(json.dumps(store))
    kernels = ncu.parse((Path(__file__).parent / "data" / "ncu_raw.csv").read_text())
    for op in ("store", "nothing"):
        taken = profile.Profile(op, store["machine"], "ncu 1", [profile.CaseProfile("c", "ours", 1, kernels)])
        profile.save(taken, folder / "nvidia-h200" / f"profile_{op}.json")
    return folder


@pytest.fixture
def only_store(results, tmp_path) -> Path:
    """The result of one op, and its profile."""
    folder = tmp_path / "results" / "nvidia-h200"
    folder.mkdir(parents=True)
    for name in ("store", "profile_store"):
        shutil.copy(results / "nvidia-h200" / f"{name}.json", folder)
    return folder.parent


@pytest.fixture(scope="module")
def content(results) -> page.Content:
    return page.collect(results)


@pytest.fixture(scope="module")
def html(content) -> str:
    return page.html(content)


class Reader(HTMLParser):
    """Tags that are open, ids, links and what would be loaded."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.wrong: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.loads: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        if tag not in VOID:
            self.open.append(tag)
        self._look(tag, attrs)

    def handle_startendtag(self, tag, attrs):
        self._look(tag, attrs)

    def _look(self, tag, attrs):
        for name, value in attrs:
            if name == "id":
                self.ids.append(value)
            elif name in ("href", "xlink:href"):
                (self.links if value.startswith("#") else self.loads).append(value)
            elif name in ("src", "srcset", "action", "data", "poster"):
                self.loads.append(value)
        if tag in ("script", "link", "iframe", "object", "embed"):
            self.loads.append(tag)

    def handle_endtag(self, tag):
        if tag in VOID:
            return
        if not self.open or self.open.pop() != tag:
            self.wrong.append(tag)


def test_the_page_is_self_contained(html):
    assert html.startswith("<!DOCTYPE html>")
    read = Reader(html)
    assert read.wrong == []
    assert read.open == []
    assert read.loads == []
    assert not re.search(r"@import|url\((?!#)", html)
    assert len(read.ids) == len(set(read.ids)), "ids of two figures clash"
    assert {link[1:] for link in read.links} <= set(read.ids)


def test_the_page_counts_the_cases_that_are_ahead(html):
    """Beyond noise, or not at all: of three cases one is ahead, one behind and one level."""

    def case(name: str, ratio: float, low: float, high: float) -> CaseResult:
        against = Against("peer", ratio, low, high, 1.0, 0.01)
        ours = Row("kvstrata", "ours", us=summary([1.0, 2.0, 3.0]), vs_peer=against)
        if name == "b":  # the baseline is the faster one
            ours.vs_peer, ours.vs_baseline = Against("slow", 9.0, 8.0, 10.0, 1.0, 0.01), against
        return CaseResult(name, {}, 1, 1, 1, False, rows=[ours])

    cases = [case("a", 1.5, 1.4, 1.6), case("b", 0.8, 0.7, 0.9), case("c", 1.01, 0.99, 1.03)]
    report = SimpleNamespace(op="x", machine={"name": "gpu"}, cases=cases)
    (words,) = page._summary(report)
    assert words.startswith("Of 3 cases, 1 are faster than the best other contender beyond noise, 1 slower")
    assert "0.80 to 1.50 times" in words
    assert page._overview([report]).rows[0][-1] == "1 of 3"
    assert re.search(r"Of \d+ cases, \d+ are faster", html)


def test_the_page_shows_and_escapes_everything(html):
    assert "<script>alert(1)" not in html
    assert "&lt;script&gt;alert(1)&lt;/script&gt;&amp;" in html
    for text in ("WRONG: off by one", "Roofline", "Speed-up, with 95 % intervals", "Every contender", "History",
                 "short_scoreboard", "profile of nothing", "quality", "driver", "prefers-color-scheme",
                 'name="viewport"', "index_put"):  # fmt: skip
        assert text in html, text
    assert html.count("<svg") >= 3


def test_figures_take_the_colours_of_the_page(html):
    drawn = "".join(re.findall(r"<svg.*?</svg>", html, re.DOTALL))
    assert "currentColor" in drawn
    for colour in ("#ffffff", "#000000", "#b0b0b0", "<style", "<metadata"):
        assert colour not in drawn


def test_the_same_results_give_the_same_page(only_store):
    assert page.html(page.collect(only_store)) == page.html(page.collect(only_store))


def test_markdown_has_the_same_tables(content):
    text = page.markdown(content)
    assert text.startswith("# kvstrata: results")
    assert "## store on NVIDIA H200" in text
    assert "| case | us | 95 % |" in text
    for line in (line for line in text.splitlines() if line.startswith("|")):
        assert line.endswith("|")


def test_report_command_writes_html_and_markdown(only_store, tmp_path):
    out, notes = tmp_path / "deep" / "r.html", tmp_path / "r.md"
    given = ["--results", str(only_store), "--out", str(out), "--markdown", str(notes)]
    done = CliRunner().invoke(app, ["report", *given])
    assert done.exit_code == 0, done.output
    assert out.read_text().rstrip().endswith("</html>")
    assert notes.exists()
    assert done.stdout.splitlines() == [f"written: {out}", f"written: {notes}"]
    done = CliRunner().invoke(app, ["report", "--results", str(tmp_path / "none"), "--out", str(out)])
    assert done.exit_code == 2
    assert "run kvstrata bench store --save" in done.stderr
    done = CliRunner().invoke(app, ["report", "--out", str(out), "--check"])
    assert done.exit_code == 2


def test_history_is_that_of_the_revisions_kept():
    points = [history.Point(f"r{i}", "2026-01-01", {"a": 10.0 / (1 + i), "b": 5.0}, 1.5) for i in range(3)]
    drawn = figures.history(points, "k")
    assert drawn is not None
    assert all(f"r{i}" in drawn for i in range(3))
    assert figures.history(points[:1], "k") is None
    alone = [history.Point("r0", "d", {"a": 1.0}, None), history.Point("r1", "d", {"b": 1.0}, None)]
    assert figures.history(alone, "k") is None  # no case in two revisions


def test_a_result_in_which_all_is_wrong_still_makes_a_page(results, tmp_path):
    data = json.loads((results / "nvidia-h200" / "store.json").read_text())
    for case in data["cases"]:
        case["rows"] = [{**row, "us": None, "correct": False, "error": "no", "tb_s": None} for row in case["rows"]]
    (tmp_path / "nvidia-h200").mkdir()
    (tmp_path / "nvidia-h200" / "store.json").write_text(json.dumps(data))
    text = page.html(page.collect(tmp_path))
    assert "WRONG: no" in text
    assert "kvstrata: no" in text  # what is wrong of ours stands first


def test_a_result_outside_git_has_one_point(results):
    (point,) = history.points(results / "nvidia-h200" / "store.json")
    assert len(point.us) == 4  # the wrong one has no time


def browser() -> str | None:
    """A Chromium on the PATH, or one that playwright fetched."""
    found = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    fetched = sorted((Path.home() / ".cache" / "ms-playwright").glob("chromium*/chrome-linux*/*"))
    return found or next((str(path) for path in fetched if path.name in ("chrome", "headless_shell")), None)


@pytest.mark.parametrize("width", [390, 1200])
def test_in_a_browser_nothing_overflows(html, tmp_path, width):
    """The page measures itself in headless Chromium: it is as wide as the window, figures are drawn, tables scroll."""
    program = browser()
    if program is None:
        pytest.skip("no Chromium here")
    measure = """<iframe id="w" style="width:%dpx;height:900px;border:0"></iframe><script>
    const f = document.getElementById("w");
    f.onload = () => { const d = f.contentDocument, e = d.documentElement;
      const wide = [...d.querySelectorAll(".scroll")].filter(s => s.scrollWidth > s.clientWidth + 1).length;
      const svg = [...d.querySelectorAll("section svg")].map(s => s.getBoundingClientRect());
      document.title = JSON.stringify({page: e.scrollWidth, window: e.clientWidth, wide,
        figures: svg.filter(b => b.width > 200 && b.height > 60).length, all: svg.length}); };
    f.srcdoc = %s;</script>"""
    quoted = json.dumps(html).replace("</", "<\\/")
    wrapped = tmp_path / "w.html"
    wrapped.write_text(f"<!DOCTYPE html><title>?</title>{measure % (width, quoted)}")
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--virtual-time-budget=5000"]
    where = [f"--user-data-dir={tmp_path / 'user'}", "--window-size=1300,1000"]
    command = [program, *options, *where, "--dump-dom", wrapped.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    title = re.search(r"<title>(.*?)</title>", done.stdout)
    assert title is not None, done.stderr[-2000:]
    assert title.group(1) != "?", done.stderr[-2000:]
    seen = json.loads(title.group(1).replace("&quot;", '"'))
    assert seen["window"] == width
    assert seen["page"] <= width
    assert seen["figures"] == seen["all"] >= 3
    assert (seen["wide"] > 0) or width > 1000


@pytest.fixture
def replay() -> Report:
    """The cases of replay that differ in batch and columns, called and captured; figures of this repository."""
    return load(ROOT / "results" / "nvidia-h200" / "replay.json")


def cells(table: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in table.splitlines() if line[:1] == "|"]


def test_a_pivot_by_a_parameter_has_every_case_once(replay):
    options = {"rows": "fa-*[0-9]", "contenders": "kvstrata", "pivot": "us,vs_peer", "by": "columns"}
    head, _, *lines = cells(render.table(replay, options).document())
    assert head == ["style bs (us, vs best peer)", "columns 16", "columns 512", "columns 4096", "columns 8192"]
    assert [line[0] for line in lines] == ["fa 1", "fa 16", "fa 64", "fa 256"]
    case = next(case for case in replay.cases if case.name == "fa-64x4096")
    us, against = case.row("ours").us.median, case.row("ours").vs_peer
    assert lines[2][3].startswith(f"{us:.2f}, {against.ratio:.2f}x [")
    assert lines[2][3].endswith(f"] {against.name}")
    with pytest.raises(ValueError, match="kvstrata shares its cell"):  # the captured case has the same parameters
        render.table(replay, options | {"rows": "fa-*"}).document()
    with pytest.raises(ValueError, match="by 'T': fa-1x16 has style, bs, columns"):
        render.table(replay, options | {"by": "T"}).document()


def test_times_of_whole_steps_are_milliseconds(replay):
    row = next(case for case in replay.cases if case.name == "fa-64x4096").row("ours")
    options = {"rows": "fa-64x4096", "contenders": "kvstrata", "columns": "case,ms,mean_ms,slowest_ms"}
    head, _, line = cells(render.table(replay, options).document())
    assert head == ["case", "ms", "mean", "slowest"]
    times = (row.us.median, sum(row.samples) / len(row.samples), max(row.samples))
    assert line == ["fa-64x4096", *(f"{us / 1000:.2f}" for us in times)]


def test_targets_are_met_or_missed_by_the_figures(replay):
    case = next(case for case in replay.cases if case.name == "fa-64x4096")
    host = {name: us.median for name, us in case.host.items()}
    ratio = host["kvstrata"] / host["bare launch"]
    lines = [
        f"fa-64x4096: host kvstrata / host bare launch <= {ratio + 0.01:.2f}",
        f"fa-64x4096: host kvstrata / host bare launch <= {ratio - 0.01:.2f}",
        f"fa-64x4096: host kvstrata / host bare launch >= {ratio + 0.01:.2f}",
        "fa-64x4096: gpu kvstrata + host kvstrata / bytes + gpu empty >= 0",
    ]
    _, _, *rows = cells(render.table(replay, {"targets": ";\n".join(lines) + ";"}).document())
    assert [row[-1] for row in rows] == ["met", "missed", "missed", "met"]
    assert rows[0][:3] == ["host kvstrata / host bare launch", "fa-64x4096",
                           f"{host['kvstrata']:.2f} / {host['bare launch']:.2f}"]  # fmt: skip
    low, high = map(float, rows[0][5].split("-"))
    assert low <= float(rows[0][4]) <= high
    gpu = {row.name: row.us.median for row in case.rows}
    ideal = gpu["empty"] + 1e-6 * case.bytes / replay.peak["tb_s"]
    assert rows[3][0] == "(gpu kvstrata + host kvstrata) / (bytes + gpu empty)"
    assert rows[3][2] == f"{gpu['kvstrata'] + host['kvstrata']:.2f} / {ideal:.2f}"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("fa-64x4096: host kvstrata <= 1", "expected 'case: time / time <= number'"),
        ("fa-9x9: host kvstrata / bytes <= 1", "no case 'fa-9x9'"),
        ("fa-64x4096: cpu kvstrata / bytes <= 1", "expected host, gpu, mean or slowest"),
        ("fa-64x4096: gpu nobody / bytes <= 1", "fa-64x4096 has kvstrata, sliced"),
        ("fa-64x4096-graph: host kvstrata / bytes <= 1", "fa-64x4096-graph has none"),
    ],
)
def test_a_target_that_cannot_be_read_is_named(replay, line, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        render.table(replay, {"targets": line}).document()


def test_a_marker_may_span_lines(replay):
    text = (
        '<!-- kvstrata:replay targets="\nfa-64x4096: gpu sliced / gpu kvstrata >= 1;\n" -->\n<!-- /kvstrata:replay -->'
    )
    once = publish.render_document(text, [replay])
    assert "| gpu sliced / gpu kvstrata | fa-64x4096 |" in once
    assert publish.render_document(once, [replay]) == once


def test_figures_of_two_panels_show_every_method(replay, tmp_path):
    sizes = [case.params["bs"] for case in groups(replay, View("bs", rows="fa-*x16"))["fa-16"]]
    assert sizes == [1, 16, 64, 256]  # and none of the captured ones
    made = publish.figures([replay], tmp_path)
    assert [path.name for path in made] == [
        f"replay-nvidia-h200-{name}.svg" for name in ("fa-4096", "nsa-4096", "fa-64")
    ]
    drawn = [path.read_text(encoding="utf-8") for path in made]
    for svg in drawn:  # matplotlib names what it draws as shapes
        assert all(f"<!-- {text} -->" in svg for text in ("device us", "host us", "kvstrata", "in graph", "empty"))
        assert "<!-- bare launch -->" not in svg
    assert drawn[2].count("<!-- 8192 -->") == 2  # at either panel
    assert [path.read_text(encoding="utf-8") for path in publish.figures([replay], tmp_path)] == drawn
