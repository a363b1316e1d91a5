"""Commands from raw results to what people read, and that none of them needs PyTorch."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import gpipe_bench
from gpipe_bench.cli import main
from gpipe_bench.data import DEFAULT_CONFIG
from gpipe_bench.suite.experiments.config import json_schema_text
from gpipe_bench.suite.running.run import failed_result
from gpipe_bench.suite.storage.raw import RawResult
from tests.suite.cells_of import cell, in_file, ok_result

WITHOUT_TORCH = """
import json, sys
sys.modules["torch"] = None
from gpipe_bench.cli import main
for name, arguments in json.loads(sys.argv[1]).items():
    try:
        main(arguments)
    except SystemExit as ended:
        if ended.code:
            sys.exit(f"{name}: {ended.code}")
"""


def call(*arguments):
    """Run a command in this process; it must succeed."""
    with pytest.raises(SystemExit) as caught:
        main(list(map(str, arguments)))
    assert not caught.value.code


@pytest.fixture
def results(tmp_path):
    """Raw results of four runs, as an experiment on a CPU leaves them."""
    made = cell(variant="dep-str-ptl")
    runs = [ok_result("baseline", 0), ok_result("baseline", 1, 12.0), ok_result("dep-x-ptl", 0, 20.0)]
    runs.append(failed_result(made, 0, "unsupported", made.unsupported()))
    for number, result in enumerate(runs):
        (tmp_path / f"{number}.json").write_text(result.to_json())
    return tmp_path


@pytest.fixture
def table(results):
    rows = results / "results" / "ablation.csv"
    call("collect", "--experiment", "ablation", "--out", rows, *sorted(results.glob("*.json")))
    return rows


def test_light_commands_start_without_torch(results):
    """One folder, one command after the other, in a process that cannot import PyTorch."""
    rows, events = "ablation.csv", "ablation_events.csv"
    commands = {
        "help": ["--help"],
        "run": ["run", *in_file(results, cell(variant="dep-str-ptl")), "--out", "raw/a.json"],
        "write": ["config", "write"],
        "check": ["config", "check"],
        "collect": ["collect", "--experiment", "ablation", "--out", rows, *(f"{k}.json" for k in range(4))],
        "table": ["table", "--rows", rows],
        "trace": ["trace", "--events", events, "--variant", "dep-str-ptl", "--out", "trace.json"],
        "figure": ["figure", "ablation", "--rows", rows, "--out", "figure"],
    }
    command = [sys.executable, "-c", WITHOUT_TORCH, json.dumps(commands)]
    env = {"PYTHONPATH": str(Path(gpipe_bench.__file__).parents[1]), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=results, env=env)
    assert done.returncode == 0, done.stderr
    assert RawResult.read(results / "raw" / "a.json").row.status == "unsupported"
    assert {path.name for path in results.iterdir()} >= {rows, events, "trace.json", "figure.svg", "config"}


@pytest.mark.parametrize(
    "command",
    [(), ("run",), ("profile",), ("collect",), ("table",), ("trace",), ("config",), ("config", "check")],
)
def test_every_command_explains_itself(command, capsys):
    call(*command, "--help")
    # the program's name is that of whatever runs the tests
    assert re.search(rf"Usage: .*{' '.join(command)} \[OPTIONS\]", capsys.readouterr().out)


def test_every_option_is_explained():
    import typer

    from gpipe_bench.cli import application

    def options(group, path=()):
        for name, command in group.commands.items():
            if hasattr(command, "commands"):
                yield from options(command, (*path, name))
            else:
                yield from ((*path, name, parameter) for parameter in command.params)

    silent = [entry for entry in options(typer.main.get_command(application())) if not getattr(entry[-1], "help", None)]
    assert silent == []


def test_the_version(capsys):
    call("--version")
    assert capsys.readouterr().out == f"{gpipe_bench.__version__}\n"


def test_nothing_asked_for_shows_the_help(capsys):
    call()
    assert "simulate" in capsys.readouterr().out


def test_an_unsupported_cell_is_a_result(tmp_path, capsys):
    out = tmp_path / "results" / "raw" / "x" / "0.json"
    call("run", *in_file(tmp_path, cell(variant="dep-str-x")), "--repeat", "2", "--out", out)
    result = RawResult.read(out)
    assert (result.row.status, result.row.repeat, result.cell) == ("unsupported", 2, cell(variant="dep-str-x").id)
    assert "see variant dep-x-x" in capsys.readouterr().err


@pytest.mark.parametrize(("error", "status"), [(MemoryError("no room"), "oom"), (RuntimeError("broken"), "error")])
def test_a_failed_cell_is_a_result_with_status_0(error, status, tmp_path, capsys, monkeypatch):
    def measure(cell, repeat):
        raise error

    monkeypatch.setattr("gpipe_bench.suite.running.run._measure", measure)
    call("run", *in_file(tmp_path, cell()), "--out", tmp_path / "a.json")
    row = RawResult.read(tmp_path / "a.json").row
    assert (row.status, row.reason) == (status, f"{type(error).__name__}: {error}")
    assert f"{status}: paper's executor, dep-x-ptl repeat 0: {row.reason}" in capsys.readouterr().err


def test_an_interrupted_run_leaves_nothing(tmp_path, capsys, monkeypatch):
    def measure(cell, repeat):
        raise KeyboardInterrupt

    monkeypatch.setattr("gpipe_bench.suite.running.run._measure", measure)
    with pytest.raises(SystemExit) as caught:
        main(["run", *in_file(tmp_path, cell()), "--out", str(tmp_path / "a.json")])
    assert caught.value.code == 130
    assert [path.name for path in tmp_path.iterdir()] == ["cells.json"]


def test_collect_names_failed_runs_on_stderr(results, capsys):
    (results / "9.json").write_text(failed_result(cell(variant="dep-x-x"), 1, "oom", "MemoryError: no room").to_json())
    call("collect", "--experiment", "a", "--out", results / "a.csv", *sorted(results.glob("*.json")))
    printed = capsys.readouterr()
    assert printed.err == "oom: dep-x-x n=2 m=2 repeat 1: MemoryError: no room\n"
    assert "with 5 rows" in printed.out


def test_the_table_shows_values_reasons_and_paths(table, capsys):
    capsys.readouterr()
    call("table", "--rows", table)
    text = capsys.readouterr().out
    for word in ("baseline", "11.0 [10.0, 12.0]", "dep-x-ptl", "unsupported", "measured", str(table), "_steps.csv"):
        assert word in text


@pytest.mark.parametrize(
    ("variant", "tasks", "remark"),
    [
        ("dep-str-ptl", [], "no timeline, unsupported: copy_streams needs an accelerator"),
        ("baseline", ["forward"], None),
    ],
)
def test_a_trace_of_a_variant_or_why_there_is_none(table, variant, tasks, remark):
    out = table.parent / "traces" / "ablation" / f"{variant}.json"
    call("trace", "--events", table.with_name("ablation_events.csv"), "--variant", variant, "--out", out)
    trace = json.loads(out.read_text())
    assert (trace["otherData"]["variant"], trace["otherData"].get("remark")) == (variant, remark)
    assert [event["cat"] for event in trace["traceEvents"] if event["ph"] == "X"] == tasks


def test_figures_are_three_files(table):
    stem = table.parent / "figures" / "timeline"
    call("figure", "timelines", "--rows", table, "--variant", "dep-str-ptl", "--out", stem)
    assert {path.suffix for path in stem.parent.iterdir()} == {".svg", ".pdf", ".png"}


def test_the_default_configuration_is_written_and_checked(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    call("config", "write")
    assert (tmp_path / "config" / "config.yaml").read_text() == DEFAULT_CONFIG.read_text()
    assert (tmp_path / "config" / "schema.json").read_text() == json_schema_text()
    call("config", "check")
    text = capsys.readouterr().out
    assert "device: cpu, 1 here" in text
    assert "ablation: 9 cells, 0 of them unsupported here; 27 runs; 64 cells simulated; 32 cells emulated" in text
