"""The page: everything is in it, nothing is outside it, and the same files give the same bytes."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from gpipe_bench.cli import main
from gpipe_bench.components import PUBLISHED
from gpipe_bench.drawing.colours import ACTION_COLOURS, ACTION_WORDS, TIMELINE_JS
from gpipe_bench.figures.style import BADGE_COLOURS, FAINT, INK
from gpipe_bench.playground.page import page_files
from gpipe_bench.report.page import write_report
from gpipe_bench.report.pictures import themed
from gpipe_bench.report.tables import answers, headline
from gpipe_bench.report.timelines import EVENT_FIELDS
from gpipe_bench.results.timeline import KINDS
from scripts.browser import BROWSERS, browser_path, opened_browser
from tests.figures.synthetic import ablation_row, cpu_ways, event_records, step_events, write_events, write_rows

ROOT = Path(__file__).resolve().parents[2]
MOST_BYTES = 3_000_000


class Parsed(HTMLParser):
    """What a page has: texts of tables by their id, ids of figures and sections, and what it loads."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tables, self.ids, self.loaded = [], {}, [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        if tag not in {"meta", "link", "input", "br"}:
            self.open.append(tag)
        if tag == "table":
            self.tables[found["id"]] = []
        if tag in {"figure", "section"}:
            self.ids.append(found["id"])
        self.loaded += [text for name, text in attrs if name in {"src", "href", "xlink:href"} and text[0] != "#"]

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in {"meta", "link", "input", "br"}:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "td" in self.open or "th" in self.open:
            self.tables[[*self.tables][-1]].append(data)


@pytest.fixture(scope="module")
def text(page):
    return page.read_text(encoding="utf-8")


def timelines_of(text):
    found = re.search(r'<script type="application/json" id="timeline-data">(.*?)</script>', text, re.DOTALL)
    return json.loads(found.group(1))


@pytest.fixture(scope="module")
def data(text):
    return timelines_of(text)


def test_the_committed_results_are_a_page_with_everything_in_it(tmp_path):
    path = write_report(ROOT / "results/reference", None, tmp_path / "report.html")
    found = Parsed(path.read_text(encoding="utf-8"))
    assert found.open == []
    assert path.stat().st_size <= MOST_BYTES
    figures = [f"figure-{svg.parent.name}-{svg.stem}" for svg in (ROOT / "figures/reference").glob("*/*.svg")]
    assert sorted(name for name in found.ids if name.startswith("figure-")) == sorted(figures)
    figures = re.findall(r"</strong>(.*?)</figcaption>", path.read_text(encoding="utf-8"), re.DOTALL)
    assert min(len(re.sub("<.*?>", "", caption)) for caption in figures) > 60
    assert {"answer", "timelines", "provenance"} <= set(found.ids)
    answer = " ".join(found.tables["answer-1"]).split()
    assert {"published", "simulated", "emulated", "measured", *PUBLISHED} <= set(answer)
    # The first line is published; the two simulated ones are of two autograd engines, and today's is emulated, too.
    assert [word for word in answer if word in {"30.7", "58.5", "29.1", "56.7", "35.0", "57.0"}] == [
        *("30.7", "58.5", "29.1", "56.7"),
        *("35.0", "57.0", "57.0"),
    ]
    assert {"plain", "1f1b"} <= set(" ".join(found.tables["answer-2"]).split())
    # In zb_v the second half of the partitions lies on the devices of the first, and is darker, as on the playground.
    sets = timelines_of(path.read_text(encoding="utf-8"))["sets"]
    v_shaped = next(run for one in sets for run in one["runs"] if run["name"] == "zb_v" and len(run["devices"]) > 1)
    depths = {lane["partition"]: lane["depth"] for lane in v_shaped["lanes"]}
    assert depths == {j: float(j >= len(depths) / 2) for j in depths}
    assert {lane["depth"] for lane in sets[0]["runs"][0]["lanes"]} == {0}


def test_nothing_is_loaded_from_elsewhere(text):
    assert Parsed(text).loaded == ["data:,"]
    assert re.findall(r"url\((?!#)|import\(", text) == []
    assert "default-src 'none'" in text


