"""Tests inside/ need a process of their own, where the device type is registered before the first backward pass."""

from __future__ import annotations

from pathlib import Path

INSIDE = Path(__file__).parent / "inside"


def pytest_ignore_collect(collection_path, config):
    """Leave inside/ out, unless it is all that was asked for: then this process is theirs."""
    asked = [Path(config.invocation_params.dir, argument.split("::")[0]).resolve() for argument in config.args]
    theirs = all(path == INSIDE or INSIDE in path.parents for path in asked)
    return True if collection_path == INSIDE and not theirs else None
