"""The page as text: everything is in it, nothing is outside it, and the same files give the same bytes."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from gpipe_bench.cli import main
from gpipe_bench.report.cells import cell_tables
from gpipe_bench.report.page import write_report
from gpipe_bench.report.sections import table_of
from gpipe_bench.report.timelines import EVENT_FIELDS
from gpipe_bench.results.rows import Row
from gpipe_bench.results.timeline import KINDS
from tests.figures.synthetic import ablation_row, write_csv, write_rows


@pytest.fixture(scope="module")
def text(page):
    return page.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def data(text):
    found = re.search(r'<script type="application/json" id="timeline-data">(.*?)</script>', text, re.DOTALL)
    return json.loads(found.group(1))


def test_tags_are_closed(text):
    class Checker(HTMLParser):
        def __init__(self):
            super().__init__()
            self.open = []

        def handle_starttag(self, tag, attrs):
            if tag not in {"meta", "link", "img", "input", "br"}:
                self.open.append(tag)

        def handle_endtag(self, tag):
            assert self.open.pop() == tag

    checker = Checker()
    checker.feed(text)
    assert checker.open == []


def test_nothing_is_loaded_from_elsewhere(text):
    assert re.findall(r'(?:src|href)="(?!data:|#)[^"]*"', text) == []
    assert "url(" not in text
    assert "import(" not in text
    assert "default-src 'none'" in text


def test_every_figure_and_table_is_there(text):
    assert re.findall(r'<figure id="figure-([^"]+)"', text) == [
        "ablation",
        "ablation_shares",
        "timeline_dep-x-x",
        "stray",
    ]
    assert re.findall(r'<section id="([^"]+)"', text) == [
        *("findings", "provenance", "timelines", "section-ablation", "section-timeline", "section-predictions"),
        "section-figures",
    ]


def test_evidence_is_named(text):
    opened = re.findall(r'<summary><span class="badge \w+">(\w+)</span>', text)
    assert opened == ["published", "simulated", "measured"]


def test_captions_stand_below_their_figures(text, results):
    assert "What <em>each</em> brings" in text
    assert "One step of dep-x-x." in text


def test_captions_name_the_table_that_was_drawn(text, results):
    assert re.findall(r"Rows: .*?>([^<>]+\.csv)<", text) == [f"{results / 'results' / 'ablation.csv'}"]


@pytest.mark.parametrize(
    ("figure", "table"),
    [
        ("ablation_shares", "ablation"),
        ("timeline_dep-x-x", "ablation"),
        ("why_unet", "sweep_unet"),
        ("sweep_unet", "sweep_unet"),
        ("peers_host", "peers"),
        ("transparency_unet", "transparency"),
        ("stray", None),
        ("why_vit", None),
    ],
)
def test_a_figure_has_the_table_that_it_was_drawn_from(figure, table):
    tables = [
        Path(f"{name}.csv") for name in ("ablation", "sweep_unet", "peers", "transparency", "transparency_verdict")
    ]
    found = table_of(figure, tables)
    assert (found.stem if found else None) == table


def test_figures_have_room_for_their_letters(text):
    """2.6 pixels for a point: letters of 7 points have 18 pixels at most."""
    assert re.search(r'id="figure-ablation"[^>]* style="--width: 636px"', text)


def test_medians_stand_with_their_intervals(text):
    section = text[text.index('id="section-ablation"') :]
    cells = re.search(r"<tr><td>baseline</td>(.*?)</tr>", section[section.index(">measured</span> testnet") :]).group(1)
    assert re.search(r">3</td>", cells)
    assert re.search(r">\d+\.\d \[\d+\.\d, \d+\.\d\]</td>", cells)


def test_simulated_values_stand_beside_print():
    """Same setting and hardware: 44 against 40 is +10 %; other hardware is not compared."""
    printed = ablation_row("baseline", evidence="published", device="cuda P", throughput_samples_per_s=40.0)
    same = ablation_row("baseline", evidence="simulated", device="cuda P", throughput_samples_per_s=44.0)
    other = ablation_row("baseline", evidence="simulated", device="cuda H", throughput_samples_per_s=44.0)
    first, second, third = cell_tables([printed, same, other])
    assert "vs print" not in first.header
    assert second.lines[0][second.header.index("vs print")].text == "+10.0%"
    assert "vs print" not in third.header


def test_the_ideal_bubble_stands_beside_the_one_that_was_found():
    (table,) = cell_tables([ablation_row("baseline", bubble_fraction=0.5, partitions=4, chunks=8, microbatches=8)])
    place = table.header.index("bubble %")
    assert table.header[place + 1] == "ideal bubble %"
    assert [field.text for field in table.lines[0][place : place + 2]] == ["50.0", "27.3"]
    (table,) = cell_tables([ablation_row("baseline", bubble_fraction=None)])
    assert "ideal bubble %" not in table.header


def test_failures_have_their_reasons(text):
    assert re.search(r">oom \[\d\]</td>", text)
    assert "needed 3.1 GiB of 2.0 GiB" in text
    assert "copy_streams needs an accelerator" in text


def test_what_tables_say_cannot_become_markup(text):
    assert "&lt;b&gt;&amp;" in text
    assert "<b>&" not in text


def test_timelines_carry_every_task(data):
    assert data["fields"] == list(EVENT_FIELDS)
    assert [found["name"] for found in data["sets"]] == ["ablation, simulated", "ablation, measured"]
    slow, fast = data["sets"][0]["runs"]
    assert (slow["name"], fast["name"]) == ("baseline", "dep-str-ptl")
    # Eight micro-batches on four partitions: forward, backward, and recomputation of all but the last.
    assert len(slow["events"]) == 32 + 32 + 28
    assert {lane["stream"] for lane in slow["lanes"]} == {"compute"}
    assert [lane["stream"] for lane in fast["lanes"]].count("copy") == 3
    assert min(event[data["fields"].index("start_us")] for event in fast["events"]) == 0


def test_every_kind_of_task_has_a_letter_and_a_colour_of_its_own(data):
    kinds = data["kinds"]
    assert [kind["name"] for kind in kinds] == list(KINDS)
    for look in ("letter", "colour"):
        assert len({kind[look] for kind in kinds}) == len(KINDS)


def test_provenance_names_files_and_digests(text, results):
    import hashlib

    digest = hashlib.sha256((results / "results" / "ablation.csv").read_bytes()).hexdigest()
    assert digest in text
    assert f"<dt>commit</dt><dd>{'c' * 40}</dd>" in text


def test_the_same_files_give_the_same_bytes(page, results, tmp_path):
    again = write_report(results / "results", results / "figures", results / "captions", tmp_path / "again.html")
    assert again.read_bytes() == page.read_bytes()


def test_a_table_without_lines_says_so(tmp_path):
    (tmp_path / "sweep_mine.csv").write_text(",".join(Row.columns()) + "\n")
    write_rows(tmp_path / "sweep_other.csv", [ablation_row("baseline")])
    out = write_report(tmp_path, None, tmp_path, tmp_path / "report.html")
    written = out.read_text(encoding="utf-8")
    assert 'id="section-sweep"' in written
    assert "No line: nothing was run" in written


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


@pytest.mark.parametrize("option", ["--figures", "--captions"])
def test_another_folder_that_does_not_exist_is_refused(results, tmp_path, capsys, option):
    words = ["--results", results / "results", option, tmp_path / "nope", "--out", tmp_path / "report.html"]
    assert f"{option} must be a folder, got {tmp_path / 'nope'} (no such folder)" in refusal(capsys, *words)


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


def test_a_damaged_table_of_events_is_refused_by_name(results, tmp_path, capsys):
    shutil.copytree(results / "results", tmp_path / "results")
    damaged = tmp_path / "results" / "ablation_events.csv"
    damaged.write_bytes(damaged.read_bytes() + b"\xff\n")
    assert str(damaged) in refusal(capsys, "--results", tmp_path / "results", "--out", tmp_path / "report.html")


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


def test_a_link_in_the_place_of_a_draft_is_not_followed(results, tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (tmp_path / ".report.html.writing").symlink_to(victim)
    write_report(results / "results", None, tmp_path, tmp_path / "report.html")
    assert victim.read_text() == "mine"


def test_the_report_needs_no_torch(results, tmp_path):
    program = "import sys; sys.modules['torch'] = None\nfrom gpipe_bench.cli import main; main(sys.argv[1:])"
    words = ["report", "--results", str(results / "results"), "--out", str(tmp_path / "report.html")]
    run = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


def test_the_head_counts_the_rows_that_the_findings_count(tmp_path):
    folder = tmp_path / "results"
    folder.mkdir()
    write_rows(folder / "ablation.csv", [ablation_row("baseline", repeat=0), ablation_row("dep-x-x", repeat=0)])
    runs = [{"evidence": "measured", "status": "skipped", "reason": f"reason {k}"} for k in range(3)]
    write_csv(folder / "transparency.csv", ["evidence", "status", "reason"], runs)
    page = write_report(folder, None, None, tmp_path / "report.html").read_text(encoding="utf-8")
    assert "3 of 5 rows have no value." in page.replace("\N{NO-BREAK SPACE}", " ")
    assert re.search(r"measured</span> (\d+) rows", page).group(1) == "5"


def test_each_part_of_the_page_is_announced(results, tmp_path):
    said = []
    write_report(results / "results", None, None, tmp_path / "report.html", lambda *words: said.append(words))
    names = ("reading tables", "tables and figures", "findings", "timelines")
    assert said == [(done, 4, f"({name})") for done, name in enumerate(names)]
