"""Locks of a Snakemake that was killed, which would refuse every later run.

Each run holds a shared lock of the operating system on one file, which ends with its process, however that ends. Who
gets the file alone knows that no other run is there, so that Snakemake's own locks are of none that still runs.
"""

from __future__ import annotations

import atexit
import fcntl
from pathlib import Path


def drop_stale_locks(notes: Path) -> bool:
    """Hold this process's place, and remove locks that no run holds; whether there were any.

    Args:
        notes: Snakemake's folder ``.snakemake``.
    """
    notes.mkdir(exist_ok=True)
    place = (notes / "running").open("a", encoding="utf-8")
    try:
        fcntl.flock(place, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # another run is there, or the file system has no such locks
        stale = []
    else:
        stale = sorted((notes / "locks").glob("*"))
    for lock in stale:
        lock.unlink(missing_ok=True)
    try:
        fcntl.flock(place, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        place.close()
    else:
        atexit.register(place.close)  # keeps the file, and so its lock, until this process ends
    return bool(stale)
