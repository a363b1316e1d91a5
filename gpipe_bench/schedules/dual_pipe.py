"""DualPipeV: two partitions on each device, and pairs of a forward and a backward pass that are meant to overlap.

    device    0      1      2          Partitions j and 2 p - 1 - j share a device, as those of ZB-V do.
    F down    0  ->  1  ->  2          A pair is a forward pass on one of them and a backward pass on the other:
    F up      5  <-  4  <-  3          one computes while the other communicates.

DualPipe (DeepSeek-V3, arXiv 2412.19437, section 3.2.1) sends micro-batches into both ends of two copies of the model.
DualPipeV is its half with one copy: ``dualpipev.py`` of deepseek-ai/DualPipe, and ``ScheduleDualPipeV`` of PyTorch.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator

from gpipe_bench.schedules.actions import Action, Schedule


def dualpipe_v(m: int, devices: int) -> Schedule:
    """DualPipeV, which needs 2 p micro-batches: with fewer it is the schedule for 2 p without the last ones.

    With m = 2 on two devices:

        device 0  F0,0 F1,0      F0,3 I0,3 W0,3 F1,3 B1,3      B0,0                B1,0
        device 1       F0,1 F0,2 F1,1 F1,2 B0,2      B0,1      B1,2      B1,1

    A device holds up to 2 p + 1 activations of half-size partitions, one more than with ZB-V.
    """
    rows = [_row(max(m, 2 * devices), devices, device) for device in range(devices)]
    kept = [[[action for action in unit if action.i < m] for unit in row] for row in rows]
    pairs = frozenset(unit[0] for row in kept for unit in row if len(unit) == 2)
    return Schedule(tuple(tuple(action for unit in row for action in unit) for row in kept), pairs)


def _row(m: int, devices: int, device: int) -> list[list[Action]]:
    """What a device does, pairs together: as dualpipev.py, in its eight steps."""
    parts = {"0": device, "1": 2 * devices - 1 - device}
    counts: Counter[str] = Counter()
    owed: deque[Action] = deque()
    row: list[list[Action]] = []
    for word in _words(m, devices - 1 - device, device + 1):
        row.append([])
        if word == "W":
            row[-1].append(owed.popleft())
            continue
        for kind, part in zip(word[::2], word[1::2], strict=True):
            way = ("F" if kind == "F" else "B") + part
            row[-1].append(Action(kind, counts[way], parts[part]))
            counts[way] += 1
            if kind == "I":
                owed.append(Action("W", *row[-1][-1][1:]))
    return row


def _words(m: int, after: int, until: int) -> Iterator[str]:
    """The steps of a device with ``after`` devices after it, and ``until`` up to it: kind and half, a pair joined."""
    yield from ["F0"] * (2 * after)
    yield from ["F0", "F1"] * until
    yield from ["I1", "W", "F1"] * after
    main = ["F0B1", "F1B0"] * (m - 2 * after - until)
    # The last device has nothing to overlap its first backward pass with.
    yield from main if after else ["F0", "B1", *main[1:]]
    yield from ["B1", "F1B0"] * after
    kinds = "B" * until + "I" * until
    yield from (kind + half for kind, half in zip(kinds, "10" * until, strict=True))
    yield from ["W", "I0"] * after
    yield from ["W"] * until