def test_a_figure_has_its_caption_evidence_and_table(text, results):
    figure = re.search(r'<figure id="figure-ablation_shares_simulated">(.*?)</figure>', text, re.DOTALL).group(1)
    assert "<text>word of ablation_shares_simulated</text>" in figure
    assert "metadata" not in figure
    assert '<span class="badge simulated">' in figure
    assert "A &lt; caption." in figure
    assert str(results / "results" / "ablation.csv") in figure
    assert "word of stray" in text


def test_the_answer_has_a_line_per_evidence_and_autograd_engine(text):
    answer = Parsed(text).tables["answer-1"]
    assert [word for word in answer if ", PyTorch" in word] == [
        "testnet on cpu Imaginary 9000, PyTorch 1.3",
        *("testnet on Imaginary H9, PyTorch 1.3", "testnet on Imaginary H9, PyTorch 2"),
        "testnet on cpu Imaginary 9000, PyTorch 2",
    ]
    assert "59.0 samples/s\n1.90\u00d7\n23.0 GiB (0.46\u00d7)" in answer


def test_the_answer_of_a_cpu_is_the_ways_to_run():
    (table,) = answers(cpu_ways())
    assert table.title == "Ways to run on a CPU: throughput over the plain loop, and peak memory"
    assert "the plain module with all cores in each operator is" in table.note
    assert table.header[2:4] == ["plain loop", "micro-batch loop"]
    (line,) = table.lines
    assert line[table.header.index("1f1b")].text.startswith("180 samples/s\n1.80\u00d7 [")
    assert line[table.header.index("zb_v")].text == "error"


def test_the_page_opens_with_one_sentence_and_two_timelines(text):
    (head,) = re.findall(r"<h1>(.*?)</h1>", text)
    assert head == (
        "With ordered backward passes, copy streams and portals, a pipeline trains testnet faster: "
        "1.90 (published) times on cpu Imaginary 9000, PyTorch 1.3; "
        "1.00 (simulated) times on Imaginary H9, PyTorch 1.3; "
        "1.00 (simulated) times on Imaginary H9, PyTorch 2."
    )
    places = [text.index(f'<section id="{name}"') for name in ("timelines", "words", "answer")]
    assert places == sorted(places)
    assert headline(cpu_ways()) == (
        "On this CPU, with one thread per partition's operators, "
        "1f1b trains testnet 1.80 times as fast as a plain loop."
    )
    assert headline([]) == ""


def test_report_and_playground_draw_with_one_script(text, data):
    assert TIMELINE_JS.read_text(encoding="utf-8") in text
    assert page_files()["timeline.js"] == TIMELINE_JS.read_bytes()
    assert [kind["words"] for kind in data["kinds"]][:5] == [*ACTION_WORDS.values()]
    assert [kind["colour"] for kind in data["kinds"]][:5] == [*ACTION_COLOURS.values()]


def contrast(colour, other):
    parts = [[int(one[start : start + 2], 16) / 255 for start in (1, 3, 5)] for one in (colour, other)]
    lights = [
        sum(
            weight * (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4)
            for weight, part in zip((0.2126, 0.7152, 0.0722), one, strict=True)
        )
        for one in parts
    ]
    return (max(lights) + 0.05) / (min(lights) + 0.05)


@pytest.mark.parametrize("colour", [*BADGE_COLOURS.values(), INK, FAINT])
def test_words_of_figures_can_be_read_on_the_dark_page(colour):
    dark = re.search(r"light-dark\(#\w+, (#\w+)\)", themed(f"font-size: 7px; fill: {colour.lower()}"))[1]
    assert contrast(dark, "#171717") >= 4.5


def test_areas_and_white_words_keep_their_colours():
    assert themed("fill: #56b4e9") == "fill: #56b4e9"
    assert themed("font-size: 7px; fill: #ffffff") == "font-size: 7px; fill: #ffffff"


def test_what_tables_say_cannot_become_markup(text):
    assert "&lt;b&gt;&amp;" in text
    assert "<b>&" not in text


