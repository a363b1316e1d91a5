"""Facts of the machine and the software that need no PyTorch: for rows of runs that never load it.

Nothing here may fail: what is unknown stays empty.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from gpipe_bench.measure.nvml import driver_version

_SOURCE: Final = Path(__file__).resolve().parents[1]
_GIT_TIMEOUT_S: Final = 30


def host_facts() -> dict[str, Any]:
    """What does not depend on the devices of a run, as columns of :class:`gpipe_bench.results.rows.Row`."""
    commit, dirty = checkout()
    return {
        "torch": metadata.version("torch"),
        "driver": driver_version(),
        "python": platform.python_version(),
        "commit": commit,
        "dirty": dirty,
        "started_utc": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def machine_slug(name: str, count: int) -> str:
    """How many devices of this name the machine has, fit for a folder: ``4x-tesla-p40``."""
    words = re.findall(r"[a-z0-9]+", re.sub(r"\((r|tm)\)|\bcpu\b|@.*", " ", name.lower()))
    return f"{count}x-{'-'.join(words or ['device'])}"


def cpu_count() -> int:
    """How many processors this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)  # Linux only
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1


def cpu_name() -> str:
    """The model of the processor, as its vendor writes it."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    found = re.search(r"^model name\s*:\s*(\S.*)$", text, re.MULTILINE)
    return found[1].strip() if found else platform.processor() or platform.machine()


def checkout(folder: Path = _SOURCE) -> tuple[str, bool | None]:
    """Commit of the checkout that holds ``folder``, and whether it has uncommitted changes.

    ('', None) without git, outside a checkout, and for an installed copy inside somebody else's checkout.
    """
    if not _git(folder, "ls-files", "--", "."):
        return "", None
    commit = _git(folder, "rev-parse", "HEAD")
    changed = _git(folder, "status", "--porcelain", "--untracked-files=no")
    # A new file counts where it could be imported; a configuration or a result beside the sources changes nothing.
    added = _git(folder, "status", "--porcelain", "--", str(folder), os.path.realpath(folder / "models"))
    if not commit or changed is None or added is None:
        return "", None
    return commit, bool(changed or added)


def _git(folder: Path, *arguments: str) -> str | None:
    """What git prints about ``folder``; None when it fails or is not there."""
    # Variables such as GIT_DIR, set while a hook runs, would point git to another repository.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True,
            text=True,
            check=True,
            timeout=_GIT_TIMEOUT_S,
            env=environment,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
