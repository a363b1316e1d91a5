"""The measurement of one cell on real devices.

Each quantity is taken in steps of its own, in this order:

    warm-up     untimed
    timed       every device synchronised before each reading of the clock; nothing else runs. Before each step,
                and after the last one, other cells can have their turn
    utilisation accelerators: the driver is sampled for some seconds
    timeline    three steps under a recorder; the one of median length is kept
    memory      CPU: one step in which every tensor is counted

Several processes do the same together. The time of a step is that on rank 0: each step ends when all have told it so.
The peaks of an accelerator's allocator cost nothing to keep: they cover warm-up and timed steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from statistics import median
from typing import Any, Final

from gpipe_bench.measure.clock import synchronize, timed
from gpipe_bench.measure.environment import environment_facts
from gpipe_bench.measure.memory import LiveBytes, has_memory_statistics, peak_memory, reset_peak_memory
from gpipe_bench.measure.rank_clock import offset_to_first, one_record
from gpipe_bench.measure.timeline import Recorder
from gpipe_bench.measure.utilization import NvmlUtilization, busy_share
from gpipe_bench.results.breakdown import Breakdown, mean_breakdown, split_device_time
from gpipe_bench.results.timeline import TimelineEvent
from gpipe_bench.schedules.table import shared_devices
from gpipe_bench.suite.cells import MeasuredCell
from gpipe_bench.suite.running.ranks import Ranks, joined
from gpipe_bench.suite.running.run import Pieces
from gpipe_bench.suite.running.trial import Trial, prepare_process
from gpipe_bench.suite.storage.raw import SHARES, RawResult, cell_row

_GIB: Final = 2**30
_TIMELINE_STEPS: Final = 3
# The driver averages over up to a second: shorter records are noise.
_SAMPLED_S: Final = 2.0

Peaks = list[tuple[float | None, float | None]]
"""For each partition GiB allocated and reserved; None where they stand with another partition or are not known."""


def measure_cell(cell: MeasuredCell, repeat: int) -> Pieces:
    """Build, warm up and measure ``cell``; one of several processes measures its part, and has the result of all.

    Yields before each timed step and after the last one.

    Raises:
        BalanceError, DeviceCountError: the cell does not fit the model or the machine.
        Exception: whatever the run raises, out of memory included.
    """
    prepare_process(cell)
    with joined(cell) as ranks:
        return (yield from _measured(cell, repeat, ranks))


def _measured(cell: MeasuredCell, repeat: int, ranks: Ranks) -> Pieces:
    facts = environment_facts(cell.partition_devices(), cell.hosts)
    trial = Trial(cell, ranks)
    counted = all(has_memory_statistics(device) for device in trial.devices)
    if counted:
        reset_peak_memory(trial.devices)
    for _ in range(cell.warmup):
        trial.step()
    own: list[float] = []
    for _ in range(cell.steps):
        yield
        own += timed(trial.step, trial.devices, steps=1, warmup=0)
    yield
    seconds = ranks.gather(own)[0]
    held = [ranks.size == 1 or rank == ranks.rank for rank in cell.placement]
    peaks = _allocator_peaks(trial, held) if counted else None
    sampled = ranks.gather(_sampled_utilization(trial, median(seconds)))
    events, error_us = _timeline(trial, ranks)
    shares = split_device_time(events, cell.placement, *_window(events))
    if not peaks:
        with LiveBytes(trial.pipe) as live, trial.pipe.observe(live):
            trial.step()
        peaks = [(peak / _GIB, None) for peak in live.peak_bytes]
    peaks = ranks.owners(peaks, cell.placement)
    row = cell_row(
        cell,
        repeat,
        balance="-".join(map(str, trial.pipe.balance)),
        throughput_samples_per_s=cell.batch_size / median(seconds),
        step_time_ms=median(seconds) * 1e3,
        peak_allocated_gib=_total(allocated for allocated, _ in peaks),
        peak_reserved_gib=_total(reserved for _, reserved in peaks),
        utilization_fraction=busy_share(shares) if None in sampled else (_total(sampled) or 0.0) / len(sampled),
        **{name: share for name, share in asdict(mean_breakdown(shares)).items() if name != "compute_fraction"},
        clock_error_us=error_us,
        **facts,
    )
    steps = [
        {"step": k, "step_time_ms": s * 1e3, "throughput_samples_per_s": cell.batch_size / s}
        for k, s in enumerate(seconds)
    ]
    devices = _device_records(cell, trial.pipe.balance, [shares[rank] for rank in cell.placement], peaks)
    timeline = [event.to_dict() for event in events]
    return RawResult(cell.id, row, devices, steps, timeline, cell.configuration)


def _allocator_peaks(trial: Trial, own: Sequence[bool]) -> Peaks:
    """Peaks of own partitions. One of a device that several share stands with the first, so that a column is summed."""
    peaks = {peak.device: peak for peak in peak_memory(trial.devices)}
    found: Peaks = []
    for device, mine in zip(trial.devices, own, strict=True):
        peak = peaks.pop(str(device), None) if mine else None
        found.append((None, None) if peak is None else (peak.allocated_bytes / _GIB, peak.reserved_bytes / _GIB))
    return found


def _sampled_utilization(trial: Trial, step_s: float) -> float | None:
    """What the driver says of the devices; None where there is no driver to ask."""
    if all(device.type == "cpu" for device in trial.devices):
        return None
    with NvmlUtilization(trial.devices) as sampler:
        for _ in range(math.ceil(_SAMPLED_S / step_s)):
            trial.step()
        synchronize(trial.devices)
    return sampler.utilization_fraction


def _timeline(trial: Trial, ranks: Ranks) -> tuple[list[TimelineEvent], float | None]:
    """Events of one step on the clock of rank 0, and by how many microseconds clocks of others may be off."""
    clock = offset_to_first(ranks.rank, ranks.size)
    records: list[list[TimelineEvent]] = []
    for _ in range(_TIMELINE_STEPS):
        synchronize(trial.devices)
        recorder = Recorder()
        with trial.pipe.observe(recorder):
            trial.step()
        records.append(one_record(ranks.gather((recorder.zero_ns - clock.offset_ns, recorder.events()))))
    error_us = max(error_ns for _, error_ns in ranks.gather(clock)) / 1e3
    windows = [_window(events) for events in records]
    middle = sorted(range(_TIMELINE_STEPS), key=lambda k: windows[k][1] - windows[k][0])[_TIMELINE_STEPS // 2]
    return records[middle], error_us if ranks.size > 1 else None


def _window(events: Sequence[TimelineEvent]) -> tuple[float, float]:
    """From the issue of the first task to the end of the last: the pipeline's part of a step, without optimizer."""
    return min(min(e.issue_us, e.start_us) for e in events), max(e.end_us for e in events)


def _total(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _device_records(
    cell: MeasuredCell, balance: Sequence[int], shares: Sequence[Breakdown], peaks: Peaks
) -> list[dict[str, Any]]:
    devices = cell.partition_devices()
    shared = shared_devices(cell.schedule_devices, cell.devices)
    return [
        {
            "device_index": shared[cell.placement[j]],
            "partition": j,
            "device": devices[j],
            "layers": balance[j],
            "peak_allocated_gib": peaks[j][0],
            "peak_reserved_gib": peaks[j][1],
            **{name: getattr(share, name) for name in SHARES},
        }
        for j, share in enumerate(shares)
    ]
