"""GPipe and 1F1B, where each device alternates between forward and backward passes; with one partition each, or more.

m is the number of micro-batches, n that of partitions.
"""

from __future__ import annotations

from itertools import accumulate

from gpipe_bench.schedules.actions import Action, Schedule


def gpipe(m: int, n: int) -> Schedule:
    """GPipe's schedule: each device keeps the activations of all m micro-batches.

    With m = 4 and n = 3, where numbers are micro-batches:

        device 0  F0 F1 F2 F3                   B3    B2    B1    B0
        device 1     F0 F1 F2 F3          B3    B2    B1    B0
        device 2        F0 F1 F2 F3 B3    B2    B1    B0

    The backward pass takes the micro-batches in reverse, as figure 2c of GPipe (Huang et al., arXiv 1811.06965) and
    torchgpipe (Kim et al., arXiv 2004.09910) have it. PyTorch's ``ScheduleGPipe`` takes them in order.
    """
    forward = [[Action("F", i, j) for i in range(m)] for j in range(n)]
    backward = [[Action("B", i, j) for i in reversed(range(m))] for j in range(n)]
    return Schedule(tuple((*f, *b) for f, b in zip(forward, backward, strict=True)))


def one_f_one_b(m: int, n: int) -> Schedule:
    """1F1B with a flush (Narayanan et al., PipeDream-Flush, arXiv 2006.09503, section 3.2).

    With m = 4 and n = 3:

        device 0  F0 F1 F2             B0    F3 B1       B2       B3
        device 1     F0 F1       B0    F2 B1    F3 B2       B3
        device 2        F0 B0    F1 B1    F2 B2    F3 B3

    Device j keeps at most n - j micro-batches; GPipe keeps m.
    """
    passes = {(kind, j): [Action(kind, i, j) for i in range(m)] for kind in "FB" for j in range(n)}
    return Schedule(tuple(tuple(alternate(passes["F", j], passes["B", j], n - 1 - j)) for j in range(n)))


def interleaved(m: int, n: int, devices: int) -> Schedule:
    """Interleaved 1F1B (Narayanan et al., Megatron-LM, arXiv 2104.04473, section 2.2).

    With m = 2 and n = 4 on two devices (micro-batch, partition):

        device 0  F0,0 F1,0 F0,2 F1,2           B0,2           B1,2      B0,0      B1,0
        device 1       F0,1 F1,1 F0,3 B0,3      F1,3 B1,3      B0,1      B1,1

    Partition j is on device j mod p. With v partitions on each device the bubble is v times smaller than with one.
    Micro-batches go through the pipeline in groups of about p, the largest group first.
    """
    return Schedule(tuple(map(tuple, interleaved_rows(m, n, devices, "B", 2))))


def interleaved_rows(m: int, n: int, devices: int, backward_kind: str, ahead: int) -> list[list[Action]]:
    """F and B, or F and I, of each device; each takes ``ahead`` more F before its first B than the next device."""
    groups = max(1, m // devices)
    sizes = [(m + k) // groups for k in reversed(range(groups))]
    rows = []
    for d in range(devices):
        parts = range(d, n, devices)
        forward = [Action("F", i, j) for group in _grouped(sizes) for j in parts for i in group]
        backward = [Action(backward_kind, i, j) for group in _grouped(sizes) for j in reversed(parts) for i in group]
        rows.append(alternate(forward, backward, ahead * (devices - 1 - d) + (len(parts) - 1) * sizes[0]))
    return rows


def looped_bfs(m: int, n: int, devices: int) -> Schedule:
    """Looped breadth-first (Lamy-Poirier, Breadth-First Pipeline Parallelism, arXiv 2211.05953, section 4).

    With m = 2 and n = 4 on two devices (micro-batch, partition):

        device 0  F0,0 F1,0 F0,2 F1,2                B1,2      B0,2      B1,0      B0,0
        device 1       F0,1 F1,1 F0,3 F1,3 B1,3      B0,3      B1,1      B0,1

    GPipe with several partitions on each device: partition j is on device j mod p, and passes all micro-batches before
    the next one. With v partitions on each device the bubble is v times smaller; all activations are kept.
    """
    rows = []
    for d in range(devices):
        parts = range(d, n, devices)
        forward = [Action("F", i, j) for j in parts for i in range(m)]
        rows.append((*forward, *(Action("B", i, j) for _, i, j in reversed(forward))))
    return Schedule(tuple(rows))


def _grouped(sizes: list[int]) -> list[range]:
    """Consecutive micro-batches in groups of these sizes."""
    ends = list(accumulate(sizes))
    return [range(end - size, end) for size, end in zip(sizes, ends, strict=True)]


def alternate(forward: list[Action], backward: list[Action], warm_up: int) -> list[Action]:
    """Some forward passes first, then one forward and one backward pass in turn, then the remaining backward passes."""
    warm_up = min(warm_up, len(forward))
    row = forward[:warm_up]
    for ahead, behind in zip(forward[warm_up:], backward, strict=False):
        row += [ahead, behind]
    return row + backward[len(forward) - warm_up :]
