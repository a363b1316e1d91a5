"""How Pyodide is installed: the pinned archive or none, with a reason. npm is a stand-in: nothing is downloaded."""

from __future__ import annotations

import os
import subprocess

import pytest

from tests.project.tree import ROOT

SCRIPT = ROOT / "scripts/install_pyodide.sh"


def run(tmp_path, npm, *words):
    (tmp_path / "bin").mkdir(exist_ok=True)
    (tmp_path / "bin/npm").write_text(f"#!/bin/sh\n{npm}\n")
    (tmp_path / "bin/npm").chmod(0o755)
    where = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "XDG_CACHE_HOME": str(tmp_path / "cache")}
    command = ["bash", str(SCRIPT), *words]
    return subprocess.run(command, env=where, capture_output=True, text=True, check=False, timeout=60)


@pytest.mark.parametrize(
    ("npm", "reason"),
    [("exit 1", "npm could not download it"), ("touch pyodide-314.0.7.tgz", "the archive has another SHA-512")],
)
def test_what_is_not_the_pinned_archive_is_not_installed(tmp_path, npm, reason):
    done = run(tmp_path, npm)
    assert done.returncode == 0
    assert reason in done.stderr
    assert [*(tmp_path / "cache/gpipe_bench/npm/node_modules").iterdir()] == []
    # Pages must not be published without Python.
    done = run(tmp_path, npm, str(tmp_path / "site/pyodide"))
    assert done.returncode == 1
    assert [*(tmp_path / "site").iterdir()] == []


def test_another_folder_stays(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/notes").touch()
    done = run(tmp_path, "exit 0", str(tmp_path / "mine"))
    assert done.returncode == 1
    assert "is another folder" in done.stderr
    assert (tmp_path / "mine/notes").exists()


def test_ci_installs_it_and_pages_are_built_with_it():
    assert "scripts/install_pyodide.sh" in (ROOT / ".ci/run").read_text()
    steps = (ROOT / ".github/workflows/pages.yml").read_text()
    assert "scripts/install_pyodide.sh build/pyodide" in steps
    assert "--pyodide build/pyodide" in steps
