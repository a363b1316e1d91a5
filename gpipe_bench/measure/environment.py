"""Facts of the machine and the software, as columns of a row. Nothing here may fail: what is unknown stays empty."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import torch

from gpipe_bench.measure.devices import distinct_devices
from gpipe_bench.measure.nvml import driver_version

__all__ = ["checkout", "device_name", "environment_facts", "machine_slug"]

_SOURCE: Final = Path(__file__).resolve().parents[1]
_GIT_TIMEOUT_S: Final = 30


def environment_facts(devices: Iterable[torch.device | str]) -> dict[str, Any]:
    """Machine and software as columns of :class:`gpipe_bench.rows.Row`.

    Args:
        devices: devices of the run, repeats allowed.
    """
    found = distinct_devices(devices) or [torch.device("cpu")]
    commit, dirty = checkout(_SOURCE)
    return {
        "device": f"{found[0].type} {device_name(found[0])}",
        "device_count": len(found),
        "profile": machine_slug(found[0]),
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda or "",
        "driver": driver_version(),
        "python": platform.python_version(),
        "commit": commit,
        "dirty": dirty,
        "started_utc": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def device_name(device: torch.device) -> str:
    """The model of a device, as its vendor writes it."""
    if device.type == "cpu":
        return _cpu_name()
    read = getattr(torch.get_device_module(device), "get_device_name", None)
    try:
        return str(read(device)) if read is not None else device.type
    except (RuntimeError, AssertionError):  # PyTorch raises the latter when built without CUDA
        return device.type


def machine_slug(device: torch.device) -> str:
    """How many such devices the machine has, and their name, fit for a folder: ``4x-tesla-p40``.

    For the CPU the number is that of the processors that this process may use.
    """
    name = re.sub(r"\((r|tm)\)|\bcpu\b|@.*", " ", device_name(device).lower())
    words = re.findall(r"[a-z0-9]+", name) or [device.type]
    return f"{_machine_count(device)}x-{'-'.join(words)}"


def checkout(folder: Path) -> tuple[str, bool | None]:
    """Commit of the checkout that holds ``folder``, and whether it has uncommitted changes.

    ('', None) without git, outside a checkout, and for an installed copy inside somebody else's checkout.
    """
    if not _git(folder, "ls-files", "--", "."):
        return "", None
    commit, changes = _git(folder, "rev-parse", "HEAD"), _git(folder, "status", "--porcelain")
    if not commit or changes is None:
        return "", None
    return commit, bool(changes)


def _machine_count(device: torch.device) -> int:
    if device.type == "cpu":
        affinity = getattr(os, "sched_getaffinity", None)  # Linux only
        return len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    count = getattr(torch.get_device_module(device), "device_count", None)
    return int(count()) if count is not None else 1


def _cpu_name() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    found = re.search(r"^model name\s*:\s*(\S.*)$", text, re.MULTILINE)
    return found[1].strip() if found else platform.processor() or platform.machine()


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
