"""What takes long to make, on disk: it is made once for each version of PyTorch and of this code."""

from __future__ import annotations

import hashlib
import io
import json
import pickle
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

from gpipe_bench.cache import cache_folder
from gpipe_bench.sealed import read_sealed, write_sealed

T = TypeVar("T")


class _Reader(pickle.Unpickler):
    """Makes objects of the simulator's classes alone, so that a file cannot call anything else."""

    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name) if module.startswith("gpipe_bench.simulator.") else None
        if not isinstance(found, type) or found.__module__ != module:
            raise pickle.UnpicklingError(f"stored values must be of the simulator's classes, got {module}.{name}")
        return found


def kept(folder: Path | None, key: Mapping[str, Any], make: Callable[[], T]) -> T:
    """The value under ``key``, made and stored where there is none.

    Args:
        folder: where it is kept; None: ``$XDG_CACHE_HOME/gpipe_bench/traces``, by default below ``~/.cache``.
        key: all that the value depends on, code aside.
        make: makes it, of plain values and classes of the simulator.
    """
    text = json.dumps({**key, "code": _digest()}, sort_keys=True, default=str)
    name = f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.pickle"
    path = (cache_folder("traces") if folder is None else folder) / name
    stored = read_sealed(path)
    if stored is not None:
        value: T = _Reader(io.BytesIO(stored)).load()
        return value
    value = make()
    # Without a cache the next run makes it again.
    with suppress(OSError):
        write_sealed(path, pickle.dumps(value))
    return value


@cache
def _digest() -> str:
    """A digest of the simulator, of the models, of what reads tables, and of the version of PyTorch."""
    package = Path(__file__).parents[2]
    digest = hashlib.sha256(version("torch").encode())
    for pattern in ("simulator/**/*.py", "models/*.py", "tables.py", "columns.*"):
        for path in sorted(package.glob(pattern)):
            digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()
