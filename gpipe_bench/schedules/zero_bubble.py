"""Zero-bubble schedules: 1F1B with the backward pass split, so that weights' gradients fill the bubble.

m is the number of micro-batches, n that of partitions.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

from gpipe_bench.schedules.actions import Action, Schedule
from gpipe_bench.schedules.one_f_one_b import alternate, interleaved_rows


def zb_h1(m: int, n: int) -> Schedule:
    """ZB-H1 (Qi et al., Zero Bubble, arXiv 2401.10241, section 2.1), as zbpp_light of its authors has it.

    With m = 4 and n = 3:

        device 0  F0 F1 F2       I0 W0 F3 I1 W1 I2 W2 I3 W3
        device 1     F0 F1    I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
        device 2        F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3

    Device j takes W of a micro-batch after I of the j-th next one. So no device holds more activations than the first
    device of 1F1B, which is n. The bubble is a third of 1F1B's where T_F = T_B = T_W.
    """
    return Schedule(tuple(tuple(_with_weights(_alternating(m, n - j, j), j)) for j in range(n)))


def zb_h2(m: int, n: int) -> Schedule:
    """ZB-H2 (Qi et al., Zero Bubble, arXiv 2401.10241, section 2.2), as figure 3 has it.

    With m = 5 and n = 3:

        device 0  F0 F1 F2 F3 F4 I0 W0 I1 W1 I2 W2 I3 W3 I4 W4
        device 1     F0 F1 F2 I0 F3 I1 F4 I2 W0 I3 W1 I4 W2 W3 W4
        device 2        F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 W0 W1 W2 W3 W4

    Device j takes W of a micro-batch after I of the 2j-th next one. So it works without a pause from its first to its
    last action where T_F = T_B = T_W and m is at least 2 n - 1, and holds up to 2 n - 1 activations. That is faster
    than ZB-H1 where a device starts the next batch without waiting for the others.
    """
    return Schedule(tuple(tuple(_with_weights(_alternating(m, 2 * (n - j) - 1, j), 2 * j)) for j in range(n)))


def interleaved_zb(m: int, n: int, devices: int) -> Schedule:
    """ZB-H1 with several partitions on each device, as PyTorch's ``ScheduleInterleavedZeroBubble`` has it.

    With m = 2 and n = 4 on two devices (micro-batch, partition):

        device 0  F0,0 F1,0 F0,2 F1,2      I0,2 W0,2 I1,2 W1,2 I0,0 W0,0 I1,0 W1,0
        device 1       F0,1 F1,1 F0,3 I0,3 F1,3 I1,3 W0,3 I0,1 W1,3 I1,1 W0,1 W1,1

    Partition j is on device j mod p, and micro-batches go through the pipeline in groups, as with interleaved 1F1B.
    Device d takes W after the d-th next I. With one partition on each device it is ZB-H1.
    """
    rows = interleaved_rows(m, n, devices, "I", 1)
    return Schedule(tuple(tuple(_with_weights(row, d)) for d, row in enumerate(rows)))


def _alternating(m: int, warm_up: int, j: int) -> list[Action]:
    """F and I of partition j: ``warm_up`` times F, then I and F in turn, then the remaining I."""
    forward, inputs = ([Action(kind, i, j) for i in range(m)] for kind in "FI")
    return alternate(forward, inputs, warm_up - 1)


def _with_weights(row: Iterable[Action], behind: int) -> Iterator[Action]:
    """A list of F and I with W of each micro-batch, ``behind`` of I later."""
    owed: deque[Action] = deque()
    for action in row:
        yield action
        if action.kind == "I":
            owed.append(Action("W", action.i, action.j))
            if len(owed) > behind:
                yield owed.popleft()
    yield from owed
