"""Facts of the machine and the software that need no PyTorch: for rows of runs that never load it.

Nothing here may fail: what is unknown stays empty.
"""

from __future__ import annotations

import os
import platform
import re
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from gpipe_bench.measure.nvml import driver_version
from gpipe_bench.util.checkout import checkout


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
