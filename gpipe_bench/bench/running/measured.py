"""The measurement of one cell on real devices.

Each quantity is taken in steps of its own, in this order:

    warm-up     untimed
    timed       every device synchronised before each reading of the clock; nothing else runs
    utilisation accelerators: the driver is sampled for some seconds
    timeline    three steps under a recorder; the one of median length is kept
    memory      CPU: one step in which every tensor is counted

The peaks of an accelerator's allocator cost nothing to keep: they cover warm-up and timed steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from statistics import median
from typing import Any, Final

from gpipe_bench.bench.running.trial import Trial, prepare_process
from gpipe_bench.bench.spec.cells import Cell
from gpipe_bench.bench.storage.raw import DEVICE_COLUMNS, RawResult, cell_row
from gpipe_bench.breakdown import Breakdown, mean_breakdown, split_device_time
from gpipe_bench.measure.clock import synchronize, timed
from gpipe_bench.measure.environment import environment_facts
from gpipe_bench.measure.memory import LiveBytes, has_memory_statistics, peak_memory, reset_peak_memory
from gpipe_bench.measure.timeline import Recorder
from gpipe_bench.measure.utilization import NvmlUtilization, busy_share
from gpipe_bench.timeline import TimelineEvent

_GIB: Final = 2**30
_TIMELINE_STEPS: Final = 3
# The driver averages over up to a second: shorter records are noise.
_SAMPLED_S: Final = 2.0

Peaks = list[tuple[float | None, float | None]]
"""For each partition GiB allocated and reserved; None where they stand with another partition or are not known."""


def measure_cell(cell: Cell, repeat: int) -> RawResult:
    """Build, warm up and measure ``cell``.

    Raises:
        BalanceError, DeviceCountError: the cell does not fit the model or the machine.
        Exception: whatever the run raises, out of memory included.
    """
    prepare_process(cell)
    facts = environment_facts(cell.placement())
    trial = Trial(cell)
    counted = all(has_memory_statistics(device) for device in trial.devices)
    if counted:
        reset_peak_memory(trial.devices)
    seconds = timed(trial.step, trial.devices, steps=cell.steps, warmup=cell.warmup)
    peaks = _allocator_peaks(trial) if counted else None
    sampled = _sampled_utilization(trial, median(seconds))
    events = _timeline(trial)
    homes = cell.homes()
    shares = _shares(events, homes)
    peaks = peaks or _counted_peaks(trial)
    row = cell_row(
        cell,
        repeat,
        balance="-".join(map(str, trial.pipe.balance)),
        throughput_samples_per_s=cell.batch_size / median(seconds),
        step_time_ms=median(seconds) * 1e3,
        peak_allocated_gib=_total(allocated for allocated, _ in peaks),
        peak_reserved_gib=_total(reserved for _, reserved in peaks),
        utilization_fraction=busy_share(shares) if sampled is None else sampled,
        **{name: share for name, share in asdict(mean_breakdown(shares)).items() if name != "compute_fraction"},
        **facts,
    )
    steps = [
        {"step": k, "step_time_ms": s * 1e3, "throughput_samples_per_s": cell.batch_size / s}
        for k, s in enumerate(seconds)
    ]
    devices = _device_records(trial, [shares[k] for k in homes], peaks)
    timeline = [event.to_dict() for event in events]
    return RawResult(cell.id, row, devices, steps, timeline, cell.configuration)


def _allocator_peaks(trial: Trial) -> Peaks:
    """A device that several partitions share stands with the first of them, so that a column can be summed."""
    peaks = {peak.device: peak for peak in peak_memory(trial.devices)}
    found: Peaks = []
    for device in trial.devices:
        peak = peaks.pop(str(device), None)
        found.append((None, None) if peak is None else (peak.allocated_bytes / _GIB, peak.reserved_bytes / _GIB))
    return found


def _counted_peaks(trial: Trial) -> Peaks:
    with LiveBytes(trial.pipe) as live, trial.pipe.observe(live):
        trial.step()
    return [(peak / _GIB, None) for peak in live.peak_bytes]


def _sampled_utilization(trial: Trial, step_s: float) -> float | None:
    """What the driver says of the devices; None where there is no driver to ask."""
    if all(device.type == "cpu" for device in trial.devices):
        return None
    with NvmlUtilization(trial.devices) as sampler:
        for _ in range(math.ceil(_SAMPLED_S / step_s)):
            trial.step()
        synchronize(trial.devices)
    return sampler.utilization_fraction


def _timeline(trial: Trial) -> list[TimelineEvent]:
    records: list[list[TimelineEvent]] = []
    for _ in range(_TIMELINE_STEPS):
        synchronize(trial.devices)
        recorder = Recorder()
        with trial.pipe.observe(recorder):
            trial.step()
        records.append(recorder.events())
    return sorted(records, key=_span_us)[_TIMELINE_STEPS // 2]


def _shares(events: Sequence[TimelineEvent], homes: Sequence[int]) -> list[Breakdown]:
    """The breakdown of each device of the schedule, whose partitions take turns."""
    own = [replace(event, partition=homes[event.partition]) for event in events]
    return split_device_time(own, max(homes) + 1, *_window(events))


def _span_us(events: Sequence[TimelineEvent]) -> float:
    start_us, end_us = _window(events)
    return end_us - start_us


def _window(events: Sequence[TimelineEvent]) -> tuple[float, float]:
    """From the issue of the first task to the end of the last: the pipeline's part of a step, without optimizer."""
    return min(min(e.issue_us, e.start_us) for e in events), max(e.end_us for e in events)


def _total(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _device_records(trial: Trial, shares: Sequence[Breakdown], peaks: Peaks) -> list[dict[str, Any]]:
    return [
        {
            "partition": j,
            "device": str(trial.devices[j]),
            "layers": trial.pipe.balance[j],
            "peak_allocated_gib": peaks[j][0],
            "peak_reserved_gib": peaks[j][1],
            **{name: getattr(share, name) for name in DEVICE_COLUMNS[5:]},
        }
        for j, share in enumerate(shares)
    ]
