"""The workflow runs in any folder, and as a module of another workflow; two configurations keep two sets of results."""

from __future__ import annotations

import csv
import os
import shutil
import subprocess
import sys

import yaml

from tests.workflow.checkouts import MODEL, ROOT

OTHER = """
configfile: "mine.yaml"


{modules}
rule both:
    default_target: True
    input:
        "first/figures/sweep_mine_simulated.svg",
        "second/figures/sweep_mine_simulated.svg",
"""
MODULE = """module {name}:
    snakefile:
        "{root}/Snakefile"
    config:
        config["{name}"]
    prefix:
        "{name}"


use rule * from {name} as {name}_*


"""
GRID = {"run": "simulated", "model": "unet", "model_args": MODEL, "partitions": [1, 2], "chunks": 2, "batch_size": 4}


def snakemake(folder, *arguments, **variables):
    """Snakemake in a folder where Python does not find the package by itself."""
    given = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | variables
    command = [sys.executable, "-P", "-m", "snakemake", "--cores", "2", *arguments]
    return subprocess.run(
        command, cwd=folder, env=given, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )


def rows_of(table):
    with table.open() as file:
        return list(csv.DictReader(file))


def test_every_target_has_what_it_needs_in_another_folder(tmp_path):
    arguments = ("-s", str(ROOT / "Snakefile"), "-d", str(tmp_path), "--dry-run", "--config", "device=cpu", "--")
    done = snakemake(tmp_path, *arguments, "all", "schedules", "processes", "peers")
    assert done.returncode == 0, done.stdout


def test_a_home_that_cannot_be_written_is_not_needed(tmp_path):
    home = tmp_path / "home"
    home.write_text("no folder")
    arguments = ("-s", str(ROOT / "Snakefile"), "-d", str(tmp_path), "--dry-run", "--config", "device=cpu", "--")
    done = snakemake(tmp_path, *arguments, "memory", HOME=str(home), XDG_CACHE_HOME="")
    assert done.returncode == 0, done.stdout


def test_two_configurations_of_a_module_keep_two_sets_of_results_and_figures(tmp_path):
    modules = "".join(MODULE.format(name=name, root=ROOT) for name in ("first", "second"))
    (tmp_path / "Snakefile").write_text(OTHER.format(modules=modules))
    grids = {"first": GRID, "second": {**GRID, "profile": "v100"}}
    own = {name: {"device": "cpu", "experiments": {"sweep_mine": {"grid": grid}}} for name, grid in grids.items()}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(own))
    done = snakemake(tmp_path)
    assert done.returncode == 0, done.stdout
    found = {name: rows_of(tmp_path / name / "results" / "sweep_mine.csv") for name in grids}
    assert {name: {(row["profile"], row["status"]) for row in rows} for name, rows in found.items()} == {
        "first": {("p40", "ok")},
        "second": {("v100", "ok")},
    }
    assert {path.name for path in tmp_path.iterdir()} == {"Snakefile", "mine.yaml", "first", "second", ".snakemake"}
    own["first"]["experiments"]["sweep_other"] = {"grid": {**GRID, "profile": "a100"}}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(own))
    assert "Nothing to be done" in snakemake(tmp_path, "--dry-run").stdout


def test_a_module_from_a_git_repository_has_its_rules_from_there_and_its_package_from_a_checkout(tmp_path):
    # What snakedeploy writes, with a repository on this machine in the place of GitHub.
    repository, deployed = tmp_path / "repository", tmp_path / "deployed"
    for part in ("workflow", "studies"):
        shutil.copytree(ROOT / part, repository / part, ignore=shutil.ignore_patterns("__pycache__"))
    git = ("git", "-C", str(repository), "-c", "user.name=test", "-c", "user.email=test@localhost")
    for command in (("init", "-q"), ("add", "."), ("commit", "-q", "-m", "The workflow"), ("tag", "v1")):
        subprocess.run([*git, *command], check=True)
    deployed.mkdir()
    module = MODULE.format(name="mine", root=f"git+file://{repository}").replace("Snakefile", "workflow/Snakefile@v1")
    (deployed / "Snakefile").write_text('configfile: "mine.yaml"\n\n\n' + module)
    own = {"device": "cpu", "experiments": {"sweep_mine": {"grid": GRID}}}
    (deployed / "mine.yaml").write_text(yaml.safe_dump({"mine": own}))
    done = snakemake(deployed, "mine/results/sweep_mine.csv", PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.stdout
    assert {row["status"] for row in rows_of(deployed / "mine" / "results" / "sweep_mine.csv")} == {"ok"}
