"""Schedules whose micro-batches go down the devices and up again: two partitions on each device.

    device    0      1      2          Partition j and partition 2 p - 1 - j share a device, so that the loss is
    F down    0  ->  1  ->  2          where the micro-batch started.
    F up      5  <-  4  <-  3

Qi et al. (Pipeline Parallelism with Controllable Memory, arXiv 2405.15362, section 3) build them from one block: the
actions of one micro-batch, repeated every six units of time. A longer block holds more activations.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence

from gpipe_bench.schedules.actions import Action, Schedule


def zb_v(m: int, devices: int) -> Schedule:
    """ZB-V (arXiv 2405.15362, section 4.1), as ``handcrafted_zb_v`` of its authors and PyTorch have it.

    With m = 3 on two devices; partitions 2 and 3 are on the way up:

        device 0  F0,0 F1,0 F2,0 F0,3 I0,3 W0,3 F1,3 I1,3 W1,3 I0,0 W0,0 F2,3 I2,3 W2,3 I1,0 W1,0 I2,0 W2,0
        device 1       F0,1 F0,2 F1,1 F1,2 I0,2 W0,2 F2,1 I0,1 W0,1 F2,2 I1,2 W1,2 I1,1 I2,2 I2,1 W1,1 W2,2 W2,1

    Where T_F = T_B = T_W and m is at least 2 p - 1, no device waits between its first and its last action. A device
    holds up to 2 p activations of half-size partitions, as much as the first device of 1F1B. With fewer micro-batches
    it is the schedule for 2 p - 1 without the last ones.
    """
    rows = (_zb_v_row(max(m, 2 * devices - 1), devices, device) for device in range(devices))
    return Schedule(tuple(tuple(action for action in row if action.i < m) for row in rows))


def _zb_v_row(m: int, p: int, device: int) -> Iterator[Action]:
    """What a device does: F, I and W of its partition on the way down (0) and of that on the way up (1)."""
    parts = {"0": device, "1": 2 * p - 1 - device}
    counts: Counter[str] = Counter()

    def take(words: Iterable[str]) -> Iterator[Action]:
        for word in words:
            yield Action(word[0], counts[word], parts[word[1]])
            counts[word] += 1

    yield from take(["F0"] * (2 * (p - device) - 1))
    yield from take(["F1", "F0"] * device)
    yield from take(["F1", "I1", "W1"] * (p - device))
    while counts["F1"] < m:
        yield from take(["F0"] * (counts["F0"] < m))
        yield from take(["I0", "W0", "F1", "I1", "W1"])
    yield from take(["I0", "I1"] * device)
    yield from take(["I0", "W0"] * (p - device))
    yield from take(["W1"] * (m - counts["W1"]))
    yield from take(["W0"] * (m - counts["W0"]))


def v_half(m: int, devices: int) -> Schedule:
    """V-Half (arXiv 2405.15362, section 4.1), as ``zbv_greedy.py`` of sail-sg/zero-bubble-pipeline-parallelism has it.

    With m = 2 on two devices:

        device 0  F0,0 F1,0      F0,3 I0,3 W0,3 F1,3      I0,0 I1,3 W1,3 W0,0      I1,0 W1,0
        device 1       F0,1 F0,2 F1,1 F1,2 I0,2 W0,2 I0,1 W0,1      I1,2 W1,2 I1,1 W1,1

    A device holds up to p + 2 activations of half-size partitions, p + 1 where p is odd: about half of 1F1B's first
    device. The bubble is about half of 1F1B's.
    """
    p, pause = devices, 3 if devices % 2 == 0 else 0
    return _tightened(m, [(2 * d, 3 * p - 2 - d, 3 * p - 1 + pause + 2 * d, 6 * p - 2 + pause - d) for d in range(p)])


def v_min(m: int, devices: int) -> Schedule:
    """V-Min (arXiv 2405.15362, section 4.1), as ``zbv_greedy.py`` of sail-sg/zero-bubble-pipeline-parallelism has it.

    With m = 2 on two devices:

        device 0  F0,0 F1,0      F0,3 I0,3 W0,3      I0,0 W0,0 F1,3 I1,3 W1,3      I1,0 W1,0
        device 1       F0,1 F0,2           I0,2 I0,1 F1,1 F1,2 W0,2 W0,1 I1,2 I1,1 W1,2 W1,1

    A device holds up to two thirds of p + 4 activations of half-size partitions, rounded down to an even number, about
    a third of 1F1B's first device. The bubble is about two thirds of 1F1B's.
    """
    p, pause = devices, 2 if devices % 3 == 0 else 0
    return _tightened(m, [(d, 2 * p - 1 - d, 2 * p + pause + d, 4 * p - 1 + pause - d) for d in range(p)])


_PERIOD = 6
"""F, I and W of two partitions, one unit each."""

_Slots = dict[tuple[int, int], int]
"""The unit of time of each pass of a device, by way and micro-batch; W are counted through both ways."""
_F_DOWN, _F_UP, _I_DOWN, _I_UP, _W = range(5)


def _tightened(m: int, block: Sequence[tuple[int, int, int, int]]) -> Schedule:
    """The block repeated for m micro-batches; before and after the steady state, passes move where devices wait.

    They move first with the W that fill the waiting times, then, after the steady state, with W put in anew.

    Args:
        m: micro-batches.
        block: for each device when it takes F down, F up, I down and I up of the first one.
    """
    rows = [{(way, i): start + _PERIOD * i for way, start in enumerate(starts) for i in range(m)} for starts in block]
    rows = _squeezed(_moved([_with_weights(row) for row in rows], at_start=True))
    rows = [{key: slot for key, slot in row.items() if key[0] != _W} for row in rows]
    rows = _squeezed([_with_weights(row) for row in _moved(rows, at_start=False)])
    rows = [_with_weights({key: slot for key, slot in row.items() if key[0] != _W}) for row in rows]
    return Schedule(tuple(tuple(_actions(row, d, len(rows))) for d, row in enumerate(rows)))


def _with_weights(row: _Slots) -> _Slots:
    """The slots of a device with each W in the first one that is free."""
    ways = {slot: way for (way, _), slot in row.items()}
    weights = sum(way in (_I_DOWN, _I_UP) for way in ways.values())
    full, slot, owed, done = dict(row), 0, 0, 0
    while done < weights:
        if slot in ways:
            owed += ways[slot] in (_I_DOWN, _I_UP)
        elif owed:
            full[_W, done] = slot
            owed, done = owed - 1, done + 1
        slot += 1
    return full


def _moved(rows: Sequence[_Slots], *, at_start: bool) -> list[_Slots]:
    """Passes outside the steady state in the earliest free slots that raise no device's memory over today's maximum.

    The steady state lasts from the first I up of device 0 to its last F down.

    Args:
        rows: the slots of each device.
        at_start: whether passes before the steady state move, too.
    """
    moved = [dict(row) for row in rows]
    limit = max(map(_held, moved))
    taken: list[set[int]] = [set() for _ in rows]
    last = max(i for way, i in rows[0] if way == _F_DOWN)
    moves, steady = at_start, False
    for slot, d, way, i in _in_order(rows):
        if (d, way, i) == (0, _I_UP, 0):
            moves, steady = False, True
        if moves:
            earlier = (at for at in range(_ready(moved, d, way, i), slot) if at not in taken[d])
            fits = (at for at in earlier if _held({**moved[d], (way, i): at}) <= limit)
            moved[d][way, i] = next(fits, slot)
        taken[d].add(moved[d][way, i])
        if steady and (way, i) == (_F_DOWN, last):
            moves, steady = True, False
    return moved


def _squeezed(rows: Sequence[_Slots]) -> list[_Slots]:
    """The same order on each device, with every pass as early as possible."""
    early: list[_Slots] = [{} for _ in rows]
    free = [0] * len(rows)
    for _, d, way, i in _in_order(rows):
        early[d][way, i] = max(free[d], _ready(early, d, way, i))
        free[d] = early[d][way, i] + 1
    return early


def _in_order(rows: Sequence[_Slots]) -> list[tuple[int, int, int, int]]:
    """Slot, device, way and number of all passes, in time."""
    return sorted((slot, d, *key) for d, row in enumerate(rows) for key, slot in row.items())


def _ready(rows: Sequence[_Slots], d: int, way: int, i: int) -> int:
    """The first slot after all that a pass needs."""
    row = rows[d]
    needed = [row[way, i - 1]] if i else []
    if way == _W:
        needed.append(sorted(slot for key, slot in row.items() if key[0] in (_I_DOWN, _I_UP))[i])
    else:
        before = d - 1 if way in (_F_DOWN, _I_DOWN) else d + 1
        needed += [rows[before][way, i]] if 0 <= before < len(rows) else []
        needed += [row[way - 1, i]] if way else []
    return 1 + max(needed, default=-1)


def _held(row: _Slots) -> int:
    """The most forward passes whose activations a device holds at once."""
    full = row if (_W, 0) in row else _with_weights(row)
    held = most = 0
    for _, way in sorted((slot, way) for (way, _), slot in full.items()):
        held += (way in (_F_DOWN, _F_UP)) - (way == _W)
        most = max(most, held)
    return most


def _actions(row: _Slots, d: int, p: int) -> Iterator[Action]:
    """The actions of a device; W of the way up, whose I are first, come first."""
    up, down = 2 * p - 1 - d, d
    parts = {_F_DOWN: down, _F_UP: up, _I_DOWN: up, _I_UP: down}
    owed: dict[int, deque[Action]] = {up: deque(), down: deque()}
    for (way, i), _ in sorted(row.items(), key=lambda item: item[1]):
        if way == _W:
            yield (owed[up] or owed[down]).popleft()
            continue
        yield Action("F" if way in (_F_DOWN, _F_UP) else "I", i, parts[way])
        if way in (_I_DOWN, _I_UP):
            owed[parts[way]].append(Action("W", i, parts[way]))
