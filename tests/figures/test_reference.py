"""The committed figures are those of the committed reference tables, to the byte."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest

from gpipe_bench.figures.reference import draw_reference
from gpipe_bench.results.catalogue import REFERENCE, reference_figures

ROOT = Path(__file__).resolve().parents[2]
COMMITTED = ROOT / "figures" / "reference"


# PDF and PNG show what the SVG file shows: those of one machine are compared. REFERENCE_PICTURES=all: of every one.
ALL = os.environ.get("REFERENCE_PICTURES") == "all"
MACHINE = "measured/1x-nvidia-h100-80gb-hbm3"


@pytest.fixture(scope="module")
def redrawn(tmp_path_factory):
    out = tmp_path_factory.mktemp("redrawn")
    with pytest.MonkeyPatch.context() as patch:
        if not ALL:
            patch.setattr("gpipe_bench.figures.style.SUFFIXES", (".svg",))
        # The committed ones were drawn by one process or several.
        list(draw_reference(out, ROOT / REFERENCE, 2))
    return out


def files(folder):
    """Those of studies are drawn, and looked at, elsewhere."""
    own = (path for path in sorted(folder.rglob("*.*")) if not path.name.startswith(("peers", "transparency_")))
    return {path.relative_to(folder): path.read_bytes() for path in own}


def test_there_is_a_figure_for_each_table():
    expected = {path.relative_to(COMMITTED) for f in reference_figures(ROOT / REFERENCE) for path in f.paths(COMMITTED)}
    assert set(files(COMMITTED)) == expected


def test_every_figure_fits_one_column_of_a_page_or_both(redrawn):
    for path in redrawn.rglob("*.svg"):
        width, height = re.search(r'<svg[^>]*?\swidth="([0-9.]+)pt" height="([0-9.]+)pt"', path.read_text()).groups()
        # A column of a page is 9 inches high, and a caption goes below.
        highest = {round(3.4 * 72, 1): 8.1, 7 * 72: 5}
        assert float(height) < highest[float(width)] * 72, path.name


def test_redrawn_figures_are_the_committed_ones(redrawn):
    committed, again = files(COMMITTED), files(redrawn)
    assert [str(path) for path in again if again[path] != committed.get(path)] == []
    assert {path.with_suffix("") for path in again} == {path.with_suffix("") for path in committed}


def test_every_form_of_a_redrawn_figure_is_the_committed_one(tmp_path):
    for part in ("published", MACHINE):
        shutil.copytree(ROOT / REFERENCE / part, tmp_path / "tables" / part)
    list(draw_reference(tmp_path / "redrawn", tmp_path / "tables"))
    place = MACHINE.replace("/", "-")
    assert files(tmp_path / "redrawn" / place) == files(COMMITTED / place)
