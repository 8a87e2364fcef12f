"""The page of results: complete, self-contained, valid, the same twice; and whole in a browser where there is one."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvstrata.cli import app
from kvstrata.lab import ncu, profile
from kvstrata.lab.report import figures, history, page

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
        shutil.copy(path, folder / path.parent.name / path.name)
    store = json.loads((folder / "nvidia-h200" / "store.json").read_text())
    store["cases"] = store["cases"][:5]
    store["cases"][0]["name"] = "<script>alert(1)</script>&"
    store["cases"][1]["rows"][0] |= {"correct": False, "error": "off by one", "us": None}
    (folder / "nvidia-h200" / "store.json").write_text(json.dumps(store))
    kernels = ncu.parse((Path(__file__).parent / "data" / "ncu_raw.csv").read_text())
    for op in ("store", "nothing"):
        taken = profile.Profile(op, store["machine"], "ncu 1", [profile.CaseProfile("c", "ours", 1, kernels)])
        profile.save(taken, folder / "nvidia-h200" / f"profile_{op}.json")
    return folder


@pytest.fixture(scope="module")
def html(results) -> str:
    return page.html(page.collect(results))


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


def test_the_page_is_whole_and_asks_for_nothing(html):
    assert html.startswith("<!DOCTYPE html>")
    read = Reader(html)
    assert read.wrong == []
    assert read.open == []
    assert read.loads == []
    assert not re.search(r"@import|url\((?!#)", html)
    assert len(read.ids) == len(set(read.ids)), "ids of two figures clash"
    assert {link[1:] for link in read.links} <= set(read.ids)


def test_it_shows_everything_and_escapes_it(html):
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


def test_the_same_results_give_the_same_page(results, html):
    assert page.html(page.collect(results)) == html


def test_markdown_has_the_same_tables(results):
    text = page.markdown(page.collect(results))
    assert text.startswith("# kvstrata: results")
    assert "## store on NVIDIA H200" in text
    assert "| case | us | 95 % |" in text
    for line in (line for line in text.splitlines() if line.startswith("|")):
        assert line.endswith("|")


def test_the_command(results, tmp_path):
    out, notes = tmp_path / "deep" / "r.html", tmp_path / "r.md"
    done = CliRunner().invoke(app, ["report", "--results", str(results), "--out", str(out), "--markdown", str(notes)])
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
def test_in_a_browser_nothing_sticks_out(html, tmp_path, width):
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
        figures: svg.filter(b => b.width > 200 && b.height > 100).length, all: svg.length}); };
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
