"""Work spread over processes gives what one process gives, in the same order, and leaves no process behind."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys

import pytest

from gpipe_bench.errors import ConfigError
from gpipe_bench.util.processes import FORKS, spread, usable_processes

forks = pytest.mark.skipif(not FORKS, reason="all is done in one process here")


@pytest.mark.parametrize("processes", [1, 2, 3, 8])
@pytest.mark.parametrize("count", [0, 1, 5, 1500])
def test_results_are_in_the_order_of_the_pieces(processes, count):
    assert list(spread(lambda piece: piece**2, range(count), processes)) == [piece**2 for piece in range(count)]


def test_one_process_is_this_one():
    assert set(spread(lambda _: os.getpid(), range(3), 1)) == {os.getpid()}
    assert list(spread(lambda _: os.getpid(), [0], 4)) == [os.getpid()]


@forks
def test_several_processes_work_at_once():
    reading, writing = os.pipe()

    def met(piece):
        # Each waits for what only the other one does.
        if piece == 0:
            return os.read(reading, 1), os.getpid()
        os.write(writing, b"x")
        return b"x", os.getpid()

    (first, one), (second, other) = spread(met, [0, 1], 2)
    assert (first, second) == (b"x", b"x")
    assert len({one, other, os.getpid()}) == 3


def test_an_error_is_that_of_one_process():
    def refuse(piece):
        if piece == 2:
            raise ConfigError(["first", "second"])
        return piece

    found = spread(refuse, range(4), 2)
    assert [next(found), next(found)] == [0, 1]
    with pytest.raises(ConfigError) as caught:
        next(found)
    assert caught.value.problems == ("first", "second")


@forks
def test_a_process_that_is_killed_is_an_error():
    def die(piece):
        if piece == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return piece

    with pytest.raises(RuntimeError, match="got one that was killed; use fewer of them"):
        list(spread(die, range(3), 2))


@forks
def test_a_caller_that_is_killed_takes_its_processes_along():
    program = """
import os, signal
from gpipe_bench.util.processes import spread
def wait(piece):
    os.write(1, b"%d\\n" % piece)
    signal.pause()
list(spread(wait, [0, 1], 2))
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as caller:
        assert caller.stdout is not None
        try:
            assert sorted(caller.stdout.readline() for _ in range(2)) == [b"0\n", b"1\n"]
        finally:
            caller.kill()
        # The pipe ends when the last process that could write to it is gone.
        assert select.select([caller.stdout], [], [], 30)[0]
        assert caller.stdout.read() == b""


def test_jobs_share_the_processors(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.delenv("SLURM_CPUS_PER_TASK", raising=False)
    assert [usable_processes(jobs) for jobs in (1, 2, 3, 8, 64)] == [8, 4, 2, 1, 1]


@pytest.mark.parametrize(("given", "processes"), [("1", 1), ("3", 3), ("64", 8), ("", 8)])
def test_a_slurm_job_uses_what_it_was_given(monkeypatch, given, processes):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", given)
    assert usable_processes(1) == processes
