"""Schedules as arrays: the list of actions of each host thread."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import accumulate
from operator import itemgetter

from gpipe_bench.schedules import Action, Schedule, merged_order, named_schedule, with_recomputation
from gpipe_bench.schedules.table import placement
from gpipe_bench.simulator.clock.shared import ACTIONS


def chosen_schedule(schedule: str | Schedule, m: int, n: int, devices: Sequence[int]) -> Schedule:
    """A schedule by its name, or as it is.

    Args:
        schedule: either.
        m: micro-batches.
        n: partitions.
        devices: of each partition; empty: as the schedule has them. They say on how many devices a schedule of a loop
            is; on a single one, or where none is given, it has two partitions on each device.

    Raises:
        ScheduleError: there is no such schedule, or not for these numbers.
        ValueError: the schedule is for other numbers.
    """
    if isinstance(schedule, str):
        several = len(set(devices)) if len(set(devices)) > 1 else None
        schedule = named_schedule(schedule, m, n, max(placement(schedule, n, several)) + 1)
    elif (schedule.microbatches, schedule.partitions) != (m, n):
        got = f"{schedule.microbatches} micro-batches and {schedule.partitions} partitions"
        raise ValueError(f"schedule must be for {m} micro-batches and {n} partitions, got one for {got}; change it")
    return schedule


def check_devices(rows: Sequence[int], devices: Sequence[int]) -> None:
    """Check that partitions which a schedule has on one device are on one.

    Args:
        rows: for each partition its device of the schedule.
        devices: of each partition.

    Raises:
        ValueError: they are not.
    """
    first: dict[int, int] = {}
    for j, (row, device) in enumerate(zip(rows, devices, strict=True)):
        one = first.setdefault(row, j)
        if devices[one] != device:
            rule = f"devices must be the same for partitions {one} and {j}, which the schedule has on one device"
            raise ValueError(f"{rule}, got {devices[one]} and {device}; use {[*rows]}")


def lists_of(
    schedule: Schedule, placement: Sequence[int], groups: Sequence[int], ahead: int
) -> tuple[list[Sequence[Action]], int]:
    """The actions of each group of partitions, those of the first partition first.

    Args:
        schedule: any schedule.
        placement: its device of each partition.
        groups: the group of each partition.
        ahead: how many micro-batches are recomputed ahead of their gradients, the first ones.

    Returns:
        The lists, and how many micro-batches are recomputed before their B or I in addition.
    """
    rows: dict[int, set[int]] = {group: set() for group in groups}
    for row, group in zip(placement, groups, strict=True):
        rows[group].add(row)
    if all(len(found) == 1 for found in rows.values()):
        return [schedule.devices[found.pop()] for found in rows.values()], ahead
    # In one order of all actions, recomputations have a place of their own.
    lists: dict[int, list[Action]] = {group: [] for group in rows}
    for action in merged_order(with_recomputation(schedule, ahead)):
        lists[groups[action.j]].append(action)
    return [*lists.values()], 0


def list_rows(lists: Sequence[Sequence[Action]]) -> dict[str, Sequence[int]]:
    """The columns of some lists, see ``table.h``."""
    kinds, microbatches, partitions = array("b"), array("i"), array("i")
    for actions in lists:
        kinds.extend(map(ACTIONS.__getitem__, map(itemgetter(0), actions)))
        microbatches.extend(map(itemgetter(1), actions))
        partitions.extend(map(itemgetter(2), actions))
    first = [0, *accumulate(map(len, lists))]
    return {"list_first": first, "action_kind": kinds, "action_i": microbatches, "action_j": partitions}
