"""ZB-1p and ZB-2p: zero-bubble schedules that a search finds for given durations and a limit of memory.

Zero Bubble (arXiv 2401.10241, section 3.1) builds schedules action by action, by rules that leave some choices, and
takes the best one. Here a device takes F and I in turns, as soon as they can start, and W while it waits. Three choices
are tried: how many F a device takes before its first I, whether W makes room for an F that is due, and how far W may
delay the next action. GPipe, 1F1B, ZB-H1 and ZB-H2 are tried, too, as far as they keep to the limit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain, product
from math import inf
from typing import Final

from gpipe_bench.errors import ScheduleError
from gpipe_bench.schedules.actions import Action, Schedule
from gpipe_bench.schedules.memory import memory
from gpipe_bench.schedules.one_f_one_b import gpipe, one_f_one_b
from gpipe_bench.schedules.timing import Durations, timing
from gpipe_bench.schedules.zero_bubble import zb_h1, zb_h2

_NAMED: Final = gpipe, one_f_one_b, zb_h1, zb_h2
_ROUNDING: Final = 1e-9


def zb_1p(m: int, n: int) -> Schedule:
    """ZB-1p for T_F = T_B = T_W and free transfers, as its authors' program has it: memory for n micro-batches.

    With m = 4 and n = 3:

        device 0  F0 F1 F2       I0 W0 F3 I1 W1 I2 W2 I3 W3
        device 1     F0 F1    I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
        device 2        F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3
    """
    return searched(m, n, limit=n)


def zb_2p(m: int, n: int) -> Schedule:
    """ZB-2p for T_F = T_B = T_W and free transfers, as its authors' program has it: memory for 2 n micro-batches.

    With m = 5 and n = 3:

        device 0  F0 F1 F2 F3 F4 I0 W0 I1 W1 I2 W2 I3 W3 I4 W4
        device 1     F0 F1 F2 I0 F3 I1 F4 I2 W0 I3 W1 I4 W2 W3 W4
        device 2        F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 W0 W1 W2 W3 W4
    """
    return searched(m, n, limit=2 * n)


def searched(
    m: int,
    n: int,
    limit: float,
    durations: Durations | None = None,
    transfer: float = 0.0,
    *,
    kept: float = 1.0,
) -> Schedule:
    """The schedule with the shortest longest span of a device that the search finds; of several the first to end.

    Args:
        m: micro-batches.
        n: partitions, one on each device.
        limit: how many micro-batches' activations a device may hold at once: n for ZB-1p, 2 n for ZB-2p.
        durations: of all partitions; by default T_F = T_B = T_W = 1.
        transfer: from the end of an action until another device has its result.
        kept: the share of a micro-batch's activations that W needs. With 1 the limit is that of :func:`in_flight`; with
            0.5 and the times that the paper prints most bubbles of its ZB-1p and ZB-2p come out.

    Raises:
        ScheduleError: the limit is below 1, or another number is out of its range.
    """
    problems = [
        *(
            []
            if m >= 1 and n >= 1
            else [f"micro-batches and partitions must be 1 or more, got {m} and {n}; raise them"]
        ),
        *([] if limit >= 1 else [f"limit must be at least 1 micro-batch, got {limit}; a step needs memory for one"]),
        *([] if 0 <= kept <= 1 else [f"kept must be a share from 0 to 1, got {kept}; correct it"]),
        *([] if 0 <= transfer < inf else [f"transfer times must be 0 or more, got {transfer}; give a finite one"]),
    ]
    if problems:
        raise ScheduleError(problems)
    durations = durations or Durations()
    warm_ups = dict.fromkeys(_warm_up(ahead, m, n, limit) for ahead in (2, 3))
    choices = product((False, True), warm_ups, (0.0, durations.weights / 2, durations.weights))
    searches = (_Search(m, limit, durations, transfer, kept, *choice).run() for choice in choices)
    # For equal times these two are searched themselves.
    known = (durations, transfer, kept) == (Durations(), 0.0, 1.0)
    makes = _NAMED if known else (*_NAMED, zb_1p, zb_2p)
    named = (schedule for most, schedule in _with_most_held(makes, m, n, kept) if most <= limit + _ROUNDING)
    work = m * sum(map(durations.of, "FIW"))
    shortest = round(work, 9), round((n - 1) * (durations.forward + transfer) + work, 9)
    # Several choices often come to one schedule: it is timed once.
    found: dict[Schedule, tuple[float, float]] = {}
    for schedule in chain(searches, named):
        if schedule not in found:
            times = timing(schedule, durations, transfer)
            found[schedule] = round(max(times.spans), 9), round(times.makespan, 9)
        if found[schedule] == shortest:
            break
    return min(found, key=found.__getitem__)


def _warm_up(ahead: int, m: int, n: int, limit: float) -> tuple[int, ...]:
    """How many F each device takes at most before its first I: ``ahead`` more than the next device, in the limit.

    A device takes fewer than the one before it, which would have to wait for its I otherwise; all m may both take.
    """
    counts: list[int] = []
    for j in range(n):
        most = int(min(1 + ahead * (n - 1 - j), m, limit))
        counts.append(max(1, min(most, counts[-1] - 1)) if counts and most < m else most)
    return tuple(counts)


@lru_cache(maxsize=4)
def _with_most_held(
    makes: tuple[Callable[[int, int], Schedule], ...], m: int, n: int, kept: float
) -> list[tuple[float, Schedule]]:
    """Schedules, each with the most micro-batches whose activations a device holds; what waits for W counts ``kept``.

    They stay for the next search, which may differ in durations alone.
    """
    made = [make(m, n) for make in makes]
    return [(max(held.during for row in memory(schedule, kept) for held in row), schedule) for schedule in made]


@dataclass(slots=True)
class _Device:
    """A device during the search: what it has done, and until when.

    Attributes:
        forwards: the end of each F that it has taken.
        inputs: the end of each I.
        weights: how many W it has taken.
        last: the kind of its last action that is no W; I before the first one.
        until: the end of the last one.
    """

    row: list[Action] = field(default_factory=list)
    forwards: list[float] = field(default_factory=list)
    inputs: list[float] = field(default_factory=list)
    weights: int = 0
    last: str = "I"
    until: float = 0.0

    def held(self, kept: float) -> float:
        """Micro-batches whose activations it holds; one that waits for W counts as ``kept``."""
        done = len(self.inputs)
        return len(self.forwards) - done + (done - self.weights) * kept


@dataclass(slots=True)
class _Search:
    """One schedule, by one set of choices.

    Attributes:
        m: see :func:`searched`, as for the next ones.
        makes_room: whether a device takes W where its next F has arrived but has no room.
        warm_up: for each device how many F it takes at most before its first I.
        gap: how long a device must wait at least for it to take W meanwhile.
        devices: what each one has taken so far.
    """

    m: int
    limit: float
    durations: Durations
    transfer: float
    kept: float
    makes_room: bool
    warm_up: Sequence[int]
    gap: float
    devices: list[_Device] = field(init=False)

    def __post_init__(self) -> None:
        self.devices = [_Device() for _ in self.warm_up]

    def run(self) -> Schedule:
        """Let the device that is free first take an action, or wait until another one has taken more."""
        busy = [*enumerate(self.devices)][::-1]  # of those that are free at once, the last one takes first
        while busy:
            times = {device.until for _, device in busy}
            now = min(times)
            times.remove(now)
            later = min(times, default=inf)
            for j, device in busy:
                if device.until > now:
                    continue
                if (choice := self._choice(j, later)) is not None:
                    self._take(j, *choice)
                    break
                if later < inf:
                    device.until = later
                    break
            else:
                j, device = next((j, device) for j, device in busy if len(device.inputs) > device.weights)
                self._take(j, "W", device.until)
            if device.weights == self.m:
                busy.remove((j, device))
        return Schedule(tuple(tuple(device.row) for device in self.devices))

    def _take(self, j: int, kind: str, start: float) -> None:
        device = self.devices[j]
        device.until = start + self.durations.of(kind)
        if kind == "W":
            device.row.append(Action(kind, device.weights, j))
            device.weights += 1
            return
        ends = device.forwards if kind == "F" else device.inputs
        device.row.append(Action(kind, len(ends), j))
        ends.append(device.until)
        device.last = kind

    def _choice(self, j: int, later: float) -> tuple[str, float] | None:
        """What device j takes next, and when; None if that is not known before ``later``."""
        device = self.devices[j]
        now, owes = device.until, len(device.inputs) > device.weights
        if owes and j == 0 and len(device.forwards) == self.m:
            return "W", now
        is_full = device.held(self.kept) + 1 > self.limit + _ROUNDING
        arrivals = {"F": self._forward(j), "I": self._inputs(j)}
        for kind in "FI" if device.last == "I" else "IF":
            if arrivals[kind] <= now:
                if kind == "I" or not is_full:
                    return kind, now
                if owes and self.makes_room:
                    return "W", now
        if is_full:
            arrivals["F"] = inf
        kind = "I" if arrivals["I"] <= arrivals["F"] else "F"
        at = arrivals[kind]
        gap = (at if at < inf else later + self.transfer) - now
        if owes and gap >= self.gap:
            return "W", now
        return (kind, at) if at < inf and at <= later else None

    def _forward(self, j: int) -> float:
        """When the next F can start; infinite if that is not known, or not allowed."""
        device = self.devices[j]
        i = len(device.forwards)
        is_warm = bool(device.inputs) or i < self.warm_up[j]
        if i == self.m or not is_warm:
            return inf
        return self._arrival(self.devices[j - 1].forwards, i) if j else 0.0

    def _inputs(self, j: int) -> float:
        """When the next I can start; infinite if that is not known."""
        i = len(self.devices[j].inputs)
        if i == len(self.devices[j].forwards):
            return inf
        return self._arrival(self.devices[j + 1].inputs, i) if j < len(self.devices) - 1 else 0.0

    def _arrival(self, ends: Sequence[float], i: int) -> float:
        return ends[i] + self.transfer if i < len(ends) else inf
