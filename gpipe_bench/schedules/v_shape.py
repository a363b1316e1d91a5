"""Schedules whose micro-batches go down the devices and up again: two partitions on each device.

    device    0      1      2          Partition j and partition 2 p - 1 - j share a device, so that the loss is
    F down    0  ->  1  ->  2          where the micro-batch started.
    F up      5  <-  4  <-  3

Qi et al. (Pipeline Parallelism with Controllable Memory, arXiv 2405.15362, section 3) build them from one block: the
actions of one micro-batch, repeated every six units of time. A longer block holds more activations.
"""

from __future__ import annotations

from itertools import product

from gpipe_bench.schedules.actions import Action, Schedule
from gpipe_bench.schedules.zero_bubble import fill

_PERIOD = 6
"""F, I and W of two partitions, one unit each."""


def zb_v(m: int, devices: int) -> Schedule:
    """ZB-V (arXiv 2405.15362, section 4.1).

    With m = 2 on two devices; partitions 2 and 3 are on the way up:

        device 0  F0,0 F1,0      F0,3 I0,3 F1,3 I1,3 I0,0 W0,3 I1,0 W1,3 W0,0 W1,0
        device 1       F0,1 F0,2 F1,1 F1,2 I0,2 I0,1 I1,2 I1,1 W0,2 W0,1 W1,2 W1,1

    Where T_F = T_B = T_W no device waits longer than the first micro-batch takes to reach it, or to leave it. A device
    holds up to 2 p activations of half-size partitions, as much as the first device of 1F1B.
    """
    return fill(_blocks(m, devices, (3, 3, 3, 3)), 2 * devices)


def v_half(m: int, devices: int) -> Schedule:
    """V-Half (arXiv 2405.15362, section 4.1).

    With m = 2 on two devices:

        device 0  F0,0           F0,3 I0,3 F1,0 W0,3      F1,3 I1,3 I0,0 W1,3 I1,0 W0,0 W1,0
        device 1       F0,1 F0,2           I0,2 F1,1 F1,2 I0,1 W0,2 I1,2 I1,1 W0,1 W1,2 W1,1

    A device holds up to p + 2 activations of half-size partitions, about half of 1F1B's first device, and the bubble is
    about half of 1F1B's.
    """
    return fill(_blocks(m, devices, (1, 2, 1, 2)), devices + 2)


def v_min(m: int, devices: int) -> Schedule:
    """V-Min (arXiv 2405.15362, section 4.1).

    With m = 2 on two devices:

        device 0  F0,0           F0,3 I0,3 F1,0 W0,3 I0,0 W0,0 F1,3 I1,3 W1,3      I1,0 W1,0
        device 1       F0,1 F0,2           I0,2 I0,1 F1,1 F1,2 W0,2 W0,1 I1,2 I1,1 W1,2 W1,1

    A device holds up to two thirds of p + 4 activations of half-size partitions, rounded down to an even number, about
    a third of 1F1B's first device. The bubble is about two thirds of 1F1B's.
    """
    return fill(_blocks(m, devices, (1, 1, 1, 1)), (devices + 4) // 3 * 2)


def _blocks(m: int, devices: int, steps: tuple[int, int, int, int]) -> list[list[Action]]:
    """F and I of each device in the order of the repeated block."""
    block = _block(devices, steps)
    rows = []
    for d, (down, up, back_down, back_up) in enumerate(block):
        first, second = d, 2 * devices - 1 - d
        timed = [
            (start + _PERIOD * i, Action(kind, i, j))
            for i in range(m)
            for start, kind, j in (
                (down, "F", first),
                (up, "F", second),
                (back_down, "I", second),
                (back_up, "I", first),
            )
        ]
        rows.append([action for _, action in sorted(timed)])
    return rows


def _block(devices: int, steps: tuple[int, int, int, int]) -> list[tuple[int, int, int, int]]:
    """When each device takes F down, F up, I down and I up of one micro-batch: the shortest block that fits."""
    last = devices - 1
    gaps = sorted(product(range(1, _PERIOD + 1), repeat=3), key=sum)
    for gap in gaps:
        starts = [0]
        for step, pause in zip(steps, gap, strict=False):
            starts.append(starts[-1] + step * last + pause)
        down, up, back_down, back_up = starts
        block = [
            (
                down + steps[0] * d,
                up + steps[1] * (last - d),
                back_down + steps[2] * d,
                back_up + steps[3] * (last - d),
            )
            for d in range(devices)
        ]
        # Repeated blocks must not meet in one unit of one device.
        if all(len({start % _PERIOD for start in device}) == len(device) for device in block):
            return block
    raise AssertionError(f"no block has steps {steps} on {devices} devices")
