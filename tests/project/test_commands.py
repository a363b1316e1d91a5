"""Each command and example of README and docs works as printed, in a copy of the repository as a clone would give it.

Quick commands run. Slow ones do not, but all targets, options and files that a command names must exist.
"""

from __future__ import annotations

import csv
import os
import re
import shlex
import shutil
import subprocess
import sys
from itertools import takewhile
from pathlib import Path

import pytest
import typer
import yaml
from click import Command
from torch import Tensor
from typer.testing import CliRunner

from gpipe_bench.suite.experiments.config import parse_config
from tests.project.pages import PAGES, blocks, commands, lines, parts, printed
from tests.project.tree import ROOT
from tests.suite.cells_of import over_default

# What the first words of a command say, and why such a command is not run here.
NOT_RUN = {
    "make": "makes or changes .venv, then runs for minutes; the target must be in the Makefile",
    "snakemake": "runs for minutes; all targets of all pages are tried in dry runs",
    "python -m pytest": "other jobs run the tests; the paths must exist",
    "conda": "downloads an environment; a test of the locks reads its file",
    "pip install": "installs; the job of the wheel does so in an environment of its own",
    "python -m scripts.wheels": "a minute; scripts/check_wheel.py builds such wheels, a check of make test",
    "torchrun --nnodes": "needs two hosts; tests/distributed/test_two_hosts.py has two network namespaces",
    "gpipe-bench advise": "15 s; tests/suite/test_advice.py runs it on a small model",
    "gpipe-bench cite results/advice.csv": "cites what advise wrote; the test of what is printed runs both",
    "gpipe-bench predictions": "20 s; tests/suite/test_predictions.py runs it",
    "scripts/gpu_session.sh": "ten minutes, on a GPU; tests/cli/test_real_runs.py rehearses it on the CPU",
    "gpipe-bench profile": "measures a GPU; tests/suite/test_device_profile.py rehearses it on the CPU",
    "python -m studies.peers": "wants the optional packages; tests/studies rehearse it",
    "gpipe-bench emulate": "takes the one accelerator of a process; tests/emulator/test_script.py runs it",
    "gpipe-bench report --results results/reference": "tests/report/test_sources.py renders the reference results",
    "gpipe-bench judge gpipe_bench:1f1b": "minutes, and exit status 1 where an engine differs; tests/judge",
    "gpipe-bench playground": "serves until it is interrupted; tests/playground opens the page, exported, too",
    "gpipe-bench datapackage check": "17 s; tests/datapackage/test_check.py checks the reference results",
    "gpipe-bench datapackage take": "changes the reference results; tests/datapackage tries it on a copy",
    "gpipe-bench datapackage write": "rewrites the descriptor; tests/datapackage tries it on a copy",
}
EXAMPLES = [(page, index) for page, text in PAGES.items() for index, _ in enumerate(blocks(text, "python"))]
# Pages of which tests/figures draws every figure, or other pages have runs like theirs.
LONG = ("docs/distributed.md", "docs/figures.md", "docs/multi_gpu.md", "docs/workflow.md")
WITH_COMMANDS = [
    pytest.param(page, marks=pytest.mark.slow if page in LONG else ()) for page, text in PAGES.items() if lines(text)
]


def is_run(words: list[str]) -> bool:
    return not any(words[: len(start.split())] == start.split() for start in NOT_RUN)


def all_commands(*start: str) -> list[list[str]]:
    """The words after ``start`` of every command that begins with them."""
    found = [words for text in PAGES.values() for words in commands(text)]
    return [words[len(start) :] for words in found if tuple(words[: len(start)]) == start]


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """A copy of all tracked files, docs/workflow.md's ``my.yaml``, and the tables that ``make ablation`` leaves."""
    place = tmp_path_factory.mktemp("clone")
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if listed.returncode != 0:
        pytest.skip("needs git, to know which files a clone has")
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).exists():
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, place / name, follow_symlinks=False)
    for table in (place / "results/reference/simulated/p40").glob("ablation*.csv"):
        shutil.copy(table, place / "results")
    settings, *_ = blocks(PAGES["docs/workflow.md"], "yaml")
    (place / "my.yaml").write_text(settings)
    return place


@pytest.mark.parametrize(("page", "index"), EXAMPLES)
def test_examples_run(page, index, clone, monkeypatch):
    monkeypatch.chdir(clone)
    names = {"__name__": "example"}
    exec(compile(blocks(PAGES[page], "python")[index], page, "exec"), names)
    assert set(names) > {"__name__", "__builtins__"}
    if isinstance(loss := names.get("loss"), Tensor):
        assert loss.isfinite()
        gradients = [parameter.grad for parameter in names["layers"].parameters()]
        assert all(gradient is not None and gradient.abs().sum() > 0 for gradient in gradients)


@pytest.mark.parametrize("page", WITH_COMMANDS)
def test_quick_commands_run(page, clone, monkeypatch):
    from gpipe_bench.cli import application

    # Figures are composed; tests/figures/test_reference.py compares the pictures that are written of such.
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda _, file, **options: file.write(b"a picture"))
    monkeypatch.chdir(clone)
    for line in lines(PAGES[page]):
        # What follows a command that is not run may need what it makes.
        for words in takewhile(is_run, parts(line)):
            if words[0] == "gpipe-bench":
                done = CliRunner().invoke(application(), words[1:])
                assert done.exit_code == 0, f"{line}\n{done.output}\n{done.exception!r}"
            elif words != ["source", ".venv/bin/activate"]:
                subprocess.run(words, check=True)


