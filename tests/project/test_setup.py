"""Set-up installs the layer that is asked for once, is repaired when it was interrupted, and says what failed.

Python and uv are shell scripts here, which write down what they were asked to do.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.models.test_vision_packages import ABSENT, write_torchvision
from tests.project.tree import ROOT

UV = re.search(r"^uv==(\S+)", (ROOT / "requirements" / "uv.txt").read_text(), re.MULTILINE)[1]
# Of .uv, of .venv, and the one that both are made with.
PYTHON = f"""\
#!/usr/bin/env bash
case "$*" in
  "-m venv .uv") echo "uv-venv" >> "$CALLS" && mkdir -p .uv/bin && cp "$0" .uv/bin/python ;;
  *requirements/uv.txt) echo "uv" >> "$CALLS" && cp "$(dirname "$CALLS")/uv" .uv/bin/uv ;;
  "-m uv --version") [ -e .uv/bin/uv ] && echo "uv {UV} (here)" ;;
  "-m pip config list") echo "$PIP_SETTINGS" ;;
  *gpipe_bench.native) echo "native" >> "$CALLS"; exit "${{NATIVE_STATUS:-0}}" ;;
esac
"""
PROGRAM = """\
#!/usr/bin/env bash
environment="${@: -1}"
case "$1" in
  venv)
    echo "venv" >> "$CALLS"
    rm -rf "$environment" && mkdir -p "$environment/bin" "$environment/lib/python3.11/site-packages"
    cp .uv/bin/python "$environment/bin" ;;
  pip)
    echo "install:$environment" >> "$CALLS"
    env | grep -E '^(UV_|SSL_)' | sort > "$CALLS.env"
    exit "${UV_STATUS:-0}" ;;
