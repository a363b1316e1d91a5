"""Imports point one way, as the contracts in pyproject.toml say, and what must start at once does not load PyTorch."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from gpipe_bench.suite.storage.sources import PACKAGES, source_files
from tests.project.tree import ROOT

MODULES = source_files(PACKAGES)
ROOMS = ("data", "errors", "components", "figures", "native", "report", "results", "schedules", "util")
# The workflow, --help, tables and figures use these; a first import of PyTorch takes seconds.
LIGHT = {
    "gpipe_bench.cli",
    "gpipe_bench.suite.experiments.plan",
    "gpipe_bench.suite.evaluation.summary",
    "gpipe_bench.models.table",
}


def linted(*arguments, root=ROOT):
    program = Path(sys.executable).with_name("lint-imports")
    return subprocess.run([program, "--no-cache", *arguments], cwd=root, capture_output=True, text=True, check=False)


def test_imports_point_one_way():
    done = linted()
    assert done.returncode == 0, done.stdout


def test_the_contracts_see_an_import_that_points_up(tmp_path):
    (tmp_path / "gpipe_bench").mkdir()
    for room in ("simulator", "emulator"):
        (tmp_path / "gpipe_bench" / room).mkdir()
    for module, text in (("", ""), ("simulator", "import gpipe_bench.emulator"), ("emulator", "")):
        (tmp_path / "gpipe_bench" / module / "__init__.py").write_text(text)
    contract = re.search(r"name = \"Simulator and emulator.*?\n\n", (ROOT / "pyproject.toml").read_text(), re.DOTALL)
    settings = f'[tool.importlinter]\nroot_package = "gpipe_bench"\n\n[[tool.importlinter.contracts]]\n{contract[0]}'
    (tmp_path / "pyproject.toml").write_text(settings)
    done = linted(root=tmp_path)
    assert done.returncode == 1, done.stdout
    assert "gpipe_bench.simulator is not allowed to import gpipe_bench.emulator" in done.stdout.replace("\n", " ")


def test_the_page_of_the_house_has_every_room():
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    rooms = {module.split(".")[1] for module in MODULES if module.startswith("gpipe_bench.")} - {"__main__"}
    assert {room for room in rooms if f"`{room}`" not in page} == set()


def test_light_modules_start_without_torch():
    light = {module for module in MODULES if module.startswith(tuple(f"gpipe_bench.{room}" for room in ROOMS))} | LIGHT
    program = f"import sys; sys.modules['torch'] = None\nfor name in {sorted(light)}: __import__(name)"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


def test_tables_are_read_and_written_with_pandas():
    # csv remains for the header of a table that pandas then reads, for predictions, which take less time than loading
    # pandas, for schedules, whose lines differ in length, and for times of layers, which are a model.
    sources = [path for folder in ("gpipe_bench", "models", "scripts") for path in (ROOT / folder).rglob("*.py")]
    own = [path for path in sources if re.search(r"^import csv$", path.read_text(), re.MULTILINE)]
    assert {str(path.relative_to(ROOT)) for path in own} == {
        "gpipe_bench/results/tables.py",
        "gpipe_bench/schedules/torch_csv.py",
        "models/measured.py",
    }
