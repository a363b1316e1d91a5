"""Caches traces on disk, for each version of PyTorch and of this code."""

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
from typing import Any, Final, TypeVar

from gpipe_bench.util.cache import cache_folder, read_sealed, write_sealed

T = TypeVar("T")

TRACING: Final = (
    "kernels/*.py",
    *(f"simulator/{name}" for name in ("tracing/*.py", "workloads/optimizer*.py", "workloads/sources.py")),
)
"""The files of the package that decide what a trace holds, as patterns."""

_OWN: Final = ("gpipe_bench.simulator.", "gpipe_bench.kernels.")


class _Reader(pickle.Unpickler):
    """Makes objects of the simulator's classes alone, so that a file cannot call anything else."""

    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name) if module.startswith(_OWN) else None
        if not isinstance(found, type) or found.__module__ != module:
            raise pickle.UnpicklingError(f"stored values must be of the simulator's classes, got {module}.{name}")
        return found


def default_folder() -> Path:
    """Where values are kept: ``$XDG_CACHE_HOME/gpipe_bench/traces``, by default below ``~/.cache``."""
    return cache_folder("traces")


def kept(folder: Path | None, key: Mapping[str, Any], make: Callable[[], T], sources: tuple[str, ...] = TRACING) -> T:
    """The value under ``key``, made and stored where there is none.

    Args:
        folder: where it is kept; None to keep nothing.
        key: all that the value depends on, code aside.
        make: makes it, of plain values and classes of the simulator.
        sources: patterns of the files of the package that it depends on; the models are among them anyway.
    """
    if folder is None:
        return make()
    text = json.dumps({**key, "torch": _torch_version(), "sources": _digest(sources)}, sort_keys=True, default=str)
    path = folder / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.pickle"
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
def _torch_version() -> str:
    return version("torch")


@cache
def _digest(sources: tuple[str, ...]) -> str:
    """A digest of files of the package, and of the models."""
    here = Path(__file__).parents[2]
    digest = hashlib.sha256()
    found = (path for pattern in sources for path in sorted(here.glob(pattern)))
    for path in (*found, *sorted((here / "models").glob("*.py"))):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()
