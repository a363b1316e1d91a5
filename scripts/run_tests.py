"""Run half of the tests, so that two processes take the time of one on two cores: ``python -m scripts.run_tests HALF``.

HALF is ``engine`` or ``suite``. To run some tests, call pytest.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
ENGINE: Final = ("bench", "conformance", "emulator", "engine", "models", "native", "simulator", "simulator_costs")
"""About half of the work; the other process has all other folders, and the shorter checks."""


def halves() -> dict[str, list[str]]:
    """The folders of each process."""
    folders = sorted(path.name for path in (ROOT / "tests").iterdir() if any(path.glob("**/test_*.py")))
    parts: dict[str, list[str]] = {"engine": [], "suite": []}
    for name in folders:
        parts["engine" if name in ENGINE else "suite"].append(f"tests/{name}")
    return parts


def main(half: str) -> int:
    """Run the tests; the status of pytest."""
    # Both processes would write their failures to the same files.
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *halves()[half]]
    return subprocess.run(command, cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m scripts.run_tests", description=__doc__)
    parser.add_argument("half", choices=halves())
    sys.exit(main(parser.parse_args().half))
