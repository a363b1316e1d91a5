"""Child processes with a time limit, of which nothing outlives the call, not even what they started themselves."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path


def run_child(command: Sequence[str], log: Path, timeout_s: float, cwd: Path | None = None) -> int | None:
    """Run ``command`` and append what it prints to ``log``.

    Args:
        command: program and arguments.
        log: file for its output.
        timeout_s: after this long it is killed.
        cwd: where to run it.

    Returns:
        Its exit status, negative for a signal; None when it was killed for its time.
    """
    with log.open("a", encoding="utf-8") as file:
        file.write(f"$ {' '.join(command)}\n")
        file.flush()
        # A session of its own makes one group of the child and its children, which can be killed as one.
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, cwd=cwd, start_new_session=True
        )
        try:
            return child.wait(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            with suppress(ProcessLookupError):  # the usual case: the whole group has ended by itself
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
