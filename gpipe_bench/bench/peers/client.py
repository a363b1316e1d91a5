"""The race's side of a contender's process: one request, one answer, within a time limit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final, NoReturn

_START_S: Final = 120.0
_ENVIRONMENT: Final = {
    # A fork has only the threads that it starts itself: NumPy's would be lost.
    "OPENBLAS_NUM_THREADS": "1",
    # GPUs counted by NVML leave CUDA to forks.
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    # glibc gives freed memory back to the kernel or not as it has learned from what came before, and a step that gets
    # it anew, page by page, takes up to a quarter longer. Everybody keeps it.
    "MALLOC_MMAP_THRESHOLD_": str(2**30),
    "MALLOC_TRIM_THRESHOLD_": str(2**31 - 1),
    "MALLOC_TOP_PAD_": str(2**27),
}
"""What contenders find in their environment beside the caller's."""


class PeerError(Exception):
    """A contender cannot go on.

    Attributes:
        status: of its row.
        reason: likewise.
    """

    def __init__(self, status: str, reason: str) -> None:
        self.status, self.reason = status, reason
        super().__init__(reason)


class Child:
    """The process of one contender.

    Args:
        name: of the contender, or ``probe``.
        channel: to it and from it.
        log: takes what it prints.
        timeout_s: what a request may take.
    """

    def __init__(self, name: str, channel: _Channel, log: Path, timeout_s: float) -> None:
        self.name, self._log, self._timeout_s = name, log, timeout_s
        self.launchers: list[subprocess.Popen[bytes]] = []
        self._begin(channel)

    def _begin(self, channel: _Channel) -> None:
        self._channel = channel
        self.launchers.append(channel.launcher)
        self._open = False
        self.hello: dict[str, Any] | None = None

    def ready(self) -> dict[str, Any]:
        """What it said when it had loaded its package.

        Raises:
            PeerError: it cannot take part.
        """
        if self.hello is None:
            self.hello = self._answer(_START_S)
        if self.hello["status"] != "ok":
            raise PeerError(self.hello["status"], self.hello["reason"])
        return self.hello

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        """Send a request and wait for its answer.

        Raises:
            PeerError: the contender failed, ended or took too long; it has to be opened anew.
        """
        self.ready()
        self._open = True
        self._send({"do": do, **arguments})
        answer = self._answer(self._timeout_s)
        if "ended" in answer:
            self._restart(f"the process of {self.name} ended with status {answer['ended']} at {do!r}")
        if answer["status"] != "ok":
            self.close()
            raise PeerError(answer["status"], answer["reason"])
        return answer

    def close(self) -> None:
        """End the case that is open, if one is."""
        if self._open:
            self._open = False
            with suppress(PeerError):
                self._send({"do": "close"})
                self._answer(self._timeout_s)

    def kill(self) -> None:
        """End the process and all that it started."""
        if self.hello is not None:
            with suppress(ProcessLookupError):
                os.killpg(self.hello["pid"], signal.SIGKILL)
        # One that has not said its number yet finds its requests at an end, and goes.
        self._channel.close()

    def _send(self, request: dict[str, Any]) -> None:
        try:
            self._channel.to.send(request)
        except OSError:
            self._restart(f"the process of {self.name} is gone; {self._log} says why")

    def _answer(self, timeout_s: float) -> dict[str, Any]:
        if not self._channel.back.poll(timeout_s):
            self._restart(f"{self.name} gave no answer within {timeout_s:g} s")
        try:
            answer: dict[str, Any] = self._channel.back.recv()
        except (EOFError, OSError):
            self._restart(f"the process of {self.name} is gone; {self._log} says why")
        return answer

    def _restart(self, reason: str) -> NoReturn:
        """Begin anew for the cases to come, and fail this one."""
        if self.hello is None:
            # It never got as far as a pid, and nothing is asked of it again.
            self.hello = {"status": "error", "reason": reason, "pid": self._channel.launcher.pid}
            raise PeerError("error", reason)
        self.kill()
        self._begin(_launch([self.name], self._log)[self.name])
        raise PeerError("error", reason)


@dataclass(frozen=True, slots=True)
class _Channel:
    """Connections to send and to receive by, and the process that made what is at their other ends."""

    to: Connection
    back: Connection
    launcher: subprocess.Popen[bytes]

    def close(self) -> None:
        self.to.close()
        self.back.close()


def _launch(names: Sequence[str], log: Path) -> dict[str, _Channel]:
    """Start a launcher that makes the processes of ``names``."""
    ends = {name: (*Pipe(duplex=False), *Pipe(duplex=False)) for name in names}
    words = [f"{name}:{asked.fileno()}:{answered.fileno()}" for name, (asked, _, _, answered) in ends.items()]
    given = [end for asked, _, _, answered in ends.values() for end in (asked, answered)]
    with log.open("a", encoding="utf-8") as file:
        launcher = subprocess.Popen(
            [sys.executable, "-m", "gpipe_bench.bench.peers.child", *words],
            env={**os.environ, **_ENVIRONMENT},
            pass_fds=[end.fileno() for end in given],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
    for end in given:
        end.close()
    return {name: _Channel(to, back, launcher) for name, (_, to, back, _) in ends.items()}


@contextmanager
def children(names: Sequence[str], log: Path, timeout_s: float) -> Iterator[dict[str, Child]]:
    """A process for each of ``names``, started together, all of them gone at the end."""
    made = {name: Child(name, channel, log, timeout_s) for name, channel in _launch(names, log).items()}
    try:
        yield made
    finally:
        for child in made.values():
            child.kill()
        for launcher in {launcher for child in made.values() for launcher in child.launchers}:
            launcher.kill()
            launcher.wait()
