"""The schedules by name, and those in CSV files, by their path."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Final, Literal, get_args

from gpipe_bench.errors import DeviceCountError, ScheduleError
from gpipe_bench.schedules.actions import Schedule
from gpipe_bench.schedules.check import check
from gpipe_bench.schedules.dual_pipe import dualpipe_v
from gpipe_bench.schedules.one_f_one_b import gpipe, interleaved, looped_bfs, one_f_one_b
from gpipe_bench.schedules.search import zb_1p, zb_2p
from gpipe_bench.schedules.torch_csv import read_csv
from gpipe_bench.schedules.v_shape import v_half, v_min, zb_v
from gpipe_bench.schedules.zero_bubble import interleaved_zb, zb_h1, zb_h2

ScheduleName = Literal[
    "gpipe",
    "1f1b",
    "zb_h1",
    "zb_h2",
    "zb_1p",
    "zb_2p",
    "looped_bfs",
    "interleaved",
    "interleaved_zb",
    "zb_v",
    "v_half",
    "v_min",
    "dualpipe_v",
]

SCHEDULES: Final[tuple[str, ...]] = get_args(ScheduleName)
"""Names of the schedules."""

_LINE: Final[Mapping[str, Callable[[int, int], Schedule]]] = MappingProxyType(
    {"gpipe": gpipe, "1f1b": one_f_one_b, "zb_h1": zb_h1, "zb_h2": zb_h2, "zb_1p": zb_1p, "zb_2p": zb_2p}
)
"""A partition on each device, called with (m, n)."""

_LOOP: Final[Mapping[str, Callable[[int, int, int], Schedule]]] = MappingProxyType(
    {"looped_bfs": looped_bfs, "interleaved": interleaved, "interleaved_zb": interleaved_zb}
)
"""Partition j on device j mod p, called with (m, n, p)."""

_V: Final[Mapping[str, Callable[[int, int], Schedule]]] = MappingProxyType(
    {"zb_v": zb_v, "v_half": v_half, "v_min": v_min, "dualpipe_v": dualpipe_v}
)
"""Partitions j and 2 p - 1 - j on one device, called with (m, p)."""

LOOP: Final = tuple(_LOOP)
"""Schedules that take any number of partitions on each device, partition j on device j mod p."""

TWO_PER_DEVICE: Final = (*LOOP, *_V)
"""Schedules that put two partitions on each device; those of a loop may put more."""


def is_schedule_file(name: object) -> bool:
    """Whether this is the path of a CSV file, and not the name of a schedule."""
    return isinstance(name, str) and name.endswith(".csv")


def file_schedule(path: str) -> Schedule:
    """The schedule in a CSV file, proved to run.

    Raises:
        ScheduleError: there is no such file, it has fields that are no actions, or the schedule cannot run.
    """
    try:
        return _read(path, Path(path).stat().st_mtime_ns)
    except OSError as error:
        rule = f"schedule must be one of {', '.join(SCHEDULES)}, or a CSV file that can be read"
        raise ScheduleError([f"{rule}, got {path!r}: {error.strerror}; correct the path"]) from error


@lru_cache(maxsize=64)
def _read(path: str, _stamp: int) -> Schedule:
    return check(read_csv(Path(path).read_text(encoding="utf-8", errors="replace"))).schedule


def device_count(name: str | None, n: int) -> int:
    """On how many devices a schedule by name, or the paper's executor, has n partitions, if nothing else says it."""
    if name is not None and is_schedule_file(name):
        return len(file_schedule(name).devices)
    return -(-n // 2) if name in TWO_PER_DEVICE else n


def partition_count(name: str | None, devices: int) -> int:
    """How many partitions a schedule by name, or the paper's executor, has on so many devices; a file says it."""
    if name is not None and is_schedule_file(name):
        return file_schedule(name).partitions
    return devices * 2 if name in TWO_PER_DEVICE else devices


def placement(schedule: str | Schedule | None, n: int, devices: int | None = None) -> tuple[int, ...]:
    """For each of n partitions its device of the schedule, counted from 0.

    Args:
        schedule: a name, a schedule, or None for the paper's executor.
        n: partitions.
        devices: how many there are; only the schedules of a loop depend on it. None: a device for two partitions.

    Raises:
        ScheduleError: there is no such schedule, or not for these numbers.
    """
    if schedule is None or n == 0:
        return tuple(range(n))
    if isinstance(schedule, str) and is_schedule_file(schedule):
        schedule = file_schedule(schedule)
    if isinstance(schedule, Schedule):
        if schedule.partitions != n:
            got = f"one for {schedule.partitions} partitions"
            raise ScheduleError([f"schedule must be for {n} partitions, got {got}; change balance or schedule"])
        return schedule.placement
    if devices is None or schedule in _LINE or (schedule in _V and n % 2 == 0):
        devices = device_count(schedule, n)
    return named_schedule(schedule, 1, n, max(devices, 1)).placement


def check_device_count(rows: Sequence[int], devices: int) -> None:
    """Check that a schedule with several partitions on a device leaves no device without one.

    Args:
        rows: for each partition its device of the schedule, counted from 0.
        devices: how many there are.

    Raises:
        DeviceCountError: some would stay idle.
    """
    n, used = len(rows), max(rows, default=0) + 1
    if used < min(n, devices):
        rule = f"devices must be at most {used} for {n} partitions of a schedule that puts several on each"
        remedy = f"pass {used}, or a balance of {-(-n // used) * devices} partitions"
        raise DeviceCountError(f"{rule}, got {devices}, of which {devices - used} would stay idle; {remedy}")


def shared_devices(wanted: int, devices: int) -> list[int]:
    """Which of ``devices`` devices each of ``wanted`` gets: neighbours share one where there are too few."""
    return [k * min(devices, wanted) // wanted for k in range(wanted)]


def named_schedule(name: str, m: int, n: int, devices: int) -> Schedule:
    """The schedule of that name, or in that file.

    Args:
        name: one of :data:`SCHEDULES`, or the path of a CSV file, whose name ends in ``.csv``; see
            :func:`gpipe_bench.schedules.read_csv`.
        m: micro-batches, at least 1.
        n: partitions: as many as devices; a multiple for those of :data:`LOOP`; twice as many for ``zb_v``, ``v_half``,
            ``v_min`` and ``dualpipe_v``.
        devices: p, at least 1.

    Raises:
        ScheduleError: there is no such schedule, or not for these numbers.
    """
    if is_schedule_file(name):
        found = file_schedule(name)
        numbers = found.microbatches, found.partitions, len(found.devices)
        if numbers != (m, n, devices):
            words = "{} micro-batches and {} partitions on {} devices".format
            rule = f"schedule {name!r} must be for {words(m, n, devices)}, got one for {words(*numbers)}"
            raise ScheduleError([f"{rule}; change chunks, balance or devices"])
        return found
    if name not in SCHEDULES:
        rule = f"schedule must be one of {', '.join(SCHEDULES)}, or a CSV file"
        raise ScheduleError([f"{rule}, got {name!r}; use one of them"])
    if not all(hasattr(number, "__index__") and number >= 1 for number in (m, n, devices)):
        rule = "micro-batches, partitions and devices must be whole numbers of at least 1"
        raise ScheduleError([f"{rule}, got m = {m!r}, n = {n!r}, {devices!r} devices; correct them"])
    if name in _LINE:
        _require(name, n == devices, "as many partitions as devices", n, devices)
        return _LINE[name](m, n)
    if name in _V:
        _require(name, n == 2 * devices, "two partitions for each device", n, devices)
        return _V[name](m, devices)
    _require(name, n % devices == 0, "the same number of partitions for each device", n, devices)
    return _LOOP[name](m, n, devices)


def _require(name: str, holds: bool, rule: str, n: int, devices: int) -> None:
    if not holds:
        got = f"{n} partitions for {devices} devices"
        raise ScheduleError([f"schedule {name!r} must have {rule}, got {got}; change balance or devices"])
