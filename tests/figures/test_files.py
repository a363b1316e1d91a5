"""The files: the same bytes at every drawing, self-contained, all three or none."""

import hashlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from gpipe_bench.errors import OutputError
from gpipe_bench.figures.ablation import ABLATION
from tests.figures.synthetic import (
    ablation_row,
    cpu_ablation,
    event_records,
    overlapping_events,
    published_ablation,
    write_events,
    write_rows,
)

ROOT = Path(__file__).parents[2]
DRAW = """
import sys
import tempfile
from pathlib import Path
from gpipe_bench.figures.base import Selection
from gpipe_bench.figures.registry import FIGURES
source, out = Path(sys.argv[1]), Path(sys.argv[2])
FIGURES["ablation"].draw(source / "rows.csv", out / "ablation", Selection("measured"))
FIGURES["timelines"].draw(source / "rows.csv", out / "timelines", Selection("measured", variant="dep-x-ptl"))
print(*(name for name in sys.modules if name.split(".")[0] == "torch" or name.startswith("gpipe_bench.")))
"""


@pytest.fixture(scope="module")
def drawn_twice(tmp_path_factory):
    """Two folders of figures, each drawn by a process of its own with other hashes and another matplotlibrc."""
    source = tmp_path_factory.mktemp("tables")
    write_rows(source / "rows.csv", [*cpu_ablation(), *published_ablation()])
    write_events(source / "rows_events.csv", event_records(overlapping_events(4, 4), "dep-x-ptl"))
    folders, modules = [], ""
    for seed in ("1", "2"):
        folder = tmp_path_factory.mktemp(f"figures{seed}")
        settings = folder / "matplotlibrc"
        settings.write_text(f"font.size: {seed}0\naxes.facecolor: {'red' if seed == '1' else 'blue'}\n")
        environment = {**os.environ, "PYTHONHASHSEED": seed, "MATPLOTLIBRC": str(settings), "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [sys.executable, "-c", DRAW, str(source), str(folder)],
            check=True, capture_output=True, text=True, env=environment,
        )  # fmt: skip
        modules = done.stdout
        settings.unlink()
        folders.append(folder)
    return folders, modules.split()


def digests(folder):
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(folder.iterdir())}


def test_redrawn_figures_are_the_same_bytes(drawn_twice):
    (first, second), _ = drawn_twice
    assert digests(first) == digests(second)
    assert len(digests(first)) == 6


def test_drawing_needs_neither_torch_nor_the_layers_above(drawn_twice):
    _, modules = drawn_twice
    assert not [name for name in modules if name.split(".")[0] == "torch" or name.startswith("gpipe_bench.models")]
    assert not [name for name in modules if name.split(".")[1:2] in (["suite"], ["engine"], ["measure"])]


def test_svg_has_text_pdf_its_fonts_and_neither_a_date(drawn_twice):
    (folder, _), _ = drawn_twice
    for stem in ("ablation", "timelines"):
        svg, pdf = (folder / f"{stem}.svg").read_text(), (folder / f"{stem}.pdf").read_bytes()
        assert ">measured</text>" in svg
        assert "<dc:date>" not in svg
        assert b"/FontFile2" in pdf
        assert b"CreationDate" not in pdf


def test_suffixes_are_added_to_a_stem_with_a_point(tmp_path):
    rows = write_rows(tmp_path / "rows.csv", [ablation_row("baseline", throughput_samples_per_s=1.0)])
    paths = ABLATION.draw(rows, tmp_path / "new" / "ablation.v1")
    assert [path.name for path in paths] == ["ablation.v1.svg", "ablation.v1.pdf", "ablation.v1.png"]
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == sorted(path.name for path in paths)


@pytest.mark.parametrize("suffix", [".svg", ".pdf", ".png"])
def test_a_suffix_of_a_picture_is_not_written_twice(tmp_path, suffix):
    rows = write_rows(tmp_path / "rows.csv", [ablation_row("baseline", throughput_samples_per_s=1.0)])
    paths = ABLATION.draw(rows, tmp_path / f"ablation.v1{suffix}")
    assert [path.name for path in paths] == ["ablation.v1.svg", "ablation.v1.pdf", "ablation.v1.png"]


def test_a_failed_write_leaves_the_old_files_alone(tmp_path, monkeypatch):
    rows = write_rows(tmp_path / "rows.csv", [ablation_row("baseline", throughput_samples_per_s=1.0)])
    out = tmp_path / "figures"
    ABLATION.draw(rows, out / "ablation")
    before = digests(out)
    mkstemp = tempfile.mkstemp

    def full_disk(**options):
        if len(list(out.iterdir())) == len(before) + 2:
            raise OSError(28, "No space left on device")
        return mkstemp(**options)

    monkeypatch.setattr(tempfile, "mkstemp", full_disk)
    write_rows(rows, [ablation_row("baseline", throughput_samples_per_s=2.0)])
    with pytest.raises(OutputError, match=r"output must be writable, got .*ablation\.png .*No space left"):
        ABLATION.draw(rows, out / "ablation")
    assert digests(out) == before


def test_a_folder_that_cannot_be_made_is_one_clear_error(tmp_path):
    rows = write_rows(tmp_path / "rows.csv", [ablation_row("baseline", throughput_samples_per_s=1.0)])
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(OutputError, match="output must be writable"):
        ABLATION.draw(rows, tmp_path / "file" / "ablation")


@pytest.mark.parametrize("out", ["", "/"])
def test_a_figure_has_a_name(tmp_path, out):
    rows = write_rows(tmp_path / "rows.csv", [ablation_row("baseline", throughput_samples_per_s=1.0)])
    with pytest.raises(OutputError, match="figure must have a file name"):
        ABLATION.draw(rows, Path(out))
