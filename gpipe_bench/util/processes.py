"""Independent pieces of one job, side by side in forked processes: the same results in the same order, sooner.

A free process takes the next piece, so pieces of unequal length fill all processors. Nothing that is timed runs like
this.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import Any, Final, TypeVar

T = TypeVar("T")
R = TypeVar("R")

PROCESSES: Final = "GPIPE_BENCH_PROCESSES"
"""Variable of the environment by which the workflow says how many processes one job may use."""

FORKS: Final = sys.platform == "linux"
"""Whether a process that has loaded PyTorch can be forked; the libraries of other systems may not survive that."""

_PR_SET_PDEATHSIG: Final = 1
_job: list[tuple[Callable[[Any], Any], Sequence[Any]]] = []
"""In a process of a job its work and all pieces."""


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
    count = min(processes, len(pieces))
    if count <= 1 or not FORKS:
        yield from map(work, pieces)
        return
    others, context = multiprocessing.active_children(), multiprocessing.get_context("fork")
    with ProcessPoolExecutor(count, context, _begin, (work, pieces, os.getpid())) as pool:
        try:
            with forking():
                outcomes = [pool.submit(_outcome, number) for number in range(len(pieces))]
            for piece, outcome in zip(pieces, outcomes, strict=True):
                done, value = outcome.result()
                yield value if done else work(piece)
        except BrokenProcessPool as error:
            rule = "processes of a job must live until its end, got one that was killed"
            raise RuntimeError(f"{rule}; use fewer of them") from error
        except BaseException:
            for child in multiprocessing.active_children():
                if child not in others:
                    child.kill()
            raise


def _begin(work: Callable[[Any], Any], pieces: Sequence[Any], caller: int) -> None:
    begin_child(caller)
    _job.append((work, pieces))


def _outcome(number: int) -> tuple[bool, Any]:
    work, pieces = _job[-1]
    try:
        return True, work(pieces[number])
    except Exception:  # noqa: BLE001 - the caller does the piece again, and meets it there
        return False, None


@contextmanager
def forking() -> Iterator[None]:
    """Start processes in the block. An interrupt waits: Python drops an exception that is raised in hooks of a fork."""
    masked = hasattr(signal, "pthread_sigmask")
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT}) if masked else set()
    try:
        with warnings.catch_warnings():
            # From Python 3.12 on every fork beside a thread is warned of; those of a BLAS survive it.
            warnings.simplefilter("ignore", DeprecationWarning)
            yield
    finally:
        if masked:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def begin_child(caller: int) -> None:
    """In a process that was started in a block of :func:`forking`: leave interrupts to the caller, and end with it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    end_with(caller, signal.SIGKILL)


def end_with(caller: int, number: signal.Signals) -> None:
    """Let this process get a signal when the one that started it ends, however that ends; on Linux."""
    if FORKS:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
        if os.getppid() != caller:  # it died before that
            os._exit(1)
