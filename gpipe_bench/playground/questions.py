"""What the page of the playground asks: one function, JSON in and out.

    ask('{"ask": "step", "source": "zb_h1", "settings": {"p": 4, "m": 8}}')

The page knows no rule of schedules. A local server, or Python inside the page, hands its questions to :func:`ask`; so
this module and what it imports need the standard library alone.

A source is the name of a schedule, ``searched``, or a schedule as CSV in PyTorch's form. The model is cut into p equal
stages. A schedule with n partitions cuts each stage again: T of a partition is p / n of its stage's T, and so are its
activations. So all schedules train the same model.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from math import isfinite
from statistics import mean
from typing import Any, Final

from gpipe_bench.errors import ScheduleError
from gpipe_bench.schedules import (
    SCHEDULES,
    Action,
    Durations,
    Schedule,
    check,
    exchanged,
    memory,
    moved,
    named_schedule,
    reach,
    read_csv,
    searched,
    timing,
    to_csv,
    with_recomputation,
)
from gpipe_bench.schedules.actions import needs
from gpipe_bench.schedules.cycles import CHECKPOINT_MODES, checkpoint_stop
from gpipe_bench.schedules.table import LOOP, TWO_PER_DEVICE

SEARCHED: Final = "searched"
MOST_ACTIONS: Final = 20_000
"""So many can be drawn and dragged."""

_DIGITS: Final = 5  # half as many letters for the page; no one sees the sixth digit
_TIMES: Final = ("forward", "inputs", "weights")
_EXCHANGED: Final = {"all": "FRBIW", "forward": "F", "backward": "RBIW"}


@dataclass(frozen=True)
class Settings:
    """What the controls of the page say. Times are of a stage, 1 / p of the model: one for all stages, or one for each.

    Attributes:
        p: devices, and stages.
        m: micro-batches.
        forward: T_F.
        inputs: T_B, of the gradients of inputs.
        weights: T_W, of the gradients of weights.
        transfer: from the end of an action until another device has its result.
        limit: what a device may hold, in activations of a stage.
        checkpoint: ``never``, ``except_last`` or ``always``.
        kept: the share of the activations that W needs after I.
        boundary: the share of the activations that a checkpoint keeps.
        overlap: what a pair of ``dualpipe_v`` takes over its two actions one after the other.
        per_device: partitions on each device in the schedules of a loop.
    """

    p: int = 4
    m: int = 8
    forward: tuple[float, ...] = (1.0,)
    inputs: tuple[float, ...] = (1.0,)
    weights: tuple[float, ...] = (1.0,)
    transfer: float = 0.0
    limit: float = 4.0
    checkpoint: str = "never"
    kept: float = 0.5
    boundary: float = 0.1
    overlap: float = 1.0
    per_device: int = 2

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Settings:
        """Settings of a question.

        Raises:
            ScheduleError: a name is unknown, or values are out of their ranges; the message names all of them.
        """
        known = [field.name for field in fields(cls)]
        if wrong := [name for name in given if name not in known]:
            raise ScheduleError([f"a setting must be one of {', '.join(known)}, got {wrong[0]!r}; leave it out"])
        values: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in given.items()
        }
        made = cls(**values)
        if problems := [*made._problems()]:
            raise ScheduleError(problems)
        return made

    def _problems(self) -> list[str]:
        found = []
        for name in ("p", "m", "per_device"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                found.append(f"{name} must be a whole number of at least 1, got {value!r}; use 1 or more")
        if not found and 6 * self.m * self.p * self.per_device > MOST_ACTIONS:
            found.append(f"p and m must be small enough to draw, got {self.p} and {self.m}; lower one")
        for name in _TIMES:
            times = getattr(self, name)
            if not isinstance(times, tuple) or len(times) not in (1, self.p) or not all(map(_is_time, times)):
                got = " ".join(map(str, times)) if isinstance(times, tuple) else repr(times)
                rule = f"must be one time of 0 or more, or one for each of {self.p} stages"
                found.append(f"{name} {rule}, got {got}; correct it")
        found += [
            f"{name} must be a number of 0 or more, got {getattr(self, name)!r}; correct it"
            for name in ("transfer", "limit", "overlap")
            if not _is_time(getattr(self, name))
        ]
        found += [
            f"{name} must be a share from 0 to 1, got {getattr(self, name)!r}; correct it"
            for name in ("kept", "boundary")
            if not _is_time(getattr(self, name)) or getattr(self, name) > 1
        ]
        if self.checkpoint not in CHECKPOINT_MODES:
            rule = f"checkpoint must be one of {', '.join(CHECKPOINT_MODES)}"
            found.append(f"{rule}, got {self.checkpoint!r}; use one of them")
        return found

    def durations(self, n: int) -> list[Durations]:
        """Those of each of n partitions: of its stage, p / n."""
        p = self.p
        stages = [getattr(self, name) * (p // len(getattr(self, name))) for name in _TIMES]
        return [Durations(*(times[j * p // n] * p / n for times in stages)) for j in range(n)]


def _is_time(value: object) -> bool:
    return type(value) in (int, float) and isfinite(value) and value >= 0  # type: ignore[arg-type,operator]


@lru_cache(maxsize=256)
def _schedule(source: str, s: Settings) -> Schedule:
    """The schedule of a source; one that somebody wrote is checked."""
    if source == SEARCHED:
        means = Durations(*(mean(getattr(s, name)) for name in _TIMES))
        return _search(s.m, s.p, s.limit, means, transfer=s.transfer, kept=s.kept)
    if source in SCHEDULES:
        per_device = (s.per_device if source in LOOP else 2) if source in TWO_PER_DEVICE else 1
        return _named(source, s.m, s.p, per_device)
    found = _read(source)
    if len(found.devices) != s.p or found.microbatches != s.m:
        got = f"{len(found.devices)} devices and {found.microbatches} micro-batches"
        rule = f"your schedule must be for {s.p} devices and {s.m} micro-batches"
        raise ScheduleError([f"{rule}, got {got}; set p and m"])
    return found


@lru_cache(maxsize=64)
def _search(m: int, p: int, limit: float, durations: Durations, **more: float) -> Schedule:
    return searched(m, p, max(limit, 1), durations, **more)


@lru_cache(maxsize=256)
def _named(name: str, m: int, p: int, per_device: int) -> Schedule:
    return named_schedule(name, m, p * per_device, p)


@lru_cache(maxsize=64)
def _read(text: str) -> Schedule:
    found = check(read_csv(text)).schedule
    if 2 * sum(map(len, found.devices)) > MOST_ACTIONS:
        got = f"{sum(map(len, found.devices))} actions"
        raise ScheduleError([f"a schedule must be small enough to draw, got {got}; use fewer micro-batches"])
    return found


def _with_checkpoints(source: str, s: Settings) -> Schedule:
    plain = _schedule(source, s)
    stop = checkpoint_stop(s.checkpoint, plain.microbatches)
    return with_recomputation(plain, stop) if stop else plain


@lru_cache(maxsize=256)
def _step(source: str, s: Settings) -> dict[str, Any]:
    schedule = _with_checkpoints(source, s)
    n, size = schedule.partitions, s.p / schedule.partitions
    # A pair that takes as long as its actions is drawn as two.
    times = timing(schedule, s.durations(n), s.transfer, s.overlap if s.overlap != 1 else None)
    rows, peaks = [], []
    for row, held in zip(schedule.devices, memory(schedule, s.kept, s.boundary), strict=True):
        peaks.append(size * max((one.during for one in held), default=0.0))
        rows.append(
            {
                "kinds": "".join(action.kind for action in row),
                "i": [action.i for action in row],
                "j": [action.j for action in row],
                "start": [round(times.start[action], _DIGITS) for action in row],
                "end": [round(times.end[action], _DIGITS) for action in row],
                "during": [round(size * one.during, _DIGITS) for one in held],
                "after": [round(size * one.after, _DIGITS) for one in held],
            }
        )
    homes = schedule.placement
    return {
        "rows": rows,
        "parts": [sum(homes[k] == homes[j] for k in range(j)) for j in range(n)],
        "makespan": round(times.makespan, _DIGITS),
        "bubble": round(times.bubble, _DIGITS),
        "peaks": [round(peak, _DIGITS) for peak in peaks],
        "peak": round(max(peaks), _DIGITS),
        "fits": max(peaks) <= s.limit + 1e-9,
    }


def names(_: Settings) -> dict[str, Any]:
    """The sources that have a name; the settings do not matter."""
    return {"names": [*SCHEDULES, SEARCHED]}


def step(s: Settings, source: str) -> dict[str, Any]:
    """One step: when each action runs, what each device holds, the bubble, and whether it fits the limit."""
    return _step(source, s)


def summary(s: Settings, sources: Sequence[str]) -> dict[str, Any]:
    """The fastest step that fits, those that no other one beats in time and memory, and the one with least memory."""
    found = {source: _step(source, s) for source in sources}
    order = sorted(sources, key=lambda one: (found[one]["makespan"], found[one]["peak"]))
    front: list[str] = []
    for one in order:
        if not front or found[one]["peak"] < found[front[-1]]["peak"]:
            front.append(one)
    best = next((one for one in order if found[one]["fits"]), None)
    return {"best": best, "front": front, "least": min(order, key=lambda one: found[one]["peak"], default=None)}


def move(s: Settings, source: str, place: Sequence[int], to: Sequence[int]) -> dict[str, Any]:
    """The schedule with one action taken from (device, position) to another one; positions count without R."""
    return {"csv": to_csv(moved(_schedule(source, s), _place(place), _place(to)))}


def exchange(s: Settings, source: str, one: int, other: int, passes: str = "all") -> dict[str, Any]:
    """The schedule with two micro-batches exchanged on all devices: all of their passes, or those of one direction."""
    return {"csv": to_csv(exchanged(_schedule(source, s), one, other, _EXCHANGED[passes]))}


def may_move(s: Settings, source: str, place: Sequence[int]) -> dict[str, Any]:
    """The first and last position of its device that an action may move to."""
    first, last = reach(_schedule(source, s), _place(place))
    return {"first": first, "last": last}


def why(s: Settings, source: str, action: Sequence[Any]) -> dict[str, Any]:
    """What an action waits for, and what waits for it."""
    schedule = _with_checkpoints(source, s)
    one, there, n = Action(*action), set(schedule), schedule.partitions
    before = [other for group in needs(one, n) for other in group if other in there]
    after = [other for other in schedule if any(one in group for group in needs(other, n))]
    return {"before": before, "after": after}


def csv(s: Settings, source: str) -> dict[str, Any]:
    """The schedule as text in PyTorch's form."""
    return {"csv": to_csv(_schedule(source, s))}


