"""What the README shows works: its example runs, its commands, targets, files and links exist."""

from __future__ import annotations

import csv
import re
import shlex

import pytest
import typer
import yaml
from typer.testing import CliRunner

from gpipe_bench.bench.experiments.config import parse_config
from scripts import readme
from scripts.readme import rendered
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
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


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


def test_tables_are_those_of_the_reference_results():
    assert rendered(README) == README, "run: make readme"


def test_the_table_of_errors_says_what_the_predictions_are_off():
    with (ROOT / "results/reference/simulated/p40/predictions.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["role"] == "predicted" and row["error_fraction"]]
    errors = [abs(float(row["error_fraction"])) for row in rows]
    assert f"| **all** | {len(rows)} | {sum(errors) / len(errors):.1%} |" in README


def test_a_changed_number_or_a_lost_mark_is_noticed():
    assert rendered(README.replace("| 30.7 |", "| 31.7 |", 1)) == README
    with pytest.raises(ValueError, match=r"tables must be errors, ablation, .* each once, got ablation"):
        rendered(README.replace("<!-- table: errors -->", "", 1))


def test_every_claim_has_a_command_an_expectation_and_a_time():
    claims = re.split(r"^### ", README.split("## Claims")[1].split("\n## ")[0], flags=re.MULTILINE)[1:]
    assert [claim.split(".")[0] for claim in claims] == [f"C{number}" for number in range(1, len(claims) + 1)]
    for claim in claims:
        assert re.search(r"^```sh\n\S", claim, re.MULTILINE), claim
        assert "**Expect**" in claim
        assert re.search(r"\*\*Takes\*\* \d+ (to \d+ )?(s|min)", claim), claim


def test_files_that_commands_name_exist():
    named = [word for words in COMMANDS for word in words if re.fullmatch(r"(tests|profiles)/\S+", word)]
    assert named
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_configurations_that_are_shown_are_valid():
    shown = re.findall(r"^```yaml\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    assert shown
    for text in shown:
        assert "sweep_mine" in parse_config(yaml.safe_load(text)).experiments()


def test_the_command_that_writes_the_tables_can_check_them(capsys):
    assert readme.main(["--check"]) == 0
    assert readme.main(["--chek"]) == 2
    assert "option must be --check or none, got --chek" in capsys.readouterr().err


def test_make_targets_exist():
    assert {words[0] for words in commands("make")} <= make_targets()
    assert "python -m scripts.check $(CHECKS)" in (ROOT / "Makefile").read_text()


def test_every_make_target_says_what_it_does():
    described = re.findall(r"^([a-z-]+):.* ## \S", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert set(described) == make_targets()


def test_workflow_targets_are_rules():
    targets = {words[2] for words in commands("snakemake")}
    files = [ROOT / "Snakefile", *(ROOT / "workflows" / "rules").glob("*.smk")]
    rules = "\n".join(path.read_text() for path in files)
    assert targets
    assert targets <= set(re.findall(r"^rule (\w+):", rules, re.MULTILINE))


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
