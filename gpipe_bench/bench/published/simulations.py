"""A published table, simulated row by row with the settings that it was run with, as raw results.

A throughput is that of an epoch with its smaller last mini-batch, as it was printed; shares of time and memory are
those of a whole mini-batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Final

from gpipe_bench.bench.published.values import published_rows
from gpipe_bench.bench.running.simulated import device_records, simulation_facts
from gpipe_bench.bench.storage.raw import RawResult
from gpipe_bench.errors import ConfigError, OutOfMemory
from gpipe_bench.results.configurations import digest
from gpipe_bench.util.nearest import nearest

if TYPE_CHECKING:
    from gpipe_bench.results.rows import Row
    from gpipe_bench.simulator.clock.run import Run
    from gpipe_bench.simulator.published.settings import Setting

_PROFILE: Final = "p40"
_NOT_SIMULATED: Final[dict[str, Any]] = {
    "source": "",
    "throughput_samples_per_s": None,
    "utilization_fraction": None,
    "peak_reserved_gib": None,
}


def simulate_table(table: str, report: Callable[[Row], None] | None = None) -> list[RawResult]:
    """Simulate the rows of a published table; one that does not fit the memory is a row that says so.

    Args:
        table: such as ``unet-speed``.
        report: takes each row as it is made.

    Raises:
        ConfigError: there is no such table.
    """
    from gpipe_bench.simulator.hardware.profile import load_profile
    from gpipe_bench.simulator.published.runs import PublishedRuns
    from gpipe_bench.simulator.published.settings import published_settings

    settings = [setting for setting in published_settings() if setting.table == table]
    printed = [row for row in published_rows() if row.experiment == table]
    if not settings or len(settings) != len(printed):
        known = list(dict.fromkeys(setting.table for setting in published_settings()))
        raise ConfigError([f"table must be one of {', '.join(known)}, got {table!r}; {nearest(table, known)}"])
    runs = PublishedRuns(load_profile(_PROFILE))
    facts = {**simulation_facts(), "torch": version("torch").partition("+")[0]}
    results = []
    for setting, row in zip(settings, printed, strict=True):
        own = replace(row, evidence="simulated", status="ok", reason="", profile=_PROFILE, flavour="published",
                      repeat=0, config_sha256=digest(setting.configuration(_PROFILE)),
                      cell=f"published-{table}-{setting.experiment}", **_NOT_SIMULATED, **facts)  # fmt: skip
        result = _result(setting, own, runs)
        results.append(replace(result, configuration=setting.configuration(_PROFILE)))
        if report:
            report(results[-1].row)
    return results


def _result(setting: Setting, row: Row, runs: Any) -> RawResult:
    try:
        done: Run = runs.run_of(setting, setting.batch_size, memory=True)
    except OutOfMemory as error:
        from gpipe_bench.simulator.clock.simulation import GIB, gib_texts

        asked, capacity = gib_texts((error.reserved + error.needed) / GIB, error.capacity / GIB, 2)
        reason = f"device {error.device} asks for {asked} and has {capacity}"
        return RawResult(row.cell, replace(row, status="oom", reason=reason))
    return RawResult(row.cell, *_values(setting, row, runs, done))


def _values(setting: Setting, row: Row, runs: Any, done: Run) -> tuple[Row, list[dict[str, Any]]]:
    from gpipe_bench.simulator.clock.simulation import GIB, mean_share, step_events, step_uses

    _, length_us = step_events(done)
    uses = step_uses(done, range(setting.partitions))
    speed = runs.throughput(setting, done) if setting.full_steps else setting.batch_size / length_us * 1e6
    row = replace(
        row,
        throughput_samples_per_s=speed,
        step_time_ms=length_us / 1e3,
        peak_allocated_gib=sum(done.peak_allocated_bytes) / GIB,
        peak_reserved_gib=sum(done.peak_reserved_bytes) / GIB,
        utilization_fraction=sum(use.utilization_fraction for use in uses) / len(uses),
        **{name: share for name, share in asdict(mean_share(uses)).items() if name != "compute_fraction"},
    )
    layers = [int(count) for count in row.balance.split("-")] if row.balance else [0]
    return row, device_records(uses, layers)