def test_timelines_have_readable_names_and_every_task(data):
    assert data["fields"] == list(EVENT_FIELDS)
    assert [kind["name"] for kind in data["kinds"]] == list(KINDS)
    simulated, measured = data["sets"]
    assert (simulated["name"], measured["name"]) == ("ablation, simulated", "ablation, measured")
    assert [run["name"] for run in simulated["runs"]] == [
        f"{name} (PyTorch {torch})" for torch in ("1.3", "2") for name in ("baseline", "dep-str-ptl")
    ]
    assert [run["name"] for run in measured["runs"]] == ["dep-x-x"]
    assert len(simulated["runs"][0]["events"]) == 92


def test_schedules_are_told_apart_by_their_names_and_stand_after_ablations(tmp_path):
    rows, events = [], []
    for schedule, processes in (("1f1b", 1), ("1f1b", 2), ("zb_h1", 1)):
        cell = f"{schedule}-{processes}"
        setting = {"backward": "scheduled", "schedule": schedule, "processes": processes, "cell": cell}
        rows.append(ablation_row("dep-x-ptl", evidence="simulated", **setting))
        events += event_records(step_events(2, 2, copies=False), "dep-x-ptl", cell=cell, evidence="simulated")
    (tmp_path / "results").mkdir()
    for name, own in (("a_schedules", rows), ("ablation", rows[:1])):
        write_rows(tmp_path / "results" / f"{name}.csv", own)
        known = {row.cell for row in own}
        write_events(tmp_path / "results" / f"{name}_events.csv", [one for one in events if one["cell"] in known])
    shown = write_report(tmp_path / "results", None, tmp_path / "report.html").read_text(encoding="utf-8")
    sets = timelines_of(shown)["sets"]
    assert [one["name"] for one in sets] == ["ablation, simulated", "a schedules, simulated"]
    assert [run["name"] for run in sets[1]["runs"]] == ["1f1b", "1f1b in 2 processes", "zb_h1"]


def test_provenance_names_files_and_digests(text, results):
    assert hashlib.sha256((results / "results" / "ablation.csv").read_bytes()).hexdigest() in text
    assert f"<dt>commit</dt><dd>{'c' * 40}</dd>" in text


def test_the_same_files_give_the_same_bytes(page, results, tmp_path):
    again = write_report(results / "results", results / "figures", tmp_path / "again.html")
    assert again.read_bytes() == page.read_bytes()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_runs_are_chosen_and_figures_enlarged(page, width, scheme):
    pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if browser_path() is None:
        pytest.skip(f"no browser: none of {', '.join(BROWSERS)} in PATH; scripts/install_browser.sh installs one")
    with opened_browser() as opened:
        size = {"width": width, "height": 900}
        tab = opened.new_context(viewport=size, offline=True, color_scheme=scheme).new_page()
        faults = []
        tab.on("console", lambda message: faults.append(message.text))
        tab.on("pageerror", lambda error: faults.append(str(error)))
        tab.goto(page.as_uri())
        shown = tab.locator("#timeline[data-drawn]")
        assert shown.get_attribute("data-variant") == "baseline (PyTorch 1.3)"
        assert shown.get_attribute("data-other") == "dep-str-ptl (PyTorch 1.3)"
        tab.select_option("#timeline-set", label="ablation, measured")
        assert shown.get_attribute("data-variant") == "dep-x-x"
        tab.click("#timeline-in")
        assert float(shown.get_attribute("data-from")) > 0
        tab.locator(".picture").first.click()
        assert tab.locator("#viewer svg").bounding_box()["width"] > 0.9 * width
        tab.keyboard.press("Escape")
        assert tab.locator("#viewer").is_hidden()
        assert tab.evaluate("document.documentElement.scrollWidth") <= width
        if width < 500:
            ends = "[...document.querySelectorAll('#answer td, nav a')].map((one) => one.getBoundingClientRect().right)"
            assert max(tab.evaluate(ends)) <= width
            hidden = "[...document.querySelectorAll('#answer .scroll')].map((e) => e.scrollHeight - e.clientHeight)"
            assert max(tab.evaluate(hidden)) <= 0
        # The first forward task has the colour that it has on the playground.
        tab.select_option("#timeline-set", index=0)
        spot = """() => {
            const canvas = document.querySelector("#timeline-canvas"), pen = canvas.getContext("2d");
            const left = (canvas.clientWidth < 560 ? 44 : 128) + 2;
            return [...pen.getImageData(left * devicePixelRatio, 26 * devicePixelRatio, 1, 1).data].slice(0, 3);
        }"""
        assert "#{:02X}{:02X}{:02X}".format(*tab.evaluate(spot)) == ACTION_COLOURS["F"]
        paper = tab.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (paper == "rgb(255, 255, 255)") == (scheme == "light")
        assert faults == []


