"""Imports point one way, and what must start at once does not load PyTorch."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from gpipe_bench.bench.storage.sources import PACKAGES, module_file, source_files
from gpipe_bench.util.imports import imported_modules
from tests.project.tree import ROOT

# What each layer may import besides itself:
#
#   pure <- skip <- engine <- measure <--- bench <- cli        emulator: above engine, simulator; below bench
#    ^       ^        ^                     | |      |
#    |       |        +------ balance <-----+ |      |
#    |       |                   v            |      |
#    |       +--- models <--- simulator <-----+      |
#    +----------- native <-------+                   |
#    |                           ^                   |
#    +-- (and native) -------- emulator              |      distributed: above engine, below bench
#    +----------- figures <------ report <-----------+      studies: above all but report and cli; measure: above models
ALLOWED = {
    "pure": set(),
    "skip": {"pure"},
    "engine": {"pure", "skip"},
    "distributed": {"pure", "skip", "engine"},
    "models": {"pure", "skip"},
    "balance": {"pure", "skip", "engine", "simulator"},
    "measure": {"pure", "skip", "engine", "models"},
    "native": {"pure"},
    "machine": {"pure", "native"},
    "simulator": {"pure", "skip", "models", "native", "machine"},
    "emulator": {"pure", "skip", "engine", "models", "native", "machine", "simulator"},
    "figures": {"pure"},
    "report": {"pure", "figures"},
    "bench": {
        "pure",
        "skip",
        "engine",
        "distributed",
        "models",
        "balance",
        "measure",
        "machine",
        "simulator",
        "emulator",
    },
    "studies": {
        "pure",
        "engine",
        "distributed",
        "models",
        "measure",
        "machine",
        "simulator",
        "emulator",
        "figures",
        "bench",
        "skip",
        "balance",
    },
    "cli": {
        "pure",
        "skip",
        "engine",
        "models",
        "balance",
        "measure",
        "machine",
        "simulator",
        "emulator",
        "figures",
        "report",
        "bench",
    },
}
EXCEPTIONAL = {
    "gpipe_bench.engine.dispatch_mode": "skip",
    "gpipe_bench.engine.microbatch": "skip",
    "gpipe_bench.engine.nodes": "skip",
    "gpipe_bench.engine.sequential": "skip",
    "gpipe_bench.engine.runtime.saved": "skip",
    "gpipe_bench.engine.runtime.split": "skip",
    "gpipe_bench.__main__": "cli",
}
# Folders of what is large, each above what it may import; the calls and commands beside them are above all.
FOLDERS = {
    "simulator": (*("tracing", "hardware", "workloads", "memory", "steps", "published"),),
    "bench": (
        *("spec", "storage", "running", "published", "datapackage", "evaluation", "advice"),
        "experiments",
    ),
}
MODULES = source_files(PACKAGES)
# The workflow, --help, tables and figures use these; a first import of PyTorch takes seconds.
LIGHT = {
    "gpipe_bench.cli",
    "gpipe_bench.bench.experiments.workflow",
    "gpipe_bench.bench.evaluation.summary",
    "gpipe_bench.models.table",
}


def layer(module: str) -> str:
    """The layer of a module: the one named for it or a package above it, else that of its first folder, else pure."""
    for name, exception in EXCEPTIONAL.items():
        if module == name or module.startswith(f"{name}."):
            return exception
    folders = [part for part in module.split(".")[:2] if part in ALLOWED]
    return folders[0] if folders else "pure"


def test_imports_point_one_way():
    wrong = [
        f"{module} ({layer(module)}) imports {target} ({layer(target)})"
        for module, path in MODULES.items()
        for target in imported_modules(module, path, module_file)
        if layer(target) not in {layer(module), *ALLOWED[layer(module)]}
    ]
    assert wrong == []


def height(module: str) -> tuple[str, int] | None:
    """What a module is part of, and how far up in it the module is; None where that has no folders."""
    project, top, part, *_ = (*module.split("."), "", "")
    if project != "gpipe_bench" or top not in FOLDERS:
        return None
    folders = FOLDERS[top]
    return top, folders.index(part) if part in folders else len(folders)


def test_imports_inside_point_down():
    wrong = [
        f"{module} imports {target}"
        for module, path in MODULES.items()
        for target in imported_modules(module, path, module_file)
        if (own := height(module)) and (other := height(target)) and own[0] == other[0] and other > own
    ]
    assert wrong == []


@pytest.mark.parametrize("top", FOLDERS)
def test_every_folder_has_its_place(top):
    parts = {
        module.split(".")[2] for module in MODULES if module.startswith(f"gpipe_bench.{top}.") and module.count(".") > 2
    }
    assert parts == {*FOLDERS[top]}


def test_in_bench_every_module_is_in_a_folder():
    beside = {module for module in MODULES if module.startswith("gpipe_bench.bench.") and module.count(".") == 2}
    assert beside == {f"gpipe_bench.bench.{folder}" for folder in FOLDERS["bench"]}


def test_every_layer_has_modules():
    assert {layer(module) for module in MODULES} == set(ALLOWED)


def test_light_modules_start_without_torch():
    light = {module for module in MODULES if layer(module) in {"pure", "native", "figures", "report"}} | LIGHT
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
