"""Variants that stand in for one that a cell cannot run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from gpipe_bench.components import Components


def stand_in(variant: str, *, device: str, backward: str) -> str:
    """The label of the variant that runs in place of ``variant``: itself where it can run.

    Args:
        variant: label of the components.
        device: type of device; only accelerators have copy streams.
        backward: ``autograd`` or ``scheduled``; a schedule has no Fork and Join to switch off.
    """
    changes: dict[str, Any] = {"copy_streams": False} if device == "cpu" else {}
    if backward == "scheduled":
        changes["fork_join"] = True
    return replace(Components.from_label(variant), **changes).label