esac
"""
DEV = "install:.[data,dev,models,slurm,workflow]"
WORKFLOW = "install:.[data,slurm,workflow]"
SOURCES = r""":env:.find-links='/wheels'
global.cert='/certificates'
global.extra-index-url='\nhttps://one/simple\nhttps://two/simple'
global.find-links='/other'
global.index-url='https://mirror/simple'"""


@pytest.fixture
def checkout(tmp_path):
    """A checkout that has uv."""
    place = tmp_path / "checkout"
    place.mkdir()
    for name in ("scripts/setup.sh", "scripts/uv.sh", "pyproject.toml", "models/torchvision_repair.py"):
        (place / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, place / name)
    shutil.copytree(ROOT / "requirements", place / "requirements")
    for name, text in (("python", PYTHON), ("uv", PROGRAM)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    shutil.copytree(tmp_path, place / ".uv" / "bin", ignore=lambda *_: ["checkout"])
    return place


def set_up(place: Path, *words: str, **environment: str) -> tuple[list[str], subprocess.CompletedProcess[str]]:
    """What the programs were asked to do, and how set-up ended."""
    calls = place.parent / "calls"
    calls.write_text("")
    given = {"PATH": os.environ["PATH"], "PYTHON": str(place.parent / "python"), "CALLS": str(calls), **environment}
    command = ["scripts/setup.sh", *(words or ["--quiet", "dev"])]
    run = subprocess.run(command, cwd=place, env=given, capture_output=True, text=True, check=False)
    return calls.read_text().split(), run


def test_set_up_is_done_once(checkout):
    assert set_up(checkout)[0] == ["venv", DEV, "native"]
    calls, run = set_up(checkout)
    assert (calls, run.returncode, run.stdout, run.stderr) == ([], 0, "", "")


def test_uv_is_installed_in_the_version_that_is_pinned(checkout):
    shutil.rmtree(checkout / ".uv")
    assert set_up(checkout)[0] == ["uv-venv", "uv", "venv", DEV, "native"]
    pins = checkout / "requirements" / "uv.txt"
    pins.write_text(pins.read_text().replace(UV, "99.0"))
    assert set_up(checkout, "peers")[0][:2] == ["uv-venv", "uv"]


def test_a_layer_is_added_to_what_is_there(checkout):
    assert set_up(checkout, "workflow")[0] == ["venv", WORKFLOW, "native"]
    (checkout / ".venv" / "left").touch()
    assert set_up(checkout, "dev")[0] == [DEV, "native"]
    assert (checkout / ".venv" / "left").exists()
    assert set_up(checkout, "workflow")[0] == []
    assert set_up(checkout, "peers")[0] == ["install:.[data,dev,models,peers,slurm,workflow]", "native"]


def test_the_smallest_layer_has_no_extras(checkout):
    assert set_up(checkout, "run")[0] == ["venv", "install:.[]", "native"]
    assert set_up(checkout, "run")[0] == []


def constraints(place):
    return (place / "constraints.txt").read_text()


def test_another_pytorch_has_an_environment_of_its_own(checkout):
    set_up(checkout)
    calls, run = set_up(checkout, "--quiet", "workflow", TORCH="2.14.1")
    assert calls == ["venv", WORKFLOW, "native"]
    assert "source .venv-torch-2.14.1/bin/activate" in run.stdout
    named = re.findall(r"^[a-z].*", constraints(checkout / ".venv-torch-2.14.1"), re.MULTILINE)
    assert named[-1] == "torch==2.14.1"
    assert {"timm==1.0.31 \\", "nvidia-ml-py==13.615.71 \\"} < set(named)
    assert [
        pin for pin in named[:-1] if pin.startswith(("torch==", "torchvision", "triton", "nvidia-cu", "cuda"))
    ] == []
    assert [set_up(checkout, "--quiet", "workflow", TORCH=torch)[0] for torch in ("", "2.14.1")] == [[], []]


def test_every_hash_is_checked(checkout):
    set_up(checkout)
    assert constraints(checkout / ".venv") == (ROOT / "requirements" / "lock.txt").read_text()


@pytest.mark.parametrize("given", [{"PIP_SETTINGS": "global.find-links='/wheels'"}, {"UV_TORCH_BACKEND": "cpu"}])
def test_another_build_of_pytorch_may_have_another_hash(checkout, given):
    set_up(checkout, **given)
    blocks = re.split(r"^(?=[a-z])", constraints(checkout / ".venv"), flags=re.MULTILINE)[1:]
    hashes = {block.split()[0]: "--hash" in block for block in blocks}
    pinned = re.findall(r"^\S+==\S+", (ROOT / "requirements" / "lock.txt").read_text(), re.MULTILINE)
    assert sorted(hashes) == sorted(pinned)
    unchecked = {pin.partition("==")[0] for pin, checked in hashes.items() if not checked}
    assert {"torch", "torchvision", "triton", "nvidia-cublas"} < unchecked
    assert unchecked.isdisjoint({"nvidia-ml-py", "numpy", "timm", "torchgpipe"})


def test_uv_uses_the_package_sources_of_pip(checkout):
    set_up(checkout, PIP_SETTINGS=SOURCES)
    assert (checkout.parent / "calls.env").read_text().split() == [
        "SSL_CERT_FILE=/certificates",
        "UV_DEFAULT_INDEX=https://mirror/simple",
        "UV_EXTRA_INDEX_URL=https://one/simple",
        "https://two/simple",
        "UV_FIND_LINKS=/wheels",
        "UV_INDEX_STRATEGY=unsafe-best-match",
    ]


def test_a_variable_of_uv_is_stronger_than_the_configuration_of_pip(checkout):
    set_up(checkout, PIP_SETTINGS=SOURCES, UV_FIND_LINKS="", UV_DEFAULT_INDEX="https://own/simple")
    seen = (checkout.parent / "calls.env").read_text().split()
    assert {"UV_FIND_LINKS=", "UV_DEFAULT_INDEX=https://own/simple"} < set(seen)


@pytest.mark.parametrize("words", [("",), ("--quiet",), ("tests",)])
def test_a_layer_must_be_known(checkout, words):
    calls, run = set_up(checkout, *words)
    assert (calls, run.returncode) == ([], 2)
    assert run.stderr.startswith("layer must be one of run, workflow, models, dev, peers, got ")


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
    set_up(checkout, "workflow")
    (checkout / ".venv" / "left").touch()
    calls, run = set_up(checkout, UV_STATUS="7")
    assert (calls, run.returncode) == ([DEV], 7)
    assert "set-up failed" in run.stderr
    calls, run = set_up(checkout)
    assert (calls, run.returncode) == (["venv", DEV, "native"], 0)
    assert not (checkout / ".venv" / "left").exists()


def test_a_new_lock_is_installed_in_place(checkout):
    set_up(checkout)
    (checkout / ".venv" / "left").touch()
    with (checkout / "requirements" / "lock.txt").open("a") as lock:
        lock.write("extra==1\n")
    assert set_up(checkout, "workflow")[0] == [DEV, "native"]
    assert (checkout / ".venv" / "left").exists()


def test_a_compiler_is_installed_where_there_is_none(checkout, tmp_path):
    (tmp_path / "bin").mkdir()
    tools = [
        "awk",
        "bash",
        "cat",
        "cksum",
        "cp",
        "cut",
        "dirname",
        "echo",
        "env",
        "grep",
        "head",
        "mkdir",
        "rm",
        "sed",
        "sort",
        "xargs",
    ]
    for tool in tools:
        (tmp_path / "bin" / tool).symlink_to(shutil.which(tool))
    path = str(tmp_path / "bin")
    assert set_up(checkout, "workflow", PATH=path)[0] == ["venv", "install:.[compiler,data,slurm,workflow]", "native"]
    shutil.rmtree(checkout / ".venv")
    assert set_up(checkout, "workflow", PATH=path, CC="clang")[0] == ["venv", WORKFLOW, "native"]


def test_c_code_that_does_not_compile_is_no_reason_to_fail(checkout):
    calls, run = set_up(checkout, NATIVE_STATUS="2")
    assert (calls[-1], run.returncode) == ("native", 0)
    assert set_up(checkout)[0] == []


def test_an_environment_whose_python_is_gone_is_made_anew(checkout):
    set_up(checkout)
    (checkout / ".venv" / "bin" / "python").unlink()
    assert set_up(checkout)[0] == ["venv", DEV, "native"]


def test_a_moved_checkout_is_set_up_anew(checkout):
    set_up(checkout)
    moved = checkout.rename(checkout.parent / "moved")
    assert set_up(moved)[0] == ["venv", DEV, "native"]


@pytest.mark.parametrize(("layer", "status"), [("models", 0), ("dev", 0), ("workflow", 1)])
def test_every_python_of_the_environment_imports_torchvision(checkout, layer, status):
    """A torchvision whose compiled library does not load."""
    set_up(checkout, layer)
    packages = checkout / ".venv" / "lib" / "python3.11" / "site-packages"
    write_torchvision(packages, ABSENT)
    # Without -S the Python that runs this test might have the repair itself.
    command = [sys.executable, "-S", "-c", f"import site; site.addsitedir({str(packages)!r}); import torchvision"]
    path = f"{packages}{os.pathsep}{Path(torch.__file__).parents[1]}"
    run = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False)
    assert run.returncode == status
    assert ("operator torchvision::nms does not exist" in run.stderr) == bool(status)


def test_the_networks_of_libraries_import_in_this_environment():
    if not (Path(sys.prefix) / ".made-from").exists():
        pytest.skip("this environment was not made by scripts/setup.sh")
    subprocess.run([sys.executable, "-c", "import torchvision, timm"], check=True)


@pytest.mark.parametrize(("target", "layer"), [("ablation", "workflow"), ("test", "dev"), ("peers", "peers")])
def test_a_make_target_installs_what_it_needs(target, layer):
    run = subprocess.run(
        ["make", "--dry-run", target],
        cwd=ROOT,
        env={"PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        check=True,
    )
    first, *rest = run.stdout.splitlines()
    assert first == f"scripts/setup.sh --quiet {layer}"
    assert rest[-1:] == (["scripts/setup.sh --next"] if target != "peers" else [])


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
        "UV_OFFLINE": "1",
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
    assert seen == {"PATH", "HOME", "PIP_CERT", "UV_OFFLINE", "https_proxy"}
