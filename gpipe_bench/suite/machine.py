"""Which devices this machine offers, found without PyTorch.

A workflow asks this at its start, where importing PyTorch costs seconds: NVML counts the GPUs, and
``CUDA_VISIBLE_DEVICES`` is read by CUDA's own rules.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pynvml import NVMLError

from gpipe_bench.errors import DeviceCountError
from gpipe_bench.measure.nvml import nvml_session

DEVICES: Final = ("cpu", "cuda")


@dataclass(frozen=True, slots=True)
class Machine:
    """The devices to measure on.

    Attributes:
        device: ``cpu`` or ``cuda``.
        count: devices of that type; the CPU counts as one.
    """

    device: str
    count: int


def find_machine(device: str = "auto", count: int = 0) -> Machine:
    """The devices of this machine, or those that its jobs get elsewhere.

    Args:
        device: ``auto`` (GPUs where there are some, else the CPU), ``cpu`` or ``cuda``.
        count: GPUs that a job gets, where this machine has none to count, as on the login node of a cluster; 0: those
            of this machine.

    Raises:
        DeviceCountError: ``cuda`` was asked for and no GPU can be used.
        ValueError: another name.
    """
    if device not in ("auto", *DEVICES):
        raise ValueError(f"device must be auto or one of {', '.join(DEVICES)}, got {device!r}; use one of them")
    if count and device == "cuda":
        return Machine("cuda", count)
    count = 0 if device == "cpu" else visible_gpus()
    if device == "cuda" and not count:
        raise DeviceCountError(
            "device cuda must have a GPU that NVML lists, CUDA_VISIBLE_DEVICES allows and this build of PyTorch "
            "supports, got none; use device cpu"
        )
    return Machine("cuda", count) if count else Machine("cpu", 1)


def visible_gpus() -> int:
    """How many GPUs PyTorch would see."""
    gpus = _nvml_uuids() if _torch_has_cuda() else []
    return _visible(gpus, os.environ.get("CUDA_VISIBLE_DEVICES"))


def _visible(uuids: Sequence[str], setting: str | None) -> int:
    """Apply ``CUDA_VISIBLE_DEVICES``: CUDA reads entries up to the first that names no GPU, and refuses doubles."""
    if setting is None:
        return len(uuids)
    seen: list[str] = []
    for entry in (part.strip() for part in setting.split(",")):
        found = _resolve(uuids, entry)
        if found is None:
            break
        seen.append(found)
    return len(seen) if len(set(seen)) == len(seen) else 0


def _resolve(uuids: Sequence[str], entry: str) -> str | None:
    if entry.isdecimal():
        return uuids[int(entry)] if int(entry) < len(uuids) else None
    if entry.startswith("MIG-") and uuids:
        return entry
    matches = [uuid for uuid in uuids if entry.startswith("GPU-") and uuid.startswith(entry)]
    return matches[0] if len(matches) == 1 else None


def _nvml_uuids() -> list[str]:
    with nvml_session() as nvml, suppress(NVMLError):
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())] if nvml else []
        return [nvml.nvmlDeviceGetUUID(handle) for handle in handles]
    return []


def _torch_has_cuda() -> bool:
    """Whether the installed PyTorch was built for CUDA, read from its version file without importing it."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        return False
    version = Path(spec.submodule_search_locations[0]) / "version.py"
    try:
        text = version.read_text(encoding="utf-8")
    except OSError:
        return True
    return not re.search(r"^cuda\b[^=\n]*=\s*None\s*$", text, re.MULTILINE)
