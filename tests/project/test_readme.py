"""What the README shows works: its example runs, its commands, targets, files and links exist."""

from __future__ import annotations

import csv
import re
import shlex

import pytest
import typer
from typer.testing import CliRunner

from gpipe_bench.bench.config import SuiteConfig
from tests.project.tree import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
COMMANDS = [
    shlex.split(line, comments=True)
    for block in re.findall(r"^```sh\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    for line in block.splitlines()
]
INLINE = [shlex.split(text) for text in re.findall(r"`(make [a-z][^`]*)`", README)]


# Examples that train: loss and gradients must be there.
TRAINING = [example for example in EXAMPLES if ".backward()" in example]


def commands(*start: str) -> list[list[str]]:
    """What follows ``start`` in every command that begins so."""
    return [words[len(start) :] for words in [*COMMANDS, *INLINE] if words[: len(start)] == list(start)]


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def test_the_two_commands_come_first():
    assert COMMANDS[:2] == [["make", "ablation"], ["make", "test"]]


@pytest.mark.parametrize("example", EXAMPLES)
def test_examples_run(example):
    names = {"__name__": "readme"}
    exec(compile(example, "README.md", "exec"), names)
    if example not in TRAINING:
        assert set(names) > {"__name__", "__builtins__"}
        return
    assert names["loss"].isfinite()
    gradients = [parameter.grad for parameter in names["layers"].parameters()]
    assert gradients
    assert all(gradient is not None and gradient.abs().sum() > 0 for gradient in gradients)


def test_an_example_trains():
    assert TRAINING


def test_the_error_of_the_predictions_is_that_of_their_file():
    with (ROOT / "results/reference/simulated/p40/predictions.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["role"] == "predicted" and row["error_fraction"]]
    errors = [abs(float(row["error_fraction"])) for row in rows]
    claim = f"{100 * sum(errors) / len(errors):.1f} % over {len(rows)} predicted cells"
    assert claim in " ".join(README.split())
    assert f"off by {100 * max(errors):.0f} %" in " ".join(README.split())


def test_make_targets_exist():
    assert {words[0] for words in commands("make")} <= make_targets()
    assert "python -m scripts.check $(CHECKS)" in (ROOT / "Makefile").read_text()


def test_every_make_target_says_what_it_does():
    described = re.findall(r"^([a-z]+):.* ## \S", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert set(described) == make_targets()


def test_workflow_targets_are_rules_and_experiments():
    targets = {words[2] for words in commands("snakemake")}
    rules = "\n".join(path.read_text() for path in (ROOT / "workflows" / "rules").glob("*.smk"))
    assert targets
    assert targets <= set(re.findall(r"^rule (\w+):", rules, re.MULTILINE))
    # Predictions are of all published tables, whatever an experiment asks for.
    assert targets - {"predictions"} <= set(SuiteConfig.experiments())


@pytest.mark.parametrize("words", commands("python", "-m", "gpipe_bench"), ids=shlex.join)
def test_package_commands_exist(words):
    from gpipe_bench.cli import app

    command = typer.main.get_command(app)
    while getattr(command, "commands", None):
        name, *words = words
        assert name in command.commands
        command = command.commands[name]
    options = {option for parameter in command.params for option in parameter.opts} | {"--help"}
    assert {word for word in words if word.startswith("-")} <= options
    help_page = CliRunner().invoke(app, ["--help"])
    assert help_page.exit_code == 0


def test_places_and_links_exist():
    # Rows of the table of places, and links that are no web addresses.
    table = README.split("## What is where")[1].split("\n## ")[0]
    places = [
        place for row in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE) for place in re.findall(r"`(.*?)`", row)
    ]
    places += re.findall(r"\]\((?!https?:)([^)]+)\)", README)
    assert len(places) > 5
    assert [place for place in places if not list(ROOT.glob(place.rstrip("/")))] == []


def test_every_component_is_explained():
    import dataclasses

    from gpipe_bench import Components

    for field in dataclasses.fields(Components):
        assert f"| `{field.name}` |" in README
