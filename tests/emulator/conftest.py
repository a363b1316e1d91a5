"""Tests inside/ and shapes/ need a process of their own, where the device type is registered before anything runs."""

from __future__ import annotations

from pathlib import Path

OWN = [Path(__file__).parent / folder for folder in ("inside", "shapes")]


def pytest_ignore_collect(collection_path, config):
    """Leave such a folder out, unless it is all that was asked for: then this process is its own."""
    if collection_path not in OWN:
        return None
    asked = [Path(config.invocation_params.dir, argument.split("::")[0]).resolve() for argument in config.args]
    own = all(path == collection_path or collection_path in path.parents for path in asked)
    return None if own else True
