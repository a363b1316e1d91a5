"""Running the tests that need a GPU, where nothing but PyTorch and pytest may be installed."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final
from xml.etree import ElementTree as ET

from gpipe_bench.bench.running.children import run_child

_MARK: Final = "mark.gpu"
# The project's own pytest settings ask for plug-ins of development; a file whose imports are missing must not keep the
# others from running.
_OPTIONS: Final = (
    "--import-mode=importlib",
    "--continue-on-collection-errors",
    *("-c", os.devnull),
    *("-p", "no:cacheprovider"),
    *("-W", "ignore::pytest.PytestUnknownMarkWarning"),
    *("-m", "gpu"),
    "-rs",
)


def run_gpu_tests(tests: Path, log: Path, limit_s: float) -> str:
    """Run every test below ``tests`` that is marked ``gpu``.

    Args:
        tests: folder of the tests.
        log: file for the output.
        limit_s: after this long they are stopped.

    Returns:
        ``passed`` with the numbers, or what else.
    """
    if not tests.is_dir():
        return f"not run: there is no folder {tests}"
    if importlib.util.find_spec("pytest") is None:
        return "not run: pytest is not installed"
    files = [str(path) for path in sorted(tests.rglob("test_*.py")) if _MARK in path.read_text(encoding="utf-8")]
    if not files:
        return "none found"
    with TemporaryDirectory() as folder:
        counts = Path(folder) / "counts.xml"
        command = [
            sys.executable,
            "-m",
            "pytest",
            *_OPTIONS,
            f"--rootdir={tests.parent}",
            f"--junitxml={counts}",
            *files,
        ]
        status = run_child(command, log, limit_s, cwd=tests.parent)
        passed, skipped = _counts(counts)
    if status == 5:
        return "none found"
    if status == 0:
        return f"passed: {passed}, skipped: {skipped}" if passed else f"not run: all {skipped} skipped, see {log.name}"
    return f"stopped after {limit_s:.0f} s" if status is None else f"failed with exit status {status}, see {log.name}"


def _counts(report: Path) -> tuple[int, int]:
    """How many tests passed and how many were skipped; none if they did not come to an end."""
    if not report.is_file():
        return 0, 0
    suites = list(ET.parse(report).getroot().iter("testsuite"))  # noqa: S314 - pytest has just written it

    def total(name: str) -> int:
        return sum(int(suite.get(name, 0)) for suite in suites)

    skipped = total("skipped")
    return total("tests") - skipped - total("failures") - total("errors"), skipped