def read(_: Settings, text: str) -> dict[str, Any]:
    """A schedule that somebody wrote, checked, and for how many devices and micro-batches it is."""
    found = _read(text)
    return {"csv": to_csv(found), "p": len(found.devices), "m": found.microbatches}


def _place(given: Sequence[int]) -> tuple[int, int]:
    device, k = given
    return device, k


_ANSWERS: Final[Mapping[str, Callable[..., dict[str, Any]]]] = {
    "names": names,
    "step": step,
    "summary": summary,
    "move": move,
    "exchange": exchange,
    "reach": may_move,
    "why": why,
    "csv": csv,
    "read": read,
}


def ask(text: str) -> str:
    """The answer to a question of the page, as JSON; ``{"problems": [...]}`` where the package refuses.

    Args:
        text: an object with ``ask``, the name of a question, and its arguments; ``settings`` are those of
            :class:`Settings`.
    """
    try:
        wanted = json.loads(text)
        settings = Settings.of(wanted.pop("settings", {}))
        return json.dumps(_ANSWERS[wanted.pop("ask")](settings, **wanted), separators=(",", ":"))
    except ScheduleError as error:
        return json.dumps({"problems": error.problems}, separators=(",", ":"))
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        problem = f"a question must be one of the page, got {error!r}; reload the page"
        return json.dumps({"problems": [problem]}, separators=(",", ":"))
