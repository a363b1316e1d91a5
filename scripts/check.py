"""Run every check of the repository, each by name, also after one failed; then say which passed and how long it took.

    python -m scripts.check                  all of them
    python -m scripts.check mypy pytest      only these
    python -m scripts.check --list           names and commands

Exit status: 0 when all passed, 1 when one failed, 2 for an unknown name, 130 when interrupted.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
WORKFLOW: Final = ("Snakefile", "workflows")
# As modules of this interpreter: whatever stands first in PATH, the pinned tools run.
CHECKS: Final[dict[str, tuple[str, ...]]] = {
    "ruff": ("ruff", "check", "."),
    "ruff-format": ("ruff", "format", "--check", "."),
    "mypy": ("mypy",),
    "snakefmt": ("snakefmt", "--check", *WORKFLOW),
    "snakemake-lint": ("snakemake", "--lint"),
    "wheel": ("scripts.check_wheel",),
    "pytest": ("scripts.run_tests",),
    "sanitizers": ("scripts.check_native",),
}
_RULE: Final = "=" * 78


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one check ended.

    Attributes:
        name: key of :data:`CHECKS`.
        status: exit status of its command; ``None`` when it was interrupted.
        seconds: how long it took.
    """

    name: str
    status: int | None
    seconds: float

    def __str__(self) -> str:
        word = {0: "passed", None: "interrupted"}.get(self.status, f"FAILED, exit status {self.status}")
        return f"{self.name:<16} {self.seconds:6.1f} s  {word}"


def run(names: Sequence[str]) -> Iterator[Outcome]:
    """The outcome of each named check, in order, as it ends; the last one when interrupted."""
    for number, name in enumerate(names, 1):
        print(f"\n{_RULE}\n== check {number}/{len(names)}: {name}    {shlex.join(CHECKS[name])}\n{_RULE}", flush=True)
        start = time.monotonic()
        try:
            command = [sys.executable, "-m", *CHECKS[name]]
            status = subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, check=False).returncode
        except KeyboardInterrupt:
            yield Outcome(name, None, time.monotonic() - start)
            return
        yield Outcome(name, status, time.monotonic() - start)


def main(arguments: Sequence[str]) -> int:
    """Run the named checks, all without a name, and print the summary."""
    if "--list" in arguments:
        print("\n".join(f"{name:<16} {shlex.join(command)}" for name, command in CHECKS.items()))
        return 0
    if unknown := [name for name in arguments if name not in CHECKS]:
        print(f"check must be one of {', '.join(CHECKS)}, got {', '.join(unknown)}; use --list", file=sys.stderr)
        return 2
    outcomes = list(run(arguments or list(CHECKS)))
    print(f"\n{_RULE}\n" + "\n".join(map(str, outcomes)), flush=True)
    if outcomes[-1].status is None:
        return 130
    failed = [outcome.name for outcome in outcomes if outcome.status]
    if failed:
        print(f"FAILED: {', '.join(failed)}; again, these alone: make test CHECKS='{' '.join(failed)}'", flush=True)
        return 1
    print("all passed", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
