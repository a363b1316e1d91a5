"""Whether a batch's tasks are worth threads of their own.

A worker runs beside the others only while its layers are in PyTorch's kernels, which release the interpreter's lock.
For each of these releases, and for each job that is handed over, threads fight for the lock. Where the kernels are
short this costs more than what runs at the same time saves, and the calling thread does better alone. How short depends
on the layers and on the machine, so the engine tries both: of the first batches of a kind one goes to the calling
thread, and whatever took less of the host's time is kept. Nothing but time changes: neither the order of backward
passes nor random numbers nor exceptions tell who ran the tasks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from time import perf_counter
from typing import Final

import torch

from gpipe_bench.engine.microbatch import MicroBatch

__all__ = ["WORKERS", "Contest", "Contests", "kind_of", "timed", "undisturbed"]

WORKERS: Final = ("auto", "always", "never")

LONGEST_CYCLE_S: Final = 3e-3
"""Where a clock-cycle takes longer with workers, they are worth it, and nothing is tried."""

LONGEST_TASK_S: Final = 1e-3
"""Where a task takes longer in the calling thread, workers are worth it: to hand it over takes a tenth of that."""

SHORTEST_TASK_S: Final = 80e-6
"""Where a task takes less in the calling thread, it stays there: to hand it over takes 40 microseconds or more, and two
workers save half."""

_CLEARLY: Final = 0.8
_MOST_TRIES: Final = 3
_MOST_KINDS: Final = 64


class Contest:
    """Workers against the calling thread, over the first batches of one kind.

    A batch with workers comes first and does not count, since everything is new; then both take turns. Of the
    calling thread the least time is compared, since what else the machine does only adds to it, and of workers the
    median: how they meet and fight for the lock changes from batch to batch. They must be clearly faster, and twice.
    Once settled, it stays so; so tasks that are long get workers without a comparison, and those that are very short
    the calling thread: a machine that is busy at that moment would decide it.

    Args:
        cycles: clock-cycles of a batch.
        tasks: tasks of a batch.
    """

    __slots__ = ("_cycles", "_inline", "_noted", "_tasks", "_times")

    def __init__(self, cycles: int, tasks: int) -> None:
        self._cycles, self._tasks = cycles, tasks
        self._inline: bool | None = None
        self._noted = False
        self._times: dict[bool, list[float]] = {False: [], True: []}

    def inline(self) -> bool:
        """Whether the calling thread is to run the tasks of the next batch."""
        if self._inline is not None:
            return self._inline
        return len(self._times[False]) > len(self._times[True]) + 1

    @property
    def settled(self) -> bool | None:
        """Whether it came out for the calling thread; None: nothing was ever noted."""
        return self._inline is True if self._noted else None

    def note(self, seconds: float, *, inline: bool) -> None:
        """Take the host time of a batch, or of its backward pass.

        Args:
            seconds: how long the calling thread took or waited.
            inline: whether it ran the tasks.
        """
        self._noted = True
        times = self._times
        if self._inline is not None or (not inline and seconds > self._cycles * LONGEST_CYCLE_S):
            return
        if inline and not self._tasks * SHORTEST_TASK_S <= seconds <= self._tasks * LONGEST_TASK_S:
            self._inline = seconds < self._tasks * SHORTEST_TASK_S
            return
        times[inline].append(seconds)
        tries = len(times[True])
        if tries:
            alone, beside = min(times[True]), median(times[False][1:])
            if alone < _CLEARLY * beside:
                self._inline = True
            elif tries > 1 and beside < _CLEARLY * alone:
                self._inline = False
            elif tries == _MOST_TRIES:
                self._inline = True


class Contests:
    """Those of one pipeline, forward and backward, by kind of batch; of many kinds, those that came last."""

    def __init__(self) -> None:
        self._kinds: OrderedDict[Hashable, tuple[Contest, Contest]] = OrderedDict()

    def settled(self) -> str:
        """The choice of workers that does what every contest came to by now; ``auto`` where they differ."""
        found = {contest.settled for pair in self._kinds.values() for contest in pair} - {None}
        return "auto" if len(found) != 1 else "never" if True in found else "always"

    def of(self, kind: Hashable, cycles: int, tasks: int) -> tuple[Contest, Contest]:
        """The contests of the forward and the backward pass of a batch.

        Args:
            kind: what makes batches alike.
            cycles: how many clock-cycles they have.
            tasks: how many tasks.
        """
        if kind in self._kinds:
            self._kinds.move_to_end(kind)
        else:
            self._kinds[kind] = Contest(cycles, tasks), Contest(cycles, tasks)
            if len(self._kinds) > _MOST_KINDS:
                self._kinds.popitem(last=False)
        return self._kinds[kind]


@contextmanager
def timed(contest: Contest | None, *, inline: bool) -> Iterator[None]:
    """Let ``contest`` know how long the block takes, unless it raises."""
    start = perf_counter()
    yield
    if contest is not None:
        contest.note(perf_counter() - start, inline=inline)


def kind_of(microbatches: Sequence[MicroBatch]) -> Hashable:
    """What tells how much there is to compute: number of micro-batches, shapes and dtypes."""
    values = microbatches[0].values
    return len(microbatches), *((v.shape, v.dtype) if isinstance(v, torch.Tensor) else None for v in values)


def undisturbed() -> bool:
    """Whether this thread has no state that layers in workers would not see, and so must not see here either.

    Such are modes that watch or change operators (a default device is one), hooks for saved tensors or their
    prohibition, transforms, and autocast on any device, whose cache of weights would last for longer than a task.
    """
    watched = torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack()  # noqa: SLF001 - no public way
    hooked = torch._C._autograd._top_saved_tensors_default_hooks(True)  # noqa: SLF001 - as above
    unhookable = torch._C._autograd._saved_tensors_hooks_get_disabled_error_message() is not None  # noqa: SLF001 - as above
    transformed = torch._C._functorch.peek_interpreter_stack()  # noqa: SLF001 - as above
    casts = torch._C._is_any_autocast_enabled()  # noqa: SLF001 - as above
    return not (watched or hooked or unhookable or transformed or casts)
