"""`make test` runs every check, also after one failed."""

from __future__ import annotations

import re
import subprocess

from scripts import run_tests
from tests.project.tree import ROOT


def test_checks_run_after_one_that_failed_which_is_named(tmp_path):
    """With the Makefile as it is, a set-up that does nothing, and two checks that are quick."""
    rules = "check-bad: ; @exit 3\ncheck-good: ; @echo well\n"
    (tmp_path / "Makefile").write_text(f"include {ROOT}/Makefile\n{rules}")
    setup = tmp_path / "scripts" / "setup.sh"
    setup.parent.mkdir()
    setup.write_text("#!/bin/sh\n")
    setup.chmod(0o755)
    command = ["make", "test", "CHECKS=bad good"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "check-bad] Error 3" in done.stderr
    assert "well" in done.stdout


def test_each_folder_of_tests_runs_in_one_process():
    found = [folder for part in run_tests.parts().values() for folder in part]
    folders = {path.parent.relative_to(ROOT).parts[1] for path in (ROOT / "tests").glob("**/test_*.py")}
    assert sorted(found) == sorted(f"tests/{name}" for name in folders)


def test_make_runs_each_part_of_the_tests():
    text = (ROOT / "Makefile").read_text()
    checks = re.search(r"^CHECKS \?= (.*)$", text, re.MULTILINE).group(1).split()
    parts = [name.removeprefix("tests-") for name in checks if name.startswith("tests-")]
    assert parts == [*run_tests.parts()]
    assert re.findall(r"scripts\.run_tests (\S+)", text) == parts
