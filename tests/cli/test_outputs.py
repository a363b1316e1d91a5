"""Each option that names an output: a path that cannot be written is refused before the work, not after it."""

from __future__ import annotations

import shutil
from inspect import signature
from pathlib import Path

import pytest

from gpipe_bench.cli import main
from gpipe_bench.cli.app import application
from gpipe_bench.data import REFERENCE_FOLDER
from gpipe_bench.emulator.build import obstacle
from tests.project.tree import ROOT

SMALL = ("--model", "unet", "--model-args", "depth=2;B=1;C=4;size=16", "--partitions", "2")
MEASURED = ("--model", "unet", "--model-args", "depth=2;B=1;C=4;size=16", "--partitions", "2", "--device", "cpu")
P40 = ROOT / "gpipe_bench/machine/profiles/p40.yaml"
SPEED = str(REFERENCE_FOLDER / "simulated/p40/speed.csv")

# The option comes last. Inputs are absent where the command reads any: its first error is that of the output.
OUTPUTS = [
    ("simulate", *SMALL, "--out"),
    ("simulate", *SMALL, "--trace"),
    ("simulate", *SMALL, "--rows"),
    pytest.param(("emulate", *SMALL, "--out"), marks=pytest.mark.skipif(obstacle() is not None, reason="no compiler")),
    ("emulate", "absent.py", "--trace"),
    ("emulate", "absent.py", "--nproc", "2", "--trace"),
    ("explain", "absent.json", "--against", "gpipe", "--out"),
    ("advise", *SMALL[:4], "--rows"),
    ("advise", *SMALL[:4], "--rows", "{folder}/a.csv", "--figure"),
    ("advise", *SMALL[:4], "--schedule-csv"),
    ("schedule", "time", "absent.csv", "--out"),
    ("schedule", "write", "absent.csv", "--out"),
    ("playground", "--no-browser", "--pyodide", "absent", "--export"),
    ("run", *MEASURED, "--out"),
    ("run", *MEASURED, "--out", "{folder}/a.json", "--trace"),
    ("profile", "--device", "cpu", "--out"),
    ("compare", "absent.csv", "absent.csv", "--out"),
    ("verify", "absent.csv", "--out"),
    ("report", "--results", "absent", "--out"),
    ("figure", "shares", "--rows", "absent.csv", "--out"),
    ("figure", "reference", "--rows", "absent", "--out"),
    ("balance", *SMALL, "--by", "time", "--layers-out"),
    ("predictions", "--table", "unet-speed", "--cache", "{folder}/cache", "--out"),
    ("simulate-published", "unet-speed", "--out"),
    ("collect", "absent.json", "--experiment", "a", "--out"),
    ("published", "--folder", "absent", "--out"),
    ("trace", "--events", "absent_events.csv", "--variant", "baseline", "--out"),
    ("judge", "reference", "--out"),
    ("config", "write", "--config"),
    ("config", "write", "--config", "{folder}/a.yaml", "--schema"),
]
INPUTS = {"--cells", "--layers", "--rows", "--pyodide", "--folder", "--tolerances", "--predictions", "--claims"}
INPUTS |= {"--reference", "--results", "--figures", "--cache", "--published", "--events", "--table"}


def refusal(words, capsys):
    """The one line on stderr of a command that must end with status 2, and print nothing else."""
    with pytest.raises(SystemExit) as ended:
        main([*map(str, words)])
    printed = capsys.readouterr()
    assert (ended.value.code, printed.out) == (2, ""), printed.err
    assert printed.err.startswith("error: ")
    assert printed.err.count("\n") == 1
    return printed.err


@pytest.mark.parametrize(
    "words", OUTPUTS, ids=lambda words: "_".join(word.strip("-") for word in (words[0], words[-1]))
)
def test_an_output_that_cannot_be_written_is_refused_before_the_work(words, tmp_path, capsys):
    (tmp_path / "file").write_text("kept")
    path = tmp_path / "file" / "a.csv"
    said = refusal([*(word.format(folder=tmp_path) for word in words), path], capsys)
    assert f"output must be writable, got {tmp_path / 'file'}" in said
    assert [one.name for one in tmp_path.rglob("*")] == ["file"]
    assert (tmp_path / "file").read_text() == "kept"


def test_every_option_with_a_path_is_an_input_or_tested_as_an_output():
    app = application()
    commands = [(one.name, one.callback) for one in app.registered_commands]
    commands += [
        (group.name, one.callback)
        for group in app.registered_groups
        for one in group.typer_instance.registered_commands
    ]
    found = {
        (name, f"--{parameter.name.replace('_', '-')}")
        for name, function in commands
        for parameter in signature(function, eval_str=True).parameters.values()
        if "pathlib" in str(parameter.annotation) and "OptionInfo" in str(parameter.annotation)
    }
    known = {(words[0], words[-1]) for one in OUTPUTS for words in [getattr(one, "values", [one])[0]]}
    assert known <= found
    assert {option for _, option in found - known} <= INPUTS


@pytest.mark.parametrize(
    ("words", "source"),
    [
        (("verify", "FILE", "--out"), SPEED),
        (("compare", SPEED, "FILE", "--out"), SPEED),
        (("collect", "FILE", "--experiment", "a", "--out"), SPEED),
        (("figure", "tables", "--rows", "FILE.svg", "--out"), SPEED),
        (("explain", "FILE", "--against", "gpipe", "--out"), SPEED),
        (("schedule", "write", "FILE", "--out"), SPEED),
        (("trace", "--events", "FILE", "--variant", "baseline", "--out"), SPEED),
        (("simulate", *SMALL, "--profile", "FILE", "--out"), P40),
        (("simulate", *SMALL, "--rows", "FILE", "--out"), SPEED),
        (("simulate", "--model", "FILE:mlp", "--out"), ROOT / "examples/my_model.py"),
    ],
    ids=lambda words: "_".join((words[0], words[-2].strip("-"))) if isinstance(words, tuple) else "",
)
def test_an_output_does_not_overwrite_an_input_or_another_output(words, source, tmp_path, capsys):
    path = tmp_path / Path(source).name
    shutil.copy(source, f"{path}.svg" if "FILE.svg" in words else path)
    said = refusal([*(word.replace("FILE", str(path)) for word in words), path], capsys)
    assert "output must be another file than inputs and other outputs" in said
    (kept,) = [one for one in tmp_path.rglob("*") if one.is_file()]
    assert kept.read_bytes() == Path(source).read_bytes()
