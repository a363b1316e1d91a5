"""Run every check of the repository, two at a time, also after one failed; then say which passed and how long it took.

    python -m scripts.check                  all of them
    python -m scripts.check mypy wheel       only these
    python -m scripts.check --list           names and commands

The first check writes here as it goes; the output of every other one follows when it has ended.

Exit status: 0 when all passed, 1 when one failed, 2 for an unknown name, 130 when interrupted.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

ROOT: Final = Path(__file__).resolve().parent.parent
WORKFLOW: Final = ("Snakefile", "workflows", "studies")
# As modules of this interpreter: whatever stands first in PATH, the pinned tools run. The longest is the first.
CHECKS: Final[dict[str, tuple[str, ...]]] = {
    "tests-engine": ("scripts.run_tests", "engine"),
    "ruff": ("ruff", "check", "."),
    "ruff-format": ("ruff", "format", "--check", "."),
    "mypy": ("mypy",),
    "snakefmt": ("snakefmt", "--check", *WORKFLOW),
    "snakemake-lint": ("snakemake", "--lint"),
    "wheel": ("scripts.check_wheel",),
    "tests-suite": ("scripts.run_tests", "suite"),
    "sanitizers": ("scripts.check_native",),
}
AT_ONCE: Final = 2
_RULE: Final = "=" * 78


@dataclass(frozen=True, slots=True)
class CheckResult:
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


@dataclass(slots=True)
class _Running:
    """A check that has begun."""

    name: str
    process: subprocess.Popen[str]
    output: IO[str] | None
    start: float

    def ended(self, *, interrupted: bool = False) -> CheckResult:
        """Wait for the end, and show what it wrote."""
        status = self.process.wait()
        if self.output is not None:
            self.output.seek(0)
            print(f"\n{_RULE}\n== {self.name}\n{_RULE}\n{self.output.read()}", flush=True)
            self.output.close()
        return CheckResult(self.name, None if interrupted else status, time.monotonic() - self.start)


def _begin(name: str, *, shown: bool) -> _Running:
    """Start a check, whose output is ``shown`` as it comes, or kept."""
    print(f"== {name} begins: {shlex.join(CHECKS[name])}", flush=True)
    # Closed when the check has ended.
    output = None if shown else tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
    process = subprocess.Popen(
        [sys.executable, "-m", *CHECKS[name]], cwd=ROOT, stdin=subprocess.DEVNULL, stdout=output,
        stderr=None if shown else subprocess.STDOUT, text=True,
    )  # fmt: skip
    return _Running(name, process, output, time.monotonic())


def run(names: Sequence[str]) -> Iterator[CheckResult]:
    """The outcome of each named check as it ends; when interrupted, those of the checks that ran."""
    waiting, running = [*names], list[_Running]()
    try:
        while waiting or running:
            while waiting and len(running) < AT_ONCE:
                running.append(_begin(waiting[0], shown=waiting[0] == names[0]))
                waiting.pop(0)
            for one in [one for one in running if one.process.poll() is not None]:
                running.remove(one)
                yield one.ended()
            time.sleep(0.05)
    except KeyboardInterrupt:
        # The terminal has interrupted the checks, too.
        yield from (one.ended(interrupted=True) for one in running)


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
    if any(outcome.status is None for outcome in outcomes):
        return 130
    failed = sorted(outcome.name for outcome in outcomes if outcome.status)
    if failed:
        print(f"FAILED: {', '.join(failed)}; again, these alone: make test CHECKS='{' '.join(failed)}'", flush=True)
        return 1
    print("all passed", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
