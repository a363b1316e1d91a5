"""The committed figures are those of the committed reference tables, to the byte, whatever command draws them.

They fit a page. EVERY_CASE=1 looks whether they are legible, too, as test_layout.py does of invented ones.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gpipe_bench.cli import application
from gpipe_bench.data import REFERENCE_FOLDER
from gpipe_bench.errors import ConfigError
from gpipe_bench.figures.base import Selection
from gpipe_bench.figures.registry import FIGURES, draw_reference
from gpipe_bench.figures.style import drawing, save
from gpipe_bench.results.catalogue import figures_of, reference_figures, run_figures
from tests.cover import EVERY_CASE
from tests.figures.marks import cut
from tests.figures.synthetic import ablation_row, write_rows
from tests.figures.test_layout import check
from tests.project.pages import PAGES, commands

ROOT = Path(__file__).resolve().parents[2]
COMMITTED = ROOT / "figures" / "reference"


# PDF and PNG show what the SVG file shows: those of one machine are compared.
MACHINE = "measured/1x-nvidia-h100-80gb-hbm3"
PRINTED = [words for text in PAGES.values() for words in commands(text) if words[:2] == ["gpipe-bench", "figure"]]


HIGHEST_IN = 6.0
DRAWN = {f"{one.place}/{one.name}": one for one in reference_figures(REFERENCE_FOLDER)}


def files(folder):
    """Those of studies are drawn, and looked at, elsewhere."""
    own = (path for path in sorted(folder.rglob("*.*")) if not path.name.startswith(("peers", "transparency_")))
    return {path.relative_to(folder): path.read_bytes() for path in own}


def test_there_is_a_figure_for_each_table():
    expected = {path.relative_to(COMMITTED) for f in reference_figures(REFERENCE_FOLDER) for path in f.paths(COMMITTED)}
    assert set(files(COMMITTED)) == expected


@pytest.mark.parametrize("name", DRAWN)
def test_a_redrawn_figure_is_the_committed_one(name, tmp_path, texts_of, monkeypatch):
    if not EVERY_CASE:
        monkeypatch.setattr("gpipe_bench.figures.style.SUFFIXES", (".svg",))
    one, drawn = DRAWN[name], []

    def noted(figure, *more):
        drawn.append(figure)
        return save(figure, *more)

    monkeypatch.setattr("gpipe_bench.figures.base.save", noted)
    for path in FIGURES[one.kind].draw(one.table, tmp_path / one.name, Selection(one.evidence)):
        assert path.read_bytes() == (COMMITTED / one.place / path.name).read_bytes(), path.name
    (figure,) = drawn
    if EVERY_CASE:
        with drawing():
            check(figure, texts_of(figure))
            assert cut(figure) == []
    # Verdicts have a line for each behaviour, as high as a line of text.
    assert figure.get_figheight() <= (10.0 if one.kind == "verdicts" else HIGHEST_IN)


def test_every_form_of_a_redrawn_figure_is_the_committed_one(tmp_path):
    shutil.copytree(REFERENCE_FOLDER / MACHINE, tmp_path / "tables" / MACHINE)
    list(draw_reference(tmp_path / "redrawn", tmp_path / "tables"))
    place = MACHINE.replace("/", "-")
    assert files(tmp_path / "redrawn" / place) == files(COMMITTED / place)


@pytest.mark.parametrize("words", PRINTED, ids=" ".join)
def test_a_printed_command_gives_the_committed_figure(words, monkeypatch):
    drawn = []

    def draw(figure, table, stem, selection):
        drawn.append((figure.name, table.resolve(), stem.name, selection))
        return []

    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("gpipe_bench.figures.base.Figure.draw", draw)
    done = CliRunner().invoke(application(), words[1:])
    assert done.exit_code == 0, done.output
    ((kind, table, name, selection),) = drawn
    if selection.variant:
        assert words[words.index("--variant") + 1] == selection.variant
        return
    one = DRAWN["-".join(table.parent.relative_to(REFERENCE_FOLDER).parts) + f"/{name}"]
    assert (kind, table, selection) == (one.kind, one.table, Selection(one.evidence))


def test_the_text_of_a_figure_is_text():
    for path in COMMITTED.rglob("*.svg"):
        found = re.findall(r"<text [^>]*>([^<]+)</text>", path.read_text())
        assert {"published", "simulated", "emulated", "measured"} & set(found), path


def test_the_title_of_a_figure_is_a_sentence_about_its_rows():
    titles = {path: re.search(r"<dc:title>(.*?)</dc:title>", path.read_text())[1] for path in COMMITTED.rglob("*.svg")}
    short = {str(path): title for path, title in titles.items() if len(title.split()) < 6}
    assert short == {}


def test_what_is_computed_is_not_called_published_alone():
    words = (COMMITTED / "published" / "zero_bubble.svg").read_text()
    assert re.findall(r"<rdf:li>(.*?)</rdf:li>", words) == ["published", "computed"]


def test_a_run_has_a_figure_of_each_kind_of_evidence():
    found = run_figures({"ablation": ["simulated", "measured"], "sweep_unet": ["simulated"]}, ["simulated"])
    assert [*found] == [
        *("ablation_simulated", "ablation_shares_simulated", "ablation_timelines_simulated", "ablation_measured"),
        *("sweep_unet_simulated", "why_unet_simulated"),
    ]
    drawn = found["why_unet_simulated"]
    assert (drawn.kind, str(drawn.table), drawn.evidence) == ("why", "results/sweep_unet.csv", "simulated")
    assert [one.name for one in figures_of(Path("schedules.csv"), "emulated")] == ["schedules_bubbles"]


def test_a_table_of_two_kinds_of_evidence_gives_two_figures(tmp_path):
    kinds = ("simulated", "measured")
    rows = [ablation_row("baseline", evidence=kind, throughput_samples_per_s=1.0) for kind in kinds]
    path = write_rows(tmp_path / "rows.csv", rows)
    words = ["figure", "ablation", "--rows", str(path), "--out", str(tmp_path / "figure")]
    assert CliRunner().invoke(application(), words).exit_code == 0
    assert {file.name for file in tmp_path.glob("*.svg")} == {"figure_simulated.svg", "figure_measured.svg"}


def test_a_reference_without_tables(tmp_path):
    with pytest.raises(ConfigError, match="reference must hold tables of rows"):
        list(draw_reference(tmp_path, tmp_path))