def refusal(capsys, *arguments):
    """What ``report`` says of bad input: one line, with status 2."""
    with pytest.raises(SystemExit) as caught:
        main(["report", *map(str, arguments)])
    assert caught.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_a_folder_that_does_not_exist_is_refused(tmp_path, capsys):
    out = tmp_path / "report.html"
    line = refusal(capsys, "--results", tmp_path / "nope", "--out", out)
    assert f"--results must be a folder, got {tmp_path / 'nope'} (no such folder)" in line
    assert "snakemake --cores 1 ablation" in line
    assert not out.exists()
    (tmp_path / "file").write_text("")
    assert "(a file)" in refusal(capsys, "--results", tmp_path / "file", "--out", out)


def test_a_folder_of_figures_that_does_not_exist_is_refused(results, tmp_path, capsys):
    words = ["--results", results / "results", "--figures", tmp_path / "nope", "--out", tmp_path / "report.html"]
    assert f"--figures must be a folder, got {tmp_path / 'nope'} (no such folder)" in refusal(capsys, *words)


def test_a_folder_without_tables_is_refused(results, tmp_path, capsys):
    (tmp_path / "ablation_events.csv").write_text("cell\n")
    words = ["--results", tmp_path, "--figures", results / "figures", "--out", tmp_path / "report.html"]
    line = refusal(capsys, *words)
    assert "--results must be a folder with tables (*.csv), got none" in line
    assert "snakemake --cores 1 ablation" in line


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "empty file"),
        (b"evidence,model\nmeasured,\xff\n", "utf-8"),
        (b"evidence,model\nmeasured,a,b\n", "fields"),
        (b"evidence,model\nmeasured\n", "fields"),
        (b"evidence,model\n", "at least one row"),
    ],
)
def test_a_damaged_table_is_refused_by_name(tmp_path, capsys, content, words):
    (tmp_path / "mine.csv").write_bytes(content)
    line = refusal(capsys, "--results", tmp_path, "--out", tmp_path / "report.html")
    assert str(tmp_path / "mine.csv") in line
    assert words in line


def test_a_broken_table_is_refused(results, tmp_path, capsys):
    rows = (results / "results" / "ablation.csv").read_text().replace(",simulated,", ",guessed,", 1)
    (tmp_path / "ablation.csv").write_text(rows)
    with pytest.raises(SystemExit) as caught:
        main(["report", "--results", str(tmp_path), "--out", str(tmp_path / "report.html")])
    assert caught.value.code == 2
    assert "evidence must be one of" in capsys.readouterr().err


def test_a_place_that_cannot_be_written_is_refused(results, tmp_path, capsys):
    (tmp_path / "taken").write_text("")
    with pytest.raises(SystemExit) as caught:
        main(["report", "--results", str(results / "results"), "--out", str(tmp_path / "taken" / "report.html")])
    assert caught.value.code == 2
    assert "output must be writable" in capsys.readouterr().err


def test_the_report_needs_no_torch(results, tmp_path):
    program = "import sys; sys.modules['torch'] = None\nfrom gpipe_bench.cli import main; main(sys.argv[1:])"
    words = ["report", "--results", str(results / "results"), "--out", str(tmp_path / "report.html")]
    run = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


def test_each_part_of_the_page_is_announced(results, tmp_path):
    said = []
    write_report(results / "results", None, tmp_path / "report.html", lambda *words: said.append(words))
    names = ("reading tables", "tables and figures", "timelines")
    assert said == [(done, 3, f"({name})") for done, name in enumerate(names)]
