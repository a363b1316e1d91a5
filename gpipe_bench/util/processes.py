"""Independent pieces of one job, side by side in forked processes: the same results in the same order, sooner.

    caller --- tokens (a pipe that holds the number of every piece) ---> child, child, ...   each takes the next number
    caller <-- results (a pipe per child) ----------------------------- child

A free process takes the next piece, so pieces of unequal length fill all processors. Nothing that is timed runs like
this. Not an executor of the standard library: its workers outlive a caller that was killed.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import struct
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Final, TypeVar

T = TypeVar("T")
R = TypeVar("R")

PROCESSES: Final = "GPIPE_BENCH_PROCESSES"
"""Variable of the environment by which the workflow says how many processes one job may use."""

FORKS: Final = sys.platform == "linux"
"""Whether a process that has loaded PyTorch can be forked; the libraries of other systems may not survive that."""

_TOKEN: Final = struct.Struct("=i")
# What a pipe holds on every Linux, so that all tokens can be written before anybody reads.
_MOST: Final = 4096 // _TOKEN.size
_PR_SET_PDEATHSIG: Final = 1


def usable_processes(jobs: int) -> int:
    """Processes for each of ``jobs`` jobs at once, on the processors that this process may use; at least 1.

    On a cluster with Slurm no more than the job was given, also where nothing binds it to them.
    """
    affinity = getattr(os, "sched_getaffinity", None)  # Linux only
    most = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    given = os.environ.get("SLURM_CPUS_PER_TASK", "")
    most = min(most, int(given)) if given.isdecimal() else most
    return max(1, most // max(1, jobs))


def spread(work: Callable[[T], R], pieces: Sequence[T], processes: int) -> Iterator[R]:
    """``work`` on every piece, in ``processes`` processes at once; results in the order of the pieces.

    With one process, with one piece, and on other systems than Linux, all is done in this process. Otherwise this one
    must not have run a backward pass, after which PyTorch cannot be forked. A piece that raised in a child is done
    again here, so that its error is that of one process.

    Args:
        work: gives something that can be pickled.
        pieces: what to work on.
        processes: how many.

    Raises:
        RuntimeError: a child was killed.
        Exception: whatever ``work`` raises.
    """
    if min(processes, len(pieces)) <= 1 or not FORKS:
        yield from map(work, pieces)
        return
    for start in range(0, len(pieces), _MOST):
        yield from _spread(work, pieces[start : start + _MOST], processes)


@dataclass(frozen=True, slots=True)
class Child:
    """A process that sends results; where there is a fork, it has loaded what its caller has, and dies with it."""

    process: BaseProcess
    results: Connection

    @classmethod
    def start(cls, work: Callable[..., None], *arguments: Any) -> Child:
        """Call ``work`` in a new process with a connection, to send results and to be asked by, and ``arguments``.

        Args:
            work: a function of a module, where there is no fork.
            arguments: can be pickled, where there is no fork.
        """
        context = multiprocessing.get_context("fork") if FORKS else multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(work, theirs, *arguments, os.getpid()), daemon=True)
        with warnings.catch_warnings():
            # From Python 3.12 on every fork beside a thread is warned of; those of a BLAS survive it.
            warnings.simplefilter("ignore", DeprecationWarning)
            with _uninterrupted():
                process.start()
        theirs.close()
        return cls(process, ours)

    def end(self) -> None:
        """Kill it if it is still alive, and forget it."""
        self.process.kill()
        self.process.join()
        self.results.close()


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Put an interrupt off until a fork is over: Python drops an exception that is raised in the hooks of a fork."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _serve(work: Callable[..., None], results: Connection, *arguments: Any) -> None:
    *given, caller = arguments
    # An interrupt of the terminal goes to the caller too, which ends its children.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    end_with(caller, signal.SIGKILL)
    work(results, *given)


def end_with(caller: int, number: signal.Signals) -> None:
    """Let this process get a signal when the one that started it ends, however that ends; on Linux."""
    if FORKS:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
        if os.getppid() != caller:  # it died before that
            os._exit(1)


def _spread(work: Callable[[T], R], pieces: Sequence[T], processes: int) -> Iterator[R]:
    tokens, given = os.pipe()
    os.write(given, b"".join(map(_TOKEN.pack, range(len(pieces)))))
    os.close(given)

    def take(results: Connection) -> None:
        while token := os.read(tokens, _TOKEN.size):
            (number,) = _TOKEN.unpack(token)
            results.send((number, *_outcome(work, pieces[number])))

    children: list[Child] = []
    try:
        for _ in range(min(processes, len(pieces))):
            children.append(Child.start(take))  # noqa: PERF401 - those that were started must end if one cannot be
        yield from _in_order(work, pieces, children)
    finally:
        os.close(tokens)
        for child in children:
            child.end()


def _outcome(work: Callable[[T], R], piece: T) -> tuple[bool, R | None]:
    try:
        return True, work(piece)
    except Exception:  # noqa: BLE001 - the caller does the piece again, and meets it there
        return False, None


def _in_order(work: Callable[[T], R], pieces: Sequence[T], children: Sequence[Child]) -> Iterator[R]:
    found: dict[int, tuple[bool, Any]] = {}
    live: dict[Any, Child] = {child.results: child for child in children}
    for number, piece in enumerate(pieces):
        while number not in found:
            for connection in wait(list(live)):
                try:
                    place, done, value = live[connection].results.recv()
                except EOFError:
                    _check(live.pop(connection))
                    continue
                found[place] = done, value
        done, value = found.pop(number)
        yield value if done else work(piece)


def _check(child: Child) -> None:
    """A child that has nothing more to send must have ended well.

    Raises:
        RuntimeError: it was killed, or could not send a result.
    """
    child.process.join()
    if status := child.process.exitcode:
        reason = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
        raise RuntimeError(f"processes of a job must live until its end, got one that {reason}; use fewer of them")
