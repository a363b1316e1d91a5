"""What docs/models.md shows works: its table, its example, its commands, its configuration."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import sys

import pytest
import yaml

from gpipe_bench.bench.experiments.config import parse_config
from gpipe_bench.cli import main
from gpipe_bench.models.table import MODELS, format_arguments, parse_arguments
from tests.project.tree import ROOT
from tests.workflow.checkouts import checkout, snakemake_in

PAGE = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
EXAMPLE = "examples/my_model.py"


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


COMMANDS = [shlex.split(line) for block in blocks("sh") for line in block.splitlines()]
OURS = [words for words in COMMANDS if words[:3] == ["python", "-m", "gpipe_bench"]]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with what the commands need, which is the current one."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "results").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def test_the_table_has_every_model_with_its_defaults():
    rows = re.findall(r"^\| `([^`]+)` \| `([^`]+)` \|", PAGE, re.MULTILINE)
    known = {name: arguments for name, arguments in rows if "=" in arguments}
    assert known == {name: format_arguments(parse_arguments(name, "")) for name in MODELS}


def test_the_example_is_the_one_in_the_repository():
    assert blocks("python")[0] == (ROOT / EXAMPLE).read_text(encoding="utf-8")
    assert blocks("yaml")[0] == (ROOT / "examples" / "my_model.yaml").read_text(encoding="utf-8")


@pytest.mark.parametrize("words", OURS, ids=lambda words: " ".join(words[3:6]))
def test_a_command_works_as_it_is_printed(folder, capsys, words):
    with pytest.raises(SystemExit) as caught:
        main(words[3:])
    printed = capsys.readouterr()
    assert not caught.value.code, printed.err
    assert printed.err == ""
    if "--out" in words:
        row = json.loads((folder / words[words.index("--out") + 1]).read_text())["row"]
        assert (row["model"], row["status"]) == (f"{EXAMPLE}:mlp", "ok")


def test_the_commands_are_all_that_take_a_model():
    assert {words[3] for words in OURS} == {"run", "balance", "simulate", "advise"}
    assert all(words in OURS or words[0] == "snakemake" for words in COMMANDS)


def test_the_call_that_is_shown_works(folder):
    from gpipe_bench.simulator import Model, simulate

    (call,) = re.findall(r"`(simulate\(Model.*?\))`", PAGE)
    step = eval(call, {"simulate": simulate, "Model": Model})
    assert step.status == "ok"


def test_the_sweep_runs_with_the_command_that_is_shown(tmp_path):
    (command,) = (words for words in COMMANDS if words[0] == "snakemake")
    config = parse_config(yaml.safe_load(blocks("yaml")[0]))
    place = checkout(tmp_path)
    shutil.copytree(ROOT / "examples", place / "examples")
    done = snakemake_in(place)(*command[3:], "--dry-run", "--quiet", "rules")
    assert done.returncode == 0, done.stdout
    assert config.sweep.simulated["mine"].model == f"{EXAMPLE}:mlp"


def test_numbers_of_parameters_are_those_of_gpt2():
    import torch

    with torch.device("meta"):
        model = MODELS["gpt2"].build()
    whole, head = (sum(part.numel() for part in module.parameters()) for module in (model, model[-1].linear))
    assert f"`gpt2` has {whole - head:,} parameters with a shared weight and {whole:,} without" in " ".join(
        PAGE.split()
    )


def test_the_model_that_is_shown_for_the_table_trains():
    (example,) = (block for block in blocks("python") if "ModelSpec(" in block)
    names = {"__name__": "page"}
    exec(compile(example, "models.md", "exec"), names)
    spec, small = names["MLP"], {"L": 2, "D": 8, "size": 4}
    model, (batch, target) = spec.build(**small), spec.make_batch(3, small)
    assert len(model) == spec.layers(spec.check(small))
    spec.loss(model(batch), target).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_links_lead_somewhere():
    links = re.findall(r"\]\((?!https?:)([^)#]+)", PAGE)
    assert links
    assert [link for link in links if not (ROOT / "docs" / link).exists()] == []
