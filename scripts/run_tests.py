"""Run all tests in two processes at once, each with some folders of tests/: the time of one, on two cores.

    python -m scripts.run_tests                    all of them
    python -m scripts.run_tests tests/engine -x    these arguments of pytest, in one process

The first process writes here as it goes. The output of the second follows when both have ended.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
FIRST: Final = ("engine", "models", "native", "simulator", "simulator_costs", "emulator")
"""About half of the work; the second process has all other folders."""


def halves() -> tuple[list[str], list[str]]:
    """The folders of each process."""
    folders = sorted(path.name for path in (ROOT / "tests").iterdir() if any(path.glob("**/test_*.py")))
    first = [f"tests/{name}" for name in folders if name in FIRST]
    return first, [f"tests/{name}" for name in folders if name not in FIRST]


def main(arguments: Sequence[str]) -> int:
    """Run the tests; 0 if all passed, otherwise the status of a process in which some failed."""
    command = [sys.executable, "-m", "pytest"]
    if arguments:
        return subprocess.run([*command, *arguments], cwd=ROOT, check=False).returncode
    # Both would write their failures to the same files.
    command += ["-p", "no:cacheprovider"]
    first, second = halves()
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
        other = subprocess.Popen([*command, *second], cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)
        try:
            status = subprocess.run([*command, *first], cwd=ROOT, check=False).returncode
        finally:
            others = other.wait()
            output.seek(0)
            print(output.read(), flush=True)
    return status or others


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
