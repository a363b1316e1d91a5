"""Set-up installs the layer that is asked for once, is repaired when it was interrupted, and says what failed.

The Python here is a shell script that makes empty environments and writes down what it was asked to do.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.project.test_lock import packages_up_to
from tests.project.tree import ROOT

PYTHON = """\
#!/usr/bin/env bash
case "$*" in
  --version) echo "Python 3.11.0" ;;
  "-m venv "*)
    echo "venv" >> "$CALLS"
    mkdir -p "$3/bin" && cp "$0" "$3/bin/python" && echo "#!$3/bin/python" > "$3/bin/pip" ;;
  *requirements/compiler.lock) echo "compiler" >> "$CALLS"; exit 1 ;;
  *gpipe_bench.native) echo "native" >> "$CALLS"; exit "${NATIVE_STATUS:-0}" ;;
  *--requirement*) echo "install:$(basename "${@: -1}" .lock)" >> "$CALLS"; exit "${PIP_STATUS:-0}" ;;
  *--editable*) echo "project" >> "$CALLS" ;;
  "-c import pip"*) ;;
  -c*) echo "$0" ;;
esac
"""


@pytest.fixture
def checkout(tmp_path):
    place = tmp_path / "checkout"
    (place / "scripts").mkdir(parents=True)
    for name in ("scripts/setup.sh", "scripts/find_python.sh", "pyproject.toml"):
        shutil.copy(ROOT / name, place / name)
    shutil.copytree(ROOT / "requirements", place / "requirements")
    (tmp_path / "python").write_text(PYTHON)
    (tmp_path / "python").chmod(0o755)
    return place


def set_up(place: Path, *words: str, **environment: str) -> tuple[list[str], subprocess.CompletedProcess[str]]:
    """What the Python of the new environment was asked to do, and how set-up ended."""
    calls = place.parent / "calls"
    calls.write_text("")
    given = {"PATH": os.environ["PATH"], "PYTHON": str(place.parent / "python"), "CALLS": str(calls), **environment}
    command = ["scripts/setup.sh", *(words or ["--quiet", "dev"])]
    run = subprocess.run(command, cwd=place, env=given, capture_output=True, text=True, check=False)
    return calls.read_text().split(), run


def test_set_up_is_done_once(checkout):
    assert set_up(checkout)[0] == ["venv", "install:dev", "project", "native"]
    calls, run = set_up(checkout)
    assert (calls, run.returncode, run.stdout, run.stderr) == ([], 0, "", "")


def test_a_layer_is_added_to_what_is_there(checkout):
    assert set_up(checkout, "workflow")[0] == ["venv", "install:workflow", "project", "native"]
    (checkout / ".venv" / "left").touch()
    assert set_up(checkout, "dev")[0] == ["install:dev", "project", "native"]
    assert (checkout / ".venv" / "left").exists()
    assert set_up(checkout, "workflow")[0] == []


def test_another_pytorch_has_an_environment_of_its_own(checkout):
    set_up(checkout)
    calls, run = set_up(checkout, "--quiet", "models", TORCH="2.14.1")
    assert calls == ["venv", "install:requirements.txt", "project", "native"]
    assert "source .venv-torch-2.14.1/bin/activate" in run.stdout
    asked = (checkout / ".venv-torch-2.14.1" / "requirements.txt").read_text().split()
    assert {"torch==2.14.1", "torchvision>=0.26,<0.30", "timm==1.0.31"} < set(asked)
    assert {line.partition("==")[0] for line in asked} >= packages_up_to("models") - {"torchvision"}
    assert [set_up(checkout, "--quiet", "models", TORCH=torch)[0] for torch in ("", "2.14.1")] == [[], []]


def test_a_larger_layer_that_is_there_is_kept_up_to_date(checkout):
    set_up(checkout, "dev")
    with (checkout / "requirements" / "dev.lock").open("a") as lock:
        lock.write("extra==1\n")
    assert set_up(checkout, "workflow")[0] == ["install:dev", "project", "native"]


@pytest.mark.parametrize("words", [("",), ("--quiet",), ("tests",)])
def test_a_layer_must_be_known(checkout, words):
    calls, run = set_up(checkout, *words)
    assert (calls, run.returncode) == ([], 2)
    assert run.stderr.startswith("layer must be one of run workflow models dev, got ")


def test_set_up_ends_with_what_to_do_next(checkout):
    activate = "Next, once in every terminal: source .venv/bin/activate"
    for _ in range(2):
        _, run = set_up(checkout, "models")
        first, last = run.stdout.strip().splitlines()[-2:]
        assert first == activate
        assert last.startswith("Then: snakemake --cores 1 TARGET")


def test_who_has_activated_the_environment_is_not_told_to(checkout):
    _, run = set_up(checkout, "--next", VIRTUAL_ENV=str(checkout / ".venv"))
    assert "activate" not in run.stdout
    assert run.stdout.startswith("Then: ")


def test_a_failed_installation_says_so_and_is_made_anew(checkout):
    calls, run = set_up(checkout, PIP_STATUS="7")
    assert calls == ["venv", "install:dev"]
    assert run.returncode == 7
    assert "set-up failed at: install" in run.stderr
    (checkout / ".venv" / "left").touch()

    calls, run = set_up(checkout)
    assert calls == ["venv", "install:dev", "project", "native"]
    assert run.returncode == 0
    assert not (checkout / ".venv" / "left").exists()


def test_a_new_lock_is_installed_in_place(checkout):
    set_up(checkout)
    (checkout / ".venv" / "left").touch()
    with (checkout / "requirements" / "run.lock").open("a") as lock:
        lock.write("extra==1\n")
    assert set_up(checkout)[0] == ["install:dev", "project", "native"]
    assert (checkout / ".venv" / "left").exists()


def test_a_compiler_is_installed_where_there_is_none(checkout, tmp_path):
    (tmp_path / "bin").mkdir()
    for tool in ("basename", "bash", "cat", "cksum", "cp", "dirname", "env", "grep", "mkdir", "rm", "touch"):
        (tmp_path / "bin" / tool).symlink_to(shutil.which(tool))
    calls, run = set_up(checkout, PATH=str(tmp_path / "bin"))
    assert calls == ["venv", "install:dev", "project", "compiler", "native"]
    assert run.returncode == 0
    (checkout / ".venv" / ".complete").unlink()
    assert set_up(checkout, PATH=str(tmp_path / "bin"), CC="clang")[0] == ["install:dev", "project", "native"]


def test_c_code_that_does_not_compile_is_no_reason_to_fail(checkout):
    calls, run = set_up(checkout, NATIVE_STATUS="2")
    assert (calls[-1], run.returncode) == ("native", 0)
    assert set_up(checkout)[0] == []


def test_an_environment_whose_python_is_gone_is_made_anew(checkout):
    set_up(checkout)
    (checkout / ".venv" / "bin" / "python").unlink()
    assert set_up(checkout)[0] == ["venv", "install:dev", "project", "native"]


def test_a_moved_checkout_is_set_up_anew(checkout):
    set_up(checkout)
    moved = checkout.rename(checkout.parent / "moved")
    assert set_up(moved)[0] == ["venv", "install:dev", "project", "native"]


def test_no_python_is_one_line_that_says_what_to_do(checkout):
    calls, run = set_up(checkout, PYTHON="/bin/false")
    assert calls == []
    assert run.returncode == 1
    assert "python must be a version from 3.11 to 3.13" in run.stderr
    assert not (checkout / ".venv").exists()


@pytest.mark.parametrize(("target", "layer"), [("ablation", "workflow"), ("test", "dev")])
def test_a_make_target_installs_what_it_needs_and_ends_with_what_to_do_next(target, layer):
    run = subprocess.run(
        ["make", "--dry-run", target],
        cwd=ROOT,
        env={"PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        check=True,
    )
    first, *_, last = run.stdout.splitlines()
    assert (first, last) == (f"scripts/setup.sh --quiet {layer}", "scripts/setup.sh --next")


def test_the_checks_run_in_the_environment_of_the_pytorch_that_is_asked_for():
    command = ["make", "--dry-run", "test", "TORCH=2.14.1", "CHECKS=mypy"]
    shown = subprocess.check_output(command, cwd=ROOT, env={"PATH": os.environ["PATH"]}, text=True)
    assert any(line.endswith("/.venv-torch-2.14.1/bin/python -m mypy") for line in shown.splitlines())


def test_continuous_integration_starts_from_a_clean_environment(tmp_path):
    make = tmp_path / "make"
    make.write_text('#!/bin/sh\necho "make $*"\nenv\n')
    make.chmod(0o755)
    given = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "HOME": "/somewhere",
        "PIP_CERT": "/certificates",
        "https_proxy": "http://proxy:1",
        "PYTHONPATH": "/elsewhere",
        "VIRTUAL_ENV": "/elsewhere",
        "OMP_NUM_THREADS": "7",
        "MULTI": "two\nlines",
    }
    run = subprocess.run([ROOT / ".ci" / "run"], env=given, capture_output=True, text=True, check=True)
    first, *rest = run.stdout.splitlines()
    assert first == "make test"
    seen = {line.split("=")[0] for line in rest if not line.startswith(("_=", "PWD=", "OLDPWD=", "SHLVL="))}
    assert seen == {"PATH", "HOME", "PIP_CERT", "https_proxy"}