@pytest.mark.parametrize("page", [page for page, text in PAGES.items() if printed(text)])
def test_commands_print_what_stands_below_them(page, clone):
    """A line of an ellipsis stands for lines that are left out, or that differ by machine; all others are printed."""
    for line, block in printed(PAGES[page]):
        said = answer_of_the_reference(clone) if line == "make ablation" else output_of(parts(line)[0], clone)
        where = 0
        for part in re.split(r"^…\n", block, flags=re.MULTILINE):
            where = said.find(part, where)
            assert where >= 0, f"{line}\nprints not\n{part}but\n{said}"
            where += len(part)


def output_of(words: list[str], place: Path) -> str:
    """What a command prints to a terminal of 80 columns, without blanks at the ends of lines."""
    done = subprocess.run(
        [sys.executable, "-m", "gpipe_bench", *words[1:]],
        cwd=place,
        env={**os.environ, "PYTHONPATH": str(place), "COLUMNS": "80"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return re.sub(" +$", "", done.stdout, flags=re.MULTILINE)


def answer_of_the_reference(place: Path) -> str:
    """What ``make ablation`` ends with, of the committed rows of all kinds of evidence."""
    rows: list[dict[str, str]] = []
    of_ablation = (f"{kind}/ablation" for kind in ("simulated/p40", "emulated/p40", "measured/2x-intel-xeon-processor"))
    for table in ("published/rows", *of_ablation):
        with (place / "results/reference" / f"{table}.csv").open(newline="") as file:
            rows.extend(row for row in csv.DictReader(file) if row["experiment"] == "ablation")
    (place / "all_kinds").mkdir(exist_ok=True)
    with (place / "all_kinds/ablation.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(name for row in rows for name in row)))
        writer.writeheader()
        writer.writerows(rows)
    return output_of(["gpipe-bench", "table", "--brief", "--rows", "all_kinds/ablation.csv"], place)


@pytest.mark.slow  # tests/figures/test_reference.py draws each of them, too
@pytest.mark.timeout(600)  # a minute on an idle machine
def test_every_committed_figure_is_redrawn_by_the_command_of_its_claim(clone):
    (line,) = [line for line in lines(PAGES["docs/claims.md"]) if "diff -r" in line]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    given = {**os.environ, "PATH": path, "PYTHONPATH": str(clone)}
    done = subprocess.run(line, shell=True, cwd=clone, env=given, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def test_what_is_not_run_is_there():
    for start in NOT_RUN:
        assert all_commands(*start.split()), f"no page has {start}: take it from the list"


def test_the_installed_program_is_the_one_of_the_pages():
    script = Path(sys.executable).parent / "gpipe-bench"
    program = [
        [str(script)] if script.exists() else [sys.executable, "-m", "gpipe_bench"],
        [sys.executable, "-m", "gpipe_bench"],
    ]
    versions = {subprocess.run([*start, "--version"], stdout=subprocess.PIPE, check=True).stdout for start in program}
    assert len(versions) == 1


@pytest.mark.parametrize("words", all_commands("gpipe-bench"), ids=shlex.join)
def test_commands_and_options_exist(words):
    from gpipe_bench.cli import application

    command: Command = typer.main.get_command(application())
    while getattr(command, "commands", None) and words[:1] and not words[0].startswith("-"):
        name, *words = words
        assert name in command.commands
        command = command.commands[name]
    options = {option for one in command.params for option in (*one.opts, *one.secondary_opts)} | {"--help"}
    own = takewhile(lambda word: word != "--", words)  # what follows belongs to the script
    assert {word for word in own if word.startswith("--")} <= options


def test_make_targets_exist_and_say_what_they_do():
    text = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z-]+):", text, re.MULTILINE))
    inline = {name for page in PAGES.values() for name in re.findall(r"`make ([a-z-]+)", page)}
    assert {words[0] for words in all_commands("make")} | inline <= targets
    said = set(re.findall(r"^([a-z-]+):.* ## \S", text, re.MULTILINE))
    assert said == {name for name in targets if not name.startswith("check-")}


def workflow_runs() -> list[tuple[tuple[str, ...], list[str]]]:
    """The targets of all pages by the other options that stand beside them: one dry run can try them all.

    Settings in ``my.yaml`` are merged into the default ones, so that those without options are tried with it.
    """
    runs: dict[tuple[str, ...], set[str]] = {}
    for words in all_commands("snakemake"):
        found = re.fullmatch(r"(?P<before>(--\S+ \S+ )?)(?P<targets>[a-z][^-]*?)?(?P<after>( ?--.*)?)", " ".join(words))
        assert found, words
        options = f"{found['before']} {found['after']}".replace("--dry-run", "").split()
        runs.setdefault(tuple(options), set()).update((found["targets"] or "").split())
    runs["--cores", "1", "--configfile", "my.yaml"] |= runs.pop(("--cores", "1"))
    return [(options, sorted(targets)) for options, targets in runs.items()]


@pytest.mark.parametrize(("options", "targets"), workflow_runs(), ids=" ".join)
def test_workflow_targets_exist(options, targets, clone):
    command = [sys.executable, "-m", "snakemake", *targets, *options, *(["--dry-run"] if targets else [])]
    done = subprocess.run(
        command,
        cwd=clone,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}"


def test_paths_of_tests_exist():
    paths = [word for words in all_commands("python", "-m", "pytest") for word in words if not word.startswith("-")]
    assert paths
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_configurations_are_valid(monkeypatch):
    monkeypatch.chdir(ROOT)
    shown = [block for text in PAGES.values() for block in blocks(text, "yaml")]
    assert shown
    for block in shown:
        assert parse_config(over_default(yaml.safe_load(block))).experiments
