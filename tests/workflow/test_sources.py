"""A rule notices an edit of the sources that its result comes from, and of no others."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gpipe_bench.suite.storage.sources import module_file, source_digest, source_files
from gpipe_bench.util.imports import imported_modules

ROOT = Path(__file__).resolve().parents[2]
MEASURING = ("gpipe_bench.suite.running.run",)
DRAWING = ("gpipe_bench.figures",)


def digests(place: Path) -> list[str]:
    """Digests for measuring and for drawing, by the copy of the package in ``place``."""
    program = f"from gpipe_bench.suite.storage.sources import source_digest as d; print(d(*{MEASURING}), d(*{DRAWING}))"
    run = subprocess.run([sys.executable, "-c", program], cwd=place, capture_output=True, text=True, check=True)
    return run.stdout.split()


@pytest.fixture
def copy(tmp_path):
    shutil.copytree(ROOT / "gpipe_bench", tmp_path / "gpipe_bench", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


@pytest.mark.parametrize(
    ("edited", "changes"),
    [
        ("gpipe_bench/engine/gpipe.py", [True, False]),
        ("gpipe_bench/measure/clock.py", [True, False]),
        ("gpipe_bench/models/unet.py", [True, False]),
        ("gpipe_bench/suite/running/device_profile.py", [False, False]),
        ("gpipe_bench/suite/experiments/grid.py", [False, False]),
        ("gpipe_bench/figures/style.py", [False, True]),
        ("gpipe_bench/results/rows.py", [True, True]),
        ("gpipe_bench/py.typed", [False, False]),
    ],
)
def test_an_edit_changes_the_digests_of_what_depends_on_it(copy, edited, changes):
    before = digests(copy)
    with (copy / edited).open("a") as file:
        file.write("\n# edited\n")
    assert [old != new for old, new in zip(before, digests(copy), strict=True)] == changes


def test_c_code_belongs_to_its_package(copy):
    before = digests(copy)
    (copy / "gpipe_bench/measure/new.c").touch()
    (copy / "gpipe_bench/figures/new.def").touch()
    (copy / "gpipe_bench/balance/new.c").touch()
    measured, drawn = digests(copy)
    assert before[0] != measured
    assert before[1] != drawn


def test_imports_for_annotations_are_no_dependency(tmp_path):
    path = tmp_path / "example.py"
    path.write_text(
        "from typing import TYPE_CHECKING\n"
        "from gpipe_bench.results import rows\n"
        "if TYPE_CHECKING:\n    from gpipe_bench.engine.gpipe import GPipe\n"
        "else:\n    import gpipe_bench.errors\n"
        "def later():\n    from .schedules.cycles import clock_cycles\n    import os.path\n"
    )
    found = set(imported_modules("gpipe_bench.example", path, module_file))
    assert found == {"gpipe_bench.results.rows", "gpipe_bench.errors", "gpipe_bench.schedules.cycles"}


def test_the_packages_above_a_module_are_dependencies():
    assert {"gpipe_bench", "gpipe_bench.suite"} < set(source_files(["gpipe_bench.suite.storage.raw"]))


def test_files_are_found_without_an_import():
    assert module_file("gpipe_bench.engine.gpipe").parts[-2:] == ("engine", "gpipe.py")
    assert module_file("gpipe_bench.engine").parts[-2:] == ("engine", "__init__.py")
    assert module_file("gpipe_bench.nowhere") is None
    assert module_file("torch") is None


def test_an_unknown_module_is_refused():
    with pytest.raises(ValueError, match=r"module must be one of this project's, got 'gpipe_bench\.nowhere'"):
        source_digest("gpipe_bench.nowhere")
