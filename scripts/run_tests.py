"""Run a part of the tests, so that several processes share the cores: ``python -m scripts.run_tests PART``.

To run some tests, call pytest.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
PARTS: Final = {
    "machine": ("emulator", "native", "simulator", "simulator_api", "simulator_costs"),
    "workflow": ("distributed", "examples", "slurm", "studies", "workflow"),
    "engine": ("conformance", "engine", "gpu", "models"),
}
"""Folders of tests; the part ``suite``, which takes longest, has all others."""


def parts() -> dict[str, list[str]]:
    """The folders of each part, those of the longest first."""
    part_of = {folder: part for part, folders in PARTS.items() for folder in folders}
    found: dict[str, list[str]] = {part: [] for part in ("suite", *PARTS)}
    for path in sorted((ROOT / "tests").iterdir()):
        if any(path.glob("**/test_*.py")):
            found[part_of.get(path.name, "suite")].append(f"tests/{path.name}")
    return found


def main(part: str) -> int:
    """Run the tests; the status of pytest."""
    # All processes would write their failures to the same files.
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *parts()[part]]
    return subprocess.run(command, cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m scripts.run_tests", description=__doc__)
    parser.add_argument("part", choices=parts())
    sys.exit(main(parser.parse_args().part))
