"""Which blocks have come back before each pass.

Blocks are on their way in groups, in the order in which they left. As a rule the first one comes back first; where
copies overtake each other, as portals make them, others do.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gpipe_bench.simulator.known_order.step_times import Integers

__all__ = ["Backs", "Moments", "come_backs", "counted"]


class Moments(NamedTuple):
    """Times in the order of something, and entries of what brings them about.

    Attributes:
        times: in nanoseconds.
        entries: see :mod:`gpipe_bench.simulator.known_order.turns`; of the same shape.
    """

    times: Integers
    entries: Integers


class Backs(NamedTuple):
    """What comes back between the passes of a queue's owner.

    Attributes:
        new: (passes,) how many groups come back before each pass and after the one before, if they are the first ones.
        odd: by pass the places of those that come back in the queue, where others are ahead of them.
    """

    new: Integers
    odd: dict[int, tuple[int, ...]]


def counted(counts: Integers) -> Backs:
    """The same where the first always comes first, of which so many had come back before each pass."""
    return Backs(np.diff(counts, prepend=0), {})


def come_backs(ended: Moments, turns: Moments, least: Integers | None = None) -> Backs:
    """What comes back between passes.

    Args:
        ended: of each group in the order in which they left.
        turns: of each pass, in order.
        least: for each group the first pass that may find it back.
    """
    (ends, entered), (times, entries), count = ended, turns, len(turns.times)
    first = np.searchsorted(times, ends)
    # Of turns of the same time those with a higher entry come later.
    while (
        late := (first < count)
        & (times[np.minimum(first, count - 1)] == ends)
        & (entries[np.minimum(first, count - 1)] <= entered)
    ).any():
        first += late
    if least is not None:
        first = np.maximum(first, least)
    new = np.bincount(first, minlength=count + 1)[:count]
    if (first[1:] >= first[:-1]).all():
        return Backs(new, {})
    odd = _out_of_order(first.tolist(), count)
    new[list(odd)] = 0
    return Backs(new, odd)


def _out_of_order(first: list[int], count: int) -> dict[int, tuple[int, ...]]:
    """Places of the groups that come back where those are not the first ones."""
    by_pass: dict[int, list[int]] = {}
    for group, which in enumerate(first):
        if which < count:
            by_pass.setdefault(which, []).append(group)
    odd: dict[int, tuple[int, ...]] = {}
    head, ahead = 0, set[int]()
    for which in sorted(by_pass):
        groups = by_pass[which]
        places, last, gone = [], head, 0
        for group in groups:
            gone += sum(one in ahead for one in range(last, group)) if ahead else 0
            places.append(group - head - gone)
            last = group
        if places[-1] >= len(places):
            odd[which] = tuple(places)
        ahead.update(groups)
        while head in ahead:
            ahead.remove(head)
            head += 1
    return odd
