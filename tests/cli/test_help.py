"""The help shows commands by purpose, and a shell completes them and the values of their options."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from typer.main import get_command

from gpipe_bench.cli import application, main
from gpipe_bench.cli.app import _COMMANDS
from gpipe_bench.schedules import SCHEDULES

WITHOUT_TORCH = (
    "import sys; sys.modules['torch'] = None; sys.argv[0] = 'gpipe-bench'; from gpipe_bench.cli import main; main()"
)


def helped(capsys, *command):
    with pytest.raises(SystemExit) as caught:
        main([*command, "--help"])
    assert not caught.value.code
    return capsys.readouterr().out


def test_the_help_is_one_screen_of_commands(capsys):
    lines = helped(capsys).splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    assert [line.split()[0] for line in lines if line.startswith("  ")] == [
        *("simulate", "emulate", "explain", "advise", "schedule", "playground", "run", "profile"),
        *("table", "compare", "verify", "report", "figure", "cite"),
    ]


def test_the_help_names_every_command(capsys):
    words = {word.strip(".,") for word in helped(capsys).split()}
    assert words >= _COMMANDS.keys()


@pytest.mark.parametrize(
    ("command", "option", "values"),
    [
        ("simulate", "checkpoint", "always, except_last, never"),
        ("simulate", "schedule", f"{', '.join(SCHEDULES)}"),
        ("simulate", "profile", "a100, h100, h200, p100, p40, v100"),
        ("simulate", "network", "ndr400, hdr200, ethernet100, ethernet10, gloo, ideal"),
        ("emulate", "optimizer", "sgd, momentum, rmsprop, adam, adamw"),
        ("run", "transfer", "direct, host"),
        ("run", "device", "cpu, cuda"),
        ("run", "variant", "baseline, dep-x-x, dep-str-x, dep-str-ptl"),
    ],
)
def test_an_option_says_the_values_of_its_choices(command, option, values):
    (chosen,) = get_command(application([command])).commands.values()
    own = {parameter.name: parameter for parameter in chosen.params}
    assert f": {values}" in own[option].help


def test_commands_that_are_not_listed_have_help(capsys):
    assert "Join raw results" in helped(capsys, "collect")


COMPLETED = {
    ("simul",): ["simulate"],
    ("schedule", "ti"): ["time"],
    ("simulate", "--model", "u"): ["unet"],
    ("advise", "--model", "amoeba"): ["amoebanet-d"],
    ("run", "--checkpoint", ""): ["always", "except_last", "never"],
    ("run", "--variant", "dep-str-ptl"): [
        *("dep-str-ptl", "dep-str-ptl-clk-x", "dep-str-ptl-x-rec", "dep-str-ptl-x-x"),
    ],
    ("simulate", "--profile", "p"): ["p100", "p40"],
    ("simulate", "--optimizer", "a"): ["adam", "adamw"],
    ("balance", "--by", ""): ["time", "size", "simulation"],
}


def asked(words, shell):
    """The environment in which a shell asks what it may offer for the last of the words."""
    typed = ("gpipe-bench", *words)
    variables = {"_GPIPE_BENCH_COMPLETE": f"complete_{shell}", "_TYPER_COMPLETE_ARGS": " ".join(typed)}
    return {**variables, "COMP_WORDS": " ".join(typed), "COMP_CWORD": str(len(words))}


def answered(program, **variables):
    """What the shell reads from a program without PyTorch."""
    env = {**os.environ, **variables}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    assert done.stderr == ""
    return done.stdout


def test_bash_completes_without_pytorch():
    program = f"""
import os, sys
sys.modules["torch"] = None
sys.argv[0] = "gpipe-bench"
from gpipe_bench.cli import main
for variables in {[asked(words, "bash") for words in COMPLETED]!r}:
    os.environ.update(variables)
    try:
        main()
    except SystemExit:
        print(end="|")
"""
    offered = [answer.split() for answer in answered(program).split("|")[:-1]]
    assert dict(zip(COMPLETED, offered, strict=True)) == COMPLETED


def test_zsh_completes_commands():
    assert '"simulate"' in answered(WITHOUT_TORCH, **asked(("simul",), "zsh"))


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_the_completion_of_a_shell_is_printed(shell):
    printed = answered(WITHOUT_TORCH, _GPIPE_BENCH_COMPLETE=f"source_{shell}")
    assert f"_GPIPE_BENCH_COMPLETE=complete_{shell}" in printed
